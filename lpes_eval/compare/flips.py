"""The samples that flipped between two runs, with their prompts in labelled segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lpes_eval.compare import tables
from lpes_eval.compare.results import Results, Sample, Task, label_of, position_of
from lpes_eval.data import documents, kv
from lpes_eval.harness.segments import Segment, join

LONGEST_ANSWER = 1_000
SHOWN, CELL = 20, 60
"""Flips of a score, and characters of a text, that a table has."""
HEADER = ("flip", "position", "question", "expected", "before", "after")


@dataclass(frozen=True)
class Flip:
    """A sample whose score differs between two runs, at a position (empty where there are none).

    ``scores`` and ``answers`` are those before and after; the answer before is empty where the first run is a baseline,
    which has no answers. ``segments`` are the prompt.
    """

    better: bool
    scores: tuple[float, float]
    position: str
    question: str
    expected: str
    answers: tuple[str, str]
    segments: Sequence[Segment]


def flipped(a: Results, b: Results, task: str, key: str) -> Iterator[Flip]:
    """The samples of a task whose score in a metric, ``METRIC`` or ``METRIC,FILTER``, differs between two runs on the
    same questions.
    """
    key = key if "," in key else f"{key},none"
    task_a, task_b = a.every_task[task], b.every_task[task]
    before, after = task_a.metrics[key], task_b.metrics[key]
    metric, _, filter_name = key.partition(",")
    samples_b = task_b.samples[filter_name]
    samples_a: Sequence[Sample | None] = task_a.samples.get(filter_name) or [None] * len(samples_b)
    for label in (label for label in before.values if label in after.values):
        scores = zip(samples_a, samples_b, before.scores(label), after.scores(label), strict=True)
        for sample_a, sample_b, was, is_now in scores:
            if was != is_now:
                better = (is_now > was) == (before.higher_is_better is not False)
                yield _flip(task_b, label, metric, better, (was, is_now), (sample_a, sample_b))


def table(flips: Sequence[Flip], task: str, title: str) -> tuple[tables.Table, dict[str, Any]]:
    """The flips of one score as a table, the worse ones first, ``SHOWN`` at most; and the same as data."""
    better = sum(flip.better for flip in flips)
    rest = f", the first {SHOWN} of them" if len(flips) > SHOWN else ""
    title = f"{title}: {better} flipped to better, {len(flips) - better} to worse{rest}"
    shown = sorted(flips, key=lambda flip: flip.better)[:SHOWN]
    rows = tuple(
        (
            "better" if flip.better else "worse",
            flip.position,
            *map(_cell, (flip.question[-CELL:], flip.expected, *flip.answers)),
        )
        for flip in shown
    )
    names = ("better", "position", "scores", "question", "expected", "answers")
    facts = [{name: getattr(flip, name) for name in names} for flip in shown]
    return tables.Table(f"{task}, {title}", HEADER, rows, len(HEADER)), {"task": task, "metric": title, "rows": facts}


def _cell(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= CELL else f"{line[:CELL]}…"


def _flip(
    task: Task,
    label: str,
    metric: str,
    better: bool,
    scores: tuple[float, float],
    samples: tuple[Sample | None, Sample],
) -> Flip:
    """What a person reads of a sample: the question, what is expected, both answers, and the prompt."""
    sample, at = samples[1], _place(task, label)
    prompt = "\n\n".join(dict.fromkeys(text for text, _ in _of_place(sample.requests, at)))
    segments, expected = _labelled(sample.doc, label) or ([Segment("prompt", prompt)], sample.target)
    text = join(segments)
    before, ours, after = prompt.partition(text) if text else ("", "", prompt)
    if not ours:  # one of our prompts, but with another text
        segments, before, after = [Segment("prompt", prompt)], "", ""
    question = next((segment.text for segment in segments if segment.label == "question"), prompt[-300:])
    choices = {str(i): ending for i, (_, ending) in enumerate(sample.requests)} if _likelihoods(sample) else {}
    answers = ["" if each is None else _answer(each, at, metric) for each in samples]
    return Flip(
        better,
        scores,
        "" if label == "all" else label,
        " ".join(question.split()),
        _short(choices.get(str(expected), expected)),
        (answers[0], answers[1]),
        [Segment("prompt", before), *segments, Segment("prompt", after)],  # a chat template, examples
    )


def _labelled(doc: Any, label: str) -> tuple[list[Segment], str | list[str]] | None:
    """The prompt's segments and the reference of this package's benchmarks by position; None for any other."""
    if not isinstance(doc, dict) or label == "all":
        return None
    position = position_of(label)
    makers: dict[Any, Any] = {kv.Question: kv.Question, documents.Example: documents.Example.of}
    for kind, make in makers.items():
        if doc.keys() == kind.__dataclass_fields__.keys():
            try:
                example = make(**doc)
                return example.segments(position), example.target(position)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # not as a benchmark has it
                return None
    return None


def _place(task: Task, label: str) -> int | None:
    """Which of a sample's requests belongs to a label; None for all of them."""
    labels = [label_of(position) for position in task.positions]
    return labels.index(label) if label in labels else None


def _of_place(items: Sequence[Any], place: int | None) -> Sequence[Any]:
    if place is None:
        return items
    return items[place : place + 1] or items[-1:]  # one request may be scored under several names


def _likelihoods(sample: Sample) -> list[float]:
    """Those of the choices, if the sample is one of multiple choice: several endings of one prompt.

    Of each lm-eval logs (likelihood, is greedy), as text.
    """
    pairs = [pair for pair in sample.answers if isinstance(pair, list) and len(pair) == 2]
    prompts = {prompt for prompt, _ in sample.requests}
    if len(prompts) != 1 or not 1 < len(pairs) == len(sample.answers) == len(sample.requests):
        return []
    try:
        return [float(value) for value, _ in pairs]
    except (TypeError, ValueError, OverflowError):
        return []


def _answer(sample: Sample, place: int | None, metric: str) -> str:
    likelihoods, choices = _likelihoods(sample), [str(ending) for _, ending in sample.requests]
    if likelihoods:
        if metric.startswith("acc_norm"):  # by a choice's characters, the delimiter before it left out
            likelihoods = [one / max(len(end.lstrip()), 1) for one, end in zip(likelihoods, choices, strict=True)]
        return _short(choices[likelihoods.index(max(likelihoods))])
    answers = _of_place(sample.answers, place)
    return _short(list(answers) if place is None else answers[0])


def _short(value: Any) -> str:
    text = " | ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= LONGEST_ANSWER else f"{text[:LONGEST_ANSWER]} ..."
