"""Layer factors inside a transformers model: layer h rotates queries and keys at position ``i / s_h`` (Eq. 2).

transformers computes one rotary table a forward, the cosines and sines of all positions' angles, and hands it to every
layer. Three kinds of hooks change that, and no weight is touched:

1. Around the rotary module: it is asked for positions divided by each layer's factor, in the same call where its
   frequencies do not depend on the length, and answers with a table for each layer. So the model's own frequencies
   (default, linear, dynamic NTK, yarn, llama3, longrope; one set for each kind of attention where there are several),
   its scaling and its layout stay as they are.
2. Before each decoder layer: it takes its own table.
3. Around the decoder: a key-value cache filled under other factors is refused, because its keys are rotated already.
   Outside these hooks the cache itself refuses new keys, so a model without factors cannot go on with it either.

    >>> apply(model, [1.0, 1.2, 1.5, 1.3])
    >>> model.generate(**inputs)
    >>> remove(model)
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # which every model of transformers imports anyway
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lpes_eval.config_field import carried, carry, warn_of_other_weights
from lpes_eval.decoder import REFUSED as REFUSED
from lpes_eval.decoder import Decoder, find_decoder
from lpes_eval.errors import CacheError, FactorsError, UserError
from lpes_eval.factors import Factors, parse

BATCHED_LIMIT = 1 << 17
"""The tables of all layers are made at once up to this many rows (layers times positions: 64 MiB of float32 in heads of
128); longer ones one by one as the layers ask for them, so that a long prompt never holds more than one layer's. For
32 layers made at once a forward has 6 more operations than without factors, one by one 544 more."""

FIXED = {"default", "linear", "yarn", "llama3", "proportional"}
"""transformers' kinds of rotary embeddings whose frequencies do not depend on the length of a prompt."""

METHOD = "_peer_method"
"""The attribute by which another method (``lpes_eval.methods``) marks a module of the model that it is in: its name."""

logger = logging.getLogger(__name__)
_ATTRIBUTE = "_layer_factors"
_compiling = torch.compiler.is_compiling


