"""Standard errors, intervals and tests of scores by position; ``docs/statistics.md`` says the same in words.

Scores have the shape (questions, positions). A question is asked at every position, so its scores hang together: the
question was drawn at random, and everything here treats a row as one cluster.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Quantity = Callable[..., Array]
"""A function of position means, ``axis`` the positions': a mean, the worst of them, their spread."""

SEED = 20260
"""Seed of every resampling: the same scores always give the same numbers."""
REPLICATES = 2000
"""Bootstrap samples of questions for the standard errors of worst and spread."""
EXCHANGED_ALL = 14
"""Up to so many questions that differ, all exchanges of two runs are counted."""


@dataclass(frozen=True)
class Estimate:
    """A score and its standard error; the error is NaN where fewer than two questions were asked."""

    value: float
    stderr: float


def mean_over_positions(scores: ArrayLike) -> Estimate:
    """The mean and its error clustered by question (Liang & Zeger, Biometrika 73, 1986; Miller, arXiv 2411.00640)."""
    averages = np.asarray(scores, dtype=float).mean(axis=1)
    error = averages.std(ddof=1) / math.sqrt(len(averages)) if len(averages) > 1 else math.nan
    return Estimate(float(averages.mean()), float(error))


def worst_position(scores: ArrayLike) -> Estimate:
    """The lowest position mean, with its bootstrap standard error."""
    if np.shape(scores)[1:] == (1,):
        return mean_over_positions(scores)
    return _bootstrapped(np.min, scores)


def spread(scores: ArrayLike) -> Estimate:
    """The best position mean minus the worst, never negative, with its bootstrap standard error."""
    return _bootstrapped(np.ptp, scores)


def _bootstrapped(quantity: Quantity, scores: ArrayLike) -> Estimate:
    """A quantity not smooth in the means: whole questions are drawn (Field & Welsh, J. R. Stat. Soc. B 69, 2007)."""
    values = np.asarray(scores, dtype=float)
    value, error = float(quantity(values.mean(axis=0), axis=-1)), math.nan
    if len(values) > 1:
        draws = quantity(_resampled_means(values, REPLICATES), axis=-1)
        error = float(draws.std() * _bessel(len(values)))
    return Estimate(value, error)


def _for_lm_eval(estimate: Callable[[ArrayLike], Estimate], part: str) -> Callable[..., float | str]:
    def aggregate(scores: ArrayLike) -> float | str:
        number: float = getattr(estimate(scores), part)
        return "N/A" if math.isnan(number) else number  # as lm-eval has it of one question

    return aggregate


OVER_POSITIONS = {
    "worst": _for_lm_eval(worst_position, "value"),
    "worst_stderr": _for_lm_eval(worst_position, "stderr"),
    "spread": _for_lm_eval(spread, "value"),
    "spread_stderr": _for_lm_eval(spread, "stderr"),
}
"""Numbers that scores of shape (questions, positions) are aggregated to, for metrics where higher is better."""


