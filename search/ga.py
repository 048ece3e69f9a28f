"""The command ``python -m search.ga --tasks kv_retrieval``: it searches layer factors, by any optimiser."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lpes_eval.compare.tables import finite, ignore_broken_pipe
from lpes_eval.entries import Entry
from lpes_eval.errors import UserError
from lpes_eval.report.watch import Progress
from search.config import MEASURED, command, model_name, parse, prepare_process, read, shown
from search.guards import rank
from search.held_out import PLAIN, Outcome, evaluate_held_out, reproduce_command
from search.journal import Journal
from search.report import pages
from search.run import Search, load
from search.space import Individual


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    prepare_process()
    args, argv = None, sys.argv[1:] if argv is None else argv
    status, goes_on = 1, True
    try:
        args = parse(argv)
        with ignore_broken_pipe():
            run(load(args))
            return 0
    except UserError as error:
        print(f"search: error: {error}", file=sys.stderr)
        status, goes_on = 2, isinstance(error.__cause__, OSError)  # the factors could not be written
    except OSError as error:
        if error.filename is None and error.errno is None:  # a library's own, not of a file
            raise
        print(f"search: error: {error.filename or (args and args.output)}: {error.strerror}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        status = 130
    if goes_on and args and (args.output / "journal.jsonl").exists():
        print(f"What was evaluated is kept; go on with: {command(argv)}", file=sys.stderr)
    return status


def run(search: Search) -> Outcome | None:
    """Plan, search, write, evaluate; None for a plan alone."""
    args = search.args
    print(pages.plan(search), flush=True)
    if args.dry_run:
        print(pages.duration(search), flush=True)
        return None
    with Journal(args.output, search.settings) as journal:
        search.journal = journal
        for note in journal.notes:
            print(f"note: {note}", flush=True)
        plain = search.measure(PLAIN, search.uniform(1.0))
        print(pages.to_beat(search, plain), flush=True)
        optimizer, best_so_far = search.optimizer, BestSoFar(search)
        progress = Progress(optimizer.max_evaluations, optimizer.expected_effort * search.evaluator.prompts)

        def watch(individual: Individual, entry: Entry, new: bool) -> None:
            best_so_far(individual, entry, new)
            progress.show(entry, new)

        try:
            fittest = search.run(watch)
            best = search.measure("best", search.factors(fittest))
        except KeyboardInterrupt:
            best_so_far.say()
            raise
        outcome = Outcome(plain, best, search.factors(fittest))
        held_out = bool(search.held_out) and not outcome.nothing
        outcome.file = write_factors(search, outcome, "best_effort.json" if held_out else "")
        pages.write(search, outcome, finished=not held_out)
        if held_out:
            outcome.held_out = evaluate_held_out(search, outcome.found)
            outcome.file = write_factors(search, outcome)
            pages.write(search, outcome)
        print("\n" + pages.summary(search, outcome), flush=True)
        if outcome.file:
            print(f"Factors: {args.output / outcome.file}", flush=True)
    return outcome


class BestSoFar:
    """Keeps in ``best_effort.json`` the fittest individual of those that were asked most, whatever happens next."""

    def __init__(self, search: Search) -> None:
        self._search, self._file = search, search.args.output / "best_effort.json"
        self._best: Entry | None = None
        self._missing = not self._file.exists()

    def __call__(self, individual: Individual, entry: Entry, new: bool) -> None:
        """Take in an individual; ``new`` if it was measured now."""
        search = self._search
        if new:
            (search.args.output / "report.json").unlink(missing_ok=True)
        if entry.failed or entry.measure != "score":
            return
        if self._best is None or (entry.prompts, rank(entry)) > (self._best.prompts, rank(self._best)):
            self._best = entry
            if new or self._missing:
                write_factors(search, Outcome(search.plain, entry, search.factors(individual)), self._file.name)

    def say(self) -> None:
        """Print what there is."""
        if (best := self._best) is not None:
            plain = self._search.plain_on(best.examples)
            print(f"\nBest so far, on {best.prompts} prompts: fitness {best.fitness:.4f}, the plain model {plain:.4f}")
            print(f"Its factors: {self._file if self._file.exists() else '1 in all layers'}", flush=True)


def write_factors(search: Search, outcome: Outcome, name: str = "") -> str:
    """Write the factors with what the search can be repeated from; the same search always writes the same bytes.

    Returns:
        The file's name: ``name``; without one, ``factors.json`` where they were shown to be better than the plain
        model, and ``best_effort.json`` otherwise. Empty where they are all 1, which needs no file.
    """
    args, found, best = search.args, outcome.found, outcome.best
    if outcome.nothing:
        for old in () if name else ("factors.json", "best_effort.json"):
            (args.output / old).unlink(missing_ok=True)
        return ""
    settings = dict(search.settings["search"])
    if args.curve == "free":
        del settings["control_points"]  # one on every layer
    unset = vars(read([]))
    settings |= {name: value for name in MEASURED if (value := getattr(args, name)) or value != unset[name]}
    fitness = search.settings["fitness"]
    versions = {task["task"]: task["version"] for task in fitness["tasks"]}
    others = {k: v for k, v in shown(args.model_args).items() if k not in ("pretrained", "revision", "factors")}
    origin = {
        "model": model_name(args),
        **({"model_args": others} if others else {}),
        "weights": (search.pool.described["weights"] if search.pool else search.evaluator.engine.weights()) or {},
        "task": ",".join(args.tasks),
        "fitness": {"value": best.fitness, "scores": best.scores},
        "search": settings | {"versions": versions, "requests_sha256": fitness["requests_sha256"]},
        "seed": args.seed,
        "packages": search.settings["packages"],
    }
    other = ""
    if not name:
        name, other = ("factors.json", "best_effort.json") if outcome.shown else ("best_effort.json", "factors.json")
    if (held_out := outcome.held_out) is not None:
        here = argparse.Namespace(**{**vars(args), "output": Path()})
        origin["proof"] = finite(held_out.proof()) | {"command": reproduce_command(here, held_out.tasks, name)}
    replace(found, origin=origin).save(args.output / name)
    if other:
        (args.output / other).unlink(missing_ok=True)
    return name


if __name__ == "__main__":
    sys.exit(main())
