"""``lpes-eval regress RESULTS --baseline FILE``: did a score fall, or the spread widen, since the baseline?

A baseline is what a run would be needed for again: the scores, question by question where samples were logged, what was
asked, and where it came from. A fresh run is reduced to the same form and the two are held against each other;
``--update`` writes that form to the file. ``docs/regress.md`` documents the file and what the gate promises.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_eval import reference
from lpes_eval.compare import tables
from lpes_eval.errors import UserError
from lpes_eval.flags import amount, share

if TYPE_CHECKING:
    from lpes_eval.compare.results import Family, Identity, Model, OverPositions, QuestionId, Results, Task
    from lpes_eval.compare.statistics import Array, Change, Estimates, RerunChanges

FORMAT = "lpes-eval baseline"
FORMAT_VERSION = 1
ALPHA = 0.01
TOLERANCE = 0.001
HEADER = ("", "baseline", "now", "change", "still passes", "p", "")
SLACK = 1.25
"""The level that a family of n questions gets where it gets just enough to see the loss of all answers, in units of
2^-n: p is estimated by random exchanges for means and spreads, and may come out a little above."""


class NoBaseline(UserError):
    """There is no baseline file yet."""

    exit_status = 3


class NotComparable(UserError):
    """The run and the baseline are of other tasks, examples or models."""

    exit_status = 4


@dataclass(frozen=True)
class Score:
    """One metric of one task.

    Attributes:
        value: as lm-eval reported it.
        stderr: its standard error as lm-eval reported it, NaN where it gave none.
        higher_is_better: the metric's direction.
        by_question: one score a question, in the order of the task's questions; None where no samples were logged or
            the metric is not an average over them.
    """

    value: float
    stderr: float
    higher_is_better: bool
    by_question: tuple[float, ...] | None


@dataclass(frozen=True)
class Record:
    """One task: what it asked, and its scores by metric (``METRIC,FILTER``)."""

    identity: Identity
    position: float | None
    scores: Mapping[str, Score]


@dataclass(frozen=True)
class Baseline:
    """A run reduced to what a later one is held against.

    Attributes:
        model: what was evaluated.
        provenance: where the scores came from; shown where it differs, never a reason to refuse.
        tasks: the tasks by name.
        families: name -> its tasks in the order of their positions.
        groups: family -> metric -> mean and spread as reported; only where the questions' own scores are not there.
    """

    model: Model
    provenance: Mapping[str, Any]
    tasks: Mapping[str, Record]
    families: Mapping[str, tuple[str, ...]]
    groups: Mapping[str, Mapping[str, OverPositions]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the baseline as JSON; tasks with the same questions share the list of them."""
        questions = dict.fromkeys(
            record.identity.questions for record in self.tasks.values() if record.identity.questions is not None
        )
        number = {one: index for index, one in enumerate(questions)}
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "model": {"kind": self.model.kind, "name": self.model.name, "parameters": self.model.parameters},
            "provenance": dict(self.provenance),
            "families": {name: list(tasks) for name, tasks in self.families.items()},
            "groups": {name: {key: asdict(row) for key, row in rows.items()} for name, rows in self.groups.items()},
            "questions": [_pack_questions(one) for one in questions],
            "tasks": {name: _record_to_dict(record, number) for name, record in self.tasks.items()},
        }

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        tables.write(str(path), json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False))


@dataclass(frozen=True)
class Row:
    """One tested quantity: the score at a position, the mean over positions, or the spread.

    Attributes:
        limit: the largest worsening that passes.
        worse: whether it fails, by the test or by the largest drop.
        dropped: whether it got worse by more than the largest drop, whatever chance says.
    """

    label: str
    change: Change
    worse_when_higher: bool
    limit: float
    worse: bool
    dropped: bool = False

    @property
    def allowed(self) -> float:
        """The largest change for the worse that passes, signed as a change; infinite where nothing was tested."""
        return self.limit if self.worse_when_higher else -self.limit

    @property
    def verdict(self) -> str:
        """What the table says of it."""
        if self.dropped:
            return "DROPPED"
        if self.change.method == "none":
            return "not testable"
        return "WORSE" if self.worse else "ok"


