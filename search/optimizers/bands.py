"""The default search: a scan of bands of layers, coarse to fine, and the best of them put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lpes_eval.flags import at_least
from search.optimizers.base import Config, Optimizer, setting
from search.space import Y_HIGH, Y_LOW, Individual, Points

STEPS = ((1.5, 1.2), (1.2, 1 / 1.2), (1.1, 1 / 1.1))
"""What a band's factors are multiplied by, from the first rounds to the last."""
Band = tuple[int, int]
"""Layers (first, last + 1)."""


@dataclass(frozen=True)
class BandConfig(Config):
    """How far a scan goes."""

    finest: int = setting(16, at_least(1), "bands at most that the first rounds divide the layers into", least=1)
    combined: int = setting(4, at_least(2), "bands at most that are put together at once", least=2)
    individuals: int = setting(160, at_least(1), "individuals at most; the finest bands are left out first", least=1)


class BandScan(Optimizer):
    """Scale whole bands of layers by a step, and go on from the best.

    A round has two generations. The first multiplies the factors of one band: the whole stack, its halves, their halves
    and so on. The second puts bands together that each made the model fitter and do not overlap. Where the fittest of
    both is fitter than what the round set out from, the next round sets out from there; where it is not, the next one
    takes smaller steps and finer bands, and after the last step the search is done. It draws nothing at random.
    """

    Config = BandConfig
    title = "a scan of bands of layers, coarse to fine"
    default_start = 1.0

    def _set_up(self, model: object) -> None:
        self._center: tuple[Points, float] | None = None
        self._step = 0
        self._bands: dict[Points, Band] = {}  # of the round's first generation
        self._fitness: dict[Points, float] = {}
        self._next: list[list[Individual]] = [[Individual(self.start, "start")]]

    @classmethod
    def free_curve(cls) -> bool:
        """Yes: a band is a set of layers."""
        return True

    @property
    def done(self) -> bool:
        """Whether the smallest step found nothing, or the generations are spent."""
        return not self._next or super().done

    @property
    def max_evaluations(self) -> int:
        """The most individuals that will be asked for."""
        return int(self.config.individuals)

    @property
    def cutoff(self) -> tuple[Points, float] | None:
        """What the round set out from: a band that does not make the model fitter is never put together with others."""
        return self._center

    def _propose(self) -> list[list[Individual]]:
        return self._next

    def _learn(self, survivors: dict[Points, float], fitness: Sequence[float]) -> None:
        self._fitness |= survivors
        if self._center is None:
            self._center = next(iter(survivors.items()))
        elif self._bands and (together := self._put_together()):
            self._next, self._bands = together, {}
            return
        else:
            fittest = max(self._fitness.items(), key=lambda pair: pair[1])
            if fittest[1] > self._center[1]:
                self._center = fittest
            else:
                self._step += 1
        self._next = self._scan()

    def _scan(self) -> list[list[Individual]]:
        """One band changed, for every band and step; what was measured before is not asked for again."""
        assert self._center is not None
        while self._step < len(STEPS):
            self._bands = {}
            for band in self._divided(self.config.finest << self._step):
                for step in STEPS[self._step]:
                    P = self._scaled(self._center[0], band, step)
                    if P not in self._fitness:
                        self._bands.setdefault(P, band)
            if self._bands:
                left = self.config.individuals - len(self._fitness)
                self._bands = dict(list(self._bands.items())[:left])
                return [[Individual(P, "band", (self._center[0],))] for P in self._bands]
            self._step += 1
        return []

    def _put_together(self) -> list[list[Individual]]:
        """The fittest bands, two, three and so on, as far as they do not overlap and each was an improvement."""
        assert self._center is not None
        center, fitness = self._center
        better = sorted((P for P in self._bands if self._fitness[P] > fitness), key=lambda P: -self._fitness[P])
        found: list[list[Individual]] = []
        taken: list[Band] = []
        points = list(center)
        for P in better:
            first, end = self._bands[P]
            if any(first < e and f < end for f, e in taken):
                continue
            taken.append((first, end))
            points[first:end] = P[first:end]
            if 1 < len(taken) <= self.config.combined and tuple(points) not in self._fitness:
                found.append([Individual(tuple(points), "together", (center,))])
        return found[: self.config.individuals - len(self._fitness)]

    def _scaled(self, points: Points, band: Band, step: float) -> Points:
        scaled = [
            (x, min(max(y * step, Y_LOW), Y_HIGH) if band[0] <= h < band[1] else y) for h, (x, y) in enumerate(points)
        ]
        return self.space.nearest(tuple(scaled))

    def _divided(self, finest: int) -> list[Band]:
        """The whole stack, its halves, their halves and so on, each level of at most ``finest`` bands."""
        level: list[Band] = [(0, self.space.L)]
        found: list[Band] = []
        while level and len(level) <= finest:
            found += level
            level = [
                part
                for first, end in level
                if end - first > 1
                for part in ((first, (first + end) // 2), ((first + end) // 2, end))
            ]
        return found


OPTIMIZER = BandScan
