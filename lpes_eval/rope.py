"""Layer factors inside a transformers model: layer h rotates queries and keys at position ``i / s_h`` (Eq. 2).

transformers computes one rotary table a forward, the cosines and sines of all positions' angles, and hands it to every
layer. Three kinds of modules are changed, and no weight is touched:

1. The rotary module answers with a table for each layer, at positions divided by the layer's factor. So the model's
   frequencies (default, linear, dynamic NTK, yarn, llama3, longrope; one set for each kind of attention where there are
   several), its scaling and its layout stay as they are. Where frequencies do not depend on the length, tables of a
   block of positions are kept, and a forward gathers its rows instead of computing angles.
2. Each decoder layer takes its own table.
3. The decoder refuses a key-value cache filled under other factors, because its keys are rotated already.

A changed module is of a subclass of its own class, with another ``__call__`` (as ``torch.nn.utils.parametrize`` and
FSDP do it): no hooks, whose slow path every layer would pay, and copies, saved models, PEFT, accelerate and
``torch.compile`` take the change along.

    >>> apply(model, [1.0, 1.2, 1.5, 1.3])
    >>> model.generate(**inputs)
    >>> remove(model)
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lpes_eval.decoder import REFUSED as REFUSED
from lpes_eval.decoder import Decoder, find_decoder
from lpes_eval.caches import Stamp
from lpes_eval.caches import cache_of as cache_of
from lpes_eval.caches import with_cache as with_cache
from lpes_eval.errors import FactorsError, UserError
from lpes_eval.factors import Factors, carried, carry, parse
from lpes_eval.weights import warn_of_other_weights

ROWS = 1 << 14
"""Tables of all layers are made at once, and kept, up to this many rows (layers times positions: 16 MiB of float32 in
heads of 128); longer ones one by one as the layers ask for them, so that a long prompt never holds more than one."""
BLOCK = 256
"""Positions are tabulated in multiples of this."""

FIXED = {"default", "linear", "yarn", "llama3", "proportional"}
"""transformers' kinds of rotary embeddings whose frequencies do not depend on the length of a prompt."""

METHOD = "_peer_method"
"""The attribute by which another method (``lpes_eval.methods``) marks a module of the model that it is in: its name."""

logger = logging.getLogger(__name__)
_FACTORS, _LAYER, _KEPT = "_layer_factors", "_layer_number", "_kept_tables"
_OTHERS = "were not rotated under the layer factors now in force"
_compiling = torch.compiler.is_compiling

Given = Factors | Sequence[float] | np.ndarray | float | str | Path | Tensor | None


def apply(model: nn.Module, factors: Given = None) -> None:
    """Give every decoder layer of ``model`` its own factor, in place of any factors applied before.

    Args:
        model: a transformers causal language model with rotary position embeddings, on any device or several, in any
            dtype and with any attention implementation; also one wrapped by PEFT, except for prefix tuning.
        factors: one number a layer, from 0.001 to 1,000,000; or a factors object or file, or one number for all
            layers; or nothing, for those that the model's folder carries (``lpes_eval.save``); or a float tensor of
            shape (layers,), through which gradients flow and whose values count at each forward. Only those that it has
            now are checked: whoever changes them keeps them in that range. Gradient checkpointing must then be
            non-reentrant (``use_reentrant=False``): the other kind goes backward once a layer, the second time through
            a graph that the first has freed.

    Raises:
        FactorsError: factors that cannot be read, or for another number of layers.
        UnsupportedModel: a model whose layers cannot be given factors; the message says why.
        UserError: another method (``lpes_eval.methods``) is in the model.

    A deep copy of the model, or one that was saved whole and loaded, has the same factors, on its own.

    Keys in a cache are already rotated. While factors are in force, a cache that was filled under other factors, or
    under none, is refused (``CacheError``). A model without factors does not look: start it with an empty cache. Under
    ``torch.compile`` two cases go unseen: a static cache, whose length compiled code does not know, and factors that
    are a tensor and change their values. Nor are the blocks of a continuous batching that runs while factors change
    (``init_continuous_batching``): stop it first.
    """
    decoder, parsed, values = resolve(model, factors)
    if (method := method_in(model)) is not None:
        raise UserError(f"the model has {method} in it, which rotates queries and keys its own way; detach it first")
    warn_of_other_weights(model, parsed)
    remove(model)
    carry(model.config, parsed if factors is None else None)
    tensor = factors if isinstance(factors, Tensor) else None
    state = _LayerFactors(decoder.factor_layer, values, tensor, parsed.origin)
    _change(decoder.module, _Decoder, {_FACTORS: state})
    if tensor is None and set(values) == {1.0}:
        return
    rotaries: list[tuple[nn.Module, int | None]] = [(rotary, None) for rotary in decoder.rotaries]
    rotaries += [(rotary, h) for h, within in decoder.own.items() for rotary in within]
    for rotary, number in rotaries:
        _change(rotary, _Rotary, {_FACTORS: state, _LAYER: number, _KEPT: {}})
    for h, layer in enumerate(decoder.layers):
        _change(layer, _Layer, {_LAYER: h})