@dataclass(frozen=True)
class Section:
    """The rows of one metric of one family of tasks, each tested at ``level``; 0 where nothing could be tested."""

    family: str
    metric: str
    paired: bool
    questions: int | None
    level: float
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """Names the family, the metric, and how the two runs were held against each other."""
        how = "paired" if self.paired else "unpaired"
        asked = [f"{self.questions} questions"] if self.questions else []
        return tables.plain(", ".join([self.family, self.metric, *asked, how]))


@dataclass(frozen=True)
class Verdict:
    """The gate's answer.

    Attributes:
        sections: all rows, tested or not.
        alpha: the false-alarm rate of the whole gate.
        notes: what else a reader should know, such as the smallest loss that could be found.
        max_drop: the largest drop of a mean or of a single task's score; None where chance alone decides.
        strict: whether the gate also fails where a score could not be tested.
        compared: ``baseline`` and ``now`` -> the model and the file it is of; empty where there are no files.
    """

    sections: tuple[Section, ...]
    alpha: float
    notes: tuple[str, ...]
    max_drop: float | None = None
    strict: bool = False
    compared: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """The rows of all sections."""
        return [row for section in self.sections for row in section.rows]

    @property
    def worse(self) -> bool:
        """Whether a score got worse."""
        return any(row.worse for row in self.rows)

    @property
    def untestable(self) -> int:
        """How many rows could not be tested, and did not fail by their size either."""
        return sum(row.change.method == "none" and not row.worse for row in self.rows)

    @property
    def fails(self) -> bool:
        """Whether the gate fails."""
        return self.worse or (self.strict and self.untestable > 0)

    @property
    def headline(self) -> str:
        """The answer in one line."""
        tested = sum(row.change.method != "none" for row in self.rows)
        worse = sum(row.worse for row in self.rows)
        found = (
            f"{worse} of {len(self.rows)} scores and spreads got worse" if worse else "nothing got worse beyond chance"
        )
        if self.untestable:
            found += f"; {self.untestable} could not be tested" + (", which fails under --strict" * self.strict)
        besides = "" if self.max_drop is None else f", or wherever a mean drops by more than {self.max_drop:g}"
        return f"{found} ({tested} tested; a mere rerun fails at most once in {1 / self.alpha:.0f}{besides})"

    def to_text(self) -> str:
        """Lay the verdict out for a terminal."""
        parts = [f"{section.title}\n{tables.text_table(HEADER, _cells(section))}" for section in self.sections]
        compared = ["\n".join(f"{side:<8}  {what}" for side, what in self.compared.items())] if self.compared else []
        return "\n\n".join([*compared, *parts, *(["\n".join(self.notes)] if self.notes else []), self.headline])

    def to_markdown(self) -> str:
        """Write the verdict as Markdown, for a job summary."""
        parts = [f"## lpes-eval regress: {self.headline}"]
        if self.compared:
            parts.append("\n".join(f"* {side}: {tables.markdown(what)}" for side, what in self.compared.items()))
        parts += [
            f"### {tables.markdown(section.title)}\n\n{tables.markdown_table(HEADER, _cells(section))}"
            for section in self.sections
        ]
        return "\n\n".join([*parts, *(f"* {tables.markdown(note)}" for note in self.notes)])

    def to_junit(self) -> str:
        """Write the verdict as JUnit XML: a test case for each row, failed where it got worse.

        What could not be tested is skipped, or under ``strict`` failed.
        """
        cases = []
        for section in self.sections:
            for row in section.rows:
                case = _Case(f"{section.family}.{section.metric}", row.label)
                if row.worse:
                    case.outcome, case.message = "failure", _sentence(row)
                elif row.change.method == "none":
                    case.outcome = "failure" if self.strict else "skipped"
                    case.message = "not testable: too few questions, or no samples and no standard error"
                cases.append(case)
        return _junit(cases, self.notes)


