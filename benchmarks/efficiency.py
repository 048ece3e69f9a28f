"""What each method costs: prefill and decode time, tokens a second and memory, side by side (the paper's Table 5).

    python benchmarks/efficiency.py --preset cpu --out benchmarks/results/efficiency-cpu.json
    python benchmarks/efficiency.py --preset gpu --out benchmarks/results/efficiency-gpu.json --budget 3600
    python benchmarks/efficiency.py --report benchmarks/results/efficiency-cpu.json

Time does not depend on what the weights are, so models of full size are initialised at random; only the reference
model is loaded. All methods of ``lpes_eval.methods`` run on the same model and the same tokens, one after the other in
every round and in another order each time, so that a machine that grows slower or faster meets all of them alike; a
ratio is the median over rounds of a method's time divided by the plain model's in the same round. A first round warms
up and is not counted. On a GPU, times are between CUDA events, and memory is the allocator's peak; on a CPU they are
wall-clock times, and memory is the process's peak, where the system tells it. ``--cpu_time`` counts the process's own
CPU seconds instead, which other work on the machine disturbs less.

Such rounds cannot tell 1 % from 3 % on a machine whose speed moves by 10 %. So ``--pairs`` samples of the plain model
and of LPES follow, in step with each other: two models on the same weights do their prefills one after the other and
then take turns at every decoding step. The median ratio gets a confidence interval.

A sample is the prefill of the prompt and ``--new_tokens`` decoding steps. Decoding is greedy, token by token with a
dynamic cache, as ``generate`` does it. The median of a sample's steps is its decoding time, since one step during which
the machine did something else would outweigh all others.

Measurements are written after each cell (shape, batch, length). Cells run from the cheapest to the most expensive; with
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

import lpes_eval
from lpes_eval import methods, reference
from lpes_eval.errors import UserError
from lpes_eval.files import write_atomically
from lpes_eval.flags import at_least, positive

METHODS = ["plain", *methods.names()]


def _shape(hidden: int, intermediate: int, layers: int, heads: int, keys: int | None = None, **more: Any) -> dict:
    """A configuration of Qwen2's where several heads share their keys, else of Llama's."""
    kind, theta = ("llama", 1e4) if keys is None else ("qwen2", 1e6)
    return {
        "model_type": kind,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
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

PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {
        "shapes": ["reference", "small", "small-gqa"],
        "lengths": [512, 1500, 4096],
        "largest": 6000,
        "rounds": 15,
        "pairs": 100,
        "new_tokens": 32,
        "dtype": "float32",
        "device": "cpu",
    },
    "gpu": {
        "shapes": ["vicuna-7b", "qwen2.5-7b", "vicuna-13b"],
        "lengths": [1500, 4096, 16384, 32768],
        "largest": 65536,
        "rounds": 9,
        "pairs": 20,
        "new_tokens": 64,
        "dtype": "float16",
        "device": "cuda",
    },
}
LEAST_ROUNDS = 3
MEASURED = ("prefill_s", "decode_s", "step_s", "peak_bytes")
PAIRED = ("plain", "lpes")


# -- one measurement ---------------------------------------------------------------------------------------------------


class Clock:
    """Seconds between two marks: CUDA events on a GPU; elsewhere wall-clock time, or the process's CPU time."""

    def __init__(self, device: str, cpu_time: bool = False) -> None:
        self._cuda = device.startswith("cuda")
        self._now = time.process_time if cpu_time else time.perf_counter
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(self._now())

    def intervals(self) -> list[float]:
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._cuda:
            return [b - a for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in pairs]


@torch.no_grad()
def measure(models: list[Any], tokens: Any, new_tokens: int, clock: Clock, order: random.Random) -> list[dict]:
    """Seconds of a prefill, of all decoding steps and of the median one, of models that take turns, in any order."""
    gc.collect()
    caches = [DynamicCache(config=model.config) for model in models]
    inputs: list[Any] = [tokens for _ in models]
    whose: list[int] = []
    if tokens.is_cuda:
        torch.cuda.synchronize()
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
    return [{"prefill_s": prefill, "decode_s": sum(steps), "step_s": median(steps)} for prefill, *steps in own]