def resolve(model: nn.Module, factors: Given = None) -> tuple[Decoder, Factors, tuple[float, ...]]:
    """Where factors go in a model, which may be without weights; what they say; and one number a layer.

    Raises:
        FactorsError, UnsupportedModel: as ``apply``.
    """
    decoder = find_decoder(model)
    if isinstance(factors, Tensor) and factors.dim() != 1:
        raise FactorsError(f"factors: a tensor of shape {tuple(factors.shape)}; expected one number a layer")
    parsed = carried(model.config) if factors is None else parse(factors)
    if parsed is None:
        raise FactorsError("factors: none were given, and the model's config.json carries none; give a factors file")
    try:
        return decoder, parsed, tuple(parsed.per_layer(len(decoder.layers)))
    except FactorsError as error:
        raise FactorsError(f"{factors}: {error}" if isinstance(factors, str | Path) else str(error)) from None


def remove(model: nn.Module) -> None:
    """Undo ``apply`` exactly: no attribute or changed number is left, nor what the model's folder carried.

    Without applied factors, do nothing, but for what continuous batching has kept (``persistent_manager=True``), which
    goes in any case: a new batch would share its blocks of keys, and those are rotated already.
    """
    if (destroy := getattr(model, "destroy_cached_continuous_batching_manager", None)) is not None:
        destroy()
    if applied(model) is not None:
        carry(getattr(model, "config", None), None)
    for module in model.modules():
        if (kinds := vars(type(module)).get("_kinds")) is not None:
            object.__setattr__(module, "__class__", kinds[1])
            for name in (_FACTORS, _LAYER, _KEPT):
                vars(module).pop(name, None)


def applied(model: nn.Module) -> list[float] | None:
    """The factors now in force, one a layer, or None."""
    state = _attribute(_FACTORS, model)
    return list(state.factors) if state is not None else None


def in_force(model: nn.Module) -> Factors | None:
    """The factors now in force with their origin, or None."""
    state = _attribute(_FACTORS, model)
    return Factors(factors=state.factors, origin=state.origin) if state is not None else None


def method_in(model: nn.Module) -> str | None:
    """The name of the other method (``lpes_eval.methods``) that is in the model, or None."""
    return _attribute(METHOD, model)


def _attribute(name: str, model: nn.Module) -> Any:
    return next((vars(module)[name] for module in model.modules() if name in vars(module)), None)


# -- the changed modules ---------------------------------------------------------------------------------------------


class _Changed:
    """A module with factors: of a subclass of this class and of its own class, ``_kinds``."""

    _kinds: tuple[type, type]

    def __init_subclass__(cls) -> None:
        """Leave out what transformers does for each subclass of its layers: wrap their forward once more."""

    def __reduce__(self) -> Any:
        """A copied or saved module is made from classes that can be imported."""
        return _blank, self._kinds, self.__getstate__()  # type: ignore[attr-defined]


@functools.cache
def _class_of(kind: type, plain: type) -> type:
    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (kind, plain), names | {"_kinds": (kind, plain)})


def _blank(kind: type, plain: type) -> Any:
    made = _class_of(kind, plain)
    return made.__new__(made)


def _change(module: nn.Module, kind: type, attributes: dict[str, Any]) -> None:
    vars(module).update(attributes)
    object.__setattr__(module, "__class__", _class_of(kind, type(module)))


class _Decoder(_Changed):
    """Checks the cache before its layers run, and stamps one that they have made."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = vars(self)[_FACTORS]
        state.check([value for value in (*args, *kwargs.values()) if isinstance(value, Cache)])
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        state.stamp.put(output)
        return output

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Say that weights are saved without these factors, unless the model's configuration carries them."""
        factors = vars(self)[_FACTORS].factors
        in_config = carried(self.config) if hasattr(self, "config") else None
        if in_config is None or tuple(in_config.per_layer(len(factors))) != factors:
            logger.warning("layer factors are no weights, so they are not saved with these; lpes_eval.save keeps them")
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]


class _Rotary(_Changed):
    """Answers with the tables of all layers, or with that of the layer that it is in."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: dict[str, Any] = named(args, kwargs)
        simple = _simple(self)
        if not simple:  # the dynamic kinds choose their frequencies by the true length
            super().__call__(*args, **kwargs)  # type: ignore[misc]
        return vars(self)[_FACTORS].tables(self, call, simple)


class _Layer(_Changed):
    """Takes its own table out of all layers'."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        h = vars(self)[_LAYER]
        own = {name: _own(value, h) for name, value in kwargs.items()}
        return super().__call__(*[_own(value, h) for value in args], **own)  # type: ignore[misc]


