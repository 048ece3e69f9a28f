"""Where an experiment's factors come from: the experiments needed, and the factors once these have results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Source:
    """Gives factors from the result of the experiment ``of``, or from another source's factors."""

    of: Any

    @property
    def needs(self) -> tuple[str, ...]:
        """Experiments whose results it takes."""
        return self.of.needs if isinstance(self.of, Source) else (self.of,)

    def factors(self, model: Model, result: Lookup) -> Factors:
        """The factors for ``model``."""
        raise NotImplementedError


class Shipped(Source):
    """The factors file that is shipped with the model, for the task ``of``."""

    needs = ()  # type: ignore[assignment]

    def factors(self, model: Model, result: Lookup) -> Factors:
        return factors_file.load(model.shipped_factors(self.of))


class Found(Source):
    """What a search ended with.

    On a model of another depth the same curve is drawn over its layers. Factors without a curve are given to the same
    layers, counted from the first; further layers stay unscaled.
    """

    def factors(self, model: Model, result: Lookup) -> Factors:
        found = Factors.from_dict({key: value for key, value in result(self.of)["found"].items() if key != "origin"})
        if found.num_layers == model.layers:
            return found
        if found.curve is not None and found.curve[0] == "free":
            values = found.per_layer()[: model.layers]
            return Factors.from_list(values + [1.0] * (model.layers - len(values)))
        return replace(found, num_layers=model.layers)


class Chosen(Source):
    """The uniform factor that was best on the search examples."""

    def factors(self, model: Model, result: Lookup) -> Factors:
        return Factors.from_uniform(result(self.of)["chosen"], num_layers=model.layers)


class MeanOf(Source):
    """Position Interpolation at the mean of other factors (section 4.1)."""

    def factors(self, model: Model, result: Lookup) -> Factors:
        mean = self.of.factors(model, result).mean(model.layers)
        return Factors.from_uniform(round(mean, 4), num_layers=model.layers)


@dataclass(frozen=True)
class HalfOf(Source):
    """Other factors in the first or the last half of the layers alone; of an odd number the last half has one more."""

    first: bool

    def factors(self, model: Model, result: Lookup) -> Factors:
        values, half = self.of.factors(model, result).per_layer(model.layers), model.layers // 2
        ones = [1.0] * model.layers
        return Factors.from_list(values[:half] + ones[half:] if self.first else ones[:half] + values[half:])


@dataclass(frozen=True)
class Moved(Source):
    """A found curve with one of its control points, or with ``point=None`` all of them, moved in y."""

    point: int | None
    by: float

    def factors(self, model: Model, result: Lookup) -> Factors:
        found, (search,) = self.of.factors(model, result), self.needs
        if found.curve is None or found.curve[0] == "free":
            raise UserError(f"{search} found no curve whose control points could be moved")
        kind, points = found.curve
        if self.point is not None and self.point >= len(points):
            raise UserError(f"{search} found {len(points)} control points; there is no number {self.point}")
        moved = tuple((x, round(y + self.by, 4) if self.point in (None, k) else y) for k, (x, y) in enumerate(points))
        return replace(found, curve=(kind, moved))
