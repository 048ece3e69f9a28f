"""How results are laid out: tables as text and as Markdown."""

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lpes_eval import files
from lpes_eval.text import markdown, terminal

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Table:
    """A table of texts, the first ``left`` columns to the left, the others to the right."""

    title: str
    header: tuple[str, ...]
    rows: Rows
    left: int = 1

    def to_text(self) -> str:
        """For a terminal."""
        lines = [[terminal(cell) for cell in row] for row in (self.header, *self.rows)]
        for number, column in enumerate(zip(*lines, strict=True)):
            width = max(map(len, column))
            for row in lines:
                row[number] = row[number].ljust(width) if number < self.left else row[number].rjust(width)
        rule = ["-" * len(cell) for cell in lines[0]]
        return "\n".join([terminal(self.title), *("  ".join(row).rstrip() for row in (lines[0], rule, *lines[1:]))])

    def to_markdown(self) -> str:
        """In Markdown, without the title."""
        rows = [[*map(markdown, row[: self.left]), *row[self.left :]] for row in self.rows]
        return markdown_table(self.header, rows)


@dataclass(frozen=True)
class Page:
    """What a command prints: runs (what was evaluated, and its file) by their names, tables, notes, tables of flips."""

    command: str
    sides: Mapping[str, tuple[str, str]]
    tables: Sequence[Table]
    notes: Sequence[str]
    headline: str = ""
    flips: Sequence[Table] = ()

    def to_text(self) -> str:
        """Lay it out for a terminal."""
        width = max(map(len, self.sides), default=0)
        sides = [terminal(f"{side:<{width}}  {what}: {file}") for side, (what, file) in self.sides.items()]
        tables, flips = ([table.to_text() for table in group] for group in (self.tables, self.flips))
        parts = ["\n".join(sides), *tables, "\n".join(map(terminal, self.notes)), *flips, self.headline]
        return "\n\n".join(filter(None, parts)) + "\n"

    def to_markdown(self) -> str:
        """Write it as Markdown, such as for a job summary."""
        parts = [f"<!-- {files.marker(self.command)} -->"]
        parts += ["## " + ": ".join(filter(None, [self.command, self.headline]))]
        parts += ["\n".join(f"* {side}: {markdown(f'{what}: {file}')}" for side, (what, file) in self.sides.items())]
        parts += [f"### {markdown(table.title)}\n\n{table.to_markdown()}" for table in self.tables]
        parts += ["\n".join(f"* {markdown(note)}" for note in self.notes)]
        for table in self.flips:
            summary = f"<details><summary>{markdown(table.title)}</summary>"
            parts.append(f"{summary}\n\n{table.to_markdown()}\n\n</details>")
        return "\n\n".join(filter(None, parts)) + "\n"


def _is_same(a: str, b: str) -> bool:
    """Whether two paths name the same file, by whatever links."""
    are_there = os.path.exists(a) and os.path.exists(b)
    return os.path.samefile(a, b) if are_there else os.path.realpath(a) == os.path.realpath(b)


def publish(page: Page, markdown_file: str | None) -> None:
    """Print a page, and write it as Markdown into a file that is named; a GitHub job's summary is added to."""
    summary = os.environ.get("GITHUB_STEP_SUMMARY", "")
    if markdown_file and summary and _is_same(markdown_file, summary):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(page.to_markdown())
    elif markdown_file:
        files.write_output(markdown_file, page.to_markdown(), files.marker(page.command))
    print(page.to_text(), end="")


def markdown_table(header: Sequence[str], rows: Rows) -> str:
    """Write the same table in Markdown; the cells may hold markup, and bars, escaped or not."""
    lines = (header, [":--", *["--:"] * (len(header) - 1)], *rows)
    return "\n".join("| " + " | ".join(re.sub(r"(?<!\\)\|", r"\|", cell) for cell in cells) + " |" for cells in lines)


def some(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
    return f"{value:.3f}" if value >= 0.01 else f"{value:.4f}" if value >= 0.0001 else f"{value:.1e}"


def finite(value: Any) -> Any:
    """The value for JSON, which knows no NaN and no infinity: these become None, however deep they stand."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Within it, a reader such as head may close the pipe: what else is printed then goes nowhere."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
