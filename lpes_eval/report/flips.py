"""The samples that flipped, as the data of a page that stays small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lpes_eval.compare.flips import first_metrics, flipped
from lpes_eval.harness.segments import Segment
from lpes_eval.report.sources import Pair

CONTEXT_ROOM, ROOM = 4_000_000, 6_000_000
"""So many characters of context, and of prompts in all, are put into a page; a prompt beyond that is left out."""

KINDS = ("instruction", "context", "gold", "question", "prompt")


class Flips:
    """Samples that flipped, as plain data for the page.

    ``texts`` has every piece of a prompt once. A sample's prompt is a list of [kind, first text, number of texts], the
    kind one of ``KINDS``; it is empty where there was no more room, which ``left_out`` counts.
    """

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.left_out = 0
        self._known: dict[str, int] = {}  # text -> its number
        self._context = self._spent = 0

    def add(self, pair: Pair) -> None:
        """Add what flipped from a pair's first run to its second, in the first metric of each task."""
        for task, key in first_metrics(pair.report).items():
            for sample in flipped(pair.a.results, pair.b.results, task, key):
                prompt = self._packed([segment for segment in sample.pop("segments") if segment.text])
                self.samples.append({"pair": pair.title, "task": task, **sample, "prompt": prompt})

    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"samples": self.samples, "texts": [*self._known], "kinds": KINDS}

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
            kind = KINDS.index(segment.label if segment.label in KINDS else "context")
            at = self._known.setdefault(segment.text, len(self._known))
            if spans and spans[-1][0] == kind and sum(spans[-1][1:]) == at:
                spans[-1][2] += 1
            else:
                spans.append([kind, at, 1])
        return spans
