"""Random search: what any search has to beat with as many evaluations."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from random import Random

from lpes_eval.errors import UserError
from lpes_eval.flags import at_least
from search.optimizers.base import Config, Generation, Optimizer, Steps, fittest, setting
from search.space import Individual, Points


@dataclass(frozen=True)
class GenerationConfig(Config):
    """As many individuals a generation as the genetic algorithm evaluates with the same flags."""

    mutations: int = setting(16, at_least(0), "N_mu, offspring by mutation a generation")
    crossovers: int = setting(4, at_least(0), "N_cr, offspring by crossover a generation")

    @property
    def size(self) -> int:
        """Individuals a generation: both children of a crossover are evaluated."""
        return self.mutations + 2 * self.crossovers


class RandomSearch(Optimizer):
    """Control points drawn evenly from the whole space."""

    Config = GenerationConfig
    title = "control points drawn at random, a control"
    default_start = None

    @classmethod
    def settle(cls, args: Namespace) -> None:
        """Refuse generations of nobody."""
        if not args.mutations + args.crossovers:
            raise UserError("--mutations 0 --crossovers 0: a generation has no individual; expected at least one")

    def _set_up(self, model: object) -> None:
        self.max_evaluations = self.config.size * (self.generations + 1)

    def search(self) -> Steps:
        """Yield generations of as many; end with the fittest of all."""
        rng = Random(self.seed)
        measured: list[tuple[Individual, float]] = []
        cutoff: tuple[Points, float] | None = None
        for _ in range(self.generations + 1):
            drawn = [Individual(self.space.random(rng), "random") for _ in range(self.config.size)]
            fitness = yield Generation(drawn, cutoff=cutoff)
            measured += zip(drawn, fitness, strict=True)
            best, most = fittest(measured)
            cutoff = best.points, most
        return best


OPTIMIZER = RandomSearch
