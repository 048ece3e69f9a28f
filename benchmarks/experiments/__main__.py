"""The command: ``python -m benchmarks.experiments``."""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.experiments import plan
from benchmarks.experiments.bench import KEPT, Bench, open_bench
from lpes_eval.errors import UserError
from lpes_eval.flags import amount, at_least

EPILOG = """\
A result that is there already, of the same model with the same settings and factors, is not measured again. An
experiment that fails is noted, shown as missing, and does not stop the others.
"""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what is not the page's own is kept elsewhere unless ``--results`` says where."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments", description="Measure what docs/results.md shows.", epilog=EPILOG
    )
    add = parser.add_argument
    add("--preset", choices=("full", "headline"), default="full",
        help="all experiments, or plain, PI and LPES on both tasks, within minutes (default: full)")  # fmt: skip
    add("--only", action="append", metavar="PATTERN", help="only experiments such as 'main/kv/*', and what they need")
    add("--list", action="store_true", help="show what is there and how long the rest may take, and stop")
    add("--jobs", type=at_least(1), default=1, metavar="N", help="processes, of one thread each (default: 1)")
    add("--minutes", type=amount, default=math.inf, metavar="N", help="begin nothing new after so many minutes")
    add("--set", metavar="SIZE=N,...", help="other sizes: questions=50,search.generations=2")
    add("--results", type=Path, metavar="DIR",
        help=f"where results are kept (default: {KEPT}; runs/headline for the headline, which is measured anew; "
        "runs/results with --set, --model or --second, so that what docs/results.md shows stays)")  # fmt: skip
    add("--model", default="reference", metavar="FOLDER", help="another model than the shipped one")
    add("--second", metavar="FOLDER", help="the second model (default: another one that is shipped)")
    args = parser.parse_args(argv)
    if args.results is None:
        other = args.set or args.second or args.model != "reference"
        args.results = Path("runs/headline" if args.preset == "headline" else "runs/results" if other else KEPT)
    return args


def chosen(args: argparse.Namespace, bench: Bench) -> list[str]:
    """The experiments that the command line names, and those that they need."""
    names = [name for name in bench.listed if any(fnmatch.fnmatch(name, pattern) for pattern in args.only or "*")]
    if args.preset == "headline":
        names = [name for name in names if name.startswith("main/") and name.endswith(("/plain", "/pi", "/lpes"))]
    if not names:
        raise UserError(f"--only {' '.join(args.only)}: no experiment is called so; --list shows their names")
    return bench.with_needs(names)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if an experiment has no result."""
    try:
        args = arguments(argv)
        bench = open_bench(args.results, args.model, args.second, plan.resized(args.set) if args.set else plan.SIZES)
        names = chosen(args, bench)
        if args.list:
            print(bench.listing(names, args.jobs))
            return 0
        missing = bench.run(names, args.jobs, args.minutes)
        if args.preset == "headline":
            from benchmarks.experiments import page

            print("\n" + page.headline(bench, open_bench(KEPT, args.model, args.second)).rstrip())
        return 1 if missing else 0
    except UserError as error:
        print(f"experiments: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped. What was measured is kept; the same command goes on.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
