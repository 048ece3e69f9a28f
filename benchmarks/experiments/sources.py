"""Models, and where an experiment's factors come from.

A source is a tuple that ends in what the factors are taken from: a task, an experiment's name, or another source.

==================================  ===================================================================================
``("shipped", TASK)``               the factors file beside the model's weights
``("found", SEARCH)``               what a search ended with
``("chosen", CHOICE)``              the uniform factor that was best on the search examples
``("mean", SOURCE)``                Position Interpolation at the mean of other factors (section 4.1)
``("half", "first", SOURCE)``       other factors in the first half of the layers alone, or in the ``"last"``
``("moved", POINT, BY, SEARCH)``    a found curve with one of its control points, or with None all of them, moved in y
==================================  ===================================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.experiments.store import Row, spelled
from lpes_eval import factors as factors_file
from lpes_eval import files, reference
from lpes_eval.errors import UserError
from lpes_eval.factors import Factors

Source = tuple[Any, ...]
Model = dict[str, Any]
"""``name`` (a folder, or ``reference``), ``sha256`` of the weights file, and ``layers``."""


def folder(model: str) -> Path:
    """Where a model lies."""
    return reference.path() if model == "reference" else Path(model)


def model_at(name: str) -> Model:
    """A model in a folder, or ``reference``.

    Raises:
        UserError: no model is there.
    """
    weights, config = folder(name) / "model.safetensors", folder(name) / "config.json"
    if not weights.is_file() or not config.is_file():
        raise UserError(f"{name}: no model is there (model.safetensors and config.json); name a model's folder")
    layers = int(json.loads(config.read_text())["num_hidden_layers"])
    return {"name": name, "sha256": files.sha256(weights), "layers": layers}


def shipped(model: str, task: str) -> Path:
    """The factors file beside the weights: the task's own one where there is one."""
    own = folder(model) / f"factors-{task}.json"
    return own if own.exists() else folder(model) / "factors.json"


def needs(source: Source | None) -> set[str]:
    """Experiments whose results a source takes."""
    if source is None or source[0] == "shipped":
        return set()
    return needs(source[-1]) if isinstance(source[-1], tuple) else {source[-1]}


def layer_factors(source: Source, model: Model, result: Callable[[str], Row]) -> list[float]:
    """The factors that a source gives a model, one a layer; ``result`` gives an experiment's result by its name."""
    kind, *how, of = source
    depth = model["layers"]
    if kind == "shipped":
        return factors_file.load(shipped(model["name"], of)).per_layer(depth)
    if kind == "chosen":
        return [result(of)["chosen"]] * depth
    if kind == "mean":
        return [round(math.fsum(layer_factors(of, model, result)) / depth, 4)] * depth
    if kind == "half":
        values, layers = layer_factors(of, model, result), range(depth)
        scaled = layers[: depth // 2] if how == ["first"] else layers[depth // 2 :]
        return [values[h] if h in scaled else 1.0 for h in layers]
    found = Factors.from_dict({key: value for key, value in result(of)["found"].items() if key != "origin"})
    if found.curve is None or found.curve[0] == "free":
        if kind == "moved":
            raise UserError(f"{of} found no curve whose control points could be moved")
        return (found.per_layer() + [1.0] * depth)[:depth]  # they stay with their layers, counted from the first
    curve, points = found.curve
    point, by = how or (None, 0)
    if point is not None and point >= len(points):
        raise UserError(f"{of} found {len(points)} control points; there is no number {point}")
    moved = tuple((x, round(y + by, 4) if point in (None, k) else y) for k, (x, y) in enumerate(points))
    return replace(found, curve=(curve, moved if how else points), num_layers=depth).per_layer()


def model_args(source: Source | None, row: Row) -> Row:
    """lm-eval's model arguments, as a user would give them: model and factors, where they are not the default."""
    name, factors = row["model"]["name"], row["factors"]
    named = {} if name == "reference" else {"pretrained": name}
    if source is None:
        return named
    if len(set(factors)) == 1:
        factors = factors[0]
    elif source[0] == "shipped":
        path = shipped(name, source[-1])
        factors = "reference" if name == "reference" and path.name == "factors.json" else spelled(path)
    return named | {"factors": factors}
