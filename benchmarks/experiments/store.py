"""Results on disk: JSON Lines files, one a table, one row a measurement.

A row says what was measured (``settings``, ``model``, ``factors``), with what (``versions``, ``hardware``), when, for
how long, and by which ``command``. It holds each question's outcome, so that every interval can be computed from it
again: right or wrong as a string of 1 and 0 a position, in the order of ``questions``. Rows of version 0.1, which had
a task for every position, also keep what was typed then where that has another form today (``ran``).
"""

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from numpy.typing import NDArray

from lpes_eval import files

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "benchmarks/results"
"""The results that the repository keeps."""
TABLES = {
    "evaluate": "accuracy.jsonl",
    "search": "searches.jsonl",
    "choose": "uniform_factors.jsonl",
    "perplexity": "perplexity.jsonl",
}
"""Kinds of experiments, and the table that each one's results are in."""
Row = dict[str, Any]


def tables(folder: Path) -> dict[str, dict[str, Row]]:
    """A folder's rows by kind and name, where there are any; ``DataError`` names a line that is no row."""
    return {kind: {row["name"]: row for row in rows(folder / file, "name")} for kind, file in TABLES.items()}


def rows(path: Path, *fields: str) -> list[Row]:
    """The rows of a table, each of which must have these fields; none where it is not there."""
    return list(files.read_jsonl(path, required=fields)) if path.exists() else []


def write(path: Path, table: Iterable[Mapping[str, Any]]) -> None:
    """Write a table, whole or not at all."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in table)
    files.write_atomically(path, "".join(f"{line}\n" for line in lines))


def pack(questions: Sequence[Any], scores: Mapping[str, Sequence[float]]) -> Row:
    """Questions and their scores by position, compactly; scores that are not 0 or 1 are kept as numbers."""
    packed = {
        position: "".join(f"{int(v)}" for v in values) if {*values} <= {0, 1} else [round(v, 6) for v in values]
        for position, values in scores.items()
    }
    return {"questions": " ".join(map(str, questions)), "scores": packed}


def scores(row: Mapping[str, Any]) -> pd.DataFrame:
    """A result's scores: a line a question, a column a position."""
    columns = {position: [float(value) for value in values] for position, values in row["scores"].items()}
    return pd.DataFrame(columns, index=row["questions"].split())


def paired(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The scores of two results on the questions that both were asked, of shape (questions, positions)."""
    a, b = scores(first), scores(second)
    common = a.index[a.index.isin(b.index)]
    return a.loc[common].to_numpy(), b.loc[common, a.columns].to_numpy()


def spelled(path: Path) -> str:
    """A path as a command would name it: from the repository's root if it lies within."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def versions() -> dict[str, str]:
    """Versions that answers may depend on."""
    packages = ("lpes-eval", "lm-eval", "torch", "transformers")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def hardware(threads: int, device: str = "cpu") -> Row:
    """The machine, and how much of it one experiment was given."""
    processor = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        processor = names[0].partition(":")[2].strip() if names else processor
    machine = {"processor": processor, "cores": os.cpu_count(), "threads": threads, "device": device}
    if device.startswith("cuda"):
        import torch

        machine["gpu"] = torch.cuda.get_device_name(device)
    return machine
