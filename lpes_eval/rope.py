"""Layer factors inside a transformers model: layer h rotates queries and keys at position ``i / s_h`` (Eq. 2).

transformers computes one rotary table a forward, the cosines and sines of all positions' angles, and hands it to every
layer. Three kinds of modules are changed, and no weight is touched:

1. The rotary module answers with a table for each layer, at positions divided by the layer's factor. So the model's
   frequencies (default, linear, dynamic NTK, yarn, llama3, longrope), its scaling and its layout stay as they are.
2. Each decoder layer takes its own table.
3. The decoder refuses a key-value cache filled under other factors, because its keys are rotated already.

A changed module is of a subclass of its own class, with another ``__call__``, as FSDP does it. Copies, saved models,
PEFT, accelerate and ``torch.compile`` take the change along.

    >>> apply(model, [1.0, 1.2, 1.5, 1.3])
    >>> model.generate(**inputs)
    >>> remove(model)
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lpes_eval.caches import Stamp, cache_of, with_cache  # noqa: F401
from lpes_eval.decoder import Decoder, find_decoder
from lpes_eval.errors import FactorsError, UserError
from lpes_eval.factors import Factors, carried, carry, parse
from lpes_eval.rotary import KEPT, Tables, all_tables, is_fixed, named, one_table, own_table
from lpes_eval.weights import warn_of_other_weights

METHOD = "_peer_method"
"""The attribute by which another method (``lpes_eval.methods``) marks a module of the model that it is in: its name."""

logger = logging.getLogger(__name__)
_FACTORS, _LAYER = "_layer_factors", "_layer_number"

Given = Factors | Sequence[float] | np.ndarray | float | str | Path | Tensor | None


def apply(model: nn.Module, factors: Given = None) -> None:
    """Give every decoder layer of ``model`` its own factor, in place of any factors applied before.

    Args:
        model: a transformers causal language model with rotary position embeddings, on any device or several, in any
            dtype and with any attention implementation; also one wrapped by PEFT, except for prefix tuning.
        factors: one number a layer, from 0.001 to 1,000,000; or a factors object or file, or one number for all
            layers; or nothing, for those that the model's folder carries (``lpes_eval.save``); or a float tensor of
            shape (layers,), through which gradients flow and whose values count at each forward; only those that it has
            now are checked. Gradient checkpointing must then be non-reentrant (``use_reentrant=False``).

    Raises ``FactorsError`` (factors that cannot be read, or for another number of layers), ``UnsupportedModel`` with
    the reason, or ``UserError`` where another method (``lpes_eval.methods``) is in the model.

    While factors are in force, a key-value cache that was filled under others, or none, is refused (``CacheError``).
    Unseen are a cache given to a model without factors, a static cache and a tensor that changes its values under
    ``torch.compile``, and a continuous batching that runs while factors change.
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
        _change(rotary, _Rotary, {_FACTORS: state, _LAYER: number, KEPT: {}})
    for h, layer in enumerate(decoder.layers):
        _change(layer, _Layer, {_LAYER: h})


def resolve(model: nn.Module, factors: Given = None) -> tuple[Decoder, Factors, tuple[float, ...]]:
    """Where factors go in a model, which may be without weights; what they say; one number a layer."""
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
    """Undo ``apply`` exactly: no attribute or changed number is left, nor what the model's folder carried."""
    if (destroy := getattr(model, "destroy_cached_continuous_batching_manager", None)) is not None:
        destroy()  # with its rotated keys
    if applied(model) is not None:
        carry(getattr(model, "config", None), None)
    for module in model.modules():
        if (kinds := vars(type(module)).get("_kinds")) is not None:
            object.__setattr__(module, "__class__", kinds[1])
            for name in (_FACTORS, _LAYER, KEPT):
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


class _Changed:
    """A module with factors: of a subclass of this class and of its own class, ``_kinds``."""

    _kinds: tuple[type, type]

    def __init_subclass__(cls) -> None:
        """Leave out what transformers does for each subclass of its layers: wrap their forward once more."""

    def __reduce__(self) -> Any:
        """A copied or saved module is made from classes that can be imported."""
        return _blank, self._kinds, self.__getstate__()


@functools.cache
def _class_of(kind: type, plain: Any) -> Any:
    names: dict[str, Any] = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (kind, plain), names | {"_kinds": (kind, plain)})


def _blank(kind: type, plain: type) -> Any:
    made = _class_of(kind, plain)
    return made.__new__(made)


def _change(module: nn.Module, kind: type, attributes: dict[str, Any]) -> None:
    vars(module).update(attributes)
    plain: Any = type(module)
    object.__setattr__(module, "__class__", _class_of(kind, plain))


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
        fixed = is_fixed(self)
        if not fixed:  # the dynamic kinds choose their frequencies by the true length
            super().__call__(*args, **kwargs)  # type: ignore[misc]
        rotary: Any = self
        state, number, call = vars(self)[_FACTORS], vars(self)[_LAYER], named(args, kwargs)
        divisors = state.divisors_on(call["x"].device)
        if number is not None:
            return one_table(rotary, call, divisors, state.factor_layer[number])
        keep = fixed and state.tensor is None and not torch.compiler.is_compiling()
        return all_tables(rotary, call, divisors, state.factor_layer, keep)


class _Layer(_Changed):
    """Takes its own table out of all layers'."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        h = vars(self)[_LAYER]
        if type(tables := kwargs.get("position_embeddings")) is Tables:  # as most families hand them over
            kwargs["position_embeddings"] = tables.of(h)
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        own = {name: own_table(value, h) for name, value in kwargs.items()}
        return super().__call__(*[own_table(value, h) for value in args], **own)  # type: ignore[misc]


class _LayerFactors:
    """One set of factors in one decoder. It refers to no module, so a copy of one layer takes along what is its own."""

    def __init__(
        self, factor_layer: tuple[int, ...], values: tuple[float, ...], tensor: Tensor | None, origin: Mapping[str, Any]
    ) -> None:
        self.factor_layer, self._values, self.tensor, self.origin = factor_layer, values, tensor, origin
        self._divisors = torch.tensor(values, dtype=torch.float32)
        self.stamp = Stamp("were not rotated under the layer factors now in force", self.factors)

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors as they are now, one a layer."""
        return self._values if self.tensor is None else tuple(self.tensor.tolist())

    def divisors_on(self, device: torch.device) -> Tensor:
        """The factors, (layers,), kept on the device that was asked for last, as a GPU waits for a copy."""
        if self.tensor is not None:
            return self.tensor.to(device, torch.float32)
        if self._divisors.device != device:
            self._divisors = self._divisors.to(device)
        return self._divisors

    def check(self, caches: list[Cache]) -> None:
        """Refuse a cache that was filled under other factors, as far as can be told; stamp it."""
        if self.tensor is not None and not torch.compiler.is_compiling():  # which knows no tensor's values
            self.stamp = Stamp(self.stamp.otherwise, self.factors)
        for cache in caches:
            self.stamp.check(cache)
