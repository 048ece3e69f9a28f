"""What an engine has to know about a model before it answers: whether it can be exact, and which prompts do not fit."""

from collections.abc import Sequence
from typing import Any

from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lpes_eval.errors import UserError

SAMPLING = {"do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p"}
HARMLESS = SAMPLING | {
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "max_length", "transformers_version"
}  # fmt: skip
"""Entries of a generation config that leave greedy decoding the most probable token, one after another."""
NEUTRAL: dict[str, float] = {"repetition_penalty": 1, "length_penalty": 1, "num_beams": 1, "min_length": 0}
"""Further entries, which do so at these values."""


def reason_against(lm: Any, requests: Sequence[Any]) -> str | None:
    """Why these requests have to be answered by lm-eval itself; None if they need not."""
    if not isinstance(lm, HFLM) or lm.backend != "causal":
        return "the model is not a causal transformers model"
    if type(lm)._model_generate is not HFLM._model_generate or lm.think_end_token is not None:
        return "the model generates in a way of its own"
    if any(request.request_type != "generate_until" or len(request.args) != 2 for request in requests):
        return "not all requests are for generated text"
    for request in requests:
        asked = normalize_gen_kwargs(request.args[1], lm.max_gen_toks)
        others = set(asked) - {"until", "max_gen_toks", *SAMPLING}
        if asked.get("do_sample") or others:
            return f"generation is not plainly greedy ({', '.join(sorted(others)) or 'do_sample'})"
    generation = lm.model.generation_config.to_diff_dict()
    effective = {key for key, value in generation.items() if value not in (None, False) and NEUTRAL.get(key) != value}
    if others := {key for key in effective - HARMLESS if not key.startswith("_")}:
        return f"the model's generation config sets {', '.join(sorted(others))}"
    config = lm.model.config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if kinds - {DynamicLayer, DynamicSlidingWindowLayer} or getattr(config, "attention_chunk_size", None):
        return "not all of its layers attend to the text or to a window of it"
    if getattr(config, "num_kv_shared_layers", None):
        return "some of its layers attend to another layer's keys"
    if (attention := lm.model.config._attn_implementation) not in ("sdpa", "eager"):
        return f"answers were not compared under {attention} attention"
    rope = getattr(config, "rope_parameters", None) or {}
    types = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    if dynamic := types & {"dynamic", "longrope"}:
        return f"its {dynamic.pop()} positions depend on how far decoding has come"
    return None


def draws(lm: Any, requests: Sequence[Any]) -> bool:
    """Whether any of the answers is drawn at random."""
    asked = [request.args[1] for request in requests if request.request_type == "generate_until"]
    return any(normalize_gen_kwargs(options, lm.max_gen_toks).get("do_sample") for options in asked)


def no_number(factors: Sequence[float]) -> UserError:
    """The error of a model whose logits are NaN under these factors."""
    found = f"under factors {', '.join(f'{s:g}' for s in factors)} the model's logits are not numbers (NaN)"
    return UserError(f"{found}; take a wider dtype (--model_args dtype=float32), and see if the plain model answers")


def is_cut(lm: Any, request: Any) -> bool:
    """Whether ``hf`` cuts a request's prompt from the left, to make it fit the model's window."""
    if not isinstance(lm, HFLM) or lm.backend != "causal":
        return False
    if request.request_type == "generate_until":
        return fitted(lm, *request.args)[1]
    if request.request_type == "loglikelihood":
        context, continuation = request.args
        pair = lm._encode_pair(context, continuation) if context else ([0], lm.tok_encode(continuation))
        return sum(map(len, pair)) > lm.max_length + 1  # the last token is not fed
    return False  # a rolling one goes by windows


def fitted(lm: HFLM, context: str, options: dict[str, Any]) -> tuple[list[int], bool]:
    """A prompt's tokens as ``hf`` hands them to the model, and whether it cut others off; ``UserError`` for no room."""
    max_new = normalize_gen_kwargs(options, lm.max_gen_toks)["max_gen_toks"]
    if max_new >= lm.max_length:
        found = f"answers of so many tokens leave the prompt no room in the model's {lm.max_length}"
        raise UserError(f"max_gen_toks={max_new}: {found}; take fewer (--gen_kwargs max_gen_toks=N)")
    whole = tokens = lm.tok_batch_encode([context])[0][0].tolist()
    if lm.truncation:
        tokens = lm.tok_batch_encode([context], truncation=True)[0][0].tolist()
    tokens = tokens[max_new - lm.max_length :]
    return tokens, len(tokens) < len(whole)
