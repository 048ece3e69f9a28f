"""Tables for the terminal and for Markdown, and where a report is written to."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lpes_eval.errors import UserError
from lpes_eval.files import write_atomically

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")
"""What a name must not bring into a terminal, a table or an XML file."""
Rows = Sequence[Sequence[str]]


def plain(text: str) -> str:
    """The text in one line, without control characters."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def markdown(text: str) -> str:
    """The text as Markdown that shows it as it is: no table cell ends in it, no link, image or HTML begins."""
    return re.sub(r"([\\|\[\]`])", r"\\\1", plain(text)).replace("<", "&lt;")


def text_table(header: Sequence[str], rows: Rows) -> str:
    """Lay out a table in columns: the first to the left, the others to the right."""
    header, rows = [plain(cell) for cell in header], [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *(line(row) for row in rows)])


def markdown_table(header: Sequence[str], rows: Rows) -> str:
    """Write the same table in Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), line([":--", *["--:"] * (len(header) - 1)]), *(line(row) for row in rows)])


def score(value: float) -> str:
    """A score as lm-eval prints it, or a dash where there is none."""
    return f"{value:.4f}" if math.isfinite(value) else "–"


def signed(value: float) -> str:
    """A difference of scores."""
    return f"{value:+.4f}" if math.isfinite(value) else "–"


def p_value(value: float) -> str:
    """A p-value, or a dash where nothing was tested."""
    if math.isnan(value):
        return "–"
    if value < 0.0001:
        return f"{value:.1e}"
    return f"{value:.3f}" if value >= 0.01 else f"{value:.4f}"


def finite(value: float) -> float | None:
    """A number for JSON, which knows no NaN and no infinity."""
    return value if math.isfinite(value) else None


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Within it, a reader such as head or less may close the pipe: what else is printed then goes nowhere."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write(target: str, text: str) -> None:
    """Write a report: to standard output for ``-``, to a file otherwise.

    The file that GitHub Actions names in ``GITHUB_STEP_SUMMARY`` is shared by the steps of a job and is appended to.

    Raises:
        UserError: if the file cannot be written.
    """
    if not text.endswith("\n"):
        text += "\n"
    if target == "-":
        with reader_may_leave():
            sys.stdout.write(text)
            sys.stdout.flush()
        return
    try:
        if target == os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(target).open("a", encoding="utf-8") as file:
                file.write(text)
        else:
            write_atomically(target, text)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error}); give another file") from None
