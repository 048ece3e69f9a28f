"""Calibrated attention (Found in the Middle, arXiv 2406.16008): attention goes to documents by relevance, not by place.

lm_eval --model calibrated_attention --model_args pretrained=lmsys/vicuna-7b-v1.5 --tasks mdqa_pos

What the prompt's last token pays to a document is taken for the sum of its relevance and of a bias of its place, which
a dummy document in the same place shows (section 3). While the model answers, each document gets attention by its
relevance alone (section 4). docs/methods.md says what was decided here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lm_eval.api.instance import Instance
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad
from tqdm import tqdm

from lpes_eval import rope
from lpes_eval.attention.measure import items_of, located
from lpes_eval.decoder import device_of
from lpes_eval.flags import of, positive
from lpes_eval.harness.segments import Segment, join
from lpes_eval.methods.attention import Call
from lpes_eval.methods.interception import Interception
from lpes_eval.methods.prompt import DocumentsLM

DUMMY = "This text says nothing about anything. "


@dataclass(eq=False)
class Calibration(Interception):
    """Calibrated attention in the upper half of a model's layers; ``temperature`` is of the softmax over relevances."""

    temperature: float = 5e-5
    name = "Calibrated attention"

    def __post_init__(self) -> None:
        """Read what a user wrote."""
        self.temperature = of(positive, "temperature", self.temperature)
        self._places: Tensor | None = None  # each token's document, (S,), or -1
        self._scales: Tensor | None = None  # of each document's attention, (K,)
        self._paid: list[Tensor] | None = None  # while attention is measured: of each layer, (K,)

    @torch.no_grad()
    def attention(self, model: nn.Module, ids: Sequence[int], places: Sequence[int], count: int) -> Tensor:
        """What the last token pays to each of ``count`` documents: a mean over tokens, heads and layers, (count,)."""
        self._places, self._paid = torch.tensor(places), []
        try:
            model(input_ids=torch.tensor([ids], device=device_of(model)), use_cache=False, logits_to_keep=1)
            paid = torch.stack(self._paid).mean(0)
        finally:
            self._places = self._paid = None
        return paid / torch.bincount(torch.tensor(places) + 1, minlength=count + 1)[1:]

    def scales(self, attention: Tensor, of_dummies: Tensor) -> Tensor:
        """What to multiply each document's attention by, from it and from a dummy's in the same place, (K,) each."""
        return ((attention - of_dummies) / self.temperature).softmax(0) / attention

    @contextmanager
    def documents(self, places: Sequence[int], scales: Tensor) -> Iterator[None]:
        """Calibrate from a prompt's last token on: ``places`` has the document of each token, ``scales`` its factor."""
        self._places, self._scales = torch.tensor(places), scales
        try:
            yield
        finally:
            self._places = self._scales = None

    def attend(self, call: Call) -> Tensor:
        """The model's attention, but for the rows from the prompt's last token on in the upper half of the layers."""
        query, key = call.rotate(call.query, call.key, *call.table)
        key, value = call.cached(key, call.value)
        output = call.compute(query, key, value)
        if self._places is None:
            return output
        new, width = query.shape[2], key.shape[2]
        end = call.held + new
        rows = end - len(self._places) + 1  # so many of the new ones
        first = max(end - width, 0)  # a sliding window's cache has lost what is before
        places = pad(self._places, (0, first + width - len(self._places)), value=-1)[first:].to(key.device)
        last = self._rows(call, min(rows, new), end - first, width)
        if self._paid is not None:
            shown = one_hot(places + 1, int(self._places.max()) + 2)[:, 1:].to(value.dtype)  # (S, K)
            paid = last.compute(query[:, :, -1:], key, shown.expand(*value.shape[:2], -1, -1))  # (1, 1, H, K)
            self._paid.append(paid[0, 0].double().mean(0).cpu())
        elif rows > 0 and 2 * call.layer >= self._depth:
            output[:, -rows:] = self._calibrated(last, query[:, :, -rows:], key, value, places)
        return output

    def _rows(self, call: Call, rows: int, end: int, width: int) -> Call:
        """The call for the last ``rows`` rows alone, which end in column ``end`` of ``width`` keys."""
        self.refuse_flash_attention(call)
        if call.mask is not None:
            return replace(call, mask=call.mask[:, :, -rows:])
        columns = torch.arange(width, device=call.key.device)
        mask = (columns <= columns[end - rows : end, None])[None, None]
        return replace(call, mask=mask, options=call.options | {"is_causal": False})

    def _calibrated(self, call: Call, query: Tensor, key: Tensor, value: Tensor, places: Tensor) -> Tensor:
        """Attention in which the documents' shares of what goes to all of them are multiplied by ``_scales``."""
        assert self._scales is not None
        # The attention function adds up, beside the values, how much goes to documents before and afterwards.
        among = (places >= 0).to(value.dtype)[:, None]  # (S, 1)
        scale = (self._scales / self._scales.max()).to(value.device, value.dtype)[places.clamp(min=0)][:, None] * among
        sums = torch.cat((among, scale), -1).expand(*value.shape[:2], -1, -1)
        parts = call.compute(query, key, torch.cat((value * (1 - among), value * scale, sums), -1))
        others, documents, sums = parts.split((value.shape[-1], value.shape[-1], 2), -1)
        return others + documents * sums[..., :1] / sums[..., 1:].clamp(min=torch.finfo(sums.dtype).tiny)

    def check(self, model: nn.Module) -> None:
        """As every method in place of attention."""
        super().check(model)
        self._depth = len(rope.find_decoder(model).layers)


class CalibratedAttention(DocumentsLM):
    """``hf`` with calibrated attention; its arguments are those of ``hf`` and of ``Calibration``.

    Before each answer it passes over the prompt once for each document, and once more.
    """

    title = Calibration.name
    paper = "2406.16008"
    Inside = Calibration

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Find out what each prompt's documents should get, and answer."""
        answers: list[str] = []
        for request in tqdm(requests, disable=disable_tqdm or self.rank != 0, desc="Running generate_until requests"):
            with self.method.documents(*self.calibrate(request)):
                answers += super().generate_until([request], disable_tqdm=True)
        return answers

    def calibrate(self, request: Any) -> tuple[list[int], Tensor]:
        """The document of each token of a request's prompt, and what to multiply the documents' attention by."""
        before, segments, after = self.parts(request)
        count = len(segments) - 2

        def read(segments: Sequence[Segment]) -> tuple[list[int], list[int]]:
            ids, starts = located(self, before + join(segments) + after)
            return ids, [item if item < count else -1 for item in items_of(starts, segments, len(before))]

        of_dummies = []
        for k in range(1, count + 1):
            changed = [*segments[:k], dummy_of(segments[k]), *segments[k + 1 :]]
            of_dummies.append(self.method.attention(self.model, *read(changed), count)[k - 1])
        ids, places = read(segments)
        attention = self.method.attention(self.model, ids, places, count)
        return places, self.method.scales(attention, torch.stack(of_dummies))


def dummy_of(document: Segment) -> Segment:
    """A dummy in a document's place, of as many characters."""
    size = len(document.core)
    return replace(document, text=document.framed((DUMMY * (size // len(DUMMY) + 1))[:size]))


Method = CalibratedAttention
