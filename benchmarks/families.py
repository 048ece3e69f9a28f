"""Which transformers families take layer factors, found by building each one small and running it.

``python -m benchmarks.families`` prints ``docs/support.md`` for the transformers that is installed; with the names of
families (``gemma3_text qwen3_next``), what it says of these.

A family is a model type of ``AutoModelForCausalLM``. Each is built with random weights at about 100,000 parameters
(``families.yaml``). What the page says is what the model then did: a refused family has the reason that
``lpes_eval.apply`` gave, and the layers where factors change nothing are those where a factor of 2 changed nothing.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from lpes_eval import rope
from lpes_eval.errors import UnsupportedModel

_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SIZES: dict[str, Any] = {name: size for size, names in _DATA["sizes"].items() for name in names}
PARTICULARS: dict[str, dict[str, Any]] = _DATA["particulars"]
CONDITIONS: dict[str, str] = _DATA["conditions"]
NOT_BUILT: dict[str, str] = _DATA["not_built"]


def _sized(config_class: Any, particulars: dict[str, Any]) -> dict[str, Any]:
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
            arguments[name] = {**_sized(sub_class, own), "model_type": sub_class.model_type}
    arguments.update({name: value for name, value in particulars.items() if name not in config_class.sub_configs})
    if "layer_types" in names and "layer_types" not in particulars:
        arguments.update(_alternating(config_class, arguments))
    return arguments


def _alternating(config_class: Any, arguments: dict[str, Any]) -> dict[str, Any]:
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


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The configuration of a small model of a family; ``changes`` are set last."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**{**_sized(config_class, PARTICULARS.get(model_type, {})), **changes})


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A causal LM of random weights, float32, on the CPU, in eval mode; the same weights for the same ``seed``."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if not parameter.any():  # zeros hide what they multiply, in ZAYA all of attention
                parameter.normal_(0.0, 0.2)
    return model


class Family(NamedTuple):
    """A family, its status (``supported``, ``refused`` or ``not built``), and the reason or what is particular."""

    model_type: str
    status: str
    notes: str = ""


def model_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def examine(model_type: str) -> Family:
    """Build a family small, apply factors and run it; say what it did."""
    if model_type in NOT_BUILT:
        return Family(model_type, "not built", NOT_BUILT[model_type])
    if model_type in rope.REFUSED:
        return Family(model_type, "refused", rope.REFUSED[model_type])
    model = tiny_model(tiny_config(model_type))
    try:
        decoder = rope.find_decoder(model)
    except UnsupportedModel as refusal:
        reason = str(refusal).split(": ", 1)[1].split(";")[0]  # without the model's name and the general advice
        return Family(model_type, "refused", reason)
    notes = [CONDITIONS.get(model_type, ""), _without_effect(model, decoder)]
    if any(owner != h for h, owner in enumerate(decoder.factor_layer)):
        notes.append("a layer that attends to an earlier layer's keys takes that layer's factor")
    return Family(model_type, "supported", "; ".join(filter(None, notes)))


def _without_effect(model: Any, decoder: rope.Decoder) -> str:
    """The layers where a factor of 2 leaves the logits as they were, by kind where a whole kind is without effect."""
    tokens, depth = torch.arange(3, 27)[None], len(decoder.layers)

    def logits(factors: list[float] | None = None) -> Any:
        if factors:
            rope.apply(model, factors)
        with torch.no_grad():
            found = model(input_ids=tokens, use_cache=False).logits
        rope.remove(model)
        return found

    plain = logits()
    idle = [h for h in range(depth) if torch.equal(logits([1.0 + (h == layer) for layer in range(depth)]), plain)]
    assert torch.equal(logits([1.0] * depth), plain), "factors of 1 change what the model computes"
    assert len(idle) < depth, "factors change nothing in any layer"
    idle = [h for h in idle if decoder.factor_layer[h] == h]
    if not idle:
        return ""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ["decoder"] * depth
    whole = list(dict.fromkeys(kinds[h] for h in idle))
    if sum(kinds.count(name) for name in whole) == len(idle):
        return f"no effect in {' and '.join(name.replace('_', ' ') for name in whole)} layers"
    return f"no effect in layers without positions ({len(idle)} of {depth} here)"


def listed(families: Iterable[Family], status: str) -> str:
    """The families of a status as a Markdown list: those with the same notes together."""
    groups: dict[str, list[str]] = {}
    for family in families:
        if family.status == status:
            groups.setdefault(family.notes, []).append(f"`{family.model_type}`")
    return "\n".join(f"- {f'{notes}: ' if notes else ''}{', '.join(groups[notes])}" for notes in sorted(groups))


def document() -> str:
    """The whole of ``docs/support.md``."""
    families = [examine(model_type) for model_type in model_types()]
    sections = {}
    for status in ("supported", "refused", "not built"):
        name, count = status.replace(" ", "_"), sum(family.status == status for family in families)
        sections |= {name: count, f"{name}_list": listed(families, status)}
    words = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return words.format(families=len(families), version=transformers.__version__, **sections)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the document, or what it says of the families named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="only these model types, such as llama")
    families = parser.parse_args(argv).families
    logging.set_verbosity_error()
    if unknown := [name for name in families if name not in model_types()]:
        parser.error(f"no causal-LM family of this transformers is called {', '.join(unknown)}")
    if not families:
        print(document(), end="")
    for family in map(examine, families):
        print(": ".join(filter(None, family)))


if __name__ == "__main__":
    main()
