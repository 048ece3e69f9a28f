"""The file of a baseline: a run of lm-eval as ``Results`` hold it. ``docs/regress.md`` documents its fields."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lpes_eval.compare.results import Metric, Model, Results, Task, differing, well_formed
from lpes_eval.compare.tables import finite
from lpes_eval.files import write_atomically

FORMAT = "lpes-eval baseline"
FORMAT_VERSION = 2


def save(results: Results, path: str | Path) -> None:
    """Write a run as a baseline, whole or not at all."""
    data = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(results)}
    for name in ("path", "factors", "raw"):
        del data[name]
    for task in data["tasks"].values():
        for metric in task["metrics"].values():
            if metric["by_question"]:
                metric["by_question"] = {label: _pack(scores) for label, scores in metric["by_question"].items()}
    write_atomically(path, json.dumps(finite(data), indent=1, allow_nan=False) + "\n")


def load(path: str | Path) -> Results:
    """Read a baseline.

    Raises:
        DataError: a file that is not a baseline, a damaged one, or one of another version of the format.
    """
    path = Path(path)
    with well_formed(path, "damaged baseline", "restore the file, or delete it and write it again with --update"):
        data = json.loads(path.read_text(encoding="utf-8"))
        if (found := (data.get("format"), data.get("format_version"))) != (FORMAT, FORMAT_VERSION):
            raise ValueError(f"'format' and 'format_version' are {found}, expected {(FORMAT, FORMAT_VERSION)}")
        tasks = {name: _task(entry) for name, entry in data["tasks"].items()}
        if not tasks:
            raise ValueError("no tasks")
        run = Results(path, Model(**data["model"]), None, data["provenance"], tasks)
        str(run.model), run.model.is_same(run.model), list(differing(run.provenance, {"": 0}))  # fail here, not later
        return run


def is_baseline(path: Path) -> bool:
    """Whether a file says of itself that it is a baseline, of any version, damaged or not."""
    try:
        return bool(json.loads(path.read_bytes())["format"] == FORMAT)
    except (OSError, LookupError, TypeError, ValueError, RecursionError):
        return False


def _task(entry: Mapping[str, Any]) -> Task:
    list(differing(entry["data"], {"": 0}))  # fails on an empty list or text, too
    return Task(**{**entry, "metrics": {key: _metric(one, entry["examples"]) for key, one in entry["metrics"].items()}})


def _metric(entry: Mapping[str, Any], examples: Any) -> Metric:
    values = {label: float(value) for label, value in entry["values"].items()}
    packed = entry["by_question"]
    by_question = None if packed is None else {label: tuple(map(float, packed[label])) for label in values}
    for label, scores in (by_question or {}).items():
        if len(scores) != examples or not math.isfinite(math.fsum(scores)):
            raise ValueError(f"{label}: {len(scores)} scores for {examples} questions")
        if isinstance(packed[label], str) and not {*packed[label]} <= {"0", "1"}:
            raise ValueError(f"{label}: other letters than 0 and 1")
    if not values:
        raise ValueError("a metric without values")
    return Metric(bool(entry["higher_is_better"]), values, by_question)


def _pack(scores: tuple[float, ...]) -> str | list[float]:
    """Write right-or-wrong scores as a string of 1 and 0; others as numbers, in full."""
    if all(score in (0.0, 1.0) for score in scores):
        return "".join("1" if score else "0" for score in scores)
    return list(scores)
