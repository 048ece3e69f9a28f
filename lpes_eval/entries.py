"""The journal of a search as a file: JSON lines, the settings first, then an entry for every measurement."""

import dataclasses
import functools
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from lpes_eval.errors import DataError
from lpes_eval.files import parse


@dataclass(frozen=True)
class GuardCheck:
    """How a guard's score compares with the plain model's, as means over questions."""

    plain: float
    found: float
    """Under the factors."""
    interval: list[float | None]
    """Of the difference, 95 %; None where one question gives none."""
    over: float
    """By how much it is worse than is allowed, beyond chance; 0 where that is not shown."""
    lower_is_better: bool = False

    @property
    def lower(self) -> bool:
        """Whether it is worse beyond chance, though perhaps not by more than is allowed."""
        low, high = self.interval
        return (low or 0.0) > 0 if self.lower_is_better else (high or 0.0) < 0

    @property
    def nothing_to_lose(self) -> bool:
        """Whether the plain model has 0 already, so that nothing could have become worse."""
        return self.plain == 0 and not self.lower_is_better

    def to_dict(self) -> dict[str, Any]:
        """As plain data; whether lower is better is said where it is."""
        return {name: value for name, value in vars(self).items() if name != "lower_is_better" or value}


@dataclass(frozen=True)
class Entry:
    """One measurement of factors."""

    key: str
    """Which factors, on which questions."""
    fitness: float
    """The weighted score, higher is better."""
    measure: str = "score"
    """What the fitness is made of: the tasks' ``score``, or the ``likelihood`` of the reference answers."""
    generation: int | None = None
    """Of an individual; None for what the search measures besides."""
    origin: str = ""
    """The operator that made the individual, or what else it is."""
    points: list[list[float]] = field(default_factory=list)
    """Its control points; ``parents`` are those that it was made from."""
    parents: list[list[list[float]]] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    """Each column's score, by its name."""
    seconds: float = 0.0
    """Time it took, guards included."""
    prompts: int = 0
    """Answered for it, guards apart."""
    factor: float | None = None
    """The factor of all scaled layers, where they have the same."""
    stopped_after: int = 0
    """Prompts after which it was given up; 0 if it was not."""
    examples: dict[str, list[Any]] = field(default_factory=dict)
    """Each column's score of every example, None where it was not asked; empty for one given up."""
    ended: list[int | None] = field(default_factory=list)
    """For every prompt 1 where its answer ended by itself, 0 where it was cut, None where it was not asked."""
    guard_prompts: int = 0
    """Prompts that its guards were asked."""
    guard_rows: dict[str, list[float | None]] = field(default_factory=dict)
    """Of the plain model, each guard's score of every question."""
    guards: dict[str, GuardCheck] = field(default_factory=dict)
    failed: str = ""
    """Why it could not be measured."""

    def where(self, asked: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Its examples' scores where ``asked`` has some; None elsewhere."""
        pairs = {name: zip(self.examples[name], values, strict=True) for name, values in asked.items()}
        return {name: [None if value is None else own for own, value in each] for name, each in pairs.items()}

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without what is not said."""
        data = vars(self) | {"guards": {name: guard.to_dict() for name, guard in self.guards.items()}}
        unsaid = {each.name: getattr(Entry("", 0.0), each.name) for each in dataclasses.fields(self)}
        return {k: v for k, v in data.items() if v != unsaid[k] or k in ("fitness", "generation", "prompts", "seconds")}


class Reading(NamedTuple):
    """What a journal holds; ``torn`` bytes at its end are of a line that was not written to its end."""

    settings: dict[str, Any] | None
    entries: dict[str, Entry]
    torn: int


def read(path: Path) -> Reading:
    """Read a journal, which a search may be writing; ``DataError`` names a line before the last that is damaged."""
    *lines, rest = path.read_bytes().split(b"\n")
    settings: dict[str, Any] | None = None
    entries: dict[str, Entry] = {}
    for number, line in enumerate(lines, 1):
        try:
            data = parse(line, "")
            if number == 1:
                settings = typed(data, dict[str, dict[str, Any]], "the line")["settings"]
            else:
                entry = typed(data, Entry, "the line")
                entries[entry.key] = entry
        except (ValueError, LookupError) as error:
            if number == len(lines) and not rest:
                return Reading(settings, entries, len(line) + 1)
            way_out = "take another folder" if number == 1 else "delete the line to have its factors measured again"
            reason = "it has no settings" if isinstance(error, LookupError) else str(error).removeprefix(": ")
            raise DataError(f"{path}, line {number}: damaged ({reason}); {way_out}") from None
    return Reading(settings, entries, len(rest))


def entry_of(data: Mapping[str, Any]) -> Entry:
    """The entry as it will be read again; ``ValueError`` where it has what JSON has not, such as NaN."""
    plain = json.loads(json.dumps(data, allow_nan=False, default=_plain))
    entry: Entry = typed(plain, Entry, "the entry")
    return entry


def _plain(value: Any) -> Any:
    """Of a dataclass its fields, of one of numpy's numbers Python's."""
    return vars(value) if dataclasses.is_dataclass(value) else value.item()


def typed(value: Any, kind: Any, name: str) -> Any:
    """What JSON gave, as a value of this type; ``ValueError`` names what has another one."""
    if kind is Any or type(value) is kind:
        return value
    of, parts = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)  # type: ignore[arg-type]
        data = typed(value, dict[str, Any], name)
        if unknown := data.keys() - hints.keys():
            raise ValueError(f"{name} has the unknown field {min(unknown)!r}")
        try:
            return kind(**{key: typed(item, hints[key], key) for key, item in data.items()})  # type: ignore[operator]
        except TypeError:
            raise ValueError(f"{name} lacks a field; expected {', '.join(hints)}") from None
    if of in (Union, types.UnionType):
        return None if value is None else typed(value, parts[0], name)  # T | None alone is in use
    if of is list and isinstance(value, list):
        return [item if type(item) is parts[0] else typed(item, parts[0], name) for item in value]
    if of is dict and isinstance(value, dict):
        return {key: typed(item, parts[1], name) for key, item in value.items()}
    if kind is float and type(value) is int and abs(value) < 1e300:
        return float(value)
    raise ValueError(f"{name} is {type(value).__name__}, expected {getattr(kind, '__name__', kind)}")


_hints = functools.cache(get_type_hints)
