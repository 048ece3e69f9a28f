"""Attention that a method computes itself, and rotary tables for other factors and other bases.

Ms-PoE and MoICE need the queries and keys *before* they are rotated. transformers rotates inside each attention module
and then calls a function by name (its ``AttentionInterface``). An ``Interception`` puts itself between the two:

- the attention module is handed the identity as its rotation (cosine 1, sine 0) and a cache that keeps nothing, so that
  queries and keys leave it un-rotated and the new ones alone;
- its ``config`` is replaced by a copy that names our attention function, while masks are still made for the
  implementation that the model was loaded with (SDPA, flash, eager), which also computes the attention in the end;
- the method rotates with the family's own ``apply_rotary_pos_emb``, and caches what it wants cached.

A method is a subclass whose ``attend`` turns one ``Call`` into the attention's output, (B, T, H, D):

    >>> class Plain(Interception):
    ...     name = "plain"
    ...     def attend(self, call):
    ...         query, key = call.rotate(call.query, call.key, *call.table.own)
    ...         return call.compute(query, *call.cached(key, call.value))
    >>> method = Plain(model)
    >>> method.detach()                                               # bit for bit the model as it was

Whether a family can be followed is found by running four tokens its way and ours, once, when the method is put in. A
family for which the two differ is refused.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from lpes_eval import rope
from lpes_eval.errors import CacheError, UnsupportedModel, UserError
from lpes_eval.methods.attention import Call
from lpes_eval.methods.tables import Table, table_of

_NAME = "lpes_eval_methods"
_ATTRIBUTE = "_method_attention"
_TOKENS = itertools.count()


def claim(model: nn.Module, method: str) -> None:
    """Mark ``model`` as having ``method`` in it.

    Raises:
        UserError: layer factors or another method are in the model already.
    """
    if rope.applied(model) is not None:
        raise UserError(f"{method}: the model has layer factors; take them back first (lpes_eval.remove)")
    if (other := rope.method_in(model)) is not None:
        raise UserError(f"{method}: a method is in this model already, {other}; detach it first")
    model.__dict__[rope.METHOD] = method


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
            "function (docs/methods.md)"
        )

    if decoder.own:
        raise refuse("its attention modules have rotary modules of their own")
    if any(owner != h for h, owner in enumerate(decoder.factor_layer)):
        raise refuse("some of its layers attend to the keys of another layer")
    found: dict[int, nn.Module] = {}
    for h, layer in enumerate(decoder.layers):
        within = [m for m in layer.modules() if m is not layer and "position_embeddings" in arguments_of(type(m))]
        within = [m for m in within if isinstance(getattr(m, "layer_idx", None), int) and hasattr(m, "config")]
        if len(within) > 1:
            raise refuse(f"layer {h} has {len(within)} modules that rotate")
        if within:
            found[h] = within[0]
    if not found:
        raise refuse("none of its layers hands rotary tables to an attention module")
    for attention in found.values():
        if not hasattr(sys.modules[type(attention).__module__], "ALL_ATTENTION_FUNCTIONS"):
            raise refuse("its attention does not go through transformers' AttentionInterface")
        if hasattr(attention, "kv_lora_rank"):
            raise refuse("its keys are compressed (latent attention), and only a part beside them is rotated")
    return found


class _NoUpdate:
    """Stands in for the cache inside an attention module: keeps nothing, and hands the new keys and values back."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.append: Callable | None = None

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.append = lambda key, value: self.cache.update(key, value, *args, **kwargs)
        return key, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


@functools.cache
def arguments_of(kind: Any) -> tuple[str, ...]:
    """The names of the arguments of a module's forward."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


class _Projected(Exception):
    """Leaves an attention module with the queries and keys that it was about to attend with."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        super().__init__()
        self.query, self.key = query, key


