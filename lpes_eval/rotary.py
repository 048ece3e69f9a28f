"""Rotary tables for layer factors: what a rotary module answers at positions that are divided by each layer's factor.

A table is a module's answer in the model's own form: cosines and sines (B, T, d), or complex numbers in one tensor.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 1 << 14
"""Layers times positions (16 MiB of float32 in heads of 128) up to which all layers' tables are made at once, and kept;
beyond, a layer at a time."""
BLOCK = 256
"""Positions are tabulated in multiples of this."""
KEPT = "_kept_tables"
"""The attribute of a rotary module that holds tables of positions, by layer type, dtype and device."""
FIXED = {"default", "linear", "yarn", "llama3", "proportional"}
"""transformers' kinds of rotary embeddings whose frequencies do not depend on the length of a prompt."""


class Tables:
    """What a rotary module answers in one forward: ``of(h)`` is the table of layer h, in the model's own form."""

    def __init__(self, of: Callable[[int], Any]) -> None:
        self.of = of

    def __getitem__(self, index: Any) -> Tables:
        """A part of each layer's, for a model that cuts cosines and sines before its layers see them (Gemma 4)."""
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
    """What a rotary module answers to the ``call``, by name, at other positions; gradients flow.

    Its forward is called undecorated: the dynamic kinds keep the frequencies that they have chosen by the true length.
    """
    other = call | {"x": call["x"].new_empty(0), "position_ids": position_ids}  # of x its dtype and device count
    return inspect.unwrap(type(rotary).forward)(rotary, **other)


def one_table(rotary: nn.Module, call: dict[str, Any], divisors: Tensor, layer: int) -> Any:
    """The table at positions divided by one layer's factor out of all ``divisors``, (layers,)."""
    return _made(rotary, call, call["position_ids"], divisors[layer][None])[0]


def all_tables(rotary: nn.Module, call: dict[str, Any], divisors: Tensor, layers: Sequence[int], keep: bool) -> Tables:
    """The tables of all layers; layer h takes the factor of ``layers[h]``. It may ``keep`` them."""
    ids = call["position_ids"]
    if divisors.requires_grad or len(divisors) * ids.numel() > ROWS:
        return Tables(lambda h: one_table(rotary, call, divisors, layers[h]))
    tables = (_kept(rotary, call, divisors) if keep else None) or _made(rotary, call, ids, divisors)
    return Tables(lambda h: tables[layers[h]])


def _made(rotary: Any, call: dict[str, Any], ids: Tensor, divisors: Tensor) -> list[Any]:
    """A rotary module's tables at positions divided by each of the divisors: tensors (B, T, d), one or a tuple."""
    longest = _looks_for_the_longest(rotary.__class__)  # the true positions are among those that it is asked for
    if longest:
        divisors = torch.cat((divisors.new_ones(1), divisors))
    output = ask(rotary, call, divided(ids, divisors))
    if isinstance(output, tuple):
        tables = list(zip(*(part.chunk(len(divisors)) for part in output), strict=True))
    else:
        tables = list(output.chunk(len(divisors)))
    return tables[1:] if longest else tables


@functools.cache
def _looks_for_the_longest(kind: Any) -> bool:
    """Whether the tables depend on the longest position (Phi-MoE)."""
    return "max" in inspect.unwrap(kind.forward).__code__.co_names


def _kept(rotary: Any, call: dict[str, Any], divisors: Tensor) -> list[Any] | None:
    """The tables of all layers, looked up in kept ones; None where a position has no row there."""
    ids = call["position_ids"]
    if ids.ndim != 2 or ids.is_floating_point() or ids.is_meta or _looks_for_the_longest(rotary.__class__):
        return None
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph cannot wait for the largest position
        return None
    low, high = (int(end) for end in ids.aminmax())
    place = call.get("layer_type"), call["x"].dtype, ids.device
    block = vars(rotary)[KEPT].get(place)
    if block is None or not block.is_of(rotary) or not block.first <= low <= high < block.end:
        block = vars(rotary)[KEPT][place] = _Block(rotary, call, divisors, low, high)
    if block.rows is None or not block.first <= low:
        return None
    chosen = block.rows.index_select(1, (ids - block.first).view(-1))
    each = chosen.view(-1, *ids.shape, chosen.shape[-1]).unbind(0)
    return list(zip(each[::2], each[1::2], strict=True))


class _Block:
    """Cosines and sines of each layer in turn, ``rows`` (2 * layers, positions, d), from position ``first`` on.

    None where the module answers in another form, or the positions are too many or below 0.
    """

    def __init__(self, rotary: Any, call: dict[str, Any], divisors: Tensor, low: int, high: int) -> None:
        most = ROWS // len(divisors)
        self.first = 0 if high < most else low
        size = min(most, -(-(high - self.first + 1) // BLOCK) * BLOCK)
        self.end, self.rows = self.first + size, None
        self._frequencies = [*rotary._buffers.values()]
        if self.first <= low and high < self.end:
            with torch.inference_mode(False), torch.no_grad():
                positions = torch.arange(self.first, self.end, device=divisors.device)[None]
                parts = [part for table in _made(rotary, call, positions, divisors) for part in table]
                if len(parts) == 2 * len(divisors) and {part.shape[:-1] for part in parts} == {(1, size)}:
                    self.rows = torch.cat(parts)

    def is_of(self, rotary: Any) -> bool:
        """Whether nobody has replaced the module's frequencies since."""
        return all(then is now for then, now in zip(self._frequencies, rotary._buffers.values(), strict=True))


def is_fixed(rotary: Any) -> bool:
    """Whether a rotary module has the same frequencies at all lengths, and nobody's hooks and no other forward."""
    if rotary._forward_pre_hooks or rotary._forward_hooks or "forward" in rotary.__dict__:
        return False
    kinds = getattr(rotary, "rope_type", None)
    return {*(kinds.values() if isinstance(kinds, dict) else [kinds])} <= FIXED
