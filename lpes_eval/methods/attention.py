"""One layer's attention, as a method that computes it itself is handed it (``lpes_eval.methods.interception``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lpes_eval.errors import UserError
from lpes_eval.methods.tables import Table

if TYPE_CHECKING:
    from lpes_eval.methods.interception import Interception


@dataclass
class Call:
    """One layer's attention in one forward.

    Attributes:
        method: whose call it is.
        layer: number of the decoder layer.
        module: its attention module.
        query, key, value: (B, H, T, D), (B, H_kv, T, D), (B, H_kv, T, D_v); un-rotated, the new tokens alone.
        table: the rotary table of these tokens, and how to get others.
        mask: the mask that the model made for its own implementation, over cached and new keys; may be None (causal).
        options: what else the layer hands its attention function, such as ``scaling`` or ``sliding_window``.
        function: the attention function of the implementation that the model was loaded with.
        cache: the model's cache, or None.
        append: the cache's ``update`` with what else the layer tells it, such as its number.
        state: what the method wants to remember about this layer as long as the cache lives; a new dict without one.
        given: what the attention module was called with, by name.
    """

    method: Interception
    layer: int
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    table: Table
    mask: Any
    options: dict[str, Any]
    function: Callable
    cache: Cache | None
    append: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None
    state: dict[str, Any]
    given: dict[str, Any]

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.options.get("scaling") or self.query.shape[-1] ** -0.5

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, any number of heads, T, D) rotated as the family does, by tables (B or 1, T, d)."""
        rotate = sys.modules[type(self.module).__module__].apply_rotary_pos_emb
        if not self.method.partial[self.layer]:
            return rotate(query, key, cos, sin)
        width = cos.shape[-1]
        turned = rotate(query[..., :width], key[..., :width], cos, sin)
        return tuple(torch.cat((t, x[..., width:]), dim=-1) for t, x in zip(turned, (query, key), strict=True))

    def cached(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append rotated keys and values to the cache and return all that it holds; without a cache return these.

        Keys may have another number of heads than values, as long as it is always the same.

        Raises:
            UserError: they have, and the cache is a static one, which has room for as many of one as of the other.
        """
        if self.cache is None or self.append is None:
            return key, value
        layer = self.cache.layers[self.layer] if self.layer < len(self.cache.layers) else None
        if isinstance(layer, StaticLayer) and key.shape[1] != value.shape[1]:
            raise UserError(
                f"{self.method.name} caches {key.shape[1]} heads of keys beside {value.shape[1]} of values, for which "
                "a static cache has no room; use one that grows (leave out cache_implementation)"
            )
        return self.append(key, value)

    def compute(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention by the implementation that the model was loaded with.

        Args:
            query: (B, H', T, D), rotated; H' may be a multiple of the layer's own number of heads.
            key: (B, H_k, S, D), rotated; H_k divides H'.
            value: (B, H_v, S, D_v); H_v divides H_k, and head j of the keys goes with head ``j // (H_k / H_v)``.

        Returns:
            (B, T, H', D_v).
        """
        if value.shape[1] != key.shape[1]:
            if query.shape[2] == 1 and self.function is ALL_ATTENTION_FUNCTIONS["sdpa"] and not self.module.training:
                return self._one_token(query, key, value)
            value = value.repeat_interleave(key.shape[1] // value.shape[1], dim=1)
        with _groups(self.module, query.shape[1] // key.shape[1]):
            return self.function(self.module, query, key, value, self.mask, **self.options)[0]

    def _one_token(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One query token, its heads sharing values but not keys: neither is copied out for every head."""
        scores = torch.matmul(query.unflatten(1, (key.shape[1], -1)).squeeze(3), key.transpose(-1, -2)) * self.scale
        scores = scores.flatten(1, 2).unsqueeze(2)  # (B, H', 1, S)
        if self.mask is not None:
            mask = self.mask
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        weights = scores.float().softmax(-1).to(value.dtype)
        shared = weights.unflatten(1, (value.shape[1], -1)).flatten(2, 3)  # (B, H_v, H' / H_v, S)
        return torch.matmul(shared, value).flatten(1, 2).unsqueeze(1)


@contextmanager
def _groups(module: Any, groups: int) -> Iterator[None]:
    """Let the attention functions see how many query heads there are to a key head now."""
    before = module.__dict__.get("num_key_value_groups")
    module.num_key_value_groups = groups
    try:
        yield
    finally:
        if before is None:
            del module.num_key_value_groups
        else:
            module.num_key_value_groups = before
