"""Attention Buckets (arXiv 2312.04455): the model under N RoPE bases, their next-token distributions combined.

lm_eval --model attention_buckets --model_args pretrained=lmsys/vicuna-7b-v1.5 --tasks kv_retrieval

Each base gives a distribution p_j over the next token; the prediction is ``sum_j a_j p_j`` with weights by confidence,
``a_j = softmax_j(max_v logits_j(v))``: the softmax over the bases of each one's highest logit. Every row of the input
becomes N rows of one batch, each with tables of its own base. docs/methods.md says what comes from where.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lpes_eval import rope
from lpes_eval.caches import Stamp
from lpes_eval.errors import CacheError
from lpes_eval.methods.base import InModel, MethodLM
from lpes_eval.methods.interception import claim
from lpes_eval.methods.tables import Table, own_base, parse_bases, published_bases
from lpes_eval.rotary import named

NAME = "Attention Buckets"
ROWS = {"input_ids": 0, "inputs_embeds": 0, "attention_mask": 0, "token_type_ids": 0, "position_ids": -2}
"""Arguments of a forward that have rows, and where: ``position_ids`` may have several axes, (3, B, T)."""


@dataclass(eq=False)
class Buckets(InModel):
    """Attention Buckets inside a model with default rotary embeddings.

    ``bases`` are a list or ``10000:17500:25000``; None: the paper's seven, times the model's own base / 10000.
    What its forward returns as ``logits`` are logarithms of the combined probabilities, float32 (with one base, the
    model's own logits). Everything else that it returns has N rows for each row of the input, base by base.
    """

    bases: Any = None

    def __post_init__(self) -> None:
        """Read what a user wrote."""
        if self.bases is not None:
            self.bases = parse_bases("bases", self.bases)
        self._model: Any = None

    def check(self, model: nn.Module) -> None:
        """Refuse a model without a base of its own."""
        self._theta = own_base(model, NAME)

    def attach(self, model: Any) -> None:
        """Put the method into the model, in place of its forward."""
        self.check(model)
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        claim(self._model, NAME)
        self.bases = self.bases or published_bases(self._theta)
        self._stamp = Stamp(f"{NAME} has not rotated with these bases")
        (self._rotary,) = rope.find_decoder(model).rotaries
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
        model.__dict__.pop(rope.METHOD, None)
        del model.forward
        if self._shadowed is not None:
            model.forward = self._shadowed

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        call = dict(zip(inspect.signature(self._original).parameters, args, strict=False)) | kwargs
        count, ids = len(self.bases), call.get("input_ids")
        batch = len(ids if ids is not None else call["inputs_embeds"])
        for cache in [value for value in call.values() if isinstance(value, Cache)]:
            self._stamp.check(cache)
            keys = [getattr(layer, "keys", None) for layer in cache.layers]  # the first layer may hold none
            held = next((len(each) for each in keys if each is not None and each.numel() > 0), count * batch)
            if held != count * batch:
                found = f"the key-value cache holds {held} rows, and {NAME} with {count} bases needs {count * batch}"
                raise CacheError(f"{found}; start with an empty cache, without beam search (num_beams=1)")
        for name, axis in ROWS.items():
            value = call.get(name)
            if torch.is_tensor(value) and value.ndim > 1 and value.shape[axis] == batch:  # else it is for all rows
                call[name] = torch.cat([value] * count, dim=axis)
        with self._rotary.register_forward_hook(self._tabulate, with_kwargs=True):
            output = self._original(**call)
        self._stamp.put(output)
        if count > 1:
            output.logits = _mixed(output.logits.unflatten(0, (count, -1)))
        return output

    def _tabulate(self, rotary: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Cosines and sines of every row's own base, (N * B, T, d)."""
        call, count = named(args, kwargs), len(self.bases)
        rows, ids = call["x"].shape[0] // count, call["position_ids"]  # (N * B or 1, T), or (3, N * B, T)
        own = max(1, ids.shape[-2] // count)  # they are the same for every base
        one = Table.of(rotary, (), call | {"position_ids": ids[..., :own, :]}, tuple(t[:own] for t in output))
        tables = one.by_bases(self.bases, self._theta)  # (N, B or 1, T, d)
        return tuple(t.expand(-1, rows, -1, -1).flatten(0, 1) for t in tables)


def _mixed(logits: Tensor) -> Tensor:
    """The confidence-weighted mean of the bases' predictions, logarithms of probabilities, (B, T, V).

    ``logits`` are (N, B, T, V); one base is added after another, so that float32 is held of one at a time.
    """
    weight = torch.full((), -torch.inf, device=logits.device)  # of the bases before, its logarithm: (B, T, 1)
    mean = weight
    for one in logits:
        one = one.float()
        confidence = one.amax(-1, keepdim=True)
        total = torch.logaddexp(weight, confidence)
        before, now = weight - total, confidence - total
        mean = torch.logaddexp(mean + before, one.log_softmax(-1) + now)
        weight = total
    return mean


class AttentionBuckets(MethodLM):
    """``hf`` with Attention Buckets; its arguments are those of ``hf`` and of ``Buckets``."""

    title = NAME
    paper = "2312.04455"
    published_time = 4.76
    Inside = Buckets


Method = AttentionBuckets