def snapshot(results: Results) -> Baseline:
    """Reduce a run to the form of a baseline."""
    tasks = {name: _record(task) for name, task in results.tasks.items()}
    groups = {family.name: dict(_reported_rows(family, tasks)) for family in results.families}
    return Baseline(
        model=results.model,
        provenance=_provenance(results),
        tasks=tasks,
        families={family.name: tuple(task.name for task in family.tasks) for family in results.families},
        groups={name: rows for name, rows in groups.items() if rows},
    )


def load(path: str | Path) -> Baseline:
    """Read a baseline.

    Raises:
        NoBaseline: no such file.
        UserError: a file that is not a baseline, or one of another version of the format.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; expected the baseline's file (JSON)")
    if not path.is_file():
        raise NoBaseline(
            f"{path}: no baseline there; write one with lpes-eval regress RESULTS --baseline {path} --update"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not JSON ({error}); restore the file, or write it again with --update") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{path}: not a baseline (its 'format' is not {FORMAT!r}); write one with --update")
    if data.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}: baseline format {data.get('format_version')!r}, expected {FORMAT_VERSION}; "
            "write it again with --update"
        )
    try:
        return _parse(data)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: damaged baseline ({error!r}); restore the file, or write it again with --update"
        ) from None


def regress(
    baseline: Baseline,
    now: Baseline,
    *,
    alpha: float = ALPHA,
    tolerance: float = TOLERANCE,
    max_drop: float | None = None,
    strict: bool = False,
    other_model: bool = False,
    other_prompts: bool = False,
) -> Verdict:
    """Hold a run against a baseline.

    Every position of every family, its mean over positions and its spread is one test, where there is anything to test
    it by. Their levels add up to ``alpha`` at most (Bonferroni; see ``_levels``), so that a rerun of the same model
    fails the gate with a probability of at most ``alpha``, however many tasks there are.

    Args:
        baseline: what was committed.
        now: the fresh run, as a baseline.
        alpha: the false-alarm rate of the whole gate.
        tolerance: a worsening up to this much, in the score's unit, never fails.
        max_drop: a mean over positions, or the score of a single task, that gets worse by more than this fails whatever
            chance says. It is for deterministic reruns, and comes without a false-alarm rate.
        strict: fail where a score cannot be tested, too.
        other_model: hold another model against the baseline on purpose.
        other_prompts: accept the same examples in other prompts.

    Raises:
        NotComparable: another model; a task or metric that is missing, or a task of another version or other examples;
            nothing at all that could be tested, or too few questions for any test to fail.
    """
    _check_comparable(baseline, now, other_model, other_prompts)
    comparisons = [_Comparison.of(family, tasks, key, baseline, now) for family, tasks, key in _measured(baseline)]
    tests = sum(comparison.tests for comparison in comparisons)
    if not tests:
        raise NotComparable("no score has samples or a standard error to test it by; run lm_eval with --log_samples")
    levels = _levels([(comparison.tests, comparison.questions) for comparison in comparisons], alpha)
    if not any(levels):
        asked = max(comparison.questions or 0 for comparison in comparisons if comparison.tests)
        raise NotComparable(
            f"{asked} questions are too few: at alpha {alpha:g} over {tests} tests not even the loss of every answer "
            f"could be told from chance; evaluate at least {_fewest_lost(alpha / tests)}"
        )
    largest = math.inf if max_drop is None else max(max_drop, tolerance)
    sections = tuple(
        comparison.section(level, tolerance, largest) for comparison, level in zip(comparisons, levels, strict=True)
    )
    return Verdict(sections, alpha, (*_least_losses(sections), *_notes(baseline, now)), max_drop, strict)


def add_parser(subparsers: Any) -> None:
    """Add ``lpes-eval regress``."""
    parser = subparsers.add_parser(
        "regress",
        help="fail if scores got worse than a committed baseline",
        description="Hold a run of lm_eval against a committed baseline. docs/regress.md says what is tested and how "
        "often a mere rerun fails.",
        epilog="exit status: 0 nothing got worse beyond chance; 1 something did, or under --strict a score could not "
        "be tested; 2 an error of use; 3 no baseline; 4 not comparable (another task version, model, source or set of "
        "examples)",
    )
    parser.add_argument("results", metavar="RESULTS", help="results JSON of lm_eval, or a folder: the newest in it")
    parser.add_argument("--baseline", metavar="FILE", required=True, help="the committed baseline (JSON)")
    parser.add_argument("--update", action="store_true", help="write RESULTS to the baseline instead of testing them")
    parser.add_argument("--markdown", metavar="FILE", help="write the table as Markdown, for a job summary")
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML, a test case for each row")
    parser.add_argument(
        "--alpha", type=share, default=ALPHA, help=f"false-alarm rate of the whole gate (default: {ALPHA})"
    )
    parser.add_argument(
        "--tolerance",
        type=amount,
        default=TOLERANCE,
        help=f"a worsening up to this, in the score's own unit, never fails (default: {TOLERANCE})",
    )
    parser.add_argument(
        "--max-drop",
        type=amount,
        metavar="X",
        help="fail where a mean over positions, or the score of a task without positions, got worse by more than X, "
        "whatever chance says; for reruns that give the same answers, without a promise on false alarms (default: off)",
    )
    parser.add_argument(
        "--strict",
        action=argparse.BooleanOptionalAction,
        default=bool(os.environ.get("CI")),
        help="fail where a score cannot be tested (default: where the environment variable CI is set)",
    )
    parser.add_argument("--other-model", action="store_true", help="hold another model against the baseline on purpose")
    parser.add_argument("--other-prompts", action="store_true", help="accept the same examples in other prompts")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run ``lpes-eval regress``."""
    from lpes_eval.compare import results

    if arguments.update:
        return _update(arguments, results.read(arguments.results))
    try:
        verdict = _verdict(arguments, results.read(arguments.results))
    except UserError as error:
        if arguments.markdown:
            tables.write(
                arguments.markdown, f"## lpes-eval regress: could not compare\n\n{tables.markdown(str(error))}"
            )
        if arguments.junit:
            tables.write(arguments.junit, _junit([_Case("lpes-eval", "comparable", "error", str(error))]))
        raise
    if arguments.markdown:
        tables.write(arguments.markdown, verdict.to_markdown())
    if arguments.junit:
        tables.write(arguments.junit, verdict.to_junit())
    if "-" not in (arguments.markdown, arguments.junit):
        tables.write("-", verdict.to_text())
    return 1 if verdict.fails else 0


