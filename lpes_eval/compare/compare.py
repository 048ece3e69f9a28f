"""``lpes-eval compare A B``: paired differences between two runs of lm-eval on the same examples."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lpes_eval.compare import tables
from lpes_eval.errors import UserError
from lpes_eval.flags import share

if TYPE_CHECKING:
    from lpes_eval.compare.results import Family, Measure, Results
    from lpes_eval.compare.statistics import Difference

FEW_QUESTIONS = 50
"""Below this many, the table says which of its numbers so few questions do not carry."""

HEADER = ("", "A", "B", "B − A", "interval", "p", "p (Holm)")


@dataclass(frozen=True)
class Row:
    """One paired difference: at a position, of the whole of a task without positions, or over all positions."""

    label: str
    difference: Difference
    p_holm: float


@dataclass(frozen=True)
class Section:
    """The differences of one metric of one family of tasks."""

    family: str
    metric: str
    questions: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Comparison:
    """All differences between two runs, and what could not be compared."""

    a: Results
    b: Results
    confidence: float
    sections: tuple[Section, ...]
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """Lay the comparison out for a terminal."""
        return self._render(
            "{0}, {1}, {2} questions", tables.text_table, f"A  {self._run(self.a)}\nB  {self._run(self.b)}"
        )

    def to_markdown(self) -> str:
        """Write the comparison as Markdown."""
        runs = f"* A: {self._run(self.a)}\n* B: {self._run(self.b)}"
        return self._render("### {0}, {1}, {2} questions\n", tables.markdown_table, runs)

    def to_json(self) -> str:
        """Write the comparison as JSON, with every number in full."""
        return json.dumps(
            {
                "a": {"results": str(self.a.path), "model": self.a.subject},
                "b": {"results": str(self.b.path), "model": self.b.subject},
                "confidence": self.confidence,
                "comparisons": [
                    {
                        "task": section.family,
                        "metric": section.metric,
                        "questions": section.questions,
                        "rows": [_row_to_dict(row) for row in section.rows],
                    }
                    for section in self.sections
                ],
                "notes": list(self.notes),
            },
            indent=2,
            ensure_ascii=False,
        )

    def _render(self, title: str, table: Any, runs: str) -> str:
        header = [f"{self.confidence * 100:g} % {name}" if name == "interval" else name for name in HEADER]
        parts = [runs]
        for section in self.sections:
            rows = [_cells(row) for row in section.rows]
            parts.append(title.format(section.family, section.metric, section.questions) + "\n" + table(header, rows))
        return "\n\n".join([*parts, *self.notes])

    @staticmethod
    def _run(results: Results) -> str:
        return f"{results.subject}: {results.path}"


def compare(
    a: Results, b: Results, *, confidence: float = 0.95, prompts_may_differ: bool = False, replicates: int = 10_000
) -> Comparison:
    """Compare two runs, question by question.

    Args:
        a: the first run.
        b: the second; positive differences are in its favour where higher is better.
        confidence: coverage of the intervals.
        prompts_may_differ: compare the same examples in other prompts, such as with and without a chat template.
        replicates: bootstrap samples of questions.

    Returns:
        A section for each metric of each group of positions, and of each other task, that both runs have. Holm's
        adjustment runs over all rows of all sections.

    Raises:
        UserError: nothing in common, other task versions or examples, or no samples logged.
    """
    from lpes_eval.compare.statistics import holm

    found: list[tuple[str, str, int, list[tuple[str, Difference]]]] = []
    notes = _only_in_one(a, b)
    for family_a, family_b in _common_families(a, b):
        _check_comparable(a, b, family_a, family_b, prompts_may_differ)
        for measure in family_a.measures():
            if measure not in family_b.measures():
                continue
            section = _differences(family_a, family_b, measure, confidence, replicates)
            if section is None:
                notes.append(f"{family_a.name}, {measure}: not an average of scores of single samples; not compared.")
            else:
                found.append((family_a.name, str(measure), *section))
    if not found:
        raise UserError(
            f"{a.path} and {b.path}: the tasks in common have no metric that is an average of scores of single samples"
        )
    if few := sorted({questions for _, _, questions, _ in found if questions < FEW_QUESTIONS}):
        notes.append(
            f"Fewer than {FEW_QUESTIONS} questions ({', '.join(map(str, few))}): p-values of positions and of the mean "
            "are exact, but those of worst and spread may be too small, and their intervals and the mean's too narrow."
        )
    adjusted = iter(holm([difference.p for *_, rows in found for _, difference in rows]))
    sections = tuple(
        Section(family, metric, questions, tuple(Row(label, d, next(adjusted)) for label, d in rows))
        for family, metric, questions, rows in found
    )
    return Comparison(a, b, confidence, sections, tuple(notes))


def add_parser(subparsers: Any) -> None:
    """Add ``lpes-eval compare``."""
    parser = subparsers.add_parser(
        "compare",
        help="paired differences between two runs, with intervals and p-values",
        description="Compare two runs of lm_eval on the same examples, question by question, from their logged samples "
        "(lm_eval --log_samples --output_path). docs/statistics.md says what each number is.",
    )
    parser.add_argument("a", metavar="A", help="results JSON of lm_eval, or a folder: the newest results in it")
    parser.add_argument("b", metavar="B", help="the results to compare with A")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE; without FILE, print it"
    )
    parser.add_argument(
        "--markdown", nargs="?", const="-", metavar="FILE", help="write Markdown to FILE; without FILE, print it"
    )
    parser.add_argument("--confidence", type=share, default=0.95, help="coverage of the intervals (default: 0.95)")
    parser.add_argument(
        "--other-prompts",
        action="store_true",
        help="compare the same examples in other prompts, such as with and without a chat template",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run ``lpes-eval compare``."""
    from lpes_eval.compare import results

    comparison = compare(
        results.read(arguments.a),
        results.read(arguments.b),
        confidence=arguments.confidence,
        prompts_may_differ=arguments.other_prompts,
    )
    if arguments.json:
        tables.write(arguments.json, comparison.to_json())
    if arguments.markdown:
        tables.write(arguments.markdown, comparison.to_markdown())
    if "-" not in (arguments.json, arguments.markdown):
        tables.write("-", comparison.to_text())
    return 0


