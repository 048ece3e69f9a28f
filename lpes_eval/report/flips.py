"""The samples that flipped between two runs, with their prompts in labelled segments, small enough for one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lpes_eval.compare.results import read_samples
from lpes_eval.data import kv, mdqa
from lpes_eval.harness.segments import Segment, join
from lpes_eval.report.sources import Pair

CONTEXT_ROOM, ROOM = 4_000_000, 6_000_000
"""So many characters of context, and of all prompts and answers together, are put into a page; then it goes without."""

LONGEST_ANSWER = 1_000
KINDS = ("instruction", "context", "gold", "question", "prompt")


class Flips:
    """Samples that flipped, as plain data for the page.

    ``texts`` has every piece of a prompt once. A sample's prompt is a list of (kind, first text, number of texts), with
    a kind of ``KINDS``; it is empty where there was no more room.
    """

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.texts: list[str] = []
        self.cut = 0
        self._known: dict[str, int] = {}
        self._context = self._spent = 0

    def add(self, pair: Pair) -> None:
        """Add what flipped from a pair's first run to its second, in the first metric of each task."""
        firsts = {section.task: section.metric for section in reversed(pair.report.sections)}
        for task, shown in firsts.items():
            key = next(k for k in pair.a.results.tasks[task].metrics if k.removesuffix(",none") == shown)
            a, b = (run.results.tasks[task].metrics[key] for run in (pair.a, pair.b))
            assert a.by_question is not None
            assert b.by_question is not None
            logged = [read_samples(run.results.path, task) for run in (pair.a, pair.b)]
            lines_a, lines_b = (samples[key.rpartition(",")[2]] for samples in logged)
            for number, label in enumerate(a.by_question):
                if label not in b.by_question:
                    continue
                scores = zip(a.by_question[label], b.by_question[label], strict=True)
                for line_a, line_b, (before, after) in zip(lines_a, lines_b, scores, strict=True):
                    if before != after:
                        better = (after > before) == a.higher_is_better
                        self._add(pair, task, label, number, line_a, line_b, (before, after), better)

    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"samples": self.samples, "texts": self.texts, "kinds": KINDS}

    def _add(
        self,
        pair: Pair,
        task: str,
        label: str,
        number: int,
        line_a: Mapping[str, Any],
        line_b: Mapping[str, Any],
        scores: tuple[float, float],
        better: bool,
    ) -> None:
        request = _request(line_a, label, number)
        prompt = str(request.get("arg_0", ""))
        segments, expected = _labelled(line_a["doc"], label) or ([], None)
        text = join(segments)
        begin = prompt.find(text) if text else -1
        if begin < 0:  # another benchmark, or one of ours in examples of its own
            segments = [Segment("prompt", prompt)]
        else:  # what a chat template or examples put around it
            segments = [
                Segment("prompt", prompt[:begin]),
                *segments,
                Segment("prompt", prompt[begin + len(text) :]),
            ]
        question = next((one.text for one in segments if one.label == "question"), prompt[-300:])
        self.samples.append(
            {
                "pair": f"{pair.a.name} → {pair.b.name}",
                "task": task,
                "position": "" if label == "all" else label,
                "better": better,
                "scores": scores,
                "question": " ".join(question.split()),
                "expected": _short(expected if expected is not None else line_a.get("target")),
                "answers": [_answer(line, label, number) for line in (line_a, line_b)],
                "prompt": self._packed(segments),
            }
        )

    def _packed(self, segments: Sequence[Segment]) -> list[list[int]]:
        spans: list[list[int]] = []
        for segment in segments:
            kind = KINDS.index(segment.label) if segment.label in KINDS else 1
            if not segment.text:
                continue
            at = self._known.get(segment.text)
            if at is None:
                size, is_context = len(segment.text), KINDS[kind] in ("context", "prompt")
                if self._spent + size > ROOM or (is_context and self._context + size > CONTEXT_ROOM):
                    self.cut += 1
                    return []
                self._spent, self._context = self._spent + size, self._context + size * is_context
                at = self._known[segment.text] = len(self.texts)
                self.texts.append(segment.text)
            if spans and spans[-1][0] == kind and sum(spans[-1][1:]) == at:
                spans[-1][2] += 1
            else:
                spans.append([kind, at, 1])
        return spans


def _labelled(doc: Any, label: str) -> tuple[list[Segment], str | list[str]] | None:
    """The prompt's segments and the reference of this package's benchmarks by position; None for any other."""
    if not isinstance(doc, dict) or not label.endswith(" %"):
        return None
    position = float(label.removesuffix(" %"))
    if doc.keys() == {"question_id", "records", "gold"}:
        question = kv.Question(**doc)
        return question.segments(position), question.value(position)
    if {"answers", "gold", "distractors"} <= doc.keys():
        gold, *distractors = (mdqa.Document(**one) for one in (doc["gold"], *doc["distractors"]))
        example = mdqa.Example(**{**doc, "gold": gold, "distractors": tuple(distractors)})
        return example.segments(position), list(example.answers)
    return None


def _request(line: Mapping[str, Any], label: str, number: int) -> Mapping[str, Any]:
    """The arguments of the request at a label: lm-eval keeps them in the order of the positions."""
    requests = list((line.get("arguments") or {}).values())
    return (requests[_place(line, label, number)] if requests else {}) or {}


def _place(line: Mapping[str, Any], label: str, number: int) -> int:
    """Which request of the question is that of the label: scores at positions stand in the order of the requests."""
    if label == "all":
        return 0
    at = [name.rpartition("@")[2] for name in line if "@" in name]
    order = list(dict.fromkeys(f"{float(p):g} %" for p in at if p.replace(".", "", 1).isdigit()))
    return order.index(label) if label in order else number


def _answer(line: Mapping[str, Any], label: str, number: int) -> str:
    answers = line.get("filtered_resps") or [""]
    if label != "all":
        return _short(answers[_place(line, label, number)])
    likelihoods = [one[0] for one in answers if isinstance(one, list) and len(one) == 2 and isinstance(one[1], bool)]
    if len(likelihoods) == len(answers) > 1:  # multiple choice: the likeliest continuation is the answer
        requests = list((line.get("arguments") or {}).values())
        return _short(requests[likelihoods.index(max(likelihoods))].get("arg_1"))
    return _short(answers[0])


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else " | ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= LONGEST_ANSWER else f"{text[:LONGEST_ANSWER]} ..."
