"""What every optimiser of a search has in common: a generator that yields individuals and gets back their fitness."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from lpes_eval.errors import UserError
from search.space import Y_LOW, Y_START, Individual, Points, Space

T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """Settings of an optimiser; each field made by ``setting`` is a flag of the command line."""


def setting(default: Any, type: Any, help: str, metavar: str = "N") -> Any:
    """A field of a ``Config``: ``type`` reads the flag's text, the others are as for ``add_argument``."""
    return field(default=default, metadata={"type": type, "help": help, "metavar": metavar})


class Fitness(float):
    """An individual's fitness, higher is better: the mean of what its ``questions`` came to.

    There are none where it is no mean, and where an individual was given up or worsens a guard.
    """

    questions: Sequence[float]

    def __new__(cls, fitness: float, questions: Sequence[float] = ()) -> Fitness:
        """The number, with its questions."""
        self = super().__new__(cls, fitness)
        self.questions = questions
        return self


@dataclass(frozen=True)
class Generation:
    """Individuals to be measured before the search goes on."""

    individuals: list[Individual]
    part: tuple[int, int] | None = None
    """The first of the search examples on which they are measured, and the one after the last; None for all."""
    cutoff: tuple[Points, float] | None = None
    """An individual that was measured on the same examples, and a fitness; what is less fit may be given up early."""
    measure: Literal["score", "likelihood"] = "score"
    """The tasks' score, or the likelihood of the reference answers, in nats a token, with the weights of the score."""


Steps = Generator[Generation, Sequence[Fitness], T]
"""Yields generations, is sent their fitness (higher is better), and returns what it ends with."""


class Optimizer:
    """A search as a generator. Given the same fitness it goes through the same steps, so a search can go on.

    Args:
        space: the control points that may be searched.
        config: the optimiser's settings.
        generations: after the initial one (T).
        start: the individual to set out from; by default Eq. 8.
        seed: of everything random.
        model: an lm-eval model and the tasks measured, for an optimiser that looks into the model.
        examples: how many search examples there are of each task at least.
        measure: what few questions are measured by: ``score`` where the likelihood of the answers cannot be.
    """

    Config: ClassVar[type[Config]] = Config
    title: ClassVar[str] = ""
    default_start: ClassVar[float] = Y_START
    lowest: ClassVar[float] = Y_LOW
    free: ClassVar[bool] = False
    """Whether it searches one factor a layer, whatever ``--curve`` says."""
    descends: ClassVar[bool] = False
    """Whether it computes with the model's weights itself."""
    max_evaluations: int
    """The most individuals that it yields; a subclass sets it in ``_set_up``."""
    max_effort: float
    """The same, in measurements on all search examples; ``expected_effort`` are about those that it will take."""
    expected_effort: float
    so_far: Individual | None = None
    """What it would end with now; None stands for the fittest."""
    said: str = ""
    """For the verdict: what the search saw, in a clause."""
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
        examples: int = 96,
        measure: Literal["score", "likelihood"] = "likelihood",
    ) -> None:
        self.config: Any = config or self.Config()
        self.space, self.start = space, start or space.start()
        self.generations, self.seed = generations, seed
        self.examples, self.measure = examples, measure
        self._set_up(model)
        if not hasattr(self, "max_evaluations"):
            raise UserError(f"{type(self).__name__}: set max_evaluations in _set_up, the most that it yields")
        vars(self).setdefault("max_effort", self.max_evaluations)
        vars(self).setdefault("expected_effort", self.max_effort)

    def _set_up(self, model: Any) -> None:
        """What a subclass adds to the constructor."""

    @classmethod
    def settle(cls, args: Namespace) -> None:
        """Set the flags that this optimiser decides itself; ``UserError`` names one that it cannot search with."""

    def search(self) -> Steps[Individual]:
        """The search, from its first generation to the individual that it ends with."""
        raise NotImplementedError


def drive(optimizer: Optimizer, measure: Callable[[Generation], Sequence[Any]]) -> Individual:
    """Run a search to its end; ``measure`` gives a generation's fitness, in the order of its individuals."""
    steps, fitness = optimizer.search(), None
    while True:
        try:
            generation = steps.send(fitness)  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value
        fitness = measure(generation)