def _common_families(a: Results, b: Results) -> Iterator[tuple[Family, Family]]:
    from lpes_eval.compare.results import Family

    common = False
    for family in a.families:
        tasks = [task for task in family.tasks if task.name in b.tasks]
        if tasks:
            common = True
            yield Family(family.name, tuple(tasks)), Family(family.name, tuple(b.tasks[task.name] for task in tasks))
    if not common:
        raise UserError(
            f"{a.path} and {b.path} have no task in common ({_some(a.tasks)}; {_some(b.tasks)}); "
            "give two runs of the same tasks"
        )


def _only_in_one(a: Results, b: Results) -> list[str]:
    notes = []
    for name, mine, others in (("A", a, b), ("B", b, a)):
        if alone := [task for task in mine.tasks if task not in others.tasks]:
            notes.append(f"Only in {name}, not compared: {_some(alone)}.")
    return notes


def _some(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_comparable(a: Results, b: Results, family_a: Family, family_b: Family, prompts_may_differ: bool) -> None:
    from lpes_eval.compare.results import mismatch

    for task_a, task_b in zip(family_a.tasks, family_b.tasks, strict=True):
        for results, task in ((a, task_a), (b, task_b)):
            if not task.samples:
                raise UserError(
                    f"{results.path}: no samples of {task.name} beside it; run lm_eval with --log_samples and "
                    "--output_path, and keep the files together"
                )
        reason = mismatch(task_a.identity, task_b.identity, prompts_may_differ=prompts_may_differ)
        if reason:
            way_out = "; --other-prompts compares them all the same" if "prompts" in reason else ""
            raise UserError(f"{task_a.name} in {a.path} and {b.path}: {reason}{way_out}")


def _differences(
    family_a: Family, family_b: Family, measure: Measure, confidence: float, replicates: int
) -> tuple[int, list[tuple[str, Difference]]] | None:
    from lpes_eval.compare.statistics import compare_paired, question_matrix

    scores_a, scores_b = family_a.scores(measure), family_b.scores(measure)
    if scores_a is None or scores_b is None:
        return None
    questions, _, matrix_a = question_matrix(scores_a)
    in_order = {task: {question: scores_b[task][question] for question in scores_a[task]} for task in scores_a}
    _, _, matrix_b = question_matrix(in_order)
    found = compare_paired(
        matrix_a,
        matrix_b,
        higher_is_better=family_a.higher_is_better(measure),
        confidence=confidence,
        replicates=replicates,
    )
    rows = list(zip(family_a.labels, found.positions, strict=True))
    if len(rows) > 1:
        rows += [("mean", found.mean), ("worst", found.worst), ("spread", found.spread)]
    return len(questions), rows


def _cells(row: Row) -> list[str]:
    d = row.difference
    interval = f"{tables.signed(d.low)} to {tables.signed(d.high)}"
    return [
        row.label,
        tables.score(d.a),
        tables.score(d.b),
        tables.signed(d.difference),
        interval,
        tables.p_value(d.p),
        tables.p_value(row.p_holm),
    ]


def _row_to_dict(row: Row) -> dict[str, Any]:
    d = row.difference
    return {
        "row": row.label,
        "a": d.a,
        "b": d.b,
        "difference": d.difference,
        "interval": [tables.finite(d.low), tables.finite(d.high)],
        "p": tables.finite(d.p),
        "p_holm": tables.finite(row.p_holm),
        "method": d.method,
    }
