"""One layer's attention, as a method that computes it itself is handed it (``lpes_eval.methods.interception``)."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lpes_eval.methods.tables import Table


class NewAlone:
    """Stands in for the cache inside an attention module: keeps nothing, and hands the new keys and values back."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._told: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Remember what else the layer tells its cache, such as its number."""
        self._told = args, kwargs
        return key, value

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep these, and hand all back, if the layer has a cache."""
        if self._told is None:
            return key, value
        args, kwargs = self._told
        return self.cache.update(key, value, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked of a cache."""
        return getattr(self.cache, name)


@dataclass
class Call:
    """One layer's attention in one forward.

    Attributes:
        partial: whether the layer rotates the leading entries of a head alone, as many as its table has.
        given: what the ``module`` was called with, by name.
        held: positions in the cache before these.
        state: for what the method wants to remember about this layer as long as the cache lives.
        query: (B, H, T, D), un-rotated and of the new tokens alone, as ``key`` (B, H_kv, T, D) and ``value``.
        mask: as the model made it for its own implementation, over cached and new keys; None is causal.
        options: what else the layer hands its attention ``function``, such as ``scaling``.
    """

    partial: bool
    layer: int
    module: nn.Module
    given: dict[str, Any]
    table: Table
    cache: NewAlone | None
    held: int
    state: dict[str, Any]
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    options: dict[str, Any]
    function: Callable

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.options.get("scaling") or self.query.shape[-1] ** -0.5

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, any number of heads, T, D) rotated as the family does, by tables (B or 1, T, d)."""
        rotate = sys.modules[type(self.module).__module__].apply_rotary_pos_emb
        if not self.partial:
            return rotate(query, key, cos, sin)
        width = cos.shape[-1]
        turned = rotate(query[..., :width], key[..., :width], cos, sin)
        query, key = (torch.cat((t, x[..., width:]), -1) for t, x in zip(turned, (query, key), strict=True))
        return query, key

    def cached(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append rotated keys and values to the cache and return all that it holds; without a cache return these."""
        return self.cache.append(key, value) if self.cache is not None else (key, value)

    def compute(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention by the implementation that the model was loaded with, (B, T, H', D_v).

        Args:
            query: (B, H', T, D), rotated; H' may be a multiple of the layer's own number of heads.
            key: (B, H_k, S, D), rotated; H_k divides H'.
            value: (B, H_v, S, D_v); H_v divides H_k, and head j of the keys goes with head ``j // (H_k / H_v)``.
        """
        if value.shape[1] != key.shape[1]:
            if query.shape[2] == 1 and self.function is ALL_ATTENTION_FUNCTIONS["sdpa"] and not self.module.training:
                return self._one_token(query, key, value)
            value = value.repeat_interleave(key.shape[1] // value.shape[1], dim=1)
        module: Any = self.module
        before = module.__dict__.get("num_key_value_groups")
        module.num_key_value_groups = query.shape[1] // key.shape[1]
        try:
            return self.function(module, query, key, value, self.mask, **self.options)[0]
        finally:
            if before is not None:
                module.num_key_value_groups = before
            else:
                del module.num_key_value_groups

    def _one_token(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One query token, its heads sharing values but not keys: neither is copied out for every head."""
        scores = torch.matmul(query.unflatten(1, (key.shape[1], -1)).squeeze(3), key.transpose(-1, -2)) * self.scale
        scores, mask = scores.flatten(1, 2).unsqueeze(2), self.mask  # (B, H', 1, S)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        weights = scores.float().softmax(-1).to(value.dtype)
        shared = weights.unflatten(1, (value.shape[1], -1)).flatten(2, 3)  # (B, H_v, H' / H_v, S)
        return torch.matmul(shared, value).flatten(1, 2).unsqueeze(1)
