"""Attention Buckets (arXiv 2312.04455): the model under N RoPE bases, their next-token distributions combined.

Each base gives a distribution p_j over the next token; the prediction is ``sum_j a_j p_j`` with weights by confidence,
``a_j = softmax_j(max_v logits_j(v))``: the softmax over the bases of each one's highest logit. That is how the
authors' code computes the weights (github.com/AlibabaResearch/DAMO-ConvAI, ``attention-buckets/modeling_llama.py``);
it then adds up the *logits* with them, where the paper's Figure 2 adds up the distributions. ``combine`` says which;
the paper's is the default.

The N bases are N rows of one batch for every row of the input, each with cosines and sines of its own, and N rows of
the cache. A first pass that does not fit into the GPU's memory is done again in parts, with as few bases a part as it
takes, and their caches are then joined. With one base, the model's own, it is the plain model bit for bit.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lpes_eval import rope
from lpes_eval.errors import CacheError, UserError
from lpes_eval.peers.attention import Table, bases_for, own_base

NAME = "Attention Buckets"
Combine = Literal["probabilities", "logits"]


def check_combine(combine: str) -> None:
    """Raise ``UserError`` unless ``combine`` is a way to combine predictions."""
    if combine not in get_args(Combine):
        raise UserError(f"combine={combine}: expected {' or '.join(get_args(Combine))}")


class Buckets:
    """Attention Buckets inside a model, until ``detach``: its forward answers with the combined prediction.

    Args:
        model: a transformers causal language model with default rotary embeddings, with its weights.
        bases: RoPE bases; by default the published ones, times the model's own base / 10000.
        combine: ``probabilities`` or ``logits``.

    Attributes:
        bases, combine: as given, or the defaults.
        parts: into how many parts a first pass is divided; it grows by itself where memory runs out.

    Raises:
        UnsupportedModel: with the reason.
        UserError: layer factors are in the model already.

    What the forward returns as ``logits`` are logarithms of the combined probabilities, float32 (with one base, the
    model's own logits). Everything else that it returns has N rows for each row of the input, base by base.
    """

    def __init__(
        self, model: nn.Module, bases: Sequence[float] | None = None, combine: Combine = "probabilities"
    ) -> None:
        check_combine(combine)
        self.theta = own_base(model, NAME)
        self.bases = bases_for(self.theta, bases)
        self.combine = combine
        wrapped: Any = model
        self._model: Any = wrapped.get_base_model() if hasattr(model, "get_base_model") else model
        if rope.applied(model) is not None:
            raise UserError(f"{NAME}: the model has layer factors; take them back first (lpes_eval.remove)")
        if (other := rope.method_in(model)) is not None:
            found = "it is in the model already" if other == NAME else f"another method is in the model, {other}"
            raise UserError(f"{NAME}: {found}; detach it first")
        self._part: Sequence[float] = ()
        self.parts = 1
        self._original = self._model.forward
        self._shadowed = self._model.__dict__.get("forward")
        self.names = tuple(inspect.signature(self._original).parameters)
        self._model.forward = _Forward(self)
        self._model.__dict__[rope.METHOD] = NAME
        (rotary,) = rope.find_decoder(model).rotaries
        self._handle = rotary.register_forward_hook(self._tabulate, with_kwargs=True)

    def detach(self) -> None:
        """Leave the model exactly as it was. A cache with N rows for each row of the input is of no use to it."""
        self._handle.remove()
        self._model.__dict__.pop(rope.METHOD, None)
        if self._shadowed is None:
            self._model.__dict__.pop("forward", None)
        else:
            self._model.forward = self._shadowed

    # -- one forward

    @property
    def original(self) -> Any:
        """The forward of the model without the method."""
        return self._original

    def forward(self, call: dict[str, Any]) -> Any:
        """The combined prediction, for the arguments of the model's forward by name."""
        if call.get("labels") is not None:
            raise UserError(f"{NAME} combines predictions and computes no loss; leave the labels out")
        cache = call.get("past_key_values")
        if isinstance(cache, Cache) and rope.held_in(cache) > 0:
            self._check_rows(cache, call)
            return self._run(call, self.bases, combined=True)
        while True:
            try:
                return self._in_parts(call) if self.parts > 1 else self._run(call, self.bases, combined=True)
            except torch.OutOfMemoryError:
                if self.parts >= len(self.bases):
                    raise
                if isinstance(cache, Cache):
                    cache.reset()
            torch.cuda.empty_cache()  # outside the handler, whose traceback holds on to what did not fit
            self.parts = min(2 * self.parts, len(self.bases))

    def _run(self, call: dict[str, Any], bases: Sequence[float], combined: bool) -> Any:
        """The model on N rows for each row of the input; the bases' predictions combined, or as they are."""
        self._part = bases
        try:
            output = self._original(**_repeated(call, len(bases)))
        finally:
            self._part = ()
        if combined and len(bases) > 1:
            logits = output.logits.unflatten(0, (len(bases), -1))  # (N, B, T, V)
            output.logits = _Sum(self.combine).add(logits).result()
        return output

    def _in_parts(self, call: dict[str, Any]) -> Any:
        """The first pass with a few bases at a time; afterwards the cache holds the rows of all."""
        given = call.get("past_key_values")
        size = -(-len(self.bases) // self.parts)
        total = _Sum(self.combine)
        caches, output = [], None
        for start in range(0, len(self.bases), size):
            bases = self.bases[start : start + size]
            own = copy.deepcopy(given) if isinstance(given, Cache) else given
            output = self._run(call | {"past_key_values": own}, bases, combined=False)
            total.add(output.logits.unflatten(0, (len(bases), -1)))
            output.logits = None
            caches.append(output.past_key_values)
        assert output is not None
        if isinstance(caches[0], Cache):
            output.past_key_values = _joined(given if isinstance(given, Cache) else caches[0], caches)
        output.logits = total.result()
        return output

    def _tabulate(self, rotary: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Cosines and sines of every row's own base, (N * B, T, d)."""
        if not self._part or self._part == (self.theta,):
            return output
        kind: Any = type(rotary)
        _, names = rope.own_forward(kind)
        call = dict(zip(names, args, strict=False)) | kwargs
        rows = call["x"].shape[0] // len(self._part)
        ids = call["position_ids"]  # (N * B or 1, T), or with three axes in front
        own = max(1, ids.shape[-2] // len(self._part))
        call["position_ids"] = ids[..., :own, :]  # they are the same for every base
        cos, sin = (t[:own] for t in output)
        tables = Table(rotary, call, cos, sin).by_bases(self._part, self.theta)  # (N, B or 1, T, d)
        return tuple(t.expand(-1, rows, -1, -1).flatten(0, 1) for t in tables)

    def _check_rows(self, cache: Cache, call: dict[str, Any]) -> None:
        rows = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
        keys = (getattr(layer, "keys", None) for layer in cache.layers)  # the first layer may hold none
        held = next((each for each in keys if each is not None and each.numel() > 0), None)
        if held is not None and held.shape[0] != len(self.bases) * rows.shape[0]:
            raise CacheError(
                f"the key-value cache holds {held.shape[0]} rows, and {NAME} with {len(self.bases)} bases needs "
                f"{len(self.bases) * rows.shape[0]}; start with an empty cache, without beam search"
            )


class _Forward:
    """In place of the model's forward: an object, so that a copy of the model runs its own."""

    __slots__ = ("_method",)

    def __init__(self, method: Buckets) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method.forward(dict(zip(self._method.names, args, strict=False)) | kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model's own forward, which generation looks at."""
        return inspect.signature(self._method.original)


def _repeated(call: dict[str, Any], count: int) -> dict[str, Any]:
    """The arguments of a forward with all rows ``count`` times, block after block."""
    if count == 1:
        return call

    def repeat(value: Any, rows: int) -> Any:
        if isinstance(value, dict):
            return {name: repeat(each, rows) for name, each in value.items()}
        return torch.cat([value] * count, dim=rows) if torch.is_tensor(value) and value.ndim > 1 else value

    names = {"input_ids": 0, "inputs_embeds": 0, "attention_mask": 0, "token_type_ids": 0}
    names["position_ids"] = -2  # (B, T), or (3, B, T) where positions have several axes
    return {name: repeat(value, names[name]) if name in names else value for name, value in call.items()}


class _Sum:
    """The confidence-weighted sum of predictions, as they come: nothing of a part is kept but its share in the sum."""

    def __init__(self, combine: Combine) -> None:
        self._combine = combine
        self._sum: Tensor | None = None  # log sum_j exp(c_j) p_j; or sum_j exp(c_j - m) logits_j, with
        self._weight: Tensor | None = None  # log sum_j exp(c_j), c_j being the highest logit

    def add(self, logits: Tensor) -> _Sum:
        """Add the predictions of some bases, (N, B, T, V)."""
        for each in logits:
            each = each.float()
            confidence = each.amax(-1, keepdim=True)
            if self._combine == "probabilities":
                each = each.log_softmax(-1) + confidence
            if self._sum is None or self._weight is None:
                self._sum, self._weight = each, confidence
                continue
            weight = torch.logaddexp(self._weight, confidence)
            if self._combine == "probabilities":
                self._sum = torch.logaddexp(self._sum, each)
            else:
                self._sum = self._sum * (self._weight - weight).exp() + each * (confidence - weight).exp()
            self._weight = weight
        return self

    def result(self) -> Tensor:
        """Logarithms of the combined probabilities, or combined logits, (B, T, V)."""
        assert self._sum is not None
        assert self._weight is not None
        return self._sum - self._weight if self._combine == "probabilities" else self._sum


def _joined(target: Cache, parts: list[Any]) -> Cache:
    """One cache with the rows of all, in ``target``."""
    layers = parts[0].layers
    for h, layer in enumerate(layers):
        if getattr(layer, "keys", None) is None:
            raise CacheError(f"{NAME} cannot join this model's caches; use a smaller batch")
        for name in ("keys", "values"):
            setattr(layer, name, torch.cat([getattr(part.layers[h], name) for part in parts]))
            for part in parts[1:]:
                setattr(part.layers[h], name, None)
    target.layers = layers
    return target
