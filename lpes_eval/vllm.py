"""Layer factors in vLLM: its plug-in, which vLLM loads by itself where this package is installed.

    >>> vllm.LLM("folder")                                                  # of lpes_eval.save, which carries factors
    >>> vllm.LLM("model", hf_overrides={"lpes_factors": "factors.json"})    # or a list, a number, an object

Every layer gets a copy of the rotary module, whose frequencies are divided by its factor (Eq. 2). Tried with vLLM 0.32.
"""

import copy
import functools
import logging
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lpes_eval.errors import UnsupportedModel, UserError
from lpes_eval.factors import FIELD, Factors, carried, parse

logger = logging.getLogger(__name__)

KINDS = ["RotaryEmbedding", "LinearScalingRotaryEmbedding", "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding"]
"""vLLM's rotary modules whose whole table follows from ``_compute_inv_freq``."""


def register() -> None:
    """Have vLLM apply the factors that a model's configuration carries, when it makes the model."""
    try:
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader

        original = BaseModelLoader.create_model
    except (ImportError, AttributeError) as error:
        logger.warning("this vLLM is not known (%s): layer factors that a model carries have no effect", error)
        return
    if getattr(original, "applies_factors", False):  # vLLM may load its plug-ins several times
        return

    @functools.wraps(original)
    def create_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        model: nn.Module = original(self, vllm_config, model_config, prefix)
        typed = model_config.hf_overrides
        typed = typed.get(FIELD) if isinstance(typed, dict) else None
        factors = parse(typed) if typed is not None else carried(model_config.hf_config)
        if factors is not None:
            apply(model, factors, model_config.hf_text_config)
        return model

    create_model.applies_factors = True  # type: ignore[attr-defined]
    BaseModelLoader.create_model = create_model


def apply(model: nn.Module, factors: Factors, config: Any) -> None:
    """Give every decoder layer that is on this machine a rotary module of its own; ``config`` is the text model's."""
    values, attentions = factors.per_layer(config.num_hidden_layers), rotating(model)
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedModel(f"{type(model).__name__}: has layers that share keys, which rotate once")
    for h, attention in attentions:
        shared, attention.rotary_emb = attention.rotary_emb, copy.deepcopy(attention.rotary_emb)
        attention.rotary_emb.register_buffer("cos_sin_cache", table(shared, values[h]), persistent=False)


class Worker:
    """What vLLM's workers learn by ``worker_extension_cls="lpes_eval.vllm.Worker"``: other factors while they run.

    The caller resets the prefix cache (``LLM.reset_prefix_cache``): keys in it are rotated already.
    """

    def set_lpes_factors(self, factors: Sequence[float]) -> None:
        """Write other factors' tables in place of those in force, one a layer, where compiled code finds them too.

        ``UserError``: no factors, or a model without factors, whose layers share a rotary module.
        """
        layers = rotating(self.get_model())  # type: ignore[attr-defined]
        if len({id(attention.rotary_emb) for _, attention in layers}) < len(layers):
            raise UserError('the model was loaded without factors; load it with hf_overrides={"lpes_factors": 1}')
        values = Factors.from_list(factors).per_layer()
        for h, attention in layers:
            attention.rotary_emb.cos_sin_cache.copy_(table(attention.rotary_emb, values[h]))


def rotating(model: nn.Module) -> list[tuple[int, Any]]:
    """The layers on this machine, by number, and the module of each that rotates."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for name, module in model.named_modules():
        at = re.search(r"(.*)\blayers\.(\d+)(\.|$)", name)
        if at and isinstance(getattr(module, "rotary_emb", None), nn.Module):
            found.setdefault(at[1], []).append((int(at[2]), module))
    if len(found) != 1:
        raise UnsupportedModel(f"{type(model).__name__}: has {len(found)} stacks of layers that rotate, expected one")
    return found.popitem()[1]


def table(rotary: Any, factor: float) -> Tensor:
    """A rotary module's cosines and sines with its frequencies divided by ``factor``."""
    kind: Any = type(rotary)
    if kind.__name__ not in KINDS or not kind.__module__.startswith("vllm."):
        found = f"{kind.__name__}: layer factors were not tried with it in vLLM"
        raise UnsupportedModel(f"{found}; it takes {', '.join(KINDS)}")
    rotary._compute_inv_freq = lambda base: kind._compute_inv_freq(rotary, base) / factor
    try:
        return rotary._compute_cos_sin_cache().to(rotary.cos_sin_cache)
    finally:
        del rotary._compute_inv_freq
