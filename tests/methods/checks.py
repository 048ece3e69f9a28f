"""What the tests of several methods share: families, small inputs, generation, and runs of lm-eval."""

import contextlib

import lm_eval
import torch
from transformers import CONFIG_MAPPING

from lpes_eval import methods

FAMILIES = (
    "llama",
    "cohere",  # neighbours paired
    "cohere2",  # layers without positions, which get the tables all the same
    "flint",  # a learnt sink for each head
    "gemma2",  # soft capping
    "gemma3_text",  # two rotary tables
    "glm",  # neighbours paired in a half of each head
    "gpt_neox",  # a cache by another name
    "gpt_oss",  # attention sinks, and a table of half the width
    "granite_swa",  # layers without positions, which get none
    "mistral",
    "nemotron",
    "phi",  # a part of the head rotated
    "phi3",  # one projection for queries, keys and values
    "qwen2",
    "qwen3",  # queries and keys normalised
)
FAMILIES = tuple(name for name in FAMILIES if name in CONFIG_MAPPING)  # older versions of transformers lack some
LENGTH, PADDING = 20, 5
TASK = "kv_retrieval"


def inputs(rows=2, length=LENGTH, padding=PADDING):
    """Rows of tokens, of which the first one is padded at the left."""
    ids = torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def logits(model, **given):
    return model(**({} if "input_ids" in given else inputs()) | given).logits


@torch.no_grad()
def generated(model, given=None, **options):
    """The logits of five greedy steps, (5, B, V)."""
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    return torch.stack(
        model.generate(**(given or inputs()), return_dict_in_generate=True, output_logits=True, **options).logits
    )


def apart(a, b):
    return (a - b).abs().max().item()


def attach(name, model):
    """A method in a model, with settings under which it makes a difference to a few random tokens."""
    kind = methods.load(name)
    settings = {
        "ms_poe": {"min": 2, "max": 20, "skip": 1, "threshold": 1.5},
        "positional_channel": {"channel": 5, "scale": -3},
        "string": {"shift": 6, "window": 2},
    }.get(name) or kind.benchmark_settings(model)
    for router in settings.values() if name == "moice" else ():
        spread(router).requires_grad_(False)
    return kind.apply(model, **settings)


def prompt_ends_at(method, column):
    """Say so to a method that wants to know."""
    return method.prompt_ends_at(column) if hasattr(method, "prompt_ends_at") else contextlib.nullcontext()


def evaluate(model, task_manager, arguments="", limit=2, **metadata):
    """Results of the harness, with samples, on contexts of eight records."""
    return lm_eval.simple_evaluate(
        model,
        model_args=arguments,
        tasks=[TASK],
        limit=limit,
        batch_size=4,
        task_manager=task_manager(**{"num_keys": 8, "positions": [0, 100]} | metadata),
        log_samples=True,
        bootstrap_iters=0,
    )


def answers(results):
    return [(sample["doc_id"], sample["arguments"], sample["resps"]) for sample in results["samples"][TASK]]


def spread(router):
    """MoICE's router with weights so large that those of the bases are far from equal."""
    with torch.no_grad():
        for weight in router.parameters():
            weight.mul_(40)
    return router
