"""Where rotary position embeddings are in a transformers model; ``docs/support.md`` lists the families."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lpes_eval.errors import UnsupportedModel

_WHOLE_POSITIONS = "each attention looks its rotation up in a table of whole positions"
_OTHER_KEYS = "it attends to another model's keys, which that model has rotated"
REFUSED = {
    "blt": "four transformers (bytes in, patches, bytes out, patcher), so no single stack of layers",
    "codegen": _WHOLE_POSITIONS,
    "gptj": _WHOLE_POSITIONS,
    "roformer": "it rotates by a table of whole positions that is made once for all layers",
    "gemma4_assistant": _OTHER_KEYS,
    "gemma4_unified_assistant": _OTHER_KEYS,
    "hrm_text": "it runs two stacks of layers several times a forward, so a layer has no depth of its own",
}
"""Model types that have the parts and still cannot be given layer factors: type -> reason."""


@dataclass(frozen=True)
class Decoder:
    """The parts of a model that factors concern: the ``module`` whose forward runs through the ``layers``."""

    module: nn.Module
    layers: tuple[nn.Module, ...]
    rotaries: tuple[nn.Module, ...]
    """The rotary modules whose output is handed down to all layers."""
    own: dict[int, tuple[nn.Module, ...]]
    """The layers' own rotary modules, where they have them, by layer."""
    factor_layer: tuple[int, ...]
    """For each layer the one whose factor it takes: itself, or the one that rotated its keys (Gemma 3n, Gemma 4)."""


def find_decoder(model: nn.Module) -> Decoder:
    """Find the decoder layers and rotary modules of ``model``, or raise ``UnsupportedModel`` with the reason."""
    config: Any = model.config
    kind = config.model_type

    def refuse(reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{kind}: {reason}; layer factors scale rotary position embeddings (docs/support.md)")

    if config.is_encoder_decoder:
        raise refuse("an encoder-decoder model, not a causal language model")
    if kind in REFUSED:
        raise refuse(REFUSED[kind])
    text = config.get_text_config(decoder=True)
    if getattr(text, "alibi", False):
        raise refuse("this configuration uses ALiBi instead of rotary position embeddings")
    depths = {getattr(text, "num_hidden_layers", None), getattr(text, "num_layers", None)}
    get_decoder: Any = getattr(model, "get_decoder", lambda: None)
    stacks = _stacks(get_decoder(), depths) or _stacks(model, depths)  # the decoder first: not the vision tower
    if not stacks:
        raise refuse("no decoder layers with rotary position embeddings were found in it")
    owner, layers = min(stacks, key=lambda stack: sum(1 for _ in stack[0].modules()))  # the innermost
    if len(set(layers)) != len(layers):
        raise refuse("it runs the same layer at several depths, so a layer has no depth of its own")

    own = {h: tuple(found) for h, layer in enumerate(layers) if (found := _rotaries(layer))}
    shared = tuple(module for module in _rotaries(owner) if all(module not in found for found in own.values()))
    if shared and not any({"position_embeddings", "**"} & {*arguments(layer)} for layer in layers):
        raise refuse("its layers compute their rotation from something other than handed-down position embeddings")
    if (owners := _key_owners(text, layers)) is None:
        raise refuse("some of its layers attend to keys of earlier layers, and its configuration does not say of which")
    return Decoder(owner, layers, shared, own, owners)


def _key_owners(config: Any, layers: tuple[nn.Module, ...]) -> tuple[int, ...] | None:
    """For each layer the layer that rotated the keys it attends to; None where the configuration does not say."""
    first_shared = len(layers) - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = getattr(config, "layer_types", None) or [None] * len(layers)
    for layer in layers[:first_shared]:
        known = [module.is_kv_shared_layer for module in layer.modules() if hasattr(module, "is_kv_shared_layer")]
        if any(known) or (not known and any("shared_kv_states" in arguments(module) for module in layer.modules())):
            return None
    shared = range(first_shared, len(layers))
    return (*range(first_shared), *(max(k for k in range(first_shared) if kinds[k] == kinds[h]) for h in shared))


def _stacks(root: nn.Module | None, depths: set[int | None]) -> list[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """Lists of layers as deep as the model, each with the module that holds it, where something in it rotates."""
    return [
        (owner, tuple(child))
        for owner in (root.modules() if root is not None else ())
        for child in owner.children()
        if isinstance(child, nn.ModuleList) and len(child) in depths and _rotaries(owner)
    ]


def _rotaries(module: nn.Module) -> list[nn.Module]:
    """The modules within that turn position ids into rotary tables."""
    return [m for m in module.modules() if "Rotary" in type(m).__name__ and "position_ids" in arguments(m)]


def arguments(module: nn.Module) -> tuple[str, ...]:
    """The names of what a module's forward takes, in order; ``**`` where it takes anything."""
    own: Any = getattr(module, "_orig_mod", module)  # of one that torch.compile has wrapped
    return _names(type(own).forward)


@functools.cache
def _names(forward: Callable) -> tuple[str, ...]:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple("**" if one.kind is one.VAR_KEYWORD else one.name for one in parameters)


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its input; of one whose weights accelerate keeps elsewhere, its hooks say it."""
    if (device := next(model.parameters()).device).type != "meta":
        return device
    places = (getattr(getattr(module, "_hf_hook", None), "execution_device", None) for module in model.modules())
    return torch.device(next((place for place in places if place is not None), device))
