"""The one form of every report: sections of rows, as text, Markdown, JSON and JUnit XML, and where it is written to."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lpes_eval.errors import UserError, plain
from lpes_eval.files import write_atomically

FORMS = {"json": "JSON, every number in full", "markdown": "Markdown", "junit": "JUnit XML, a test case for each row"}
Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Row:
    """One line of a table: the cells as shown, of which the first names it, and the same facts in full for a program.

    ``outcome`` is ``failure``, ``error``, ``skipped``, or empty where the row passed; ``message`` says why it did not.
    """

    cells: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    outcome: str = ""
    message: str = ""


@dataclass(frozen=True)
class Section:
    """The table of one metric of one task; ``questions`` is None where they are not known one by one.

    ``sides`` says which two runs it is of, where there are more.
    """

    task: str
    metric: str
    questions: int | None
    header: tuple[str, ...]
    rows: tuple[Row, ...]
    sides: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Names the task, the metric and the number of questions."""
        return f"{self.task}, {self.metric}" + (f", {self.questions} questions" if self.questions else "")


@dataclass(frozen=True)
class Report:
    """What a command found: tables, notes for below them, and the answer in one line.

    ``sides`` has what was evaluated in each of the two runs, and its file, by a name such as ``baseline``; ``facts`` is
    what else a program should know, ``flips`` which samples changed their score, a table of texts for each score.
    """

    command: str
    sides: Mapping[str, tuple[str, str]]
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    headline: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    flips: tuple[Section, ...] = ()

    @property
    def rows(self) -> list[Row]:
        """The rows of all sections."""
        return [row for section in self.sections for row in section.rows]

    @property
    def failed(self) -> bool:
        """Whether a row fails."""
        return any(row.outcome == "failure" for row in self.rows)

    def to_text(self) -> str:
        """Lay the report out for a terminal."""
        width = max(map(len, self.sides), default=0)
        sides = [plain(f"{side:<{width}}  {what}: {file}") for side, (what, file) in self.sides.items()]
        tables = [f"{plain(s.title)}\n{text_table(s.header, [row.cells for row in s.rows])}" for s in self.sections]
        flips = [
            f"{plain(s.title)}\n{text_table(s.header, [row.cells for row in s.rows], len(s.header))}"
            for s in self.flips
        ]
        parts = ["\n".join(sides), *tables, "\n".join(map(plain, self.notes)), *flips, self.headline]
        return "\n\n".join(filter(None, parts))

    def to_markdown(self) -> str:
        """Write the report as Markdown, such as for a job summary."""
        parts = ["## " + ": ".join(filter(None, [self.command, self.headline]))]
        parts += ["\n".join(f"* {side}: {markdown(f'{what}: {file}')}" for side, (what, file) in self.sides.items())]
        for section in self.sections:
            table = markdown_table(section.header, [row.cells for row in section.rows])
            parts.append(f"### {markdown(section.title)}\n\n{table}")
        parts.append("\n".join(f"* {markdown(note)}" for note in self.notes))
        for section in self.flips:
            table = markdown_table(section.header, [[*map(markdown, row.cells)] for row in section.rows])
            parts.append(f"<details><summary>{markdown(section.title)}</summary>\n\n{table}\n\n</details>")
        return "\n\n".join(filter(None, parts))

    def to_json(self) -> str:
        """Write the report as JSON; what is not a finite number there is null."""
        sides = {side.lower(): {"results": file, "model": what} for side, (what, file) in self.sides.items()}
        comparisons = [
            {"task": s.task, "metric": s.metric, "questions": s.questions, "rows": [row.facts for row in s.rows]}
            | ({"sides": s.sides} if s.sides else {})
            for s in self.sections
        ]
        data = {**({"headline": self.headline} if self.headline else {}), **sides, **self.facts}
        data |= {"comparisons": comparisons, "notes": self.notes}
        if self.flips:
            data["flips"] = [
                {"task": s.task, "metric": s.metric, "rows": [row.facts for row in s.rows]} for s in self.flips
            ]
        return json.dumps(finite(data), indent=2, allow_nan=False)

    def to_junit(self) -> str:
        """Write the report as JUnit XML: a test case for each row."""
        from xml.etree import ElementTree

        root = ElementTree.Element("testsuites")
        outcomes = [row.outcome for row in self.rows]
        counts = {"failures": "failure", "errors": "error", "skipped": "skipped"}
        numbers = {"tests": len(outcomes)} | {name: outcomes.count(outcome) for name, outcome in counts.items()}
        named = {"name": self.command} | {name: str(number) for name, number in numbers.items()}
        suite = ElementTree.SubElement(root, "testsuite", named)
        for section in self.sections:
            for row in section.rows:
                named = {"classname": plain(f"{section.task}.{section.metric}"), "name": plain(row.cells[0])}
                case = ElementTree.SubElement(suite, "testcase", named)
                if row.outcome:
                    ElementTree.SubElement(case, row.outcome, {"message": plain(row.message)})
        if self.notes:
            ElementTree.SubElement(suite, "system-out").text = "\n".join(map(plain, self.notes))
        ElementTree.indent(root)
        return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def add_outputs(parser: argparse.ArgumentParser, *forms: str) -> None:
    """Add the flags that say in which of ``FORMS`` a report is written, and where."""
    for form in forms:
        what = f"write {FORMS[form]}, to FILE; without FILE, print it"
        parser.add_argument(f"--{form}", nargs="?", const="-", metavar="FILE", help=what)


def publish(report: Report, arguments: argparse.Namespace, *, text: bool = True) -> None:
    """Write a report as the flags of `add_outputs` say, and as text where none of these is printed.

    Raises:
        UserError: if a file cannot be written.
    """
    for form in FORMS:
        if target := getattr(arguments, form, None):
            write(target, getattr(report, f"to_{form}")())
            text = text and target != "-"
    if text:
        write("-", report.to_text())


def markdown(text: str) -> str:
    """The text as Markdown that shows it as it is: no table cell ends in it, no link, image or HTML begins."""
    return re.sub(r"([\\|\[\]`])", r"\\\1", plain(text)).replace("<", "&lt;")


def text_table(header: Sequence[str], rows: Rows, left: int = 1) -> str:
    """Lay out a table in columns: the first ``left`` to the left, the others to the right."""
    lines = [[plain(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = (
        [cell.ljust(widths[i]) if i < left else cell.rjust(widths[i]) for i, cell in enumerate(row)] for row in lines
    )
    return "\n".join("  ".join(row).rstrip() for row in padded)


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
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Within it, a reader such as head may close the pipe: what else is printed then goes nowhere."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _holds_results(path: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes()) if path.is_file() else None
        kinds = {"results", "configs"}, {"tasks", "provenance"}  # as lm-eval writes them, and a baseline
        return isinstance(found, dict) and any(keys <= found.keys() for keys in kinds)
    return False


def write(target: str, text: str) -> None:
    """Write to standard output for ``-``, to a file otherwise.

    The file that GitHub Actions names in ``GITHUB_STEP_SUMMARY`` is shared by the steps of a job and is appended to.

    Raises:
        UserError: if the file cannot be written.
    """
    if target == "-":
        with reader_may_leave():
            print(text, flush=True)
        return
    if _holds_results(Path(target)):
        raise UserError(f"{target}: holds results of lm-eval, which this would replace; give another file")
    try:
        if target == os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(target).open("a", encoding="utf-8") as file:
                print(text, file=file)
        else:
            write_atomically(target, text + "\n")
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error}); give another file") from None
