"""Attention sorting (arXiv 2310.01427): documents are sorted by the attention they get, and then the model answers.

lm_eval --model attention_sorting --model_args pretrained=lmsys/vicuna-7b-v1.5 --tasks mdqa_pos

A round sums up what the prompt's last token pays to each document, a mean over heads and layers; the one with the most
goes next to the question. docs/methods.md says what was decided here.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from tqdm import tqdm

from lpes_eval.attention.measure import items_of, located, weights
from lpes_eval.flags import at_least, of
from lpes_eval.harness.segments import Segment, join
from lpes_eval.methods.base import InModel
from lpes_eval.methods.prompt import DocumentsLM

NAME = "Attention sorting"


@dataclass(eq=False)
class Sorting(InModel):
    """How often documents are sorted, at most (5 in the authors' runs); the model stays as it is."""

    rounds: int = 5
    plain = True

    def __post_init__(self) -> None:
        """Read what a user wrote."""
        self.rounds = of(at_least(0), "rounds", self.rounds)


class AttentionSorting(DocumentsLM):
    """``hf`` on prompts of tasks by position, their documents sorted; arguments are those of ``hf`` and ``Sorting``."""

    title = NAME
    paper = "2310.01427"
    Inside = Sorting
    by_engine = True

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Sort the documents of every prompt, and answer what comes of it."""
        bar = tqdm(requests, disable=disable_tqdm or self.rank != 0, desc="Sorting documents")
        changed = [self.sort(request) for request in bar]
        hook: CacheHook = self.cache_hook  # type: ignore[has-type]  # kept under the prompts as they came
        self.cache_hook = CacheHook(None)
        try:
            answers = super().generate_until(changed, disable_tqdm)
        finally:
            self.cache_hook = hook
        for request, answer in zip(requests, answers, strict=True):
            hook.add_partial("generate_until", request.args, answer)
        return answers

    def sort(self, request: Any) -> Any:
        """A copy of a request with its documents sorted."""
        before, segments, after = self.parts(request)
        for _ in range(self.method.rounds):
            ids, starts = located(self, before + join(segments) + after)
            (by_layer,) = weights(self.model, [*ids, ids[-1]], 1)  # the answer's first token is not read
            mean = torch.stack([weight.float().mean(0).cpu() for weight in by_layer.values()]).mean(0)
            places = torch.tensor(items_of(starts, segments, len(before)))
            attention = [mean[places == item].sum().item() for item in range(len(segments) - 2)]
            order = sorted(range(len(attention)), key=attention.__getitem__)  # stable
            if order == [*range(len(order))]:
                break
            segments = reordered(segments, order)
        changed = copy.copy(request)
        changed.arguments = before + join(segments) + after, request.args[1]
        return changed


def reordered(segments: Sequence[Segment], order: Sequence[int]) -> list[Segment]:
    """An instruction, items and a question with the items in this order; what belongs to a place stays there."""
    first, *items, last = segments
    pairs = [(place, items[k]) for place, k in zip(items, order, strict=True)]
    return [first, *(replace(place, label=item.label, text=place.framed(item.core)) for place, item in pairs), last]


Method = AttentionSorting
