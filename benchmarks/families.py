"""Which transformers families take layer factors, found by building each one small and running it.

``python -m benchmarks.families`` prints the table of ``docs/support.md`` for the transformers that is installed;
``python -m benchmarks.families gemma3_text qwen3_next`` prints the rows of the families named, and a family that this
version of the table has never heard of is built and run in the same way as the others.

A family is a model type of ``AutoModelForCausalLM``. Each is built with random weights at about 100,000 parameters: the
fields of its configuration that set a size are replaced by the entries of ``SIZES``, kinds of layers that alternate are
kept (``layer_types``), and the few configurations that need more have an entry in ``PARTICULARS``. What a row says is
what the model then did, not what its source promises: the row of a refused family carries the reason that
``lpes_eval.apply`` gave, and the layers where factors change nothing are those where a factor of 2 changed nothing.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

from lpes_eval.errors import UnsupportedModel

#: Sizes by the name of the configuration field; names that mean the same thing in different families have one value.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "lru_width", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "linear_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 16),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "dim_ff"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("dense_intermediate_size", "shared_experts_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "n_group", "topk_group"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "adapter_rank", "index_head_dim"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length"), 512),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 16),
    **dict.fromkeys(("hidden_size_per_layer_input", "chunk_size", "mamba_chunk_size", "state_size"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "rotary_dim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "index_n_heads": 2,
    "index_topk": 64,
    "mamba_d_ssm": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # ten times the usual value: at these widths 0.02 leaves attention so flat that a rotation hardly shows
    "initializer_range": 0.2,
}

#: What a configuration needs beside SIZES. A nested dict belongs to the sub-configuration of that name.
PARTICULARS: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_num_experts": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "cpmant": {"dim_head": 16, "prompt_length": 4, "prompt_types": 4, "position_bias_num_buckets": 32},
    "ctrl": {"dff": 64},
    "dbrx": {
        # its attention reads a rope_theta that DbrxAttentionConfig does not declare
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "hidden_size": 64},
    },
    "deepseek_v4": {"o_groups": 2, "hc_mult": 2},
    "dots3_note_text": {
        "head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "fuyu": {"text_config": {"model_type": "persimmon"}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", "image_size": 28}},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {"num_kv_shared_layers": 2},
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 64, "output_proj_dims": 64, "mm_posemb_size": 16}},
    "gemma4_unified_text": {"num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "got_ocr2": {"text_config": {"model_type": "qwen2"}},
    **{
        name: {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "layer_rope_theta": [10000.0, 100000.0, 10000.0, 0],
        }
        for name in ("granite_swa", "granitemoe_swa")
    },
    "granitemoehybrid": {
        "position_embedding_type": "rope",
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16},
    "inkling2_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"kv_channels": 16},
    "laguna": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 16},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "minimax": {"block_size": 16},
    "minimax_m3_vl_text": {"index_block_size": 8, "index_topk_blocks": 2},
    "modernbert-decoder": {"local_attention": 16},
    "moshi": {"audio_encoder_config": {"model_type": "mimi"}, "audio_vocab_size": 64},
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3"}},
    "phi4_multimodal": {"audio_config": {"num_blocks": 1, "nemo_conv_channels": 16, "ext_pw_out_channel": 64}},
    "qwen3_moe": {"num_experts": 4},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {"shape_vocab_size": 64, "shape_embed_dim": 16},
    "xlm": {"emb_dim": 64, "n_words": 128},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "use_mem_rope": True},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}

#: Families in which a configuration decides whether there is a rotary embedding at all.
CONDITIONS: dict[str, str] = {
    "falcon": "refused with alibi in its configuration",
    "granitemoehybrid": 'only with position_embedding_type "rope" in its configuration',
    "zamba2": "only with use_mem_rope in its configuration",
}

#: Families that are not built here, and why.
NOT_BUILT: dict[str, str] = {
    "dots3_note": "its vision and audio towers have no small form; its text model is dots3_note_text",
    "gemma3n": "its vision tower needs the timm package; its text model is gemma3n_text",
    "musicgen": "transformers cannot build it as a causal LM from its own configuration",
    "musicgen_melody": "transformers cannot build it as a causal LM from its own configuration",
}


def _sized(config_class: Any, particulars: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that make a small ``config_class``; sub-configurations are made small in the same way."""
    from transformers import CONFIG_MAPPING

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
    """The kinds of layer that ``config_class`` alternates at its full depth, one after the other over four layers."""
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
    """The configuration of a small model of the family ``model_type``; ``changes`` are set last."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    return config_class(**{**_sized(config_class, PARTICULARS.get(model_type, {})), **changes})


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A causal LM of random weights, float32, on the CPU, in eval mode; the same weights for the same ``seed``."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if not parameter.any():  # zeros hide what they multiply, in ZAYA all of attention
                parameter.normal_(0.0, 0.2)
    return model


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        model_type: the name in ``config.json``.
        class_name: the class that ``AutoModelForCausalLM`` makes of it.
        status: ``supported``, ``refused``, or ``not built`` where nothing could be run.
        rotary: what its rotary module computes, in words; empty unless supported.
        notes: the reason of a refusal; or layers in which factors change nothing.
    """

    model_type: str
    class_name: str
    status: str
    rotary: str = ""
    notes: str = ""


