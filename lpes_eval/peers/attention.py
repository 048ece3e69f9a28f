"""What the peers share: attention that rotates for itself, and rotary tables for other factors and other bases.

Ms-PoE and MoICE need the queries and keys *before* they are rotated. transformers rotates inside each attention module
and then calls a function by name (its ``AttentionInterface``). An ``Interception`` puts itself between the two:

- the attention module is handed the identity as its rotation (cosine 1, sine 0), so that queries and keys leave it
  un-rotated;
- its ``config`` is replaced by a copy that names our attention function, while masks are still made for the
  implementation that the model was loaded with (SDPA, flash, eager), which also computes the attention in the end;
- the cache is kept from it, so that our function receives the new keys alone and caches what the method wants cached:
  keys that are rotated once and for all, as many heads of them as there are rotations.

A method is a function of one ``Call`` that returns the attention's output, (B, T, H, D):

    >>> def plain(call):
    ...     cos, sin = call.rotation.own()                            # (B, 1, T, d)
    ...     query, key = call.rotation.rotate(call.query, cos, sin), call.rotation.rotate(call.key, cos, sin)
    ...     return call.attend(query, *call.cached(key, call.value))
    >>> interception = Interception(model, plain)
    >>> interception.detach()                                         # bit for bit the model as it was

How a family pairs the halves of a head, and how much of a head it rotates, is not asked of its source: both are found
by rotating as the family does and comparing, once, when the interception is made. A family for which no pairing gives
its own queries and keys is refused.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from lpes_eval import rope
from lpes_eval.errors import CacheError, UnsupportedModel, UserError

PUBLISHED_BASES = (10000.0, 17500.0, 18000.0, 19000.0, 20000.0, 22500.0, 25000.0)
"""The RoPE bases of Attention Buckets and MoICE, for models whose own base is 10000 (arXiv 2312.04455, 2406.19598)."""

_NAME = "lpes_eval_peers"
_ATTRIBUTE = "_peer_attention"
_TOKENS = itertools.count()


# -- rotary tables for other factors and other bases -----------------------------------------------------------------


@dataclass
class Table:
    """What a rotary module answered in one forward, and how to ask it for other rotations of the same positions.

    Attributes:
        rotary: the model's rotary module.
        call: the arguments it was called with, by name.
        cos, sin: what it answered, (B, T, d).
    """

    rotary: nn.Module
    call: dict[str, Any]
    cos: Tensor
    sin: Tensor
    _made: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def identity(self) -> tuple[Tensor, Tensor]:
        """A table that rotates nothing, (1, 1, d), on the same device and of the same dtype."""
        if "identity" not in self._made:
            one = self.cos.new_ones(1, 1, self.cos.shape[-1])
            self._made["identity"] = one, torch.zeros_like(one)
        return self._made["identity"]

    def by_factors(self, factors: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Tables at positions divided by each of U factors, (U, B, T, d); computed once a forward."""
        key = ("factors", *factors)
        if key not in self._made:
            ids = self.call["position_ids"]  # (B, T), or (3, B, T) where positions have several axes
            cos, sin = self._ask((ids.unsqueeze(-3) / _divisors(tuple(factors), ids.device)).flatten(-3, -2))
            shape = (len(factors), -1, *cos.shape[1:])
            self._made[key] = cos.view(shape), sin.view(shape)
        return self._made[key]

    def by_bases(self, bases: Sequence[float], theta: float) -> tuple[Tensor, Tensor]:
        """Tables of N RoPE bases, (N, B, T, d), for a model whose own base is ``theta``; computed once a forward."""
        key = ("bases", *bases)
        if key not in self._made:
            made = [self._at(base, theta) for base in bases]
            self._made[key] = torch.stack([cos for cos, _ in made]), torch.stack([sin for _, sin in made])
        return self._made[key]

    def _at(self, base: float, theta: float) -> tuple[Tensor, Tensor]:
        if base == theta:
            return self.cos, self.sin
        rotary: Any = self.rotary
        own = rotary.inv_freq
        rotary.inv_freq = frequencies(base, own)
        try:
            return self._ask(self.call["position_ids"])
        finally:
            rotary.inv_freq = own

    def _ask(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rotary module's own code at other positions, without what chooses frequencies by length around it."""
        kind: Any = type(self.rotary)
        forward, _ = rope.own_forward(kind)
        call = self.call | {"x": self.call["x"].new_empty(1), "position_ids": position_ids}
        with torch.no_grad():
            cos, sin = forward(self.rotary, **call)
        return cos, sin


@functools.lru_cache(maxsize=64)
def _divisors(factors: tuple[float, ...], device: torch.device) -> Tensor:
    """Factors shaped to divide positions, (U, 1, 1); kept, for a copy to a GPU at every token would wait for it."""
    return torch.tensor(factors, dtype=torch.float32, device=device)[:, None, None]


@functools.lru_cache(maxsize=64)
def frequencies(base: float, like: Tensor) -> Tensor:
    """The inverse frequencies ``base ** (-2 i / d)`` of default RoPE, as many as ``like`` has, as float32 there."""
    dimension = 2 * like.numel()
    exponents = torch.arange(0, dimension, 2, dtype=torch.float32, device=like.device) / dimension
    return (1.0 / base**exponents).to(like.dtype)


def own_base(model: nn.Module, method: str) -> float:
    """The RoPE base of a model for which ``method`` is defined by its base; works without weights.

    Raises:
        UnsupportedModel: more than one rotary table, or frequencies that are not ``base ** (-2 i / d)``.
    """
    decoder = rope.find_decoder(model)
    config: Any = model.config
    parameters = config.get_text_config(decoder=True).rope_parameters or {}

    def refuse(found: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{config.model_type}: {found}; {method} replaces the base of default RoPE, the only kind that has one "
            "base and nothing else (docs/peers.md)"
        )

    if any(isinstance(value, dict) for value in parameters.values()):
        raise refuse("it has rotary tables of its own for each kind of attention")
    if (kind := parameters.get("rope_type", "default")) != "default":
        raise refuse(f"its rotary embedding is of type {kind}")
    theta = parameters.get("rope_theta")
    if theta is None or decoder.own or len(decoder.rotaries) != 1:
        raise refuse("it has no single rotary module with a rope_theta")
    rotary: Any = decoder.rotaries[0]
    inv_freq = getattr(rotary, "inv_freq", None)
    if inv_freq is None:
        raise refuse("its rotary module keeps no inverse frequencies")
    nowhere = torch.zeros(1, 1, dtype=torch.long, device=inv_freq.device)
    if not inv_freq.is_meta and torch.is_tensor(rotary(inv_freq.new_zeros(1, 1, 1), nowhere)):
        raise refuse("its rotary tables are complex numbers")
    if not inv_freq.is_meta and not _same_up_to_rounding(inv_freq, frequencies(theta, inv_freq.float())):
        raise refuse(f"its frequencies are not powers of its rope_theta, {theta:g}")
    return float(theta)


def _same_up_to_rounding(x: Tensor, exact: Tensor) -> bool:
    """Whether ``x`` could be ``exact`` (float32) in its own dtype; ``model.to(torch.bfloat16)`` rounds buffers too."""
    kind = torch.finfo(x.dtype)
    return torch.allclose(x.float(), exact, rtol=max(kind.eps, 1e-5), atol=max(kind.tiny * kind.eps, 1e-8))


def bases_for(theta: float, bases: Sequence[float] | None) -> tuple[float, ...]:
    """The given bases, or the published ones times ``theta / 10000``, so that the first is always the model's own."""
    if bases is None:
        return tuple(base * theta / PUBLISHED_BASES[0] for base in PUBLISHED_BASES)
    return tuple(float(base) for base in bases)


# -- how a family rotates --------------------------------------------------------------------------------------------


def _halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _halves_backwards(x: Tensor) -> Tensor:
    return -_halves(x)


def _neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def _same(table: Tensor) -> Tensor:
    return table


def _twice(table: Tensor) -> Tensor:
    return torch.cat((table, table), dim=-1)


def _spread(table: Tensor) -> Tensor:
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


_LAYOUTS: tuple[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], ...] = (
    (_halves, _same),  # Llama and most others
    (_neighbours, _spread),  # GLM: pairs of neighbours, table made for halves
    (_neighbours, _same),  # Cohere
    (_halves, _twice),  # gpt-oss: the table holds each angle once
    (_halves_backwards, _same),  # nanochat: the other way round
)
"""Ways to rotate: which entry is paired with which, and how the module's table becomes as wide as what it rotates."""


