"""Text that came from a file stays text wherever it is printed: a function each for a terminal and for Markdown."""

import re

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""What a name must not bring into a terminal, a table or an XML file."""


def terminal(text: str) -> str:
    """The text in one line, without control characters and halves of surrogate pairs."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def markdown(text: str) -> str:
    """The text as Markdown that shows it as it is, in a paragraph, a list item, a heading or a table's cell."""
    text = terminal(text).strip().replace("&", "&amp;").replace("<", "&lt;")
    text = re.sub(r"([\\`*_~|$#\[\]]|^[-+=>])", r"\\\1", text)
    text = re.sub(r"(?i)(:)(?=//)|(?<=www)(\.)", r"\\\1\2", text)  # of which GitHub would make links
    text = re.sub(r"(?<=[\w.+-])@", "<!-- -->@", text)
    return re.sub(r"^(\d+)([.)])", r"\1\\\2", text)
