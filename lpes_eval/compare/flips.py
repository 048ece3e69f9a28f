"""The samples that flipped between two runs, as a table."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from lpes_eval.compare.comparison import Comparison, Section
from lpes_eval.compare.results import Results, Sample, label_of, position_of
from lpes_eval.compare.tables import Table

SHOWN, CELL = 20, 60
"""Flips of a score, and characters of a text, that a table has."""
HEADER = ("flip", "position", "question", "expected", "before", "after")

Flip = tuple[str, ...]
"""A sample whose score differs between two runs, as the texts that ``HEADER`` names."""


def of(comparison: Comparison) -> Iterator[tuple[Section, list[Flip]]]:
    """The samples that flipped, of each task in its first metric."""
    first: dict[str, Section] = {}
    for section in comparison.sections:
        first.setdefault(section.task, section)
    for task, section in first.items():
        yield section, flipped(comparison.a, comparison.b, task, section.metric)


def flipped(a: Results, b: Results, task: str, key: str) -> list[Flip]:
    """The samples of a task whose score in a metric, ``METRIC`` or ``METRIC,FILTER``, differs between two runs."""
    key = key if "," in key else f"{key},none"
    metric, _, filter_name = key.partition(",")
    tasks = a.tasks[task], b.tasks[task]
    before, after = (task.metrics[key] for task in tasks)
    samples = [task.samples[filter_name] for task in tasks]
    flips = []
    for label in (label for label in before.values if label in after.values):
        place = None if label == "all" else [*map(label_of, tasks[1].positions)].index(label)
        scores = zip(*samples, before.scores(label), after.scores(label), strict=True)
        for sample_a, sample_b, was, is_now in scores:
            if was != is_now:
                better = (is_now > was) == (before.higher_is_better is not False)
                answers = (_answer(each, place, metric) for each in (sample_a, sample_b))
                texts = (*_asked(sample_b, label, place), *answers)
                place_text = "" if label == "all" else label
                flips.append(("better" if better else "worse", place_text, *(" ".join(text.split()) for text in texts)))
    return flips


def table(flips: Sequence[Flip], task: str, title: str) -> Table:
    """The flips of one score as a table, the worse ones first, ``SHOWN`` at most."""
    better = sum(flip[0] == "better" for flip in flips)
    rest = f", the first {SHOWN} of them" if len(flips) > SHOWN else ""
    title = f"{task}, {title}: {better} flipped to better, {len(flips) - better} to worse{rest}"
    shown = sorted(flips, key=lambda flip: flip[0] == "better")[:SHOWN]
    cut = [(*flip[:2], flip[2][-CELL:], *map(_cut, flip[3:])) for flip in shown]
    return Table(title, HEADER, cut, len(HEADER))


def _cut(text: str) -> str:
    return text if len(text) <= CELL else f"{text[:CELL]}…"


def _asked(sample: Sample, label: str, place: int | None) -> tuple[str, str]:
    """The question and the expected answer: of benchmarks by position from the document, of others as was logged."""
    from lpes_eval.data import documents, kv  # takes seconds

    for make in (kv.Question, documents.Example.of):
        with suppress(Exception):  # another benchmark
            example, position = make(**sample.doc), position_of(label)
            return example.segments(position)[-1].text, _shown(example.target(position))
    prompts = [text for text, _ in _of_place(sample.requests, place)]
    choices = {str(i): ending for i, (_, ending) in enumerate(sample.requests)} if _likelihoods(sample) else {}
    return "\n\n".join(dict.fromkeys(prompts)), _shown(choices.get(str(sample.target), sample.target))


def _of_place(items: Sequence[Any], place: int | None) -> Sequence[Any]:
    """The item at a position, all where there are none; one request may be scored under several names."""
    return items if place is None else items[place : place + 1] or items[-1:]


def _likelihoods(sample: Sample) -> list[float]:
    """Those of the choices, if the sample is several endings of one prompt; lm-eval logs (likelihood, is greedy)."""
    pairs = [pair for pair in sample.answers if isinstance(pair, list) and len(pair) == 2]
    prompts = {prompt for prompt, _ in sample.requests}
    if len(prompts) == 1 and 1 < len(pairs) == len(sample.answers) == len(sample.requests):
        with suppress(TypeError, ValueError, OverflowError):
            return [float(value) for value, _ in pairs]
    return []


def _answer(sample: Sample, place: int | None, metric: str) -> str:
    if likelihoods := _likelihoods(sample):
        choices = [str(ending) for _, ending in sample.requests]
        if metric.startswith("acc_norm"):  # by a choice's characters
            likelihoods = [one / max(len(end.lstrip()), 1) for one, end in zip(likelihoods, choices, strict=True)]
        return _shown(choices[likelihoods.index(max(likelihoods))])
    answers = _of_place(sample.answers, place)
    return _shown(answers if place is None else answers[0])


def _shown(value: Any) -> str:
    return " | ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
