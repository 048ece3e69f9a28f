"""Keys and values of a batch in memory that is taken once: prompts that share a prefix share its row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache


class Stored(Exception):
    """A prefill has stored keys and values, and what would be made of them is of no use."""


class Buffer(DynamicCache):
    """The keys and values of a batch: each row a prefix, then columns that the row's prompts take in turns.

    The token that stands n tokens behind the prefix of a prompt in lane m has column ``prefix + n * lanes + m``. The
    last column takes the padding, and is never seen. A layer's tensors are (rows, heads, columns, head dimension).

    Args:
        config: the model's.
        rows: how many rows.
        prefix: tokens of the longest prefix.
        behind: tokens that may come behind it of one prompt.
        lanes: prompts of a row.

    Attributes:
        copies: in a prefill, rows of the forward pass, each with a row of the buffer where it goes.
        known: in a prefill, how many of the first layers are not run further.
        written: in decoding, (rows, tokens): the column of each token of the forward pass.
        seen: columns that attention sees, the first ones.
        recorded: a decoding step of as many rows as there are, where it was recorded.
    """

    def __init__(self, config: Any, rows: int, prefix: int, behind: int, lanes: int) -> None:
        super().__init__(config=config)
        self.rows, self.prefix, self.lanes = rows, prefix, lanes
        self.columns = prefix + behind * lanes + 1
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.copies: list[tuple[int, int]] | None = None
        self.known = 0
        self.written: Tensor | None = None
        self.seen = prefix
        self.recorded: Callable[[Tensor], Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values, and return what its attention is to see.

        Raises:
            Stored: in a prefill, by the last layer and by those whose output is known.
        """
        new = key_states, value_states
        if layer_idx not in self.held:
            # Zeros, as a hidden column still counts 0 times its value, which must be a number.
            keys, values = (x.new_zeros(self.rows, x.shape[1], self.columns, x.shape[3]) for x in new)
            self.held[layer_idx] = keys, values
        held = self.held[layer_idx]
        if self.copies is not None:
            for source, target in self.copies:
                for buffer, states in zip(held, new, strict=True):
                    buffer[target, :, : states.shape[2]] = states[source]
            if layer_idx < self.known or layer_idx == len(self.layers) - 1:
                raise Stored
            return new
        assert self.written is not None
        rows = torch.arange(self.rows, device=key_states.device)[:, None]
        for buffer, states in zip(held, new, strict=True):
            buffer[rows, :, self.written.to(rows.device)] = states.transpose(1, 2)
        keys, values = (buffer[: self.rows, :, : self.seen] for buffer in held)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that are there before a forward pass: none before a prefill."""
        return 0 if self.copies is not None else self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that ``update`` returns, and where they begin."""
        return (query_length if self.copies is not None else self.seen), 0

    def drop(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        self.rows -= 1
        self.recorded = None
        for keys, values in self.held.values():
            for buffer in (keys, values):
                buffer[row, :, : self.seen] = buffer[self.rows, :, : self.seen]
