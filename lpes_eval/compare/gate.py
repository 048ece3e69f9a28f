"""The regression gate as data: every score of a baseline, each with one outcome in a new run (``docs/regress.md``)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from lpes_eval.compare.results import Metric, Results, differing, mismatch
from lpes_eval.compare.tables import some
from lpes_eval.errors import UserError

if TYPE_CHECKING:
    from lpes_eval.compare.statistics import Change

ALPHA = 0.01
TOLERANCE = 0.001
BY_SIZE = "by size"


class Outcome(StrEnum):
    """What became of a score of the baseline."""

    BETTER = "better"
    OK = "ok"
    WORSE = "worse"
    NOT_TESTABLE = "not testable"
    MISSING = "missing"


@dataclass(frozen=True)
class Options:
    """What decides about a change: ``alpha`` is the false-alarm rate of the whole gate. A worsening up to ``tolerance``
    never fails; one by more than ``max_drop`` of a mean over positions, or of a score without positions, fails whatever
    chance says. Both are in the score's unit. ``strict`` fails what cannot be tested.
    """

    alpha: float = ALPHA
    tolerance: float = TOLERANCE
    max_drop: float | None = None
    strict: bool = False


@dataclass(frozen=True)
class Row:
    """One score of the baseline and what became of it.

    ``metric`` is ``METRIC,FILTER``, ``label`` a position (``"50 %"``), ``"mean"``, ``"worst"``, ``"spread"`` or
    ``"all"``. ``questions`` is 0, and p NaN, where none were tested. ``allowed`` is the largest change for the worse
    that passes, negative where that is a fall. ``why`` is said of what is missing, not testable or decided ``by size``.
    """

    task: str
    metric: str
    label: str
    questions: int
    change: Change
    allowed: float
    outcome: Outcome
    fails: bool
    why: str


@dataclass(frozen=True)
class Verdict:
    """A row for every score of the baseline, and notes for a reader."""

    baseline: Results
    now: Results
    rows: Sequence[Row]
    notes: Sequence[str]

    @property
    def failed(self) -> bool:
        """Whether a row fails."""
        return any(row.fails for row in self.rows)

    @property
    def headline(self) -> str:
        """The answer in one line."""
        count = Counter(row.outcome for row in self.rows)
        worse, missing, untested = (count[key] for key in (Outcome.WORSE, Outcome.MISSING, Outcome.NOT_TESTABLE))
        parts = [f"{worse} of {len(self.rows)} scores got worse" if worse else "nothing got worse beyond chance"]
        parts += [f"{missing} are missing"] if missing else []
        parts += [f"{untested} could not be tested"] if untested else []
        return "; ".join(parts)


def regress(baseline: Results, now: Results, options: Options = Options()) -> Verdict:
    """Hold a run against a baseline, score by score; ``UserError`` where nothing can be tested.

    The m scores with samples in both runs are tested at the level ``alpha / m`` each (Bonferroni), so that a rerun of
    the same model fails with a probability of at most ``alpha``, however many tasks there are.
    """
    scores = list(_scores(baseline, now))
    tests = sum(len(score.labels) for score in scores if score.questions)
    level = options.alpha / max(tests, 1)
    rows = [row for score in scores for row in score.rows(level, options)]
    if all(row.outcome == Outcome.NOT_TESTABLE for row in rows):
        reason = "no score has samples on both sides; run lm_eval with --log_samples, or give --max-drop"
        if tests:
            most = max(score.questions for score in scores)
            few = f"{most} questions are too few to tell the loss of all from chance"
            reason = f"{few}; evaluate at least {fewest_lost(level)}"
        raise UserError(f"{now.path} against {baseline.path}: {reason}")
    return Verdict(baseline, now, rows, [*_notes(rows, tests, level), *_differences(baseline, now)])


def fewest_lost(level: float) -> int:
    """How many questions, all answered worse, a test at ``level`` needs to fail: for n of them p is 2^-n."""
    return math.ceil(math.log2(1 / level))


@dataclass(frozen=True)
class _Score:
    """A metric of the baseline, and the same in the run, None where it has none; whether both ``logged`` samples."""

    task: str
    key: str
    old: Metric
    new: Metric | None
    logged: bool

    @property
    def labels(self) -> list[str]:
        """A row each: the positions and, if there are several, what is said of them all."""
        return [*self.old.values, *(["mean", "worst", "spread"] if len(self.old.values) > 1 else [])]

    @property
    def questions(self) -> int:
        """How many there are in both runs; 0 where one of the runs has no score for each question."""
        if self.new is None or self.old.by_question is None or self.new.by_question is None:
            return 0
        return self.old.questions if self.old.by_question.keys() == self.new.by_question.keys() else 0

    def one_sided(self, level: float) -> float:
        """The level of a test in one direction; both are tested where lm-eval does not say which is worse."""
        return level / 2 if self.old.higher_is_better is None else level

    def changes(self, level: float) -> Sequence[Change]:
        """What moved, by label; tested if the loss of every answer could fail."""
        from lpes_eval.compare.statistics import Change, rerun_changes

        up, level = self.old.higher_is_better is not False, self.one_sided(level)
        if self.new and self.questions >= fewest_lost(level):
            old, new = (metric.matrix(self.old.values) for metric in (self.old, self.new))
            return rerun_changes(old, new, level, higher_is_better=up)
        there = self.new.values if self.new else {}
        was = _with_summaries([*self.old.values.values()], up)
        now = _with_summaries([there.get(label, math.nan) for label in self.old.values], up)
        signs = [-1 if up and label != "spread" else 1 for label in self.labels]
        moved = zip(was, now, signs, strict=False)
        return [Change(old, new, (new - old) * sign, math.inf, math.nan, math.nan) for old, new, sign in moved]

    def rows(self, level: float, options: Options) -> Iterator[Row]:
        """A row for each label."""
        of_all = "mean" if len(self.labels) > 1 else self.labels[0]
        for label, change in zip(self.labels, self.changes(level), strict=True):
            if self.old.higher_is_better is None and label != "spread":  # either may be worse
                p = math.nan if math.isnan(change.p) else min(1.0, 2 * min(change.p, change.p_better))
                change = replace(change, worsening=abs(change.worsening), p=p, p_better=math.nan)
            max_drop = options.max_drop if label == of_all else None
            allowed = max(options.tolerance, min(change.allowed, math.inf if max_drop is None else max_drop))
            if label != "spread" and self.old.higher_is_better is not False:
                allowed = -allowed
            outcome, why = self._judged(change, level, options.tolerance, max_drop)
            fails = outcome in (Outcome.WORSE, Outcome.MISSING)
            if outcome == Outcome.NOT_TESTABLE and options.strict:
                is_no_average = self.logged and not (self.old.by_question or (self.new and self.new.by_question))
                is_harmless = is_no_average and change.worsening <= options.tolerance
                fails = math.isnan(change.old) or (options.max_drop is None and not is_harmless)
            yield Row(self.task, self.key, label, self.questions, change, allowed, outcome, fails, why)

    def _judged(self, change: Change, level: float, tolerance: float, max_drop: float | None) -> tuple[Outcome, str]:
        """The outcome, and why."""
        if math.isnan(change.old):
            return Outcome.NOT_TESTABLE, "no number in the baseline"
        if math.isnan(change.new):
            return Outcome.MISSING, "the run has no number for it"
        # averages of the same drop differ in their last bits
        if max_drop is not None and change.worsening > max(max_drop, tolerance) + 1e-9:
            return Outcome.WORSE, BY_SIZE
        if change.p <= level and change.worsening > tolerance:
            return Outcome.WORSE, ""
        if change.p_better <= level and -change.worsening > tolerance:
            return Outcome.BETTER, ""
        if max_drop is not None or not math.isnan(change.p):
            return Outcome.OK, BY_SIZE if math.isnan(change.p) else ""
        if self.questions:
            return Outcome.NOT_TESTABLE, f"fewer than {fewest_lost(self.one_sided(level))} questions"
        why = "not an average over its samples" if self.logged else "no samples in one of the runs"
        return Outcome.NOT_TESTABLE, why


def _with_summaries(values: list[float], up: bool) -> list[Any]:
    """The scores at positions, and their mean, worst and spread; NaN where one is missing."""
    import numpy as np

    return [*values, np.mean(values), (np.min if up else np.max)(values), np.ptp(values)]


def _scores(baseline: Results, now: Results) -> Iterator[_Score]:
    """Every metric of every task of the baseline, with that of the run."""
    there = now.leaves
    if not baseline.leaves.keys() & there.keys():
        names = some([*baseline.leaves])
        raise UserError(f"{now.path}: has none of the baseline's tasks, {names}; run the same tasks, or --update")
    for name, task in baseline.leaves.items():
        again = there.get(name)
        if again and (differs := mismatch(task, again)):
            raise UserError(f"{name} in {baseline.path} and {now.path}: {differs}; --update starts anew")
        logged = bool(again and task.documents and again.documents)
        for key, metric in task.metrics.items():
            yield _Score(name, key, metric, again.metrics.get(key) if again else None, logged)


def _notes(rows: Sequence[Row], tests: int, level: float) -> Iterator[str]:
    if tests:
        loss = f"a loss of fewer than {fewest_lost(level)} cannot be told from chance"
        yield f"{tests} tests at {level:.2g} each: of n questions, {loss}."
    reasons: dict[tuple[Outcome, str], dict[str, None]] = {}
    for row in rows:
        if row.why and row.why != BY_SIZE:
            reasons.setdefault((row.outcome, row.why), {})[f"{row.task}, {row.metric.removesuffix(',none')}"] = None
    for (outcome, why), names in reasons.items():
        yield f"{some([*names])}: {outcome}, {why}."


def _differences(baseline: Results, now: Results) -> Iterator[str]:
    if new := [name for name in now.leaves if name not in baseline.leaves]:
        yield f"Not in the baseline, not tested: {some(new)}."
    if baseline.model != now.model:
        yield f"Model: {baseline.model} in the baseline, {now.model} now."
    for key, was, is_now in differing(baseline.provenance, now.provenance):
        if key != "date":
            then, today = ("none" if value is None else value for value in (was, is_now))
            yield f"{key}: {then} in the baseline, {today} now."
