"""Measure factors and other methods on a pretrained model: by position, the scores and the gold answers' likelihood.

    python -m benchmarks.real MODEL --out map --sizes 4 12 24                 where the plain model loses its context
    python -m benchmarks.real MODEL --out record --factors layers             each layer alone, by eight factors
    python -m benchmarks.real MODEL --out held_out --split held_out --questions 150 \\
        --factors plain all:0.95 13-14:0.5 0-3:1.1+7:1.2 found.json ms_poe    factors, files and methods as they are

A question under some factors is a line of JSON in ``--out``; what is there is not measured again.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.real import POSITIONS
from lpes_eval import factors, methods
from lpes_eval.flags import at_least, mapping
from search.evaluator import Evaluator
from search.tasks import load_tasks

STEPS = (0.5, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.5)
"""Factors that ``layers`` gives to one layer at a time."""
SIZES = {"kv_retrieval": "num_keys", "mdqa_pos": "num_documents"}


def change(name: str, layers: int) -> list[float]:
    """The factors of a name (``plain``, ``all:1.05``, ``3:1.1``, ``0-5:1.3+7:1.2``), or of a factors file."""
    if name.endswith(".json"):
        return factors.load(name).per_layer(layers)
    values = [1.0] * layers
    for part in [] if name == "plain" else name.split("+"):
        where, _, factor = part.partition(":")
        first, _, last = where.partition("-")
        span = range(layers) if where == "all" else range(int(first), int(last or first) + 1)
        for layer in span:
            values[layer] = float(factor)
    return values


def record(args: argparse.Namespace, size: int) -> Iterator[dict[str, Any]]:
    """Measure what is not there yet, a question after the other."""
    path = args.out / f"{Path(args.model).name}-{args.task}.jsonl"
    said = {"size": size, "split": args.split, "chat": args.chat, "dtype": args.dtype, "decode": True}
    said |= {"source": args.metadata.get("source")}  # of the same numbers, other questions
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    there = {(line["factors"], line["question"]) for line in lines if all(line.get(k) == v for k, v in said.items())}
    evaluators: dict[str, Evaluator] = {}  # by model type
    missing = []
    for name in args.factors:
        kind = name if name in methods.names() else "lpes"
        if kind not in evaluators:
            lm = methods.load(kind)(pretrained=args.model, dtype=args.dtype, device=args.device, batch_size=1)
            options: dict[str, Any] = {"split": args.split, "apply_chat_template": args.chat, "positions": POSITIONS}
            options |= {"metadata": args.metadata | {SIZES[args.task]: size}, "examples": args.questions}
            evaluators[kind] = Evaluator(lm, load_tasks(lm, [args.task], **options))
        evaluator = evaluators[kind]
        steps = [f"{layer}:{step:g}" for step in STEPS for layer in range(evaluator.num_layers)]
        questions = [*enumerate(evaluator.objectives[0].questions)]
        for each in ["plain", *steps] if name == "layers" else [name]:
            missing += [(kind, each, *question) for question in questions if (each, question[1]) not in there]
    for kind, name, number, question in missing:
        evaluator, began = evaluators[kind], time.perf_counter()
        values = change(name, evaluator.num_layers) if kind == "lpes" else None
        line = {"factors": name, "question": question, **said}
        if values:
            likelihood = evaluator.likelihood(values, [number])
            line["ll"] = [round(row[number], 5) for row in likelihood.examples.values()]
        measured = evaluator(values, part=[number], settle=True)
        line["score"] = [row[number] for row in measured.examples.values()]
        line["seconds"] = round(time.perf_counter() - began, 2)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        yield line
        if args.dry_run:
            print(f"{len(missing)} such lines take about {len(missing) * line['seconds'] / 60:.0f} min")
            return


def main(argv: Sequence[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("model", help="a folder or a name on the Hub")
    add("--out", type=Path, required=True, help="folder of the results")
    add("--task", default="kv_retrieval", choices=SIZES)
    add("--metadata", type=mapping, default={}, help="as for lm_eval: source=official,data_dir=DIR")
    add("--sizes", type=at_least(1), nargs="+", default=[12], help="records or documents of a prompt")
    add("--factors", nargs="+", default=["plain"], metavar="NAME", help="factors, files, methods, or layers")
    add("--split", default="search", choices=("search", "held_out"))
    add("--questions", type=at_least(1), default=12)
    add("--dtype", default="bfloat16")
    add("--device", default="cpu")
    add("--chat", action="store_true", help="ask in the model's chat template")
    add("--dry_run", action="store_true", help="measure one line, and say how long all would take")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for size in args.sizes:
        for line in record(args, size):
            print(*(f"{key}={value}" for key, value in line.items()), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