def _update(arguments: argparse.Namespace, found: Results) -> int:
    """Write the baseline that the command line names, if any run could be held against it."""
    path, now = Path(arguments.baseline), snapshot(found)
    _check_replaceable(path)
    try:
        regress(now, now, alpha=arguments.alpha, tolerance=arguments.tolerance)
    except NotComparable as error:
        raise NotComparable(f"{found.path}: no run could be held against this as a baseline: {error}") from None
    now.save(path)
    unpaired = any(score.by_question is None for record in now.tasks.values() for score in record.scores.values())
    hint = "; some scores without samples (lm_eval --log_samples): they can only be compared unpaired"
    print(f"{path}: baseline of {len(now.tasks)} tasks written from {found.path}{hint if unpaired else ''}")
    return 0


def _check_replaceable(path: Path) -> None:
    """Refuse to overwrite a file that is no baseline; one of another version, or damaged behind its head, may go."""
    if not path.exists():
        return
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{path}: is there and is not a baseline, so --update does not overwrite it; name another file")


def _verdict(arguments: argparse.Namespace, found: Results) -> Verdict:
    """Hold the run against the baseline that the command line names; answer and error say which files these are."""
    baseline = load(arguments.baseline)
    try:
        verdict = regress(
            baseline,
            snapshot(found),
            alpha=arguments.alpha,
            tolerance=arguments.tolerance,
            max_drop=arguments.max_drop,
            strict=arguments.strict,
            other_model=arguments.other_model,
            other_prompts=arguments.other_prompts,
        )
    except NotComparable as error:
        raise NotComparable(f"{found.path} against {arguments.baseline}: {error}") from None
    compared = {"baseline": f"{baseline.model}: {arguments.baseline}", "now": f"{found.subject}: {found.path}"}
    return replace(verdict, compared=compared)