def model_types() -> dict[str, str]:
    """Every causal-LM family of the installed transformers: model type -> class name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def examine(model_type: str) -> Family:
    """Build the family ``model_type`` small, apply factors and run it; what it did is the row."""
    import torch
    from transformers import AutoModelForCausalLM

    from lpes_eval import rope

    class_name = model_types()[model_type]
    if model_type in NOT_BUILT:
        return Family(model_type, class_name, "not built", notes=NOT_BUILT[model_type])
    if model_type in rope.REFUSED:
        return Family(model_type, class_name, "refused", notes=rope.REFUSED[model_type])
    config = tiny_config(model_type)
    with torch.device("meta"):  # a refusal needs no weights
        empty = AutoModelForCausalLM.from_config(config)
    try:
        decoder = rope.find_decoder(empty)
    except UnsupportedModel as refusal:
        return Family(model_type, class_name, "refused", notes=_reason(refusal))
    model = tiny_model(config)
    notes = (
        CONDITIONS.get(model_type, ""),
        _without_effect(model, len(decoder.layers)),
        _sharing(decoder.factor_layer),
    )
    return Family(model_type, class_name, "supported", _rotary_form(model), "; ".join(filter(None, notes)))


def _reason(refusal: UnsupportedModel) -> str:
    """The part of a refusal between the model's name and the general advice."""
    return str(refusal).split(": ", 1)[1].split(";")[0]


def _without_effect(model: Any, depth: int) -> str:
    """The layers where a factor of 2 leaves the logits as they were, by kind where a whole kind is without effect.

    Raises:
        RuntimeError: all factors of 1 change the logits, or no factor changes them.
    """
    import torch

    from lpes_eval import rope

    tokens = torch.arange(3, 27)[None]

    def logits(factors: list[float]) -> Any:
        rope.apply(model, factors)
        try:
            with torch.no_grad():
                return model(input_ids=tokens, use_cache=False).logits
        finally:
            rope.remove(model)

    with torch.no_grad():
        plain = model(input_ids=tokens, use_cache=False).logits
    kind = model.config.model_type
    if not torch.equal(logits([1.0] * depth), plain):
        raise RuntimeError(f"{kind}: factors of 1 change what the model computes")
    idle = [h for h in range(depth) if torch.equal(logits([1.0 + (h == layer) for layer in range(depth)]), plain)]
    if len(idle) == depth:
        raise RuntimeError(f"{kind}: factors change nothing in any layer")
    owners = rope.find_decoder(model).factor_layer
    idle = [h for h in idle if owners[h] == h]
    if not idle:
        return ""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ["decoder"] * depth
    whole = list(dict.fromkeys(kinds[h] for h in idle))
    if sum(kinds.count(name) for name in whole) == len(idle):
        return f"no effect in {' and '.join(name.replace('_', ' ') for name in whole)} layers"
    return f"no effect in layers without positions ({len(idle)} of {depth} here)"


