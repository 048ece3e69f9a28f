"""The default search: a scan of bands of layers, coarse to fine, that keeps what helps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from lpes_eval.flags import amount, at_least
from search.optimizers.base import Config, Optimizer, setting
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
"""docs/landscapes.md compares others. Where the share rises, the finalists are measured first."""
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
        self._fitness: dict[Points, float] = {}  # on as many examples as now
        self._center: tuple[Points, float] | None = None  # what was kept last
        self._kept: list[Points] = []  # all that was kept, in this order
        self._bands: dict[Points, Band] = {}  # of a generation of single bands
        self._moved: dict[Band, float] = {}  # by how much the steps of the last scan changed the fitness, at most
        self._finalists: list[Points] = []  # besides what was kept, which is measured on all examples before them
        self._final = False  # whether finalists are asked for
        self._again = True  # whether the generation is measured on more examples than what is known
        self._share = SCANS[0].share
        self._next: list[Points] = [self.start]
        levels = levels_of(self.space.L, self.config.finest)
        self._todo = [(scan, level) for scan in SCANS for level in (levels[-1:] if scan.share == 1 else levels)]
        self.generations = 2 * len(self._todo) + 2
        finalists = self.config.finalists
        bands = [(scan, min(len(level), TUNED) if scan.tune else len(level)) for scan, level in self._todo]
        share = {scan: max(scan.share, self.least_effort) for scan in SCANS}  # as it is asked
        most = [(share[scan], n * len(scan.steps) + len(_sizes(n))) for scan, n in bands]
        self.max_evaluations = 1 + sum(number for _, number in most) + finalists
        self.max_effort = share[SCANS[0]] + sum(share * number for share, number in most) + finalists
        # Two of a scan's three steps are new where few bands are kept, of fewer steps one, and an individual is given
        # up after about two thirds of its examples.
        likely = [(share[scan], 2 * n if len(scan.steps) > 2 else n) for scan, n in bands]
        self.expected_evaluations = min(1 + sum(number for _, number in likely) + finalists, self.max_evaluations)
        self.expected_effort = 2 / 3 * (sum(share * number for share, number in likely) + finalists)

    @property
    def done(self) -> bool:
        """Whether nothing is left to be measured."""
        return not self._next

    @property
    def effort(self) -> float:
        """The scan's share; all examples from the finalists on."""
        return self._share

    @property
    def best(self) -> tuple[Individual, float]:
        """The last that was kept: in a scan, what is fitter by less than the least gain is not worth another factor."""
        return (Individual(self._center[0], "kept"), self._center[1]) if self._center else super().best

    @property
    def cutoff(self) -> tuple[Points, float] | None:
        """The fittest so far, and what has to be reached to be kept."""
        if self._again or self._center is None:
            return None
        return self._center[0], self._least(self._center[1])

    def _least(self, than: float) -> float:
        """What is fitter, in a scan by the least gain, but for rounded sums."""
        return than + (1e-9 if self._share == 1 else self.config.least_gain - 1e-9)

    def _propose(self) -> list[list[Individual]]:
        origin = "band" if self._bands else "together"
        if self._center is None:
            origin = "start"
        elif self._final:
            origin = "finalist"
        parents = (self._center[0],) if self._center else ()
        return [[Individual(P, origin, parents)] for P in self._next]

    def _learn(self, survivors: dict[Points, float], fitness: Sequence[float]) -> None:
        before = self._center
        self._fitness |= survivors
        if before is not None and self._again:  # what was kept, on all examples
            before = self._center = (before[0], survivors[before[0]])
        for P, band in self._bands.items():
            assert before is not None
            self._moved[band] = max(self._moved.get(band, 0.0), abs(survivors[P] - before[1]))
        fittest = max(survivors.items(), key=lambda pair: pair[1])
        if before is None or self._better(fittest[1], before[1]):
            self._center = fittest
            self._kept.append(fittest[0])
        if self._again:
            self._next = self._finalists
        else:
            self._next = self._together(*before) if self._bands and before else []
        self._bands, self._finalists, self._again = {}, [], False
        self._final = bool(self._next) and self._final
        while not self._next and self._todo:
            scan, level = self._todo[0]
            if scan.share > self._share:
                self._share, self._again, self._final = scan.share, True, True
                fittest_first = sorted(self._fitness, key=lambda P: -self._fitness[P])
                earlier = self._kept[-1 - self.config.finalists // 2 :]
                one_of_each: dict[float, Points] = {}  # equally fit ones differ, most often, where it does not matter
                for P in [*reversed(earlier), *fittest_first]:
                    one_of_each.setdefault(self._fitness[P], P)
                kept, *others = one_of_each.values()
                self._next, self._finalists = [kept], others[: self.config.finalists - 1]
                self._fitness = {}
            else:
                if scan.tune:
                    level = sorted(level, key=lambda band: -self._moved.get(band, 0.0))[:TUNED]
                    level = [band for band in level if self._moved.get(band, 0.0) >= 2 * self.config.least_gain]
                self._bands = self._scaled(level, scan)
                again = set(self._bands.values())
                self._moved = {band: moved for band, moved in self._moved.items() if band not in again}
                self._next, self._todo = list(self._bands), self._todo[1:]

    def _scaled(self, bands: Sequence[Band], scan: Scan) -> dict[Points, Band]:
        """One band scaled by one step, for each of them; without what was measured before."""
        assert self._center is not None
        found: dict[Points, Band] = {}
        for first, end in bands:
            for step in scan.steps:
                points = list(self._center[0])
                for h in range(first, end):
                    x, y = points[h]
                    y = y * step if not self.space.grid else math.floor(y * step * scan.grid + 0.5) / scan.grid
                    points[h] = x, min(max(y, Y_LOW), Y_HIGH)
                if (P := tuple(points)) not in self._fitness:
                    found.setdefault(P, (first, end))
        return found

    def _together(self, points: Points, fitness: float) -> list[Points]:
        """The bands that made the model fitter, each with its best step: all, the better half, and so on."""
        best: dict[Band, Points] = {}
        for P in sorted(self._bands, key=lambda P: -self._fitness[P]):
            if self._better(self._fitness[P], fitness):
                best.setdefault(self._bands[P], P)
        found: list[Points] = []
        for size in _sizes(len(best)):
            together = list(points)
            for (first, end), P in list(best.items())[:size]:
                together[first:end] = P[first:end]
            if tuple(together) not in self._fitness:
                found.append(tuple(together))
        return found

    def _better(self, fitness: float, than: float) -> bool:
        return fitness > than and fitness >= self._least(than)


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
