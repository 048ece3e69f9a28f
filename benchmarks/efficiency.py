"""What each method costs: prefill and decode time, tokens a second and memory, side by side (the paper's Table 5).

    python benchmarks/efficiency.py --preset cpu --out benchmarks/results/efficiency-cpu.json
    python benchmarks/efficiency.py --preset gpu --out benchmarks/results/efficiency-gpu.json --budget 3600
    python benchmarks/efficiency.py --report benchmarks/results/efficiency-cpu.json

Time does not depend on what the weights are, so models of full size are initialised at random; only the reference
model is loaded. All methods run on the same model and the same tokens, one after the other in every round and in
another order each time, so that a machine that grows slower or faster meets all of them alike; a ratio is the median
over rounds of a method's time divided by the plain model's in the same round. A first round warms up and is not
counted. On a GPU, times are between CUDA events, with everything before and after synchronised, and memory is the
allocator's peak; on a CPU they are wall-clock times, and memory is the process's peak, where the system tells it.
``--cpu_time`` counts the process's own CPU seconds instead, which other work on the machine disturbs less.

Whether LPES costs 1 % or 3 % is more than such rounds can tell on a machine whose speed moves by 10 %. So ``--pairs``
samples of the plain model and of LPES follow, in step with each other: two models on the same weights do their prefills
one after the other and then take turns at every decoding step. The median ratio gets a confidence interval.

A sample is the prefill of the prompt and ``--new_tokens`` decoding steps. Decoding is greedy, token by token with a
dynamic cache, as ``generate`` does it, without its bookkeeping. Every step is timed, and the median of a sample's steps
is its decoding time, since one step during which the machine did something else would outweigh all others.

Measurements are written after each cell (shape, batch, length). Cells run from the cheapest to the dearest; with
``--budget`` a cell gets its share of the time that is left (half of it for the pairs), and those for which there is no
time are listed as left out. ``--report`` prints the tables, and draws the plot beside the JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from weakref import WeakKeyDictionary

from lpes_eval.errors import UserError
from lpes_eval.flags import at_least, positive

PAPER = {"plain": 1.0, "lpes": 1.0, "ms_poe": 1.45, "moice": 2.42, "attention_buckets": 4.76}
"""Seconds a sample over the plain model's 0.71 (Table 5: Vicuna-7B, one H100, MDQA)."""
METHODS = ("plain", "lpes", "pi", "ms_poe", "moice", "attention_buckets")
TARGET = {"cpu": 1.02, "cuda": 1.01}
"""LPES may cost so many times the plain model, in prefill and in decode."""

