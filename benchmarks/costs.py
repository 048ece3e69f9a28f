"""What the methods cost beside the plain model: a forward, an individual of a search, and the ``lm_eval`` command.

    python -m benchmarks.costs                        the reference model on a CPU, in some minutes
    python -m benchmarks.costs --model vicuna-7b --device cuda --dtype float16 --lengths 1500 4096
    python -m benchmarks.costs --write                also put the tables into docs/methods.md

A cost is a ratio of times measured in turns: the median over rounds, and the sign test's 95 % interval of the median.
"""

import argparse
import copy
import functools
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lm_eval
import numpy as np
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from scipy.stats import quantile_test
from transformers import DynamicCache

from benchmarks.machine import hardware, versions
from benchmarks.pages import filled
from benchmarks.shapes import SHAPES, build
from lpes_eval import methods, reference, rope
from lpes_eval.attention.measure import weights
from lpes_eval.compare.tables import markdown_table
from lpes_eval.errors import UserError, first_line, program
from lpes_eval.files import write_atomically
from lpes_eval.flags import at_least, mapping
from lpes_eval.harness.plugin import own_tasks
from lpes_eval.methods.base import check_device
from search.evaluator import Evaluator
from search.guards import settles
from search.tasks import POSITIONS, load_tasks

PAGE = Path(__file__).resolve().parents[1] / "docs/methods.md"
METHODS = methods.names()
DOCUMENTS = 10
"""So many has a prompt, for the methods that read it anew for each document or as often as they sort them."""


def ratio(own: Sequence[float], plain: Sequence[float]) -> str:
    """The median of the rounds' ratios with its 95 % interval; of fewer than six rounds, which have none, the range."""
    ratios = [a / b for a, b in zip(own, plain, strict=True)]
    found = quantile_test(ratios).confidence_interval()
    low, high = np.fmax(found.low, min(ratios)), np.fmin(found.high, max(ratios))
    return f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def with_method(name: str, model: Any) -> Any:
    """A second model on the same weights, with a method in it, and ``read``, what this does before it answers."""
    twin = copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})
    if name == "attention_sorting":
        rounds = range(methods.load(name).Inside().rounds)
        twin.read = lambda ids: [list(weights(model, [*ids, 0], 1)) for _ in rounds]
    elif name != "plain":
        method = methods.load(name).apply(twin, **methods.load(name).benchmark_settings(twin))
        if name == "calibrated_attention":
            twin.read = functools.partial(calibrate, twin, method, ExitStack())
    return twin


