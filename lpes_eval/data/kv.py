"""Key-value retrieval (Liu et al. 2024, arXiv 2307.03172): find one UUID's value in a JSON object of UUID pairs.

In the generated set an example is one object of ``num_keys`` records, and its positions differ only in the key that is
asked. Records are exchangeable, so this measures what moving the gold record measures, and the prompts of an example's
positions share everything up to the key: a prefix that has to be prefilled once. In the official files one key is
asked, and its record moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from uuid import UUID

from lpes_eval import files
from lpes_eval.data import splits
from lpes_eval.errors import DataError
from lpes_eval.rng import stream

URL = "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/kv_retrieval_data"
SIZES = (50, 75, 140, 150, 300)
POSITIONS = (0, 20, 40, 60, 80, 100)
POOL = 2700
"""Generated examples there are to draw splits from; each is made only when it is asked for."""
SEED = 1
"""Changing it changes every generated example, and with that the version of the task."""

Record = tuple[str, str]

TEMPLATE = """\
Extract the value corresponding to the specified key in the JSON object below.

JSON data:
{records}

Key: "{key}"
Corresponding value:"""


@dataclass(frozen=True)
class Example:
    """One question: ``records`` in the order of the prompt, and the ``index`` of the one that is asked for."""

    question_id: int
    records: tuple[Record, ...]
    index: int

    @property
    def key(self) -> str:
        """The key that is asked."""
        return self.records[self.index][0]

    @property
    def value(self) -> str:
        """The answer."""
        return self.records[self.index][1]

    def prompt(self) -> str:
        """The benchmark's prompt (Fig. 6), to the byte."""
        return TEMPLATE.format(records=format_records(self.records), key=self.key)


def format_records(records: Sequence[Record]) -> str:
    """The JSON text of the benchmark: one record a line, each after the first behind one space."""
    return "{" + ",\n ".join(f'"{key}": "{value}"' for key, value in records) + "}"


def gold_index(position: float, num_items: int) -> int:
    """Where the gold item stands: ``floor(position * (num_items - 1) / 100)``, with ``position`` in percent."""
    if not 0 <= position <= 100:
        raise DataError(f"position={position} is not a percentage between 0 and 100")
    return int(position * (num_items - 1) // 100)


def generate(question_id: int, num_keys: int, position: float, seed: int = SEED) -> Example:
    """Example ``question_id`` of the generated set with ``num_keys`` records; the same records at every position."""
    return Example(question_id, _records(question_id, num_keys, seed), gold_index(position, num_keys))


@lru_cache(maxsize=1024)
def _records(question_id: int, num_keys: int, seed: int) -> tuple[Record, ...]:
    rng = stream("kv_retrieval", seed, num_keys, question_id)
    return tuple((_uuid4(rng), _uuid4(rng)) for _ in range(num_keys))


def _uuid4(rng: Random) -> str:
    return str(UUID(int=rng.getrandbits(128), version=4))


class NoSuchFile(DataError):
    """A size for which there is no official file."""


OFFICIAL_SIZES = (75, 140, 300)
"""Pairs in the files of Liu et al. (arXiv 2307.03172)."""


def official_name(num_keys: int) -> str:
    """The file's name in github.com/nelson-liu/lost-in-the-middle, folder ``kv_retrieval_data``."""
    return f"kv-retrieval-{num_keys}_keys.jsonl.gz"


OFFICIAL_NAMES = "kv-retrieval-[0-9]*_keys.jsonl"
"""Files of every size, without ``.gz``."""
OFFICIAL_LINE = {"ordered_kv_records": [["KEY", "VALUE"], ["KEY 2", "VALUE 2"]], "key": "KEY", "value": "VALUE"}
"""What a line has."""


def official_url(num_keys: int) -> str:
    """The file's address.

    Raises:
        NoSuchFile: a size that the authors do not publish.
    """
    if num_keys not in OFFICIAL_SIZES:
        sizes = ", ".join(map(str, OFFICIAL_SIZES))
        raise NoSuchFile(
            f"no official file has {num_keys} pairs; expected one of {sizes} (kv_retrieval_75, kv_retrieval_140, "
            "kv_retrieval_300), or ask for generated records with --metadata source=generated"
        )
    return f"{URL}/{official_name(num_keys)}"


@dataclass(frozen=True)
class Question:
    """An example of an official file: the record that is asked for, and the others in their order."""

    question_id: int
    gold: Record
    others: tuple[Record, ...]

    def at(self, position: float) -> Example:
        """The example with the asked record at ``position`` percent."""
        index = gold_index(position, 1 + len(self.others))
        return Example(self.question_id, (*self.others[:index], self.gold, *self.others[index:]), index)


def read_official(path: Path, num_keys: int) -> list[Question]:
    """The questions of an official file.

    Raises:
        DataError: a line that is not in the benchmark's form, or with another number of records; names the line.
    """
    questions = []
    for number, line in enumerate(files.read_jsonl(path, required=OFFICIAL_LINE), 1):
        where = f"{path}, example {number}"
        records, gold = line["ordered_kv_records"], [line["key"], line["value"]]
        if not isinstance(records, list) or not all(_is_record(record) for record in records):
            raise DataError(f"{where}: 'ordered_kv_records' is not a list of [key, value] pairs of strings")
        if len(records) != num_keys:
            raise DataError(f"{where}: {len(records)} records, expected {num_keys}")
        if records.count(gold) != 1:
            raise DataError(
                f"{where}: the asked record {gold} stands {records.count(gold)} times in 'ordered_kv_records', "
                "expected once"
            )
        others = tuple((key, value) for key, value in records if [key, value] != gold)
        questions.append(Question(number - 1, (gold[0], gold[1]), others))
    splits.check_enough(len(questions), path)
    return questions


def _is_record(record: object) -> bool:
    return isinstance(record, list) and len(record) == 2 and all(isinstance(text, str) for text in record)
