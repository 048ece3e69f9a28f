"""Layer factors inside a transformers model: layer h rotates queries and keys at position ``i / s_h`` (Eq. 2).

transformers computes one rotary table a forward and hands it to all layers. With factors applied, the rotary module
computes the tables of all *distinct* factors in one batched call of the model's own code, and each decoder layer first
picks its own. The model's own frequencies (default, linear, dynamic NTK, yarn, llama3, longrope; one set for each kind
of attention where there are several), its attention scaling and its layout stay as they are, because its own code
computes them; only the positions that go in are divided. Weights are not touched.

    >>> apply(model, [1.0, 1.2, 1.5, 1.3])
    >>> model.generate(**inputs)
    >>> remove(model)
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lpes_eval.errors import CacheError, FactorsError, UnsupportedModel, UserError
from lpes_eval.factors import Factors, parse

BATCHED_LIMIT = 1 << 22
"""Tables of all factors are computed at once up to this many elements (16 MiB of float32 angles); beyond it each layer
computes its own when its turn comes, so that a very long prompt never holds more than one layer's table."""

METHOD = "_peer_method"
"""The attribute by which a peer method (``lpes_eval.peers``) marks a module of the model that it is in: its name."""

_ATTRIBUTE = "_layer_rope"
_COPIES = "_layer_rope_copies"
_RETIRED = "_retired_because_rotated"
_POSITION_EMBEDDINGS = "position_embeddings"
_REPLICATE = "_replicate_for_data_parallel"


def apply(model: nn.Module, factors: Factors | Sequence[float] | np.ndarray | float | str | Path | Tensor) -> None:
    """Give every decoder layer of ``model`` its own factor, in place of any factors applied before.

    Args:
        model: a transformers causal language model with rotary position embeddings, on any device or several, in any
            dtype and with any attention implementation; also one wrapped by PEFT, except for prefix tuning.
        factors: one number a layer, from 0.001 to 1,000,000; or a factors object or file, or one number for all
            layers; or a float tensor of shape (layers,), through which gradients flow and whose values count at each
            forward. Only those that it has now are checked: whoever changes them keeps them in that range. Gradient
            checkpointing must then be non-reentrant (``use_reentrant=False``): the other kind goes backward once a
            layer, the second time through a graph that the first has freed.

    Raises:
        FactorsError: factors that cannot be read, or for another number of layers.
        UnsupportedModel: a model whose layers cannot be given factors; the message says why.
        UserError: a peer method (``lpes_eval.peers``) is in the model.

    A deep copy of the model, or one that was saved whole and loaded, has the same factors, on its own.

    Keys in a cache are already rotated. A cache that was filled before this call is refused when it is next used
    (``CacheError``): answers from half-old, half-new angles would be wrong without a sign of it. Under
    ``torch.compile`` three cases go unseen: a static cache, whose length compiled code does not know; factors that are
    a tensor and change their values; and, after ``remove``, a cache that only compiled forwards have filled.
    """
    decoder = find_decoder(model)
    if (method := method_in(model)) is not None:
        raise UserError(f"the model has {method} in it, which rotates queries and keys its own way; detach it first")
    live = factors if isinstance(factors, Tensor) else None
    if live is not None and live.dim() != 1:
        raise FactorsError(f"factors: a tensor of shape {tuple(live.shape)}; expected one number a layer")
    parsed = parse(factors if live is None else live.tolist())
    try:
        values = tuple(parsed.per_layer(len(decoder.layers)))
    except FactorsError as error:
        raise FactorsError(f"{factors}: {error}" if isinstance(factors, str | Path) else str(error)) from None
    previous = decoder.module.__dict__.get(_ATTRIBUTE)
    if previous is not None:
        if previous.factors == values and previous.live is live:
            return
        previous.detach(decoder.module)
    decoder.module.__dict__[_ATTRIBUTE] = _LayerRope(decoder, values, live)


