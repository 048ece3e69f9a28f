"""A key-value cache that does not move: what methods need that cache more keys than the model itself would."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from lpes_eval.methods.attention import Call


class GrowingLayer(DynamicLayer):
    """A cache layer that writes new keys and values behind the old ones instead of copying both to a new place.

    transformers' own layer concatenates: it copies all keys for every token, and there are N times as many here. What
    else is done to a cache (cropping, choosing rows) works as it does there.
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
        in_place = (
            room is not None
            and total <= room.shape[-2]
            and held.data_ptr() == room.data_ptr()
            and held.shape[:2] == room.shape[:2]
            and held.stride() == room.stride()
        )
        if room is None or not in_place:
            room = new.new_empty(*new.shape[:2], total + max(64, total // 8), new.shape[-1])
            if length:
                room[:, :, :length] = held
            self._room[name] = room
        room[:, :, length:total] = new
        return room[:, :, :total]


def grow_in_place(call: Call) -> None:
    """Give a cache that is still empty layers that grow in place, where it would have transformers' growing ones."""
    cache = call.cache
    if type(cache) is not DynamicCache:
        return
    if not cache.layers and cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    for h, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[h] = GrowingLayer()