def _sharing(factor_layer: tuple[int, ...]) -> str:
    if all(owner == h for h, owner in enumerate(factor_layer)):
        return ""
    return "a layer that attends to an earlier layer's keys takes that layer's factor"


def _rotary_form(model: Any) -> str:
    """What the rotary modules are asked for and answer in one forward, in words."""
    import torch

    from lpes_eval import rope

    decoder = rope.find_decoder(model)
    own = [module for found in decoder.own.values() for module in found]
    calls: list[tuple[Any, Any, Any]] = []  # (module, its arguments by name, its answer)

    def note(module: Any, args: tuple, kwargs: dict[str, Any], answer: Any) -> None:
        calls.append((module, signature(type(module).forward).bind(module, *args, **kwargs).arguments, answer))

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in (*decoder.rotaries, *own)]
    with torch.no_grad():
        model(input_ids=torch.arange(3, 27)[None], use_cache=False)
    for handle in handles:
        handle.remove()

    words = ["complex" if any(torch.is_tensor(answer) for _, _, answer in calls) else "cos, sin"]
    text = model.config.get_text_config()
    parameters = text.rope_parameters
    sets = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    kinds = sorted({str(one.get("rope_type", "default")) for one in sets} - {"default"})
    words += [f"{kind} by default" for kind in kinds]
    if any(one.get("partial_rotary_factor", 1.0) != 1.0 for one in sets):
        words.append("partial")
    if len({(id(module), arguments.get("layer_type")) for module, arguments, _ in calls if module not in own}) > 1:
        words.append("several tables")
    if any(arguments["position_ids"].ndim == 3 for _, arguments, _ in calls):
        words.append("three position axes")
    if own:
        words.append("inside each attention" if not decoder.rotaries else "and inside the attention")
    return ", ".join(words)


def table(families: Iterable[Family]) -> str:
    """The rows as Markdown."""
    lines = ["| model type | class | factors | rotary table | notes |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {f.model_type} | {f.class_name} | {f.status} | {f.rotary} | {f.notes} |" for f in families]
    return "\n".join(lines) + "\n"


def document() -> str:
    """The whole of ``docs/support.md``."""
    import transformers

    families = [examine(model_type) for model_type in model_types()]
    count = Counter(family.status for family in families)
    return (
        "# Model families\n\n"
        "<!-- made by `python -m benchmarks.families > docs/support.md`; do not edit -->\n\n"
        f"The {len(families)} causal-LM families of transformers {transformers.__version__}, built small with random "
        f"weights and, unless refused, run with and without factors: {count['supported']} take layer factors, "
        f"{count['refused']} are refused (`lpes_eval.apply` raises `UnsupportedModel` with the reason), "
        f"{count['not built']} could not be built for this table.\n\n"
        "`rotary table` says what the family's rotary module answers: cosines and sines or complex rotations; its own "
        "kind of RoPE where that is not the default one; `partial` where only part of a head is rotated; `several "
        "tables` where kinds of attention have frequencies of their own. A factor applies to all of them.\n\n"
        "`no effect` names layers that the factors do not change, because they do not rotate (linear attention, "
        "state-space and convolution layers, and attention without positions). A factor there is harmless.\n\n"
        "A model wrapped by PEFT takes factors like the model inside it, for example with LoRA, IA3 or prompt tuning. "
        "Prefix tuning and cartridges are refused: their keys are learnt and put into the cache as they are, so they "
        "fit the rotation that they were learnt under, and no factor can rotate them anew.\n\n" + table(families)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the document, or the rows of the families named; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.families",
        description="Build every causal-LM family of the transformers that is installed, small and with random "
        "weights, run it, and print which of them take layer factors, as in docs/support.md. It takes minutes.",
    )
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help="only these model types, such as llama gemma3_text"
    )
    families = parser.parse_args(argv).families
    from transformers.utils import logging

    logging.set_verbosity_error()
    if unknown := [name for name in families if name not in model_types()]:
        print(f"no causal-LM family of this transformers is called {', '.join(unknown)}", file=sys.stderr)
        return 2
    print(table(map(examine, families)) if families else document(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
