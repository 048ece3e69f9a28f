"""What each method costs: prefill and decode time, tokens a second and memory, side by side (the paper's Table 5).

    python benchmarks/efficiency.py --preset small                             within a minute, on a CPU
    python benchmarks/efficiency.py --preset cpu --output efficiency-cpu.json
    python benchmarks/efficiency.py --preset gpu --output efficiency-gpu.json --budget 3600
    python benchmarks/efficiency.py --report efficiency-cpu.json               the table and plot of measurements

Time does not depend on what the weights are, so models of full size are initialised at random; only the reference
model is loaded. Every method of ``lpes_eval.methods`` sits in a model of its own on the same weights and is measured in
step with the plain model: the two do their prefills one after the other and then take turns at every decoding step, so
that a machine that grows slower or faster meets both alike. Two caches that do not fit into memory are made one after
the other. A round measures all methods in random order, and LPES several times, because there 1 % matters; a ratio is
the median over samples of a method's time divided by the plain model's. The row "plain" is the plain model in step with
itself. A first round warms up; it measures each method alone, and gives its peak memory: the allocator's on a GPU, the
process's elsewhere, where the system tells it. Times are between CUDA events on a GPU and wall-clock times elsewhere.

A sample is the prefill of the prompt and ``--new_tokens`` greedy decoding steps with a dynamic cache, as ``generate``
does them. The median of a sample's steps is its decoding time, since one step during which the machine did something
else would outweigh all others. Measurements are written after each cell (shape, batch, length), shape by shape, from
the fewest tokens to the most; with ``--budget`` each cell gets an equal share of the time that is left.
"""

import argparse
import contextlib
import functools
import gc
import json
import math
import random
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the other modules of this folder

from benchmarks.efficiency_measure import SHAPES, build, free, measure, out_of_memory, peak, reset_peak, with_method
from benchmarks.efficiency_report import named, plot, report
from benchmarks.machine import hardware, versions
from lpes_eval import methods
from lpes_eval.errors import UserError, program
from lpes_eval.files import read_json, write_atomically
from lpes_eval.flags import at_least, positive
from lpes_eval.methods.base import check_device

METHODS = ["plain", *methods.names()]
_CPU = {"device": "cpu", "dtype": "float32", "new_tokens": 32, "largest": 6000}
PRESETS: dict[str, dict[str, Any]] = {
    "small": _CPU | {"shapes": ["reference"], "lengths": [512], "batches": [1], "rounds": 3, "new_tokens": 8},
    "cpu": _CPU
    | {"shapes": ["reference", "small", "small-gqa"], "lengths": [512, 1500, 4096], "batches": [1, 4], "rounds": 20},
    "gpu": {
        "shapes": ["qwen2.5-7b", "vicuna-7b", "vicuna-13b"],
        "lengths": [1500, 4096, 16384, 32768],
        "batches": [1, 4],
        "largest": 65536,
        "rounds": 9,
        "new_tokens": 64,
        "dtype": "float16",
        "device": "cuda",
    },
}
LEAST_ROUNDS = 3
LPES_A_ROUND = 5


def run_cell(cell: dict[str, Any], model: Any, args: argparse.Namespace, until: float) -> tuple[dict, list[dict]]:
    """Measure all methods in ``args.rounds`` rounds, or as there is time.

    Returns:
        The cell with its rows, one a sample; and the methods that did not fit into memory or refused the model, which
        are left out from then on, with the reasons.
    """
    size, generator = (cell["batch"], cell["length"]), torch.Generator().manual_seed(0)
    tokens = torch.randint(3, model.config.vocab_size, size, generator=generator).to(args.device)
    order, models, settings, peaks = random.Random(0), dict[str, Any](), dict[str, Any](), dict[str, Any]()
    rows, left_out = list[dict](), list[dict]()
    timed = functools.partial(measure, tokens=tokens, new_tokens=args.new_tokens, order=order, compiled=args.compiled)

    def sample(name: str) -> None:
        if name not in models:  # the first round
            models[name], settings[name] = with_method(name, model)
            reset_peak(args.device)
            timed([models[name]])
            peaks[name] = None if args.compiled else peak(args.device)  # the others' static caches stay
            return
        in_step = True
        try:
            plain, own = timed([model, models[name]])
        except RuntimeError as error:  # two caches do not fit
            if not out_of_memory(error):
                raise
            in_step = False
            plain, own = (timed([each])[0] for each in (model, models[name]))
        of_plain = {f"plain_{key}": value for key, value in plain.items()}
        rows.append({"method": name, "in_step": in_step, **own, **of_plain, "peak_bytes": peaks[name]})

    names, rounds = list(args.methods), -1
    while rounds < args.rounds and (rounds < LEAST_ROUNDS or time.monotonic() < until):
        often = ["lpes"] * (LPES_A_ROUND - 1) if rounds >= 0 and "lpes" in names else []
        for name in order.sample([*names, *often], len(names) + len(often)):
            try:
                if name in names:
                    sample(name)
            except (RuntimeError, UserError) as error:
                if not (refused := isinstance(error, UserError)) and not out_of_memory(error):
                    raise
                reason = ("refused: " if refused else "out of memory: ") + str(error).split(". ")[0]
                left_out.append(cell | {"method": name, "error": reason})
                names.remove(name)
                models.pop(name, None)
                free(args.device)
        rounds += 1
    free(args.device)  # what was compiled for this cell
    config = model.config
    described = {
        "model_type": config.model_type,
        "parameters": model.num_parameters(),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "attention": config._attn_implementation,
    }
    settings = {name: settings[name] for name in args.methods if name in settings}
    return cell | {"rounds": rounds, "model": described, "settings": settings, "rows": rows}, left_out


