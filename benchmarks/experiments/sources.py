"""Where an experiment's factors come from.

A source names the experiments that it needs and, once their results are there, gives the factors. None of these
classes measures anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from lpes_eval import factors as factors_file
from lpes_eval.errors import UserError
from lpes_eval.factors import Factors

Lookup = Callable[[str], dict[str, Any]]
"""The result of an experiment, by its name."""


@dataclass(frozen=True)
class Model:
    """A model on disk, told from others by its weights.

    Attributes:
        pretrained: as lm-eval is given it.
        folder: where it lies.
        sha256: of its weights, the safetensors file.
        layers: its depth.
    """

    pretrained: str
    folder: Path
    sha256: str
    layers: int

    def shipped_factors(self, task: str) -> Path:
        """The factors file that lies beside the weights: the task's own one where there is one."""
        own = self.folder / f"factors-{task}.json"
        return own if own.exists() else self.folder / "factors.json"


class Source(Protocol):
    """Gives factors from the results of other experiments."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Experiments whose results it takes."""

    def factors(self, model: Model, result: Lookup) -> Factors:
        """The factors for ``model``."""


@dataclass(frozen=True)
class Shipped:
    """The factors file that is shipped with the model."""

    task: str
    needs: tuple[str, ...] = ()

    def factors(self, model: Model, result: Lookup) -> Factors:
        return factors_file.load(model.shipped_factors(self.task)).for_depth(model.layers)


@dataclass(frozen=True)
class Found:
    """What a search ended with.

    On a model of another depth the same curve is drawn over its layers. Factors without a curve are given to the same
    layers, counted from the first; further layers stay unscaled.
    """

    search: str

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.search,)

    def factors(self, model: Model, result: Lookup) -> Factors:
        data = result(self.search)["found"]
        found = Factors.from_dict({key: value for key, value in data.items() if key != "origin"})
        if found.num_layers == model.layers:
            return found
        if found.curve is not None and found.curve[0] == "free":
            values = found.per_layer()[: model.layers]
            return Factors.from_list(values + [1.0] * (model.layers - len(values)))
        return replace(found, num_layers=model.layers)


@dataclass(frozen=True)
class Chosen:
    """The uniform factor that was best on the search examples."""

    choice: str

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.choice,)

    def factors(self, model: Model, result: Lookup) -> Factors:
        return Factors.from_uniform(result(self.choice)["chosen"], num_layers=model.layers)


@dataclass(frozen=True)
class MeanOf:
    """Position Interpolation at the mean of other factors (section 4.1)."""

    of: Source

    @property
    def needs(self) -> tuple[str, ...]:
        return self.of.needs

    def factors(self, model: Model, result: Lookup) -> Factors:
        mean = self.of.factors(model, result).mean(model.layers)
        return Factors.from_uniform(round(mean, 4), num_layers=model.layers)


@dataclass(frozen=True)
class HalfOf:
    """Other factors in the first or the last half of the layers alone; of an odd number the last half has one more."""

    of: Source
    first: bool

    @property
    def needs(self) -> tuple[str, ...]:
        return self.of.needs

    def factors(self, model: Model, result: Lookup) -> Factors:
        values, half = self.of.factors(model, result).per_layer(model.layers), model.layers // 2
        ones = [1.0] * model.layers
        return Factors.from_list(values[:half] + ones[half:] if self.first else ones[:half] + values[half:])


@dataclass(frozen=True)
class Moved:
    """A found curve with one of its control points, or with ``point=None`` all of them, moved in y."""

    of: Found
    point: int | None
    by: float

    @property
    def needs(self) -> tuple[str, ...]:
        return self.of.needs

    def factors(self, model: Model, result: Lookup) -> Factors:
        found = self.of.factors(model, result)
        if found.curve is None or found.curve[0] == "free":
            raise UserError(f"{self.of.search} found no curve whose control points could be moved")
        kind, points = found.curve
        if self.point is not None and self.point >= len(points):
            raise UserError(f"{self.of.search} found {len(points)} control points; there is no number {self.point}")
        moved = tuple((x, round(y + self.by, 4) if self.point in (None, k) else y) for k, (x, y) in enumerate(points))
        return replace(found, curve=(kind, moved))
