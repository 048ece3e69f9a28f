"""The default search: a scan of bands of layers, coarse to fine, that keeps what helps."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from lpes_eval.flags import amount, at_least
from search.optimizers.base import Config, Generation, Optimizer, Steps, setting
from search.space import Y_HIGH, Y_LOW, Individual, Points

Band = tuple[int, int]
"""Layers (first, last + 1)."""


class Scan(NamedTuple):
    """What a band's factors are multiplied by, on what share of the search examples, rounded to so many a unit.

    On all examples it scales the finest bands alone, and keeps whatever gains.
    """

    steps: tuple[float, ...]
    share: float
    grid: int
    tune: bool = False
    """Whether it scales only those bands whose last steps changed the fitness most."""


SCANS = (
    Scan((1.5, 1.2, 1 / 1.2), 0.25, 10),
    Scan((1.2, 1.1, 1 / 1.1), 0.25, 10),
    Scan((0.0,), 1.0, 10),  # back to 1
    Scan((1.1, 1 / 1.1), 1.0, 100, tune=True),
    Scan((1.05, 1 / 1.05), 1.0, 100, tune=True),
    Scan((1.02, 1 / 1.02), 1.0, 100, tune=True),
)
"""Where the share rises, the finalists are measured first."""
TUNED = 3
"""Bands that are tuned, at most."""


@dataclass(frozen=True)
class BandConfig(Config):
    """How far a scan goes."""

    finest: int = setting(8, at_least(1), "bands that the layers are divided into at most")
    least_gain: float = setting(0.01, amount, "fitness a change has to add, in a scan", "G")
    finalists: int = setting(6, at_least(1), "fittest of a scan that are measured on more examples")


class BandScan(Optimizer):
    """Scale whole bands of layers by a step, and keep what makes the model fitter.

    A scan takes the whole stack as one band, then its halves, quarters and so on. On each of these levels one
    generation scales every band on its own, by each step. Where several bands make the model fitter, the next
    generation tries them together: all of them, the better half, and so on down to two. The level below sets out from
    the fittest so far. The second scan takes smaller steps. Then the finalists are measured on all examples: what was
    kept last, what was kept before it (if it is better after all, or worsens no guard), and the fittest others, of
    equally fit ones the first. From there on whatever gains is kept. Every finest band is put back to 1, and stays
    there where that gains. Those whose factor matters most (first of all those whose step worsens a guard, for a
    smaller one may not) are tuned by smaller steps at last, on all examples too. It draws nothing at random.
    """

    Config = BandConfig
    title = "a scan of bands of layers, coarse to fine"
    default_start = 1.0
    ignores = ("curve", "generations")
    uses_given_up_fitness = True  # for finalists, and for the bands that are tuned

    def _set_up(self, model: object) -> None:
        levels = levels_of(self.space.L, self.config.finest)
        self._plan = [(scan, level) for scan in SCANS for level in (levels[-1:] if scan.share == 1 else levels)]
        self.generations = 2 * len(self._plan) + 2
        finalists = self.config.finalists
        bands = [(scan, min(len(level), TUNED) if scan.tune else len(level)) for scan, level in self._plan]
        share = {scan: max(scan.share, self.least_effort) for scan in SCANS}  # as it is measured
        most = [(share[scan], n * len(scan.steps) + len(_sizes(n))) for scan, n in bands]
        self.max_evaluations = 1 + sum(number for _, number in most) + finalists
        self.max_effort = share[SCANS[0]] + sum(share * number for share, number in most) + finalists
        # Two of a scan's three steps are new where few bands are kept, of fewer steps one, and an individual is given
        # up after about two thirds of its examples.
        likely = [(share[scan], 2 * n if len(scan.steps) > 2 else n) for scan, n in bands]
        self.expected_evaluations = min(1 + sum(number for _, number in likely) + finalists, self.max_evaluations)
        self.expected_effort = 2 / 3 * (sum(share * number for share, number in likely) + finalists)

    def search(self) -> Steps:
        """End with the last individual that was kept: in a scan, less than the least gain is not worth a factor."""
        share = SCANS[0].share
        kept: list[Points] = []  # in this order
        fitness: dict[Points, float] = {}  # on this share of the examples
        changes: dict[Band, float] = {}  # by how much the steps of the last scan changed the fitness, at most
        yield from self._try([self.start], "start", share, kept, fitness)
        for scan, level in self._plan:
            if scan.share > share:
                share, finalists = scan.share, self._finalists(kept, fitness)
                fitness = {}
                yield from self._try(kept[-1:], "finalist", share, kept, fitness)
                yield from self._try(finalists, "finalist", share, kept, fitness)
            if scan.tune:
                most = sorted(level, key=lambda band: -changes.get(band, 0.0))[:TUNED]
                level = [band for band in most if changes.get(band, 0.0) >= 2 * self.config.least_gain]
            center = kept[-1]
            scaled = {P: band for P, band in self._scaled(center, level, scan).items() if P not in fitness}
            yield from self._try([*scaled], "band", share, kept, fitness)
            for band in set(scaled.values()):
                changes[band] = max(abs(fitness[P] - fitness[center]) for P in scaled if scaled[P] == band)
            gains = {P: band for P, band in scaled.items() if fitness[P] >= self._least(fitness[center], share)}
            together = _together(center, gains, fitness)
            yield from self._try([P for P in together if P not in fitness], "together", share, kept, fitness)
        return Individual(kept[-1], "kept")

    def _try(
        self, points: list[Points], origin: str, share: float, kept: list[Points], fitness: dict[Points, float]
    ) -> Generator[Generation, Sequence[float], None]:
        """Measure these points on a share of the examples, and keep the fittest if it gains enough on the last kept."""
        if not points:
            return
        center = kept[-1] if kept else None
        cutoff = (center, self._least(fitness[center], share)) if center in fitness else None
        individuals = [Individual(P, origin, (center,) if center else ()) for P in points]
        fitness.update(zip(points, (yield Generation(individuals, share, cutoff)), strict=True))
        fittest = max(points, key=fitness.__getitem__)
        if cutoff is None or fitness[fittest] >= cutoff[1]:
            kept.append(fittest)

    def _least(self, than: float, share: float) -> float:
        """What is fitter, in a scan by the least gain, but for rounded sums."""
        return than + (1e-9 if share == 1 else max(self.config.least_gain - 1e-9, 1e-9))

    def _finalists(self, kept: Sequence[Points], fitness: Mapping[Points, float]) -> list[Points]:
        """Besides the last kept: some that were kept before it, and the fittest others, one of equally fit ones."""
        earlier = kept[-1 - self.config.finalists // 2 :]
        one_of_each: dict[float, Points] = {}  # equally fit ones differ, most often, where it does not matter
        for P in [*reversed(earlier), *sorted(fitness, key=lambda P: -fitness[P])]:
            one_of_each.setdefault(fitness[P], P)
        return list(one_of_each.values())[1 : self.config.finalists]

    def _scaled(self, center: Points, bands: Sequence[Band], scan: Scan) -> dict[Points, Band]:
        """One band scaled by one step, for each of them."""
        scaled: dict[Points, Band] = {}
        for first, end in bands:
            for step in scan.steps:
                points = list(center)
                for h in range(first, end):
                    x, y = points[h]
                    y = y * step if not self.space.grid else math.floor(y * step * scan.grid + 0.5) / scan.grid
                    points[h] = x, min(max(y, Y_LOW), Y_HIGH)
                scaled.setdefault(tuple(points), (first, end))
        return scaled


def _together(center: Points, gains: Mapping[Points, Band], fitness: Mapping[Points, float]) -> list[Points]:
    """The bands that made the model fitter, each with its best step: all, the better half, and so on."""
    best: dict[Band, Points] = {}
    for P in sorted(gains, key=lambda P: -fitness[P]):
        best.setdefault(gains[P], P)
    together: list[Points] = []
    for size in _sizes(len(best)):
        points = list(center)
        for (first, end), P in list(best.items())[:size]:
            points[first:end] = P[first:end]
        together.append(tuple(points))
    return together


def levels_of(L: int, finest: int) -> list[list[Band]]:
    """The whole stack, its halves and so on; of a stack with fewer layers, single layers at last."""
    counts = [1]
    while counts[-1] < min(finest, L):
        counts.append(min(2 * counts[-1], L))
    return [list(pairwise(round(i * L / n) for i in range(n + 1))) for n in counts if n <= finest]


def _sizes(n: int) -> list[int]:
    """n, its half and so on down to 2."""
    return [n >> k for k in range(n.bit_length()) if n >> k > 1]


OPTIMIZER = BandScan
