"""Scores by position, and what can be said about them: standard errors, intervals, tests.

Every function takes plain arrays of shape (questions, positions), one row a question, NaN where a question has no
score at a position. A question is asked at several positions, so its scores are not independent of each other: the
question, not the single score, is the unit that was drawn at random. All standard errors, intervals and tests here
therefore treat a row as one cluster:

* The covariance of the position means is the cluster-robust one of Liang & Zeger (Biometrika 73, 1986), which Miller
  recommends for evaluations of language models ("Adding Error Bars to Evals", arXiv 2411.00640).
* The worst position and the spread are not smooth in the means, so their standard errors come from a bootstrap that
  draws whole questions (Field & Welsh, J. R. Stat. Soc. B 69, 2007).
* Two models on the same questions are compared in pairs: averages by exchanging the models question by question, which
  is exact (McNemar's test for right-or-wrong scores at one position), the worst position and the spread by a paired
  bootstrap. Intervals come from that bootstrap too, but for right-or-wrong scores at one position.
* Two runs of *one* model are compared by exchanging them question by question, which is exact at any sample size.

``docs/statistics.md`` says the same in words. Nothing here reads a file or knows a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

SEED = 20260
"""Seed of every resampling, so that the same scores always give the same numbers."""

EXCHANGED_ALL = 14
"""Up to so many questions that differ, `compare_paired` counts all exchanges of the two models instead of drawing."""


@dataclass(frozen=True)
class Estimate:
    """A score and its standard error; the error is NaN where fewer than two questions were asked."""

    value: float
    stderr: float


@dataclass(frozen=True)
class PositionSummary:
    """One task's scores over positions.

    Attributes:
        positions: the labels of the positions, in the order of ``means``.
        means: the score at each position.
        mean: the average of ``means``; every position counts the same.
        worst: the lowest of ``means`` (the highest where lower is better).
        spread: the best of ``means`` minus the worst, never negative.
        worst_position: the label of the worst position (the first of them if several are equal).
        best_position: the label of the best position (likewise).
        questions: the number of questions, the clusters of all standard errors.
    """

    positions: tuple[Any, ...]
    means: tuple[Estimate, ...]
    mean: Estimate
    worst: Estimate
    spread: Estimate
    worst_position: Any
    best_position: Any
    questions: int

    def as_results(self, metric: str, filter_name: str = "none") -> dict[str, float]:
        """Return mean, worst and spread under the keys that lm-eval prints (``METRIC_stderr,FILTER`` beside each)."""
        rows = {metric: self.mean, f"{metric}_worst": self.worst, f"{metric}_spread": self.spread}
        keyed: dict[str, float] = {}
        for name, estimate in rows.items():
            keyed[f"{name},{filter_name}"] = estimate.value
            keyed[f"{name}_stderr,{filter_name}"] = estimate.stderr
        return keyed


@dataclass(frozen=True)
class Difference:
    """A paired difference B − A of one quantity.

    Attributes:
        a: the quantity for A, over the questions that both answered.
        b: the quantity for B, over the same questions.
        difference: ``b - a``.
        low: lower end of the confidence interval of the difference.
        high: upper end of it.
        p: two-sided p-value of "no difference"; NaN where there is one question only.
        method: where p comes from: ``"mcnemar"``, ``"exchange"`` or ``"bootstrap"``.
    """

    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float
    method: str


@dataclass(frozen=True)
class PairedComparison:
    """Paired differences at each position, and of the three numbers over all positions."""

    positions: tuple[Difference, ...]
    mean: Difference
    worst: Difference
    spread: Difference
    questions: int


@dataclass(frozen=True)
class Change:
    """How one quantity moved from a baseline to a new run, and how far it may move for the worse.

    Attributes:
        old: the baseline's value.
        new: the new run's value.
        worsening: how much worse the new run is, in the score's unit; negative if it is better.
        allowed: the largest worsening that does not count as one at the given level (infinite where any would do).
        p: one-sided p-value of "this is a rerun of the baseline".
        method: ``"mcnemar"``, ``"exchange"``, ``"unpaired"`` or ``"none"``.
    """

    old: float
    new: float
    worsening: float
    allowed: float
    p: float
    method: str


def question_matrix(
    scores: Mapping[Any, Mapping[Any, float]], positions: Sequence[Any] | None = None
) -> tuple[list[Hashable], list[Any], Array]:
    """Line up scores given by position and question.

    Args:
        scores: position -> question id -> score.
        positions: order of the columns; by default that of ``scores``.

    Returns:
        The question ids (in order of first appearance), the positions, and the scores of shape (questions, positions)
        with NaN where a question was not asked at a position.
    """
    columns = list(scores) if positions is None else list(positions)
    row: dict[Hashable, int] = {}
    for position in columns:
        for question in scores[position]:
            row.setdefault(question, len(row))
    matrix = np.full((len(row), len(columns)), np.nan)
    for column, position in enumerate(columns):
        for question, score in scores[position].items():
            matrix[row[question], column] = score
    return list(row), columns, matrix


def position_means(scores: ArrayLike) -> Array:
    """Return the mean score at each position, shape (positions,), over the questions that were asked there."""
    values = _checked(scores)
    return np.nanmean(values, axis=0)


def position_covariance(scores: ArrayLike) -> Array:
    """Return the cluster-robust covariance of the position means, shape (positions, positions).

    With r_qp the residual of question q at position p (0 where it was not asked there) and n_p the number of questions
    at p, the entry (p, p') is sum_q r_qp r_qp' / sqrt(n_p (n_p - 1) n_p' (n_p' - 1)). Its diagonal is the usual squared
    standard error of each mean; with no question missing it is the sample covariance over n; and it is positive
    semidefinite whatever is missing. A position with one question gives NaN.
    """
    values = _checked(scores)
    asked = ~np.isnan(values)
    n = asked.sum(axis=0)
    residuals = np.where(asked, values - position_means(values), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = residuals / np.sqrt(n * (n - 1.0))
    return scaled.T @ scaled


def mean_over_positions(scores: ArrayLike) -> Estimate:
    """Return the average of the position means, with its standard error clustered by question.

    With no question missing the standard error is that of the questions' own averages: sd(mean_p s_qp) / sqrt(n).
    """
    covariance = position_covariance(scores)
    positions = len(covariance)
    return Estimate(float(position_means(scores).mean()), float(np.sqrt(covariance.sum()) / positions))


def summarize(
    scores: ArrayLike,
    positions: Sequence[Any] | None = None,
    *,
    higher_is_better: bool = True,
    replicates: int = 2000,
    seed: int = SEED,
) -> PositionSummary:
    """Summarise scores over positions.

    Args:
        scores: shape (questions, positions); NaN where a question was not asked at a position.
        positions: labels of the columns; by default 0, 1, 2, ...
        higher_is_better: False for errors and perplexities, whose worst position is the highest.
        replicates: bootstrap samples of questions behind the standard errors of worst and spread.
        seed: seed of the bootstrap.

    Returns:
        The summary. Decided on purpose: one question gives NaN standard errors (nothing is known of others); equal
        scores everywhere give 0; a single position has spread 0 with standard error 0, and worst equal to mean.

    Raises:
        ValueError: if there are no questions or no positions, a position has no score at all, or a score is infinite.
    """
    values = _checked(scores)
    questions, columns = values.shape
    labels = tuple(range(columns)) if positions is None else tuple(positions)
    if len(labels) != columns:
        raise ValueError(f"{len(labels)} position labels for {columns} columns of scores")
    means = position_means(values)
    errors = np.sqrt(np.diag(position_covariance(values)))
    mean = mean_over_positions(values)
    best, worst = _best_and_worst(means, higher_is_better)
    if columns == 1:
        worst_estimate, spread_estimate = mean, Estimate(0.0, 0.0 if questions > 1 else math.nan)
    else:
        resampled = _resampled_means(values, replicates, seed)
        worst_estimate = Estimate(
            float(means[worst]), _bootstrap_stderr(_worst(resampled, higher_is_better), questions)
        )
        spread_estimate = Estimate(float(_spread(means)), _bootstrap_stderr(_spread(resampled), questions))
    return PositionSummary(
        positions=labels,
        means=tuple(Estimate(float(m), float(e)) for m, e in zip(means, errors, strict=True)),
        mean=mean,
        worst=worst_estimate,
        spread=spread_estimate,
        worst_position=labels[worst],
        best_position=labels[best],
        questions=questions,
    )


def position_summary(
    scores: Mapping[Any, Mapping[Any, float]], *, higher_is_better: bool = True, replicates: int = 2000
) -> PositionSummary:
    """Summarise scores given as position -> question id -> score; see `summarize`."""
    _, positions, matrix = question_matrix(scores)
    return summarize(matrix, positions, higher_is_better=higher_is_better, replicates=replicates)


def _over_positions(name: str, part: str) -> Callable[[ArrayLike], float | str]:
    def aggregate(scores: ArrayLike) -> float | str:
        rows = np.asarray(scores, dtype=float)
        found: float = getattr(getattr(summarize(rows, range(rows.shape[1])), name), part)
        return "N/A" if math.isnan(found) else found  # as lm-eval has it of one question

    return aggregate


OVER_POSITIONS = {
    "worst": _over_positions("worst", "value"),
    "worst_stderr": _over_positions("worst", "stderr"),
    "spread": _over_positions("spread", "value"),
    "spread_stderr": _over_positions("spread", "stderr"),
}
"""Numbers that scores of shape (questions, positions) are aggregated to, for metrics where higher is better."""


def mcnemar(losses: int, gains: int) -> float:
    """Return the two-sided exact p-value of McNemar's test.

    Args:
        losses: questions that A had right and B wrong.
        gains: questions that B had right and A wrong.

    Questions on which both agree say nothing. Under "no difference" each of the others is a fair coin, so the p-value
    is a binomial tail (McNemar, Psychometrika 12, 1947); it is exact for few and for many.
    """
    return min(1.0, 2.0 * float(_coin_tail(max(losses, gains), losses + gains)))


def paired_proportions_interval(losses: int, gains: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the adjusted Wald interval for a difference of paired proportions (gains − losses) / n.

    One question is added to the losses and one to the gains, so two to ``n``. This keeps the coverage close to its
    nominal value for few discordant pairs, where the plain Wald interval collapses to a point (Bonett & Price, J. Educ.
    Behav. Stat. 37, 2012).
    """
    from scipy.special import ndtri

    gained, lost = (gains + 1) / (n + 2), (losses + 1) / (n + 2)
    centre = gained - lost
    half = float(ndtri(0.5 + confidence / 2)) * math.sqrt((gained + lost - centre**2) / (n + 2))
    return max(-1.0, centre - half), min(1.0, centre + half)


