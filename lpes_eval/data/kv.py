"""Key-value retrieval (Liu et al. 2024, arXiv 2307.03172): find one UUID's value in a JSON object of UUID pairs.

In the generated set the positions of a question differ only in the key that is asked, so their prompts share everything
up to it. In the official files one key is asked, and its record moves. ``acc``: the value stands in the answer, in
whatever case (section 3), as in that of a model that repeats its context; ``first_value_acc`` is not fooled.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import UUID

from lpes_eval import files
from lpes_eval.data.source import Files, Source, asked, draw, read_examples
from lpes_eval.harness.segments import Segment, join
from lpes_eval.harness.task import PositionTask, gold_index
from lpes_eval.rng import stream

OFFICIAL = Files(
    "kv_retrieval",
    "kv-retrieval-{}_keys.jsonl.gz",
    "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/kv_retrieval_data",
    places=("kv_retrieval_data",),
    generated=True,
)
LINE = {"ordered_kv_records": [["KEY", "VALUE"], ["KEY 2", "VALUE 2"]], "key": "KEY", "value": "VALUE"}

POOL = 2700
"""Generated examples there are to draw splits from."""
SEED = 1
"""Changing it changes every generated example, and so the version of the task."""

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
    """Records, (key, value) pairs; the number of the gold one, which moves, or None: it is the one at the position."""

    question_id: int
    records: tuple[Record, ...]
    gold: int | None = None

    def at(self, position: float) -> tuple[list[Record], int]:
        """The records in the order of the prompt at ``position`` percent, and which one is asked for."""
        index, records = gold_index(position, len(self.records)), list(self.records)
        if self.gold is not None:
            records.insert(index, records.pop(self.gold))
        return records, index

    def segments(self, position: float) -> list[Segment]:
        """The prompt, in labelled pieces."""
        records, asked = self.at(position)
        instruction, question = TEMPLATE.split("{records}")
        found = [Segment("instruction", instruction)]
        for number, (key, value) in enumerate(records):
            label = "gold" if number == asked else f"record {number + 1}"
            begin, end = " " if number else "{", ",\n" if number < len(records) - 1 else "}"
            found.append(Segment(label, f'{begin}"{key}": "{value}"{end}', len(begin), len(end)))
        return [*found, Segment("question", question.format(key=records[asked][0]))]

    def prompt(self, position: float) -> str:
        """The benchmark's prompt."""
        return join(self.segments(position))

    def target(self, position: float) -> str:
        """The answer: the asked value."""
        records, asked = self.at(position)
        return records[asked][1]


@lru_cache(maxsize=1024)
def generate(question_id: int, num_keys: int, seed: int = SEED) -> Question:
    """Question ``question_id`` of the generated set with ``num_keys`` records."""
    rng = stream("kv_retrieval", seed, num_keys, question_id)
    uuids = [str(UUID(int=rng.getrandbits(128), version=4)) for _ in range(2 * num_keys)]
    return Question(question_id, tuple(zip(uuids[::2], uuids[1::2], strict=True)))


def read(path: Path, num_keys: int) -> list[Question]:
    """The questions of an official file; raises ``DataError`` for a line that is not in the benchmark's form."""

    def parse(number: int, line: dict[str, Any]) -> Question:
        records, gold = line["ordered_kv_records"], [line["key"], line["value"]]
        if any(len(record) != 2 for record in records):
            raise ValueError("'ordered_kv_records' are not all pairs [key, value]")
        if len(records) != num_keys:
            raise ValueError(f"{len(records)} records, expected {num_keys}")
        keys = [key for key, _ in records]
        if repeated := [key for key in keys if keys.count(key) > 1]:
            raise ValueError(f"key {repeated[0]!r} stands {len(repeated)} times, expected once")
        if gold not in records:
            raise ValueError(f"the asked record {files.shown(gold)} is not in 'ordered_kv_records'")
        return Question(number, tuple((key, value) for key, value in records), records.index(gold))

    return read_examples(path, LINE, parse, divided=True)


def accuracy(answer: str, value: str) -> float:
    """1.0 where ``value`` is contained in ``answer``, case ignored, else 0.0."""
    return float(value.lower() in answer.lower())


_UUID_LIKE = r"""[0-9a-f]{8}-[0-9a-f-]*|(?<=")[0-9a-f]{1,8}$"""
"""A UUID, one gone wrong, or one that was cut at the end of an answer."""


def first_value_accuracy(answer: str, records: Sequence[Record], key: str, value: str) -> float:
    """1.0 where ``value`` is the first UUID or record text in ``answer``, behind the key if no other record follows."""
    texts = {text for record in records for text in record if not re.fullmatch(_UUID_LIKE, text)}
    pattern = "|".join([_UUID_LIKE, *map(re.escape, sorted(texts, key=len, reverse=True))])
    values = [text.lower() for text in re.findall(pattern, answer, re.IGNORECASE)]
    first, second, third = (*values, "", "", "")[:3]
    key, value = key.lower(), value.lower()
    return float(first == value or ((first, second) == (key, value) and (third == value or key.startswith(third))))


def load(
    *, num_keys: int = 50, split: str = "held_out", search_seed: int = 0, **settings: Any
) -> tuple[list[dict[str, Any]], Source]:
    """The questions of one split: generated ones for every model, unless the files are asked for."""
    request = asked({key: settings.get(key) for key in ("source", "data_dir")})
    if request.kind == "generated":
        made = ("generated", f"{num_keys} pairs", f"lpes_eval.data.kv, seed {SEED}", POOL)
        return draw(split, search_seed, *made, lambda i: generate(i, num_keys), lambda question: question.records)
    path = OFFICIAL.path(request, num_keys)
    questions = read(path, num_keys)
    name = path.name.partition(".jsonl")[0]
    return draw(split, search_seed, request.kind, name, path, len(questions), questions.__getitem__)


class Task(PositionTask):
    """The lm-eval task: ``acc`` and ``first_value_acc`` at every position."""

    METRIC = "acc"
    STRICT = "first_value_acc"
    SIZE = "num_keys"

    load = staticmethod(load)
    example = Question
    metric = staticmethod(accuracy)

    def strict_score(self, doc: dict[str, Any], position: float, answer: str) -> float:
        """Whether the answer gives the value first."""
        records, gold = Question(**doc).at(position)
        return first_value_accuracy(answer, records, *records[gold])

    def settled(self, metric: str, doc: dict[str, Any], position: float, answer: str) -> bool:
        """Where the value is there or, for ``first_value_acc`` of UUIDs, another one stands before it."""
        records, gold = Question(**doc).at(position)
        key, value = (text.lower() for text in records[gold])
        if metric == self.METRIC and value in answer.lower():
            return True
        if metric != self.STRICT or not all(re.fullmatch(_UUID_LIKE, text) for pair in records for text in pair):
            return False
        whole = [m[0].lower() for m in re.finditer(_UUID_LIKE, answer, re.IGNORECASE) if m.end() < len(answer)]
        return len(whole) > (0 if whole[:1] != [key] else 1 if whole[1:2] != [value] else 2)

    def written(self, doc: dict[str, Any], position: float) -> str:
        """In quotes, as it stands in the prompt."""
        return f'"{self.target(doc, position)}"'
