"""Every causal-LM family of transformers, small: about 100,000 random weights (sizes in ``tiny_models.yaml``)."""

from dataclasses import fields
from pathlib import Path

import torch
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SIZES = {name: size for size, names in DATA["sizes"].items() for name in names}
PARTICULARS = DATA["particulars"]
FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
BUILT = sorted({*FAMILIES} - {*DATA["not_built"]})


def sized(config_class, particulars):
    """Keyword arguments that make a ``config_class`` and its sub-configurations small."""
    names = {field.name for field in fields(config_class)}
    arguments = {name: size for name, size in SIZES.items() if name in names}
    if "qk_nope_head_dim" in names:  # latent attention has a key head for each query head
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    for name, declared in config_class.sub_configs.items():
        own = dict(particulars.get(name, {}))
        sub_class = CONFIG_MAPPING[own.pop("model_type")] if "model_type" in own else declared
        if name in names and hasattr(sub_class, "__dataclass_fields__"):
            own = {**PARTICULARS.get(sub_class.model_type, {}), **own}
            arguments[name] = {**sized(sub_class, own), "model_type": sub_class.model_type}
    arguments.update({name: value for name, value in particulars.items() if name not in config_class.sub_configs})
    if "layer_types" in names and "layer_types" not in particulars:
        arguments.update(alternating(config_class, arguments))
    return arguments


def alternating(config_class, arguments):
    """The kinds of layer that ``config_class`` alternates at its full depth, one after the other over a few layers."""
    try:
        kinds = list(dict.fromkeys(config_class().layer_types or ()))
    except Exception:  # a configuration without defaults says nothing about its kinds
        return {}
    if len(kinds) < 2:
        return {}
    kinds.sort(key="full_attention".__eq__)  # several families insist on a last layer of this kind
    depth = arguments.get("num_hidden_layers", 4)
    return {"layer_types": [kinds[(layer - depth) % len(kinds)] for layer in range(depth)]}


def tiny_config(model_type, **changes):
    """The configuration of a small model of a family; ``changes`` are set last."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**{**sized(config_class, PARTICULARS.get(model_type, {})), **changes})


def tiny_model(config, seed=0):
    """A causal LM of random weights, float32, on the CPU, in eval mode; the same weights for the same ``seed``."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if not parameter.any():  # zeros hide what they multiply, in ZAYA all of attention
                parameter.normal_(0.0, 0.2)
    return model
