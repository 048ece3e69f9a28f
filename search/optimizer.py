"""The search's optimisers, all with the same face: ``ask()`` for individuals, ``tell()`` their fitness.

``GeneticAlgorithm`` is the published one (Algorithm 1, Table 12); ``CMAES`` and ``RandomSearch`` are the controls that
it has to beat. None of them knows what is optimised: an individual is control points, its fitness a number, and higher
is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

from lpes_eval.errors import UserError
from lpes_eval.rng import below, choice, shuffled, stream

Points = tuple[tuple[float, float], ...]
"""(P_0, ..., P_d): one pair (P_k^x, P_k^y) a control point."""

Y_LOW, Y_START, Y_HIGH = 1.0, 1.5, 2.0  # Eq. 8 and 9
X_STEPS, Y_STEPS = 1, 10
"""Table 9: grid steps in one unit. Steps are counted as integers, so nothing drifts off the grid."""


@dataclass(frozen=True)
class Individual:
    """Control points, the operator that made them, and the individuals that it made them from."""

    points: Points
    origin: str
    parents: tuple[Points, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As data that JSON keeps exactly."""
        return {"points": _lists(self.points), "origin": self.origin, "parents": [_lists(P) for P in self.parents]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Individual:
        """The individual that ``to_dict()`` was called on."""
        return cls(_points(data["points"]), data["origin"], tuple(_points(P) for P in data["parents"]))


@dataclass(frozen=True)
class Space:
    """The control points that may be searched.

    Attributes:
        L: layers under the curve (App. B: "the number of scaled layers").
        d: degree; there are ``d + 1`` control points.
        grid: Table 9's grid, 1 in x and 0.1 in y; otherwise both are continuous.
        fixed_x: x stay where Eq. 8 puts them. With ``d = L - 1`` that is one free factor a layer.
    """

    L: int
    d: int = 3
    grid: bool = True
    fixed_x: bool = False

    def __post_init__(self) -> None:
        """Refuse what Eq. 10 leaves no room for."""
        if self.d < 1:
            raise UserError(f"{self.d + 1} control point(s): a curve needs at least 2")
        if self.L < 2 or (self.grid and self.d > self.L - 1):
            raise UserError(
                f"{self.d + 1} control points do not fit {self.L} layer(s): on the grid their x are different whole "
                f"numbers from 0 to {self.L - 1} (Table 9, Eq. 10); take fewer --control_points, or leave the grid "
                "(--continuous)"
            )

    @classmethod
    def free(cls, L: int, grid: bool = True) -> Space:
        """One factor a layer and no curve (Table 7, "brute force"): a control point stands on every layer."""
        return cls(L, L - 1, grid, fixed_x=True)

    def start(self) -> Points:
        """The individual that the search sets out from (Eq. 8), its x rounded to the grid."""
        return self.line(Y_START, Y_START)

    def line(self, first: float, last: float) -> Points:
        """A straight line over depth from y = ``first`` to y = ``last``, at the x of Eq. 8, rounded to the grid."""
        xs = [k * (self.L - 1) / self.d for k in range(self.d + 1)]
        ys = [min(max(first + (last - first) * k / self.d, Y_LOW), Y_HIGH) for k in range(self.d + 1)]
        return self.nearest(tuple(zip(xs, ys, strict=True)))

    def nearest(self, points: Points) -> Points:
        """The points themselves, or where they come to stand on the grid."""
        if not self.grid:
            return points
        return tuple((float(math.floor(x + 0.5)), math.floor(y * Y_STEPS + 0.5) / Y_STEPS) for x, y in points)

    def contains(self, points: Points) -> bool:
        """Whether the points obey Eq. 10, the range of y, and the grid."""
        return (
            len(points) == self.d + 1
            and points[0][0] >= 0
            and points[-1][0] <= self.L - 1
            and all(a < b for (a, _), (b, _) in pairwise(points))
            and all(self.allows(y, self.grid) for _, y in points)
            and (not self.fixed_x or all(x == at for (x, _), (at, _) in zip(points, self.start(), strict=True)))
            and (not self.grid or all(x == round(x) for x, _ in points))
        )

    @staticmethod
    def allows(y: float, grid: bool) -> bool:
        """Whether a control point may stand at this height (Eq. 9), on Table 9's grid or off it."""
        return Y_LOW <= y <= Y_HIGH and (not grid or y == round(y * Y_STEPS) / Y_STEPS)

    def random(self, rng: Random) -> Points:
        """Control points drawn evenly from the whole space."""
        if self.fixed_x:
            xs = [x for x, _ in self.start()]
        elif self.grid:
            xs = sorted(float(x) for x in shuffled(range(self.L), rng)[: self.d + 1])
        else:
            xs = sorted((self.L - 1) * rng.random() for _ in range(self.d + 1))
        return tuple((x, self.draw(Y_LOW, Y_HIGH, Y_STEPS, rng)) for x in xs)

    def draw(self, low: float, high: float, steps: int, rng: Random) -> float:
        """A number from ``[low, high]``, both ends included on a grid of ``steps`` in one unit."""
        if not self.grid:
            return min(low + (high - low) * rng.random(), high)
        first, last = math.ceil(low * steps - 1e-9), math.floor(high * steps + 1e-9)
        return (first + below(last - first + 1, rng)) / steps


class Optimizer:
    """What the optimisers share: generations of broods, asked for and told.

    A brood is one individual, or several of which only the fittest one survives. ``ask()`` gives a generation's
    individuals, ``tell()`` takes their fitness in the same order. Everything drawn comes from the optimiser's own
    generator, so a seed gives the same search anywhere. ``state_dict()`` is plain data; an instance made with the same
    arguments and given that state goes on as if nothing had happened.
    """

    def __init__(self, space: Space, T: int, seed: int) -> None:
        _check_settings(T=(T, 0))
        self.space = space
        self._T = T
        self._i = 0
        self._broods: list[list[Individual]] | None = None  # asked for and not yet told
        self._best: tuple[Individual, float] | None = None
        self._told_so_far = 0
        self._seed = seed
        self._rng = Random(seed)

    @property
    def generation(self) -> int:
        """Number of the generation that ``ask()`` gives: 0 for the initial one, T for the last."""
        return self._i

    @property
    def last_generation(self) -> int:
        """T."""
        return self._T

    @property
    def done(self) -> bool:
        """Whether generation T has been told too."""
        return self._i > self._T

    @property
    def best(self) -> tuple[Individual, float]:
        """The fittest individual ever told, and its fitness; of equals, the first one told."""
        if self._best is None:
            raise ValueError("no best individual: nothing has been told yet")
        return self._best

    @property
    def told_so_far(self) -> int:
        """Individuals whose fitness was told, those of earlier runs included."""
        return self._told_so_far

    @property
    def asking_seconds(self) -> float:
        """How long the model worked for the individuals that ``ask()`` gives, before they are evaluated."""
        return 0.0

    @property
    def max_evaluations(self) -> int:
        """The most individuals that will be asked for."""
        raise NotImplementedError

    @property
    def threshold(self) -> float:
        """An individual that is asked for now and does not reach this fitness has no effect, however low it is."""
        return -math.inf

    @property
    def rival(self) -> Points | None:
        """The individual whose fitness the threshold is; None where there is none yet."""
        return None

    def ask(self) -> list[Individual]:
        """The individuals to be evaluated next: the same ones until they are told, none once the search is done."""
        if self.done:
            return []
        if self._broods is None:
            self._broods = self._propose()
        return [individual for brood in self._broods for individual in brood]

    def tell(self, fitness: Sequence[float]) -> None:
        """Take the fitness of the individuals that ``ask()`` gave, in their order."""
        asked = self.ask()
        if len(fitness) != len(asked):
            raise ValueError(f"{len(asked)} individuals were asked for, {len(fitness)} fitness values told")
        if not all(math.isfinite(f) for f in fitness):
            raise ValueError(f"fitness must be finite, not {list(fitness)}")
        for individual, f in zip(asked, fitness, strict=True):
            if self._best is None or f > self._best[1]:
                self._best = individual, float(f)
        told = iter(fitness)
        survivors: dict[Points, float] = {}
        for brood in self._broods or []:
            scored = [(individual.points, float(next(told))) for individual in brood]
            P, f = min(scored, key=lambda pair: (-pair[1], self._lot(pair[0])))
            survivors[P] = f
        self._learn(survivors, fitness)
        self._broods = None
        self._told_so_far += len(fitness)
        self._i += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes during a search, as data that JSON keeps exactly."""
        version, words, gauss = self._rng.getstate()
        return {
            "generation": self._i,
            "broods": self._broods and [[individual.to_dict() for individual in brood] for brood in self._broods],
            "best": self._best and [self._best[0].to_dict(), self._best[1]],
            "rng": [version, list(words), gauss],
            "told_so_far": self._told_so_far,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict()``'s data, in an instance made with the same arguments."""
        self._i = state["generation"]
        self._told_so_far = state.get("told_so_far", 0)
        broods, best = state["broods"], state["best"]
        self._broods = broods and [[Individual.from_dict(data) for data in brood] for brood in broods]
        self._best = (Individual.from_dict(best[0]), best[1]) if best else None
        version, words, gauss = state["rng"]
        self._rng.setstate((version, tuple(words), gauss))

    def _lot(self, P: Points) -> float:
        """What decides between equally fit individuals: it hangs on the seed, the generation and the points alone."""
        return stream("lot", self._seed, self._i, repr(P)).random()

    def _propose(self) -> list[list[Individual]]:
        """The next generation's broods."""
        raise NotImplementedError

    def _learn(self, survivors: dict[Points, float], fitness: Sequence[float]) -> None:
        """Take in a generation: each brood's fittest, and the fitness of all that were asked for."""


class GeneticAlgorithm(Optimizer):
    """The constrained genetic algorithm over control points (Algorithm 1, Table 12).

    Example:

        >>> from search.optimizer import GeneticAlgorithm, Space
        >>> def fitness(points):  # highest where every y is 1.2
        ...     return -sum((y - 1.2) ** 2 for _, y in points)
        >>> ga = GeneticAlgorithm(Space(L=32, d=3), T=10, seed=0)
        >>> while not ga.done:
        ...     ga.tell([fitness(individual.points) for individual in ga.ask()])
        >>> individual, _ = ga.best
        >>> [y for _, y in individual.points]
        [1.2, 1.2, 1.2, 1.2]

    Both children of a crossover are asked for, and the fitter one lives. Parents live on with the fitness they have:
    answers are decoded greedily, so measuring it again would give the same number. Between equally fit individuals a
    lot decides, drawn anew in each generation: where all are equally fit, the population drifts and is not stuck.

    Args:
        space: the control points that may be searched.
        N_ps: size of the initial population.
        N_pa: individuals selected as parents.
        T: generations after the initial one.
        N_mu: offspring by mutation, a generation.
        N_cr: offspring by crossover, a generation.
        N_ct: attempts at a valid crossover before it is given up.
        M_x: how far a mutation may move a control point's x.
        M_y: how far it may move a control point's y.
        start: the first individual; by default Eq. 8.
        wide: let the initial population be of wide origin: a quarter uniform curves, ``start`` and y = 1 among them, a
            quarter lines that rise from 1 or fall to it, a quarter drawn evenly, and mutants of the lines. Otherwise
            all are mutants of ``start``.
        seed: of the random generator.
    """

    DRAWS = 1000
    """Draws of a mutant's x before they stay where they are: with a point on nearly every layer, few obey Eq. 10."""

    def __init__(
        self,
        space: Space,
        *,
        N_ps: int = 32,
        N_pa: int = 12,
        T: int = 20,
        N_mu: int = 16,
        N_cr: int = 4,
        N_ct: int = 4,
        M_x: float = 2,
        M_y: float = 0.2,
        start: Points | None = None,
        wide: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(space, T, seed)
        _check_settings(N_ps=(N_ps, 1), N_pa=(N_pa, 1), N_mu=(N_mu, 0), N_cr=(N_cr, 0), N_ct=(N_ct, 1))
        _check_settings(M_x=(M_x, 0), M_y=(M_y, 0))
        if N_pa > N_ps:
            raise UserError(f"N_pa={N_pa} parents cannot be selected from a population of N_ps={N_ps}")
        self._N_ps, self._N_pa = N_ps, N_pa
        self._N_mu, self._N_cr, self._N_ct = N_mu, N_cr, N_ct
        self._M_x, self._M_y = 0 if space.fixed_x else M_x, M_y
        self._start, self._wide = start or space.start(), wide
        self._S: dict[Points, float] = {}  # S_i with its fitness: a set, as the union of line 7 makes it

    @property
    def max_evaluations(self) -> int:
        """The most individuals that will be asked for: both children of every crossover, no parent twice."""
        return self._N_ps + self._T * (self._N_mu + 2 * self._N_cr)

    @property
    def threshold(self) -> float:
        """The fitness of the least fit parent: an individual that does not reach it never becomes one."""
        return -math.inf if self.rival is None else self._S[self.rival]

    @property
    def rival(self) -> Points | None:
        """The least fit parent."""
        S_pa = self._select_parents()
        return S_pa[-1] if len(S_pa) == self._N_pa else None

    def _propose(self) -> list[list[Individual]]:
        if self._i == 0:  # Algorithm 1, line 1
            first = [Individual(self._start, "start")]  # Eq. 8
            first += self._wide_origin() if self._wide else []
            of = [individual.points for individual in first if individual.origin != "random"]
            mutants = [self._mutation(of[k % len(of)]) for k in range(self._N_ps - len(first))]
            return [[individual] for individual in first[: self._N_ps]] + mutants
        S_pa = self._select_parents()  # line 4
        S_cr = [children for _ in range(self._N_cr) if (children := self._crossover(S_pa))]  # line 5
        S_mu = [self._mutation(choice(S_pa, self._rng)) for _ in range(self._N_mu)]  # line 6
        return S_cr + S_mu

    def _learn(self, survivors: dict[Points, float], fitness: Sequence[float]) -> None:
        S_pa = self._select_parents()  # empty before the initial population is known
        self._S = {P: self._S[P] for P in S_pa} | survivors  # S_i = S_pa ∪ S_cr ∪ S_mu (line 7)

    def _select_parents(self) -> list[Points]:
        """The N_pa fittest of S_i; a lot decides between equals, so that those drawn first have no advantage."""
        return sorted(self._S, key=lambda P: (-self._S[P], self._lot(P)))[: self._N_pa]

    def _wide_origin(self) -> list[Individual]:
        """What the initial population has besides its first individual, but for the mutants that fill it up."""
        # However few are taken, they are spread evenly.
        halves = [0.5, 0.0, 0.25, 0.75, 0.125, 0.375, 0.625, 0.875, 1.0]
        ys = [Y_LOW + (Y_HIGH - Y_LOW) * part for part in halves]
        uniform = [self.space.line(y, y) for y in ys]
        slopes = [line for y in ys if y > Y_LOW for line in (self.space.line(Y_LOW, y), self.space.line(y, Y_LOW))]
        quarter = max(1, self._N_ps // 4)
        lines: list[Points] = []
        for kind, most in ((uniform, quarter - 1), (slopes, quarter)):  # the first individual is the first of them
            lines += list(dict.fromkeys(P for P in kind if P not in (self._start, *lines)))[:most]
        drawn = [self.space.random(self._rng) for _ in range(quarter)]
        return [Individual(P, "line") for P in lines] + [Individual(P, "random") for P in drawn]

    def _crossover(self, S_pa: Sequence[Points]) -> list[Individual]:
        """The valid children of a pair of parents, both cut at one place; none after N_ct attempts without any."""
        if len(S_pa) < 2:
            return []
        for _ in range(self._N_ct):
            a, b = shuffled(S_pa, self._rng)[:2]
            # An individual is (P_0^x, P_0^y, ..., P_d^x, P_d^y), so the cut may also part a point's x from its y.
            genes_a, genes_b = [gene for P_k in a for gene in P_k], [gene for P_k in b for gene in P_k]
            cut = 1 + below(len(genes_a) - 1, self._rng)
            children = (genes_a[:cut] + genes_b[cut:], genes_b[:cut] + genes_a[cut:])
            pairs = [tuple(zip(genes[::2], genes[1::2], strict=True)) for genes in children]
            if valid := [Individual(P, "crossover", (a, b)) for P in pairs if self.space.contains(P)]:
                return valid
        return []

    def _mutation(self, P: Points) -> list[Individual]:
        """Every control point moved evenly within Eq. 9's bounds, drawn again until the x increase (Eq. 10)."""
        x, y = [x for x, _ in P], [y for _, y in P]
        last = self.space.d
        for _ in range(self.DRAWS):
            x_new = []
            for k in range(last + 1):
                low = max(0 if k == 0 else x[k - 1], x[k] - self._M_x)  # Eq. 9
                high = min(self.space.L - 1 if k == last else x[k + 1], x[k] + self._M_x)
                x_new.append(self.space.draw(low, high, X_STEPS, self._rng))
            if all(a < b for a, b in pairwise(x_new)):  # neighbours' bounds touch, so two x may have met
                break
        else:
            x_new = x
        y_new = [
            self.space.draw(max(Y_LOW, y_k - self._M_y), min(y_k + self._M_y, Y_HIGH), Y_STEPS, self._rng) for y_k in y
        ]
        return [Individual(tuple(zip(x_new, y_new, strict=True)), "mutation", (P,))]

    def state_dict(self) -> dict[str, Any]:
        """As ``Optimizer.state_dict``, and the population."""
        return super().state_dict() | {"population": [[_lists(P), f] for P, f in self._S.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As ``Optimizer.load_state_dict``, and the population."""
        super().load_state_dict(state)
        self._S = {_points(P): f for P, f in state["population"]}


class RandomSearch(Optimizer):
    """Control points drawn evenly from the whole space: what any search has to beat with as many evaluations.

    Args:
        space: the control points that may be searched.
        N: individuals a generation.
        T: generations after the first one.
        seed: of the random generator.
    """

    def __init__(self, space: Space, *, N: int = 24, T: int = 20, seed: int = 0) -> None:
        super().__init__(space, T, seed)
        _check_settings(N=(N, 1))
        self._N = N

    @property
    def max_evaluations(self) -> int:
        """How many individuals will be asked for."""
        return self._N * (self._T + 1)

    @property
    def threshold(self) -> float:
        """The best fitness told."""
        return self._best[1] if self._best else -math.inf

    @property
    def rival(self) -> Points | None:
        """The best individual."""
        return self._best[0].points if self._best else None

    def _propose(self) -> list[list[Individual]]:
        return [[Individual(self.space.random(self._rng), "random")] for _ in range(self._N)]


class CMAES(Optimizer):
    """CMA-ES with margin (Hamano et al. 2022, arXiv 2205.13482) as the package ``cmaes`` has it.

    Every coordinate is searched between 0 and 1, from ``start`` outwards; on the grid, coordinates have steps, which is
    what the margin is for. Draws that break Eq. 10 are drawn again, as ``cmaes`` itself does with draws out of bounds.
    Its state is the fitness it was told: with the same seed it is brought back by telling it the same again.

    Args:
        space: the control points that may be searched.
        N: individuals a generation; by default what ``cmaes`` proposes for the number of coordinates.
        T: generations after the first one.
        sigma: initial standard deviation, in widths of the range of a coordinate.
        start: the first mean; by default Eq. 8.
        seed: of the random generator.
    """

    DRAWS = 1000
    """Draws for one individual before the nearest valid x are taken instead."""

    def __init__(
        self,
        space: Space,
        *,
        N: int | None = None,
        T: int = 20,
        sigma: float = 0.2,
        start: Points | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(space, T, seed)
        _check_settings(N=(4 if N is None else N, 4))  # of fewer only one is selected, and cmaes divides by 0
        if not sigma > 0:
            raise UserError(f"sigma={sigma}: expected a number above 0")
        if not 0 <= seed < 2**32:
            raise UserError(f"seed={seed}: CMA-ES takes whole numbers from 0 to {2**32 - 1}")
        self._arguments = (N, sigma, start or space.start(), seed)
        self._told: list[list[float]] = []
        self._start()

    def _start(self) -> None:
        try:
            import numpy as np
            from cmaes import CMAwM
        except ImportError as missing:
            raise UserError(f"CMA-ES needs the package {missing.name}: pip install cmaes numpy") from None
        N, sigma, start, seed = self._arguments
        L, grid = self.space.L, self.space.grid
        x, x_step = ([], []) if self.space.fixed_x else ([x / (L - 1) for x, _ in start], [1 / (L - 1)] * len(start))
        y, y_step = [y - Y_LOW for _, y in start], [1 / Y_STEPS] * len(start)
        steps = np.array(x_step + y_step) * grid  # a step of 0 means continuous
        bounds = np.tile([0.0, 1.0], (len(steps), 1))
        self._cma = CMAwM(np.array(x + y), sigma, bounds, steps, seed=seed, population_size=N)
        self._drawn: list[Any] = []  # what CMAwM must be told about: its draws before they were put on the grid

    @property
    def max_evaluations(self) -> int:
        """How many individuals will be asked for."""
        return self._cma.population_size * (self._T + 1)

    def _propose(self) -> list[list[Individual]]:
        self._drawn, broods = [], []
        for _ in range(self._cma.population_size):
            for _ in range(self.DRAWS):
                coordinates, drawn = self._cma.ask()
                if self.space.contains(P := self._to_points(coordinates)):
                    break
            else:
                P = self._nearest_valid(P)
            self._drawn.append(drawn)
            broods.append([Individual(P, "cma-es")])
        return broods

    def _learn(self, survivors: dict[Points, float], fitness: Sequence[float]) -> None:
        self._told.append([float(f) for f in fitness])
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

    def state_dict(self) -> dict[str, Any]:
        """As ``Optimizer.state_dict``, and what was told in each generation."""
        return super().state_dict() | {"told": self._told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring CMA-ES back by telling it the same again.

        Raises:
            UserError: it now asks for other individuals than it did: another version of ``cmaes`` or numpy.
        """
        self._start()
        self._i, self._broods, self._best, self._told, self._told_so_far = 0, None, None, [], 0
        for fitness in state["told"]:
            self.ask()
            self.tell(fitness)
        if state["broods"] is not None:
            self.ask()
        now = super().state_dict()
        if any(now[key] != value for key, value in state.items() if key != "told"):
            raise UserError(
                "CMA-ES no longer asks for what it asked for: cmaes or numpy has changed; start a new search"
            )


def _check_settings(**settings: tuple[float, float]) -> None:
    for name, (value, least) in settings.items():
        if not value >= least:
            raise UserError(f"{name}={value}: expected at least {least}")


def _lists(P: Points) -> list[list[float]]:
    return [list(P_k) for P_k in P]


def _points(P: Sequence[Sequence[float]]) -> Points:
    return tuple((P_k[0], P_k[1]) for P_k in P)
