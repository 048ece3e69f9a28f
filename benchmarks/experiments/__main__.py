"""The command: ``python -m benchmarks.experiments``."""

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.experiments import page
from benchmarks.experiments.bench import open_bench
from benchmarks.experiments.store import KEPT, spelled
from lpes_eval.errors import UserError, program
from lpes_eval.flags import at_least


@program("experiments")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if an experiment has no result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments",
        description="Measure what docs/results.md shows.",
        epilog="A result that is there already, of the same model with the same settings and factors, is not measured "
        "again. An experiment that fails does not stop the others.",
    )
    add = parser.add_argument
    add("--preset", choices=("full", "headline"), default="full",
        help="all experiments, or plain, PI and LPES on both tasks, within minutes (default: full)")  # fmt: skip
    add("--only", action="append", metavar="PATTERN", help="only experiments such as 'main/kv/*', and what they need")
    add("--list", action="store_true", help="show what is there and what is not, and stop")
    add("--jobs", type=at_least(1), default=1, metavar="N", help="processes, of one thread each (default: 1)")
    add("--results", type=Path, metavar="DIR",
        help=f"where results are kept (default: {spelled(KEPT)}, of the headline runs/headline)")  # fmt: skip
    args = parser.parse_args(argv)
    headline = args.preset == "headline"
    try:
        bench = open_bench(args.results or (Path("runs/headline") if headline else KEPT))
        names = [name for name in bench.listed if any(fnmatch(name, pattern) for pattern in args.only or "*")]
        if headline:
            names = [name for name in names if name.startswith("main/") and name.endswith(("/plain", "/pi", "/lpes"))]
        if not names:
            raise UserError(f"--only {' '.join(args.only)}: no experiment is called so; --list shows their names")
        chosen = bench.with_needs(names)
        if args.list:
            print(bench.listing(chosen))
            return 0
        failed = bench.run(chosen, args.jobs)
        if headline:
            print("\n" + page.headline(bench, open_bench()).rstrip())
        return int(failed > 0)
    except KeyboardInterrupt:
        print("\nStopped. What was measured is kept; the same command goes on.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
