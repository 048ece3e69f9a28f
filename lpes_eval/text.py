"""Text that came from a file stays text wherever it is printed: a function each for a terminal, HTML and Markdown."""

from __future__ import annotations

import json
import re
from typing import Any

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")
"""What a name must not bring into a terminal, a table or an XML file."""
NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""The same but for the ends of lines and tabs, of which a page is full."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def terminal(text: str) -> str:
    """The text in one line, without control characters and halves of surrogate pairs."""
    return CONTROL.sub(UNKNOWN, text)


def html(package: str, template: str, **values: Any) -> str:
    """A page made by a template of a package: every value is escaped; ``value|data`` puts it into a script as JSON."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader(package),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data"] = lambda value: Markup(  # within a script element, where only "<" could end it
        json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    )
    return NO_TEXT.sub(UNKNOWN, environment.get_template(template).render(values))


def markdown(text: str) -> str:
    """The text as Markdown that shows it as it is, in a paragraph, a list item, a heading or a table's cell.

    Nothing in it becomes emphasis, code, a link, an image, a tag, a formula, a list, a mention or another cell.
    """
    text = terminal(text).strip().replace("&", "&amp;").replace("<", "&lt;")
    text = re.sub(r"([\\`*_~|$#\[\]]|^[-+=>]|:(?=//)|(?<=www)\.)", r"\\\1", text, flags=re.IGNORECASE)
    text = re.sub(r"^(\d+)([.)])", r"\1\\\2", text)
    return re.sub(r"@(?=[a-z])", "@&#8288;", text, flags=re.IGNORECASE)  # a mention, or an address of mail
