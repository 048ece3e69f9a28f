"""Paired differences between two runs of lm-eval on the same examples, as data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lpes_eval.compare import tables
from lpes_eval.compare.results import Results, mismatch
from lpes_eval.errors import UserError

if TYPE_CHECKING:
    from lpes_eval.compare.statistics import Difference

FEW_QUESTIONS = 50
"""Below this many, the notes say which numbers so few questions do not carry."""


@dataclass
class Row:
    """A paired difference, its label as in ``gate.Row``, and its p-value adjusted over the rows of a comparison."""

    label: str
    difference: Difference
    p_holm: float = math.nan

    @property
    def cells(self) -> tuple[str, ...]:
        """As a table has it: label, both scores, difference, interval, p, adjusted p."""
        d = self.difference
        interval = f"{tables.signed(d.low)} to {tables.signed(d.high)}"
        scores = tables.score(d.a), tables.score(d.b), tables.signed(d.difference)
        return (self.label, *scores, interval, tables.p_value(d.p), tables.p_value(self.p_holm))


@dataclass(frozen=True)
class Section:
    """One metric of one task."""

    task: str
    metric: str
    questions: int
    rows: Sequence[Row]


@dataclass(frozen=True)
class Comparison:
    """Two runs, what differs, and notes for a reader."""

    a: Results
    b: Results
    sections: Sequence[Section]
    notes: Sequence[str]


def compare(a: Results, b: Results, *, prompts_may_differ: bool = False) -> Comparison:
    """Compare two runs, question by question, in a section for each metric of each task that both have.

    Differences are ``b - a``; Holm's adjustment runs over the rows of all sections. ``UserError``: nothing in common,
    other task versions, examples or (unless they may differ) prompts, or no samples logged.
    """
    from lpes_eval.compare.statistics import holm

    notes: list[str] = []
    sections = list(_sections(a, b, _common(a, b, prompts_may_differ), notes))
    if not sections:
        reason = "the tasks in common have no score in common that is an average over single samples"
        raise UserError(f"{a.path} and {b.path}: {reason}")
    if few := sorted({section.questions for section in sections if section.questions < FEW_QUESTIONS}):
        notes.append(
            f"Fewer than {FEW_QUESTIONS} questions ({', '.join(map(str, few))}): p-values of positions and of the mean "
            "are exact, but those of worst and spread may be too small, and their intervals and the mean's too narrow."
        )
    rows = [row for section in sections for row in section.rows]
    for row, adjusted in zip(rows, holm([row.difference.p for row in rows]), strict=True):
        row.p_holm = adjusted
    return Comparison(a, b, sections, notes)


def _common(a: Results, b: Results, prompts_may_differ: bool) -> list[str]:
    """The tasks that both runs have, which must be comparable."""
    common = [name for name in a.tasks if name in b.tasks]
    if not common:
        names = f"{tables.some([*a.tasks])}; {tables.some([*b.tasks])}"
        raise UserError(f"{a.path} and {b.path} have no task in common ({names}); give runs of the same tasks")
    for name in common:
        for unlogged in (run for run in (a, b) if run.tasks[name].documents is None):
            way_out = "run lm_eval with --log_samples and --output_path, and keep the files together"
            raise UserError(f"{unlogged.path}: no samples of {name} beside it; {way_out}")
        if reason := mismatch(a.tasks[name], b.tasks[name], prompts_may_differ=prompts_may_differ):
            hint = "; --other-prompts compares them all the same" if "other prompts" in reason else ""
            raise UserError(f"{name} in {a.path} and {b.path}: {reason}{hint}")
    return common


def _sections(a: Results, b: Results, common: Sequence[str], notes: list[str]) -> Iterator[Section]:
    """A section for each metric that both runs have; ``notes`` are added to."""
    from lpes_eval.compare.statistics import compare_paired

    for side, run in (("A", a), ("B", b)):
        if alone := [name for name in run.tasks if name not in common]:
            notes.append(f"Only in {side}, not compared: {tables.some(alone)}.")
    for name in common:
        for key, metric in a.tasks[name].metrics.items():
            other, shown = b.tasks[name].metrics.get(key), key.removesuffix(",none")
            labels = [label for label in metric.values if other and label in other.values]
            if other is None or not labels or metric.by_question is None or other.by_question is None:
                notes.append(f"{name}, {shown}: not an average of scores of single samples in both; not compared.")
                continue
            up = metric.higher_is_better is not False
            paired = compare_paired(metric.matrix(labels), other.matrix(labels), higher_is_better=up)
            differences = dict(zip(labels, paired.positions, strict=True))
            if len(labels) > 1:
                differences |= {"mean": paired.mean, "worst": paired.worst, "spread": paired.spread}
            yield Section(name, shown, paired.questions, [Row(*row) for row in differences.items()])