# --- what is compared -------------------------------------------------------------------------------------------------


def _named_once(model: Model) -> Model:
    """The model, a shipped one under one of its names."""
    return replace(model, name=reference.NAMES.get(model.name, model.name))


def _check_comparable(baseline: Baseline, now: Baseline, other_model: bool, other_prompts: bool) -> None:
    from lpes_eval.compare.results import mismatch

    if _named_once(baseline.model) != _named_once(now.model) and not other_model:
        raise NotComparable(
            f"another model: the baseline is of {baseline.model}, the run of {now.model}; "
            "--other-model compares them on purpose, --update starts anew"
        )
    if missing := [name for name in baseline.tasks if name not in now.tasks]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NotComparable(
            f"the baseline has {missing[0]}{more}, the run has not; run the same tasks, or write the baseline again "
            "with --update"
        )
    for name, record in baseline.tasks.items():
        reason = mismatch(record.identity, now.tasks[name].identity, prompts_may_differ=other_prompts)
        if reason:
            way_out = "--other-prompts compares them all the same, " if "prompts" in reason else ""
            raise NotComparable(f"{name}, baseline and run: {reason}; {way_out}--update starts anew")
        if lost := [key for key in record.scores if key not in now.tasks[name].scores]:
            raise NotComparable(f"the baseline has {lost[0]} of {name}, the run has not; --update starts anew")


