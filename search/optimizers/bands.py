"""The default search: a scan of bands of layers, coarse to fine, that keeps what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lpes_eval.flags import amount, at_least
from search.optimizers.base import Config, Optimizer, setting
from search.space import Y_HIGH, Y_LOW, Individual, Points

Band = tuple[int, int]
"""Layers (first, last + 1)."""
SCANS, SHARE = ((1.5, 1.2, 1 / 1.2), (1.2, 1.1, 1 / 1.1)), 0.25
"""What a band's factors are multiplied by in each scan, and the share of the search examples that a scan is measured
on; the finalists are measured on all of them (docs/landscapes.md compares others)."""


@dataclass(frozen=True)
class BandConfig(Config):
    """How far a scan goes."""

    finest: int = setting(8, at_least(1), "bands that the layers are divided into at most")
    least_gain: float = setting(0.01, amount, "fitness that a change has to add to be kept", "G")
    finalists: int = setting(6, at_least(1), "fittest of a scan that are measured on more examples")


class BandScan(Optimizer):
    """Scale whole bands of layers by a step, and keep what makes the model fitter.

    A scan takes the whole stack as one band, then its halves, quarters and so on. On each of these levels one
    generation scales every band on its own, by each step. Where several bands make the model fitter, the next
    generation tries them together: all of them, the better half, and so on down to two. The level below sets out from
    the fittest so far. The second scan takes smaller steps. At last the finalists are measured on all examples: what
    was kept last, what was kept before it (if it is better after all, or worsens no guard), and the fittest others.
    Another one has to gain the least gain there too. It draws nothing at random.
    """

    Config = BandConfig
    title = "a scan of bands of layers, coarse to fine"
    default_start = 1.0
    ignores = ("curve", "generations")

    def _set_up(self, model: object) -> None:
        self._fitness: dict[Points, float] = {}  # on as many examples as now
        self._center: tuple[Points, float] | None = None  # what was kept last
        self._kept: list[Points] = []  # all that was kept, in this order
        self._bands: dict[Points, Band] = {}  # of a generation of single bands
        self._finalists: list[Points] = []  # besides what was kept, which is measured on all examples before them
        self._again = True  # whether the generation is measured on more examples than what is known
        self._scan = self._level = 0
        self._next: list[Points] = [self.start]
        self._levels = _levels(self.space.L, self.config.finest)
        self.generations = 2 * len(SCANS) * len(self._levels) + 2
        finalists, bands = self.config.finalists, sum(map(len, self._levels))
        single = bands * sum(map(len, SCANS))
        together = len(SCANS) * sum(len(_sizes(len(level))) for level in self._levels)
        self.max_evaluations = 1 + single + together + finalists
        self.max_effort = SHARE * (self.max_evaluations - finalists) + finalists
        # Two steps of each scan are new where few bands are kept, and an individual is given up after about three
        # quarters of its examples.
        self.expected_evaluations = min(1 + 2 * len(SCANS) * bands + finalists, self.max_evaluations)
        self.expected_effort = SHARE * 3 / 4 * (self.expected_evaluations - finalists) + finalists

    @property
    def done(self) -> bool:
        """Whether nothing is left to be measured."""
        return not self._next

    @property
    def effort(self) -> float:
        """A scan's share; all examples for the finalists."""
        return SHARE if self._scan < len(SCANS) else 1.0

    @property
    def best(self) -> tuple[Individual, float]:
        """The last that was kept: one that is fitter by less than the least gain is not worth another factor."""
        best, fitness = super().best
        return (Individual(self._center[0], "kept"), self._center[1]) if self._center else (best, fitness)

    @property
    def cutoff(self) -> tuple[Points, float] | None:
        """The fittest so far, and what has to be reached to be kept."""
        if self._again or self._center is None:
            return None
        return self._center[0], self._center[1] + self.config.least_gain

    def _propose(self) -> list[list[Individual]]:
        origin = "band" if self._bands else "together"
        if self._center is None:
            origin = "start"
        elif self.effort == 1:
            origin = "finalist"
        parents = (self._center[0],) if self._center else ()
        return [[Individual(P, origin, parents)] for P in self._next]

    def _learn(self, survivors: dict[Points, float], fitness: Sequence[float]) -> None:
        before = self._center
        self._fitness |= survivors
        if before is not None and self._again:  # what was kept, on all examples
            before = self._center = (before[0], survivors[before[0]])
        fittest = max(survivors.items(), key=lambda pair: pair[1])
        if before is None or self._better(fittest[1], before[1]):
            self._center = fittest
            self._kept.append(fittest[0])
        if self._again:
            self._next = self._finalists
        else:
            self._next = self._together(*before) if self._bands and before else []
        self._bands, self._finalists, self._again = {}, [], False
        while not self._next and self._scan < len(SCANS):
            if self._level < len(self._levels):
                self._bands = self._scaled(self._levels[self._level], SCANS[self._scan])
                self._next, self._level = list(self._bands), self._level + 1
                continue
            self._scan, self._level = self._scan + 1, 0
            if self._scan == len(SCANS):
                assert self._center is not None
                fittest_first = sorted(self._fitness, key=lambda P: -self._fitness[P])
                earlier = self._kept[-1 - self.config.finalists // 2 :]
                kept, *others = dict.fromkeys([*reversed(earlier), *fittest_first])
                self._next, self._finalists = [kept], others[: self.config.finalists - 1]
                self._fitness, self._again = {}, True

    def _scaled(self, bands: Sequence[Band], steps: Sequence[float]) -> dict[Points, Band]:
        """One band scaled by one step, for each of them; without what was measured before."""
        assert self._center is not None
        found: dict[Points, Band] = {}
        for first, end in bands:
            for step in steps:
                points = [
                    (x, min(max(y * step, Y_LOW), Y_HIGH) if first <= h < end else y)
                    for h, (x, y) in enumerate(self._center[0])
                ]
                P = self.space.nearest(tuple(points))
                if P not in self._fitness:
                    found.setdefault(P, (first, end))
        return found

    def _together(self, points: Points, fitness: float) -> list[Points]:
        """The bands that made the model fitter, each with its best step: all, the better half, and so on."""
        best: dict[Band, Points] = {}
        for P in sorted(self._bands, key=lambda P: -self._fitness[P]):
            if self._better(self._fitness[P], fitness):
                best.setdefault(self._bands[P], P)
        found: dict[Points, None] = {}
        for size in _sizes(len(best)):
            together = list(points)
            for (first, end), P in list(best.items())[:size]:
                together[first:end] = P[first:end]
            if tuple(together) not in self._fitness:
                found[tuple(together)] = None
        return list(found)

    def _better(self, fitness: float, than: float) -> bool:
        return fitness > than and fitness >= than + self.config.least_gain - 1e-9  # sums are rounded


def _levels(L: int, finest: int) -> list[list[Band]]:
    """The whole stack, its halves and so on; of a stack with fewer layers, single layers at last."""
    counts = [1]
    while counts[-1] < min(finest, L):
        counts.append(min(2 * counts[-1], L))
    return [list(pairwise(round(i * L / n) for i in range(n + 1))) for n in counts if n <= finest]


def _sizes(n: int) -> list[int]:
    """n, its half and so on down to 2."""
    return [n >> k for k in range(n.bit_length()) if n >> k > 1]


OPTIMIZER = BandScan
