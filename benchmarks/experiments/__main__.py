"""The command: ``python -m benchmarks.experiments``."""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments import plan, store
from benchmarks.experiments.bench import KEPT, Bench, open_bench
from benchmarks.experiments.plan import Experiment
from lpes_eval.errors import UserError
from lpes_eval.flags import amount, at_least

EPILOG = """\
A result that is there already, of the same model with the same settings and factors, is not measured again. An
experiment that fails is noted, shown as missing, and does not stop the others.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments",
        description="Measure what docs/results.md shows.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--preset", choices=("full", "headline"), default="full",
        help="all experiments, or plain, PI and LPES on both tasks, within minutes (default: full)")  # fmt: skip
    add("--only", action="append", metavar="PATTERN", help="only experiments such as 'main/kv/*', and what they need")
    add("--list", action="store_true", help="show what is there and how long the rest may take, and stop")
    add("--jobs", type=at_least(1), default=1, metavar="N", help="processes, of one thread each (default: 1)")
    add("--minutes", type=amount, default=math.inf, metavar="N", help="begin nothing new after so many minutes")
    add("--set", type=_sizes, default={}, metavar="SIZE=N,...", help="other sizes: questions=50,search.generations=2")
    add("--results", type=Path, metavar="DIR",
        help=f"where results are kept (default: {KEPT}; runs/headline for the headline, which is measured anew; "
        "runs/results with --set, --model or --second, so that what docs/results.md shows stays)")  # fmt: skip
    add("--model", default="reference", metavar="FOLDER", help="another model than the shipped one")
    add("--second", metavar="FOLDER", help="the second model (default: another one that is shipped)")
    return parser


def _sizes(text: str) -> dict[str, Any]:
    """``NAME=VALUE,...``; a value is JSON where it can be read as such, else a word."""
    sizes: dict[str, Any] = {}
    for name, _, value in (part.partition("=") for part in text.split(",")):
        try:
            sizes[name] = json.loads(value)
        except ValueError:
            sizes[name] = value
    return sizes


def open_named(args: argparse.Namespace) -> tuple[Bench, list[Experiment]]:
    """What the command line names, and the experiments that it chooses."""
    headline = args.preset == "headline"
    other = args.set or args.second or args.model != "reference"
    results = args.results or (Path("runs/headline") if headline else Path("runs/results") if other else KEPT)
    made = open_bench(results, args.model, args.second, plan.resized(args.set))
    names = list(plan.HEADLINE) if headline else list(made.listed)
    if args.only:
        names = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in args.only)]
        if not names:
            raise UserError(f"--only {' '.join(args.only)}: no experiment is called so; --list shows their names")
    return made, made.with_needs(names)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if an experiment has no result."""
    try:
        args = build_parser().parse_args(argv)
        made, chosen = open_named(args)
        if args.list:
            print(made.listing(chosen, args.jobs))
            return 0
        missing = made.run(chosen, args.jobs, lambda line: print(line, flush=True), args.minutes)
        if args.preset == "headline":
            from benchmarks.experiments import page

            print("\n" + page.headline(made, store.Results(KEPT)).rstrip())
        return 1 if missing else 0
    except UserError as error:
        print(f"experiments: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped. What was measured is kept; the same command goes on.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
