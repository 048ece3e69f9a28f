"""Rotary tables for layer factors: what a rotary module answers at positions that are divided by each layer's factor.

A table is a module's answer in the model's own form: cosines and sines (B, T, d), or complex numbers in one tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ROWS = 1 << 14
"""Tables of all layers are made at once, and kept, up to this many rows (layers times positions: 16 MiB of float32 in
heads of 128); longer ones one by one as the layers ask for them, so that a long prompt never holds more than one."""
BLOCK = 256
"""Positions are tabulated in multiples of this."""
FIXED = {"default", "linear", "yarn", "llama3", "proportional"}
"""transformers' kinds of rotary embeddings whose frequencies do not depend on the length of a prompt."""
KEPT = "_kept_tables"
"""The attribute of a rotary module that holds tables of a block of positions."""


class Tables:
    """What a rotary module answers in one forward: ``of(h)`` is the table of layer h, in the model's own form.

    Some models cut cosines and sines before their layers see them (Gemma 4); that is then done for each layer.
    """

    def __init__(self, of: Callable[[int], Any]) -> None:
        self.of = of

    def __getitem__(self, index: Any) -> Tables:
        """A part of each layer's."""
        return Tables(lambda h: self.of(h)[index])

    def __iter__(self) -> Iterator[Tables]:
        """Cosines and sines."""
        return iter((self[0], self[1]))


def own_table(value: Any, h: int) -> Any:
    """The table of layer ``h`` in place of all layers', also in a tuple or a dict; any other value as it is."""
    kind = type(value)
    if kind is Tables:
        return value.of(h)
    if kind is tuple and any(type(v) is Tables for v in value):
        return tuple(own_table(v, h) for v in value)
    if kind is dict and any(type(v) in (Tables, tuple, dict) for v in value.values()):
        own = {name: own_table(v, h) for name, v in value.items()}
        if any(own[name] is not v for name, v in value.items()):  # a dict that layers write to stays the same one
            return own
    return value