def remove(model: nn.Module) -> None:
    """Undo ``apply`` exactly: no hook, attribute or changed number is left. Without applied factors, do nothing."""
    for module in model.modules():
        if (rope := module.__dict__.get(_ATTRIBUTE)) is not None:
            rope.detach(module)
            del module.__dict__[_ATTRIBUTE]


def applied(model: nn.Module) -> list[float] | None:
    """The factors now in force, one a layer, or None."""
    for module in model.modules():
        if (rope := module.__dict__.get(_ATTRIBUTE)) is not None:
            return list(rope.factors)
    return None


def method_in(model: nn.Module) -> str | None:
    """The name of the peer method (``lpes_eval.peers``) that is in the model, or None."""
    return next((module.__dict__[METHOD] for module in model.modules() if METHOD in module.__dict__), None)


# -- finding the places ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """The parts of a model that factors concern.

    Attributes:
        module: the module whose forward runs through the layers.
        layers: its decoder layers, in order.
        rotaries: the rotary modules whose output is handed down to all layers.
        own: the layers' own rotary modules, where they have them: layer number -> modules.
        rotates_as: for each layer the one whose factor it uses: itself, except where a layer attends to keys that an
            earlier layer has rotated (Gemma 3n, Gemma 4, Mistral Large 4). Its queries must then be rotated like them.
    """

    module: nn.Module
    layers: tuple[nn.Module, ...]
    rotaries: tuple[nn.Module, ...]
    own: dict[int, tuple[nn.Module, ...]]
    rotates_as: tuple[int, ...]


def find_decoder(model: nn.Module) -> Decoder:
    """Find the decoder layers and rotary modules of ``model``, or raise ``UnsupportedModel`` with the reason."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)

    def refuse(reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{kind}: {reason}; layer factors scale rotary position embeddings (docs/support.md)")

    if config is None or not hasattr(config, "get_text_config"):
        raise refuse("not a transformers model (it has no config)")
    if config.is_encoder_decoder:
        raise refuse("an encoder-decoder model, not a causal language model")
    if kind in REFUSED:
        raise refuse(REFUSED[kind])
    adapter = getattr(getattr(model, "active_peft_config", None), "peft_type", None)
    if adapter in _LEARNT_KEYS:
        raise refuse(f"its PEFT adapter ({_LEARNT_KEYS[adapter]}) adds learnt keys, which no layer has rotated")
    text = config.get_text_config(decoder=True)
    if getattr(text, "alibi", False):
        raise refuse("this configuration uses ALiBi instead of rotary position embeddings")
    depths = {getattr(text, "num_hidden_layers", None), getattr(text, "num_layers", None)}
    get_decoder: Any = getattr(model, "get_decoder", lambda: None)
    decoder = get_decoder()  # not the vision tower
    stacks = (decoder is not None and _stacks(decoder, depths)) or _stacks(model, depths)
    if not stacks:
        raise refuse("no decoder layers with rotary position embeddings were found in it")
    owner, layers = min(stacks, key=lambda stack: sum(1 for _ in stack[0].modules()))  # the innermost
    if len(set(layers)) != len(layers):
        raise refuse("it runs the same layer at several depths, so a layer has no depth of its own")

    inside: dict[int, tuple[nn.Module, ...]] = {h: tuple(_rotaries(layer)) for h, layer in enumerate(layers)}
    inside = {h: found for h, found in inside.items() if found}
    nested = {id(module) for found in inside.values() for module in found}
    shared = tuple(module for module in _rotaries(owner) if id(module) not in nested)
    if shared and not any(_takes_position_embeddings(layer) for layer in layers):
        raise refuse("its layers compute their rotation from something other than handed-down position embeddings")
    owners = _key_owners(text, len(layers))
    if any(owners[h] == h and _takes_keys(layer) for h, layer in enumerate(layers)):
        raise refuse("some of its layers attend to keys of earlier layers, and its configuration does not say of which")
    return Decoder(owner, tuple(layers), shared, inside, owners)


_WHOLE_POSITIONS = "each attention looks its rotation up in a table of whole positions"
REFUSED: dict[str, str] = {
    "blt": "four transformers (bytes in, patches, bytes out, patcher), so no single stack of layers",
    "codegen": _WHOLE_POSITIONS,
    "gptj": _WHOLE_POSITIONS,
    "roformer": "it rotates by a table of whole positions that is made once for all layers",
    "gemma4_assistant": "it attends to another model's keys, which that model has rotated",
    "gemma4_unified_assistant": "it attends to another model's keys, which that model has rotated",
    "hrm_text": "it runs two stacks of layers several times a forward, so a layer has no depth of its own",
}
"""Model types that have the parts and still cannot be given layer factors: type -> reason."""

_LEARNT_KEYS = {"PREFIX_TUNING": "prefix tuning", "CARTRIDGE": "cartridge"}
"""PEFT's adapters that fill the cache before the model does: type -> name."""


def _key_owners(config: Any, depth: int) -> tuple[int, ...]:
    """For each layer the layer that rotated the keys it attends to, as far as the configuration says."""
    if (sources := getattr(config, "kv_source_layers", None)) is not None:  # Mistral Large 4
        return tuple(sources)
    first_shared = depth - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = getattr(config, "layer_types", None) or [None] * depth
    own = list(range(first_shared))
    return (*own, *(max(k for k in own if kinds[k] == kinds[h]) for h in range(first_shared, depth)))


def _takes_keys(layer: nn.Module) -> bool:
    """Whether a layer attends to keys that it is handed; where its modules do not say, whether it could."""
    known = [module.is_kv_shared_layer for module in layer.modules() if hasattr(module, "is_kv_shared_layer")]
    return any(known) if known else any(_takes(module, "shared_kv_states") for module in layer.modules())


def _stacks(root: nn.Module, depths: set[int | None]) -> list[tuple[nn.Module, nn.ModuleList]]:
    """Lists of layers as deep as the model, each with the module that holds it, where something in it rotates."""
    return [
        (owner, child)
        for owner in root.modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList) and len(child) in depths and _rotaries(owner)
    ]


