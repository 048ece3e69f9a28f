"""``lpes-eval attention MODEL --factors F``: where the model looks while it answers, plain and with factors."""

import argparse
import json
from pathlib import Path
from typing import Any

from lpes_eval.compare.tables import finite
from lpes_eval.flags import at_least, mapping, model_args


def add_parser(subparsers: Any) -> None:
    """Add ``lpes-eval attention``."""
    parser = subparsers.add_parser(
        "attention",
        help="where a model looks while it answers, by layer and region, plain and with factors",
        description="Measure how much attention the answer's tokens pay to the beginning, middle and end of the "
        "context and to the gold item, without factors and with each set given. docs/report.md, "
        '"Attention", says what is measured.',
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model's name on the Hub, its folder, or reference")
    add("--factors", action="append", default=[], metavar="FILE|NUMBER", help="a set to compare; may be repeated")
    add("--task", default="kv_retrieval", help="one of this package's tasks by position (default: kv_retrieval)")
    add("--questions", type=at_least(1), default=8, metavar="N", help="at every position (default: 8)")
    add("--metadata", type=mapping, default={}, metavar="ARGS", help="settings of the task: num_keys=25, or JSON")
    add("--model_args", type=model_args, default={}, metavar="ARGS", help="as for lm_eval: dtype=float16,...")
    add("--device", metavar="DEVICE", help="as for lm_eval: cuda, cpu, mps")
    add("-o", "--output", type=Path, default=Path("attention"), metavar="DIR",
        help="folder for attention.json and the picture (default: attention)")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run ``lpes-eval attention``."""
    from rich.progress import Progress

    from lpes_eval import factors, methods
    from lpes_eval.attention.measure import REGIONS, load, measure, prompts
    from lpes_eval.files import marker, write_output
    from lpes_eval.report import figures

    sets = {"plain": None, **{str(given): factors.parse(given) for given in args.factors}}
    device = {"device": args.device} if args.device else {}
    task = load(args.task, args.metadata)
    lm = methods.load("lpes")(pretrained=args.model, **device, **args.model_args)
    lm.note_carried_factors()
    read = list(prompts(lm, task, args.questions))
    with Progress(transient=True) as progress:
        bar = progress.add_task("reading prompts", total=len(read) * len(sets))
        measured = measure(lm, sets, read, lambda: progress.advance(bar))
    mark = marker("lpes-eval attention")
    data = {
        "note": mark,
        **{name: getattr(args, name) for name in ("model", "task", "metadata")},
        "questions": len(read) // len(task.positions),
        "positions": sorted({prompt.position for prompt in read}),
        "tokens": max(len(prompt.tokens) for prompt in read),
        "regions": REGIONS,
        "sets": measured,
    }
    path = args.output / "attention.json"
    write_output(path, json.dumps(finite(data), separators=(",", ":"), allow_nan=False) + "\n", mark)
    figures.attention(data).save(args.output)
    print(f"{path}, and a picture beside it")
    return 0
