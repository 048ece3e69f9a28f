"""CMA-ES with margin, a control."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from functools import partial

from lpes_eval.errors import UserError
from search.optimizers.base import Generation, Optimizer, Steps, fittest
from search.optimizers.random import GenerationConfig
from search.space import Y_HIGH, Y_LOW, Y_STEPS, Individual, Points

SIGMA = 0.2
"""Initial standard deviation."""


class CMAES(Optimizer):
    """CMA-ES with margin (Hamano et al. 2022, arXiv 2205.13482) as the package ``cmaes`` has it.

    It searches one factor a layer, from ``start`` outwards. On the grid factors have steps, which is what the margin is
    for.
    """

    Config = GenerationConfig
    title = "CMA-ES with margin on one factor a layer, a control"
    needs_every_fitness = True
    ignores = ("curve",)

    @classmethod
    def settle(cls, args: Namespace) -> None:
        """Refuse a generation of which nothing can be selected."""
        if (size := args.mutations + 2 * args.crossovers) < 4:  # of fewer only one is selected: cmaes divides by 0
            raise UserError(
                f"--mutations {args.mutations} --crossovers {args.crossovers}: CMA-ES needs 4 individuals a "
                f"generation or more, and mutations and twice the crossovers are {size}"
            )

    def _set_up(self, model: object) -> None:
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed}: CMA-ES takes whole numbers from 0 to {2**32 - 1}")
        try:
            import numpy as np
            from cmaes import CMAwM
        except ImportError as missing:
            raise UserError(f"CMA-ES needs the package {missing.name}: pip install cmaes numpy") from None
        size, L = self.config.size, self.space.L
        self.max_evaluations = size * (self.generations + 1)
        mean, bounds = np.array([y - Y_LOW for _, y in self.start]), np.tile([0.0, Y_HIGH - Y_LOW], (L, 1))
        steps = np.full(L, 1 / Y_STEPS if self.space.grid else 0)  # 0 means continuous
        self._distribution = partial(CMAwM, mean, SIGMA, bounds, steps, seed=self.seed, population_size=size)

    def search(self) -> Steps:
        """Yield generations of as many; end with the fittest of all."""
        cma = self._distribution()
        measured: list[tuple[Individual, float]] = []
        for _ in range(self.generations + 1):
            # What cma has to be told about are its draws before they were put on the grid.
            pairs = [cma.ask() for _ in range(self.config.size)]
            individuals = [Individual(self._points(above), "cma-es") for above, _ in pairs]
            fitness = yield Generation(individuals)
            measured += zip(individuals, fitness, strict=True)
            cma.tell([(drawn, -f) for (_, drawn), f in zip(pairs, fitness, strict=True)])  # cmaes minimises
        return fittest(measured)[0]

    def _points(self, above: Iterable[float]) -> Points:
        """By how much the factors are above the lowest, as control points."""
        inside = [min(Y_LOW + max(float(y), 0.0), Y_HIGH) for y in above]
        return self.space.nearest(tuple((x, y) for (x, _), y in zip(self.start, inside, strict=True)))


OPTIMIZER = CMAES
