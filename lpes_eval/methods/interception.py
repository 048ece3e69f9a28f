"""A method in place of a model's attention: how it sees queries, keys, tables, the cache and the padding of each layer.

transformers rotates inside each attention module and then calls a function by name (its ``AttentionInterface``). An
``Interception`` hands the module the identity as its rotation and a cache that keeps nothing, and puts itself in place
of that function; masks are still made for the model's own implementation, which also computes the attention in the end.

A method is a subclass with an ``attend``; the simplest is ``plainly``, the attention of the model as it is.
"""

import copy
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from lpes_eval import rope
from lpes_eval.caches import Stamp, cache_of, with_cache
from lpes_eval.decoder import arguments, device_of
from lpes_eval.errors import UnsupportedModel, UserError
from lpes_eval.methods.attention import Call, NewAlone
from lpes_eval.methods.base import InModel
from lpes_eval.methods.tables import Table

_NAME = "lpes_eval_methods"
_ATTRIBUTE = "_method_attention"
"""On an attention module: the method and the layer's number. On a cache: what the method remembers, by layer."""


def claim(model: nn.Module, method: str) -> None:
    """Mark ``model`` as having ``method`` in it; ``UserError`` where factors or another method are there already."""
    if rope.applied(model) is not None:
        raise UserError(f"{method}: the model has layer factors; take them back first (lpes_eval.remove)")
    if (other := rope.method_in(model)) is not None:
        raise UserError(f"{method}: a method is in this model already, {other}; detach it first")
    model.__dict__[rope.METHOD] = method


def find_attention(model: nn.Module, method: str) -> dict[int, nn.Module]:
    """The attention modules, by layer, that an ``Interception`` can reach; ``UnsupportedModel`` where it cannot."""
    decoder = rope.find_decoder(model)
    found: dict[int, nn.Module] = {}
    reasons = []
    if decoder.own:
        reasons.append("its attention modules have rotary modules of their own")
    elif decoder.factor_layer != tuple(range(len(decoder.layers))):
        reasons.append("some of its layers attend to the keys of another layer")
    for h, layer in enumerate(decoder.layers):
        within = [m for m in layer.modules() if m is not layer and "position_embeddings" in arguments(m)]
        within = [m for m in within if isinstance(getattr(m, "layer_idx", None), int) and hasattr(m, "config")]
        if len(within) > 1:
            reasons.append(f"layer {h} has {len(within)} modules that rotate")
        found |= dict.fromkeys([h], within[0]) if within else {}
    if not found:
        reasons.append("none of its layers hands rotary tables to an attention module")
    if not all(hasattr(sys.modules[type(m).__module__], "ALL_ATTENTION_FUNCTIONS") for m in found.values()):
        reasons.append("its attention does not go through transformers' AttentionInterface")
    if any(hasattr(m, "kv_lora_rank") for m in found.values()):
        reasons.append("its keys are compressed (latent attention), and only a part beside them is rotated")
    if reasons:
        where = "between the projections and the attention function (docs/methods.md)"
        raise _unsupported(model, f"{reasons[0]}; {method} rotates queries and keys itself, {where}")
    return found


class _Projected(Exception):
    """Leaves an attention module with the queries and keys that it was about to attend with."""


