"""Tables that a program measured, in pages that are written by hand."""

import re

MARKED = re.compile(r"(<!-- numbers: (\w+) -->\n).*?(<!-- /numbers -->)", re.S)


def filled(page: str, texts: dict[str, str]) -> str:
    """The page with each text between ``<!-- numbers: NAME -->`` and ``<!-- /numbers -->``; other names stay."""
    return MARKED.sub(lambda part: f"{part[1]}{texts[part[2]]}\n{part[3]}" if part[2] in texts else part[0], page)
