"""One layer's attention, as a method that computes it itself is handed it (``lpes_eval.methods.interception``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lpes_eval.errors import UserError
from lpes_eval.methods.tables import Table

if TYPE_CHECKING:
    from lpes_eval.methods.interception import Interception


class NewAlone:
    """Stands in for the cache inside an attention module: keeps nothing, and hands the new keys and values back."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.append: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = self.update

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Remember what else the layer tells its cache, such as its number."""
        self.append = lambda key, value: self.cache.update(key, value, *args, **kwargs)
        return key, value

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked of a cache."""
        return getattr(self.cache, name)


@dataclass
class Call:
    """One layer's attention in one forward.

    Attributes:
        method: whose call it is.
        layer: number of the decoder layer.
        module: its attention module.
        given: what that was called with, by name.
        table: the rotary table of the new tokens, and how to get others.
        cache: the model's cache as the module sees it, or None.
        state: what the method wants to remember about this layer as long as the cache lives; a new dict without one.
        query, key, value: (B, H, T, D), (B, H_kv, T, D), (B, H_kv, T, D_v); un-rotated, the new tokens alone.
        mask: the mask that the model made for its own implementation, over cached and new keys; may be None (causal).
        options: what else the layer hands its attention function, such as ``scaling`` or ``sliding_window``.
        function: the attention function of the implementation that the model was loaded with.
    """

    method: Interception
    layer: int
    module: nn.Module
    given: dict[str, Any]
    table: Table
    cache: NewAlone | None
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

    @property
    def held(self) -> int:
        """How many positions the layer's cache holds already."""
        return int(self.cache.get_seq_length(self.layer)) if self.cache is not None else 0

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, any number of heads, T, D) rotated as the family does, by tables (B or 1, T, d)."""
        rotate = sys.modules[type(self.module).__module__].apply_rotary_pos_emb
        if not self.method.partial[self.layer]:
            return rotate(query, key, cos, sin)
        width = cos.shape[-1]
        turned = rotate(query[..., :width], key[..., :width], cos, sin)
        return tuple(torch.cat((t, x[..., width:]), dim=-1) for t, x in zip(turned, (query, key), strict=True))

    def cached(self, key: Tensor, value: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
        """Append rotated keys and values to the cache and return all that it holds; without a cache return these.

        Args:
            key, value: they may have different numbers of heads, as long as these are always the same.
            in_place: for many keys: a new ``DynamicCache`` gets layers that do not copy all of it for every token.

        Raises:
            UserError: different numbers, and a static cache, which has room for as many of one as of the other.
        """
        if self.cache is None:
            return key, value
        if in_place and self.held == 0 and type(self.cache.cache) is DynamicCache:
            grow_in_place(self.cache.cache)
        layer = self.cache.layers[self.layer] if self.layer < len(self.cache.layers) else None
        if isinstance(layer, StaticLayer) and key.shape[1] != value.shape[1]:
            raise UserError(
                f"{self.method.name} caches {key.shape[1]} heads of keys beside {value.shape[1]} of values, for which "
                "a static cache has no room; use one that grows (leave out cache_implementation)"
            )
        return self.cache.append(key, value)

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


def grow_in_place(cache: DynamicCache) -> None:
    """Give a cache ``GrowingLayer``, wherever it has transformers' own growing layers with nothing in them."""
    if not cache.layers and cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    for h, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[h] = GrowingLayer()


class GrowingLayer(DynamicLayer):
    """A cache layer that writes new keys and values behind the old ones.

    transformers' own layer concatenates, and so copies all keys for every token. What else is done to a cache
    (cropping, choosing rows) works as it does there.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (B, heads, T, D) keys and values, and return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._room: dict[str, Tensor] = {}
        self.keys = self._append("keys", key_states)
        self.values = self._append("values", value_states)
        return self.keys, self.values

    def _append(self, name: str, new: Tensor) -> Tensor:
        held: Tensor = getattr(self, name)
        length = held.shape[-2] if held.numel() else 0
        total = length + new.shape[-2]
        room = self._room.get(name)
        there = room is not None and total <= room.shape[-2] and held.data_ptr() == room.data_ptr()
        if room is None or not there or held.stride() != room.stride() or len(held) != len(room):
            room = new.new_empty(*new.shape[:2], total + max(64, total // 8), new.shape[-1])
            if length:
                room[:, :, :length] = held
            self._room[name] = room
        room[:, :, length:total] = new
        return room[:, :, :total]
