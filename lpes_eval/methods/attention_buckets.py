"""Attention Buckets (arXiv 2312.04455): the model under N RoPE bases, their next-token distributions combined.

lm_eval --model attention_buckets --model_args pretrained=lmsys/vicuna-7b-v1.5 --tasks kv_retrieval

Each base gives a distribution p_j over the next token; the prediction is ``sum_j a_j p_j`` with weights by confidence,
``a_j = softmax_j(max_v logits_j(v))``: the softmax over the bases of each one's highest logit. The authors' code adds
up the *logits* with these weights (``combine=logits``); docs/methods.md says what comes from where.

The N bases are N rows of one batch for every row of the input, each with cosines and sines of its own, and N rows of
the cache. With one base, the model's own, it is the plain model bit for bit.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lpes_eval import rope
from lpes_eval.caches import Stamp
from lpes_eval.errors import CacheError, UserError
from lpes_eval.flags import of, one_of
from lpes_eval.methods.base import InModel, MethodLM
from lpes_eval.methods.interception import claim
from lpes_eval.methods.tables import Table, own_base, parse_bases, published_bases
from lpes_eval.rotary import named

NAME = "Attention Buckets"


@dataclass(eq=False)
class Buckets(InModel):
    """Attention Buckets inside a model with default rotary embeddings.

    What its forward returns as ``logits`` are logarithms of the combined probabilities, float32 (with one base, the
    model's own logits). Everything else that it returns has N rows for each row of the input, base by base.

    Attributes:
        bases: RoPE bases, as a list or ``10000:17500:25000``. None: the seven of the paper, multiplied by the model's
            own base / 10000. In a model: the bases in force.
        combine: ``probabilities`` as in the paper, or ``logits`` as in its authors' code.
    """

    bases: Any = None
    combine: str = "probabilities"

    def __post_init__(self) -> None:
        """Read what a user wrote."""
        if self.bases is not None:
            self.bases = parse_bases("bases", self.bases)
        of(one_of("probabilities", "logits"), "combine", self.combine)
        self._running = False
        self._model: Any = None

    def check(self, model: nn.Module) -> None:
        """Refuse a model without a base of its own."""
        self._theta = own_base(model, NAME)

    def put(self, model: Any) -> None:
        """Put the method into the model, in place of its forward."""
        self.check(model)
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        claim(self._model, NAME)
        self.bases = self.bases or published_bases(self._theta)
        self._stamp = Stamp(f"{NAME} has not rotated with these bases")
        (rotary,) = rope.find_decoder(model).rotaries
        self._handle = rotary.register_forward_hook(self._tabulate, with_kwargs=True)
        self._shadowed = self._model.__dict__.get("forward")
        self._original = self._model.forward
        forward: Any = functools.partial(self._forward)  # no closure: a copy of the model runs its own
        forward.__wrapped__ = self._original  # whose signature generation looks at
        self._model.forward = forward

    def detach(self) -> None:
        """Leave the model exactly as it was."""
        if (model := self._model) is None:
            return
        self._model = None
        self._handle.remove()
        model.__dict__.pop(rope.METHOD, None)
        del model.forward
        if self._shadowed is not None:
            model.forward = self._shadowed

    # -- one forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's forward: N rows for each row of the input, and the combined prediction."""
        call = dict(zip(inspect.signature(self._original).parameters, args, strict=False)) | kwargs
        if call.get("labels") is not None:
            raise UserError(f"{NAME} combines predictions and computes no loss; leave the labels out")
        needed = len(self.bases) * len(_inputs(call))
        for cache in [value for value in call.values() if isinstance(value, Cache)]:
            self._stamp.check(cache)
            keys = [getattr(layer, "keys", None) for layer in cache.layers]  # the first layer may hold none
            held = next((len(each) for each in keys if each is not None and each.numel() > 0), needed)
            if held != needed:
                found = f"the key-value cache holds {held} rows, and {NAME} with {len(self.bases)} bases needs {needed}"
                raise CacheError(f"{found}; start with an empty cache, without beam search (num_beams=1)")
        self._running = True
        try:
            output = self._original(**_repeated(call, len(self.bases)))
        finally:
            self._running = False
        self._stamp.put(output)
        if len(self.bases) > 1:
            output.logits = _mixed(output.logits.unflatten(0, (len(self.bases), -1)), self.combine)
        return output

    def _tabulate(self, rotary: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Cosines and sines of every row's own base, (N * B, T, d)."""
        if not self._running:
            return output
        call, count = named(args, kwargs), len(self.bases)
        rows, ids = call["x"].shape[0] // count, call["position_ids"]  # (N * B or 1, T), or (3, N * B, T)
        own = max(1, ids.shape[-2] // count)  # they are the same for every base
        one = Table.of(rotary, (), call | {"position_ids": ids[..., :own, :]}, tuple(t[:own] for t in output))
        tables = one.by_bases(self.bases, self._theta)  # (N, B or 1, T, d)
        return tuple(t.expand(-1, rows, -1, -1).flatten(0, 1) for t in tables)

ROWS = {"input_ids": 0, "inputs_embeds": 0, "attention_mask": 0, "token_type_ids": 0, "position_ids": -2}
"""Arguments of a forward that have rows, and where: ``position_ids`` may have several axes, (3, B, T)."""


def _repeated(call: dict[str, Any], count: int) -> dict[str, Any]:
    """The arguments of a forward with all rows ``count`` times, block after block."""
    batch = len(_inputs(call))

    def repeat(value: Any, rows: int) -> Any:
        if isinstance(value, dict):  # of masks, by kind of attention
            return {name: repeat(each, rows) for name, each in value.items()}
        if not torch.is_tensor(value) or value.ndim < 2 or value.shape[rows] == 1 < batch:
            return value  # positions of one row are those of all
        return torch.cat([value] * count, dim=rows)

    return {name: repeat(value, ROWS[name]) if name in ROWS else value for name, value in call.items()}


def _inputs(call: dict[str, Any]) -> Tensor:
    given: Tensor = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
    return given


def _mixed(logits: Tensor, combine: str) -> Tensor:
    """The confidence-weighted mean of the bases' predictions: logarithms of probabilities, or logits, (B, T, V).

    ``logits`` are (N, B, T, V); one base after another is added, so that float32 is held of one at a time.
    """
    mean: Any = None
    weight: Any = None  # the logarithm of the weight of the bases before, (B, T, 1)
    for one in logits:
        one = one.float()
        confidence = one.amax(-1, keepdim=True)
        each = one.log_softmax(-1) if combine == "probabilities" else one
        if mean is None:
            mean, weight = each, confidence
            continue
        total = torch.logaddexp(weight, confidence)
        before, now = weight - total, confidence - total
        if combine == "probabilities":
            mean = torch.logaddexp(mean + before, each + now)
        else:
            mean = mean * before.exp() + each * now.exp()
        weight = total
    return mean


class AttentionBuckets(MethodLM):
    """``hf`` with Attention Buckets; its arguments are those of ``hf`` and of ``Buckets``."""

    title = NAME
    paper = "2312.04455"
    published_time = 4.76
    Inside = Buckets


Method = AttentionBuckets
