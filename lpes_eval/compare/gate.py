"""``lpes-eval regress RESULTS --baseline FILE``: did a score fall, or the spread widen, since the baseline?

``docs/regress.md`` says what the gate promises.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_eval.compare import results, tables
from lpes_eval.compare.baseline import is_baseline, load, save
from lpes_eval.compare.results import Metric, Results, differing, mismatch
from lpes_eval.errors import UserError
from lpes_eval.flags import amount, share

if TYPE_CHECKING:
    from lpes_eval.compare.statistics import Change

ALPHA = 0.01
TOLERANCE = 0.001
COMMAND = "lpes-eval regress"
HEADER = ("", "baseline", "now", "change", "still passes", "p", "")
NOT_TESTABLE = "not testable"


class NoBaseline(UserError):
    """There is no baseline file yet."""

    exit_status = 3


class NotComparable(UserError):
    """The run and the baseline are of other tasks, examples or models."""

    exit_status = 4


@dataclass(frozen=True)
class Options:
    """What decides about a change.

    ``alpha`` is the false-alarm rate of the whole gate. A worsening up to ``tolerance``, in the score's unit, never
    fails. A mean over positions, or the score of a task without positions, that gets worse by more than ``max_drop``
    fails whatever chance says: for deterministic reruns, without a false-alarm rate. ``strict`` fails where a score
    cannot be tested, too. ``other_model`` and ``other_prompts`` allow these to differ from the baseline's.
    """

    alpha: float = ALPHA
    tolerance: float = TOLERANCE
    max_drop: float | None = None
    strict: bool = False
    other_model: bool = False
    other_prompts: bool = False


def regress(baseline: Results, now: Results, options: Options = Options()) -> tables.Report:
    """Hold a run against a baseline; the report has ``failed`` where something got worse.

    Every position of every metric, its mean over positions and its spread is one test. Their levels add up to ``alpha``
    at most, so that a rerun of the same model fails with a probability of at most ``alpha``, however many tasks there
    are.

    Raises:
        NotComparable: another model; a task or metric that is missing, or a task of another version or other examples;
            nothing at all that could be tested, or too few questions for any test to fail.
    """
    scores = list(_comparable(baseline, now, options))
    _set_levels(scores, options.alpha)
    if options.max_drop is None and not any(score.level for score in scores):
        tests = sum(score.tests for score in scores)
        if not tests:
            raise NotComparable(
                "no score has samples on both sides to test it by; run lm_eval with --log_samples, or give --max-drop"
            )
        asked, least = max(score.questions for score in scores), _fewest_lost(options.alpha / tests)
        raise NotComparable(
            f"{asked} questions are too few: at alpha {options.alpha:g} over {tests} tests not even the loss of every "
            f"answer could be told from chance; evaluate at least {least}"
        )
    tested = {score.task for score in scores if score.tests}
    sections = tuple(_section(score, options, score.task in tested) for score in scores)
    notes = (*_least_losses(scores), *_differences(baseline, now))
    sides = {"baseline": (str(baseline.model), str(baseline.path)), "now": now.side}
    return tables.Report(COMMAND, sides, sections, notes, _headline(sections, options))


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
    add = parser.add_argument
    add("results", metavar="RESULTS", help="results JSON of lm_eval, or a folder: the newest in it")
    add("--baseline", metavar="FILE", type=Path, required=True, help="the committed baseline (JSON)")
    add("--update", action="store_true", help="write RESULTS to the baseline instead of testing them")
    tables.add_outputs(parser, "json", "markdown", "junit")
    add("--flips", action="store_true", help="list the samples that flipped, of each score that fell")
    add("--alpha", type=share, default=ALPHA, help=f"false-alarm rate of the whole gate (default: {ALPHA})")
    passes = f"a worsening up to this, in the score's own unit, never fails (default: {TOLERANCE})"
    add("--tolerance", type=amount, default=TOLERANCE, help=passes)
    drops = (
        "fail where a mean over positions, or the score of a task without positions, got worse by more than X, "
        "whatever chance says; for reruns that give the same answers, without a promise on false alarms (default: off)"
    )
    add("--max-drop", type=amount, metavar="X", help=drops)
    strict = "fail where a score cannot be tested (default: where the environment variable CI is set)"
    add("--strict", action=argparse.BooleanOptionalAction, default=bool(os.environ.get("CI")), help=strict)
    add("--other-model", action="store_true", help="hold another model against the baseline on purpose")
    add("--other-prompts", action="store_true", help="accept the same examples in other prompts")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run ``lpes-eval regress``."""
    path, given = arguments.baseline, vars(arguments)
    options = Options(**{name: given[name] for name in Options.__dataclass_fields__})
    if arguments.update:
        return _update(results.read(arguments.results), path, options)
    try:
        now = results.read(arguments.results)
        if not path.exists():
            raise NoBaseline(f"{path}: no baseline there; write one with {COMMAND} RESULTS --baseline {path} --update")
        committed = load(path)
        try:
            report = regress(committed, now, options)
        except NotComparable as error:
            raise NotComparable(f"{now.path} against {path}: {error}") from None
    except UserError as error:
        row = tables.Row(("comparable", ""), outcome="error", message=str(error))
        section = tables.Section("lpes-eval", "regress", None, ("", ""), (row,))
        failure = tables.Report(COMMAND, {}, (section,), (str(error),), "could not compare")
        tables.publish(failure, arguments, text=False)
        raise
    if arguments.flips:
        report = replace(report, flips=tuple(_flips(report, committed, now)))
    tables.publish(report, arguments)
    return 1 if report.failed else 0