def twin(model: Any) -> Any:
    """A second model on the same weights."""
    return copy.deepcopy(model, {id(weight): weight for weight in (*model.parameters(), *model.buffers())})


def reset_peak(device: str) -> None:
    if device.startswith("cuda"):  # the allocator keeps its blocks: a timed pass must not wait for the driver
        torch.cuda.reset_peak_memory_stats()
        return
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


@contextlib.contextmanager
def placed(name: str, model: Any, found: dict[str, Any]) -> Iterator[None]:
    """The method in the model, with whatever it makes at its first use made; ``found`` gets its settings.

    How many parts Attention Buckets needed where memory ran out is remembered there, or a timed pass would try again.
    """
    method = None
    if name != "plain":
        kind = methods.load(name)
        method = kind.apply(model, **kind.benchmark_settings(model))
        found["settings"] = method.describe()
        if "parts" in found:
            method.parts = found["parts"]
    try:
        with torch.no_grad():
            model(torch.ones(1, 4, dtype=torch.long, device=next(model.parameters()).device))
        yield
    finally:
        if method is not None:
            if hasattr(method, "parts"):
                found["parts"] = method.parts
            method.detach()


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
        layers, hidden = (SHAPES[self.shape].get(f, d) for f, d in (("num_hidden_layers", 4), ("hidden_size", 128)))
        return self.batch * self.length * layers * hidden * (12 * hidden + self.length)


def build(shape: str, device: str, dtype: str) -> Any:
    """The model of a shape on its device: random weights, or the shipped ones."""
    if shape == "reference":
        return AutoModelForCausalLM.from_pretrained(reference.path(), dtype=getattr(torch, dtype)).to(device).eval()
    settings = {"vocab_size": 32000, "max_position_embeddings": 65536, "tie_word_embeddings": False} | SHAPES[shape]
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    torch.manual_seed(0)
    with torch.device(device):  # made where it stays: twice a 13B model would not fit everywhere
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def run_cell(cell: Cell, model: Any, args: argparse.Namespace, until: float) -> dict:
    """Measure all methods in ``args.rounds`` rounds, and two of them in ``args.pairs`` pairs, or as there is time.

    A method that does not fit into memory, or refuses the model, is left out from then on, with the reason.
    """
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(3, model.config.vocab_size, (cell.batch, cell.length), generator=generator).to(args.device)
    order = random.Random(args.seed)
    found: dict[str, dict] = {n: {"settings": {}, "error": None} | {k: [] for k in MEASURED} for n in args.methods}

    def go_round(counted: bool) -> None:
        names = [name for name in args.methods if found[name]["error"] is None]
        for name in order.sample(names, len(names)):
            reset_peak(args.device)
            try:
                with placed(name, model, found[name]):
                    clock = Clock(args.device, args.cpu_time)
                    (seen,) = measure([model], tokens, args.new_tokens, clock, order)
                    seen["peak_bytes"] = peak(args.device)
            except (RuntimeError, UserError) as error:
                if not (refused := isinstance(error, UserError)) and not _out_of_memory(error):
                    raise
                found[name]["error"] = ("refused: " if refused else "out of memory: ") + str(error).split(". ")[0]
                _free(args.device)
                continue
            for key in MEASURED if counted else ():
                found[name][key].append(seen[key])

    half = (time.monotonic() + until) / 2
    go_round(counted=False)  # warms up
    rounds = 0
    while rounds < args.rounds and (rounds < LEAST_ROUNDS or time.monotonic() < half):
        go_round(counted=True)
        rounds += 1
    pairs: dict[str, dict[str, list[float]]] = {name: {"prefill_s": [], "step_s": []} for name in PAIRED}
    if args.pairs and found.keys() >= set(PAIRED) and found["lpes"]["error"] is None:
        try:
            other = twin(model)
            with placed("lpes", other, {}):
                for number in range(args.pairs + 1):  # the first one warms up
                    if number > LEAST_ROUNDS and time.monotonic() > until:
                        break
                    clock = Clock(args.device, args.cpu_time)
                    both = measure([model, other], tokens, args.new_tokens, clock, order)
                    for name, seen in zip(PAIRED, both, strict=True):
                        for key, values in pairs[name].items() if number else ():
                            values.append(seen[key])
        except RuntimeError as error:  # two caches need more memory than one
            if not _out_of_memory(error):
                raise
            _free(args.device)
    config = model.config
    described = {"model_type": config.model_type, "attention": config._attn_implementation}
    described |= {"parameters": sum(p.numel() for p in model.parameters()), "layers": config.num_hidden_layers}
    described |= {"heads": config.num_attention_heads, "key_value_heads": config.num_key_value_heads}
    asked = vars(cell) | {"new_tokens": args.new_tokens, "rounds": rounds}
    return asked | {"pairs": pairs, "model": described, "methods": found}


