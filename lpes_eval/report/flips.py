"""The samples that flipped, as the data of a page that stays small."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lpes_eval.compare.flips import first_metrics, flipped
from lpes_eval.report.sources import Pair

CONTEXT_ROOM, ROOM = 4_000_000, 6_000_000
"""So many characters of context, and of prompts in all, are put into a page; a prompt beyond that is left out."""

KINDS = ("instruction", "context", "gold", "question", "prompt")


def packed(pairs: Iterable[Pair]) -> tuple[dict[str, Any], int]:
    """The samples that flipped from each pair's first run to its second, in the first metric of each task, for JSON.

    ``texts`` has every piece of a prompt once. A sample's prompt is a list of [kind, first text, number of texts], the
    kind one of ``KINDS``; it is empty where there was no more room. How many such there are comes with the data.
    """
    flips = (
        {"pair": pair.title, "task": task, **sample}
        for pair in pairs
        for (_, task), key in first_metrics(pair.report).items()
        for sample in flipped(pair.a.results, pair.b.results, task, key)
    )
    samples: list[dict[str, Any]] = []
    known: dict[str, int] = {}  # text -> its number
    context_spent = spent = left_out = 0
    for sample in flips:
        segments = [segment for segment in sample.pop("segments") if segment.text]
        spans: list[list[int]] = []
        samples.append({**sample, "prompt": spans})
        new = [segment for segment in segments if segment.text not in known]
        size = sum(len(one.text) for one in new)
        context = size - sum(len(one.text) for one in new if one.label in ("instruction", "gold", "question"))
        if spent + size > ROOM or context_spent + context > CONTEXT_ROOM:
            left_out += 1
            continue
        spent, context_spent = spent + size, context_spent + context
        for segment in segments:
            kind = KINDS.index(segment.label if segment.label in KINDS else "context")
            at = known.setdefault(segment.text, len(known))
            if spans and spans[-1][0] == kind and sum(spans[-1][1:]) == at:
                spans[-1][2] += 1
            else:
                spans.append([kind, at, 1])
    return {"samples": samples, "texts": [*known], "kinds": KINDS}, left_out