LLAMA = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
QWEN = {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
SHAPES: dict[str, dict[str, Any]] = {
    "reference": {},
    "tiny": LLAMA | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    "small": LLAMA | {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
    "small-gqa": QWEN
    | {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "vicuna-7b": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "qwen2.5-7b": QWEN
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "vicuna-13b": LLAMA
    | {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
}
"""Configurations, without what all have; ``reference`` is the shipped model with its weights."""

PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {
        "shapes": ["reference", "small", "small-gqa"],
        "lengths": [512, 1500, 4096],
        "batches": [1, 4],
        "rounds": 15,
        "pairs": 100,
        "new_tokens": 32,
        "dtype": "float32",
    },
    "gpu": {
        "shapes": ["vicuna-7b", "qwen2.5-7b", "vicuna-13b"],
        "lengths": [1500, 4096, 16384, 32768],
        "batches": [1, 4],
        "rounds": 9,
        "pairs": 20,
        "new_tokens": 64,
        "dtype": "float16",
    },
}
LARGEST = {"cpu": 6000, "gpu": 65536}
"""Cells of more tokens (batch times length) are not part of a preset."""
LEAST_ROUNDS = 3
MEASURED = ("prefill_s", "decode_s", "step_s", "peak_bytes")
PAIRED = ("plain", "lpes")


# -- methods: put into the model, and taken out again ------------------------------------------------------------------


@dataclass
class Method:
    """A method to be measured: ``put`` returns what takes it out again."""

    put: Callable[[Any], Callable[[], None]]
    settings: dict[str, Any]


def methods(names: list[str]) -> dict[str, Method]:
    """The methods by name. What one has found out about memory, it keeps for the next round."""
    from lpes_eval import methods as known

    parts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def put(name: str) -> Callable[[Any], Callable[[], None]]:
        def into(model: Any) -> Callable[[], None]:
            kind = known.load(name)
            method = kind.apply(model, **kind.benchmark_settings(model))
            if not hasattr(method, "parts"):
                return method.detach
            method.parts = parts.get(model, 1)  # Attention Buckets: how often memory ran out

            def take_out() -> None:
                parts[model] = method.parts
                method.detach()

            return take_out

        return into

    plain = Method(lambda model: lambda: None, {})
    return {name: plain if name == "plain" else Method(put(name), {"settings": "benchmark_settings"}) for name in names}


# -- one measurement ---------------------------------------------------------------------------------------------------


class Clock:
    """Seconds between two marks: CUDA events on a GPU; elsewhere wall-clock time, or the process's CPU time."""

    def __init__(self, device: str, cpu_time: bool = False) -> None:
        import torch

        self._torch, self._cuda = torch, device.startswith("cuda")
        self._now = time.process_time if cpu_time else time.perf_counter
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._cuda:
            event = self._torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(self._now())

    def intervals(self) -> list[float]:
        if not self._cuda:
            return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
        self._torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in zip(self._marks, self._marks[1:], strict=False)]


def measure(model: Any, tokens: Any, new_tokens: int, device: str, cpu_time: bool = False) -> dict[str, float | None]:
    """Seconds of a prefill, of ``new_tokens`` decoding steps and of the median one, and the memory peak in bytes."""
    import torch
    from transformers import DynamicCache

    gc.collect()
    _reset_peak(device)
    clock = Clock(device, cpu_time)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        gc.disable()
        try:
            clock.mark()
            logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
            clock.mark()
            for _ in range(new_tokens):
                token = logits[:, -1:].argmax(-1)
                logits = model(token, past_key_values=cache, logits_to_keep=1).logits
                clock.mark()
            prefill, *steps = clock.intervals()
        finally:
            gc.enable()
    return {"prefill_s": prefill, "decode_s": sum(steps), "step_s": median(steps), "peak_bytes": _peak(device)}


def measure_pair(models: list[Any], tokens: Any, new_tokens: int, clock: Clock, order: random.Random) -> list[dict]:
    """Seconds of a prefill and of the median decoding step of each model, all in turns and in changing order."""
    import torch
    from transformers import DynamicCache

    gc.collect()
    with torch.no_grad():
        caches = [DynamicCache(config=model.config) for model in models]
        inputs: list[Any] = [tokens for _ in models]
        whose: list[int] = []
        gc.disable()
        try:
            clock.mark()
            for _ in range(1 + new_tokens):
                for i in order.sample(range(len(models)), len(models)):
                    logits = models[i](inputs[i], past_key_values=caches[i], logits_to_keep=1).logits
                    inputs[i] = logits[:, -1:].argmax(-1)
                    whose.append(i)
                    clock.mark()
            seconds = clock.intervals()
        finally:
            gc.enable()
    own = [[s for s, owner in zip(seconds, whose, strict=True) if owner == i] for i in range(len(models))]
    return [{"prefill_s": prefill, "step_s": median(steps)} for prefill, *steps in own]


def twin(model: Any) -> Any:
    """A second model on the same weights."""
    return copy.deepcopy(model, {id(weight): weight for weight in (*model.parameters(), *model.buffers())})


def _reset_peak(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        # The allocator keeps its blocks: a timed pass must not wait for the driver, as the first one has.
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak becomes what is used now


def _peak(device: str) -> int | None:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated()
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


@contextlib.contextmanager
def placed(method: Method, model: Any) -> Iterator[None]:
    """The method in the model, with whatever it makes at its first use made."""
    import torch

    take_out = method.put(model)
    try:
        with torch.no_grad():
            model(torch.ones(1, 4, dtype=torch.long, device=next(model.parameters()).device))
        yield
    finally:
        take_out()


# -- all measurements --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One shape, one batch, one prompt length."""

    shape: str
    batch: int
    length: int

    @property
    def cost(self) -> float:
        """About how long it takes, in no unit: only the order counts."""
        shape = SHAPES[self.shape]
        size = shape.get("num_hidden_layers", 4) * shape.get("hidden_size", 128)
        return self.batch * self.length * size * (12 * shape.get("hidden_size", 128) + self.length)


def build(shape: str, device: str, dtype: str) -> Any:
    """The model of a shape on its device: random weights, or the shipped ones."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from lpes_eval import reference

    if shape == "reference":
        return AutoModelForCausalLM.from_pretrained(reference.path(), dtype=getattr(torch, dtype)).to(device).eval()
    settings = {"vocab_size": 32000, "max_position_embeddings": 65536, "tie_word_embeddings": False} | SHAPES[shape]
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    torch.manual_seed(0)
    with torch.device(device):  # made where it stays: twice a 13B model would not fit everywhere
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def run_cell(cell: Cell, model: Any, chosen: dict[str, Method], args: argparse.Namespace, until: float) -> dict:
    """Measure all methods in ``args.rounds`` rounds, and two of them in ``args.pairs`` pairs, or as there is time.

    A method that does not fit into memory, or refuses the model, is left out from then on, with the reason.
    """
    import torch

    from lpes_eval.errors import UserError

    generator = torch.Generator().manual_seed(args.seed)
    highest = model.config.vocab_size
    tokens = torch.randint(3, highest, (cell.batch, cell.length), generator=generator).to(args.device)
    order = random.Random(args.seed)
    found: dict[str, dict[str, Any]] = {
        name: {"settings": method.settings, "error": None} | {key: [] for key in MEASURED}
        for name, method in chosen.items()
    }

    def go_round(counted: bool = True) -> None:
        names = [name for name in chosen if found[name]["error"] is None]
        order.shuffle(names)
        for name in names:
            try:
                with placed(chosen[name], model):
                    seen = measure(model, tokens, args.new_tokens, args.device, args.cpu_time)
            except (RuntimeError, UserError) as error:
                if not (refused := isinstance(error, UserError)) and not _out_of_memory(error):
                    raise
                found[name]["error"] = ("refused: " if refused else "out of memory: ") + str(error).split(". ")[0]
                seen = None
            if seen is None:
                gc.collect()
                torch.cuda.empty_cache()
            elif counted:
                for key, value in seen.items():
                    found[name][key].append(value)

    half = (time.monotonic() + until) / 2
    go_round(counted=False)  # warms up
    rounds = 0
    while rounds < args.rounds and (rounds < LEAST_ROUNDS or time.monotonic() < half):
        go_round()
        rounds += 1
    pairs: dict[str, dict[str, list[float]]] = {name: {"prefill_s": [], "step_s": []} for name in PAIRED}
    if args.pairs and chosen.keys() >= set(PAIRED) and found["lpes"]["error"] is None:
        other = twin(model)
        try:
            with placed(chosen["lpes"], other):
                for number in range(args.pairs + 1):  # the first one warms up
                    if number > LEAST_ROUNDS and time.monotonic() > until:
                        break
                    clock = Clock(args.device, args.cpu_time)
                    both = measure_pair([model, other], tokens, args.new_tokens, clock, order)
                    for name, seen in zip(PAIRED, both, strict=True):
                        for key, value in seen.items() if number else ():
                            pairs[name][key].append(value)
        except RuntimeError as error:  # two caches need more memory than one
            if not _out_of_memory(error):
                raise
            gc.collect()
            torch.cuda.empty_cache()
    config = model.config
    return {
        "shape": cell.shape,
        "batch": cell.batch,
        "length": cell.length,
        "new_tokens": args.new_tokens,
        "rounds": rounds,
        "pairs": pairs,
        "model": {
            "model_type": config.model_type,
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "key_value_heads": config.num_key_value_heads,
            "attention": config._attn_implementation,
        },
        "methods": found,
    }


def _out_of_memory(error: Exception) -> bool:
    """Also where a library says so that has no memory of its own left to work in."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)


def run(args: argparse.Namespace) -> dict:
    """Measure everything that was asked for, writing what there is after every cell."""
    import torch
    from transformers.utils import logging

    from lpes_eval.files import write_atomically

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    chosen = methods(args.methods)
    cells = [Cell(s, b, n) for s in args.shapes for b in args.batches for n in args.lengths if b * n <= args.largest]
    by_shape = sorted(args.shapes, key=lambda s: min((c.cost for c in cells if c.shape == s), default=0))
    cells = sorted(cells, key=lambda c: (by_shape.index(c.shape), c.cost))
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "report")},
        "hardware": hardware(args.device),
        "versions": versions(),
        "cells": [],
        "left_out": [],
    }
    end = time.monotonic() + (args.budget or float("inf"))
    model, shape = None, None
    too_large: set[str] = set()
    for number, cell in enumerate(cells):
        left = end - time.monotonic()
        if left <= 0:
            results["left_out"].append(vars(cell))
            continue
        if cell.shape in too_large:
            results["left_out"].append(vars(cell) | {"error": "the model does not fit into memory"})
            continue
        if cell.shape != shape:
            model = shape = None
            gc.unfreeze()
            gc.collect()
            if args.device.startswith("cuda"):
                torch.cuda.empty_cache()
            try:
                model, shape = build(cell.shape, args.device, args.dtype), cell.shape
            except torch.OutOfMemoryError:
                too_large.add(cell.shape)
                results["left_out"].append(vars(cell) | {"error": "the model does not fit into memory"})
                continue
        # The root: cheap cells get more rounds than dear ones, whose times scatter less.
        weights = [c.cost**0.5 for c in cells[number:] if c.shape not in too_large]
        gc.collect()
        gc.freeze()  # or every collection would go through all that the libraries have made
        start = time.monotonic()
        share = start + left * weights[0] / sum(weights) if args.budget else float("inf")
        results["cells"].append(run_cell(cell, model, chosen, args, share))
        write_atomically(args.out, json.dumps(results, indent=1) + "\n")
        made = results["cells"][-1]
        print(
            f"{cell.shape}, batch {cell.batch}, {cell.length} tokens: {made['rounds']} rounds and "
            f"{len(made['pairs']['plain']['step_s'])} pairs in {time.monotonic() - start:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    gc.unfreeze()
    write_atomically(args.out, json.dumps(results, indent=1) + "\n")
    return results


def hardware(device: str) -> dict[str, Any]:
    """What the measurements were made on."""
    import torch

    found: dict[str, Any] = {
        "machine": f"{platform.machine()}, {platform.system()}",
        "cpu": platform.processor() or None,
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found["cpu"] = next(line for line in lines if line.startswith("model name")).split(":", 1)[1].strip()
    if hasattr(os, "getloadavg"):
        found["load_at_start"] = round(os.getloadavg()[0], 2)
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_bytes"] = properties.total_memory
        found["cuda"] = torch.version.cuda
    return found


def versions() -> dict[str, Any]:
    """What was measured with."""
    import torch
    import transformers

    import lpes_eval

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lpes_eval": lpes_eval.__version__,
    }
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        found["commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return found


# -- tables and plot ---------------------------------------------------------------------------------------------------


def series(cell: dict, name: str, what: str) -> list[float]:
    """A method's seconds in each round: ``prefill``, ``decode`` (the median step), ``sample`` (prefill and steps)."""
    seen = cell["methods"].get(name) or {key: [] for key in MEASURED}
    if what == "sample":
        return [prefill + decode for prefill, decode in zip(seen["prefill_s"], seen["decode_s"], strict=True)]
    return seen["prefill_s" if what == "prefill" else "step_s"]


def ratios(cell: dict, name: str, what: str) -> list[float]:
    """A method's time over the plain model's, round by round."""
    return [a / b for a, b in zip(series(cell, name, what), series(cell, "plain", what), strict=False)]


def spread(values: list[float], digits: int = 2, unit: float = 1.0) -> str:
    """Median and quartiles."""
    if not values:
        return "–"
    if len(values) == 1:
        return f"{unit * values[0]:.{digits}f}"
    low, _, high = (unit * q for q in quantiles(values, n=4, method="inclusive"))
    return f"{unit * median(values):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def report(results: dict) -> str:
    """The tables, as Markdown."""
    machine, used = results["hardware"], results["versions"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    lines = [
        f"{where}; {results['settings']['dtype']}, PyTorch {used['torch']}, transformers {used['transformers']}. "
        "Medians over interleaved rounds, quartiles in brackets; ratios are to the plain model of the same round. "
        f"A sample is the prefill and {results['settings']['new_tokens']} decoding steps."
        + (" Times are CPU seconds of the process." if results["settings"]["cpu_time"] else ""),
    ]
    for cell in results["cells"]:
        model = cell["model"]
        lines += [
            "",
            f"**{cell['shape']}** ({model['parameters'] / 1e6:,.1f} M parameters, {model['layers']} layers, "
            f"{model['heads']} heads, {model['key_value_heads']} of keys), batch {cell['batch']}, prompts of "
            f"{cell['length']:,} tokens, {cell['rounds']} rounds",
            "",
            "| method | prefill, s | decode, ms a step | tokens a second | prefill ratio | decode ratio | "
            "sample ratio | paper | peak memory, GiB |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, seen in cell["methods"].items():
            if seen["error"] and not seen["prefill_s"]:
                lines.append(f"| {name} | {seen['error']} | | | | | | {_paper(name)} | |")
                continue
            steps = series(cell, name, "decode")
            peaks = [peak for peak in seen["peak_bytes"] if peak is not None]
            lines.append(
                f"| {name} | {spread(series(cell, name, 'prefill'), 3)} | {spread(steps, 2, 1000)} | "
                f"{cell['batch'] / median(steps):,.1f} | {spread(ratios(cell, name, 'prefill'))} | "
                f"{spread(ratios(cell, name, 'decode'))} | {spread(ratios(cell, name, 'sample'))} | {_paper(name)} | "
                f"{f'{median(peaks) / 2**30:.2f}' if peaks else '–'} |"
            )
        if in_step := {what: found for what in ("prefill", "decode") if (found := paired_ratios(cell, what))}:
            words = ", ".join(f"{what} {_with_interval(found)}" for what, found in in_step.items())
            lines += ["", f"LPES / plain in step, {len(in_step['decode'])} pairs: {words}."]
    for cell in results["left_out"]:
        reason = cell.get("error", "no time left")
        lines += ["", f"Left out: {cell['shape']}, batch {cell['batch']}, {cell['length']} tokens ({reason})."]
    if any(paired_ratios(cell, "decode") for cell in results["cells"]):
        lines += ["", verdict(results)]
    return "\n".join(lines) + "\n"


def _paper(name: str) -> str:
    return f"{PAPER[name]:.2f}" if name in PAPER else "–"


def paired_ratios(cell: dict, what: str) -> list[float]:
    """LPES' time over the plain model's, pair by pair."""
    key = {"prefill": "prefill_s", "decode": "step_s"}[what]
    plain, lpes = (cell["pairs"][name][key] for name in PAIRED)
    return [a / b for a, b in zip(lpes, plain, strict=True)]


def _with_interval(values: list[float]) -> str:
    low, high = interval(values)
    return f"{median(values):.3f} ({low:.3f} to {high:.3f})"


def verdict(results: dict) -> str:
    """Whether LPES costs no more than it may, by the pairs."""
    limit = TARGET["cuda" if results["hardware"].get("gpu") else "cpu"]
    every = [(what, cell, found) for cell in results["cells"] for what in ("prefill", "decode")
             if (found := paired_ratios(cell, what))]  # fmt: skip
    words = []
    for phase in ("prefill", "decode"):
        _, cell, found = max((each for each in every if each[0] == phase), key=lambda each: median(each[2]))
        words.append(
            f"{phase} {_with_interval(found)} at {cell['shape']}, batch {cell['batch']}, {cell['length']} tokens"
        )
    kept = all(median(found) <= limit for _, _, found in every)
    surely = sum(interval(found)[1] <= limit for _, _, found in every)
    return (
        f"LPES / plain, the largest medians of all cells, with 95 % intervals: {'; '.join(words)}. The target of "
        f"{limit:.2f} is {'met' if kept else 'missed'}; {surely} of the {len(every)} medians have their whole interval "
        "below it."
    )


def interval(values: list[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median: the values that as many lie below as a fair coin may show heads.

    Few values have none as narrow as the two at the ends, and get these.
    """
    from scipy.stats import binom

    ordered, rank = sorted(values), int(binom.ppf(0.025, len(values), 0.5))
    low = max(rank - 1, 0)
    return ordered[low], ordered[len(values) - 1 - low]


def plot(results: dict, file: Path) -> None:
    """Ratios to the plain model by prompt length, prefill above decode, a column a shape; LPES' are those in step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    batch = min(cell["batch"] for cell in results["cells"])
    cells = [cell for cell in results["cells"] if cell["batch"] == batch]
    shapes = list(dict.fromkeys(cell["shape"] for cell in cells))
    figure, axes = plt.subplots(
        2, len(shapes), figsize=(1.5 + 3.5 * len(shapes), 6), squeeze=False, sharey="row", layout="constrained"
    )
    names = list(dict.fromkeys(name for cell in cells for name in cell["methods"] if name != "plain"))
    for column, shape in enumerate(shapes):
        for row, what in enumerate(("prefill", "decode")):
            axis = axes[row][column]
            for color, name in enumerate(names):
                points = [
                    (cell["length"], (paired_ratios(cell, what) if name == "lpes" else []) or ratios(cell, name, what))
                    for cell in cells
                    if cell["shape"] == shape
                ]
                points = sorted((length, found) for length, found in points if len(found) > 1)
                middle = [median(found) for _, found in points]
                ends = [quantiles(found, n=4, method="inclusive") for _, found in points]
                errors = [
                    [m - e[0] for m, e in zip(middle, ends, strict=True)],
                    [e[2] - m for m, e in zip(middle, ends, strict=True)],
                ]
                axis.errorbar(
                    [length for length, _ in points], middle, yerr=errors, marker="o", capsize=3, label=name,
                    color=f"C{color}",
                )  # fmt: skip
            axis.axhline(1, color="grey", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            lengths = sorted({cell["length"] for cell in cells if cell["shape"] == shape})
            axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.minorticks_off()
            if row == 0:
                axis.set_title(shape)
            else:
                axis.set_xlabel("prompt, tokens")
            if column == 0:
                axis.set_ylabel(f"{what}: times the plain model")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=len(labels))
    figure.suptitle(f"batch {batch}; medians and quartiles (lpes: in step with the plain model)", fontsize=9)
    figure.savefig(file, dpi=120, metadata={"Software": None})
    plt.close(figure)


# -- the command -------------------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"type": at_least(1), "nargs": "+"}
    parser.add_argument(
        "--preset", choices=PRESETS, default="cpu", help="what the other flags say where they are left out"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lengths", **numbers, help="of prompts, in tokens")
    parser.add_argument("--batches", **numbers)
    parser.add_argument("--largest", type=at_least(1), help="leave out cells of more tokens (batch times length)")
    parser.add_argument("--new_tokens", type=at_least(1), help="decoding steps")
    parser.add_argument("--rounds", type=at_least(LEAST_ROUNDS), help="counted ones; one more warms up")
    parser.add_argument("--pairs", type=at_least(0), help="samples of plain and lpes in step with each other")
    parser.add_argument("--budget", type=positive, help="seconds for everything, about")
    parser.add_argument("--device", help="cuda where the preset is gpu, else cpu")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--threads", type=at_least(1), help="of PyTorch on the CPU")
    parser.add_argument("--cpu_time", action="store_true", help="CPU seconds of the process; use it with --threads 1")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--out", default="efficiency.json", help="file for the measurements")
    parser.add_argument("--report", metavar="FILE", help="measure nothing; tables and plot of this file")
    args = parser.parse_args(argv)
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.largest = args.largest or LARGEST[args.preset]
    args.device = args.device or ("cuda" if args.preset == "gpu" else "cpu")
    if "plain" not in args.methods:
        args.methods.insert(0, "plain")
    if args.device.split(":")[0] not in ("cpu", "cuda"):
        parser.error(f"argument --device: expected cpu, cuda or cuda:N, not {args.device!r}")
    return args


def check_device(device: str) -> None:
    """Whether PyTorch can compute there."""
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {device}: PyTorch cannot use it ({reason}); --device cpu always works") from None


def measured_before(file: str) -> dict:
    """The measurements in a file that this program wrote."""
    try:
        results = json.loads(Path(file).read_text())
        if {"settings", "cells"} <= results.keys():
            return results
        reason = "other fields than those of measurements"
    except (OSError, ValueError, AttributeError) as error:
        reason = str(error)
    raise UserError(f"--report {file}: expected a file that this program wrote with --out ({reason})")


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.report:
        results = measured_before(args.report)
    else:
        check_device(args.device)
        results = run(args)
    print(report(results), end="")
    if results["cells"]:
        file = Path(args.report or args.out).with_suffix(".png")
        plot(results, file)
        print(f"\nplot: {file}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"efficiency: error: {error}", file=sys.stderr)
        sys.exit(2)