class Interception(InModel):
    """A method in place of the attention of some or all layers.

    Attributes:
        name: what the method is called in messages.
        layers: numbers of the layers that it is in, ascending. Layers that do not rotate are left as they are.
        partial: by layer, whether it rotates the leading entries of a head alone, as many as its table has.
        padding: the ``attention_mask`` (B, S) that the model was last called with, or None.
    """

    name: str
    layers: Any
    partial: dict[int, bool]
    padding: Tensor | None = None
    _entered: tuple[Any, ...] | None = None
    """What the attention that runs was given; ``()`` after its function was called; None where it does not rotate."""
    _projecting = False
    _model: Any = None

    def attend(self, call: Call) -> Tensor:
        """The attention's output, (B, T, H, D_v)."""
        raise NotImplementedError

    def refuse_flash_attention(self, call: Call) -> None:
        """For a method that has a mask of its own, which flash and flex attention and the Hub's kernels do not take."""
        kind = str(self._configs[call.layer]._attn_implementation)
        if any(part in kind for part in ("flash", "flex", "/")):
            raise UserError(f"{self.name}: {kind} takes no mask; load the model with attn_implementation=sdpa")

    def plainly(self, call: Call) -> Tensor:
        """The attention of the model as it is, by the way of ``attend``; where it differs, the family is refused."""
        query, key = call.rotate(call.query, call.key, *call.table)
        return call.compute(query, *call.cached(key, call.value))

    def chosen_layers(self, depth: int) -> range:
        """The layers to put it into, of so many; ``UserError`` where there are none."""
        return range(depth)

    def check(self, model: nn.Module) -> None:
        """Refuse a model whose attention cannot be reached, or that has no such layers."""
        chosen = self.chosen_layers(len(rope.find_decoder(model).layers))
        self._attentions = {h: module for h, module in find_attention(model, self.name).items() if h in chosen}

    def prepare(self, model: nn.Module) -> None:
        """Find out what is missing in the settings from the model as it is, without gradients."""

    def attach(self, model: nn.Module) -> None:
        """Put the method into the model, where its way of rotating can be followed."""
        self.check(model)
        claim(model, self.name)
        self._model, self._stamp = model, Stamp(f"{self.name} has not rotated")
        self._configs: dict[int, Any] = {h: module.config for h, module in self._attentions.items()}
        self._handles: list[Any] = []
        self.partial = {}
        try:
            with torch.no_grad():
                self.prepare(model)
                self._follow_the_family()
        except BaseException:
            self.detach()
            raise
        self.layers = tuple(sorted(self._attentions))

    def detach(self) -> None:
        """Leave the model exactly as it was."""
        if self._model is None:
            return
        self._model.__dict__.pop(rope.METHOD, None)
        self._model = None
        for handle in self._handles:
            handle.remove()
        self._release(*self._attentions)

    def project(self, call: Call, **changes: Any) -> tuple[Tensor, Tensor]:
        """The queries and keys that the layer's attention would compute, were ``changes`` among what it is given."""
        self._projecting = True
        try:
            call.module.forward(**call.given | changes)
        except _Projected as made:
            return made.args
        finally:
            self._projecting = False
        raise AssertionError("an attention module that did not call its attention function")

    # -- hooks; none is a closure, so a copy of the model has its own

    def _hook(self) -> None:
        AttentionInterface.register(_NAME, Interception._run)
        decoder = rope.find_decoder(self._model)
        self._handles.append(decoder.module.register_forward_pre_hook(self._forward_begins, with_kwargs=True))
        for rotary in decoder.rotaries:
            self._handles.append(rotary.register_forward_hook(self._note_table, with_kwargs=True))
        for h, attention in self._attentions.items():
            attention.config = copy.copy(attention.config)
            attention.config.__dict__["_attn_implementation_internal"] = _NAME
            attention.__dict__[_ATTRIBUTE] = (self, h)
            self._handles.append(attention.register_forward_pre_hook(self._enter, with_kwargs=True))

    def _release(self, *layers: int) -> None:
        for h in layers:
            attention = self._attentions.pop(h)
            attention.config = self._configs[h]
            attention.__dict__.pop(_ATTRIBUTE, None)

    def _forward_begins(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        for cache in [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]:
            self._stamp.check(cache)
        mask = kwargs.get("attention_mask")
        self.padding = mask if torch.is_tensor(mask) and mask.ndim == 2 else None

    def _note_table(self, rotary: nn.Module, args: tuple, kwargs: dict, output: Any) -> Table:
        if not isinstance(output, tuple):
            raise _unsupported(self._model, f"its rotary tables are complex numbers, which {self.name} cannot use")
        return Table.of(rotary, args, kwargs, output)

    def _enter(self, attention: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        given = dict(zip(arguments(attention), args, strict=False)) | kwargs
        table, self._entered = given.get("position_embeddings"), None
        if _ATTRIBUTE not in attention.__dict__ or table is None:  # a layer without positions
            return None
        if not isinstance(table, Table):
            raise _unsupported(self._model, "its layers change the rotary tables before they use them")
        caches = {name: NewAlone(value) for name, value in given.items() if isinstance(value, Cache)}
        given |= {"position_embeddings": table.identity()} | caches
        self._entered = given, table, next(iter(caches.values()), None)
        return (), given

    @staticmethod
    def _run(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
        """The attention function that transformers calls, of whichever method and layer the module is."""
        self, h = module.__dict__[_ATTRIBUTE]
        if self._projecting:
            raise _Projected(query, key)
        if self._entered == ():
            raise _unsupported(self._model, "its layers call the attention function more than once")
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self._configs[h]._attn_implementation, eager)
        if self._entered is None:
            return function(module, query, key, value, attention_mask, **options)
        (given, table, cache), self._entered = self._entered, ()
        states, held = dict[int, Any](), 0
        if cache is not None:
            held = int(cache.get_seq_length(h))
            self._stamp.check(cache.cache, held)
            states = cache.cache.__dict__.setdefault(_ATTRIBUTE, {})
            if held == 0:
                states[h] = {}
        layer = (self.partial.get(h, False), h, module, given, table, cache, held, states.get(h, {}))
        return self._attend(Call(*layer, query, key, value, attention_mask, options, function)), None

    def _follow_the_family(self) -> None:
        """Run four tokens the family's way and ours, and stay in the layers that rotate; or refuse the family."""
        model: Any = self._model
        tokens = torch.arange(4, device=device_of(model))[None]

        def last_token_from_cache() -> Tensor:
            cache = cache_of(model(input_ids=tokens[:, :3], use_cache=True))
            return model(input_ids=tokens[:, 3:], use_cache=True, **with_cache(model, cache)).logits

        expected = last_token_from_cache()
        self._hook()
        # 1) All at once, to see how each layer rotates
        self._attend: Callable[[Call], Tensor] = self._learn
        model(input_ids=tokens, use_cache=False)
        self._release(*(set(self._attentions) - set(self.partial)))
        if not self.partial:
            raise _unsupported(model, f"none of the layers for {self.name} rotates queries and keys")
        # 2) The last one alone, to see what it does with a cache
        self._attend, followed = self.plainly, False
        with suppress(RuntimeError):  # shapes that do not go together are an answer, too
            followed = _close(last_token_from_cache(), expected)
        if not followed:
            raise _unsupported(model, f"its attention uses what is cached in a way of its own, not as {self.name}")
        self._attend = self.attend

    def _learn(self, call: Call) -> Tensor:
        """The attention of the model as it is; finds out whether the layer rotates whole heads, a part, or nothing."""
        own = self.project(call, position_embeddings=tuple(call.table))
        for call.partial in (False, True):
            with suppress(RuntimeError, AttributeError, TypeError):  # other widths, another name, other arguments
                if all(map(_close, call.rotate(call.query, call.key, *call.table), own)):
                    self.partial[call.layer] = call.partial
                    break
        else:
            if not all(map(_close, (call.query, call.key), own)):  # more than a layer without positions
                reason = "its attention rotates queries and keys in a way that could not be reproduced"
                raise _unsupported(self._model, f"{reason} by {self.name} (docs/methods.md)")
        return call.compute(*own, call.value)


def _unsupported(model: Any, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{getattr(model.config, 'model_type', type(model).__name__)}: {reason}")


def _close(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same up to rounding; on the meta device, which has no numbers, their shapes."""
    if x.shape != y.shape or x.is_meta:
        return x.shape == y.shape and x.device == y.device
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(x.dtype, 2e-2)
    return bool((x - y).abs().max() <= tolerance * y.abs().max())
