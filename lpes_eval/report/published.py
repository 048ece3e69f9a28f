"""Other people's answers by position, so that their curves stand beside one's own: CSV, a row for each answer.

The columns are those of https://github.com/zhs2326/lost-in-the-middle-2026 (``*_per_example.csv``). It scores an answer
by its first line, as Liu et al. do, which understates models that chat before they answer, and by all of it.
"""

from __future__ import annotations

import csv
from pathlib import Path

from lpes_eval.compare.results import Metric, Model, Results, Task, well_formed

KIND = "published"
METRICS = {"best_subspan_em,none": "em_first_line", "best_subspan_em of the whole answer,none": "em_full"}


def read(path: Path) -> Results:
    """Read the answers of one model at one length as a run of ``mdqa_pos``.

    Raises:
        DataError: another file, several models or lengths in it, or not the same questions at every position.
    """
    columns = ", ".join(["model", "num_documents", "gold_index", "question", *METRICS.values()])
    with well_formed(path, "not answers by position", f"expected CSV of one model and length, with {columns}"):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        [(model, size)] = {(row["model"], int(row["num_documents"])) for row in rows}
        by_index: dict[int, list[dict[str, str]]] = {}
        for row in rows:
            by_index.setdefault(int(row["gold_index"]), []).append(row)
        asked = [[row["question"] for row in answers] for answers in by_index.values()]
        if any(questions != asked[0] for questions in asked):
            raise ValueError("other questions at one position than at another")
        metrics = {}
        for name, column in METRICS.items():
            scores = {
                f"{_position(index, size):g} %": tuple(float(row[column]) for row in by_index[index])
                for index in sorted(by_index)
            }
            values = {label: sum(column) / len(column) for label, column in scores.items()}
            metrics[name] = Metric(True, values, scores)
        task = Task(KIND, {"num_documents": size}, len(asked[0]), None, None, metrics)
        return Results(path, Model(KIND, model, None), None, {}, {"mdqa_pos": task})


def _position(index: int, size: int) -> float:
    """The roundest position in percent at which document ``index`` of ``size`` is the gold one."""
    found = (p for step in (25, 20, 10, 5, 1) for p in range(0, 101, step) if p * (size - 1) // 100 == index)
    return next(found, 100 * index / (size - 1))