def apply(
    model: nn.Module, factors: Factors | Sequence[float] | np.ndarray | float | str | Path | Tensor | None = None
) -> None:
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

    Keys in a cache are already rotated. A cache that was filled under other factors, or under none, is refused
    (``CacheError``), and so is a cache filled under factors by a model that has none: answers from two kinds of angles
    would be wrong without a sign of it. Under ``torch.compile`` three cases go unseen: a static cache, whose length
    compiled code does not know; factors that are a tensor and change their values; and a cache that only compiled
    forwards have filled, in a model without factors. Nor are the blocks of a continuous batching that runs while
    factors change (``init_continuous_batching``): stop it first.
    """
    decoder = find_decoder(model)
    if (method := method_in(model)) is not None:
        raise UserError(f"the model has {method} in it, which rotates queries and keys its own way; detach it first")
    tensor = factors if isinstance(factors, Tensor) else None
    if tensor is not None and tensor.dim() != 1:
        raise FactorsError(f"factors: a tensor of shape {tuple(tensor.shape)}; expected one number a layer")
    own = carried(model.config) if factors is None else None
    if factors is None and own is None:
        raise FactorsError("factors: none were given, and the model's config.json carries none; give a factors file")
    parsed = own or parse(factors)
    try:
        values = tuple(parsed.per_layer(len(decoder.layers)))
    except FactorsError as error:
        raise FactorsError(f"{factors}: {error}" if isinstance(factors, str | Path) else str(error)) from None
    warn_of_other_weights(model, parsed)
    remove(model)
    carry(model.config, own)
    if torch._dynamo.config.skip_nnmodule_hook_guards:
        # By default torch.compile does not look whether a model has got hooks since, and would go on without factors.
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch._dynamo.reset()
    decoder.module.__dict__[_ATTRIBUTE] = _LayerFactors(decoder, values, tensor, parsed.origin)


def remove(model: nn.Module) -> None:
    """Undo ``apply`` exactly: no hook, attribute or changed number is left, nor what the model's folder carried.

    Without applied factors, do nothing, but for what continuous batching has kept (``persistent_manager=True``), which
    goes in any case: a new batch would share its blocks of keys, and those are rotated already.
    """
    if (destroy := getattr(model, "destroy_cached_continuous_batching_manager", None)) is not None:
        destroy()
    for module in model.modules():
        if (layer_factors := module.__dict__.pop(_ATTRIBUTE, None)) is not None:
            for handle in layer_factors.handles:
                handle.remove()
            carry(getattr(model, "config", None), None)


def applied(model: nn.Module) -> list[float] | None:
    """The factors now in force, one a layer, or None."""
    return list(found.factors) if (found := _found(_ATTRIBUTE, model)) is not None else None


def in_force(model: nn.Module) -> Factors | None:
    """The factors now in force with their origin, or None."""
    found = _found(_ATTRIBUTE, model)
    return Factors(factors=found.factors, origin=found.origin) if found is not None else None


def method_in(model: nn.Module) -> str | None:
    """The name of the other method (``lpes_eval.methods``) that is in the model, or None."""
    return _found(METHOD, model)


def _found(attribute: str, model: nn.Module) -> Any:
    return next((vars(module)[attribute] for module in model.modules() if attribute in vars(module)), None)


class _LayerFactors:
    """One set of factors in one decoder: its hooks, and the stamp of caches filled under it.

    It refers to no module, and its hooks are methods and partial functions, not closures. So a copied or saved model,
    or a copy of one layer, takes along what is its own. ``tensor`` holds factors that may change and have gradients.
    """

    def __init__(
        self, decoder: Decoder, values: tuple[float, ...], tensor: Tensor | None, origin: Mapping[str, Any]
    ) -> None:
        self._values, self._tensor, self.origin = values, tensor, origin
        self._divisors = torch.tensor((1.0, *values), dtype=torch.float32)
        self._owners = decoder.factor_layer
        self._stamp = Stamp(values if tensor is None else None)
        self.handles = [
            decoder.module.register_forward_pre_hook(self._check_cache, with_kwargs=True),
            decoder.module.register_forward_hook(self._note_cache, with_kwargs=True),
            decoder.module.register_state_dict_pre_hook(self._warn_of_loss),
        ]
        if tensor is None and set(values) == {1.0}:
            return
        rotaries: list[tuple[nn.Module, int | None]] = [(rotary, None) for rotary in decoder.rotaries]
        rotaries += [(rotary, h) for h, found in decoder.own.items() for rotary in found]
        for rotary, h in rotaries:
            ask, answer = functools.partial(self._ask, h=h), functools.partial(self._answer, h=h)
            self.handles.append(rotary.register_forward_pre_hook(ask, with_kwargs=True))
            self.handles.append(rotary.register_forward_hook(answer, with_kwargs=True))
        for h, layer in enumerate(decoder.layers):
            take = functools.partial(_take_own_table, h)
            self.handles.append(layer.register_forward_pre_hook(take, with_kwargs=True))

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors as they are now, one a layer."""
        return self._values if self._tensor is None else tuple(self._tensor.tolist())

    def _warn_of_loss(self, decoder: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Say that weights are saved without these factors, unless the model's configuration carries them."""
        kept = carried(decoder.config) if hasattr(decoder, "config") else None
        if kept is None or tuple(kept.per_layer(len(self.factors))) != self.factors:
            logger.warning("layer factors are no weights, so they are not saved with these; lpes_eval.save keeps them")

    def _ask(self, rotary: nn.Module, args: tuple, kwargs: dict, h: int | None = None) -> tuple[tuple, dict] | None:
        """The call of a rotary module with the divided positions in it, where one call can make all tables."""
        if self._tensor is not None or not _simple(rotary):
            return None
        call = named(args, kwargs)
        divisors = self._divisors_on(call["x"].device, h)
        if _too_long(call, divisors):
            return None
        return (), _at(divided(call["position_ids"], divisors), call)

    def _answer(self, rotary: nn.Module, args: tuple, kwargs: dict, output: Any, h: int | None = None) -> Any:
        """What a rotary module answers in place of its ``output``: all layers' tables, or that of its layer ``h``.

        The true positions are always among those that it is asked for, as some code looks for the longest (Phi-MoE).
        """
        call = named(args, kwargs)
        device = call["x"].device
        divisors = self._divisors_on(device, h)
        if call["x"].shape == (0,):  # ``_ask`` has put the divided positions in
            tables = _split(output, len(divisors))
        elif h is None and (self._tensor is not None or _too_long(call, divisors)):
            return _Tables(lambda h: _tables(rotary, call, self._divisors_on(device, h))[1])
        else:
            tables = _tables(rotary, call, divisors)
        return tables[1] if h is not None else _Tables(lambda h: tables[1 + self._owners[h]])

    def _divisors_on(self, device: torch.device, h: int | None) -> Tensor:
        """1 and the factors, (1 + layers,), or that of layer ``h``, (2,).

        They are kept on the device that was asked for last, as a GPU waits for a copy.
        """
        if self._tensor is not None:
            factors = self._tensor.to(device, torch.float32)
            divisors = torch.cat((factors.new_ones(1), factors))
        else:
            if self._divisors.device != device:
                self._divisors = self._divisors.to(device)
            divisors = self._divisors
        return divisors if h is None else torch.stack((divisors[0], divisors[1 + self._owners[h]]))

    def _check_cache(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        """Refuse a cache that was filled under other factors, as far as can be told; else stamp it and open it."""
        caches = [one for one in (*args, *kwargs.values()) if isinstance(one, Cache)]  # torch 2.7 compiles no next
        if not caches:
            return
        cache = caches[0]
        stamp = getattr(cache, STAMP, None)
        unknown = self._tensor is not None and _compiling()  # compiled code does not know a tensor's values
        same = stamp is self._stamp or (stamp is not None and (unknown or stamp.factors == self.factors))
        if not same and (held := held_in(cache)) > 0:
            raise CacheError(
                f"the key-value cache holds {held} positions whose keys were not rotated under the layer factors "
                "now in force; start with an empty cache"
            )
        self._mark(cache)
        setattr(cache, OPEN, True)

    def _note_cache(self, decoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Close the caches that a forward was given, and stamp one that it has made."""
        for cache in (*args, *kwargs.values()):
            if isinstance(cache, Cache):
                setattr(cache, OPEN, False)
        for cache in output if isinstance(output, tuple) else (cache_of(output),):
            if isinstance(cache, Cache):
                self._mark(cache)

    def _mark(self, cache: Cache) -> None:
        stamp = self._stamp if self._tensor is None or _compiling() else Stamp(self.factors)
        stamp.put(cache)


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


def _take_own_table(h: int, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of layer ``h`` with its own tables in them."""
    return _own(args, h), _own(kwargs, h)


def _own(value: Any, h: int) -> Any:
    """The table of layer ``h`` in place of all layers', also in a tuple or a dict; any other value as it is."""
    if type(value) is _Tables:
        return value.of(h)
    if type(value) is tuple and any(type(v) is _Tables for v in value):
        return tuple(_own(v, h) for v in value)
    if type(value) is dict:
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
    return inspect.unwrap(type(rotary).forward)(rotary, **_at(position_ids, call))


def _too_long(call: dict[str, Any], divisors: Tensor) -> bool:
    return len(divisors) * call["position_ids"].numel() > BATCHED_LIMIT


def _at(position_ids: Tensor, call: dict[str, Any]) -> dict[str, Any]:
    """The ``call`` of a rotary module at other positions; its ``x`` is empty then, as no other call's."""
    return call | {"x": call["x"].new_empty(0), "position_ids": position_ids}


def _tables(rotary: nn.Module, call: dict[str, Any], divisors: Tensor) -> list[Any]:
    """A rotary module's table at positions divided by each of the divisors: tensors (B, T, d), one or a tuple."""
    return _split(ask(rotary, call, divided(call["position_ids"], divisors)), len(divisors))


def _split(output: Any, number: int) -> list[Any]:
    """The tables of so many divisors, which a rotary module has made at once."""
    if isinstance(output, tuple):
        return list(zip(*(part.chunk(number) for part in output), strict=True))
    return list(output.chunk(number))


def _simple(rotary: nn.Module) -> bool:
    """Whether a rotary module has the same frequencies at all lengths, and nobody else's hooks and no other forward."""
    if len(rotary._forward_pre_hooks) + len(rotary._forward_hooks) > 2 or "forward" in rotary.__dict__:
        return False
    kinds = getattr(rotary, "rope_type", None)
    return {*(kinds.values() if isinstance(kinds, dict) else [kinds])} <= FIXED


# -- caches: keys in them are rotated already ------------------------------------------------------------------------

STAMP = "_rotated_by"
"""The attribute of a cache that holds its stamp."""
OPEN = "_rotating"
"""The attribute of a cache that says whether a forward under its stamp's factors fills it; each thread has its own."""


@dataclass(eq=False)
class Stamp:
    """On a cache and its copies: what has rotated its keys.

    Each application of factors, and each method, has its own, so compiled code need only ask whether it is the same.
    """

    factors: tuple[float, ...] | None = None
    """One a layer; None for those of a method, and for those of a tensor in compiled code."""
    rotated: str = "under layer factors, which this model has not"
    """How, in words."""
    open: bool = False
    """Whether a forward of the method is under way (for factors, the cache says so itself). At any other time the cache
    takes no keys."""

    def put(self, cache: Cache) -> None:
        """Stamp a cache; in compiled code an attribute is all that can be left."""
        setattr(cache, STAMP, self)
        if not _compiling():
            cache.update = _Update(cache)  # type: ignore[method-assign]

    def __deepcopy__(self, memo: dict[int, Any]) -> Stamp:  # noqa: D105
        return self


class _Update:
    """``Cache.update`` of a cache with a stamp: refused but in a forward that rotates as it says.

    It refers to the cache weakly. In a circle, keys and values would stay until Python looks for garbage.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = weakref.ref(cache)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the cache has its own
        return _Update, (self._cache(),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache: Any = self._cache()
        stamp = getattr(cache, STAMP)
        if not (stamp.open or getattr(cache, OPEN, False)):
            if (held := held_in(cache)) > 0:
                raise CacheError(
                    f"the key-value cache holds {held} positions whose keys were rotated {stamp.rotated}; start with "
                    "an empty cache"
                )
            del cache.update
            delattr(cache, STAMP)
        return type(cache).update(cache, *args, **kwargs)


def cache_of(output: Any) -> Any:
    """The key-value cache in a model's output; transformers 5.24 calls it ``cache``, versions before otherwise."""
    return getattr(output, "cache" if hasattr(output, "cache") else "past_key_values", None)


def with_cache(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The argument that hands a model its cache, under the name that its ``forward`` has for it."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def held_in(cache: Cache) -> int:
    """How many positions a cache holds: the most of any layer, for the first may hold none (MiniMax).

    Compiled code does not know how many a static cache holds, and takes it for empty.
    """
    length = cache.get_seq_length()
    if isinstance(length, Tensor):
        return 0 if _compiling() else int(length)
    layers = getattr(cache, "layers", ())
    return max(length, *(int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length")), 0)
