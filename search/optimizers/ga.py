"""The published search: a constrained genetic algorithm over control points (Algorithm 1, Table 12)."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from lpes_eval.errors import UserError
from lpes_eval.flags import amount, at_least
from lpes_eval.rng import below, stream
from search.optimizers.base import Config, Optimizer, setting
from search.space import X_STEPS, Y_HIGH, Y_LOW, Y_STEPS, Individual, Points


@dataclass(frozen=True)
class GeneticConfig(Config):
    """Table 12, in its symbols."""

    population: int = setting(32, at_least(1), "N_ps, size of the initial population")
    parents: int = setting(12, at_least(1), "N_pa, individuals that become parents")
    mutations: int = setting(16, at_least(0), "N_mu, offspring by mutation a generation")
    crossovers: int = setting(4, at_least(0), "N_cr, offspring by crossover a generation")
    crossover_tries: int = setting(4, at_least(1), "N_ct, attempts at a valid crossover")
    max_dx: float = setting(2, amount, "M_x, the most a mutation moves a point's x", "X")
    max_dy: float = setting(0.2, amount, "M_y, the most it moves a point's y", "Y")
    diverse: bool = False


class GeneticAlgorithm(Optimizer):
    """The constrained genetic algorithm (Algorithm 1).

    Example:

        >>> from search.optimizers.ga import GeneticAlgorithm
        >>> from search.space import Space
        >>> def fitness(points):  # highest where every y is 1.2
        ...     return -sum((y - 1.2) ** 2 for _, y in points)
        >>> ga = GeneticAlgorithm(Space(L=32, d=3), generations=10, seed=0)
        >>> while not ga.done:
        ...     ga.tell([fitness(individual.points) for individual in ga.ask()])
        >>> individual, _ = ga.best
        >>> [y for _, y in individual.points]
        [1.2, 1.2, 1.2, 1.2]

    Both children of a crossover are asked for, and the fitter one lives. Parents live on with the fitness they have:
    answers are decoded greedily, so measuring it again would give the same number. Ties are broken at random, anew in
    each generation: where all are equally fit, the population drifts and is not stuck.

    Each child draws from a stream of its own, and ranks the parents in an order of its own: the first (of a crossover,
    the first two) are its parents. So it stays the same, whoever else becomes a parent, while these remain, and can be
    measured before all of the last generation are (``foresee``).

    With ``config.diverse`` the initial population is a quarter uniform curves, ``start`` and y = 1 among them, a
    quarter lines that rise from 1 or fall to it, a quarter drawn evenly, and mutants of the lines. Otherwise all are
    mutants of ``start``.
    """

    Config = GeneticConfig
    title = "the published genetic algorithm"
    foresees = True
    DRAWS = 1000
    """Draws of a mutant's x before they stay where they are: with a point on nearly every layer, few obey Eq. 10."""

    def _set_up(self, model: object) -> None:
        c: GeneticConfig = self.config
        if c.parents > c.population:
            raise UserError(f"--parents {c.parents}: expected at most as many as --population, {c.population}")
        self._M_x, self._M_y = 0 if self.space.fixed_x else c.max_dx, c.max_dy
        self.max_evaluations = c.population + self.generations * (c.mutations + 2 * c.crossovers)
        self._S: dict[Points, float] = {}  # S_i with its fitness: a set, as the union of line 7 makes it

    @classmethod
    def settle(cls, args: Namespace) -> None:
        """Refuse steps that the grid does not have."""
        for name, steps in () if args.continuous else (("max_dx", X_STEPS), ("max_dy", Y_STEPS)):
            value = getattr(args, name)
            if not math.isclose(steps * value, round(steps * value)):
                raise UserError(
                    f"--{name} {value:g}: the grid has steps of {1 / steps:g} (Table 9); take a multiple, or leave "
                    "the grid (--continuous)"
                )

    @property
    def cutoff(self) -> tuple[Points, float] | None:
        """The least fit parent: an individual that does not reach its fitness never becomes one."""
        S_pa = self._select_parents()
        return (S_pa[-1], self._S[S_pa[-1]]) if len(S_pa) == self.config.parents else None

    def _propose(self) -> list[list[Individual]]:
        c = self.config
        if self.generation == 0:  # Algorithm 1, line 1
            first = [Individual(self.start, "start")]  # Eq. 8
            first += self._diverse() if c.diverse else []
            of = [individual.points for individual in first if individual.origin != "random"]
            mutants = [self._mutation(of[k % len(of)], self._rng) for k in range(c.population - len(first))]
            return [[individual] for individual in first[: c.population]] + mutants
        S_pa = self._select_parents()  # line 4
        S_cr = [children for k in range(c.crossovers) if (children := self._crossover(S_pa, k))]  # line 5
        S_mu = [
            self._mutation(self._drawn(S_pa, "mutation", k)[0], self._stream("mutation", k)) for k in range(c.mutations)
        ]  # line 6
        return S_cr + S_mu

    def _learn(self, survivors: dict[Points, float], fitness: Sequence[float]) -> None:
        S_pa = self._select_parents()  # empty before the initial population is known
        self._S = {P: self._S[P] for P in S_pa} | survivors  # S_i = S_pa ∪ S_cr ∪ S_mu (line 7)

    def _select_parents(self) -> list[Points]:
        """The N_pa fittest of S_i; ties are broken at random, so that those drawn first have no advantage."""
        return sorted(self._S, key=lambda P: (-self._S[P], self._tie(P)))[: self.config.parents]

    def _diverse(self) -> list[Individual]:
        """What the initial population has besides its first individual, but for the mutants that fill it up."""
        # However few are taken, they are spread evenly.
        halves = [0.5, 0.0, 0.25, 0.75, 0.125, 0.375, 0.625, 0.875, 1.0]
        ys = [Y_LOW + (Y_HIGH - Y_LOW) * part for part in halves]
        uniform = [self.space.line(y, y) for y in ys]
        slopes = [line for y in ys if y > Y_LOW for line in (self.space.line(Y_LOW, y), self.space.line(y, Y_LOW))]
        quarter = max(1, self.config.population // 4)
        lines: list[Points] = []
        for kind, most in ((uniform, quarter - 1), (slopes, quarter)):  # the first individual is the first of them
            lines += list(dict.fromkeys(P for P in kind if P not in (self.start, *lines)))[:most]
        drawn = [self.space.random(self._rng) for _ in range(quarter)]
        return [Individual(P, "line") for P in lines] + [Individual(P, "random") for P in drawn]

    def _stream(self, *child: str | int) -> Random:
        return stream(*child, self._seed, self.generation)

    def _drawn(self, S_pa: Sequence[Points], *child: str | int) -> list[Points]:
        """The parents in an order drawn for one child; each pair stands as it would without the others."""
        return sorted(S_pa, key=lambda P: self._stream(*child, repr(P)).random())

    def _crossover(self, S_pa: Sequence[Points], child: int) -> list[Individual]:
        """The valid children of a pair of parents, both cut at one place; none after N_ct attempts without any."""
        if len(S_pa) < 2:
            return []
        for attempt in range(self.config.crossover_tries):
            key = "crossover", child, attempt
            a, b = self._drawn(S_pa, *key)[:2]
            # An individual is (P_0^x, P_0^y, ..., P_d^x, P_d^y), so the cut may also part a point's x from its y.
            genes_a, genes_b = [gene for P_k in a for gene in P_k], [gene for P_k in b for gene in P_k]
            cut = 1 + below(len(genes_a) - 1, self._stream(*key))
            children = (genes_a[:cut] + genes_b[cut:], genes_b[:cut] + genes_a[cut:])
            pairs = [tuple(zip(genes[::2], genes[1::2], strict=True)) for genes in children]
            if valid := [Individual(P, "crossover", (a, b)) for P in pairs if self.space.contains(P)]:
                return valid
        return []

    def _mutation(self, P: Points, rng: Random) -> list[Individual]:
        """Every control point moved evenly within Eq. 9's bounds, drawn again until the x increase (Eq. 10)."""
        x, y = [x for x, _ in P], [y for _, y in P]
        last = self.space.d
        for _ in range(self.DRAWS):
            x_new = []
            for k in range(last + 1):
                low = max(0 if k == 0 else x[k - 1], x[k] - self._M_x)  # Eq. 9
                high = min(self.space.L - 1 if k == last else x[k + 1], x[k] + self._M_x)
                x_new.append(self.space.uniform(low, high, X_STEPS, rng))
            if all(a < b for a, b in pairwise(x_new)):  # neighbours' bounds touch, so two x may have met
                break
        else:
            x_new = x
        y_new = [
            self.space.uniform(max(Y_LOW, y_k - self._M_y), min(y_k + self._M_y, Y_HIGH), Y_STEPS, rng) for y_k in y
        ]
        return [Individual(tuple(zip(x_new, y_new, strict=True)), "mutation", (P,))]


OPTIMIZER = GeneticAlgorithm
