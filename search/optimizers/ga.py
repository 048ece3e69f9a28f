"""The published search: a constrained genetic algorithm over control points (Algorithm 1, Table 12)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from lpes_eval.errors import UserError
from lpes_eval.flags import amount, at_least
from lpes_eval.rng import below, choice, shuffled, stream
from search.optimizers.base import Config, Generation, Optimizer, Steps, setting
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


class GeneticAlgorithm(Optimizer):
    """The constrained genetic algorithm (Algorithm 1).

    Example:

        >>> from search.optimizers.base import drive
        >>> from search.optimizers.ga import GeneticAlgorithm
        >>> from search.space import Space
        >>> def fitness(points):  # highest where every y is 1.2
        ...     return -sum((y - 1.2) ** 2 for _, y in points)
        >>> ga = GeneticAlgorithm(Space(L=32, d=3), generations=10, seed=0)
        >>> best = drive(ga, lambda generation: [fitness(each.points) for each in generation.individuals])
        >>> [y for _, y in best.points]
        [1.2, 1.2, 1.2, 1.2]

    Both children of a crossover are measured; the fitter one enters the next population. Parents keep their fitness.
    Ties are broken at random, anew in each generation.
    """

    Config = GeneticConfig
    title = "the published genetic algorithm"
    DRAWS = 1000
    """Draws of a mutant's x before they stay where they are: with a point on nearly every layer, few obey Eq. 10."""

    def _set_up(self, model: object) -> None:
        c: GeneticConfig = self.config
        if c.parents > c.population:
            raise UserError(f"--parents {c.parents}: expected at most as many as --population, {c.population}")
        self._M_x, self._M_y = 0 if self.space.fixed_x else c.max_dx, c.max_dy
        self.max_evaluations = c.population + self.generations * (c.mutations + 2 * c.crossovers)

    def search(self) -> Steps[Individual]:
        """Algorithm 1; of siblings, which are listed together, only the fittest enters the next population."""
        rng = Random(self.seed)
        S: dict[Points, float] = {}  # S_i with its fitness
        S_pa: list[Points] = []
        measured: list[tuple[Individual, float]] = []
        offspring = [[Individual(self.start, "start")]]  # line 1
        offspring += [[self._mutation(self.start, rng)] for _ in range(self.config.population - 1)]
        for i in range(self.generations + 1):
            if i > 0:
                S_pa = self._fittest_first(S, S, i)[: self.config.parents]  # line 4
                pairs = range(self.config.crossovers if len(S_pa) > 1 else 0)
                offspring = [children for _ in pairs if (children := self._crossover(S_pa, rng))]  # line 5
                offspring += [[self._mutation(choice(S_pa, rng), rng)] for _ in range(self.config.mutations)]  # line 6
            individuals = [individual for siblings in offspring for individual in siblings]
            cutoff = (S_pa[-1], S[S_pa[-1]]) if len(S_pa) == self.config.parents else None
            fitness = yield Generation(individuals, cutoff=cutoff)
            measured += zip(individuals, fitness, strict=True)
            f = {individual.points: value for individual, value in zip(individuals, fitness, strict=True)}
            fittest_of = [self._fittest_first([each.points for each in siblings], f, i)[0] for siblings in offspring]
            S = {P: S[P] for P in S_pa} | {P: f[P] for P in fittest_of}  # line 7
        return max(measured, key=lambda pair: pair[1])[0]

    def _fittest_first(self, points: Iterable[Points], fitness: Mapping[Points, float], i: int) -> list[Points]:
        """In order of their fitness. Ties are broken at random, so that those drawn first have no advantage."""

        def lot(P: Points) -> float:
            # the same whatever the fitness of others, who may have been given up early
            return stream("lot", self.seed, i, repr(P)).random()

        return sorted(points, key=lambda P: (-fitness[P], lot(P)))

    def _crossover(self, S_pa: Sequence[Points], rng: Random) -> list[Individual]:
        """The valid children of two parents, cut at one place and exchanged behind it; none after N_ct attempts."""
        for _ in range(self.config.crossover_tries):
            a, b = shuffled(S_pa, rng)[:2]
            # An individual is (P_0^x, P_0^y, ..., P_d^x, P_d^y), so the cut may also part a point's x from its y.
            genes_a, genes_b = [gene for P_k in a for gene in P_k], [gene for P_k in b for gene in P_k]
            cut = 1 + below(len(genes_a) - 1, rng)
            children = (genes_a[:cut] + genes_b[cut:], genes_b[:cut] + genes_a[cut:])
            pairs = [tuple(zip(genes[::2], genes[1::2], strict=True)) for genes in children]
            if valid := [Individual(P, "crossover", (a, b)) for P in pairs if self.space.contains(P)]:
                return valid
        return []

    def _mutation(self, P: Points, rng: Random) -> Individual:
        """Every control point moved evenly within Eq. 9's bounds, drawn again until the x increase (Eq. 10)."""
        x, y = [x for x, _ in P], [y for _, y in P]
        last = self.space.d
        for _ in range(self.DRAWS):
            x_new = []
            for k in range(last + 1):
                low = max(0 if k == 0 else x[k - 1], x[k] - self._M_x)  # Eq. 9
                high = min(self.space.L - 1 if k == last else x[k + 1], x[k] + self._M_x)
                x_new.append(self.space.uniform(low, high, X_STEPS, rng))
            if all(a < b for a, b in pairwise(x_new)):
                break
        else:
            x_new = x
        y_new = [
            self.space.uniform(max(Y_LOW, y_k - self._M_y), min(y_k + self._M_y, Y_HIGH), Y_STEPS, rng) for y_k in y
        ]
        return Individual(tuple(zip(x_new, y_new, strict=True)), "mutation", (P,))


OPTIMIZER = GeneticAlgorithm
