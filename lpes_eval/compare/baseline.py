"""The file of a baseline: a run of lm-eval as ``Results`` hold it. ``docs/regress.md`` documents its fields."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lpes_eval.compare.results import Metric, Model, Results, Task, number, well_formed
from lpes_eval.compare.tables import finite
from lpes_eval.files import entry, read_json, write_output

FORMAT = "lpes-eval baseline"
FORMAT_VERSION = 3
MARK = f'"format": "{FORMAT}"'
"""What tells a baseline, of any version, damaged or not, from other files."""


def save(results: Results, path: str | Path) -> None:
    """Write a run as a baseline, whole or not at all, and never over another file than a baseline."""
    data = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": asdict(results.model),
        "provenance": results.provenance,
        "tasks": {name: _packed(task) for name, task in results.tasks.items()},
        "subtasks": {name: _packed(task) for name, task in results.subtasks.items()},
    }
    write_output(path, json.dumps(finite(data), indent=1, allow_nan=False) + "\n", MARK)


def load(path: str | Path) -> Results:
    """Read a baseline.

    Raises:
        DataError: a file that is not a baseline, a damaged one, or one of another version of the format.
    """
    path = Path(path)
    with well_formed(path, "damaged baseline", "restore the file, or delete it and write it again with --update"):
        data = entry(read_json(path))
        if (version := (data.get("format"), data.get("format_version"))) != (FORMAT, FORMAT_VERSION):
            raise ValueError(f"'format' and 'format_version' are {version}, expected {(FORMAT, FORMAT_VERSION)}")
        tasks, subtasks = (
            {name: _task(entry(data, kind, name)) for name in entry(data, kind)} for kind in ("tasks", "subtasks")
        )
        if not any(task.metrics for task in tasks.values()):
            raise ValueError("no tasks, or none with metrics")
        model, provenance = entry(data, "model"), entry(data, "provenance")
        kinds = {"kind": str, "name": str, "parameters": int | None}
        if wrong := [key for key, kind in kinds.items() if not isinstance(model.get(key), kind)]:
            raise TypeError(f"model {wrong[0]} is {model.get(wrong[0])!r}")
        model = {key: model.get(key) for key in kinds}
        return Results(path, Model(**model), None, provenance, tasks, subtasks)


def _packed(task: Task) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for key, metric in task.metrics.items():
        by_question: Any = metric.by_question
        by_question = by_question and {label: _pack(scores) for label, scores in by_question.items()}
        metrics[key] = {**vars(metric), "by_question": by_question}
    names = ("version", "data", "examples", "documents", "prompts", "members")
    return {**{name: getattr(task, name) for name in names}, "metrics": metrics}


def _task(data: Mapping[str, Any]) -> Task:
    examples, documents, prompts = (data[name] for name in ("examples", "documents", "prompts"))
    if not (isinstance(examples, int | None) and isinstance(documents, str | None) and isinstance(prompts, str | None)):
        raise TypeError(f"examples, documents, prompts are {examples!r}, {documents!r}, {prompts!r}")
    metrics = {key: _metric(entry(data, "metrics", key), examples) for key in entry(data, "metrics")}
    members = tuple(map(str, list(data["members"])))
    return Task(str(data["version"]), entry(data, "data"), examples, documents, prompts, metrics, members)


def _metric(data: Mapping[str, Any], examples: int | None) -> Metric:
    values = {label: number(value) for label, value in entry(data, "values").items()}
    packed, up = data["by_question"], data["higher_is_better"]
    if not values or not isinstance(up, bool | None):
        raise ValueError(f"a metric without values, or higher_is_better is {up!r}")
    if packed is None:
        return Metric(up, values, None)
    by_question = {label: _unpacked(packed[label]) for label in values}
    for label, scores in by_question.items():
        if len(scores) != examples or any(map(math.isnan, scores)):
            raise ValueError(f"{label}: {len(scores)} scores for {examples} questions, or some are no numbers")
    return Metric(up, values, by_question)


def _unpacked(scores: str | list[Any]) -> tuple[float, ...]:
    if isinstance(scores, str):
        return tuple({"0": 0.0, "1": 1.0}.get(letter, math.nan) for letter in scores)
    return tuple(map(number, scores))


def _pack(scores: tuple[float, ...]) -> str | list[float]:
    """Write right-or-wrong scores as a string of 1 and 0; others as numbers, in full."""
    if all(score in (0.0, 1.0) for score in scores):
        return "".join("1" if score else "0" for score in scores)
    return list(scores)