class Interception:
    """A method in place of the attention of some or all layers, until ``detach``; subclasses have an ``attend``.

    Args:
        model: a transformers causal language model, with its weights.
        layers: the layers to put it into; all by default. Layers that do not rotate are left as they are.

    Attributes:
        name: what the method is called in messages.
        padding: the ``attention_mask`` (B, S) that the model was called with in this forward, or None.
        partial: by layer, whether its attention rotates the leading entries of a head alone, as many as its table has.

    Raises:
        UnsupportedModel: with the reason.
        UserError: layer factors or another method are in the model already.
    """

    name: str
    padding: Tensor | None

    def __init__(self, model: nn.Module, layers: Iterable[int] | None = None) -> None:
        attentions = check(model, self.name)
        claim(model, self.name)
        self._model = model
        self._kind = getattr(model.config, "model_type", type(model).__name__)
        self._attentions = {h: attentions[h] for h in attentions if layers is None or h in set(layers)}
        self.partial: dict[int, bool] = {}
        self._configs: dict[int, Any] = {}
        self._handles: list[Any] = []
        self._token = next(_TOKENS)  # what tells this method's caches from others'; plain, so that caches can be copied
        self._probe: Callable[[Call], Tensor] | None = None  # in place of ``attend`` while the family is looked at
        self._begin()
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                self._follow_the_family()
        except BaseException:
            self.detach()
            raise
        finally:
            model.train(training)

    def attend(self, call: Call) -> Tensor:
        """The attention's output, (B, T, H, D_v)."""
        raise NotImplementedError

    def project(self, call: Call, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer makes un-rotated queries and keys of, were its input ``hidden`` (B, T, C)."""
        self._projecting = True
        try:
            call.module.forward(**call.given | {"hidden_states": hidden})
        except _Projected as made:
            return made.query, made.key
        finally:
            self._projecting = False
        raise AssertionError("an attention module that did not call its attention function")

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that the method is in, ascending."""
        return tuple(sorted(self._attentions))

    def detach(self) -> None:
        """Leave the model exactly as it was. A cache that the method has filled is refused from now on."""
        self._model.__dict__.pop(rope.METHOD, None)
        for handle in self._handles:
            handle.remove()
        for h in list(self._attentions):
            self._release(h)
        for cache in list(self._caches):
            cache.__dict__.pop(_ATTRIBUTE, None)
            rope.retire(cache, "by a method that has been taken out of the model since")
        self._caches.clear()

    def _begin(self) -> None:
        """What belongs to one model, or one forward, and is not copied with it."""
        self._caches: WeakSet[Cache] = WeakSet()
        self._start()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the model takes along."""
        passing = ("_caches", "_tables", "_pending", "_projecting", "padding")
        return {name: value for name, value in self.__dict__.items() if name not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the copy, which has met no cache yet."""
        self.__dict__.update(state)
        self._begin()

    # -- hooks

    def _hook(self) -> None:
        AttentionInterface.register(_NAME, _dispatch)
        decoder = rope.find_decoder(self._model)
        self._handles.append(decoder.module.register_forward_pre_hook(self._start, with_kwargs=True))
        self._handles.append(decoder.module.register_forward_hook(self._finish, always_call=True))
        for rotary in decoder.rotaries:
            self._handles.append(rotary.register_forward_hook(self._note_table, with_kwargs=True))
        for h, attention in self._attentions.items():
            self._configs[h] = attention.config
            attention.config = copy.copy(attention.config)
            attention.config.__dict__["_attn_implementation_internal"] = _NAME
            attention.__dict__[_ATTRIBUTE] = (self, h)
            enter = functools.partial(self._enter, h)  # no closure: a copy of the model enters its own
            self._handles.append(attention.register_forward_pre_hook(enter, with_kwargs=True))

    def _release(self, h: int) -> None:
        attention = self._attentions.pop(h)
        if attention.__dict__.pop(_ATTRIBUTE, None) is not None:
            attention.config = self._configs[h]

    def _start(self, module: Any = None, args: tuple = (), kwargs: Any = None) -> None:
        mask = (kwargs or {}).get("attention_mask")
        self._projecting = False
        self.padding = mask if torch.is_tensor(mask) and mask.ndim == 2 else None
        self._tables: list[Table] = []
        self._pending: dict[
            int, tuple[Table, _NoUpdate | None, dict] | None
        ] = {}  # None: the attention function was called

    def _finish(self, *_: Any) -> None:
        self._start()

    def _note_table(self, rotary: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if not isinstance(output, tuple):
            raise UnsupportedModel(f"{self._kind}: its rotary tables are complex numbers, which {self.name} cannot use")
        self._tables.append(table_of(rotary, args, kwargs, output))

    def _enter(self, h: int, attention: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        given = dict(zip(arguments_of(type(attention)), args, strict=False)) | kwargs
        if h not in self._attentions or given.get("position_embeddings") is None:
            return None
        table = self._table_of(given["position_embeddings"])
        if self._probe != self._observe:
            given["position_embeddings"] = table.identity()
        proxy = None
        for name, value in given.items():
            if isinstance(value, Cache):
                given[name] = proxy = _NoUpdate(value)
        self._pending[h] = table, proxy, given
        return (), given

    def _table_of(self, own: tuple[Tensor, Tensor]) -> Table:
        """The rotary call that made what a layer was handed; moved tensors (several devices) are told by content."""
        cos = own[0]
        for table in self._tables:
            if table.own[0] is cos:
                return table
        for table in self._tables:
            if table.own[0].shape == cos.shape and torch.equal(table.own[0].to(cos.device), cos):
                self._tables.append(table.moved(own))
                return self._tables[-1]
        raise UnsupportedModel(f"{self._kind}: its layers change the rotary tables before they use them")

    def run(
        self, h: int, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict
    ) -> tuple[Tensor, None]:
        """The attention function of layer ``h``, as transformers calls it."""
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self._configs[h]._attn_implementation, eager)
        if self._projecting:
            raise _Projected(query, key)
        if h not in self._pending:  # a layer without positions
            return function(module, query, key, value, mask, **options)
        if (pending := self._pending[h]) is None:
            raise UnsupportedModel(f"{self._kind}: its layers call the attention function more than once")
        self._pending[h] = None
        table, proxy, given = pending
        cache, append = (proxy.cache, proxy.append) if proxy is not None else (None, None)
        state = self._state(cache, h) if cache is not None else {}
        call = Call(self, h, module, query, key, value, table, mask, options, function, cache, append, state, given)
        return (self._probe or self.attend)(call), None

    def _state(self, cache: Cache, h: int) -> dict[str, Any]:
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

    # -- whether the family can be followed

    def _follow_the_family(self) -> None:
        """Run four tokens the family's way and ours, and put the method in where the two are the same.

        They are run at once, to see in which layers and how queries and keys are rotated; and the last one alone from
        a cache, for an attention that computes something from the cached values beside attending to them is not to be
        had by rotating.
        """
        tokens = torch.arange(4, device=next(self._model.parameters()).device)[None]

        def last_token_from_cache() -> Tensor:
            cache = self._model(input_ids=tokens[:, :3], use_cache=True).past_key_values
            return self._model(input_ids=tokens[:, 3:], past_key_values=cache, use_cache=True).logits

        expected = last_token_from_cache()
        self._hook()
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        for probe in (self._observe, self._compare):
            self._probe = probe
            self._model(input_ids=tokens, use_cache=False)
        del self._seen
        for h in set(self._attentions) - set(self.partial):
            self._release(h)
        if not self.partial:
            raise UnsupportedModel(f"{self._kind}: none of the layers for {self.name} rotates queries and keys")
        self._probe = _as_the_family_does
        same = False
        with suppress(RuntimeError):  # shapes that do not go together are an answer, too
            same = _close(last_token_from_cache(), expected)
        self._probe = None
        if not same:
            raise UnsupportedModel(
                f"{self._kind}: its attention uses what is cached in a way of its own, which {self.name} cannot follow"
            )

    def _observe(self, call: Call) -> Tensor:
        """Note what the family itself has rotated."""
        self._seen[call.layer] = call.query, call.key
        return call.compute(call.query, call.key, call.value)

    def _compare(self, call: Call) -> Tensor:
        """Find out whether the layer rotates, and whether whole heads or a part of them."""
        h = call.layer
        if h not in self._seen:
            raise UnsupportedModel(f"{self._kind}: its attention is not the same twice")
        for self.partial[h] in (False, True):
            with suppress(RuntimeError, AttributeError, TypeError):  # other widths, another name, other arguments
                turned = call.rotate(call.query, call.key, *call.table.own)
                if all(map(_close, turned, self._seen[h])):
                    return call.compute(*turned, call.value)
        del self.partial[h]
        if not all(map(_close, (call.query, call.key), self._seen[h])):
            raise UnsupportedModel(
                f"{self._kind}: the way in which its attention rotates queries and keys could not be reproduced, "
                f"which {self.name} has to do (docs/methods.md)"
            )
        return call.compute(call.query, call.key, call.value)  # a layer without positions


def _as_the_family_does(call: Call) -> Tensor:
    """The attention of the model as it is, by the way of every other method."""
    query, key = call.rotate(call.query, call.key, *call.table.own)
    return call.compute(query, *call.cached(key, call.value))


def _close(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same up to rounding; on the meta device, which has no numbers, their shapes."""
    if x.shape != y.shape or x.is_meta:
        return x.shape == y.shape and x.device == y.device
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(x.dtype, 2e-2)
    return bool((x - y).abs().max() <= tolerance * y.abs().max())


def _dispatch(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    interception, h = module.__dict__[_ATTRIBUTE]
    return interception.run(h, module, query, key, value, attention_mask, options)