def _measured(baseline: Baseline) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield family, tasks and metric key of every comparison to make."""
    for family, tasks in baseline.families.items():
        for key in baseline.tasks[tasks[0]].scores:
            if all(key in baseline.tasks[task].scores for task in tasks):
                yield family, tasks, key


def _fewest_lost(level: float) -> int:
    """How many questions must be answered worse, and none better, before a test at ``level`` can fail.

    Of n questions answered worse one and all, an exchange of the runs does as much harm with probability 2^-n.
    """
    return math.floor(math.log2(1 / level)) + 1


def _levels(families: Sequence[tuple[int, int | None]], alpha: float) -> list[float]:
    """The level of each family's tests, of which all add up to ``alpha`` at most.

    Tests share ``alpha`` evenly. Where a family has too few questions for that, it gets just what it takes to see the
    loss of all its answers, as long as half of ``alpha`` is left to the others; where it does not, it gets 0.

    Args:
        families: of each, its tests and its questions (None: not known).
        alpha: the false-alarm rate of the whole gate.
    """
    needed = [SLACK * 2.0**-questions if questions else 0.0 for _, questions in families]
    levels, spent = [0.0] * len(families), 0.0
    even = [i for i, (tests, _) in enumerate(families) if tests]
    even.sort(key=lambda i: families[i][0] * needed[i])
    while even:
        level = (alpha - spent) / sum(families[i][0] for i in even)
        few = [i for i in even if (questions := families[i][1]) is not None and questions < _fewest_lost(level)]
        if not few:
            for i in even:
                levels[i] = level
            break
        even.remove(few[0])
        cost = families[few[0]][0] * needed[few[0]]
        if even and spent + cost <= alpha / 2:
            spent += cost
            levels[few[0]] = needed[few[0]]
    return levels


def _least_losses(sections: Sequence[Section]) -> Iterator[str]:
    for questions, level in sorted({(section.questions, section.level) for section in sections if section.questions}):
        if not level:
            yield f"{questions} questions: not testable, a loss of all of them cannot be told from chance."
        elif any(section.paired for section in sections if section.questions == questions):
            yield f"{questions} questions: a loss of fewer than {_fewest_lost(level)} cannot be told from chance."


def _notes(baseline: Baseline, now: Baseline) -> Iterator[str]:
    from lpes_eval.compare.results import flatten

    if new := [name for name in now.tasks if name not in baseline.tasks]:
        more = f" and {len(new) - 1} more" if len(new) > 1 else ""
        yield f"Not in the baseline, not tested: {new[0]}{more}."
    if baseline.model != now.model:
        yield f"Model: {baseline.model} in the baseline, {now.model} now."
    was, is_now = flatten(baseline.provenance), flatten(now.provenance)
    for key in sorted({*was, *is_now} - {"date", "command"}):
        if was.get(key) != is_now.get(key):
            then, today = ("none" if found.get(key) is None else found[key] for found in (was, is_now))
            yield f"{key}: {then} in the baseline, {today} now."


@dataclass(frozen=True)
class _Comparison:
    """One metric of one family of tasks in both runs.

    Attributes:
        labels: what to call each task in the table.
        questions: how many were asked, where that is known.
        scores: of baseline and run, of shape (questions, positions), where both have them.
        estimates: of baseline and run, where one of them has no scores by question.
    """

    family: str
    key: str
    labels: tuple[str, ...]
    higher_is_better: bool
    questions: int | None
    scores: tuple[Array, Array] | None
    estimates: tuple[Estimates, Estimates] | None

    @classmethod
    def of(cls, family: str, tasks: Sequence[str], key: str, baseline: Baseline, now: Baseline) -> _Comparison:
        old, new = ([side.tasks[task] for task in tasks] for side in (baseline, now))
        scores = estimates = None
        if _has_samples(old, key) and _has_samples(new, key):
            scores = _matrix(old, key), _matrix(new, key)
        else:
            was, is_now = (side.groups.get(family, {}).get(key) for side in (baseline, now))
            estimates = _estimates(old, key, was), _estimates(new, key, is_now)
        labels = tuple("all" if record.position is None else f"{record.position:g} %" for record in old)
        higher_is_better, questions = old[0].scores[key].higher_is_better, old[0].identity.examples
        return cls(family, key, labels, higher_is_better, questions, scores, estimates)

    @property
    def tests(self) -> int:
        """How many rows there is something to test by."""
        if self.estimates is None:
            return len(self.labels) + (2 if len(self.labels) > 1 else 0)
        return sum(change.method != "none" for change in self._changes(0.5).all)

    def _changes(self, level: float) -> RerunChanges:
        from lpes_eval.compare.statistics import rerun_changes, unpaired_changes

        if self.scores is not None:
            return rerun_changes(*self.scores, level, higher_is_better=self.higher_is_better)
        assert self.estimates is not None
        return unpaired_changes(
            *self.estimates, level, higher_is_better=self.higher_is_better, questions=self.questions
        )

    def section(self, level: float, tolerance: float, largest: float) -> Section:
        """Its rows: the positions, their mean and their spread."""
        found = self._changes(level or 0.5)
        if not level:
            found = found.untested()
        named = list(zip(self.labels, found.positions, strict=True))
        if found.mean is not None:
            named.append(("mean", found.mean))
        rows = [_row(label, change, not self.higher_is_better, level, tolerance) for label, change in named]
        rows[-1] = _held_to(largest, rows[-1])  # the mean, or the only score
        if found.spread is not None:
            rows.append(_row("spread", found.spread, True, level, tolerance))
        paired = self.scores is not None
        return Section(self.family, self.key.removesuffix(",none"), paired, self.questions, level, tuple(rows))


def _row(label: str, change: Change, worse_when_higher: bool, level: float, tolerance: float) -> Row:
    worse = change.p < level and change.worsening > tolerance  # p is NaN, below nothing, where nothing was tested
    return Row(label, change, worse_when_higher, max(change.allowed, tolerance), worse)


def _held_to(largest: float, row: Row) -> Row:
    dropped = row.change.worsening > largest + 1e-9  # averages of the same drop differ in their last bits
    return replace(row, limit=min(row.limit, largest), worse=row.worse or dropped, dropped=dropped)


def _has_samples(records: Sequence[Record], key: str) -> bool:
    return all(record.scores[key].by_question is not None for record in records)


def _matrix(records: Sequence[Record], key: str) -> Array:
    """Scores of shape (questions, positions), of records that have one a question."""
    from lpes_eval.compare.statistics import question_matrix

    by_position = {}
    for number, record in enumerate(records):
        questions, scores = record.identity.questions, record.scores[key].by_question
        assert questions is not None
        assert scores is not None
        by_position[number] = dict(zip(questions, scores, strict=True))
    return question_matrix(by_position)[2]


def _estimates(records: Sequence[Record], key: str, group: OverPositions | None) -> Estimates:
    """Return scores with the best standard errors there are: of the questions, of the group's row, or a bound."""
    from lpes_eval.compare.statistics import Estimate, Estimates, from_reported, summarize

    if _has_samples(records, key):
        summary = summarize(_matrix(records, key))
        return Estimates(summary.means, summary.mean, summary.spread)
    bounded = from_reported([Estimate(record.scores[key].value, record.scores[key].stderr) for record in records])
    if group is None:
        return bounded
    mean, spread = Estimate(group.mean, group.mean_stderr), Estimate(group.spread, group.spread_stderr)
    return Estimates(bounded.means, mean, spread)


