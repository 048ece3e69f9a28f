"""The file of a baseline: a run of lm-eval as ``Results`` hold it. ``docs/regress.md`` documents its fields."""

import json
import math
from pathlib import Path
from typing import Any

from msgspec import convert

from lpes_eval.compare.results import Results, Task, well_formed
from lpes_eval.compare.tables import finite
from lpes_eval.files import entry, read_json, write_output

FORMAT = "lpes-eval baseline"
FORMAT_VERSION = 4
MARK = f'"format": "{FORMAT}"'
"""What tells a baseline, of any version, damaged or not, from other files."""


def save(results: Results, path: str | Path) -> None:
    """Write a run as a baseline, whole or not at all, and never over another file than a baseline."""
    data = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": results.model,
        "provenance": results.provenance,
        "tasks": {name: _packed(task) for name, task in results.leaves.items()},
    }
    write_output(path, json.dumps(finite(data), indent=1, allow_nan=False) + "\n", MARK)


def load(path: str | Path) -> Results:
    """Read a baseline; ``DataError`` where the file is none, is damaged, or of another version of the format."""
    path = Path(path)
    with well_formed(path, "damaged baseline", "restore it, or write it with --update"):
        data = entry(read_json(path))
        if (version := (data.get("format"), data.get("format_version"))) != (FORMAT, FORMAT_VERSION):
            raise ValueError(f"'format' and 'format_version' are {version}, expected {(FORMAT, FORMAT_VERSION)}")
        tasks = {name: _unpacked(entry(data, "tasks", name)) for name in entry(data, "tasks")}
        if not any(task.metrics for task in tasks.values()):
            raise ValueError("no tasks, or none with metrics")
        model = convert(data["model"], str)
        return Results(path, model, None, entry(data, "provenance"), tasks, tasks)


def _packed(task: Task) -> dict[str, Any]:
    """The task as plain data; right-or-wrong scores as a string of 1 and 0."""
    names = ("version", "data", "examples", "documents", "prompts")
    data: dict[str, Any] = {name: getattr(task, name) for name in names} | {"metrics": {}}
    for key, metric in task.metrics.items():
        packed = data["metrics"][key] = vars(metric) | {"by_question": metric.by_question and {}}
        for label, scores in (metric.by_question or {}).items():
            right_or_wrong = {*scores} <= {0.0, 1.0}
            packed["by_question"][label] = "".join(f"{score:.0f}" for score in scores) if right_or_wrong else scores
    return data


def _unpacked(data: Any) -> Task:
    for metric in data["metrics"].values():
        for label, value in metric["values"].items():
            metric["values"][label] = math.nan if value is None else value
        for label, scores in (metric["by_question"] or {}).items():
            if isinstance(scores, str):
                metric["by_question"][label] = ["01".index(letter) for letter in scores]
    task = convert(data, Task)
    for key, metric in task.metrics.items():
        expected = dict.fromkeys(metric.values, task.examples)
        by_question = metric.by_question
        sizes = expected if by_question is None else {label: len(scores) for label, scores in by_question.items()}
        if not expected or sizes != expected:
            raise ValueError(f"{key}: no scores, or not one of each of the {task.examples} questions")
    return task
