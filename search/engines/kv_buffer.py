"""Keys and values of a batch in memory that is taken once: prompts that share a prefix share its row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


class Stored(Exception):
    """A prefill has stored all layers' keys and values."""


@dataclass
class Place:
    """Where the next keys and values go, in every layer alike, and how much of the layer its attention is to see.

    Attributes:
        rows: rows in use, the first ones of the buffer.
        columns: columns of the buffer.
        written: for each row of a forward pass the columns where its tokens go: (rows, tokens).
        seen: columns in use, the first ones.
        copies: in a prefill, (2, copies): rows of the forward pass, and the row of the buffer where each goes.
        missing: layers that the prefill has not stored yet.
    """

    rows: int
    columns: int
    written: Tensor | None = None
    seen: int = 0
    copies: Tensor | None = None
    missing: int = 0


class Layer(DynamicLayer):
    """One layer's keys and values, (rows, heads, columns, head dimension) each, in memory that is taken once."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the memory, once it is known how many heads there are."""
        self.dtype, self.device = key_states.dtype, key_states.device
        # Zeros, as a hidden column still counts 0 times its value, which must be a number.
        self.keys, self.values = (
            new.new_zeros(self.place.rows, new.shape[1], self.place.columns, new.shape[3])
            for new in (key_states, value_states)
        )
        self.is_initialized = True

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """The keys and the values, all of the memory."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store what is new, and return what attention is to see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place, both = self.place, list(zip(self.held, (key_states, value_states), strict=True))
        if place.copies is not None:
            source, target = place.copies.to(self.device)
            for held, new in both:
                held[target, :, : new.shape[2]] = new[source]
            place.missing -= 1
            if place.missing == 0:
                raise Stored
            return key_states, value_states
        assert place.written is not None
        rows, columns = torch.arange(place.rows, device=self.device)[:, None], place.written.to(self.device)
        for held, new in both:
            held[rows, :, columns] = new.transpose(1, 2)
        keys, values = (held[: place.rows, :, : place.seen] for held in self.held)
        return keys, values

    def get_seq_length(self) -> int:
        """Columns that are there before a forward pass: none before a prefill."""
        return 0 if self.place.copies is not None else self.place.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that ``update`` returns, and where they begin."""
        return (query_length if self.place.copies is not None else self.place.seen), 0


class Buffer(DynamicCache):
    """The keys and values of a batch: each row a prefix, then columns that the row's prompts take in turns.

    The token that stands n tokens behind the prefix of a prompt in lane m has column ``prefix + n * lanes + m``. What
    was written for a draft that turned out wrong is hidden until it is overwritten by what does stand there. The last
    column takes the padding, and is never seen.

    Args:
        config: the model's.
        rows: how many rows.
        prefix: tokens of the longest prefix.
        behind: tokens that may come behind it of one prompt.
        lanes: prompts of a row.
    """

    def __init__(self, config: Any, rows: int, prefix: int, behind: int, lanes: int) -> None:
        super().__init__(config=config)
        self.prefix, self.lanes = prefix, lanes
        self.place = Place(rows, prefix + behind * lanes + 1, seen=prefix)
        self.own = [Layer(self.place) for _ in self.layers]
        self.layers = list(self.own)

    @property
    def dtype(self) -> torch.dtype | None:
        """What the keys are, and the queries and masks that meet them; None as long as there are none."""
        return self.own[0].keys.dtype if self.own[0].keys is not None else None

    def drop(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        self.place.rows -= 1
        if row < self.place.rows:
            for held in (held for layer in self.own for held in layer.held):
                held[row, :, : self.place.seen] = held[self.place.rows, :, : self.place.seen]
