"""Paired differences between runs of lm-eval on the same examples, as data."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from string import ascii_uppercase as LETTERS
from typing import TYPE_CHECKING

from lpes_eval.compare import tables
from lpes_eval.compare.results import Results, mismatch
from lpes_eval.errors import UserError

if TYPE_CHECKING:
    from lpes_eval.compare.statistics import Difference

FEW_QUESTIONS = 50
"""Below this many, the notes say which numbers so few questions do not carry."""


@dataclass(frozen=True)
class Row:
    """One quantity of a metric in two runs: its label (``"50 %"``, ``"mean"``, ``"worst"``, ``"spread"``, or ``"all"``
    where there are no positions), the paired difference, and its p-value adjusted over the rows of a comparison.
    """

    label: str
    difference: Difference
    p_holm: float

    @property
    def cells(self) -> tuple[str, ...]:
        """As a table has it: label, both scores, difference, interval, p, adjusted p."""
        d = self.difference
        interval = f"{tables.signed(d.low)} to {tables.signed(d.high)}"
        scores = tables.score(d.a), tables.score(d.b), tables.signed(d.difference)
        return (self.label, *scores, interval, tables.p_value(d.p), tables.p_value(self.p_holm))


@dataclass(frozen=True)
class Section:
    """One metric of one task in two runs, which ``runs`` names by their letters."""

    task: str
    metric: str
    runs: tuple[str, str]
    questions: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Comparison:
    """Runs by letter, the first of them A; the differences of each other one from A; and notes for a reader."""

    runs: Mapping[str, Results]
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    confidence: float

    @property
    def rows(self) -> list[Row]:
        """The rows of all sections."""
        return [row for section in self.sections for row in section.rows]

    def first_metrics(self) -> dict[tuple[str, str], str]:
        """Of each run (by its letter) and each task, the first metric."""
        first: dict[tuple[str, str], str] = {}
        for section in self.sections:
            first.setdefault((section.runs[1], section.task), section.metric)
        return first


def compare(a: Results, *others: Results, confidence: float = 0.95, prompts_may_differ: bool = False) -> Comparison:
    """Compare runs with a first one, question by question.

    Args:
        a: the first run.
        *others: one or more; positive differences are in their favour where higher is better.
        confidence: coverage of the intervals.
        prompts_may_differ: compare the same examples in other prompts, such as with and without a chat template.

    Returns:
        A section for each metric of each task that both runs have; Holm's adjustment runs over the rows of all.

    Raises:
        UserError: nothing in common, other task versions or examples, or no samples logged.
    """
    from lpes_eval.compare.statistics import holm

    notes: list[str] = []
    sections: list[Section] = []
    for letter, b in zip(LETTERS[1:], others, strict=False):
        of_pair: list[str] = []
        sections += _sections(a, letter, b, confidence, prompts_may_differ, of_pair)
        notes += [f"{letter} − A: {note}" if len(others) > 1 else note for note in of_pair]
    if few := sorted({section.questions for section in sections if section.questions < FEW_QUESTIONS}):
        notes.append(
            f"Fewer than {FEW_QUESTIONS} questions ({', '.join(map(str, few))}): p-values of positions and of the mean "
            "are exact, but those of worst and spread may be too small, and their intervals and the mean's too narrow."
        )
    adjusted = iter(holm([row.difference.p for section in sections for row in section.rows]))
    sections = [
        replace(section, rows=tuple(replace(row, p_holm=next(adjusted)) for row in section.rows))
        for section in sections
    ]
    return Comparison(dict(zip(LETTERS, (a, *others), strict=False)), tuple(sections), tuple(notes), confidence)


def _sections(
    a: Results, letter: str, b: Results, confidence: float, prompts_may_differ: bool, notes: list[str]
) -> Iterator[Section]:
    """A section for each metric that two runs have, p-values not adjusted yet."""
    from lpes_eval.compare.statistics import compare_paired, smallest_effect

    common = [name for name in a.tasks if name in b.tasks]
    if not common:
        raise UserError(
            f"{a.path} and {b.path} have no task in common ({tables.some([*a.tasks])}; {tables.some([*b.tasks])}); "
            "give runs of the same tasks"
        )
    notes += _only_in_one({"A": a, letter: b}, common)
    compared = False
    for name in common:
        for unlogged in (run for run in (a, b) if run.tasks[name].documents is None):
            raise UserError(
                f"{unlogged.path}: no samples of {name} beside it; run lm_eval with --log_samples and --output_path, "
                "and keep the files together"
            )
        if reason := mismatch(a.tasks[name], b.tasks[name], prompts_may_differ=prompts_may_differ):
            raise UserError(f"{name} in {a.path} and {b.path}: {reason}")
        if members := a.tasks[name].members:
            notes.append(f"{name}: all samples of its {len(members)} tasks together.")
        for key, metric in a.tasks[name].metrics.items():
            other, shown = b.tasks[name].metrics.get(key), key.removesuffix(",none")
            labels = [label for label in metric.values if other and label in other.values]
            if other is None or not labels:
                continue
            if metric.by_question is None or other.by_question is None:
                notes.append(f"{name}, {shown}: not an average of scores of single samples; not compared.")
                continue
            scores = metric.matrix(labels), other.matrix(labels)
            # Of fewer than six questions no difference of means has p < 0.05.
            if len(scores[0]) >= 6 and (least := smallest_effect(*scores)) > 0:
                notes.append(
                    f"{name}, {shown}: a true difference of {least:.3f} would be found (p < 0.05) 4 times in 5."
                )
            up = metric.higher_is_better is not False
            paired = compare_paired(*scores, higher_is_better=up, confidence=confidence)
            differences = dict(zip(labels, paired.positions, strict=True))
            if len(labels) > 1:
                differences |= {"mean": paired.mean, "worst": paired.worst, "spread": paired.spread}
            compared = True
            rows = tuple(Row(label, difference, difference.p) for label, difference in differences.items())
            yield Section(name, shown, ("A", letter), paired.questions, rows)
    if not compared:
        raise UserError(
            f"{a.path} and {b.path}: the tasks in common have no score in common that is an average over single samples"
        )


def _only_in_one(pair: Mapping[str, Results], common: Collection[str]) -> list[str]:
    places: dict[str, set[str]] = {}
    for letter, run in pair.items():
        names = {name for name in run.tasks if name not in common}
        for name in common:
            for key, metric in run.tasks[name].metrics.items():
                scores = [label for label, value in metric.values.items() if not math.isnan(value)]
                shown = f"{name}, {key.removesuffix(',none')}"
                names |= {shown if label == "all" else f"{name} at {label}" for label in scores}
        places[letter] = names
    both = set.intersection(*places.values())
    alone = {letter: sorted(names - both) for letter, names in places.items()}
    return [f"Only in {letter}, not compared: {tables.some(names)}." for letter, names in alone.items() if names]