def named(args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call of a rotary module by name; some families say which kind of layer it is for."""
    return dict(zip(("x", "position_ids", "layer_type"), args)) | kwargs  # noqa: B905  (torch 2.7 compiles no strict=)


def divided(ids: Tensor, divisors: Tensor) -> Tensor:
    """Positions (B, T), or (3, B, T) where they have several axes, by U divisors: (..., U * B, T), float32."""
    return (ids.unsqueeze(-3) / divisors.view(-1, 1, 1)).flatten(-3, -2)


def ask(rotary: nn.Module, call: dict[str, Any], position_ids: Tensor) -> Any:
    """What a rotary module answers to the ``call``, by name, at other positions.

    Its forward is called undecorated, so that the dynamic kinds keep the frequencies that they have chosen by the
    true length, and that gradients flow. Of ``x`` only its dtype and device count; the states need not be kept.
    """
    other = call | {"x": call["x"].new_empty(0), "position_ids": position_ids}
    return inspect.unwrap(type(rotary).forward)(rotary, **other)


def one_table(rotary: nn.Module, call: dict[str, Any], divisors: Tensor, layer: int) -> Any:
    """The table at positions divided by one layer's factor out of all ``divisors``, (layers,)."""
    return _made(rotary, call, call["position_ids"], divisors[layer][None])[0]


def all_tables(rotary: nn.Module, call: dict[str, Any], divisors: Tensor, layers: Sequence[int], keep: bool) -> Tables:
    """The tables of all layers; layer h takes the factor of ``layers[h]``. Where it may ``keep`` some, it does."""
    ids = call["position_ids"]
    if divisors.requires_grad or len(divisors) * ids.numel() > ROWS:
        return Tables(lambda h: one_table(rotary, call, divisors, layers[h]))
    tables = (_gathered(rotary, call, divisors) if keep else None) or _made(rotary, call, ids, divisors)
    return Tables(lambda h: tables[layers[h]])


def _made(rotary: nn.Module, call: dict[str, Any], ids: Tensor, divisors: Tensor) -> list[Any]:
    """A rotary module's tables at positions divided by each of the divisors: tensors (B, T, d), one or a tuple."""
    longest = _looks_for_the_longest(rotary)
    if longest:  # then the true positions are among those that it is asked for
        divisors = torch.cat((divisors.new_ones(1), divisors))
    output = ask(rotary, call, divided(ids, divisors))
    if isinstance(output, tuple):
        tables = list(zip(*(part.chunk(len(divisors)) for part in output), strict=True))
    else:
        tables = list(output.chunk(len(divisors)))
    return tables[1:] if longest else tables


def _gathered(rotary: Any, call: dict[str, Any], divisors: Tensor) -> list[Any] | None:
    """The tables of all layers as rows of kept ones; None where the positions have no row in so many."""
    ids = call["position_ids"]
    if ids.ndim != 2 or ids.is_meta or ids.is_floating_point() or _looks_for_the_longest(rotary):
        return None
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph cannot wait for the largest position
        return None
    low, high = (int(end) for end in ids.aminmax())
    place = call.get("layer_type"), call["x"].dtype, ids.device
    kept = vars(rotary)[KEPT].get(place)
    if kept is None or not kept.is_of(rotary) or not kept.first <= low <= high < kept.end:
        kept = _Block.of(rotary, call, divisors, low, high)
        if kept is None:
            return None
        vars(rotary)[KEPT][place] = kept
    rows = ids.view(-1) - kept.first if kept.first else ids.reshape(-1)
    chosen = kept.rows.index_select(1, rows)
    each = chosen.view(len(chosen), *ids.shape, *chosen.shape[2:]).unbind(0)
    return list(each) if len(each) == len(divisors) else list(zip(each[::2], each[1::2], strict=True))


class _Block(NamedTuple):
    """Tables of the positions from ``first`` to before ``end``.

    ``rows`` are the cosines and the sines of each layer in turn, (2 * layers, positions, d), or complex numbers,
    (layers, positions, d).
    """

    buffers: list[tuple[Tensor, int]]
    first: int
    end: int
    rows: Tensor

    def is_of(self, rotary: Any) -> bool:
        """Whether nobody has replaced the module's frequencies since, or written to them."""
        pairs = zip(self.buffers, _buffers(rotary), strict=True)
        return all(then is now and version == today for (then, version), (now, today) in pairs)

    @classmethod
    def of(cls, rotary: Any, call: dict[str, Any], divisors: Tensor, low: int, high: int) -> _Block | None:
        """A block with these positions in it, from 0 if it can be; None for negative ones and for too many."""
        most = ROWS // len(divisors)
        first = 0 if high < most else low
        if low < 0 or high - first >= most:
            return None
        size = min(most, -(-(high - first + BLOCK) // BLOCK) * BLOCK)
        with torch.inference_mode(False), torch.no_grad():
            block = torch.arange(first, first + size, device=divisors.device)[None]
            tables = _made(rotary, call, block, divisors)
            parts = [part for table in tables for part in (table if isinstance(table, tuple) else (table,))]
            if {part.shape for part in parts} != {(1, size, *parts[0].shape[2:])} or len(parts) > 2 * len(tables):
                return None
            return cls(_buffers(rotary), first, first + size, torch.cat(parts))


def _buffers(rotary: Any) -> list[tuple[Tensor, int]]:
    """A module's frequencies, and how often each was written to."""
    return [(buffer, 0 if buffer.is_inference() else buffer._version) for buffer in rotary._buffers.values()]


def is_fixed(rotary: Any) -> bool:
    """Whether a rotary module has the same frequencies at all lengths, and nobody's hooks and no other forward."""
    if rotary._forward_pre_hooks or rotary._forward_hooks or "forward" in rotary.__dict__:
        return False
    kinds = getattr(rotary, "rope_type", None)
    return {*(kinds.values() if isinstance(kinds, dict) else [kinds])} <= FIXED


def _looks_for_the_longest(rotary: nn.Module) -> bool:
    """Whether a rotary module's forward itself looks for the longest position (Phi-MoE)."""
    return "max" in inspect.unwrap(type(rotary).forward).__code__.co_names