def _flips(report: tables.Report, baseline: Results, now: Results) -> Iterator[tables.Section]:
    """Of each metric of which a score fell, the samples whose score changed, at the labels that fell."""
    from lpes_eval.compare import flips

    for section in report.sections:
        task = now.tasks[section.task]
        metric = next(one for key, one in task.metrics.items() if key.removesuffix(",none") == section.metric)
        sign = 1 if metric.higher_is_better else -1
        fell = [row.cells[0] for row in section.rows if row.facts["change"] * sign < 0]
        labels = {"" if label == "all" else label for label in fell if label not in ("mean", "spread")}
        if labels and section.questions:
            found = flips.flipped(baseline, now, section.task, section.metric)
            yield flips.section((one for one in found if one["position"] in labels), section.task, section.metric)


def _update(now: Results, path: Path, options: Options) -> int:
    if path.exists() and not is_baseline(path):
        raise UserError(f"{path}: is there and is not a baseline, so --update does not overwrite it; name another file")
    try:
        report = regress(now, now, options)
    except NotComparable as error:
        raise NotComparable(f"{now.path}: no run could be held against this as a baseline: {error}") from None
    save(now, path)
    untested = sum(row.cells[-1] == NOT_TESTABLE for row in report.rows)
    why = "not testable (too few questions, or no --log_samples)"
    hint = f"; {untested} of its scores and spreads are {why}" if untested else ""
    print(f"{path}: baseline of {len(now.tasks)} tasks written from {now.path}{hint}")
    return 0


@dataclass
class _Score:
    """One metric of one task in both runs, whether both ``logged`` its samples, and each test's level (0: no test)."""

    task: str
    key: str
    old: Metric
    new: Metric
    logged: bool
    level: float = 0.0

    @property
    def labels(self) -> list[str]:
        """The positions and, if there are several, what is said of them all: a row each."""
        return [*self.old.values, *(["mean", "spread"] if len(self.old.values) > 1 else [])]

    @property
    def tests(self) -> int:
        """How many rows can be tested: none where one of the runs has no score for each question."""
        return len(self.labels) if self.old.by_question and self.new.by_question else 0

    @property
    def questions(self) -> int:
        """How many were asked, where there are tests."""
        return self.old.questions if self.tests else 0

    def sign(self, label: str) -> int:
        """The sign of a change for the worse."""
        return -1 if self.old.higher_is_better and label != "spread" else 1

    def changes(self) -> Sequence[Change]:
        """What moved, row by row, tested or not."""
        from lpes_eval.compare.statistics import Change, rerun_changes

        if self.level:
            old, new = self.old.matrix(self.old.values), self.new.matrix(self.old.values)
            return rerun_changes(old, new, self.level, higher_is_better=self.old.higher_is_better)
        was, is_now = ([metric.values[label] for label in self.old.values] for metric in (self.old, self.new))
        for values in (was, is_now):
            values += [math.fsum(values) / len(values), max(values) - min(values)]
        moved = zip(self.labels, was, is_now, strict=False)
        return [Change(a, b, (b - a) * self.sign(label), math.inf, math.nan) for label, a, b in moved]


def _comparable(baseline: Results, now: Results, options: Options) -> Iterator[_Score]:
    if not (options.other_model or baseline.model.is_same(now.model)):
        raise NotComparable(
            f"another model: the baseline is of {baseline.model}, the run of {now.model}; "
            "--other-model compares them on purpose, --update starts anew"
        )
    for name, task in baseline.tasks.items():
        if not (again := now.tasks.get(name)):
            raise NotComparable(f"the baseline has {name}, the run has not; run the same tasks, or --update")
        if reason := mismatch(task, again, prompts_may_differ=options.other_prompts):
            raise NotComparable(f"{name}, baseline and run: {reason}; --update starts anew")
        for key, metric in task.metrics.items():
            new = again.metrics.get(key)
            lost = [label for label in metric.values if new is None or label not in new.values]
            if new is None or lost:
                raise NotComparable(
                    f"the baseline has {key} of {name} ({lost[0]}), the run has no number for it; --update starts anew"
                )
            yield _Score(name, key, metric, new, logged=None not in (task.documents, again.documents))


def _fewest_lost(level: float) -> int:
    """How many questions must be answered worse, and none better, before a test at ``level`` can fail.

    Of n questions answered worse one and all, an exchange of the runs does as much harm with probability 2^-n.
    """
    return math.ceil(math.log2(1 / level))


