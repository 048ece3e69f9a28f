"""Key-value retrieval (Liu et al. 2024, arXiv 2307.03172): find one UUID's value in a JSON object of UUID pairs.

In the generated set a question is one object of ``num_keys`` records, and its positions differ only in the key that is
asked. Records are exchangeable, so this measures what moving the gold record measures, and the prompts of a question's
positions share everything up to the key: a prefix that has to be prefilled once. In the official files one key is
asked, and its record moves. The metric: the value stands in the answer, in whatever case (section 3).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

from lpes_eval import files
from lpes_eval.data import splits
from lpes_eval.data.source import Asked, Source, asked, download, find, missing, other_sizes
from lpes_eval.errors import DataError
from lpes_eval.harness.segments import Segment, join
from lpes_eval.harness.task import PositionTask, gold_index
from lpes_eval.rng import stream

URL = "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/kv_retrieval_data"
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
"""The benchmark's prompt (Fig. 6)."""


@dataclass(frozen=True)
class Question:
    """Records in their order, and which one is asked for: the ``gold`` one, which moves, or whichever stands there.

    Attributes:
        question_id: its number in the set.
        records: (key, value) pairs, strings both.
        gold: the asked record's number; None in the generated set.
    """

    question_id: int
    records: tuple[Record, ...]
    gold: int | None = None

    def at(self, position: float) -> tuple[list[Record], int]:
        """The records in the order of the prompt at ``position`` percent, and which one is asked for."""
        index = gold_index(position, len(self.records))
        if self.gold is None:
            return list(self.records), index
        others = [record for number, record in enumerate(self.records) if number != self.gold]
        return [*others[:index], self.records[self.gold], *others[index:]], index

    def segments(self, position: float) -> list[Segment]:
        """The prompt, in labelled pieces, as ``prompt`` has it to the byte."""
        records, asked = self.at(position)
        instruction, question = TEMPLATE.split("{records}")
        lines = [f"{text},\n" for text in _lines(records)]
        lines[-1] = lines[-1].removesuffix(",\n")
        labels = ["gold" if number == asked else f"record {number + 1}" for number in range(len(records))]
        pieces = [Segment(label, line) for label, line in zip(labels, lines, strict=True)]
        return [
            Segment("instruction", instruction),
            *pieces,
            Segment("question", question.format(key=records[asked][0])),
        ]

    def prompt(self, position: float) -> str:
        """The benchmark's prompt."""
        return join(self.segments(position))

    def value(self, position: float) -> str:
        """The answer."""
        records, asked = self.at(position)
        return records[asked][1]


def format_records(records: Sequence[Record]) -> str:
    """The JSON text of the benchmark: one record a line, each after the first behind one space."""
    return ",\n".join(_lines(records))


def _lines(records: Sequence[Record]) -> list[str]:
    texts = [f'"{key}": "{value}"' for key, value in records]
    return ["{" * (n == 0) + " " * (n > 0) + text + "}" * (n == len(texts) - 1) for n, text in enumerate(texts)]


@lru_cache(maxsize=1024)
def generate(question_id: int, num_keys: int, seed: int = SEED) -> Question:
    """Question ``question_id`` of the generated set with ``num_keys`` records."""
    rng = stream("kv_retrieval", seed, num_keys, question_id)
    return Question(question_id, tuple((_uuid4(rng), _uuid4(rng)) for _ in range(num_keys)))


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
        keys = [key for key, _ in records]
        if repeated := sorted({key for key in keys if keys.count(key) > 1}):
            raise DataError(f"{where}: key {repeated[0]!r} stands {keys.count(repeated[0])} times, expected once")
        if gold not in records:
            raise DataError(f"{where}: the asked record {gold} is not in 'ordered_kv_records'")
        if not gold[1].strip():
            raise DataError(f"{where}: the asked value is empty, so every answer would be right")
        questions.append(Question(number - 1, tuple((key, value) for key, value in records), records.index(gold)))
    splits.check_enough(len(questions), path)
    return questions


def _is_record(record: object) -> bool:
    return isinstance(record, list) and len(record) == 2 and all(isinstance(text, str) for text in record)


def accuracy(answer: str, value: str) -> float:
    """1.0 where ``value`` is contained in ``answer``, case ignored, else 0.0."""
    return float(value.lower() in answer.lower())


def load(**metadata: Any) -> tuple[list[dict[str, Any]], Source]:
    """The questions of one split.

    Unlike other benchmarks this one is generated for every model, unless its files are asked for: UUIDs are UUIDs.
    """
    num_keys, split = metadata["num_keys"], metadata.get("split", "held_out")
    if not isinstance(num_keys, int) or num_keys < 2:
        raise DataError(f"num_keys={num_keys!r}: expected a whole number of key-value pairs, at least 2")
    request = asked({key: metadata[key] for key in ("source", "data_dir") if key in metadata})
    if request.kind == "generated":
        drawn = splits.split(POOL, metadata.get("search_seed", 0))
        questions = [generate(i, num_keys) for i in drawn.indices(split)]
        name, location = f"{num_keys} pairs", f"lpes_eval.data.kv, seed {SEED}"
        digest = sha256(json.dumps([question.records for question in questions]).encode()).hexdigest()
    else:
        path = _official(request, num_keys)
        read = read_official(path, num_keys)
        drawn = splits.split(len(read), metadata.get("search_seed", 0))
        questions = [read[i] for i in drawn.indices(split)]
        name = official_name(num_keys).removesuffix(".jsonl.gz")
        location, digest = str(path), files.sha256(path)
    source = Source(request.kind, name, location, digest, split, drawn.seed(split), drawn.total, len(questions))
    return [asdict(question) for question in questions], source


class Task(PositionTask):
    """The lm-eval task: ``acc`` at every position."""

    METRIC = "acc"
    SIZE = "num_keys"

    load = staticmethod(load)

    def segments(self, doc: dict[str, Any], position: float) -> list[Segment]:
        """The prompt, in labelled pieces."""
        return _question(doc).segments(position)

    def target(self, doc: dict[str, Any], position: float) -> str:
        """The asked value."""
        return _question(doc).value(position)

    def score(self, doc: dict[str, Any], position: float, answer: str) -> float:
        """Whether the value stands in the answer."""
        return accuracy(answer, self.target(doc, position))


def _question(doc: dict[str, Any]) -> Question:
    return Question(doc["question_id"], tuple((key, value) for key, value in doc["records"]), doc["gold"])


def _official(request: Asked, num_keys: int) -> Path:
    if request.folder is None:
        return download(official_url(num_keys))
    name, subfolders = official_name(num_keys), ("kv_retrieval_data",)
    path = find(request.folder, name, subfolders)
    if path is None:
        others = other_sizes(request.folder, OFFICIAL_NAMES, "num_keys", subfolders)
        try:
            raise missing(request.folder, name, official_url(num_keys), others)
        except NoSuchFile as reason:
            raise DataError(f"{request.folder}: {name} is not there{others}, and {reason}") from None
    return path
