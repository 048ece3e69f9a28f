"""The factors file: one scaling factor a layer, or the few numbers from which they follow, and where they came from.

``docs/factors.md`` describes it field by field, and so does the JSON Schema beside this module.

    >>> from lpes_eval import Factors
    >>> Factors.from_curve("bezier", [(0, 1.0), (2, 1.5), (4, 1.2)], num_layers=5).per_layer()[0]
    1.0
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lpes_eval import curves, files, hub
from lpes_eval.errors import DataError, FactorsError

FORMAT = "lpes-factors"
VERSION = 1
REFERENCE = "reference"
MAX_LAYERS = 1_000
MAX_POINTS = 12
"""Of a curve. With these bounds every file is evaluated within a second."""
LEAST, GREATEST = 1e-3, 1e6
"""Factors beyond these serve no model, and far beyond them float32 makes them 0 or infinite, and answers NaN."""

_OBJECTS = ("model_args", "weights", "proof", "search", "packages")
"""Fields of ``origin`` that are read or written as objects; other fields may hold anything."""


@dataclass(frozen=True)
class Factors:
    """Layer factors in one of three forms; an object that exists is right (else ``FactorsError``)."""

    factors: tuple[float, ...] | None = None
    """One number a layer."""
    curve: tuple[curves.CurveKind, tuple[Any, ...]] | None = None
    """Kind and control points of a curve over the scaled layers (``lpes_eval.curves``)."""
    uniform: float | None = None
    """One number for all scaled layers: Position Interpolation (arXiv 2306.15595)."""
    num_layers: int | None = None
    """The depth of the model that they are for; optional."""
    unscaled_layers: tuple[int, ...] = ()
    """Layers with factor 1, counted from 0; a curve runs over the others."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Where they came from; ``docs/factors.md`` lists its fields."""

    def __post_init__(self) -> None:  # noqa: D105
        forms = {"factors": _numbers, "curve": _curve, "uniform": _number}
        given = [form for form in forms if getattr(self, form) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise FactorsError(f"exactly one of {', '.join(forms)} is expected, found {found}")
        (form,) = given
        checked = {form: forms[form](getattr(self, form), form)}
        checked |= {"unscaled_layers": _layers(self.unscaled_layers), "origin": _origin(self.origin)}
        self.__dict__.update(checked)  # of a frozen object
        right = self.num_layers is None or (_is(self.num_layers, int) and 1 <= self.num_layers <= MAX_LAYERS)
        _require(right, "num_layers", self.num_layers, f"a whole number from 1 to {MAX_LAYERS}")
        if self.factors is not None or self.num_layers is not None:
            self.per_layer(self.num_layers)

    @classmethod
    def from_curve(cls, kind: curves.CurveKind, points: Sequence[Any], **options: Any) -> Factors:
        """Factors that follow from a curve; the options are the other fields."""
        return cls(curve=(kind, tuple(points)), **options)

    @classmethod
    def from_list(cls, factors: Sequence[float], **options: Any) -> Factors:
        """One factor a layer, written out."""
        return cls(factors=tuple(factors), **options)

    @classmethod
    def from_uniform(cls, factor: float, **options: Any) -> Factors:
        """The same factor for every layer."""
        return cls(uniform=factor, **options)

    @classmethod
    def from_dict(cls, data: Any, source: str = "factors") -> Factors:
        """The factors of decoded JSON, which errors call ``source``; ``format`` and ``version`` may be missing."""
        try:
            _require(isinstance(data, Mapping), "at the top", data, "an object")
            known = ("format", "version", *(one.name for one in fields(cls)))
            if unknown := [name for name in data if name not in known]:
                raise FactorsError(f"unknown field {files.shown(unknown[0])}; known fields are {', '.join(known)}")
            given = dict(data)
            for name, expected in (("format", FORMAT), ("version", VERSION)):
                found = given.pop(name, expected)
                _require(_is(found, type(expected)) and found == expected, name, found, json.dumps(expected))
            if (curve := given.get("curve")) is not None:
                right = isinstance(curve, Mapping) and set(curve) == {"kind", "points"}
                _require(right, "curve", curve, "an object with 'kind' and 'points'")
                given["curve"] = (curve["kind"], curve["points"])
            return cls(**given)
        except FactorsError as error:
            raise FactorsError(f"{source}: {error}") from None

    @property
    def model(self) -> tuple[str | None, str | None]:
        """Name and revision of the model that they were found on, as far as the origin says them."""
        model = self.origin.get("model")
        return (model["name"], model.get("revision")) if isinstance(model, Mapping) else (model, None)

    def per_layer(self, num_layers: int | None = None) -> list[float]:
        """One factor a layer of a model of ``num_layers``; ``FactorsError`` where the factors are for another depth."""
        own = len(self.factors) if self.factors is not None else self.num_layers
        depth = num_layers if num_layers is not None else own
        if depth is None:
            raise FactorsError("these factors name no num_layers; say how many layers the model has (--layers N)")
        if not 1 <= depth <= MAX_LAYERS:
            raise FactorsError(f"{depth} layers: expected 1 to {MAX_LAYERS}")
        if own not in (None, depth):
            raise FactorsError(f"the factors are for {own} layers, the model has {depth}; use some made for this model")
        if outside := [h for h in self.unscaled_layers if h >= depth]:
            raise FactorsError(f"unscaled_layers names layer {outside[0]}, the model has layers 0 to {depth - 1}")
        if self.factors is not None:
            if scaled := [h for h in self.unscaled_layers if self.factors[h] != 1]:
                raise FactorsError(f"unscaled_layers names layer {scaled[0]}, which has a factor; drop one of the two")
            return list(self.factors)
        left = depth - len(self.unscaled_layers)
        points: Any
        kind, points = self.curve or ("free", (self.uniform,) * left)
        if kind == "free" and left and len(points) != left:
            raise FactorsError(f"curve.points: free factors: {len(points)} given for {left} layers")
        values = iter(curves.layer_factors(kind, points, left) if left else ())
        return [1.0 if h in self.unscaled_layers else next(values) for h in range(depth)]

    def digest(self, num_layers: int | None = None) -> str:
        """SHA-256 of the factors themselves, one a layer: equal wherever the model would answer equally."""
        return hashlib.sha256(json.dumps(self.per_layer(num_layers)).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that ``from_dict`` reads."""
        given = {"format": FORMAT, "version": VERSION} | vars(self)
        if self.curve is not None:
            given["curve"] = dict(zip(("kind", "points"), self.curve, strict=True))
        plain: dict[str, Any] = json.loads(json.dumps(given, allow_nan=False))
        return {name: value for name, value in plain.items() if value not in (None, [], {})}

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        files.write_atomically(path, json.dumps(self.to_dict(), indent=2) + "\n")


def load(path: str | Path) -> Factors:
    """Read a factors file, or ``reference``; ``FactorsError`` names the file and what is wrong with it."""
    if path == REFERENCE:
        path = Path(__file__).parent / "reference" / "base" / "factors.json"
    path = Path(os.path.expanduser(path))
    try:
        data = files.read_json(path)
    except DataError as error:
        raise FactorsError(f"{error}; expected a factors file, which is JSON (docs/factors.md)") from None
    if isinstance(data, dict):  # a file says what it is
        data = {"format": None, "version": None} | data
    return Factors.from_dict(data, str(path))


def parse(value: Any) -> Factors:
    """What a user may give as ``factors``: a loaded object, a path, one number, or one a layer (list, array, tensor).

    ``reference`` is the reference model's own file, ``hf://OWNER/REPO`` one on the Hub; raises as ``load``.
    """
    if isinstance(value, Factors):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        if not value.strip():
            raise FactorsError("factors= is empty; give a factors file, or one number for all layers")
        if value.startswith(hub.SCHEME):
            return load(hub.fetch(value))
        with suppress(ValueError):
            value = value if "_" in value else float(value)  # Python reads 1_5 as 15
    if isinstance(value, str | Path):
        return load(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Factors.from_dict({"uniform": value}, source=f"factors={value}")
    if isinstance(value, list | tuple):
        return Factors.from_dict({"factors": value})
    raise FactorsError(
        f"factors={value!r}: expected a factors file's path, one number for all layers, or a list of one a layer"
    )


FIELD = "lpes_factors"
"""The field of ``config.json`` that carries factors from folder to folder; transformers keeps what it does not know."""


def text_config(config: Any) -> Any:
    """The part of a model's configuration that has the field."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def carried(config: Any) -> Factors | None:
    """The factors that a configuration carries, if any; ``FactorsError``: no numbers, or for another depth."""
    value = getattr(config, FIELD, getattr(text_config(config), FIELD, None))  # the first is an override of vLLM's
    if value is None:
        return None
    try:
        _require(not isinstance(value, str | Path), "factors", value, "numbers, and no file's name")
        factors = Factors.from_dict(value) if isinstance(value, Mapping) else parse(value)
        if isinstance(depth := getattr(text_config(config), "num_hidden_layers", None), int):
            factors.per_layer(depth)
    except FactorsError as error:
        raise FactorsError(f"{FIELD} in config.json: {error}") from None
    return factors


def carry(config: Any, factors: Factors | None) -> None:
    """Have a configuration carry these factors, or none."""
    for part in (config, text_config(config)) if config is not None else ():
        part.__dict__.pop(FIELD, None)
    if factors is not None:
        setattr(text_config(config), FIELD, factors.to_dict())


def _require(right: bool, where: str, found: Any, expected: str) -> None:
    if not right:
        raise FactorsError(f"{where}: found {files.shown(found)}, expected {expected}")


def _is(value: Any, *types: type) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _number(value: Any, where: str) -> float:
    right = _is(value, int, float) and LEAST <= value <= GREATEST
    _require(right, where, value, f"a number from {LEAST:.10g} to {GREATEST:.10g}")
    return float(value)


def _numbers(value: Any, where: str) -> tuple[float, ...]:
    right = _is(value, list, tuple) and 1 <= len(value) <= MAX_LAYERS
    _require(right, where, value, f"a list of one number a layer, at most {MAX_LAYERS}")
    return tuple(_number(one, f"{where}[{h}]") for h, one in enumerate(value))


def _layers(value: Any) -> tuple[int, ...]:
    right = _is(value, list, tuple, range) and all(_is(h, int) and 0 <= h < MAX_LAYERS for h in value)
    right = right and list(value) == sorted(set(value))
    _require(right, "unscaled_layers", value, "a list of layer numbers from 0 in rising order, each once")
    return tuple(value)


def _curve(value: Any, where: str) -> tuple[curves.CurveKind, tuple[Any, ...]]:
    _require(_is(value, list, tuple) and len(value) == 2, where, value, "a kind and its points")
    kind, points = value
    _require(kind in curves.KINDS, f"{where}.kind", kind, f"one of {', '.join(curves.KINDS)}")
    where += ".points"
    if kind == "free":
        return kind, _numbers(points, where)
    right = _is(points, list, tuple) and 2 <= len(points) <= MAX_POINTS
    _require(right, where, points, f"a list of 2 to {MAX_POINTS} points [x, y]")
    before = -1.0
    for k, point in enumerate(points):
        right = _is(point, list, tuple) and len(point) == 2 and _is(point[0], int, float)
        right = right and before < point[0] and 0 <= point[0] <= MAX_LAYERS
        _require(right, f"{where}[{k}]", point, f"[x, y], x rising between 0 and {MAX_LAYERS} (Eq. 10)")
        before = point[0]
    return kind, tuple((x, _number(y, f"{where}[{k}] y")) for k, (x, y) in enumerate(points))


def _origin(value: Any) -> dict[str, Any]:
    _require(isinstance(value, Mapping), "origin", value, "an object")
    for name in _OBJECTS:
        _require(isinstance(value.get(name, {}), Mapping), f"origin.{name}", value.get(name), "an object")
    model = value.get("model", "")
    named = isinstance(model, Mapping) and isinstance(model.get("name"), str)
    right = isinstance(model, str) or (named and isinstance(model.get("revision"), str | None))
    _require(right, "origin.model", model, "a name, or the strings 'name' and, where it has one, 'revision'")
    return dict(value)
