"""The journal of a search as a file: JSON lines, the settings first, then an entry for every measurement."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from msgspec import Struct, convert, to_builtins
from msgspec.json import Decoder

from lpes_eval.errors import DataError


class GuardCheck(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a guard's score compares with the plain model's, as means over questions."""

    plain: float
    found: float
    """Under the factors."""
    interval: tuple[float | None, float | None]
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


class Entry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One measurement of factors."""

    key: str
    """Which factors, on which questions."""
    fitness: float
    """The weighted score, higher is better."""
    measure: Literal["score", "likelihood"] = "score"
    """What the fitness is made of: the tasks' ``score``, or the ``likelihood`` of the reference answers."""
    generation: int | None = None
    """Of an individual; None for what the search measures besides."""
    origin: str = ""
    """The operator that made the individual, or what else it is."""
    points: list[list[float]] = []
    """Its control points; ``parents`` are those that it was made from."""
    parents: list[list[list[float]]] = []
    scores: dict[str, float] = {}
    """Each column's score, by its name."""
    seconds: float = 0.0
    """Time it took, guards included."""
    prompts: int = 0
    """Answered for it, guards apart."""
    factor: float | None = None
    """The factor of all scaled layers, where they have the same."""
    stopped_after: int = 0
    """Prompts after which it was given up; 0 if it was not."""
    examples: dict[str, list[Any]] = {}
    """Each column's score of every example, None where it was not asked; empty for one given up."""
    ended: list[int | None] = []
    """For every prompt 1 where its answer ended by itself, 0 where it was cut, None where it was not asked."""
    guard_prompts: int = 0
    """Prompts that its guards were asked."""
    guard_rows: dict[str, list[float | None]] = {}
    """Of the plain model, each guard's score of every question."""
    guards: dict[str, GuardCheck] = {}
    failed: str = ""
    """Why it could not be measured."""

    def where(self, asked: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Its examples' scores where ``asked`` has some; None elsewhere."""
        pairs = {name: zip(self.examples[name], values, strict=True) for name, values in asked.items()}
        return {name: [None if value is None else own for own, value in each] for name, each in pairs.items()}


BEGINNING = b'{"settings"'


class Reading(NamedTuple):
    """What a journal holds; ``torn`` bytes at its end are of a line that was not written to its end."""

    settings: dict[str, Any] | None
    entries: dict[str, Entry]
    torn: int


class _Settings(Struct):
    """A journal's first line."""

    settings: dict[str, Any]


def read(path: Path) -> Reading:
    """Read a journal, which a search may be writing; ``DataError`` names a line before the last that is damaged."""
    *lines, rest = (content := path.read_bytes()).split(b"\n")
    if not BEGINNING.startswith(content[: len(BEGINNING)]):
        raise DataError(f"{path}, line 1: damaged (it does not begin with the settings); take another folder")
    settings: dict[str, Any] | None = None
    entries: dict[str, Entry] = {}
    of_settings, of_entry = Decoder(_Settings), Decoder(Entry)
    for number, line in enumerate(lines, 1):
        try:
            if number == 1:
                settings = of_settings.decode(line).settings
            else:
                entry = of_entry.decode(line)
                entries[entry.key] = entry
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not rest:
                return Reading(settings, entries, len(line) + 1)
            way_out = "take another folder" if number == 1 else "delete the line to have its factors measured again"
            raise DataError(f"{path}, line {number}: damaged ({error}); {way_out}") from None
    return Reading(settings, entries, len(rest))


def entry_of(data: Mapping[str, Any]) -> Entry:
    """The entry as it will be read again; ``ValueError`` where it has what JSON has not, such as NaN."""
    plain = to_builtins(data, enc_hook=lambda number: number.item())  # one of numpy's
    return convert(json.loads(json.dumps(plain, allow_nan=False)), Entry)
