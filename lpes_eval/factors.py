"""The factors file: one scaling factor a layer, or the few numbers from which they follow, and where they came from.

A small JSON object, described field by field in ``docs/factors.md`` and by the JSON Schema beside this module
(``factors.schema.json``). Everything that can be wrong with it is found here, before a model is loaded.

    >>> from lpes_eval import Factors
    >>> Factors.from_curve("bezier", [(0, 1.0), (2, 1.5), (4, 1.2)], num_layers=5).per_layer()[0]
    1.0
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from lpes_eval import curves
from lpes_eval.errors import FactorsError
from lpes_eval.files import write_atomically

FORMAT = "lpes-factors"
VERSION = 1
REFERENCE = "reference"
MAX_BYTES = 1 << 20
MAX_LAYERS = 1_000
MAX_POINTS = 12
"""Of a curve. With these bounds every file is evaluated within a second."""
LEAST, GREATEST = 1e-3, 1e6
"""Factors beyond these serve no model, and far beyond them float32 makes them 0 or infinite, and answers NaN."""

_FACTOR = f"a number from {LEAST:.10g} to {GREATEST:.10g}"
_SOURCES = ("factors", "curve", "uniform")
_FIELDS = ("format", "version", *_SOURCES, "num_layers", "unscaled_layers", "origin")
_ORIGIN: dict[str, tuple[type, ...]] = {
    "model": (str, Mapping),
    "task": (str,),
    "fitness": (int, float, Mapping),
    "search": (Mapping,),
    "seed": (int,),
    "packages": (Mapping,),
    "date": (str,),
    "note": (str,),
}


@dataclass(frozen=True)
class Factors:
    """Layer factors in one of three forms, of which exactly one is given.

    Attributes:
        factors: one number from 0.001 to 1,000,000 for every layer.
        curve: a curve's kind and control points (see ``lpes_eval.curves``), drawn over the layers that are scaled.
        uniform: one such number for every scaled layer, which is Position Interpolation with that factor.
        num_layers: the depth of the model the factors are for; optional for ``curve`` and ``uniform``.
        unscaled_layers: layers left alone (factor 1), counted from 0.
        origin: where the factors came from: ``model``, ``task``, ``fitness``, ``search``, ``seed``, ``packages``,
            ``date``, ``note``, all optional.
    """

    factors: tuple[float, ...] | None = None
    curve: tuple[curves.CurveKind, tuple[Any, ...]] | None = None
    uniform: float | None = None
    num_layers: int | None = None
    unscaled_layers: tuple[int, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)

    # -- making one --------------------------------------------------------------------------------------------------

    @classmethod
    def from_curve(
        cls,
        kind: curves.CurveKind,
        points: Sequence[Any],
        *,
        num_layers: int | None = None,
        unscaled_layers: Sequence[int] = (),
        origin: Mapping[str, Any] | None = None,
    ) -> Factors:
        """Factors that follow from a curve; raises ``FactorsError`` where the file's rules are broken."""
        data: dict[str, Any] = {"curve": {"kind": kind, "points": [_plain(p) for p in points]}}
        return cls.from_dict(_with_options(data, num_layers, unscaled_layers, origin))

    @classmethod
    def from_list(cls, factors: Sequence[float], *, origin: Mapping[str, Any] | None = None) -> Factors:
        """One factor a layer, written out."""
        return cls.from_dict(_with_options({"factors": list(factors)}, None, (), origin))

    @classmethod
    def from_uniform(cls, factor: float, **options: Any) -> Factors:
        """The same factor for every layer: Position Interpolation (arXiv 2306.15595)."""
        return cls.from_dict({"uniform": factor, **options})

    @classmethod
    def from_dict(cls, data: Any, source: str = "factors") -> Factors:
        """Check a decoded factors file.

        Args:
            data: the decoded JSON; ``format`` and ``version`` may be missing in what a program hands over.
            source: what to call it in an error: the file's name.

        Raises:
            FactorsError: one line that names the field, what was found and what was expected.
        """
        return _Check(source).factors(data)

    # -- using it ----------------------------------------------------------------------------------------------------

    def per_layer(self, num_layers: int | None = None) -> list[float]:
        """One factor for each of the model's layers.

        Args:
            num_layers: the model's depth; may be left out where the factors name it themselves.

        Raises:
            FactorsError: no depth known, or another depth than the factors are for.
        """
        own = len(self.factors) if self.factors is not None else self.num_layers
        depth = num_layers if num_layers is not None else own
        if depth is None:
            raise FactorsError("these factors name no num_layers; say how many layers the model has")
        if own is not None and own != depth:
            raise FactorsError(
                f"the factors are for {own} layers, the model has {depth}; use factors that were made for this model"
            )
        if self.factors is not None:
            return list(self.factors)
        if outside := [h for h in self.unscaled_layers if h >= depth]:
            raise FactorsError(f"unscaled_layers names layer {outside[0]}, the model has layers 0 to {depth - 1}")
        scaled = [h for h in range(depth) if h not in self.unscaled_layers]
        out = [1.0] * depth
        if not scaled:
            return out
        if self.uniform is not None:
            values = [self.uniform] * len(scaled)
        else:
            assert self.curve is not None
            kind, points = self.curve
            if kind == "free" and len(points) != len(scaled):
                raise FactorsError(
                    f"curve.points: {len(points)} free factors for {len(scaled)} scaled layers; give one for each"
                )
            values = curves.layer_factors(kind, points, len(scaled))
        for h, value in zip(scaled, values, strict=True):
            out[h] = value
        return out

    def digest(self, num_layers: int | None = None) -> str:
        """SHA-256 of the factors themselves, one a layer: equal wherever the model would answer equally."""
        text = json.dumps(self.per_layer(num_layers))
        return hashlib.sha256(text.encode()).hexdigest()

    def mean(self, num_layers: int | None = None) -> float:
        """The mean factor, at which the paper measures Position Interpolation (section 4.1)."""
        values = self.per_layer(num_layers)
        return math.fsum(values) / len(values)

    def for_depth(self, num_layers: int) -> Factors:
        """The same factors with the model's depth written down, checked against it."""
        self.per_layer(num_layers)
        return self if self.factors is not None else replace(self, num_layers=num_layers)

    # -- keeping it --------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that ``from_dict`` reads."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        if self.factors is not None:
            data["factors"] = list(self.factors)
        if self.curve is not None:
            kind, points = self.curve
            data["curve"] = {"kind": kind, "points": [list(p) if isinstance(p, tuple) else p for p in points]}
        if self.uniform is not None:
            data["uniform"] = self.uniform
        if self.num_layers is not None:
            data["num_layers"] = self.num_layers
        if self.unscaled_layers:
            data["unscaled_layers"] = list(self.unscaled_layers)
        if self.origin:
            data["origin"] = dict(self.origin)
        return data

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all; raises ``FactorsError`` where that cannot be done."""
        content = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        try:
            write_atomically(path, content)
        except OSError as error:
            reason = error.strerror or error
            raise FactorsError(f"{path}: cannot be written ({reason}); expected a path where a file can be") from error


def load(path: str | Path) -> Factors:
    """Read a factors file and check everything about it that does not need the model.

    Raises:
        FactorsError: one line that names the file, what was found, what was expected, and the way out.
    """
    return _read(path, "load reads a factors file; one number for all layers is Factors.from_uniform(NUMBER)")


def _read(path: str | Path, way_out: str) -> Factors:
    """A factors file, or ``FactorsError``; the way out is for a path where no file is."""
    path = Path(os.path.expanduser(path))
    try:
        if path.is_dir():
            raise IsADirectoryError
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise FactorsError(f"{path}: no such file; {way_out}") from None
    except IsADirectoryError:
        raise FactorsError(f"{path}: is a folder; expected a factors file (JSON)") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise FactorsError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(raw) > MAX_BYTES:
        raise FactorsError(f"{path}: larger than 1 MiB; a factors file holds a few hundred numbers at most")
    if not raw.strip():
        raise FactorsError(f"{path}: the file is empty; expected a factors file (JSON)")
    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise FactorsError(f"{path}: not UTF-8 text; expected a factors file (JSON)") from None
    except json.JSONDecodeError as error:
        cut = "; it ends too early, as a file does that was cut off" if error.pos >= len(error.doc.rstrip()) else ""
        raise FactorsError(f"{path}: not JSON ({error.msg}, line {error.lineno} column {error.colno}){cut}") from None
    except (_Refused, RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise FactorsError(f"{path}: {reason}") from None
    return _Check(str(path), file=True).factors(data)


def parse(value: Any) -> Factors:
    """What a user may give as ``factors``: a loaded object, a path, a list of one number a layer, or one number.

    ``reference`` stands for the factors that are shipped with the reference model. A list may also be an array or a
    tensor of one dimension.

    Raises:
        FactorsError: as ``load``, or for a value of another type.
    """
    if isinstance(value, Factors):
        return Factors.from_dict(value.to_dict())  # one that was built directly has been checked by nothing
    if hasattr(value, "tolist") and not isinstance(value, memoryview):
        value = value.tolist()
    if value == REFERENCE:
        return load(Path(__file__).parent / "reference" / "base" / "factors.json")
    if isinstance(value, str):
        if not value.strip():
            raise FactorsError("factors= is empty; give a factors file, or one number for all layers")
        try:
            value = Path(value) if "_" in value else float(value)  # Python reads 1_5 as 15
        except ValueError:
            value = Path(value)
    if isinstance(value, Path):
        return _read(value, "give a factors file, or a number for all layers")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Factors.from_dict({"uniform": value}, source=f"factors={value}")
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return Factors.from_dict({"factors": list(value)}, source="factors")
    raise FactorsError(
        f"factors={value!r}: expected a factors file's path, one number for all layers, or a list of one a layer"
    )


class _Refused(Exception):
    """Legal for Python's JSON reader, but not for us."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise _Refused(f"the key {key!r} stands there twice")
        out[key] = value
    return out