def calibrate(model: Any, method: Any, in_force: ExitStack, ids: list[int]) -> None:
    """Pass over a prompt once for each document, and once more; attend then by what comes of it."""
    in_force.close()
    places = [number * DOCUMENTS // len(ids) for number in range(len(ids))]
    *dummies, attention = (method.attention(model, ids, places, DOCUMENTS) for _ in range(DOCUMENTS + 1))
    in_force.enter_context(method.documents(places, method.scales(attention, 0.9 * dummies[0])))


@torch.no_grad()
def in_turns(models: Sequence[Any], tokens: torch.Tensor, new_tokens: int, order: random.Random) -> list[list[float]]:
    """Seconds of the prefill and of every greedy decoding step of each model; at every step the models take turns."""
    inputs, seconds = [tokens for _ in models], [[] for _ in models]
    finish = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    caches = [rope.with_cache(model, DynamicCache(config=model.config)) for model in models]
    for step in range(1 + new_tokens):
        for i in order.sample(range(len(models)), len(models)):
            finish()
            began = time.perf_counter()
            if step == 0 and (read := getattr(models[i], "read", None)):
                read([0] * tokens.shape[1])
            inputs[i] = models[i](inputs[i], **caches[i], logits_to_keep=1).logits[:, -1:].argmax(-1)
            finish()
            seconds[i].append(time.perf_counter() - began)
    return seconds


def peak_of(run: Callable[[], Any], device: str) -> float:
    """The most memory that is used meanwhile: of the GPU's allocator, else of this process (on Linux)."""
    cuda, reset = device.startswith("cuda"), Path("/proc/self/clear_refs")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    elif reset.exists():
        reset.write_text("5")
    run()
    status = Path("/proc/self/status").read_text() if reset.exists() else "VmHWM: nan"
    return torch.cuda.max_memory_allocated() if cuda else float(re.search(r"VmHWM:\s+(\w+)", status)[1])


def forward(model: Any, length: int, args: argparse.Namespace) -> list[list[str]]:
    """A row a method: what prefill, a decoding step, both, and peak memory are, as times the plain model's."""
    draw, order = torch.Generator().manual_seed(0), random.Random(0)
    tokens = torch.randint(3, model.config.vocab_size, (args.batch, length), generator=draw).to(args.device)
    turn = functools.partial(in_turns, tokens=tokens, new_tokens=args.new_tokens, order=order)
    twins, peaks, refused = {}, {}, {}
    times = {name: [] for name in args.methods}
    for number in range(1 + args.rounds):
        print(f"{length} tokens, round {number} of {args.rounds}", file=sys.stderr)
        for name in order.sample(args.methods, len(args.methods)):
            try:
                if number == 0:  # warms up
                    twins[name] = with_method(name, model)
                    peaks[name] = peak_of(lambda name=name: turn([twins[name]]), args.device)
                elif name not in refused:
                    times[name].append(turn([twins[name], model]))
            except (UserError, torch.OutOfMemoryError) as error:
                refused[name] = first_line(error).split(". ")[0]
    rows = []
    for name in args.methods:
        paper = 1.0 if name == "plain" else methods.load(name).published_time
        cells = [f"{name}: {refused.get(name)}", *["–"] * 4]
        if name not in refused:
            parts = [(one[0], np.median(one[1:]), sum(one)) for pair in times[name] for one in pair]
            cells = [name, *(ratio(part[::2], part[1::2]) for part in zip(*parts, strict=True))]
            cells.append(f"{peaks[name] / peaks['plain']:.2f}")
        rows.append([f"{length:,}", *cells, f"{paper:.2f}" if paper else ""])
    return rows


def individual(args: argparse.Namespace) -> list[str]:
    """A search's measurement of factors against that by ``simple_evaluate`` with ``hf``, and how many scores differ."""
    options = {"pretrained": args.model, "device": args.device, "dtype": args.dtype, "batch_size": args.batch_size}
    lm = methods.load("lpes")(**options)
    hf = HFLM(**options | {"pretrained": str(reference.folder(args.model))})
    metadata = args.metadata | {"split": "search", "positions": list(POSITIONS)}
    evaluator = Evaluator(lm, load_tasks(lm, [args.task], metadata=metadata, examples=args.questions))
    draw, seconds = random.Random(0), {"search": [], "hf": []}
    settle = settles(evaluator([1.0] * evaluator.num_layers).ended)
    equal = []
    for number in range(1 + args.rounds):
        print(f"an individual, round {number} of {args.rounds}", file=sys.stderr)
        factors = [round(draw.uniform(1, 1.5), 2) for _ in range(evaluator.num_layers)]
        for name in draw.sample(("search", "hf"), 2):
            began = time.perf_counter()
            if name == "search":
                measured = evaluator(factors, settle=settle)
            else:
                rope.apply(hf.model, factors)
                given = {"limit": args.questions, "task_manager": own_tasks(metadata), "bootstrap_iters": 0}
                with patch.object(lm_eval.evaluator, "add_env_info"):  # a report that takes seconds
                    samples = lm_eval.simple_evaluate(model=hf, tasks=[args.task], **given)["samples"][args.task]
            if number:  # the first one warms up
                seconds[name].append(time.perf_counter() - began)
        samples.sort(key=lambda sample: sample["doc_id"])
        for objective, column in evaluator.columns.values():
            scores = [samples[number][column.metric] for number in objective.numbers]
            equal += [a == b for a, b in zip(scores, measured.examples[column.name], strict=True)]
    what = f"an individual of a search ({sum(equal)} of {len(equal)} scores equal)"
    spent = f"{np.median(seconds['hf']):.1f} s"
    return [what, "simple_evaluate with hf", ratio(seconds["search"], seconds["hf"]), spent]


def command(args: argparse.Namespace) -> list[list[str]]:
    """``lm_eval --model lpes``, plain and with factors, against ``--model hf``, from start to end."""
    given = f"pretrained={reference.folder(args.model)},dtype={args.dtype}"
    models = {"hf": given, "lpes": given, "lpes (factors=1.1)": f"{given},factors=1.1"}
    seconds = {name: [] for name in models}
    for number in range(args.rounds):
        print(f"the command, round {number + 1} of {args.rounds}", file=sys.stderr)
        for name in random.sample(list(models), len(models)):
            words = [sys.executable, "-m", "lm_eval", "--model", name.split()[0], "--model_args", models[name]]
            words += ["--tasks", args.task, "--metadata", json.dumps(args.metadata), "--device", args.device]
            words += ["--limit", str(args.questions), "--batch_size", str(args.batch_size)]
            began = time.perf_counter()
            subprocess.run(words, capture_output=True, check=True)
            seconds[name].append(time.perf_counter() - began)
    plain = seconds.pop("hf")
    spent = f"{np.median(plain):.1f} s"
    return [[f"`--model {name}`", "`--model hf`", ratio(own, plain), spent] for name, own in seconds.items()]


def tables(args: argparse.Namespace) -> Iterator[str]:
    """What was measured on what, and then a table after the other, as Markdown."""
    transformers.logging.set_verbosity_error()
    model, machine, used = build(args.model, args.device, args.dtype), hardware(args.threads, args.device), versions()
    where = machine.get("gpu") or f"{machine['processor']}, {args.threads} threads"
    yield (
        f"`{args.model}` in {args.dtype}, batch {args.batch}, {args.new_tokens} decoding steps, {args.rounds} rounds; "
        f"{where}; PyTorch {used['torch']}, transformers {used['transformers']}; {time.strftime('%d %B %Y')}."
    )
    header = ["prompt, tokens", "method", "prefill", "decoding step", "both", "peak memory", "paper, both"]
    if args.methods != ["plain"]:
        yield markdown_table(header, [row for length in args.lengths for row in forward(model, length, args)])
    if args.model not in SHAPES and args.questions:
        header = [f"{args.questions} questions of {args.task}", "against", "ratio", "against takes"]
        yield markdown_table(header, [individual(args), *command(args)])


@program("costs")
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="reference", help=f"{', '.join(SHAPES)}, a folder, or a name on the Hub")
    add("--methods", nargs="*", choices=METHODS, default=METHODS, help="none: the individual and the command alone")
    add("--lengths", type=at_least(1), nargs="+", default=[512, 1500], help="of prompts, in tokens")
    add("--batch", type=at_least(1), default=1, help="prompts of a forward")
    add("--new_tokens", type=at_least(1), default=16, help="decoding steps")
    add("--rounds", type=at_least(1), default=6, help="from six on there is an interval")
    add("--questions", type=at_least(0), default=10, help="of an individual and of the command; 0 leaves both out")
    add("--task", default="kv_retrieval", help="of these (default: kv_retrieval)")
    add("--metadata", type=mapping, default={"source": "generated"}, help="as for lm_eval (default: source=generated)")
    add("--batch_size", type=at_least(1), default=16, help="lm-eval's")
    add("--device", default="cpu")
    add("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    add("--threads", type=at_least(1), default=1, help="of PyTorch on the CPU")
    add("--write", action="store_true", help=f"into {PAGE.name}, between its markers costs_cpu or costs_cuda")
    args = parser.parse_args(argv)
    args.methods = ["plain", *args.methods]
    check_device(args.device)
    torch.set_num_threads(args.threads)
    if args.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(args.device).index or 0)  # whose peak is measured
    parts = []
    for part in tables(args):
        parts.append(part)
        print(f"{part}\n", flush=True)
    if args.write:
        name = f"costs_{args.device.partition(':')[0]}"
        write_atomically(PAGE, filled(PAGE.read_text(encoding="utf-8"), {name: "\n\n".join(parts)}))


if __name__ == "__main__":
    sys.exit(main())
