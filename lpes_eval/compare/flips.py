"""The samples that flipped between two runs, with their prompts in labelled segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lpes_eval.compare.results import Results, Sample, label_of, position_of
from lpes_eval.compare.tables import Table
from lpes_eval.data import documents, kv
from lpes_eval.harness.segments import Segment, join

LONGEST_ANSWER = 1_000
SHOWN, CELL = 20, 60
"""Flips of a score, and characters of a text, that a table has."""
HEADER = ("flip", "position", "question", "expected", "before", "after")


@dataclass(frozen=True)
class Flip:
    """A sample whose score differs between two runs, at a position (empty where there are none).

    ``scores`` and ``answers`` are those before and after (a baseline has no answers), ``segments`` the prompt.
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
        place = None if label == "all" else [*map(label_of, task_b.positions)].index(label)
        scores = zip(samples_a, samples_b, before.scores(label), after.scores(label), strict=True)
        for sample_a, sample_b, was, is_now in scores:
            if was == is_now:
                continue
            question, expected, segments = _read(sample_b, label, place)
            answers = ["" if each is None else _answer(each, place, metric) for each in (sample_a, sample_b)]
            yield Flip(
                (is_now > was) == (before.higher_is_better is not False),
                (was, is_now),
                "" if label == "all" else label,
                question,
                expected,
                (answers[0], answers[1]),
                segments,
            )


def table(flips: Sequence[Flip], task: str, title: str) -> Table:
    """The flips of one score as a table, the worse ones first, ``SHOWN`` at most."""
    better = sum(flip.better for flip in flips)
    rest = f", the first {SHOWN} of them" if len(flips) > SHOWN else ""
    title = f"{title}: {better} flipped to better, {len(flips) - better} to worse{rest}"
    shown = sorted(flips, key=lambda flip: flip.better)[:SHOWN]
    rows = []
    for flip in shown:
        texts = (" ".join(text.split()) for text in (flip.question[-CELL:], flip.expected, *flip.answers))
        cells = (text if len(text) <= CELL else f"{text[:CELL]}…" for text in texts)
        rows.append(("better" if flip.better else "worse", flip.position, *cells))
    names = ("better", "position", "scores", "question", "expected", "answers")
    facts = [{name: getattr(flip, name) for name in names} for flip in shown]
    return Table(f"{task}, {title}", HEADER, rows, len(HEADER), {"task": task, "metric": title, "rows": facts})


def _read(sample: Sample, label: str, place: int | None) -> tuple[str, str, list[Segment]]:
    """The question, what is expected, and the prompt of a sample at a label."""
    prompt = "\n\n".join(dict.fromkeys(text for text, _ in _of_place(sample.requests, place)))
    labelled, expected = _labelled(sample.doc, label) or ([], sample.target)
    segments, question, text = [Segment("prompt", prompt)], prompt[-300:], join(labelled)
    if text and text in prompt:  # a chat template or examples may stand around it
        before, after = prompt.split(text, 1)
        segments = [Segment("prompt", before), *labelled, Segment("prompt", after)]
        question = next((segment.text for segment in labelled if segment.label == "question"), question)
    choices = {str(i): ending for i, (_, ending) in enumerate(sample.requests)} if _likelihoods(sample) else {}
    return " ".join(question.split()), _short(choices.get(str(expected), expected)), segments


def _labelled(doc: Any, label: str) -> tuple[list[Segment], str | list[str]] | None:
    """The prompt's segments and the reference of this package's benchmarks by position; None for any other."""
    makers: dict[Any, Any] = {kv.Question: kv.Question, documents.Example: documents.Example.of}
    for kind, make in makers.items() if isinstance(doc, dict) and label != "all" else ():
        if doc.keys() == kind.__dataclass_fields__.keys():
            try:
                example = make(**doc)
                return example.segments(position_of(label)), example.target(position_of(label))
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # not as a benchmark has it
                return None
    return None


def _of_place(items: Sequence[Any], place: int | None) -> Sequence[Any]:
    """The item at a position, all where there are none; one request may be scored under several names."""
    return items if place is None else items[place : place + 1] or items[-1:]


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
    if likelihoods := _likelihoods(sample):
        choices = [str(ending) for _, ending in sample.requests]
        if metric.startswith("acc_norm"):  # by a choice's characters, the delimiter before it left out
            likelihoods = [one / max(len(end.lstrip()), 1) for one, end in zip(likelihoods, choices, strict=True)]
        return _short(choices[likelihoods.index(max(likelihoods))])
    answers = _of_place(sample.answers, place)
    return _short(answers if place is None else answers[0])


def _short(value: Any) -> str:
    text = " | ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= LONGEST_ANSWER else f"{text[:LONGEST_ANSWER]} ..."