def _no_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not a JSON number; factors are finite")


def _plain(point: Any) -> Any:
    return list(point) if isinstance(point, Sequence) else point


def _with_options(
    data: dict[str, Any],
    num_layers: int | None,
    unscaled_layers: Sequence[int],
    origin: Mapping[str, Any] | None,
) -> dict[str, Any]:
    if num_layers is not None:
        data["num_layers"] = num_layers
    if unscaled_layers:
        data["unscaled_layers"] = list(unscaled_layers)
    if origin:
        data["origin"] = dict(origin)
    return data


class _Check:
    """The file's rules, one method a field; every error begins with the file's name and the field."""

    def __init__(self, source: str, file: bool = False) -> None:
        self.source = source
        self.file = file

    def fail(self, message: str) -> NoReturn:
        raise FactorsError(f"{self.source}: {message}")

    def factors(self, data: Any) -> Factors:
        if not isinstance(data, Mapping):
            self.fail(f"found {_kind(data)} at the top, expected an object with the field 'format': \"{FORMAT}\"")
        if self.file or "format" in data or "version" in data:
            self.header(data)
        for key in data:
            if key not in _FIELDS:
                self.fail(f"unknown field {key!r}; known fields are {', '.join(_FIELDS)}")
        given = [name for name in _SOURCES if name in data]
        if len(given) != 1:
            found = "none" if not given else " and ".join(given)
            self.fail(f"exactly one of {', '.join(_SOURCES)} is expected, found {found}")

        num_layers = None
        if "num_layers" in data:
            num_layers = self.integer(data["num_layers"], "num_layers", 1, MAX_LAYERS)
        unscaled = self.unscaled(data.get("unscaled_layers", []), num_layers)
        origin = self.origin(data.get("origin", {}))
        if "factors" in data:
            values = self.listed(data["factors"], "factors")
            if num_layers is not None and len(values) != num_layers:
                self.fail(f"factors: {len(values)} numbers, but num_layers is {num_layers}; give one a layer")
            for h in unscaled:
                if h >= len(values) or values[h] != 1:
                    self.fail(f"unscaled_layers names layer {h}, for which factors holds no 1; drop one of the two")
            return Factors(factors=values, num_layers=num_layers, unscaled_layers=unscaled, origin=origin)
        if "uniform" in data:
            factor = self.number(data["uniform"], "uniform")
            return Factors(uniform=factor, num_layers=num_layers, unscaled_layers=unscaled, origin=origin)
        curve = self.curve(data["curve"])
        result = Factors(curve=curve, num_layers=num_layers, unscaled_layers=unscaled, origin=origin)
        if num_layers is not None:
            try:
                result.per_layer()
            except FactorsError as error:
                self.fail(str(error))
        return result

    def header(self, data: Mapping[str, Any]) -> None:
        if data.get("format") != FORMAT:
            found = f"found {data['format']!r}" if "format" in data else "the field is missing"
            self.fail(f'format: {found}; expected "{FORMAT}" (is this another kind of file?)')
        version = data.get("version")
        if "version" not in data or isinstance(version, bool) or not isinstance(version, int):
            self.fail(f"version: {'found ' + repr(version) if 'version' in data else 'missing'}; expected {VERSION}")
        if version != VERSION:
            self.fail(f"version: found {version}, this release reads {VERSION}; update lpes-eval or rewrite the file")

    def number(self, value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(f"{where}: found {_kind(value)}, expected {_FACTOR}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.fail(f"{where}: found {_short(value)}, which is not finite; expected {_FACTOR}")
        if not LEAST <= number <= GREATEST:
            self.fail(f"{where}: found {_short(value)}, expected {_FACTOR} (1 leaves a layer as it is)")
        return number

    def integer(self, value: Any, where: str, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(f"{where}: found {_kind(value)}, expected a whole number")
        if not low <= value <= high:
            self.fail(f"{where}: found {_short(value)}, expected {low} to {high}")
        return value

    def listed(self, value: Any, where: str) -> tuple[float, ...]:
        if not isinstance(value, list | tuple):
            self.fail(f"{where}: found {_kind(value)}, expected a list of one number a layer")
        if not value:
            self.fail(f"{where}: the list is empty, expected one number a layer")
        if len(value) > MAX_LAYERS:
            self.fail(f"{where}: {len(value)} numbers, expected at most {MAX_LAYERS}")
        return tuple(self.number(v, f"{where}[{h}]") for h, v in enumerate(value))

    def unscaled(self, value: Any, num_layers: int | None) -> tuple[int, ...]:
        if not isinstance(value, list | tuple):
            self.fail(f"unscaled_layers: found {_kind(value)}, expected a list of layer numbers from 0")
        high = (num_layers or MAX_LAYERS) - 1
        layers = tuple(self.integer(v, f"unscaled_layers[{i}]", 0, high) for i, v in enumerate(value))
        if any(not a < b for a, b in pairwise(layers)):
            self.fail(f"unscaled_layers: found {list(layers)}, expected layer numbers in rising order, each once")
        return layers

    def curve(self, value: Any) -> tuple[curves.CurveKind, tuple[Any, ...]]:
        if not isinstance(value, Mapping):
            self.fail(f"curve: found {_kind(value)}, expected an object with 'kind' and 'points'")
        for key in value:
            if key not in ("kind", "points"):
                self.fail(f"curve: unknown field {key!r}; known fields are kind, points")
        for key in ("kind", "points"):
            if key not in value:
                self.fail(f"curve: the field {key!r} is missing")
        kind, points = value["kind"], value["points"]
        if kind not in curves.KINDS:
            self.fail(f"curve.kind: found {_short(kind)}, expected one of {', '.join(curves.KINDS)}")
        if kind == "free":
            return kind, self.listed(points, "curve.points")
        if not isinstance(points, list | tuple):
            self.fail(f"curve.points: found {_kind(points)}, expected a list of [x, y] pairs")
        if not 2 <= len(points) <= MAX_POINTS:
            self.fail(f"curve.points: {len(points)} control points, expected 2 to {MAX_POINTS}")
        checked = []
        for k, point in enumerate(points):
            if not isinstance(point, list | tuple) or len(point) != 2:
                self.fail(f"curve.points[{k}]: found {_short(point)}, expected a pair [x, y]")
            x, y = point
            if isinstance(x, bool) or not isinstance(x, int | float) or not 0 <= x <= MAX_LAYERS:
                self.fail(f"curve.points[{k}]: x is {_short(x)}, expected a layer coordinate, 0 or more")
            checked.append((x, self.number(y, f"curve.points[{k}] y")))
        for k, (a, b) in enumerate(pairwise(checked)):
            if not a[0] < b[0]:
                self.fail(f"curve.points[{k + 1}]: x is {b[0]} after {a[0]}; x must increase strictly (Eq. 10)")
        return kind, tuple(checked)

    def origin(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self.fail(f"origin: found {_kind(value)}, expected an object")
        for key, item in value.items():
            if key not in _ORIGIN:
                self.fail(f"origin: unknown field {key!r}; known fields are {', '.join(_ORIGIN)}")
            if isinstance(item, bool) or not isinstance(item, _ORIGIN[key]):
                names = " or ".join(_JSON_NAMES[t] for t in _ORIGIN[key])
                self.fail(f"origin.{key}: found {_kind(item)}, expected {names}")
        model = value.get("model")
        if isinstance(model, Mapping):
            for key, item in model.items():
                if key not in ("name", "revision"):
                    self.fail(f"origin.model: unknown field {key!r}; known fields are name, revision")
                if not (isinstance(item, str) or (key == "revision" and item is None)):
                    self.fail(f"origin.model.{key}: found {_kind(item)}, expected a string")
            if "name" not in model:
                self.fail("origin.model: the field 'name' is missing")
        return dict(value)


_JSON_NAMES: dict[type, str] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    Mapping: "an object",
    dict: "an object",
    list: "a list",
    tuple: "a list",
    bool: "true or false",
    type(None): "null",
}


def _kind(value: Any) -> str:
    name = _JSON_NAMES.get(type(value), type(value).__name__)
    return f"the string {_short(value)}" if isinstance(value, str) else name


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a very long number"
    return text if len(text) <= 40 else text[:37] + "..."
