"""One measurement of ``benchmarks/efficiency.py``: models of every shape, a method inside one, and their times."""

import contextlib
import copy
import functools
import gc
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, StaticCache

from lpes_eval import methods, reference, rope


def _shape(hidden: int, intermediate: int, layers: int, heads: int, keys: int | None = None, **more: Any) -> dict:
    """A configuration of Qwen2's where several heads share their keys, else of Llama's."""
    return {
        "model_type": "qwen2" if keys else "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6 if keys else 1e4},
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys or heads,
    } | more


SHAPES: dict[str, dict[str, Any]] = {
    "reference": {},
    "tiny": _shape(64, 128, 4, 4),
    "small": _shape(512, 1376, 8, 8),
    "small-gqa": _shape(512, 1376, 8, 8, 2),
    "vicuna-7b": _shape(4096, 11008, 32, 32),
    "qwen2.5-7b": _shape(3584, 18944, 28, 28, 4, vocab_size=152064),
    "vicuna-13b": _shape(5120, 13824, 40, 40),
}
"""Configurations, without what all have; ``reference`` is the shipped model with its weights."""


def build(shape: str, device: str, dtype: str) -> Any:
    """The model of a shape on its device: random weights, or the shipped ones."""
    if shape == "reference":
        model = AutoModelForCausalLM.from_pretrained(reference.path(), dtype=getattr(torch, dtype))
        model.config._name_or_path = shape  # the results are to name no folder of this machine
        return model.to(device).eval()
    settings = {"vocab_size": 32000, "max_position_embeddings": 65536, "tie_word_embeddings": False} | SHAPES[shape]
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    torch.manual_seed(0)
    with torch.device(device):  # made where it stays: twice a 13B model would not fit everywhere
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


@functools.cache
def _compiled(model: Any, batch: int, tokens: int) -> tuple[Any, StaticCache]:
    """A model's compiled forward and the cache that it writes to, as ``generate`` makes them for a static cache.

    The cache takes its batch from the first call.
    """
    return torch.compile(model.forward, mode="reduce-overhead"), StaticCache(config=model.config, max_cache_len=tokens)


@torch.no_grad()
def measure(
    models: list[Any], tokens: torch.Tensor, new_tokens: int, order: random.Random, compiled: bool = False
) -> list[dict]:
    """Seconds of a prefill, of all decoding steps and of the median one, of models that take turns, in any order.

    With ``compiled`` the decoding steps are: on a GPU one CUDA graph each.
    """
    gc.collect()
    steps, given = list[Any](models), list[dict[str, Any]]()
    for i, model in enumerate(models):
        cache = DynamicCache(config=model.config)
        if compiled:
            steps[i], cache = _compiled(model, len(tokens), tokens.shape[1] + new_tokens)
            cache.reset()
        given.append(rope.with_cache(model, cache))
    inputs, whose, marks = [tokens for _ in models], list[int](), list[Any]()

    def mark() -> None:
        marks.append(torch.cuda.Event(enable_timing=True) if tokens.is_cuda else time.perf_counter())
        if tokens.is_cuda:
            marks[-1].record()

    gc.disable()
    try:
        if tokens.is_cuda:
            torch.cuda.synchronize()
        mark()
        for forwards in (models, *[steps] * new_tokens):
            for i in order.sample(range(len(models)), len(models)):
                if compiled:
                    torch.compiler.cudagraph_mark_step_begin()
                logits = forwards[i](inputs[i], **given[i], logits_to_keep=1).logits
                inputs[i] = logits[:, -1:].argmax(-1)
                whose.append(i)
                mark()
        if tokens.is_cuda:
            torch.cuda.synchronize()
    finally:
        gc.enable()
    own: list[list[float]] = [[] for _ in models]
    for i, a, b in zip(whose, marks, marks[1:], strict=False):
        own[i].append(a.elapsed_time(b) / 1000 if tokens.is_cuda else b - a)
    return [{"prefill_s": prefill, "decode_s": sum(steps), "step_s": median(steps)} for prefill, *steps in own]


def with_method(name: str, model: Any) -> tuple[Any, dict[str, Any]]:
    """A second model on the same weights with a method in it, and the method's settings."""
    twin = copy.deepcopy(model, {id(weight): weight for weight in (*model.parameters(), *model.buffers())})
    if name == "plain":
        return twin, {}
    kind = methods.load(name)
    return twin, kind.apply(twin, **kind.benchmark_settings(twin)).describe()


def reset_peak(device: str) -> None:
    if device.startswith("cuda"):  # the allocator keeps its blocks: a timed pass must not wait for the driver
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak becomes what is used now


def peak(device: str) -> int | None:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return 1024 * int(line.split()[1])
    return None


def out_of_memory(error: Exception) -> bool:
    """Also where a library says so that has no memory of its own left to work in."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)


def free(device: str) -> None:
    _compiled.cache_clear()
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
