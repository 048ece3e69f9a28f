"""The command: ``python -m search.ga --tasks kv_retrieval`` searches layer factors for a model and writes them down.

In this order: the plan, what there is to beat, the search, the factors file, and an evaluation on examples that the
search has not seen. Everything is kept in one folder, from which a search that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lpes_eval.compare.tables import reader_may_leave
from lpes_eval.errors import UserError
from lpes_eval.factors import Factors
from lpes_eval.files import write_atomically
from search import loop, report
from search.arguments import MEASURED, model_name, parse, without_effect
from search.held_out import evaluate_held_out
from search.journal import Journal
from search.optimizer import Y_START
from search.setup import Search, load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's bars would tear up the display
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    folder: Path | None = None
    try:
        argv = sys.argv[1:] if argv is None else argv
        args = parse(argv)
        folder = args.output
        if idle := without_effect(argv, args):
            print(f"note: {', '.join(idle)}: no effect with --optimizer {args.optimizer} --curve {args.curve}")
        with reader_may_leave():
            return run(args)
        _say_how_to_go_on(folder)
        return 1
    except UserError as error:
        print(f"search: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None and error.errno is None:  # not of a file: a library's own, which says what it is
            raise
        print(f"search: error: {error.filename or folder}: {error.strerror}", file=sys.stderr)
        _say_how_to_go_on(folder)
        return 2
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        _say_how_to_go_on(folder)
        return 130


def _say_how_to_go_on(folder: Path | None) -> None:
    if folder is not None and (folder / "arguments.json").exists():
        command = shlex.join(["python", "-m", "search.ga", "--resume", str(folder)])
        print(f"What was evaluated is kept; go on with: {command}", file=sys.stderr)


def run(args: argparse.Namespace) -> int:
    """Plan, search, write, evaluate."""
    search = load(args)
    print(report.plan(search), flush=True)
    if args.dry_run:
        print(report.duration(search), flush=True)
        return 0
    with Journal(args.output, search.settings) as journal:
        search.entries = journal.entries
        kept = {name: value for name, value in vars(args).items() if name not in ("output", "resume", "dry_run")}
        write_atomically(args.output / "arguments.json", json.dumps(kept, indent=2) + "\n")
        loop.restore(search.optimizer, journal, search.key)
        for note in journal.notes:
            print(f"note: {note}", flush=True)
        to_beat = {
            "baseline": search.measure("baseline", search.uniform(1.0), journal),
            "PI": search.measure("PI", search.uniform(Y_START), journal),
        }
        print(report.to_beat(search, to_beat, journal), flush=True)
        with report.progress(search, journal, to_beat) as watch:
            fittest, best = loop.run(search.optimizer, search.evaluate, journal, search.key, watch)
        found = search.factors(fittest)
        write_factors(search, found, best)
        print(f"\nFactors found: {args.output / 'factors.json'}", flush=True)
        search.lost = search.check_given_up(journal) if args.early_stopping_check else []
        held_out = None
        report.write(search, journal, to_beat, best, found, held_out)  # the search's, whatever becomes of the rest
        if search.held_out:
            held_out = evaluate_held_out(search, found)
            report.write(search, journal, to_beat, best, found, held_out)
        print(report.summary(search, journal, to_beat, best, found, held_out), flush=True)
    return 0


def write_factors(search: Search, found: Factors, best: dict[str, Any]) -> None:
    """The factors file, with what the search can be repeated from. The same search always writes the same bytes."""
    args = search.args
    settings = dict(search.settings["search"])
    if args.curve == "free":
        del settings["control_points"]  # there is one on every layer, whatever the flag says
    settings |= {name: value for name in MEASURED if (value := getattr(args, name)) not in (None, False, {})}
    factors = Factors.from_curve(
        found.curve[0],  # type: ignore[index]
        found.curve[1],  # type: ignore[index]
        num_layers=search.num_layers,
        unscaled_layers=range(args.skip),
        origin={
            "model": model_name(args),
            "task": ",".join(args.tasks),
            "fitness": {"value": best["fitness"], "scores": best["scores"]},
            "search": settings | {"requests_sha256": search.settings["fitness"]["requests_sha256"]},
            "seed": args.seed,
            "packages": search.settings["packages"],
        },
    )
    factors.save(args.output / "factors.json")


if __name__ == "__main__":
    sys.exit(main())
