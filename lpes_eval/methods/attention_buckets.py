"""Attention Buckets (arXiv 2312.04455): the model under N RoPE bases, their next-token distributions combined.

lm_eval --model attention_buckets --model_args pretrained=lmsys/vicuna-7b-v1.5 --tasks kv_retrieval

Each base gives a distribution p_j over the next token; the prediction is ``sum_j a_j p_j`` with weights by confidence,
``a_j = softmax_j(max_v logits_j(v))``: the softmax over the bases of each one's highest logit. The authors' code adds
up the *logits* with these weights (``combine=logits``); docs/methods.md says what comes from where.

The N bases are N rows of one batch for every row of the input, each with cosines and sines of its own, and N rows of
the cache. A first pass that does not fit into the GPU's memory is done again in parts, with as few bases a part as it
takes, and their caches are then joined. With one base, the model's own, it is the plain model bit for bit.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lpes_eval import rope
from lpes_eval.caches import Stamp, cache_of, held_in
from lpes_eval.errors import CacheError, UserError
from lpes_eval.methods.base import InModel, MethodLM, one_of
from lpes_eval.methods.interception import claim
from lpes_eval.methods.tables import Table, own_base, parse_bases, published_bases
from lpes_eval.rotary import named

NAME = "Attention Buckets"


@dataclass(eq=False)
class Buckets(InModel):
    """Attention Buckets inside a model with default rotary embeddings: its forward answers the combined prediction.

    What the forward returns as ``logits`` are logarithms of the combined probabilities, float32 (with one base, the
    model's own logits). Everything else that it returns has N rows for each row of the input, base by base.

    Attributes:
        bases: RoPE bases, as a list or ``10000:17500:25000``. None: the seven of the paper, which are for models whose
            own base is 10000, multiplied by the model's own base / 10000. In a model: the bases in force.
        combine: ``probabilities`` as in the paper, or ``logits`` as in its authors' code.
        parts: into how many parts a first pass is divided; it grows by itself where memory runs out.
    """

    bases: Any = None
    combine: str = "probabilities"

    def __post_init__(self) -> None:
        """Read what a user wrote."""
        if self.bases is not None:
            self.bases = parse_bases("bases", self.bases)
        one_of("combine", self.combine, ("probabilities", "logits"))
        self.parts = 1
        self._part: Sequence[float] = ()  # the bases of the pass that runs
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
        """In place of the model's forward: the combined prediction."""
        call = dict(zip(inspect.signature(self._original).parameters, args, strict=False)) | kwargs
        if call.get("labels") is not None:
            raise UserError(f"{NAME} combines predictions and computes no loss; leave the labels out")
        cache = next((value for value in call.values() if isinstance(value, Cache)), None)
        if cache is not None:
            self._stamp.check(cache)
            if held_in(cache) > 0:
                self._check_rows(cache, call)
                return self._in_parts(call, 1)
        while True:
            try:
                return self._in_parts(call, self.parts)
            except torch.OutOfMemoryError:
                if self.parts >= len(self.bases):
                    raise
                if cache is not None:
                    cache.reset()
            torch.cuda.empty_cache()  # outside the handler, whose traceback holds on to what did not fit
            self.parts = min(2 * self.parts, len(self.bases))

    def _in_parts(self, call: dict[str, Any], parts: int) -> Any:
        """The model on N rows for each row of the input, a few bases at a time; afterwards the cache has all rows."""
        size = -(-len(self.bases) // parts)
        caches = {name: value for name, value in call.items() if isinstance(value, Cache)}  # empty, where parts > 1
        calls = [call, *(call | copy.deepcopy(caches) for _ in range(size, len(self.bases), size))]
        mixed, outputs = None, []
        for each, start in zip(calls, range(0, len(self.bases), size), strict=True):
            part = self.bases[start : start + size]
            self._part = part
            try:
                output = self._original(**_repeated(each, len(part)))
            finally:
                self._part = ()
            if len(self.bases) > 1:
                for logits in output.logits.unflatten(0, (len(part), -1)):  # (B, T, V)
                    mixed = _mixed(mixed, logits.float(), self.combine)
                output.logits = None
            outputs.append(output)
        if mixed is not None:
            outputs[0].logits = mixed[0]
        _join([cache_of(output) for output in outputs])
        self._stamp.put(outputs[0])
        return outputs[0]

    def _tabulate(self, rotary: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Cosines and sines of every row's own base, (N * B, T, d)."""
        if not self._part:
            return output
        call = named(args, kwargs)
        rows, ids = call["x"].shape[0] // len(self._part), call["position_ids"]  # (N * B or 1, T), or (3, N * B, T)
        own = max(1, ids.shape[-2] // len(self._part))  # they are the same for every base
        one = Table.of(rotary, (), call | {"position_ids": ids[..., :own, :]}, tuple(t[:own] for t in output))
        tables = one.by_bases(self._part, self._theta)  # (N, B or 1, T, d)
        return tuple(t.expand(-1, rows, -1, -1).flatten(0, 1) for t in tables)

    def _check_rows(self, cache: Cache, call: dict[str, Any]) -> None:
        keys = (getattr(layer, "keys", None) for layer in cache.layers)  # the first layer may hold none
        held = next((len(each) for each in keys if each is not None and each.numel() > 0), None)
        if held not in (None, needed := len(self.bases) * len(_inputs(call))):
            raise CacheError(
                f"the key-value cache holds {held} rows, and {NAME} with {len(self.bases)} bases needs {needed}; "
                "start with an empty cache, without beam search (num_beams=1)"
            )


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


def _mixed(so_far: tuple[Tensor, Tensor] | None, logits: Tensor, combine: str) -> tuple[Tensor, Tensor]:
    """One more base's logits (B, T, V) in the confidence-weighted mean of predictions.

    ``so_far`` are the mean of the bases before (logarithms of probabilities, or logits), (B, T, V), and the logarithm
    of their weight, (B, T, 1).
    """
    confidence = logits.amax(-1, keepdim=True)
    each = logits.log_softmax(-1) if combine == "probabilities" else logits
    if so_far is None:
        return each, confidence
    mean, weight = so_far
    total = torch.logaddexp(weight, confidence)
    before, now = weight - total, confidence - total
    if combine == "probabilities":
        return torch.logaddexp(mean + before, each + now), total
    return mean * before.exp() + each * now.exp(), total


def _join(caches: list[Any]) -> None:
    """Put the rows of all caches into the first one."""
    if len(caches) == 1 or not isinstance(caches[0], Cache):
        return
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        if getattr(layers[0], "keys", None) is None:
            raise CacheError(f"{NAME} cannot join this model's caches; use a smaller batch")
        for name in ("keys", "values"):
            setattr(layers[0], name, torch.cat([getattr(layer, name) for layer in layers]))
            for layer in layers[1:]:
                setattr(layer, name, None)


class AttentionBuckets(MethodLM):
    """``hf`` with Attention Buckets; its arguments are those of ``hf``, ``bases`` and ``combine`` (see ``Buckets``)."""

    title = NAME
    paper = "2312.04455"
    published_time = 4.76
    Inside = Buckets


Method = AttentionBuckets