# --- the file ---------------------------------------------------------------------------------------------------------


def _record(task: Task) -> Record:
    scores = {}
    for measure, (value, stderr) in task.reported.items():
        by_question = task.scores(measure)
        questions = task.identity.questions
        line = None if by_question is None or questions is None else tuple(by_question[q] for q in questions)
        scores[measure.key] = Score(value, stderr, task.higher_is_better.get(measure.metric, True), line)
    return Record(task.identity, task.position, scores)


def _reported_rows(family: Family, tasks: Mapping[str, Record]) -> Iterator[tuple[str, OverPositions]]:
    for measure, row in family.reported.items():
        if any(tasks[task.name].scores[measure.key].by_question is None for task in family.tasks):
            yield measure.key, row


def _provenance(results: Results) -> dict[str, Any]:
    import lpes_eval

    raw = results.raw
    config = raw.get("config") or {}
    date, factors = raw.get("date"), config.get("factors")
    torch = re.search(r"PyTorch version: (\S+)", raw.get("pretty_env_info") or "")
    packages = {
        "lpes_eval": lpes_eval.__version__,
        "lm_eval": raw.get("lm_eval_version"),
        "transformers": raw.get("transformers_version"),
        "torch": torch[1] if torch else None,
    }
    model = {key.removeprefix("model_"): config.get(key) for key in ("model_dtype", "model_revision", "model_sha")}
    return {
        "date": datetime.fromtimestamp(date, UTC).isoformat(timespec="seconds") if isinstance(date, float) else None,
        "command": results.command(),
        "packages": packages,
        "model": {**model, "factors": factors.get("sha256") if isinstance(factors, dict) else None},
    }


def _record_to_dict(record: Record, number: Mapping[tuple[QuestionId, ...], int]) -> dict[str, Any]:
    identity = record.identity
    return {
        "version": identity.version,
        "position": record.position,
        "data": dict(identity.data),
        "examples": identity.examples,
        "questions": None if identity.questions is None else number[identity.questions],
        "documents": identity.documents,
        "prompts": identity.prompts,
        "scores": {
            key: {
                "value": score.value,
                "stderr": tables.finite(score.stderr),
                "higher_is_better": score.higher_is_better,
                "by_question": None if score.by_question is None else _pack_scores(score.by_question),
            }
            for key, score in record.scores.items()
        },
    }


