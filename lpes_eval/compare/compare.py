"""Paired differences between runs of lm-eval on the same examples."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from string import ascii_uppercase as LETTERS
from typing import TYPE_CHECKING

from lpes_eval.compare import tables
from lpes_eval.compare.results import Results, mismatch
from lpes_eval.errors import UserError

if TYPE_CHECKING:
    from lpes_eval.compare.statistics import Difference

FEW_QUESTIONS = 50
"""Below this many, the report says which of its numbers so few questions do not carry."""


def compare(a: Results, *others: Results, confidence: float = 0.95, prompts_may_differ: bool = False) -> tables.Report:
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
    found: list[tuple[str, str, str, int, dict[str, Difference]]] = []
    for letter, b in zip(LETTERS[1:], others, strict=False):
        said: list[str] = []
        found += [(letter, *one) for one in _differences(a, letter, b, confidence, prompts_may_differ, said)]
        notes += [f"{letter} − A: {note}" if len(others) > 1 else note for note in said]
    if few := sorted({questions for *_, questions, _ in found if questions < FEW_QUESTIONS}):
        notes.append(
            f"Fewer than {FEW_QUESTIONS} questions ({', '.join(map(str, few))}): p-values of positions and of the mean "
            "are exact, but those of worst and spread may be too small, and their intervals and the mean's too narrow."
        )
    adjusted = iter(holm([difference.p for *_, rows in found for difference in rows.values()]))
    sections = tuple(
        tables.Section(
            name,
            shown,
            questions,
            ("", "A", letter, f"{letter} − A", f"{confidence * 100:g} % interval", "p", "p (Holm)"),
            tuple(_row(label, d, next(adjusted)) for label, d in rows.items()),
            ("A", letter) if len(others) > 1 else (),
        )
        for letter, name, shown, questions, rows in found
    )
    sides = {letter: run.side for letter, run in zip(LETTERS, (a, *others), strict=False)}
    return tables.Report("lpes-eval compare", sides, sections, tuple(notes), facts={"confidence": confidence})


def _differences(
    a: Results, letter: str, b: Results, confidence: float, prompts_may_differ: bool, notes: list[str]
) -> Iterator[tuple[str, str, int, dict[str, Difference]]]:
    """Of each metric that two runs have: its task and name, how many questions, and a difference for each row."""
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
        for unlogged in (one for one in (a, b) if one.tasks[name].documents is None):
            raise UserError(
                f"{unlogged.path}: no samples of {name} beside it; run lm_eval with --log_samples and --output_path, "
                "and keep the files together"
            )
        if reason := mismatch(a.tasks[name], b.tasks[name], prompts_may_differ=prompts_may_differ):
            raise UserError(f"{name} in {a.path} and {b.path}: {reason}")
        if name in a.members:
            notes.append(f"{name}: all samples of its {len(a.members[name])} tasks together.")
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
            rows = compare_paired(*scores, higher_is_better=metric.higher_is_better, confidence=confidence)
            of_all = {"mean": rows.mean, "worst": rows.worst, "spread": rows.spread} if len(labels) > 1 else {}
            compared = True
            yield name, shown, rows.questions, dict(zip(labels, rows.positions, strict=True)) | of_all
    if not compared:
        raise UserError(
            f"{a.path} and {b.path}: the tasks in common have no score in common that is an average over single samples"
        )


def _only_in_one(pair: Mapping[str, Results], common: Collection[str]) -> list[str]:
    def place(task: str, metric: str, label: str) -> str:
        if task not in common:
            return task
        return f"{task}, {metric.removesuffix(',none')}" if label == "all" else f"{task} at {label}"

    places = {
        letter: {
            place(name, key, label)
            for name, task in one.tasks.items()
            for key, metric in task.metrics.items()
            for label in metric.values
        }
        for letter, one in pair.items()
    }
    both = set.intersection(*places.values())
    alone = {letter: sorted(names - both) for letter, names in places.items()}
    return [f"Only in {letter}, not compared: {tables.some(names)}." for letter, names in alone.items() if names]


def _row(label: str, d: Difference, p_holm: float) -> tables.Row:
    interval = f"{tables.signed(d.low)} to {tables.signed(d.high)}"
    scores = tables.score(d.a), tables.score(d.b), tables.signed(d.difference)
    return tables.Row(
        cells=(label, *scores, interval, tables.p_value(d.p), tables.p_value(p_holm)),
        facts={"row": label, "interval": [d.low, d.high], "p_holm": p_holm}
        | {name: getattr(d, name) for name in ("a", "b", "difference", "p", "method")},
    )