class Rotation:
    """The rotation of one layer in one forward, in the layout of its family."""

    def __init__(self, table: Table, layout: int) -> None:
        self.table = table
        self._pair, self._widen = _LAYOUTS[layout]

    def own(self) -> tuple[Tensor, Tensor]:
        """The model's own table, ready to broadcast over heads: (B, 1, T, d)."""
        return self.table.cos.unsqueeze(1), self.table.sin.unsqueeze(1)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the leading entries of each head of ``x`` (..., T, D) by tables (..., T, d) that broadcast with it."""
        cos, sin = self._widen(cos), self._widen(sin)
        width = cos.shape[-1]
        turned = x if width == x.shape[-1] else x[..., :width]
        turned = turned * cos + self._pair(turned) * sin
        if width == x.shape[-1]:
            return turned
        rest = x[..., width:]
        return torch.cat((turned, rest.expand(*turned.shape[:-1], rest.shape[-1])), dim=-1)


# -- one layer's attention -------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One layer's attention in one forward.

    Attributes:
        layer: number of the decoder layer.
        module: its attention module.
        query, key, value: (B, H, T, D), (B, H_kv, T, D), (B, H_kv, T, D_v); un-rotated, the new tokens alone.
        rotation: tables for these tokens, and how to apply them.
        mask: the mask that the model made for its own implementation, over cached and new keys; may be None (causal).
        padding: the ``attention_mask`` that the model itself was called with, (B, S), or None.
        state: what the method wants to remember about this layer as long as the cache lives; a new dict without one.
        cache: the model's cache, or None.
    """

    layer: int
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    rotation: Rotation
    mask: Any
    padding: Tensor | None
    state: dict[str, Any]
    cache: Cache | None
    _function: Callable
    _options: dict[str, Any]
    _update: tuple[tuple, dict] | None = None

    def cached(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append rotated keys and values to the cache and return all that it holds; without a cache return these.

        Keys may have another number of heads than values, as long as it is always the same.

        Raises:
            UserError: they have, and the cache is a static one, which has room for as many of one as of the other.
        """
        if self.cache is None:
            return key, value
        layer = self.cache.layers[self.layer] if self.layer < len(self.cache.layers) else None
        if isinstance(layer, StaticLayer) and key.shape[1] != value.shape[1]:
            method: Interception = self.module.__dict__[_ATTRIBUTE][0]
            raise UserError(
                f"{method.name} caches {key.shape[1]} heads of keys beside {value.shape[1]} of values, for which a "
                "static cache has no room; use one that grows (leave out cache_implementation)"
            )
        args, kwargs = self._update or ((self.module.layer_idx,), {})
        return self.cache.update(key, value, *args, **kwargs)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention by the implementation that the model was loaded with.

        Args:
            query: (B, H', T, D), rotated; H' may be a multiple of the layer's own number of heads.
            key: (B, H_k, S, D), rotated; H_k divides H'.
            value: (B, H_v, S, D_v); H_v divides H_k, and head j of the keys goes with head ``j // (H_k / H_v)``.

        Returns:
            (B, T, H', D_v).
        """
        if value.shape[1] != key.shape[1]:
            if query.shape[2] == 1 and self._function is _sdpa() and not self.module.training:
                return self._one(query, key, value)
            value = value.repeat_interleave(key.shape[1] // value.shape[1], dim=1)
        with _groups(self.module, query.shape[1] // key.shape[1]):
            return self._function(self.module, query, key, value, self.mask, **self._options)[0]

    def _one(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One query token, its heads sharing values but not keys: the values are not copied out for every head."""
        if key.shape[1] != query.shape[1]:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scale = self._options.get("scaling") or query.shape[-1] ** -0.5
        scores = torch.matmul(query, key.transpose(-1, -2)) * scale  # (B, H', 1, S)
        if self.mask is not None:
            mask = self.mask
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        weights = scores.float().softmax(-1).to(value.dtype)
        shared = weights.unflatten(1, (value.shape[1], -1)).flatten(2, 3)  # (B, H_v, H' / H_v, S)
        return torch.matmul(shared, value).flatten(1, 2).unsqueeze(1)


def _sdpa() -> Callable:
    return ALL_ATTENTION_FUNCTIONS["sdpa"]


@contextmanager
def _groups(module: Any, groups: int) -> Any:
    """Let the attention functions see how many query heads there are to a key head now."""
    own = module.num_key_value_groups if hasattr(module, "num_key_value_groups") else None
    if own == groups:
        yield
        return
    module.num_key_value_groups = groups
    try:
        yield
    finally:
        if own is None:
            del module.num_key_value_groups
        else:
            module.num_key_value_groups = own


class _NoUpdate:
    """Stands in for the cache inside an attention module: takes nothing, and hands the new keys and values on."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.arguments: tuple[tuple, dict] | None = None

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.arguments = args, kwargs
        return key, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


@dataclass
class _Pending:
    """What was taken from an attention module on its way in."""

    table: Table
    cache: Cache | None
    proxy: _NoUpdate | None
    used: bool = False


# -- the model -------------------------------------------------------------------------------------------------------


def check(model: nn.Module, method: str) -> dict[int, nn.Module]:
    """Find the attention modules, by layer, that an ``Interception`` can reach; works on a model without weights.

    Raises:
        UnsupportedModel: with the reason.
    """
    decoder = rope.find_decoder(model)
    kind = getattr(model.config, "model_type", type(model).__name__)

    def refuse(reason: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{kind}: {reason}; {method} rotates queries and keys itself, between the projections and the attention "
            "function (docs/peers.md)"
        )

    if decoder.own:
        raise refuse("its attention modules have rotary modules of their own")
    if any(owner != h for h, owner in enumerate(decoder.factor_layer)):
        raise refuse("some of its layers attend to the keys of another layer")
    found: dict[int, nn.Module] = {}
    for h, layer in enumerate(decoder.layers):
        within = [m for m in layer.modules() if m is not layer and _takes(m, "position_embeddings")]
        within = [m for m in within if isinstance(getattr(m, "layer_idx", None), int) and hasattr(m, "config")]
        if len(within) > 1:
            raise refuse(f"layer {h} has {len(within)} modules that rotate")
        if within:
            found[h] = within[0]
    if not found:
        raise refuse("none of its layers hands rotary tables to an attention module")
    for attention in found.values():
        source = sys.modules[type(attention).__module__]
        if not hasattr(source, "ALL_ATTENTION_FUNCTIONS"):
            raise refuse("its attention does not go through transformers' AttentionInterface")
        if hasattr(attention, "kv_lora_rank"):
            raise refuse("its keys are compressed (latent attention), and only a part beside them is rotated")
    return found


def _takes(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(type(module).forward).parameters


class Interception:
    """A method in place of the attention of some or all layers, until ``detach``.

    Args:
        model: a transformers causal language model, with its weights.
        method: takes a ``Call`` and returns (B, T, H, D).
        name: what the method is called in messages.
        layers: the layers to put it into; all by default. Layers that do not rotate are left as they are.

    Raises:
        UnsupportedModel: with the reason.
        UserError: layer factors or another method are in the model already.
    """

    def __init__(
        self, model: nn.Module, method: Callable[[Call], Tensor], name: str, layers: Iterable[int] | None = None
    ) -> None:
        attentions = check(model, name)
        if rope.applied(model) is not None:
            raise UserError(f"{name}: the model has layer factors; take them back first (lpes_eval.remove)")
        if (other := rope.method_in(model)) is not None:
            raise UserError(f"{name}: another method is in this model, {other}; detach it first")
        self.method, self.name = method, name
        self._model = model
        self._kind = getattr(model.config, "model_type", type(model).__name__)
        wanted = set(attentions) if layers is None else set(layers)
        self._attentions = {h: attention for h, attention in attentions.items() if h in wanted}
        self._layouts: dict[int, int] = {}
        self._token = next(_TOKENS)  # what tells this method's caches from others'; plain, so that caches can be copied
        self._begin()
        self._plain: dict[int, Any] = {}
        self._step: Callable[[int, nn.Module, Tensor, Tensor, _Pending | None], tuple[Tensor, Tensor] | None] | None
        self._step = None
        self._identity = True
        self._off = False
        self._handles: list[Any] = []
        self._hook()
        try:
            self._find_layouts()
        except BaseException:
            self.detach()
            raise

    def _begin(self) -> None:
        """What belongs to one model, or one forward, and is not copied with it."""
        self._caches: WeakSet[Cache] = WeakSet()
        self._tables: list[Table] = []
        self._pending: dict[int, _Pending] = {}
        self._padding: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the model takes along."""
        passing = ("_caches", "_tables", "_pending", "_padding")
        return {name: value for name, value in self.__dict__.items() if name not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the copy, which has met no cache yet."""
        self.__dict__.update(state)
        self._begin()

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that the method is in, ascending."""
        return tuple(sorted(self._attentions))

    def detach(self) -> None:
        """Leave the model exactly as it was. A cache that the method has filled is refused from now on."""
        self._model.__dict__.pop(rope.METHOD, None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for h in list(self._attentions):
            self._release(h)
        for cache in list(self._caches):
            cache.__dict__.pop(_ATTRIBUTE, None)
            rope.retire(cache, "by a method that has been taken out of the model since")
        self._caches.clear()

    # -- hooks

    def _hook(self) -> None:
        AttentionInterface.register(_NAME, _dispatch)
        self._model.__dict__[rope.METHOD] = self.name
        decoder = rope.find_decoder(self._model)
        self._handles.append(decoder.module.register_forward_pre_hook(self._start, with_kwargs=True))
        self._handles.append(decoder.module.register_forward_hook(self._finish, always_call=True))
        for rotary in decoder.rotaries:
            self._handles.append(rotary.register_forward_hook(self._note_table, with_kwargs=True))
        for h, attention in self._attentions.items():
            config: Any = attention.config
            self._plain[h] = config
            ours = copy.copy(config)
            ours.__dict__["_attn_implementation_internal"] = _NAME
            attention.config = ours
            attention.__dict__[_ATTRIBUTE] = (self, h)
            names = tuple(inspect.signature(type(attention).forward).parameters)[1:]
            enter = functools.partial(self._enter, h, names)  # no closure: a copy of the model enters its own
            self._handles.append(attention.register_forward_pre_hook(enter, with_kwargs=True))

    def _release(self, h: int) -> None:
        attention = self._attentions.pop(h)
        if attention.__dict__.pop(_ATTRIBUTE, None) is not None:
            attention.config = self._plain[h]

    def _start(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._tables.clear()
        mask = kwargs.get("attention_mask")
        self._padding = mask if torch.is_tensor(mask) and mask.ndim == 2 else None

    def _finish(self, *_: Any) -> None:
        self._tables.clear()
        self._pending.clear()
        self._padding = None

    def _note_table(self, rotary: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if not isinstance(output, tuple):
            raise UnsupportedModel(f"{self._kind}: its rotary tables are complex numbers, which {self.name} cannot use")
        kind: Any = type(rotary)
        _, names = rope.own_forward(kind)
        call = dict(zip(names, args, strict=False)) | kwargs
        self._tables.append(Table(rotary, call, *output))

    def _enter(
        self, h: int, names: tuple[str, ...], attention: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        given = dict(zip(names, args, strict=False)) | kwargs
        if self._off or h not in self._attentions or given.get("position_embeddings") is None:
            return None
        cos, sin = given["position_embeddings"]
        table = self._table_of(cos, sin)
        if self._identity:
            given["position_embeddings"] = table.identity()
        cache, proxy = None, None
        for name, value in given.items():
            if isinstance(value, Cache):
                cache, proxy = value, _NoUpdate(value)
                given[name] = proxy
                break
        self._pending[h] = _Pending(table, cache, proxy)
        return (), given

    def _table_of(self, cos: Tensor, sin: Tensor) -> Table:
        """The rotary call that made what a layer was handed; moved tensors (several devices) are told by content."""
        for table in self._tables:
            if table.cos is cos:
                return table
        for table in self._tables:
            if table.cos.shape == cos.shape and torch.equal(table.cos.to(cos.device), cos):
                call = {k: v.to(cos.device) if torch.is_tensor(v) else v for k, v in table.call.items()}
                moved = Table(table.rotary, call, cos, sin)
                self._tables.append(moved)
                return moved
        raise UnsupportedModel(f"{self._kind}: its layers change the rotary tables before they use them")

    # -- the attention function

    def run(
        self, h: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict
    ) -> tuple[Tensor, None]:
        """The attention function of layer ``h``, as transformers calls it."""
        function = self._own_function(h, module)
        pending = self._pending.get(h)
        if pending is None:  # a layer without positions
            return function(module, query, key, value, mask, **options)
        if pending.used:
            raise UnsupportedModel(f"{self._kind}: its layers call the attention function more than once")
        pending.used = True
        if self._step is not None:
            query, key = self._step(h, module, query, key, pending) or (query, key)
            return function(module, query, key, value, mask, **options)
        call = Call(
            layer=h,
            module=module,
            query=query,
            key=key,
            value=value,
            rotation=Rotation(pending.table, self._layouts[h]),
            mask=mask,
            padding=self._padding,
            state=self._state(pending.cache, h),
            cache=pending.cache,
            _function=function,
            _options=options,
            _update=pending.proxy.arguments if pending.proxy is not None else None,
        )
        return self.method(call), None

    def _own_function(self, h: int, module: nn.Module) -> Callable:
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return ALL_ATTENTION_FUNCTIONS.get_interface(self._plain[h]._attn_implementation, eager)

    def _state(self, cache: Cache | None, h: int) -> dict[str, Any]:
        if cache is None:
            return {}
        held = int(cache.get_seq_length(h))
        token, states = cache.__dict__.get(_ATTRIBUTE, (None, {}))
        if token != self._token:
            if held > 0:
                raise CacheError(
                    f"the key-value cache holds {held} positions whose keys {self.name} has not rotated; start with an "
                    "empty cache"
                )
            states = {}
            cache.__dict__[_ATTRIBUTE] = (self._token, states)
            self._caches.add(cache)
        if held == 0:
            states[h] = {}
        return states[h]

    # -- which layout

    def _find_layouts(self) -> None:
        """Run four tokens twice, rotated by the family and by us, and keep the layout that gives the same.

        Then run them once more each way with a cache, the last one alone: an attention that computes something from
        the cached values beside attending to them is not to be had by rotating.
        """
        device = next(self._model.parameters()).device
        tokens = torch.arange(4, device=device)[None]
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def observe(h: int, module: nn.Module, query: Tensor, key: Tensor, pending: Any) -> None:
            seen[h] = query, key

        def compare(h: int, module: nn.Module, query: Tensor, key: Tensor, pending: Any) -> tuple[Tensor, Tensor]:
            if h not in seen:
                raise UnsupportedModel(f"{self._kind}: its attention is not the same twice")
            for layout in range(len(_LAYOUTS)):
                rotation = Rotation(pending.table, layout)
                try:
                    turned = tuple(rotation.rotate(x, *rotation.own()) for x in (query, key))
                except RuntimeError:  # this layout does not have the width of this family's heads
                    continue
                if all(map(_close, turned, seen[h])):
                    self._layouts[h] = layout
                    return turned[0], turned[1]
            if not all(map(_close, (query, key), seen[h])):
                raise UnsupportedModel(
                    f"{self._kind}: the way in which its attention rotates queries and keys could not be reproduced, "
                    f"which {self.name} has to do (docs/peers.md)"
                )
            return query, key  # a layer without positions

        training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                for self._step, self._identity in ((observe, False), (compare, True)):
                    self._model(input_ids=tokens, use_cache=False)
        finally:
            self._step, self._identity = None, True
            self._model.train(training)
        for h in set(self._attentions) - set(self._layouts):
            self._release(h)
        if not self._layouts:
            raise UnsupportedModel(f"{self._kind}: none of the layers for {self.name} rotates queries and keys")

        def last_token_from_cache() -> Tensor:
            first = self._model(input_ids=tokens[:, :3], use_cache=True)
            return self._model(input_ids=tokens[:, 3:], past_key_values=first.past_key_values, use_cache=True).logits

        method, self.method = self.method, _as_the_family_does
        self._model.eval()
        try:
            with torch.no_grad():
                same = False
                with suppress(RuntimeError):  # shapes that do not go together are an answer, too
                    ours = last_token_from_cache()
                    self._off = True
                    same = _close(ours, last_token_from_cache())
        finally:
            self.method, self._off = method, False
            self._model.train(training)
        if not same:
            raise UnsupportedModel(
                f"{self._kind}: its attention uses what is cached in a way of its own, which {self.name} cannot follow"
            )


def _as_the_family_does(call: Call) -> Tensor:
    """The attention of the model as it is, by the way of every other method."""
    cos, sin = call.rotation.own()
    query, key = (call.rotation.rotate(x, cos, sin) for x in (call.query, call.key))
    return call.attend(query, *call.cached(key, call.value))


def _close(x: Tensor, y: Tensor) -> bool:
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(x.dtype, 2e-2)
    return x.shape == y.shape and bool((x - y).abs().max() <= tolerance * y.abs().max())


def _dispatch(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    interception, h = module.__dict__[_ATTRIBUTE]
    return interception.run(h, module, query, key, value, attention_mask, options)
