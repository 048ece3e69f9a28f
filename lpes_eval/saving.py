"""Models with their factors in one folder: ``config.json`` carries them, and whoever loads the folder here has them.

    >>> lpes_eval.save(model, "folder")
    >>> model = lpes_eval.load_model("folder")     # or lm_eval --model lpes --model_args pretrained=folder

Plain transformers loads the same folder as the plain model, until ``lpes_eval.apply(model)``.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lpes_eval import reference, rope
from lpes_eval.errors import UserError, first_line
from lpes_eval.factors import carried, carry
from lpes_eval.weights import fingerprint


def save(model: PreTrainedModel, folder: str | Path, **options: Any) -> None:
    """Save a model with the factors in force, or raise ``UserError``; the options are ``save_pretrained``'s."""
    if Path(folder).is_file():
        raise UserError(f"{folder}: is a file; expected a folder, or a name that is not there yet")
    if (factors := rope.in_force(model)) is None:
        raise UserError("the model has no layer factors to save; apply some first, or use model.save_pretrained")
    if getattr(model, "peft_config", None):
        raise UserError("of a model with an adapter only the adapter is saved; merge it first (merge_and_unload)")
    if "weights" not in factors.origin and (here := fingerprint(model)) is not None:
        factors = replace(factors, origin={**factors.origin, "weights": here})
    carry(model.config, factors)
    try:
        model.save_pretrained(folder, **options)
    except ValueError as error:
        if "not serializable" not in str(error):
            raise
        way_out = "keep its file, and load it with the factors (--model_args gguf_file=...,factors=...)"
        raise UserError(f"{folder}: transformers does not save it ({first_line(error)}); {way_out}") from None


def load_model(name: str | Path, **options: Any) -> PreTrainedModel:
    """Load a causal language model, with the factors that its folder carries in force.

    ``name`` is a folder, a name on the Hub, ``reference`` or ``reference-kv``; the options are ``from_pretrained``'s.
    ``FactorsError`` comes before any weight is loaded.
    """
    name = reference.folder(name)
    config = options.get("config")
    if not isinstance(config, PreTrainedConfig):  # transformers passes over what is none
        config = AutoConfig.from_pretrained(name, **{key: value for key, value in options.items() if key != "config"})
    factors = carried(config)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, **options)
    if factors is not None:
        rope.apply(model)
    return model
