"""The commands: ``map`` a model's context, ``record`` single factors, ``compare`` methods on held-out questions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.real.measure import Model, questions, record
from lpes_eval import methods

STEPS = (0.5, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.5)
"""Factors that ``record`` gives to one layer at a time."""


def change(name: str, layers: int) -> list[float] | str | None:
    """The factors of a name (``all:1.05``, ``3:1.1``, ``0-5:1.3+7:1.2``), a method as it is, or None for ``plain``."""
    if name == "plain":
        return None
    if name in methods.names():
        return name
    factors = [1.0] * layers
    for part in name.split("+"):
        where, _, factor = part.partition(":")
        first, _, last = where.partition("-")
        span = range(layers) if where == "all" else range(int(first), int(last or first) + 1)
        for layer in span:
            factors[layer] = float(factor)
    return factors


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=__doc__)
    parser.add_argument("command", choices=("map", "record", "score"))
    parser.add_argument("model", help="a folder or a name on the Hub")
    parser.add_argument("--task", default="kv_retrieval", choices=("kv_retrieval", "mdqa_pos"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[12], help="records or documents of a prompt")
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--skip", type=int, default=0, help="questions of the split that are left out at its beginning")
    parser.add_argument("--split", default="search", choices=("search", "held_out"))
    parser.add_argument("--data", type=Path, help="folder of nq-open-10_total_documents_gold_at_0.jsonl.gz")
    parser.add_argument("--factors", nargs="+", metavar="NAME", help="for score: plain, 3:1.1+7:1.2, ms_poe, ...")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chat", action="store_true", help="ask in the model's chat template")
    parser.add_argument("--decode", action="store_true", help="decode and score the answers, too")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    model = Model(args.model, args.dtype, args.chat)
    names = args.factors or ["plain"]
    if args.command == "record":
        names = ["plain", *(f"{layer}:{step:g}" for step in STEPS for layer in range(model.num_layers))]
    for size in args.sizes:
        asked = questions(args.task, size, args.split, args.questions + args.skip, args.data)[args.skip :]
        said = {"size": size, "split": args.split, "chat": args.chat, "dtype": args.dtype, "decode": args.decode}
        path = args.out / f"{model.name}-{args.task}.jsonl"
        changes = ((name, change(name, model.num_layers)) for name in names)
        for line in record(path, model, asked, changes, args.task, **said):
            print(line["factors"], size, line["question"], line["ll"], line["exact"], line.get("score", ""), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