def compare_paired(
    a: ArrayLike,
    b: ArrayLike,
    *,
    higher_is_better: bool = True,
    confidence: float = 0.95,
    replicates: int = 10_000,
    seed: int = SEED,
) -> PairedComparison:
    """Compare two models on the same questions at the same positions.

    Args:
        a: scores of A, shape (questions, positions); NaN where missing.
        b: scores of B, same shape, same order. A score counts only where both have one.
        higher_is_better: says which position is the worst.
        confidence: coverage of the intervals.
        replicates: bootstrap samples of questions, and exchanges of the models where not all are counted.
        seed: seed of both.

    Returns:
        For scores that are all 0 or 1, a position gets McNemar's exact test and the interval of
        `paired_proportions_interval`. Everything else (other scores, the mean, the worst position, the spread) gets the
        interval of the paired bootstrap over questions, the symmetric one: ``d ± c`` with c the quantile of
        ``|d* − d|`` (Hall, J. R. Stat. Soc. B 50, 1988). The worst position is looked for in each of the two models by
        itself.

        If the models are equally good on each question, it does not matter which of them is called A there: each
        question's part of a difference of averages is as likely to have the other sign. So p of the mean, and of a
        position with other scores, is the share of all such exchanges (drawn at random if more than `EXCHANGED_ALL`
        questions differ) whose difference reaches ``|d|``. Worst and spread are no such sums: their p is the share of
        ``|d* − d|`` that reach ``|d|``, but never below ``2^-(k-1)``, the least that k questions that differ can show
        in an exchange.

    Raises:
        ValueError: if the shapes differ or a position has no question that both answered.
    """
    first, second = _paired(a, b)
    questions, columns = first.shape
    means_a, means_b = position_means(first), position_means(second)
    resampled = _resampled_means(np.hstack([first, second]), replicates, seed)
    drawn_a, drawn_b = resampled[:, :columns], resampled[:, columns:]
    parts = np.nan_to_num(second - first) / (~np.isnan(first)).sum(axis=0)  # add up to the positions' differences
    least = min(1.0, 2.0 ** (1 - int((parts != 0).any(axis=1).sum())))

    def by_bootstrap(quantity: Callable[[Array], Array]) -> Difference:
        value_a, value_b = float(quantity(means_a)), float(quantity(means_b))
        deviations = quantity(drawn_b) - quantity(drawn_a) - (value_b - value_a)
        found = _bootstrap_difference(value_a, value_b, deviations, questions, confidence)
        return found if math.isnan(found.p) else replace(found, p=max(found.p, least))

    def by_exchange(average: Callable[[Array], Array]) -> Difference:
        found = by_bootstrap(average)
        return (
            found
            if math.isnan(found.p)
            else replace(found, p=_exchange_p(average(parts), replicates, seed), method="exchange")
        )

    by_position = []
    for column in range(columns):
        answered = ~np.isnan(first[:, column])
        at_a, at_b = first[answered, column], second[answered, column]
        if is_binary(at_a) and is_binary(at_b):
            losses, gains = int((at_a > at_b).sum()), int((at_b > at_a).sum())
            low, high = paired_proportions_interval(losses, gains, len(at_a), confidence)
            value_a, value_b = float(at_a.mean()), float(at_b.mean())
            p = mcnemar(losses, gains)
            by_position.append(Difference(value_a, value_b, value_b - value_a, low, high, p, "mcnemar"))
        else:
            by_position.append(by_exchange(partial(_column, column=column)))
    return PairedComparison(
        positions=tuple(by_position),
        mean=by_exchange(_mean),
        worst=by_bootstrap(partial(_worst, higher_is_better=higher_is_better)),
        spread=by_bootstrap(_spread),
        questions=questions,
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values (Scand. J. Stat. 6, 1979), in the order given; NaN stays and is not counted."""
    tested = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    adjusted = [math.nan] * len(p_values)
    running = 0.0
    for rank, index in enumerate(tested):
        running = max(running, min(1.0, (len(tested) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


@dataclass(frozen=True)
class RerunChanges:
    """What `rerun_changes` tests: each position, their mean, and their spread (both None for a single position)."""

    positions: tuple[Change, ...]
    mean: Change | None
    spread: Change | None

    @property
    def all(self) -> list[Change]:
        """The positions' changes, then those of mean and spread where there are any."""
        return [*self.positions, *(change for change in (self.mean, self.spread) if change is not None)]

    def untested(self) -> RerunChanges:
        """The same changes without a test."""

        def bare(change: Change | None) -> Any:
            return change and replace(change, allowed=math.inf, p=math.nan, method="none")

        return RerunChanges(tuple(map(bare, self.positions)), bare(self.mean), bare(self.spread))


def rerun_changes(
    old: ArrayLike,
    new: ArrayLike,
    level: float,
    *,
    higher_is_better: bool = True,
    seed: int = SEED,
) -> RerunChanges:
    """Test whether a run is worse than an earlier run on the same questions, beyond what a mere rerun could be.

    If the new run is only a rerun (same model, other hardware or library noise), it does not matter which of the two
    is called the baseline, question by question. So the test exchanges the two runs in a random half of the questions,
    all positions of a question together, and asks how often that gives a change as bad as the one seen. The
    false-alarm rate is then at most ``level`` for every quantity, at any sample size and for any kind of score. For
    right-or-wrong scores at one position this *is* McNemar's exact test, one-sided, and is computed as a binomial tail;
    the others draw exchanges at random and count the one that was seen among them (Phipson & Smyth, arXiv 1603.05766).

    Args:
        old: the baseline's scores, shape (questions, positions); NaN where missing.
        new: the new run's, same shape and order.
        level: the false-alarm rate allowed to each quantity.
        higher_is_better: direction of "worse".
        seed: seed of the random exchanges.

    Returns:
        A change for each position and, for two positions or more, for their mean and their spread.

    Raises:
        ValueError: if the shapes differ or a position has no question in common.
    """
    first, second = _paired(old, new)
    sign = -1.0 if higher_is_better else 1.0  # a change of this sign is one for the worse
    quantities: dict[Hashable, tuple[Callable[[Array], Array], float]] = {}
    found: dict[Hashable, Change] = {}
    for column in range(first.shape[1]):
        answered = ~np.isnan(first[:, column])
        at_old, at_new = first[answered, column], second[answered, column]
        if is_binary(at_old) and is_binary(at_new):
            found[column] = _mcnemar_change(at_old, at_new, -sign, level)
        else:
            quantities[column] = partial(_column, column=column), sign
    if first.shape[1] > 1:
        quantities |= {"mean": (_mean, sign), "spread": (_spread, 1.0)}
    found |= _exchange_changes(first, second, quantities, level, seed)
    positions = tuple(found[column] for column in range(first.shape[1]))
    return RerunChanges(positions, found.get("mean"), found.get("spread"))


@dataclass(frozen=True)
class Estimates:
    """The score at each position, their mean, and their spread."""

    means: tuple[Estimate, ...]
    mean: Estimate
    spread: Estimate


def from_reported(means: Sequence[Estimate]) -> Estimates:
    """Bound the standard errors of mean and spread where only those of the positions are known.

    How the answers to one question hang together over the positions is then unknown. The mean's standard error is at
    most the average of the positions' own, reached where a question's answers all agree; the spread's is taken as if
    the best and the worst position were independent, which is too wide where the answers agree.
    """
    values = [estimate.value for estimate in means]
    best, worst = means[int(np.argmax(values))], means[int(np.argmin(values))]
    return Estimates(
        means=tuple(means),
        mean=Estimate(float(np.mean(values)), float(np.mean([estimate.stderr for estimate in means]))),
        spread=Estimate(best.value - worst.value, math.hypot(best.stderr, worst.stderr)),
    )


def unpaired_changes(
    old: Estimates, new: Estimates, level: float, *, higher_is_better: bool = True, questions: int | None = None
) -> RerunChanges:
    """Test every position, and the mean and spread of several, as `unpaired_change` does.

    Args:
        old: the baseline's scores and standard errors.
        new: the new run's.
        level: the false-alarm rate allowed to each quantity.
        higher_is_better: direction of "worse".
        questions: how many each run was asked, where that is known.
    """
    test = partial(unpaired_change, level=level, questions=questions)
    positions = tuple(
        test(a, b, worse_when_higher=not higher_is_better) for a, b in zip(old.means, new.means, strict=True)
    )
    if len(positions) == 1:
        return RerunChanges(positions, None, None)
    return RerunChanges(
        positions,
        test(old.mean, new.mean, worse_when_higher=not higher_is_better),
        test(old.spread, new.spread, worse_when_higher=True),
    )


def unpaired_change(
    old: Estimate, new: Estimate, level: float, *, worse_when_higher: bool, questions: int | None = None
) -> Change:
    """Test a change between two runs of which only the scores and their standard errors are known.

    The difference is held against sqrt(se_old² + se_new²), as if the two runs had answered different questions. On the
    same questions that is too wide, never too narrow, unless one run's answers oppose the other's. Few questions make
    standard errors doubtful themselves: the quantiles are Student's with ``questions - 1`` degrees of freedom, and p is
    never below ``2^-questions``, the least that an exchange of two runs could show. An unknown standard error (NaN), or
    a single question, leaves the change untested.
    """
    from scipy.special import ndtr, ndtri, stdtr, stdtrit

    worsening = (new.value - old.value) * (1.0 if worse_when_higher else -1.0)
    error = math.hypot(old.stderr, new.stderr)
    if math.isnan(error) or questions == 1:
        return Change(old.value, new.value, worsening, math.inf, math.nan, "none")
    if error == 0.0:
        p, allowed = 0.0 if worsening > 0 else 1.0, 0.0
    elif questions is None:
        p, allowed = float(ndtr(-worsening / error)), -error * float(ndtri(level))
    else:
        p, allowed = (
            float(stdtr(questions - 1, -worsening / error)),
            -error * float(stdtrit(questions - 1, level)),
        )
    least = 0.0 if questions is None else 2.0**-questions
    if least >= level:
        allowed = math.inf
    return Change(old.value, new.value, worsening, allowed, max(p, least), "unpaired")


def is_binary(scores: ArrayLike) -> bool:
    """Tell whether every score that is there is 0 or 1."""
    values = np.asarray(scores, dtype=float)
    present = values[~np.isnan(values)]
    return bool(np.isin(present, (0.0, 1.0)).all())


def _checked(scores: ArrayLike) -> Array:
    values = np.asarray(scores, dtype=float)
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"scores must have the shape (questions, positions), at least one of each; got {values.shape}")
    if np.isinf(values).any():
        raise ValueError("scores must be finite (NaN for a missing one); got an infinite score")
    empty = np.flatnonzero(np.isnan(values).all(axis=0))
    if len(empty):
        raise ValueError(f"position {empty[0]} (counted from 0) has no score at all")
    return values