def interval(scores: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean of questions' scores: Wilson's for right-or-wrong answers, else the normal one."""
    from scipy.stats import binomtest, norm

    if (n := len(scores)) < 2:
        return None
    if set(scores) <= {0.0, 1.0}:
        low, high = binomtest(int(sum(scores)), n).proportion_ci(method="wilson")
    else:
        half = norm.ppf(0.975) * np.std(scores, ddof=1) / math.sqrt(n)
        low, high = np.mean(scores) - half, np.mean(scores) + half
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """A paired difference ``b - a`` of two models, its interval and two-sided p: NaN for one question to resample."""

    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float

    @property
    def by_chance(self) -> bool:
        """Whether chance explains it although its interval has no width, as all of a few questions changed alike."""
        return self.low == self.high and self.p >= 0.05


@dataclass(frozen=True)
class PairedComparison:
    """Paired differences at each position, and of the three numbers over all positions."""

    positions: tuple[Difference, ...]
    mean: Difference
    worst: Difference
    spread: Difference
    questions: int


def compare_paired(
    a: ArrayLike, b: ArrayLike, *, higher_is_better: bool = True, replicates: int = 10_000
) -> PairedComparison:
    """Compare two models by their scores of the same questions at the same positions, (questions, positions).

    A position of scores that are all 0 or 1 has McNemar's exact test (Psychometrika 12, 1947) and the interval of
    `paired_proportions_interval`; all else the interval ``d ± c`` of the paired bootstrap over questions, c the
    quantile of ``|d* − d|`` (Hall, J. R. Stat. Soc. B 50, 1988). p of averages is the share of all exchanges of the
    models in some questions whose difference reaches ``|d|``; that of worst and spread the share of ``|d* − d|``, but
    never below ``2^-(k-1)``, the least that k questions can show in an exchange. Each model's worst position is its
    own. ``replicates`` are bootstrap samples, and exchanges where not all are counted. ``ValueError``: other shapes.
    """
    first, second = np.asarray([a, b], dtype=float)
    questions, columns = first.shape
    means_a, means_b = first.mean(axis=0), second.mean(axis=0)
    drawn_a, drawn_b = np.hsplit(_resampled_means(np.hstack([first, second]), replicates), 2)
    changes = (second - first) / questions  # add up to the positions' differences
    least = min(1.0, 2.0 ** (1 - int(changes.any(axis=1).sum())))

    def differ(quantity: Quantity, average: bool) -> Difference:
        value_a, value_b = float(quantity(means_a, axis=-1)), float(quantity(means_b, axis=-1))
        d = value_b - value_a
        if questions < 2:
            return Difference(value_a, value_b, d, math.nan, math.nan, math.nan)
        reach = np.abs(quantity(drawn_b, axis=-1) - quantity(drawn_a, axis=-1) - d) * _bessel(questions)
        half = float(np.quantile(reach, 0.95))
        if average:
            p = _share_reaching(np.abs(_exchanges(quantity(changes, axis=-1), replicates)), abs(d))
        else:
            p = max(least, _share_reaching(np.append(reach, abs(d)), abs(d)))
        return Difference(value_a, value_b, d, d - half, d + half, p)

    def differ_at(column: int) -> Difference:
        if not _right_or_wrong(first[:, column], second[:, column]):
            return differ(partial(np.take, indices=column), average=True)
        from scipy.stats import binomtest

        losses, gains = (int((changes[:, column] * sign > 0).sum()) for sign in (-1, 1))
        interval = paired_proportions_interval(losses, gains, questions)
        p = float(binomtest(losses, losses + gains).pvalue) if losses + gains else 1.0
        value_a, value_b = float(means_a[column]), float(means_b[column])
        return Difference(value_a, value_b, value_b - value_a, *interval, p)

    return PairedComparison(
        positions=tuple(map(differ_at, range(columns))),
        mean=differ(np.mean, average=True),
        worst=differ(np.min if higher_is_better else np.max, average=False),
        spread=differ(np.ptp, average=False),
        questions=questions,
    )


def paired_proportions_interval(losses: int, gains: int, n: int) -> tuple[float, float]:
    """The adjusted Wald interval (95 %) of (gains − losses) / n (Bonett & Price, J. Educ. Behav. Stat. 37, 2012)."""
    from scipy.stats import norm

    gained, lost = (gains + 1) / (n + 2), (losses + 1) / (n + 2)
    centre = gained - lost
    half = float(norm.ppf(0.975)) * math.sqrt((gained + lost - centre**2) / (n + 2))
    return max(-1.0, centre - half), min(1.0, centre + half)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (Scand. J. Stat. 6, 1979), in the order given; NaN stays and is not counted."""
    p = np.asarray(p_values, dtype=float)
    rising = p.argsort()  # NaN last
    adjusted = np.empty_like(p)
    remaining = (~np.isnan(p)).sum() - np.arange(len(p))
    adjusted[rising] = np.maximum.accumulate(np.minimum(1.0, remaining * p[rising]))
    return adjusted.tolist()


@dataclass(frozen=True)
class Change:
    """How a quantity moved from a baseline to a new run: ``worsening`` (negative: better), ``allowed``, the most that
    passes, and the one-sided p-value of "this is a rerun" against a worse run, ``p_better`` against a better one.
    """

    old: float
    new: float
    worsening: float
    allowed: float
    p: float
    p_better: float


def rerun_changes(old: ArrayLike, new: ArrayLike, level: float, *, higher_is_better: bool = True) -> list[Change]:
    """Test whether a run is worse than an earlier run on the same questions, beyond what a mere rerun could be.

    The two are exchanged in some questions, all positions together: how often is the change as bad as the one seen? In
    a rerun ``p <= level`` has a probability of at most ``level``, at any size and for any score. Of right-or-wrong
    scores at one position this is McNemar's exact test, one-sided; elsewhere all exchanges are counted where there are
    few, or drawn at random, the one seen among them (Phipson & Smyth, arXiv 1603.05766).

    A change comes for each position and, for two positions or more, for their mean, the worst of them and their spread.
    """
    first, second = np.asarray([old, new], dtype=float)
    questions, columns = first.shape
    sign = -1.0 if higher_is_better else 1.0  # of a change for the worse

    @cache
    def exchanged() -> tuple[Array, Array]:
        """The position means of both runs after each exchange, shape (exchanges, positions)."""
        draws = max(20_000, math.ceil(20 / level))  # at least twenty beyond the threshold
        middle, half = (first + second).mean(axis=0) / 2, _exchanges(second - first, draws) / (2 * questions)
        return middle - half, middle + half

    def change_of(quantity: Quantity, sign: float) -> Change:
        was, now = (float(quantity(scores.mean(axis=0), axis=-1)) for scores in (first, second))
        old_drawn, new_drawn = (quantity(drawn, axis=-1) for drawn in exchanged())
        null = sign * (new_drawn - old_drawn)
        worsening = sign * (now - was)
        most = len(null) - 1 - math.floor(level * len(null))
        allowed = float(np.partition(null, most)[most])
        p, p_better = _share_reaching(null, worsening), _share_reaching(-null, -worsening)
        return Change(was, now, worsening, allowed, p, p_better)

    def change_at(column: int) -> Change:
        at_old, at_new = first[:, column], second[:, column]
        if not _right_or_wrong(at_old, at_new):
            return change_of(partial(np.take, indices=column), sign)
        from scipy.stats import binom

        worse, better = (int((side * (at_new - at_old) > 0).sum()) for side in (sign, -sign))
        coin = binom(worse + better, 0.5)
        allowed = (2 * float(coin.isf(level)) - (worse + better)) / questions
        worsening = (worse - better) / questions
        p, p_better = float(coin.sf(worse - 1)), float(coin.sf(better - 1))
        return Change(float(at_old.mean()), float(at_new.mean()), worsening, allowed, p, p_better)

    changes = [change_at(column) for column in range(columns)]
    if columns > 1:
        worst = np.min if higher_is_better else np.max
        changes += [change_of(np.mean, sign), change_of(worst, sign), change_of(np.ptp, 1.0)]
    return changes


def _right_or_wrong(*scores: Array) -> bool:
    return bool(np.isin(scores, (0, 1)).all())


def _bessel(questions: int) -> float:
    # A bootstrap of n questions has the variance of the sample with 1/n, not 1/(n - 1).
    return math.sqrt(questions / (questions - 1))


def _resampled_means(scores: Array, replicates: int) -> Array:
    """Draw as many questions as there are, with replacement; the position means of each draw, (draws, positions)."""
    rng, questions = np.random.default_rng(SEED), len(scores)
    # Equal rows are interchangeable: drawing kinds of rows by their frequency is the same bootstrap, with few kinds.
    kinds, frequency = np.unique(scores, axis=0, return_counts=True)
    draws = (rng.multinomial(questions, frequency / questions) for _ in range(replicates))
    return np.array([drawn @ kinds for drawn in draws]) / questions


def _exchanges(changes: Array, draws: int) -> Array:
    """Sums over questions of ``changes`` with some signs turned: all exchanges if few, else that seen and ``draws``."""
    changes = changes[changes != 0] if changes.ndim == 1 else changes[changes.any(axis=1)]
    changed = len(changes)
    if changed <= EXCHANGED_ALL or 2**changed <= draws:
        sums = np.zeros((1, *changes.shape[1:]))
        for change in changes:
            sums = np.concatenate([sums - change, sums + change])
        return sums
    rng, seen = np.random.default_rng(SEED), changes.sum(axis=0)
    chunk = min(200_000, max(1, 4_000_000 // changed))
    parts = [seen[None]]
    for start in range(0, draws, chunk):
        stays = rng.integers(0, 2, size=(min(chunk, draws - start), changed), dtype=np.int8)
        parts.append(2.0 * (stays.astype(float) @ changes) - seen)
    return np.concatenate(parts)


def _share_reaching(values: Array, seen: float) -> float:
    """The share of ``values`` that are ``seen`` or more, where equal sums may differ in their last bits."""
    return float((values >= seen - 1e-9 * np.abs(values).max() - 1e-12).mean())
