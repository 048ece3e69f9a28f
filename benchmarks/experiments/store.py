"""Results on disk: JSON Lines files, one a table, one row a measurement.

A row says what was measured (``settings``, ``model``, ``factors``), with what (``versions``, ``hardware``), when, for
how long, and by which ``command``. It holds each question's outcome, so that every interval can be computed from it
again: right or wrong as a string of 1 and 0 a position, in the order of ``questions``. Rows of version 0.1, which had
a task for every position, also keep what was typed then where that has another form today (``ran``).
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiments.sources import Model
from lpes_eval import files
from lpes_eval.errors import UserError
from lpes_eval.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
TABLES = {
    "evaluate": "accuracy.jsonl",
    "search": "searches.jsonl",
    "choose": "uniform_factors.jsonl",
    "perplexity": "perplexity.jsonl",
}
"""Kinds of experiments, and the table that each one's results are in."""
FAILURES = "failures.jsonl"


class Results:
    """The tables of a folder, which need not be there yet.

    Raises:
        DataError: a line of a table that is no row.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._tables = {file: self._read(file) for file in (*TABLES.values(), FAILURES)}

    def _read(self, file: str) -> dict[str, dict[str, Any]]:
        path = self.folder / file
        return {row["name"]: row for row in files.read_jsonl(path, required=("name",))} if path.exists() else {}

    def load(self, name: str) -> dict[str, Any] | None:
        """An experiment's result, if it is there."""
        return next((self._tables[file][name] for file in TABLES.values() if name in self._tables[file]), None)

    def failure(self, name: str) -> str | None:
        """Why an experiment gave no result the last time it was tried."""
        return self._tables[FAILURES].get(name, {}).get("error")

    def keep(self, kind: str, result: Mapping[str, Any]) -> None:
        """Write a result; an earlier failure is forgotten."""
        self._write(TABLES[kind], result)
        if self._tables[FAILURES].pop(result["name"], None):
            self._write(FAILURES)

    def keep_failure(self, name: str, error: str) -> None:
        """Write down that an experiment failed, and why, in one line."""
        self._write(FAILURES, {"name": name, "error": error})

    def _write(self, file: str, row: Mapping[str, Any] | None = None) -> None:
        if row is not None:
            self._tables[file][row["name"]] = json.loads(json.dumps(row))
        lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in self._tables[file].values())
        write_atomically(self.folder / file, "".join(f"{line}\n" for line in lines))


# -- outcomes ----------------------------------------------------------------------------------------------------------


def pack(questions: Sequence[Any], scores: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Questions and their scores by position, compactly; scores that are not 0 or 1 are kept as numbers."""
    packed: dict[str, Any] = {}
    for position, values in scores.items():
        if len(values) != len(questions):
            raise ValueError(f"{position}: {len(values)} scores for {len(questions)} questions")
        binary = all(value in (0, 1) for value in values)
        packed[position] = "".join(f"{int(v)}" for v in values) if binary else [round(v, 6) for v in values]
    return {"questions": " ".join(map(str, questions)), "scores": packed}


def unpack(result: Mapping[str, Any]) -> tuple[list[str], list[str], NDArray[np.float64]]:
    """A result's question ids, its positions, and its scores of shape (questions, positions)."""
    questions, scores = result["questions"].split(), result["scores"]
    columns = [[float(value) for value in values] for values in scores.values()]
    return questions, list(scores), np.array(columns).T.reshape(len(questions), len(scores))


def paired(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The scores of two results on the questions that both were asked, row by row and position by position.

    Raises:
        ValueError: no question in common, or other positions.
    """
    of_a, positions_a, scores_a = unpack(a)
    of_b, positions_b, scores_b = unpack(b)
    if positions_a != positions_b:
        raise ValueError(f"positions {positions_a} cannot be paired with {positions_b}")
    row = {question: number for number, question in enumerate(of_b)}
    common = [(number, row[question]) for number, question in enumerate(of_a) if question in row]
    if not common:
        raise ValueError("no question in common")
    rows_a, rows_b = zip(*common, strict=True)
    return scores_a[list(rows_a)], scores_b[list(rows_b)]


# -- circumstances -----------------------------------------------------------------------------------------------------


def model_at(pretrained: str) -> Model:
    """A model in a folder, or ``reference``.

    Raises:
        UserError: no model is there.
    """
    from lpes_eval import reference

    folder = reference.path() if pretrained == "reference" else Path(pretrained)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if not weights.is_file() or not config.is_file():
        raise UserError(f"{pretrained}: no model is there (model.safetensors and config.json); name a model's folder")
    return Model(pretrained, folder, files.sha256(weights), int(json.loads(config.read_text())["num_hidden_layers"]))


def spelled(path: Path) -> str:
    """A path as a command would name it: from the repository's root where it lies within."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def versions() -> dict[str, str]:
    """Versions that answers may depend on."""
    from importlib.metadata import version

    packages = ("lpes-eval", "lm-eval", "torch", "transformers")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def hardware(threads: int, device: str = "cpu") -> dict[str, Any]:
    """The machine, and how much of it one experiment was given."""
    processor = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        processor = names[0].partition(":")[2].strip() if names else processor
    return {"processor": processor, "cores": os.cpu_count(), "threads": threads, "device": device}