def run(args: argparse.Namespace) -> dict:
    """Measure everything that was asked for, writing what there is after every cell."""
    transformers.logging.set_verbosity_error()
    if args.threads:
        torch.set_num_threads(args.threads)
    cells = [
        {"shape": shape, "batch": batch, "length": length}
        for shape in args.shapes
        for batch, length in sorted(product(args.batches, args.lengths), key=math.prod)
        if batch * length <= args.largest
    ]
    machine = hardware(torch.get_num_threads(), args.device)
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "report")}
    results: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "settings": settings, "cells": []}
    results |= {"left_out": [], "hardware": machine, "versions": versions()}
    end = time.monotonic() + (args.budget or float("inf"))
    model, shape = None, None
    for number, cell in enumerate(cells):
        start = time.monotonic()
        if start >= end:
            results["left_out"].append(cell | {"error": "no time left"})
            continue
        if cell["shape"] != shape:
            model, shape = None, cell["shape"]
            free(args.device)
            with contextlib.suppress(torch.OutOfMemoryError):
                model = build(shape, args.device, args.dtype)
        if model is None:
            results["left_out"].append(cell | {"error": "the model does not fit into memory"})
            continue
        made, left_out = run_cell(cell, model, args, start + (end - start) / (len(cells) - number))
        results["cells"] += [made] if made["rows"] else []
        results["left_out"] += left_out
        write_atomically(args.output, json.dumps(results) + "\n")
        took = time.monotonic() - start
        print(f"{named(cell)}: {made['rounds']} rounds in {took:.0f} s", file=sys.stderr, flush=True)
    write_atomically(args.output, json.dumps(results) + "\n")
    return results


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, numbers = parser.add_argument, {"type": at_least(1), "nargs": "+"}
    add("--preset", choices=PRESETS, default="cpu", help="what the other flags say where left out")
    add("--shapes", nargs="+", choices=SHAPES)
    add("--methods", nargs="+", choices=METHODS, default=METHODS)
    add("--lengths", **numbers, help="of prompts, in tokens")
    add("--batches", **numbers)
    add("--new_tokens", type=at_least(1), help="decoding steps")
    add("--compiled", action="store_true", help="decoding steps, with a static cache, as generate does")
    add("--rounds", type=at_least(LEAST_ROUNDS), help="counted ones; one more warms up")
    add("--budget", type=positive, help="seconds for everything, about")
    add("--device", help="cuda where the preset is gpu, else cpu")
    add("--dtype", choices=["float32", "float16", "bfloat16"])
    add("--threads", type=at_least(1), help="of PyTorch on the CPU")
    add("--output", default="efficiency.json", help="file for the measurements; the table (.md) and plot go beside it")
    add("--report", metavar="FILE", help="measure nothing; tables and plot of this file")
    parser.set_defaults(**PRESETS[parser.parse_known_args(argv)[0].preset])
    args = parser.parse_args(argv)
    args.methods = list(dict.fromkeys(["plain", *args.methods]))
    if args.device.split(":")[0] not in ("cpu", "cuda"):
        parser.error(f"argument --device: expected cpu, cuda or cuda:N, not {args.device!r}")
    if Path(args.output).suffix in (".md", ".png"):
        parser.error(f"argument --output: expected a name such as e.json, not that of a table or plot: {args.output!r}")
    return args


@program("efficiency")
def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.report:
        results = read_json(args.report)
        if not isinstance(results, dict) or not {"cells", "left_out", "settings"} <= results.keys():
            raise UserError(f"--report {args.report}: expected a file that this program wrote with --output")
    else:
        check_device(args.device)
        if args.device.startswith("cuda"):  # events and peaks are those of the current one
            torch.cuda.set_device(torch.device(args.device).index or 0)
        gc.freeze()  # of what is there by now nothing will be garbage, and a look through it takes longer than a sample
        try:
            results = run(args)
        finally:
            gc.unfreeze()
        write_atomically(Path(args.output).with_suffix(".md"), report(results))
    print(report(results), end="")
    if results["cells"]:
        file = Path(args.report or args.output).with_suffix(".png")
        plot(results, file)
        print(f"\nplot: {file}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
