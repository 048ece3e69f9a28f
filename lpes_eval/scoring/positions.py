"""Groups of positions in lm-eval's results: worst position, spread, and standard errors that know the questions.

lm-eval's own group row treats the positions' scores as independent. They are not: the same questions are asked at every
position. So where the children of a group carry ``metadata.position``, its row is computed anew from the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lpes_eval.scoring import statistics


def any_in(task_dict: Mapping[Any, Any]) -> bool:
    """Whether what ``lm_eval.evaluate`` is given (either of its forms) holds a task of a known position."""
    tasks = task_dict.get("tasks", task_dict)
    return any(
        any_in(task) if isinstance(task, Mapping) else position_of(getattr(task, "config", None)) is not None
        for task in tasks.values()
    )


def position_of(config: Any) -> float | None:
    """The position in percent that a task's configuration (object or dumped) names, or None."""
    # lm-eval's TaskConfig is a dict that holds its fields as attributes; a dumped one is a plain dict.
    metadata = getattr(config, "metadata", None) or (config.get("metadata") if isinstance(config, Mapping) else None)
    return metadata.get("position") if isinstance(metadata, Mapping) else None


def summarise(results: dict[str, Any]) -> None:
    """Add ``METRIC_worst`` and ``METRIC_spread`` to the rows of position groups, and cluster their standard errors.

    A metric with a sample that is no finite number (a tuple for a corpus metric, an infinite perplexity) is left as
    lm-eval has it.

    Args:
        results: what ``lm_eval.evaluate`` returns, samples included; changed in place, or after an error not at all.
    """
    for group, row, arrows in list(_summaries(results)):  # all of them, before the first is written
        for table in (results["groups"], results["results"]):
            table[group].update(row)
        results["higher_is_better"].setdefault(group, {}).update(arrows)


def _summaries(results: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield group, what its row gets, and which of it is better when higher, for each metric of a position group."""
    for group in results.get("groups", {}):
        children = results["group_subtasks"][group]
        positions = {name: position_of(results["configs"].get(name)) for name in children}
        if None in positions.values() or len(set(positions.values())) < len(children):
            continue
        for key in [k for k in results["groups"][group] if "," in k and "_stderr," not in k]:
            metric, filter_name = key.rsplit(",", 1)
            scores = {positions[name]: _by_question(results["samples"][name], metric, filter_name) for name in children}
            if not all(scores.values()):
                continue
            better = results["higher_is_better"].get(children[0], {}).get(metric, True)
            summary = statistics.position_summary(scores, higher_is_better=better is not False)
            row = summary.as_results(metric, filter_name)
            printed = {name: "N/A" if math.isnan(value) else value for name, value in row.items()}
            yield group, printed, {f"{metric}_worst": better, f"{metric}_spread": False}


def _by_question(samples: Sequence[Mapping[str, Any]], metric: str, filter_name: str) -> dict[Any, float]:
    """Question -> score, averaged over its samples; empty where the metric is not a finite number for all of them."""
    of_question: dict[Any, list[float]] = {}
    for sample in samples:
        if sample["filter"] == filter_name and metric in sample:
            try:
                value = float(sample[metric])
            except (TypeError, ValueError):
                return {}
            if not math.isfinite(value):
                return {}
            of_question.setdefault(sample["doc"].get("question_id", sample["doc_id"]), []).append(value)
    return {question: sum(values) / len(values) for question, values in of_question.items()}
