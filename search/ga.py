"""The command: ``python -m search.ga --tasks kv_retrieval`` searches layer factors for a model and writes them down.

In this order: the plan, what there is to beat, the search, the factors file, and an evaluation on examples that the
search has not seen. Everything is kept in one folder, from which a search that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lpes_eval.compare.tables import finite, ignore_broken_pipe
from lpes_eval.errors import UserError
from lpes_eval.files import seal, write_atomically
from search.config import MEASURED, defaults, model_name, parse, resume_command, shown, without_effect
from search.guards import rank
from search.held_out import PLAIN, evaluate_held_out, reproduce_command
from search.journal import Journal
from search.report import pages
from search.report.pages import Outcome
from search.report.progress import progress
from search.run import Search, load
from search.space import Y_START, Individual


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's bars would tear up the display
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cluster's notice ends the search as Ctrl-C does
    args: argparse.Namespace | None = None
    try:
        argv = sys.argv[1:] if argv is None else argv
        args = parse(argv)
        if idle := without_effect(argv, args):
            print(f"note: {', '.join(idle)}: no effect with --optimizer {args.optimizer} --curve {args.curve}")
        with ignore_broken_pipe():
            run(load(args))
            return 0
        _say_how_to_go_on(args)
        return 1
    except UserError as error:
        print(f"search: error: {error}", file=sys.stderr)
        if isinstance(error.__cause__, OSError):  # the factors could not be written
            _say_how_to_go_on(args)
        return 2
    except OSError as error:
        if error.filename is None and error.errno is None:  # not of a file: a library's own, which says what it is
            raise
        print(f"search: error: {error.filename or (args and args.output)}: {error.strerror}", file=sys.stderr)
        _say_how_to_go_on(args)
        return 2
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        _say_how_to_go_on(args)
        return 130


def _say_how_to_go_on(args: argparse.Namespace | None) -> None:
    if args is not None and (args.output / "arguments.json").exists():
        print(f"What was evaluated is kept; go on with: {resume_command(args.output, vars(args))}", file=sys.stderr)


def run(search: Search) -> Outcome | None:
    """Plan, search, write, evaluate; None for a plan alone."""
    args = search.args
    print(pages.plan(search), flush=True)
    if args.dry_run:
        print(pages.duration(search), flush=True)
        return None
    with Journal(args.output, search.settings) as journal:
        search.journal = journal
        kept = {name: value for name, value in vars(args).items() if name not in ("output", "resume", "dry_run")}
        kept["model_args"] = shown(args.model_args)
        write_atomically(args.output / "arguments.json", json.dumps(seal(kept), indent=2) + "\n")
        for note in journal.notes:
            print(f"note: {note}", flush=True)
        plain = search.measure(PLAIN, search.uniform(1.0))
        to_beat = {PLAIN: plain, "PI": search.measure("PI", search.uniform(Y_START), plain)}
        print(pages.to_beat(search, to_beat), flush=True)
        so_far: dict[str, Any] | None = None
        missing = not (args.output / "best_effort.json").exists()
        with progress(search, to_beat) as show:

            def watch(individual: Individual, entry: dict[str, Any], new: bool) -> None:
                nonlocal so_far
                if new:  # it goes on, with a larger budget perhaps
                    (args.output / "report.json").unlink(missing_ok=True)
                better = so_far is None or (entry["prompts"], rank(entry)) > (so_far["prompts"], rank(so_far))
                if better and "failed" not in entry:
                    so_far = entry
                    if new or missing:  # whatever happens next, they are there
                        write_factors(search, Outcome(to_beat, entry, search.factors(individual)), "best_effort.json")
                show(individual, entry, new)

            try:
                fittest, best = search.run(watch)
                found = search.factors(fittest)
                if args.choose:
                    found, best = search.chosen(fittest, best)
            except KeyboardInterrupt:
                if so_far is not None:
                    print(f"\nBest so far, on {so_far['prompts']} prompts: fitness {so_far['fitness']:.4f}, ", end="")
                    print(f"the plain model {search.plain_on(so_far['examples']):.4f}", flush=True)
                    print(f"Its factors: {args.output / 'best_effort.json'}", flush=True)
                raise
        outcome = Outcome(to_beat, best, found, chosen=bool(args.choose))
        outcome.file = write_factors(search, outcome, "best_effort.json" if search.held_out else "")
        pages.write(search, outcome)  # the search's, whatever becomes of the rest
        if search.held_out:
            outcome.held_out = evaluate_held_out(search, outcome.found)
            outcome.file = write_factors(search, outcome)
            pages.write(search, outcome)
        print("\n" + pages.summary(search, outcome), flush=True)
        print(f"Factors: {args.output / outcome.file}", flush=True)
    return outcome


def write_factors(search: Search, outcome: Outcome, name: str = "") -> str:
    """Write the factors with what the search can be repeated from; the same search always writes the same bytes.

    Returns:
        The file's name: ``name``; without one, ``factors.json`` where they were shown to be better than the plain
        model, and ``best_effort.json`` otherwise.
    """
    args, found, best = search.args, outcome.found, outcome.best
    settings = dict(search.settings["search"])
    if args.curve == "free":
        del settings["control_points"]  # there is one on every layer, whatever the flag says
    unset = vars(defaults())
    settings |= {name: value for name in MEASURED if (value := getattr(args, name)) or value != unset[name]}
    versions = {task["task"]: task["version"] for task in search.settings["fitness"]["tasks"]}
    others = {k: v for k, v in shown(args.model_args).items() if k not in ("pretrained", "revision", "factors")}
    origin = {
        "model": model_name(args),
        **({"model_args": others} if others else {}),
        "weights": search.evaluator.engine.weights() or {},
        "task": ",".join(args.tasks),
        "fitness": {"value": best["fitness"], "scores": best["scores"]},
        "search": settings | {"versions": versions, "requests_sha256": search.settings["fitness"]["requests_sha256"]},
        "seed": args.seed,
        "packages": search.settings["packages"],
    }
    other = ""
    if not name:
        name, other = ("factors.json", "best_effort.json") if outcome.shown else ("best_effort.json", "factors.json")
    if (held_out := outcome.held_out) is not None:
        here = argparse.Namespace(**{**vars(args), "output": Path()})
        command = reproduce_command(here, held_out.tasks, name)
        differences = finite(pages.differences(held_out))
        origin["proof"] = {"differences": differences, "guards": finite(held_out.guards), "command": command}
    factors = replace(found, origin=origin)
    factors.save(args.output / name)
    if other:  # of the same search, before its held-out examples
        (args.output / other).unlink(missing_ok=True)
    return name


if __name__ == "__main__":
    sys.exit(main())