def _rotaries(module: nn.Module) -> list[nn.Module]:
    """The modules within that turn position ids into rotary tables."""
    return [m for m in module.modules() if "Rotary" in type(m).__name__ and _takes(m, "position_ids")]


def _takes(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(type(module).forward).parameters


def _takes_position_embeddings(layer: nn.Module) -> bool:
    parameters = inspect.signature(type(layer).forward).parameters
    return _POSITION_EMBEDDINGS in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


# -- the factors in force --------------------------------------------------------------------------------------------


class _LayerRope:
    """One set of factors in one decoder.

    What it puts into the modules are objects, methods and partial functions, never closures: a deep copy or a pickle
    of the model takes them along, each with its own module. It refers to no module itself, so that a copy of one layer
    is a copy of one layer.
    """

    def __init__(self, decoder: Decoder, factors: tuple[float, ...], live: Tensor | None = None) -> None:
        self.live = live
        self._factors = factors
        self.slots: list[int | None]
        if live is None:
            # Layers with equal factors share a table; a layer with factor 1 uses the model's own, untouched.
            self.distinct = sorted(set(factors) - {1.0})
            used = [factors[h] for h in decoder.rotates_as]
            self.slots = [self.distinct.index(s) if s != 1.0 else None for s in used]
        else:  # its numbers may change, so every layer has a table of its own
            self.distinct = list(factors)
            self.slots = list(decoder.rotates_as)
        self.some_plain = None in self.slots
        self.detached = False
        self._handles: list[Any] = []
        self.stamp = _Stamp(factors if live is None else None)
        self._begin()
        if "forward" in decoder.module.__dict__:
            self._handles.append(decoder.module.register_forward_pre_hook(self.check_cache, with_kwargs=True))
            self._handles.append(decoder.module.register_forward_hook(self.note_cache))
        else:
            _DecoderForward(decoder.module, self).put()
        if not self.distinct:
            return
        for rotary in decoder.rotaries:
            if _keeps_its_frequencies(rotary):
                _RotaryForward(rotary, self).put()
            else:
                self._answer_for(rotary, None)
        for h, layer in enumerate(decoder.layers if decoder.rotaries else ()):
            if "forward" in layer.__dict__:
                hook = functools.partial(_pick, h)
                self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                _LayerForward(layer, h).put()
        for h, rotaries in decoder.own.items():
            if self.slots[h] is not None:
                for rotary in rotaries:
                    self._answer_for(rotary, h)

    def _begin(self) -> None:
        """What belongs to one model and is not copied with it."""
        self.caches: WeakSet[Cache] = WeakSet()
        self._latest: Callable[[], Cache | None] = lambda: None  # the one that most calls come with
        self._divisors: dict[torch.device, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("caches", "_latest", "_divisors")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors in force now, one a layer."""
        return self._factors if self.live is None else tuple(self.live.tolist())

    def detach(self, root: nn.Module) -> None:
        """Take it out of the decoder ``root``."""
        self.detached = True
        for handle in self._handles:
            handle.remove()
        for module in root.modules():
            if (forward := _ours(module)) is not None:  # else somebody has wrapped it, and it only passes on
                forward.take_back()
        for cache in list(self.caches):
            for name in (_ATTRIBUTE, _COPIES):
                cache.__dict__.pop(name, None)
            retire(cache, "under layer factors that were changed or removed since")
        self.caches.clear()
        self._latest = lambda: None

    # -- rotary tables

    def _answer_for(self, rotary: nn.Module, h: int | None) -> None:
        hook = functools.partial(self._answer, h, _Code(type(rotary)))
        self._handles.append(rotary.register_forward_hook(hook, with_kwargs=True))

    def _answer(self, h: int | None, code: _Code, rotary: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """A rotary module's answer: the tables of all layers, or those of layer ``h`` alone."""
        tables = _Tables(self, rotary, code, code.named(args, kwargs), output)
        return tables if h is None else tables.of(h)

    def divisors(self, device: torch.device) -> Tensor:
        """The distinct factors on ``device``, shaped to divide positions: (U, 1)."""
        if self.live is not None:
            return self.live.to(device, torch.float32)[:, None]
        if device not in self._divisors:
            self._divisors[device] = torch.tensor(self.distinct, dtype=torch.float32, device=device)[:, None]
        return self._divisors[device]

    # -- caches: keys in them are rotated already

    def check_cache(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Refuse a cache that was filled under other factors. As the arguments of a hook before the forward."""
        if self.detached:
            return
        cache = kwargs.get("past_key_values") if not args else _cache_in((*args, *kwargs.values()))
        if not isinstance(cache, Cache):
            return
        compiling = torch.compiler.is_compiling()
        if self.live is None and not compiling and (cache is self._latest() or cache in self.caches):
            return
        if not self._knows(getattr(cache, _ATTRIBUTE, None)) and (held := held_in(cache)) > 0:
            raise CacheError(
                f"the key-value cache holds {held} positions whose keys were not rotated under the layer factors now "
                "in force; start with an empty cache"
            )
        self.own(cache)

    def note_cache(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Remember the cache that a forward returns. As the arguments of a hook after the forward."""
        if self.detached:
            return
        cache = _cache_in(output) if isinstance(output, tuple) else getattr(output, "past_key_values", None)
        if not isinstance(cache, Cache):
            return
        if torch.compiler.is_compiling() or (cache is not self._latest() and cache not in self.caches):
            self.own(cache)

    def _knows(self, stamp: _Stamp | None) -> bool:
        """Whether a cache with this stamp on it was filled under the factors now in force, as far as can be told."""
        if stamp is None or stamp is self.stamp:
            return stamp is not None
        if self.live is not None and torch.compiler.is_compiling():  # a tensor's values are not known there
            return True
        return stamp.factors == self.factors

    def own(self, cache: Cache) -> None:
        """Note that the cache's keys are rotated under these factors."""
        if torch.compiler.is_compiling():  # an attribute is all that compiled code can leave
            if getattr(cache, _ATTRIBUTE, None) is not self.stamp:
                setattr(cache, _ATTRIBUTE, self.stamp)
            return
        cache.__dict__[_ATTRIBUTE] = self.stamp if self.live is None else _Stamp(self.factors)
        cache.__dict__[_COPIES] = _Copies(self, cache)
        self.caches.add(cache)
        self._latest = weakref.ref(cache)


def _cache_in(values: tuple) -> Cache | None:
    return next((value for value in values if isinstance(value, Cache)), None)


def held_in(cache: Cache) -> int:
    """How many positions a cache holds: the most that any of its layers does, for the first may hold none (MiniMax).

    The length of a static cache is not known in compiled code, and counts as none.
    """
    length = cache.get_seq_length()
    if isinstance(length, Tensor):
        return 0 if torch.compiler.is_compiling() else int(length)
    layers = getattr(cache, "layers", ())
    return max(length, *(int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length")), 0)


class _Stamp:
    """On a cache: the factors that its keys are rotated under; None for a tensor's, whose values compiled code lacks.

    Each application of factors has one stamp of its own. Compiled code asks whether it is the same object, so that
    other factors compile nothing anew.
    """

    def __init__(self, factors: tuple[float, ...] | None) -> None:
        self.factors = factors

    def __deepcopy__(self, memo: dict[int, Any]) -> _Stamp:
        return self


class _Copies:
    """On a cache: makes a copy of it known to the same model."""

    def __init__(self, rope: _LayerRope | None = None, cache: Cache | None = None) -> None:
        self._rope = weakref.ref(rope) if rope is not None else lambda: None
        self._cache = weakref.ref(cache) if cache is not None else lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copies:
        rope, copied = self._rope(), memo.get(id(self._cache()))
        if rope is None or not isinstance(copied, Cache):
            return _Copies()
        rope.caches.add(copied)
        return _Copies(rope, copied)

    def __reduce__(self) -> tuple:
        return _Copies, ()


# -- in place of a module's forward ----------------------------------------------------------------------------------


class _Forward:
    """What stands in for a module's forward.

    PyTorch calls a module with hooks a longer way, which a small model's decoding step feels (1 to 3 % of it). So they
    are hooks only where the module's forward is somebody else's already, who may put back what was there.
    """

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def call(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def put(self) -> None:
        """Put it there: a method, which torch.compile does not tell from that of other factors; with the signature."""
        own: Any = type(self).call
        function: Any = FunctionType(own.__code__, own.__globals__, own.__name__, None, own.__closure__)
        function.__wrapped__ = type(self.module).forward
        self.module.__dict__["forward"] = MethodType(function, self)
        self.module.__dict__[_REPLICATE] = self.replicate

    def take_back(self) -> None:
        for name in ("forward", _REPLICATE):
            self.module.__dict__.pop(name, None)

    def on(self, module: nn.Module) -> _Forward:
        """The same for another module."""
        raise NotImplementedError

    def replicate(self) -> nn.Module:
        """The module's replica on another device, as ``DataParallel`` asks for it, with its own forward."""
        replica = type(self.module)._replicate_for_data_parallel(self.module)
        if _ours(replica) is self:
            self.on(replica).put()
        return replica


def _ours(module: nn.Module) -> _Forward | None:
    """What stands in for the module's forward, where nobody else has put something there."""
    forward = getattr(module.__dict__.get("forward"), "__self__", None)
    return forward if isinstance(forward, _Forward) else None


class _DecoderForward(_Forward):
    """The decoder's: caches are looked at before and after."""

    __slots__ = ("rope",)

    def __init__(self, module: nn.Module, rope: _LayerRope) -> None:
        super().__init__(module)
        self.rope = rope

    def on(self, module: nn.Module) -> _Forward:
        return _DecoderForward(module, self.rope)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.rope.check_cache(self.module, args, kwargs)
        output = type(self.module).forward(self.module, *args, **kwargs)
        self.rope.note_cache(self.module, args, output)
        return output


class _LayerForward(_Forward):
    """Layer ``h``'s: it picks its own table."""

    __slots__ = ("h",)

    def __init__(self, module: nn.Module, h: int) -> None:
        super().__init__(module)
        self.h = h

    def on(self, module: nn.Module) -> _Forward:
        return _LayerForward(module, self.h)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _pick(self.h, self.module, args, kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


class _RotaryForward(_Forward):
    """A rotary module's: it makes all layers' tables at once, in place of the model's own that no layer may need.

    In decoding, where a table is one row, the calls are the cost; this way there are as many as without factors, or
    none where tables are kept.
    """

    __slots__ = ("code", "kept", "rope", "width")

    def __init__(self, module: Any, rope: _LayerRope) -> None:
        super().__init__(module)
        self.rope = rope
        self.code = _Code(type(module))
        self.width = module.inv_freq.numel()  # of a table's row, before its halves are joined
        self.kept = _Kept(self)

    def on(self, module: nn.Module) -> _Forward:
        return _RotaryForward(module, self.rope)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self.rope.detached:
            return self.own(*args, **kwargs)
        return _Tables(self.rope, self.module, self.code, self.code.named(args, kwargs), None, self)

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own table."""
        return type(self.module).forward(self.module, *args, **kwargs)


def _pick(h: int, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of layer ``h`` with its own tables in them."""
    tables = kwargs.get(_POSITION_EMBEDDINGS)
    if type(tables) is _Tables and len(args) == 1:  # as most families call their layers: (hidden_states, ...)
        kwargs[_POSITION_EMBEDDINGS] = tables.of(h)
        return args, kwargs
    return tuple(_resolve(a, h) for a in args), {name: _resolve(a, h) for name, a in kwargs.items()}


# -- tables ----------------------------------------------------------------------------------------------------------


_LENGTH_AWARE = {"PhimoeRotaryEmbedding"}
"""Rotary modules whose undecorated forward looks at the longest position: it is shown the true ones as well."""


def _keeps_its_frequencies(rotary: Any) -> bool:
    """Whether a rotary module answers for any length from the same frequencies, and nobody has changed its forward."""
    lasting = getattr(rotary, "rope_type", None) in ("default", "linear", "llama3", "yarn")
    return lasting and torch.is_tensor(getattr(rotary, "inv_freq", None)) and "forward" not in rotary.__dict__


class _Code:
    """A rotary class's own forward without what transformers wraps around it; a copy looks it up in the class."""

    __slots__ = ("forward", "kind", "names")

    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind = kind
        self.forward, self.names = own_forward(kind)

    def __reduce__(self) -> tuple:
        return _Code, (self.kind,)

    def named(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """A call's arguments by name."""
        return dict(zip(self.names, args, strict=False)) | kwargs


def own_forward(rotary: type[nn.Module]) -> tuple[Callable, tuple[str, ...]]:
    """A rotary class's own forward without what transformers wraps around it, and the names of its arguments."""
    forward = inspect.unwrap(rotary.forward)
    return forward, tuple(inspect.signature(forward).parameters)[1:]


def _compute(rotary: nn.Module, forward: Callable, call: dict[str, Any], divisors: Tensor, number: int) -> list:
    """One table for each of the ``number`` of divisors (U, 1), from one call of the model's own code.

    The undecorated forward is called: the dynamic kinds have by now chosen their frequencies by the true length, and
    must not choose again by the divided one.
    """
    ids: Tensor = call["position_ids"]  # (B, T), or (3, B, T) where positions have several axes
    shape = ids.shape
    if len(shape) == 2 and shape[0] == 1:
        scaled = ids / divisors  # (U, T), float32
    else:
        scaled = (ids.unsqueeze(-3) / divisors[:, None]).flatten(-3, -2)  # (..., U * B, T)
    if length_aware := type(rotary).__name__ in _LENGTH_AWARE:
        scaled = torch.cat((ids.float(), scaled), dim=-2)
    out = forward(rotary, **(call | {"position_ids": scaled}))
    if length_aware:
        out = tuple(t[shape[-2] :] for t in out)
    if isinstance(out, tuple):
        return list(zip(*(t.chunk(number) for t in out), strict=True))
    return list(out.chunk(number))


class _Kept:
    """All factors' tables of the first positions, made once: from then on a row is looked up, not computed.

    For one sequence of consecutive positions on the CPU. There it saves a small model more time than the factors cost;
    elsewhere, to look at the positions would be to wait for the device. They are made anew when the model's dtype, its
    frequencies or its attention scaling is another, also where those were changed in place.
    """

    def __init__(self, source: _RotaryForward) -> None:
        self._source = source
        self._never = False  # this family's tables are none of cosines and sines
        self._dtype: torch.dtype | None = None  # that was asked for, whatever the family answers
        self._scaling: Any = None
        self._frequencies = torch.empty(0)
        self._positions = torch.empty(0, dtype=torch.long)
        self._tables = torch.empty(0)  # (2U, N, d): U tables of cosines, then U of sines

    def __getstate__(self) -> _RotaryForward:
        return self._source  # a copy makes its own tables

    def __setstate__(self, source: _RotaryForward) -> None:
        _Kept.__init__(self, source)

    def tables(self, call: dict[str, Any]) -> list | None:
        """What ``_compute`` gives for this call, bit for bit, or None where it has to be computed."""
        rope = self._source.rope
        ids, number = call["position_ids"], len(rope.distinct)
        if self._never or len(call) != 2 or ids.device.type != "cpu" or rope.live is not None:
            return None
        shape = ids.shape
        if torch.compiler.is_compiling() or len(shape) != 2 or shape[0] != 1 or not shape[1] or ids.dtype != torch.long:
            return None
        length = shape[1]
        first = ids.item() if length == 1 else ids[0, 0].item()
        end = first + length
        dtype = call["x"].dtype
        if first < 0 or ((end > len(self._positions) or self._outdated(dtype)) and not self._make(dtype, end, number)):
            return None
        if length > 1 and not torch.equal(ids[0], self._positions[first:end]):
            return None
        rows = self._tables.narrow(1, first, length).chunk(2 * number)
        return list(zip(rows[:number], rows[number:], strict=True))

    def _outdated(self, dtype: torch.dtype) -> bool:
        """Whether what the tables were made of is no longer so. Numbers are compared: a tensor may change in place."""
        rotary: Any = self._source.module
        if dtype is not self._dtype or getattr(rotary, "attention_scaling", None) != self._scaling:
            return True
        now, then = rotary.inv_freq, self._frequencies
        return now.dtype is not then.dtype or now.device.type != "cpu" or not torch.equal(now, then)

    def _make(self, dtype: torch.dtype, end: int, number: int) -> bool:
        source = self._source
        rotary: Any = source.module
        end = max(256, 1 << (end - 1).bit_length())
        if 2 * number * end * 2 * source.width > BATCHED_LIMIT:
            return False
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.arange(end)
            call = {"x": torch.empty(1, dtype=dtype), "position_ids": positions[None]}
            tables = _compute(rotary, source.code.forward, call, source.rope.divisors(positions.device), number)
            if not isinstance(tables[0], tuple):
                self._never = True
                return False
            self._tables = torch.cat([part for kind in zip(*tables, strict=True) for part in kind])
            self._frequencies = rotary.inv_freq.detach().clone()
        self._positions, self._dtype = positions, dtype
        self._scaling = getattr(rotary, "attention_scaling", None)
        return True


class _Tables:
    """What a rotary module answers in one forward, for every layer: (cos, sin) tuples or complex rotations."""

    __slots__ = ("_batched", "_call", "_forward", "_last", "_made", "_rope", "_rotary", "_source")

    def __init__(
        self,
        rope: _LayerRope,
        rotary: nn.Module,
        code: _Code,
        call: dict,
        plain: Any,
        source: _RotaryForward | None = None,
    ) -> None:
        self._rope, self._rotary, self._forward, self._call = rope, rotary, code.forward, call
        self._made, self._source = plain, source
        self._last: tuple[int, Any] | None = None
        self._batched: list | None = source.kept.tables(call) if source is not None else None
        if self._batched is None:
            if source is not None:
                size = 2 * call["position_ids"].numel() * source.width
            else:
                size = max(t.numel() for t in (plain if isinstance(plain, tuple) else (plain,)))
            number = len(rope.distinct)
            if number * size <= BATCHED_LIMIT:
                self._batched = _compute(rotary, code.forward, call, rope.divisors(call["x"].device), number)
        if self._batched is None or rope.some_plain:
            call["x"] = call["x"].new_empty(1)  # its dtype and device are all that is asked of it
        else:
            call.clear()

    @property
    def _plain(self) -> Any:
        """The model's own table, made when a layer first asks for it."""
        if self._made is None and self._source is not None:
            self._made = self._source.own(**self._call)
        return self._made

    def of(self, h: int) -> Any:
        """The table of layer ``h``, in the form in which the model's own rotary module gives it."""
        slot = self._rope.slots[h]
        if slot is None:
            return self._plain
        if self._batched is not None:
            return self._batched[slot]
        if self._last is None or self._last[0] != slot:
            self._last = None  # let the other layer's table go before this one is made
            divisors = self._rope.divisors(self._call["x"].device)[slot : slot + 1]
            self._last = (slot, _compute(self._rotary, self._forward, self._call, divisors, 1)[0])
        return self._last[1]

    def __iter__(self) -> Iterator[_Part]:
        """The cosines and the sines, for models that cut both before their layers see them (Gemma 4)."""
        return iter((_Part(self, 0), _Part(self, 1)))

    def to(self, device: Any, *_: Any, **__: Any) -> _Sent:
        """The tables on another device, as accelerate asks for them where it has put a layer there."""
        return _Sent(self, device)


@dataclass(frozen=True)
class _Sent:
    """Tables that go to another device, each when its layer asks for it."""

    tables: _Tables
    device: Any

    def of(self, h: int) -> Any:
        table = self.tables.of(h)
        return tuple(t.to(self.device) for t in table) if isinstance(table, tuple) else table.to(self.device)

    def __iter__(self) -> Iterator[_Part]:
        return iter((_Part(self, 0), _Part(self, 1)))

    def to(self, device: Any, *_: Any, **__: Any) -> _Sent:
        return _Sent(self.tables, device)


@dataclass(frozen=True)
class _Part:
    """The cosines or the sines of a table, or a slice of them, for whichever layer it will be."""

    tables: _Tables | _Sent
    part: int
    index: Any = ...

    def __getitem__(self, index: Any) -> _Part:
        return _Part(self.tables, self.part, index)

    def to(self, device: Any, *_: Any, **__: Any) -> _Part:
        return _Part(self.tables.to(device), self.part, self.index)

    def of(self, h: int) -> Tensor:
        return self.tables.of(h)[self.part][self.index]


def _resolve(argument: Any, h: int) -> Any:
    if isinstance(argument, _Tables | _Sent):
        return argument.of(h)
    if isinstance(argument, tuple) and any(isinstance(value, _Part) for value in argument):
        return tuple(value.of(h) for value in argument)
    if isinstance(argument, dict) and any(isinstance(v, _Tables | _Sent | tuple) for v in argument.values()):
        return {name: _resolve(value, h) for name, value in argument.items()}
    return argument


def retire(cache: Cache, rotated: str) -> None:
    """Have a cache that is not empty refuse updates: its keys were ``rotated`` in a way that the model has left since.

    Once it is reset it is as good as new.
    """
    if held_in(cache) > 0:
        cache.__dict__[_RETIRED] = rotated
        cache.update = MethodType(_refuse_update, cache)  # type: ignore[method-assign]


def _refuse_update(cache: Cache, *args: Any, **kwargs: Any) -> Any:
    rotated = cache.__dict__[_RETIRED]
    if (held := held_in(cache)) == 0:
        del cache.update, cache.__dict__[_RETIRED]
        return cache.update(*args, **kwargs)
    raise CacheError(
        f"the key-value cache holds {held} positions whose keys were rotated {rotated}; start with an empty cache"
    )
