"""The samples that flipped between two runs, with their prompts in labelled segments, small enough for one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lpes_eval.compare.results import read_samples
from lpes_eval.data import kv, mdqa
from lpes_eval.harness.segments import Segment, join
from lpes_eval.report.sources import Pair

CONTEXT_ROOM, ROOM = 4_000_000, 6_000_000
"""So many characters of context, and of prompts in all, are put into a page; a prompt beyond that is left out."""

LONGEST_ANSWER = 1_000
KINDS = ("instruction", "context", "gold", "question", "prompt")


class Flips:
    """Samples that flipped, as plain data for the page.

    ``texts`` has every piece of a prompt once. A sample's prompt is a list of [kind, first text, number of texts], the
    kind one of ``KINDS``; it is empty where there was no more room, which ``left_out`` counts.
    """

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.texts: list[str] = []
        self.left_out = 0
        self._known: dict[str, int] = {}
        self._context = self._spent = 0

    def add(self, pair: Pair) -> None:
        """Add what flipped from a pair's first run to its second, in the first metric of each task."""
        firsts = {section.task: section.metric for section in reversed(pair.report.sections)}
        for task, shown in firsts.items():
            metrics = [run.results.tasks[task].metrics for run in (pair.a, pair.b)]
            key = next(key for key in metrics[0] if key.removesuffix(",none") == shown)
            logged = [read_samples(run.results.path, task)[key.rpartition(",")[2]] for run in (pair.a, pair.b)]
            before, after = (metric[key].by_question or {} for metric in metrics)
            for label in (label for label in before if label in after):
                for line_a, line_b, *scores in zip(*logged, before[label], after[label], strict=True):
                    if scores[0] != scores[1]:
                        better = (scores[1] > scores[0]) == metrics[0][key].higher_is_better
                        sample = {"pair": pair.title, "task": task, "better": better, "scores": scores}
                        self.samples.append(sample | self._shown(line_a, line_b, label))

    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"samples": self.samples, "texts": self.texts, "kinds": KINDS}

    def _shown(self, line_a: Mapping[str, Any], line_b: Mapping[str, Any], label: str) -> dict[str, Any]:
        """What a person reads of a sample: the question, what is expected, both answers, and the prompt."""
        requests = list((line_a.get("arguments") or {}).values()) or [{}]
        prompt = str(requests[_place(line_a, label)].get("arg_0", ""))
        segments, expected = _labelled(line_a["doc"], label) or ([Segment("prompt", prompt)], line_a.get("target"))
        text = join(segments)
        before, found, after = prompt.partition(text) if text else ("", "", prompt)
        if not found:  # one of our prompts, but with another text
            segments, before, after = [Segment("prompt", prompt)], "", ""
        question = next((one.text for one in segments if one.label == "question"), prompt[-300:])
        if _likelihoods(line_a) and str(expected).isdigit():
            expected = requests[int(str(expected))].get("arg_1")
        around = [Segment("prompt", before), *segments, Segment("prompt", after)]  # a chat template, examples
        return {
            "position": "" if label == "all" else label,
            "question": " ".join(question.split()),
            "expected": _short(expected),
            "answers": [_answer(line, label) for line in (line_a, line_b)],
            "prompt": self._packed([segment for segment in around if segment.text]),
        }

    def _packed(self, segments: Sequence[Segment]) -> list[list[int]]:
        new = [segment for segment in segments if segment.text not in self._known]
        size = sum(len(segment.text) for segment in new)
        context = size - sum(len(one.text) for one in new if one.label in ("instruction", "gold", "question"))
        if self._spent + size > ROOM or self._context + context > CONTEXT_ROOM:
            self.left_out += 1
            return []
        self._spent, self._context = self._spent + size, self._context + context
        spans: list[list[int]] = []
        for segment in segments:
            kind = KINDS.index(segment.label) if segment.label in KINDS else KINDS.index("context")
            at = self._known.setdefault(segment.text, len(self.texts))
            if at == len(self.texts):
                self.texts.append(segment.text)
            if spans and spans[-1][0] == kind and sum(spans[-1][1:]) == at:
                spans[-1][2] += 1
            else:
                spans.append([kind, at, 1])
        return spans


def _labelled(doc: Any, label: str) -> tuple[list[Segment], str | tuple[str, ...]] | None:
    """The prompt's segments and the reference of this package's benchmarks by position; None for any other."""
    if not isinstance(doc, dict) or label == "all":
        return None
    position = float(label.removesuffix(" %"))
    if doc.keys() == {"question_id", "records", "gold"}:
        question = kv.Question(**doc)
        return question.segments(position), question.value(position)
    if doc.keys() == {"question_id", "question", "answers", "gold", "distractors"}:
        gold, *distractors = (mdqa.Document(**one) for one in (doc["gold"], *doc["distractors"]))
        example = mdqa.Example(**{**doc, "gold": gold, "distractors": tuple(distractors)})
        return example.segments(position), example.answers
    return None


def _place(line: Mapping[str, Any], label: str) -> int:
    """Which request of a question is that at a label: a sample has its scores at positions in the same order."""
    at = [name.rpartition("@")[2] for name in line if "@" in name]
    order = list(dict.fromkeys(f"{float(p):g} %" for p in at if p.replace(".", "", 1).isdigit()))
    return 0 if label == "all" else order.index(label)


def _likelihoods(line: Mapping[str, Any]) -> list[float]:
    """Those of the choices, if the sample is one of multiple choice: lm-eval logs (likelihood, is greedy), as text."""
    answers = line.get("filtered_resps") or []
    pairs = [one for one in answers if isinstance(one, list) and len(one) == 2 and str(one[1]) in ("True", "False")]
    return [float(one[0]) for one in pairs] if 1 < len(pairs) == len(answers) else []


def _answer(line: Mapping[str, Any], label: str) -> str:
    if likelihoods := _likelihoods(line):
        requests = list(line["arguments"].values())
        return _short(requests[likelihoods.index(max(likelihoods))].get("arg_1"))
    return _short((line.get("filtered_resps") or [""])[_place(line, label)])


def _short(value: Any) -> str:
    text = " | ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= LONGEST_ANSWER else f"{text[:LONGEST_ANSWER]} ..."
