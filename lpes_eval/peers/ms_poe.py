"""Ms-PoE (arXiv 2403.04797): positions divided by a factor of each head's own, chosen on the prompt.

In each layer the heads are ranked by position-awareness (Eq. 1): the share of the prompt's keys whose attention is at
least ``threshold`` times its mean, in the attention of the prompt's last token. It is computed from *un-rotated*
queries and keys. The factors run evenly from ``min`` to ``max`` (Eq. 2); the most position-aware head gets the least
factor, the least aware one the greatest (section 3.3). Heads with the same share keep their order. The choice stands
until the answer is complete; the first ``skip`` layers stay as they are.

The paper's Algorithm 1 goes through all layers; its authors' scripts leave the first two alone, and so does the
default here. Where this differs from their code (github.com/VITA-Group/Ms-PoE, ``utils/modify_arch/llama.py``):

- there, and in line 9 of Algorithm 1 taken literally, head i is given the factor whose number is the head at rank i
  (``r[S_P.argsort()]``), which is the inverse of the permutation that section 3.3 describes; here head i is given the
  factor of its rank;
- there the factors are ``min + (max - min) i / H``, so that ``max`` is never reached; here they are those of Eq. 2;
- there attention must exceed the threshold; here it may equal it, as in Eq. 1;
- there the query heads of a group share their keys' factor and rotate with another one, which is no rotation by a
  distance any more; here keys are rotated once for every query head. That makes the key cache of a model with grouped
  queries as large as that of one without, which is what the definition costs.

What it costs: the ranking looks at one query a layer; the keys in the cache are rotated and stay so; attention is
computed by the model's own implementation (SDPA, flash, eager).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpes_eval import rope
from lpes_eval.errors import UserError
from lpes_eval.peers import attention
from lpes_eval.peers.attention import Call, Interception
from lpes_eval.peers.cache import grow_in_place

NAME = "Ms-PoE"
MIN, MAX = 1.2, 1.8
SKIP = 2
THRESHOLD = 3.0


@dataclass(frozen=True)
class Settings:
    """Ms-PoE's settings, with the paper's values.

    Attributes:
        min, max: the least and the greatest factor.
        skip: the first layers that are left alone.
        threshold: attention counts for a head's awareness from so many times its mean on (the paper's alpha).
    """

    min: float = MIN
    max: float = MAX
    skip: int = SKIP
    threshold: float = THRESHOLD

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if not 0 < self.min <= self.max < float("inf"):
            raise UserError(f"min={self.min:g},max={self.max:g}: expected 0 < min <= max")
        if self.skip < 0 or not self.threshold > 0:
            raise UserError(f"skip={self.skip},threshold={self.threshold:g}: expected skip >= 0 and threshold > 0")

    def factors(self, heads: int) -> list[float]:
        """The factors of so many heads, from the most position-aware one to the least."""
        step = (self.max - self.min) / max(heads - 1, 1)
        return [self.min + rank * step for rank in range(heads)]


def check(model: nn.Module, settings: Settings) -> None:
    """Raise what ``MsPoE`` would raise, where that can be seen without weights."""
    found = attention.check(model, NAME)
    depth = len(rope.find_decoder(model).layers)
    if settings.skip >= depth or not any(h >= settings.skip for h in found):
        raise UserError(f"skip={settings.skip}: the model has {depth} layers, of which none would be left")


class MsPoE:
    """Ms-PoE inside a model, until ``detach``.

    Args:
        model: a transformers causal language model with rotary position embeddings, with its weights.
        settings: the paper's by default.

    Attributes:
        ranks: by layer, each head's rank in the last prompt, (B, H); 0 is the most position-aware.

    Raises:
        UnsupportedModel: with the reason.
        UserError: no layer is left, or layer factors or another method are in the model already.
    """

    def __init__(self, model: nn.Module, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        check(model, self.settings)
        self.ranks: dict[int, Tensor] = {}
        self._end: Tensor | int | None = None
        self._furthest = 0
        layers = range(self.settings.skip, len(rope.find_decoder(model).layers))
        self._interception = Interception(model, self._attend, NAME, layers)

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose heads have factors, ascending."""
        return self._interception.layers

    def detach(self) -> None:
        """Leave the model exactly as it was."""
        self._interception.detach()

    @contextmanager
    def prompt_ends_at(self, column: Tensor | int) -> Iterator[None]:
        """Rank heads on the token in this column, or in one column a row, of whatever is run without a filled cache.

        Otherwise it is each row's last token that is not padding, of whatever the first pass has: of the prompt and
        the answer so far without a cache, of the prompt and the first guesses in speculative decoding, and of the first
        chunk where a prompt comes in chunks. So it is needed there; and chunks are then refused (``UserError``), for
        heads can only be ranked on a prompt that is there as a whole.
        """
        self._end, self._furthest = column, int(torch.as_tensor(column).max())
        try:
            yield
        finally:
            self._end = None

    def _attend(self, call: Call) -> Tensor:
        heads, key_heads = call.query.shape[1], call.key.shape[1]
        if self.settings.min == self.settings.max:  # nothing to choose, and key heads need not be told apart
            cos, sin = (t[0].unsqueeze(1) for t in call.rotation.table.by_factors([self.settings.min]))
            query, key = (call.rotation.rotate(x, cos, sin) for x in (call.query, call.key))
            return call.attend(query, *call.cached(key, call.value))
        if "ranks" not in call.state:
            call.state["ranks"] = self.ranks[call.layer] = self._rank(call)
        ranks = call.state["ranks"]  # (B, H)
        cos, sin = (_each_head(t, ranks) for t in call.rotation.table.by_factors(self.settings.factors(heads)))
        query, key = call.rotation.rotate(call.query, cos, sin), call.key
        if heads != key_heads:
            key = key.repeat_interleave(heads // key_heads, dim=1)
            grow_in_place(call)  # so many keys more are not to be copied for every token
        key = call.rotation.rotate(key, cos, sin)
        return call.attend(query, *call.cached(key, call.value))

    def _rank(self, call: Call) -> Tensor:
        """Each head's rank by position-awareness, (B, H)."""
        batch = len(call.query)
        last = self._last(call).to(call.query.device)  # (B,)
        rows = torch.arange(batch, device=last.device)
        query = call.query[rows, :, last].float().unflatten(1, (call.key.shape[1], -1))  # (B, H_kv, G, D)
        scale = call._options.get("scaling") or call.query.shape[-1] ** -0.5
        scores = torch.matmul(query, call.key.float().transpose(-1, -2)).flatten(1, 2) * scale  # (B, H, T)
        if (cap := call._options.get("softcap")) is not None:
            scores = torch.tanh(scores / cap) * cap
        visible = _visible(call, last)
        weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
        mean = 1.0 / visible.sum(-1)
        awareness = (weights >= self.settings.threshold * mean[:, None, None]).sum(-1)  # keys, the same number for all
        order = awareness.argsort(dim=-1, descending=True, stable=True)
        return order.argsort(dim=-1)

    def _last(self, call: Call) -> Tensor:
        """The column of each row's last token of the prompt, (B,)."""
        batch, _, length, _ = call.query.shape
        if self._end is not None:
            if self._furthest >= length:
                raise UserError(
                    f"{NAME}: the prompt ends in column {self._furthest}, and the first pass has {length} columns; run "
                    "the whole prompt in one pass (leave out prefill_chunk_size)"
                )
            return torch.as_tensor(self._end).expand(batch)
        if call.padding is None:
            return torch.full((batch,), length - 1)
        return length - 1 - call.padding[:, -length:].flip(-1).long().argmax(-1)


def _each_head(table: Tensor, ranks: Tensor) -> Tensor:
    """From tables by factor (U, B or 1, T, d) that of every row's every head, (B, H, T, d)."""
    ranks = ranks.to(table.device)
    if table.shape[1] == 1:
        return table[:, 0][ranks]
    return table[ranks, torch.arange(len(ranks), device=table.device)[:, None]]


def _visible(call: Call, last: Tensor) -> Tensor:
    """Which of the prompt's keys the layer lets each row's last token see, (B, T)."""
    batch, _, length, _ = call.query.shape
    columns = torch.arange(length, device=last.device)
    causal = columns <= last[:, None]
    if call.mask is None or call.mask.ndim == 2:  # causal, or flash attention: padding alone
        window = call._options.get("sliding_window")
        if window is not None:
            causal = causal & (columns > last[:, None] - window)
        return causal if call.mask is None else causal & call.mask[:, :length].bool()
    mask = call.mask.expand(batch, -1, -1, -1)[torch.arange(batch, device=last.device), 0, last, :length]
    return causal & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)