def _paired(a: ArrayLike, b: ArrayLike) -> tuple[Array, Array]:
    first, second = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if first.shape != second.shape:
        raise ValueError(f"paired scores must have one shape; got {first.shape} and {second.shape}")
    one_missing = np.isnan(first) | np.isnan(second)
    return _checked(np.where(one_missing, np.nan, first)), _checked(np.where(one_missing, np.nan, second))


def _best_and_worst(means: Array, higher_is_better: bool) -> tuple[int, int]:
    highest, lowest = int(means.argmax()), int(means.argmin())
    return (highest, lowest) if higher_is_better else (lowest, highest)


def _column(means: Array, column: int) -> Array:
    return means[..., column]


def _mean(means: Array) -> Array:
    return means.mean(axis=-1)


def _worst(means: Array, higher_is_better: bool) -> Array:
    return means.min(axis=-1) if higher_is_better else means.max(axis=-1)


def _spread(means: Array) -> Array:
    return means.max(axis=-1) - means.min(axis=-1)


def _resampled_means(scores: Array, replicates: int, seed: int) -> Array:
    """Draw questions with replacement; return the position means of each draw, shape (draws, positions).

    A draw in which some position is left without any question has no worst position, and is left out. With one question
    nothing can be drawn but that question: the result is empty.
    """
    questions = len(scores)
    if questions < 2:
        return np.empty((0, scores.shape[1]))
    rng = np.random.default_rng(seed)
    asked = ~np.isnan(scores)
    # Questions with equal rows are interchangeable: drawing kinds of rows by their frequency is the same bootstrap, and
    # right-or-wrong scores have few kinds.
    kinds, frequency = np.unique(np.hstack([np.nan_to_num(scores), asked]), axis=0, return_counts=True)
    known, counted = kinds[:, : scores.shape[1]], kinds[:, scores.shape[1] :]
    chunk = max(1, 4_000_000 // len(kinds))  # keeps the draws below 32 MB
    parts = []
    for start in range(0, replicates, chunk):
        drawn = rng.multinomial(questions, frequency / questions, size=min(chunk, replicates - start))
        times = drawn.astype(float)  # integer matrix products bypass BLAS
        counts = times @ counted
        complete = (counts > 0).all(axis=1)
        parts.append((times[complete] @ known) / counts[complete])
    return np.concatenate(parts)


def _coin_tail(heads: ArrayLike, tosses: int) -> Array:
    """Return P(at least ``heads`` heads in ``tosses`` tosses of a fair coin)."""
    from scipy.special import bdtrc

    return np.asarray(bdtrc(np.asarray(heads) - 1, tosses, 0.5))


def _bessel(questions: int) -> float:
    # A bootstrap of n questions has the variance of the sample with 1/n, not 1/(n - 1).
    return math.sqrt(questions / (questions - 1))


def _bootstrap_stderr(draws: Array, questions: int) -> float:
    return float(draws.std() * _bessel(questions)) if len(draws) else math.nan


def _bootstrap_difference(a: float, b: float, deviations: Array, questions: int, confidence: float) -> Difference:
    difference = b - a
    if not len(deviations):
        return Difference(a, b, difference, math.nan, math.nan, math.nan, "bootstrap")
    reach = np.abs(deviations) * _bessel(questions)
    half = float(np.quantile(reach, confidence))
    p = (1 + int((reach >= abs(difference) - _slack(reach)).sum())) / (1 + len(reach))
    return Difference(a, b, difference, difference - half, difference + half, p, "bootstrap")


def _slack(values: Array) -> float:
    # Equal sums that were added in another order differ in their last bits; they must count as ties.
    return 1e-9 * float(np.abs(values).max(initial=0.0)) + 1e-12


def _exchange_changes(
    old: Array,
    new: Array,
    quantities: Mapping[Hashable, tuple[Callable[[Array], Array], float]],
    level: float,
    seed: int,
) -> dict[Hashable, Change]:
    """Hold quantities of the position means against what they are if the runs are exchanged question by question.

    Args:
        old: scores of shape (questions, positions), NaN where missing in either.
        new: likewise.
        quantities: name -> function of means (..., positions), and the sign of a change of it that is for the worse.
        level: the false-alarm rate.
        seed: of the exchanges.
    """
    if not quantities:
        return {}
    draws = max(20_000, math.ceil(20 / level))  # at least twenty draws beyond the threshold
    # p < level needs fewer than this many draws as bad; the draw at that rank is thus the most that passes.
    rank = math.ceil(level * (1 + draws) - 1)
    counts, total = (~np.isnan(old)).sum(axis=0), np.nansum(old + new, axis=0)
    change = np.nan_to_num(new - old)
    change = change[(change != 0).any(axis=1)]  # a question that did not change is the same either way round
    means = position_means(old), position_means(new)
    seen = {name: tuple(float(of(mean)) for mean in means) for name, (of, _) in quantities.items()}
    # Equal sums that were added in another order differ in their last bits; they must count as ties.
    slack = 1e-9 * float((np.abs(change).sum(axis=0) / counts).max(initial=0.0)) + 1e-12
    as_bad = dict.fromkeys(quantities, 0)
    worst = {name: np.empty(0) for name in quantities}
    for shift in _exchanged_sums(change, draws, seed):
        drawn = (total - shift) / (2 * counts), (total + shift) / (2 * counts)
        for name, (of, sign) in quantities.items():
            null = sign * (of(drawn[1]) - of(drawn[0]))
            was, now = seen[name]
            as_bad[name] += int((null >= sign * (now - was) - slack).sum())
            worst[name] = np.sort(np.concatenate([worst[name], null]))[-rank:]
    changes = {}
    for name, (_, sign) in quantities.items():
        was, now = seen[name]
        p = (1 + as_bad[name]) / (1 + draws)  # what was seen is counted among the draws
        changes[name] = Change(was, now, sign * (now - was), float(worst[name][0]), p, "exchange")
    return changes


def _exchanged_sums(change: Array, draws: int, seed: int) -> Iterator[Array]:
    """Turn the sign of a random half of the rows; yield the sums over the rows, shape (some draws, columns)."""
    rng = np.random.default_rng(seed)
    chunk = min(200_000, max(1, 4_000_000 // max(1, len(change))))
    for start in range(0, draws, chunk):
        kept = rng.integers(0, 2, size=(min(chunk, draws - start), len(change)), dtype=np.int8)
        yield 2.0 * (kept.astype(float) @ change) - change.sum(axis=0)


def _exchange_p(parts: Array, draws: int, seed: int) -> float:
    """Return how often the sum of ``parts``, each with a sign of its own at random, is as far from 0 as it is."""
    parts = parts[parts != 0]
    seen = abs(float(parts.sum()))
    if len(parts) <= EXCHANGED_ALL:
        sums = np.zeros(1)
        for part in parts:
            sums = np.concatenate([sums - part, sums + part])
        return float((np.abs(sums) >= seen - _slack(sums)).mean())
    slack = 1e-9 * float(np.abs(parts).sum()) + 1e-12
    as_far = sum(int((np.abs(sums) >= seen - slack).sum()) for sums in _exchanged_sums(parts[:, None], draws, seed))
    return (1 + as_far) / (1 + draws)


def _mcnemar_change(old: Array, new: Array, sign: float, level: float) -> Change:
    n = len(old)
    worse = int((sign * (old - new) > 0).sum())
    better = int((sign * (new - old) > 0).sum())
    changed = worse + better
    counts = np.arange(changed + 2)
    tails = _coin_tail(counts, changed)  # P(at least that many of the changed ones got worse)
    most = int(counts[tails >= level].max())
    return Change(
        old=float(old.mean()),
        new=float(new.mean()),
        worsening=(worse - better) / n,
        allowed=(min(most, changed) * 2 - changed) / n,
        p=float(tails[worse]),
        method="mcnemar",
    )