class _LayerFactors:
    """One set of factors in one decoder. It refers to no module, so a copy of one layer takes along what is its own."""

    def __init__(
        self, owners: tuple[int, ...], values: tuple[float, ...], tensor: Tensor | None, origin: Mapping[str, Any]
    ) -> None:
        self._owners, self._values, self._tensor, self.origin = owners, values, tensor, origin
        self._divisors = torch.tensor(values, dtype=torch.float32)
        self.stamp = Stamp(_OTHERS, values)

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors as they are now, one a layer."""
        return self._values if self._tensor is None else tuple(self._tensor.tolist())

    def tables(self, rotary: Any, call: dict[str, Any], simple: bool) -> Any:
        """What a rotary module answers to a call: the tables of all layers, or that of the layer that it is in."""
        number, owners, ids = vars(rotary)[_LAYER], self._owners, call["position_ids"]
        divisors = self._divisors_on(call["x"].device)
        if number is not None:
            return _made(rotary, call, ids, divisors[owners[number]][None])[0]
        if self._tensor is not None or len(divisors) * ids.numel() > ROWS:
            return _Tables(lambda h: _made(rotary, call, ids, divisors[owners[h]][None])[0])
        gathered = _gathered(rotary, call, divisors) if simple and not _compiling() else None
        tables = gathered or _made(rotary, call, ids, divisors)
        return _Tables(lambda h: tables[owners[h]])

    def _divisors_on(self, device: torch.device) -> Tensor:
        """The factors, (layers,), kept on the device that was asked for last, as a GPU waits for a copy."""
        if self._tensor is not None:
            return self._tensor.to(device, torch.float32)
        if self._divisors.device != device:
            self._divisors = self._divisors.to(device)
        return self._divisors

    def check(self, caches: list[Cache]) -> None:
        """Refuse a cache that was filled under other factors, as far as can be told; stamp it."""
        if self._tensor is not None and not _compiling():  # compiled code does not know a tensor's values
            self.stamp = Stamp(_OTHERS, self.factors)
        for cache in caches:
            self.stamp.check(cache)


# -- tables ----------------------------------------------------------------------------------------------------------


class _Tables:
    """What a rotary module answers in one forward: ``of(h)`` is the table of layer h, in the model's own form.

    Some models cut cosines and sines before their layers see them (Gemma 4); that is then done for each layer.
    """

    def __init__(self, of: Callable[[int], Any]) -> None:
        self.of = of

    def __getitem__(self, index: Any) -> _Tables:
        return _Tables(lambda h: self.of(h)[index])

    def __iter__(self) -> Iterator[_Tables]:
        return iter((self[0], self[1]))


def _own(value: Any, h: int) -> Any:
    """The table of layer ``h`` in place of all layers', also in a tuple or a dict; any other value as it is."""
    kind = type(value)
    if kind is _Tables:
        return value.of(h)
    if kind is tuple and any(type(v) is _Tables for v in value):
        return tuple(_own(v, h) for v in value)
    if kind is dict and any(type(v) in (_Tables, tuple, dict) for v in value.values()):
        own = {name: _own(v, h) for name, v in value.items()}
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
    capturing = ids.is_cuda and torch.cuda.is_current_stream_capturing()
    if ids.ndim != 2 or ids.is_floating_point() or ids.is_meta or capturing or _looks_for_the_longest(rotary):
        return None
    low, high = (int(end) for end in ids.aminmax())
    most = ROWS // len(divisors)
    first = 0 if high < most else low
    if not 0 <= first <= low or high - first >= most:
        return None
    frequencies = [(buffer, buffer.is_inference() or buffer._version) for buffer in rotary._buffers.values()]
    place = call.get("layer_type"), call["x"].dtype, ids.device
    kept = vars(rotary)[_KEPT].get(place)
    same = kept is not None and all(a is b and m == n for (a, m), (b, n) in zip(kept[0], frequencies, strict=True))
    if not same or not kept[1] <= low <= high < kept[1] + kept[2][0].shape[1]:
        size = min(most, -(-(high - first + BLOCK) // BLOCK) * BLOCK)
        with torch.inference_mode(False), torch.no_grad():
            block = torch.arange(first, first + size, device=ids.device)[None]
            tables = _made(rotary, call, block, divisors)
            tuples = isinstance(tables[0], tuple)
            parts = [torch.cat(part) for part in (zip(*tables, strict=True) if tuples else [tables])]
        if any(part.shape[:2] != (len(divisors), size) for part in parts):
            return None
        kept = vars(rotary)[_KEPT][place] = (frequencies, first, parts)
    rows = (ids - kept[1]).flatten()
    layers = [part.index_select(1, rows).unflatten(1, ids.shape).unbind(0) for part in kept[2]]
    return list(zip(*layers, strict=True)) if len(layers) > 1 else list(layers[0])


def _simple(rotary: Any) -> bool:
    """Whether a rotary module has the same frequencies at all lengths, and nobody's hooks and no other forward."""
    if rotary._forward_pre_hooks or rotary._forward_hooks or "forward" in rotary.__dict__:
        return False
    kinds = getattr(rotary, "rope_type", None)
    return {*(kinds.values() if isinstance(kinds, dict) else [kinds])} <= FIXED


def _looks_for_the_longest(rotary: nn.Module) -> bool:
    """Whether a rotary module's forward itself looks for the longest position (Phi-MoE)."""
    return "max" in inspect.unwrap(type(rotary).forward).__code__.co_names
