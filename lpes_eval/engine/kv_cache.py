"""The keys and values of a batch of prompts: a row each, in which the token at position p stands in column p."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache


class KVCache(DynamicCache):
    """Keys and values, a tensor (rows, heads, columns, head dimension) each a layer, written in place.

    A forward pass is preceded by ``place``, which says where its tokens stand, and has ``mask`` as its attention mask.
    """

    def __init__(self, config: Any, rows: int, columns: int) -> None:
        super().__init__(config=config)
        self._size = rows, columns
        self._windows = [getattr(layer, "sliding_window", None) for layer in self.layers]
        self._kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or self._windows
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def place(self, rows: slice, positions: Tensor, device: torch.device) -> None:
        """The next forward pass is over the tokens at these positions, (rows, tokens), of these rows."""
        self._first, self._end = int(positions.min()), int(positions.max()) + 1
        self._rows, self.positions = rows, positions.to(device)
        self._numbers = torch.arange(rows.start, rows.stop, device=device)[:, None]

    def _begin(self, window: int | None) -> int:
        """The first column that a token of the forward pass may see."""
        return max(0, self._first - window + 1) if window else 0

    def mask(self, dtype: torch.dtype) -> Tensor | dict[str, Tensor] | None:
        """What each token sees, (rows, 1, tokens, columns), by kind where layers differ: its row, or a window."""
        if self.positions.shape[1] == self._end:  # from the first token on
            return None
        masks = {}
        for kind, window in dict(zip(self._kinds, self._windows, strict=False)).items():
            column = torch.arange(self._begin(window), self._end, device=self.positions.device)
            position = self.positions[:, None, :, None]
            hidden = (column > position) | (column <= position - (window or self._end))
            masks[kind] = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, -torch.inf)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store a layer's new keys and values, and return what its attention may see."""
        new = key_states, value_states
        if layer_idx not in self._held:
            rows, columns = self._size  # zeros: what is hidden counts 0 times its value
            keys, values = (states.new_zeros(rows, states.shape[1], columns, states.shape[3]) for states in new)
            self._held[layer_idx] = keys, values
        for held, states in zip(self._held[layer_idx], new, strict=True):
            held[self._numbers.to(states.device), :, self.positions.to(states.device)] = states.transpose(1, 2)
        begin = self._begin(self._windows[layer_idx] if layer_idx < len(self._windows) else None)
        return tuple(held[self._rows, :, begin : self._end] for held in self._held[layer_idx])

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of a row into another row."""
        for held in (held for pair in self._held.values() for held in pair):
            held[target, :, :length] = held[source, :, :length]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(held.nbytes for pair in self._held.values() for held in pair)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before those of the forward pass."""
        return self._first