def _set_levels(scores: Sequence[_Score], alpha: float) -> None:
    """Set the level of each score's tests: all of them add up to ``alpha``.

    Half of ``alpha`` goes to all tests evenly. From the other half, scores with few questions get what more it takes to
    see the loss of all their answers, the largest first, as far as it goes; those left without get 0. What is left of
    ``alpha`` goes evenly to the tests that can fail.
    """
    even = alpha / 2 / max(sum(score.tests for score in scores), 1)
    reserve = alpha / 2
    for score in sorted(scores, key=lambda one: -one.questions):
        needed = 2.0**-score.questions * (1 + 1e-9)  # above 2^-n for all rounding
        top_up = score.tests * max(0.0, needed - even)
        if score.tests and top_up <= reserve:
            score.level, reserve = max(even, needed), reserve - top_up
    able = [score for score in scores if score.level]
    left, tests = alpha - sum(score.tests * score.level for score in able), sum(score.tests for score in able)
    for score in able:
        score.level += max(0.0, left) / tests


def _section(score: _Score, options: Options, has_parts: bool) -> tables.Section:
    """The rows of one score; ``has_parts`` where other metrics of its task are tested on the same samples."""
    largest = math.inf if options.max_drop is None else max(options.max_drop, options.tolerance)
    excused = options.max_drop is not None or (has_parts and not score.old.by_question and not score.new.by_question)
    of_all = "mean" if len(score.labels) > 1 else score.labels[0]
    rows = []
    for label, change in zip(score.labels, score.changes(), strict=True):
        drop = largest if label == of_all else math.inf
        if change.worsening > drop + 1e-9:  # averages of the same drop differ in their last bits
            verdict, outcome = "DROPPED", "failure"
        elif change.p <= score.level and change.worsening > options.tolerance:
            verdict, outcome = "WORSE", "failure"
        elif math.isnan(change.p) and drop == math.inf:
            verdict, outcome = NOT_TESTABLE, "failure" if options.strict and not excused else "skipped"
        else:
            verdict, outcome = "ok by size" if math.isnan(change.p) else "ok", ""
        moved, allowed = change.new - change.old, score.sign(label) * min(max(change.allowed, options.tolerance), drop)
        numbers = (tables.score(change.old), tables.score(change.new), tables.signed(moved), tables.signed(allowed))
        p = tables.p_value(change.p)
        message = "{} in the baseline, {} now: {}, allowed {}".format(*numbers) + f" (p = {p}): {verdict}"
        facts = {"row": label, "baseline": change.old, "now": change.new, "change": moved, "allowed": allowed}
        facts |= {"p": change.p, "level": score.level, "verdict": verdict}
        rows.append(tables.Row((label, *numbers, p, verdict), facts, outcome, message))
    return tables.Section(score.task, score.key.removesuffix(",none"), score.questions or None, HEADER, tuple(rows))


def _headline(sections: Sequence[tables.Section], options: Options) -> str:
    rows = [row for section in sections for row in section.rows]
    worse, untested = sum(row.cells[-1].isupper() for row in rows), [r for r in rows if r.cells[-1] == NOT_TESTABLE]
    found = f"{worse} of {len(rows)} scores and spreads got worse" if worse else "nothing got worse beyond chance"
    if untested:
        fails = any(row.outcome == "failure" for row in untested)
        found += f"; {len(untested)} could not be tested" + (", which fails under --strict" if fails else "")
    tested = sum(not math.isnan(row.facts["p"]) for row in rows)
    besides = "" if options.max_drop is None else f", or wherever a mean drops by more than {options.max_drop:g}"
    return f"{found} ({tested} tested; a mere rerun fails at most once in {1 / options.alpha:.0f}{besides})"


def _least_losses(scores: Sequence[_Score]) -> Iterator[str]:
    for task, questions, level in sorted({(score.task, score.questions, score.level) for score in scores}):
        if level:
            fewest = _fewest_lost(level)
            yield f"{task}, {questions} questions: a loss of fewer than {fewest} cannot be told from chance."
        elif questions:
            yield f"{task}, {questions} questions: not testable, a loss of all of them cannot be told from chance."
    for score in scores:
        if not score.tests:
            why = "not an average over its samples" if score.logged else "no samples on one of the sides"
            yield f"{score.task}, {score.key.removesuffix(',none')}: not testable, {why}."


def _differences(baseline: Results, now: Results) -> Iterator[str]:
    if new := [name for name in now.tasks if name not in baseline.tasks]:
        yield f"Not in the baseline, not tested: {tables.some(new)}."
    if baseline.model != now.model:
        yield f"Model: {baseline.model} in the baseline, {now.model} now."
    for key, was, is_now in differing(baseline.provenance, now.provenance):
        if key not in ("date", "command"):
            then, today = ("none" if found is None else found for found in (was, is_now))
            yield f"{key}: {then} in the baseline, {today} now."
