"""CMA-ES with margin, a control."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from lpes_eval.errors import UserError
from search.optimizers.base import Optimizer
from search.optimizers.random import GenerationConfig
from search.space import Y_LOW, Y_STEPS, Individual, Points

SIGMA = 0.2
"""Initial standard deviation, in widths of the range of a coordinate."""


class CMAES(Optimizer):
    """CMA-ES with margin (Hamano et al. 2022, arXiv 2205.13482) as the package ``cmaes`` has it.

    Every coordinate is searched between 0 and 1, from ``start`` outwards; on the grid, coordinates have steps, which is
    what the margin is for. Draws that break Eq. 10 are drawn again, as ``cmaes`` itself does with draws out of bounds.
    """

    Config = GenerationConfig
    title = "CMA-ES with margin, a control"
    needs_every_fitness = True
    DRAWS = 1000
    """Draws for one individual before the nearest valid x are taken instead."""

    @classmethod
    def settle(cls, args: Namespace) -> None:
        """Refuse a generation of which nothing can be selected."""
        if (size := args.mutations + 2 * args.crossovers) < 4:  # of fewer only one is selected: cmaes divides by 0
            raise UserError(
                f"--mutations {args.mutations} --crossovers {args.crossovers}: CMA-ES needs 4 individuals a "
                f"generation or more, and mutations and twice the crossovers are {size}"
            )

    def _set_up(self, model: object) -> None:
        if not 0 <= self._seed < 2**32:
            raise UserError(f"seed={self._seed}: CMA-ES takes whole numbers from 0 to {2**32 - 1}")
        try:
            import numpy as np
            from cmaes import CMAwM
        except ImportError as missing:
            raise UserError(f"CMA-ES needs the package {missing.name}: pip install cmaes numpy") from None
        L, start = self.space.L, self.start
        fixed = self.space.fixed_x
        x, x_step = ([], []) if fixed else ([x / (L - 1) for x, _ in start], [1 / (L - 1)] * len(start))
        y, y_step = [y - Y_LOW for _, y in start], [1 / Y_STEPS] * len(start)
        steps = np.array(x_step + y_step) * self.space.grid  # a step of 0 means continuous
        bounds = np.tile([0.0, 1.0], (len(steps), 1))
        size = self.config.size
        self.max_evaluations = size * (self.generations + 1)
        self._cma = CMAwM(np.array(x + y), SIGMA, bounds, steps, seed=self._seed, population_size=size)
        self._drawn: list[Any] = []  # what CMAwM must be told about: its draws before they were put on the grid

    def _propose(self) -> list[list[Individual]]:
        self._drawn, generation = [], []
        for _ in range(self.config.size):
            for _ in range(self.DRAWS):
                coordinates, drawn = self._cma.ask()
                if self.space.contains(P := self._to_points(coordinates)):
                    break
            else:
                P = self._nearest_valid(P)
            self._drawn.append(drawn)
            generation.append([Individual(P, "cma-es")])
        return generation

    def _learn(self, survivors: dict[Points, float], fitness: Sequence[float]) -> None:
        self._cma.tell([(drawn, -f) for drawn, f in zip(self._drawn, fitness, strict=True)])  # cmaes minimises

    def _to_points(self, coordinates: Sequence[float]) -> Points:
        d, L = self.space.d, self.space.L
        xs = [x for x, _ in self.space.start()]
        if not self.space.fixed_x:
            xs = [float(c) * (L - 1) for c in coordinates[: d + 1]]
        ys = [Y_LOW + min(max(float(c), 0.0), 1.0) for c in coordinates[-(d + 1) :]]
        if self.space.grid:
            xs, ys = [float(round(x)) for x in xs], [round(y * Y_STEPS) / Y_STEPS for y in ys]
        return tuple(zip(xs, ys, strict=True))

    def _nearest_valid(self, P: Points) -> Points:
        """The same points with their x in order and moved apart."""
        d, L = self.space.d, self.space.L
        apart = 1.0 if self.space.grid else 1e-6 * (L - 1)
        xs = sorted(x for x, _ in P)
        for k in range(1, d + 1):
            xs[k] = max(xs[k], xs[k - 1] + apart)
        for k in range(d, -1, -1):
            xs[k] = min(xs[k], L - 1 - (d - k) * apart)
        return tuple((x, y) for x, (_, y) in zip(xs, P, strict=True))


OPTIMIZER = CMAES
