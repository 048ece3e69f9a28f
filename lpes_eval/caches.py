"""Key-value caches: keys in them are rotated already, so each says what has rotated them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lpes_eval.errors import CacheError

STAMP = "_rotated_by"
"""The attribute of a cache that holds its stamp."""


class Stamp:
    """On a cache and its copies: what has rotated its keys, layer factors or one method's settings in one model."""

    def __init__(self, otherwise: str, factors: tuple[float, ...] | None = None) -> None:
        self.otherwise, self.factors = otherwise, factors

    def __deepcopy__(self, memo: dict[int, Any]) -> Stamp:  # noqa: D105
        return self

    def check(self, cache: Cache, held: int | None = None) -> None:
        """Put the stamp on a cache; ``CacheError`` where its keys (in ``held`` positions) were rotated otherwise."""
        stamp = getattr(cache, STAMP, None)
        if stamp is self:  # all that compiled code need ask
            return
        if stamp is None or stamp.factors is None or stamp.factors != self.factors:
            held = held_in(cache) if held is None else held
            if held > 0:
                found = f"the key-value cache holds {held} positions whose keys {self.otherwise}"
                raise CacheError(f"{found}; start with an empty cache")
        setattr(cache, STAMP, self)

    def put(self, output: Any) -> None:
        """Put the stamp on the cache in a model's output, which the model may have made."""
        for cache in output if isinstance(output, tuple) else (cache_of(output),):
            if isinstance(cache, Cache):
                setattr(cache, STAMP, self)


def cache_of(output: Any) -> Any:
    """The key-value cache in a model's output; transformers 5.24 calls it ``cache``, versions before otherwise."""
    return getattr(output, "cache" if hasattr(output, "cache") else "past_key_values", None)


def with_cache(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The argument that hands a model its cache, under the name that its ``forward`` has for it."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def held_in(cache: Cache) -> int:
    """How many positions a cache holds: the most of any layer, for the first may hold none (MiniMax)."""
    length = cache.get_seq_length()
    if isinstance(length, Tensor):  # of a static cache, which compiled code takes for empty
        return 0 if torch.compiler.is_compiling() else int(length)
    layers = getattr(cache, "layers", ())
    return max(length, *(int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length")), 0)