def _out_of_memory(error: Exception) -> bool:
    """Also where a library says so that has no memory of its own left to work in."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)


def _free(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def run(args: argparse.Namespace) -> dict:
    """Measure everything that was asked for, writing what there is after every cell."""
    transformers.logging.set_verbosity_error()
    if args.threads:
        torch.set_num_threads(args.threads)
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
    for number, cell in enumerate(cells):
        left = end - time.monotonic()
        if left <= 0:
            results["left_out"].append(vars(cell))
            continue
        if cell.shape != shape:
            model, shape = None, cell.shape
            gc.unfreeze()
            _free(args.device)
            with contextlib.suppress(torch.OutOfMemoryError):
                model = build(cell.shape, args.device, args.dtype)
        if model is None:
            results["left_out"].append(vars(cell) | {"error": "the model does not fit into memory"})
            continue
        # The root: cheap cells get more rounds than dear ones, whose times scatter less.
        weights = [c.cost**0.5 for c in cells[number:]]
        gc.collect()
        gc.freeze()  # or every collection would go through all that the libraries have made
        start = time.monotonic()
        made = run_cell(cell, model, args, start + left * weights[0] / sum(weights))
        results["cells"].append(made)
        write_atomically(args.out, json.dumps(results, indent=1) + "\n")
        done = f"{made['rounds']} rounds and {len(made['pairs']['plain']['step_s'])} pairs"
        took = f"{done} in {time.monotonic() - start:.0f} s"
        print(f"{cell.shape}, batch {cell.batch}, {cell.length} tokens: {took}", file=sys.stderr, flush=True)
    gc.unfreeze()
    write_atomically(args.out, json.dumps(results, indent=1) + "\n")
    return results


def hardware(device: str) -> dict[str, Any]:
    """What the measurements were made on."""
    cpu = platform.processor() or None
    with contextlib.suppress(OSError):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    found: dict[str, Any] = {"machine": f"{platform.machine()}, {platform.system()}", "cpu": cpu}
    found |= {"cpu_cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if hasattr(os, "getloadavg"):
        found["load_at_start"] = round(os.getloadavg()[0], 2)
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def versions() -> dict[str, Any]:
    """What was measured with."""
    found: dict[str, Any] = {"python": platform.python_version()}
    found |= {module.__name__: module.__version__ for module in (torch, transformers, lpes_eval)}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        found["commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return found


# -- the command -------------------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: dict[str, Any] = {"type": at_least(1), "nargs": "+"}
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help="what the other flags say where left out")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lengths", **numbers, help="of prompts, in tokens")
    parser.add_argument("--batches", **numbers, default=[1, 4])
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
    if "plain" not in args.methods:
        args.methods.insert(0, "plain")
    if args.device.split(":")[0] not in ("cpu", "cuda"):
        parser.error(f"argument --device: expected cpu, cuda or cuda:N, not {args.device!r}")
    return args


def check_device(device: str) -> None:
    """Whether PyTorch can compute there."""
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
    from benchmarks.efficiency_report import plot, report

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
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the other modules of this folder
    try:
        main()
    except UserError as error:
        print(f"efficiency: error: {error}", file=sys.stderr)
        sys.exit(2)