def _parse(data: Mapping[str, Any]) -> Baseline:
    from lpes_eval.compare.results import Identity, Model, OverPositions

    tasks = {}
    question_lists = [_unpack_questions(packed) for packed in data["questions"]]
    for name, entry in data["tasks"].items():
        questions = None if entry["questions"] is None else question_lists[entry["questions"]]
        identity = Identity(
            version=entry["version"],
            data=entry["data"],
            examples=entry["examples"],
            questions=questions,
            documents=entry["documents"],
            prompts=entry["prompts"],
        )
        scores = {}
        for key, score in entry["scores"].items():
            by_question = None if score["by_question"] is None else _unpack_scores(score["by_question"])
            if by_question is not None and (questions is None or len(by_question) != len(questions)):
                raise ValueError(f"{name}, {key}: {len(by_question)} scores for {len(questions or ())} questions")
            stderr = math.nan if score["stderr"] is None else float(score["stderr"])
            scores[key] = Score(float(score["value"]), stderr, bool(score["higher_is_better"]), by_question)
        tasks[name] = Record(identity, entry["position"], scores)
    families = {name: tuple(members) for name, members in data["families"].items()}
    if unknown := [task for members in families.values() for task in members if task not in tasks]:
        raise ValueError(f"no such task: {unknown[0]}")
    groups = {name: {key: OverPositions(**row) for key, row in rows.items()} for name, rows in data["groups"].items()}
    return Baseline(Model(**data["model"]), data["provenance"], tasks, families, groups)


def _pack_questions(questions: Sequence[QuestionId]) -> str | list[QuestionId]:
    """Write ascending numbers as ranges, ``0-199,250``; anything else as it is."""
    numbers = [question for question in questions if isinstance(question, int) and question >= 0]
    if len(numbers) != len(questions):
        return list(questions)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _unpack_questions(packed: str | list[QuestionId]) -> tuple[QuestionId, ...]:
    if isinstance(packed, list):
        return tuple(packed)
    questions: list[int] = []
    for part in packed.split(","):
        first, _, last = part.partition("-")
        questions.extend(range(int(first), int(last or first) + 1))
    return tuple(questions)


def _pack_scores(scores: Sequence[float]) -> str | list[float]:
    """Write right-or-wrong scores as a string of 1 and 0; others as numbers, in full."""
    if all(score in (0.0, 1.0) for score in scores):
        return "".join("1" if score else "0" for score in scores)
    return list(scores)


def _unpack_scores(packed: str | list[float]) -> tuple[float, ...]:
    if isinstance(packed, str):
        return tuple({"0": 0.0, "1": 1.0}[score] for score in packed)
    return tuple(float(score) for score in packed)


# --- how it is shown --------------------------------------------------------------------------------------------------


def _cells(section: Section) -> list[list[str]]:
    return [
        [
            row.label,
            tables.score(row.change.old),
            tables.score(row.change.new),
            tables.signed(row.change.new - row.change.old),
            tables.signed(row.allowed),
            tables.p_value(row.change.p),
            row.verdict,
        ]
        for row in section.rows
    ]


def _sentence(row: Row) -> str:
    change = row.change
    moved, allowed = tables.signed(change.new - change.old), tables.signed(row.allowed)
    scores = f"{tables.score(change.old)} in the baseline, {tables.score(change.new)} now"
    return f"{scores}: {moved}, allowed {allowed} (p = {tables.p_value(change.p)})"


@dataclass
class _Case:
    """A JUnit test case; ``outcome`` is ``failure``, ``error``, ``skipped``, or empty where it passed."""

    suite: str
    name: str
    outcome: str = ""
    message: str = ""


def _junit(cases: Sequence[_Case], notes: Sequence[str] = ()) -> str:
    from xml.etree import ElementTree

    counts = {
        plural: str(sum(case.outcome == outcome for case in cases))
        for outcome, plural in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped"))
    }
    root = ElementTree.Element("testsuites")
    of_suite = {"name": "lpes-eval regress", "tests": str(len(cases)), **counts}
    suite = ElementTree.SubElement(root, "testsuite", of_suite)
    for case in cases:
        named = {"classname": tables.plain(case.suite), "name": tables.plain(case.name)}
        element = ElementTree.SubElement(suite, "testcase", named)
        if case.outcome:
            ElementTree.SubElement(element, case.outcome, {"message": tables.plain(case.message)})
    if notes:
        ElementTree.SubElement(suite, "system-out").text = "\n".join(map(tables.plain, notes))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)
