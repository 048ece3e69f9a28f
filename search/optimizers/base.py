"""What every optimiser of a search has in common: ``ask()`` for individuals, ``tell()`` their fitness."""

from __future__ import annotations

import copy
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from random import Random
from typing import Any, ClassVar

from lpes_eval.errors import UserError
from lpes_eval.rng import stream
from search.space import Y_START, Individual, Points, Space


@dataclass(frozen=True)
class Config:
    """Settings of an optimiser; each field made by ``setting`` is a flag of the command line.

    Raises:
        UserError: a value that the flag would not take.
    """

    def __post_init__(self) -> None:
        """Have each flag's reader look at the value."""
        for each in fields(self):
            value = getattr(self, each.name)
            try:
                each.metadata.get("type", str)(str(value))
            except ArgumentTypeError as error:
                raise UserError(f"{each.name}={value}: {error}") from None


def setting(default: Any, type: Any, help: str, metavar: str = "N") -> Any:
    """A field of a ``Config``: ``type`` reads the flag's text, the others are as for ``add_argument``."""
    return field(default=default, metadata={"type": type, "help": help, "metavar": metavar})


class Optimizer:
    """Generations of individuals, asked for and told.

    Siblings are individuals of which only the fittest lives on. ``ask()`` gives a generation's individuals, ``tell()``
    takes their fitness in the same order; higher is better. Everything random comes from the optimiser's own
    generator, so a seed gives the same search anywhere, and an optimiser that is told the same again goes through the
    same states again: that is how a search goes on after it was killed.

    Args:
        space: the control points that may be searched.
        config: the optimiser's settings.
        generations: generations after the initial one (T).
        start: the individual to set out from; by default Eq. 8.
        seed: of the random generator.
        model: an lm-eval model and the tasks measured, for an optimiser that looks into the model.
        least_effort: the share of the search examples that is asked at least, whatever ``effort`` says.

    Attributes:
        max_evaluations: the most individuals that will be asked for; a subclass sets it.
        history: of an interrupted search, the journal's last entry of each generation.
        told: individuals whose fitness was told.
    """

    Config: ClassVar[type[Config]] = Config
    title: ClassVar[str] = ""
    """One line for ``--help``."""
    default_start: ClassVar[float | None] = Y_START
    """The factor in every layer that it sets out from without ``--start``; None if it sets out from nowhere."""
    ignores: ClassVar[tuple[str, ...]] = ()
    """Of the flags that are no optimiser's own, those that it does not look at; with ``curve``, it searches one factor
    a layer."""
    needs_every_fitness: ClassVar[bool] = False
    """Whether it learns from the fitness of poor individuals too, so that none may be given up early."""
    uses_given_up_fitness: ClassVar[bool] = False
    """Whether it learns from individuals below the cutoff, so that giving them up early may change what it finds."""
    foresees: ClassVar[bool] = False
    """Whether ``foresee`` tells most of the next generation."""
    descends: ClassVar[bool] = False
    """Whether it computes with the model's weights itself."""
    max_evaluations: int
    also: str = ""
    """For the search's plan: what it costs besides its evaluations."""

    def __init__(
        self,
        space: Space,
        config: Any = None,
        *,
        generations: int = 20,
        start: Points | None = None,
        seed: int = 0,
        model: Any = None,
        least_effort: float = 0.0,
    ) -> None:
        if generations < 0:
            raise UserError(f"generations={generations}: expected at least 0")
        self.config: Any = config or self.Config()
        self.space, self.start = space, start or space.start()
        self.generation, self.generations, self.told = 0, generations, 0
        self.history: Mapping[int, Mapping[str, Any]] = {}
        self._asked: list[list[Individual]] | None = None
        self._best: tuple[Individual, float] | None = None
        self._seed, self._rng, self.least_effort = seed, Random(seed), least_effort
        self._set_up(model)
        if not hasattr(self, "max_evaluations"):
            raise UserError(f"{type(self).__name__}: set max_evaluations in _set_up, the most that it asks for")

    def _set_up(self, model: Any) -> None:
        """What a subclass adds to the constructor."""

    @classmethod
    def settle(cls, args: Namespace) -> None:
        """Set the flags that this optimiser decides itself, and refuse what it cannot search.

        Raises:
            UserError: one line that names the flag.
        """

    @property
    def done(self) -> bool:
        """Whether there is nothing left to ask for."""
        return self.generation > self.generations

    @property
    def best(self) -> tuple[Individual, float]:
        """The individual that the search ends with, and its fitness: the fittest told, of equals the first one."""
        if self._best is None:
            raise ValueError("no best individual: nothing has been told yet")
        return self._best

    @cached_property
    def max_effort(self) -> float:
        """The most that will be asked for, in measurements on all search examples."""
        return self.max_evaluations

    @cached_property
    def expected_evaluations(self) -> int:
        """About how many individuals it is likely to ask for, for the estimates of the time."""
        return self.max_evaluations

    @cached_property
    def expected_effort(self) -> float:
        """The same, in measurements on all search examples."""
        return self.expected_evaluations

    @property
    def effort(self) -> float:
        """The share of the search examples on which the individuals that are asked for now are measured."""
        return 1.0

    @property
    def cutoff(self) -> tuple[Points, float] | None:
        """An individual and a fitness: what is less fit than that is of no use, and may be given up early."""
        return None

    def ask(self) -> list[Individual]:
        """The individuals to be evaluated next: the same ones until they are told, none once the search is done."""
        if self.done:
            return []
        if self._asked is None:
            self._asked = self._propose()
        return [individual for siblings in self._asked for individual in siblings]

    def tell(self, fitness: Sequence[float]) -> None:
        """Take the fitness of the individuals that ``ask()`` gave, in their order.

        Raises:
            ValueError: not as many as were asked for.
        """
        asked = list(zip(self.ask(), map(float, fitness), strict=True))
        for individual, f in asked:
            if self._best is None or f > self._best[1]:
                self._best = individual, f
        told = iter(asked)
        survivors: dict[Points, float] = {}
        for siblings in self._asked or []:
            scored = [(individual.points, f) for individual, f in (next(told) for _ in siblings)]
            P, f = min(scored, key=lambda pair: (-pair[1], self._tie(pair[0])))
            survivors[P] = f
        self._learn(survivors, fitness)
        self._asked = None
        self.told += len(asked)
        self.generation += 1

    def foresee(self, fitness: Sequence[float]) -> list[Individual]:
        """The next generation, if this one has the given fitness: -inf for what is not known yet."""
        guess = copy.copy(self)
        guess._rng = copy.copy(self._rng)
        guess.tell(fitness)
        return guess.ask()

    def _tie(self, P: Points) -> float:
        """Breaks ties between equally fit individuals at random: it depends on seed, generation and points alone."""
        return stream("lot", self._seed, self.generation, repr(P)).random()

    def _propose(self) -> list[list[Individual]]:
        """The next generation, siblings together."""
        raise NotImplementedError

    def _learn(self, survivors: dict[Points, float], fitness: Sequence[float]) -> None:
        """Take in a generation: the fittest of each siblings, and the fitness of all that were asked for."""
