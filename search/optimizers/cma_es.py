"""CMA-ES with margin, a control."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from lpes_eval.errors import UserError
from search.optimizers.base import Generation, Optimizer, Steps, fittest
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
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed}: CMA-ES takes whole numbers from 0 to {2**32 - 1}")
        try:
            import cmaes  # noqa: F401
            import numpy  # noqa: F401
        except ImportError as missing:
            raise UserError(f"CMA-ES needs the package {missing.name}: pip install cmaes numpy") from None
        self.max_evaluations = self.config.size * (self.generations + 1)

    def search(self) -> Steps:
        """Yield generations of as many; end with the fittest of all."""
        cma = self._distribution()
        measured: list[tuple[Individual, float]] = []
        for _ in range(self.generations + 1):
            pairs = [self._draw(cma) for _ in range(self.config.size)]
            individuals = [Individual(P, "cma-es") for P, _ in pairs]
            fitness = yield Generation(individuals)
            measured += zip(individuals, fitness, strict=True)
            cma.tell([(drawn, -f) for (_, drawn), f in zip(pairs, fitness, strict=True)])  # cmaes minimises
        return fittest(measured)[0]

    def _distribution(self) -> Any:
        """The coordinates, each from 0 to 1: x of the control points, where they are searched, then y."""
        import numpy as np
        from cmaes import CMAwM

        L, start = self.space.L, self.start
        fixed = self.space.fixed_x
        x, x_step = ([], []) if fixed else ([x / (L - 1) for x, _ in start], [1 / (L - 1)] * len(start))
        y, y_step = [y - Y_LOW for _, y in start], [1 / Y_STEPS] * len(start)
        steps = np.array(x_step + y_step) * self.space.grid  # a step of 0 means continuous
        bounds = np.tile([0.0, 1.0], (len(steps), 1))
        return CMAwM(np.array(x + y), SIGMA, bounds, steps, seed=self.seed, population_size=self.config.size)

    def _draw(self, cma: Any) -> tuple[Points, Any]:
        """Control points, and what ``cma`` must be told about: its draw before it was put on the grid."""
        for _ in range(self.DRAWS):
            coordinates, drawn = cma.ask()
            if self.space.contains(P := self._to_points(coordinates)):
                return P, drawn
        return self._nearest_valid(P), drawn

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
