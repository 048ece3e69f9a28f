"""The samples that flipped between two runs, with their prompts in labelled segments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lpes_eval.compare import tables
from lpes_eval.compare.results import Results, position_of, well_formed
from lpes_eval.data import documents, kv
from lpes_eval.harness.segments import Segment, join

LONGEST_ANSWER = 1_000
SHOWN, CELL = 20, 60
"""Flips of a score, and characters of a text, that a table has."""


def first_metrics(report: tables.Report) -> dict[tuple[str, str], str]:
    """Of each run in a report of `compare` (by its letter) and each task, the first metric."""
    found: dict[tuple[str, str], str] = {}
    for section in report.sections:
        found.setdefault((section.sides[1] if section.sides else "B", section.task), section.metric)
    return found


def flipped(a: Results, b: Results, task: str, metric: str) -> Iterator[dict[str, Any]]:
    """The samples of a task whose score in a metric differs between two runs on the same questions.

    Of each: its position, whether it got ``better``, both ``scores``, the question, what is ``expected``, both
    ``answers``, and the prompt's ``segments``. Of a baseline there are scores and no answers.
    """
    metrics = [run.tasks[task].metrics for run in (a, b)]
    key = next(key for key in metrics[0] if key.removesuffix(",none") == metric)
    before, after = (of[key].by_question or {} for of in metrics)
    labels = [label for label in before if label in after]
    lines_b = b.samples(task, key.rpartition(",")[2])
    lines_a = a.samples(task, key.rpartition(",")[2]) if a.raw else [None] * len(lines_b)
    for label in labels:
        for line_a, line_b, *scores in zip(lines_a, lines_b, before[label], after[label], strict=True):
            if scores[0] != scores[1]:
                better = (scores[1] > scores[0]) == metrics[0][key].higher_is_better
                what = f"its samples of {task}, or those of {a.path}, are not as lm_eval logs them"
                with well_formed(b.path, what, "evaluate again"):
                    shown = _shown(line_a, line_b, label, metric)
                yield {"better": better, "scores": scores, **shown}


def section(samples: Iterable[Mapping[str, Any]], task: str, metric: str) -> tables.Section:
    """The flips of one score as a table, the worse ones first, and of many the first ``SHOWN``."""
    found = sorted(samples, key=lambda one: one["better"])
    better = sum(one["better"] for one in found)
    rest = f", the first {SHOWN} of them" if len(found) > SHOWN else ""
    rows = []
    for one in found[:SHOWN]:
        texts = (one["question"][-CELL:], one["expected"], *one["answers"])
        cells = ("better" if one["better"] else "worse", one["position"], *map(_cell, texts))
        kept = ("better", "position", "scores", "question", "expected", "answers")
        rows.append(tables.Row(cells, {name: one[name] for name in kept}))
    title = f"{metric}: {better} flipped to better, {len(found) - better} to worse{rest}"
    header = ("flip", "position", "question", "expected", "before", "after")
    return tables.Section(task, title, None, header, tuple(rows))


def _cell(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= CELL else f"{line[:CELL]}…"


def _shown(line_a: Mapping[str, Any] | None, line_b: Mapping[str, Any], label: str, metric: str) -> dict[str, Any]:
    """What a person reads of a sample: the question, what is expected, both answers, and the prompt."""
    prompt = "\n\n".join(dict.fromkeys(text for text, _ in _at(line_b, _requests(line_b), label)))
    segments, expected = _labelled(line_b["doc"], label) or ([Segment("prompt", prompt)], line_b.get("target"))
    text = join(segments)
    before, found, after = prompt.partition(text) if text else ("", "", prompt)
    if not found:  # one of our prompts, but with another text
        segments, before, after = [Segment("prompt", prompt)], "", ""
    question = next((one.text for one in segments if one.label == "question"), prompt[-300:])
    choices = {str(i): end for i, (_, end) in enumerate(_requests(line_b))} if _likelihoods(line_b) else {}
    return {
        "position": "" if label == "all" else label,
        "question": " ".join(question.split()),
        "expected": _short(choices.get(str(expected), expected)),
        "answers": ["" if line is None else _answer(line, label, metric) for line in (line_a, line_b)],
        "segments": [Segment("prompt", before), *segments, Segment("prompt", after)],  # a chat template, examples
    }


def _labelled(doc: Any, label: str) -> tuple[list[Segment], str | list[str]] | None:
    """The prompt's segments and the reference of this package's benchmarks by position; None for any other."""
    if not isinstance(doc, dict) or label == "all":
        return None
    position = position_of(label)
    makers: dict[Any, Any] = {kv.Question: kv.Question, documents.Example: documents.Example.of}
    for kind, make in makers.items():
        if doc.keys() == kind.__dataclass_fields__.keys():
            example = make(**doc)
            return example.segments(position), example.target(position)
    return None


def _requests(line: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The prompt of each request, and its ending; of an API of chats lm-eval logs a list with the prompt's text."""
    asked = [(one.get("arg_0", ""), one.get("arg_1")) for one in (line.get("arguments") or {}).values()]
    return [("".join(map(str, text)) if isinstance(text, list) else str(text), end) for text, end in asked]


def _at(line: Mapping[str, Any], of_requests: Sequence[Any], label: str) -> Sequence[Any]:
    """What belongs to a label of a sample, which has its scores at positions in the order of its requests."""
    if label == "all":
        return of_requests
    at = [name.rpartition("@")[2] for name in line if "@" in name]
    order = list(dict.fromkeys(f"{float(p):g} %" for p in at if p.replace(".", "", 1).isdigit()))
    return of_requests[order.index(label) :][:1] or of_requests[-1:]  # one request may be scored under several names


def _likelihoods(line: Mapping[str, Any]) -> list[float]:
    """Those of the choices, if the sample is one of multiple choice: several endings of one prompt.

    Of each lm-eval logs (likelihood, is greedy), as text.
    """
    answers = line.get("filtered_resps") or []
    prompts = {prompt for prompt, _ in _requests(line)}
    pairs = [one for one in answers if isinstance(one, list) and len(one) == 2 and str(one[1]) in ("True", "False")]
    return [float(one[0]) for one in pairs] if len(prompts) == 1 and 1 < len(pairs) == len(answers) else []


def _answer(line: Mapping[str, Any], label: str, metric: str) -> str:
    if likelihoods := _likelihoods(line):
        choices = [str(end) for _, end in _requests(line)]
        if metric.startswith("acc_norm"):  # by a choice's characters, the delimiter before it left out
            likelihoods = [one / max(len(end.lstrip()), 1) for one, end in zip(likelihoods, choices, strict=True)]
        return _short(choices[likelihoods.index(max(likelihoods))])
    answers = _at(line, line.get("filtered_resps") or [""], label)
    return _short(answers if label == "all" else answers[0])


def _short(value: Any) -> str:
    text = " | ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= LONGEST_ANSWER else f"{text[:LONGEST_ANSWER]} ..."
