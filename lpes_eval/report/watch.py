"""A search's journal, a line for each individual: while the search runs, and by ``lpes-eval watch FOLDER`` anywhere."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_eval.text import terminal

if TYPE_CHECKING:
    from lpes_eval.entries import Entry

PAUSE = 1.0
"""Seconds between two looks at a folder."""
NAMES = {"score": "fitness", "likelihood": "log-likelihood"}


def add_parser(subparsers: Any) -> None:
    """Add ``lpes-eval watch``."""
    parser = subparsers.add_parser(
        "watch",
        help="a running search in the terminal, read from its folder",
        description="Show a search as it runs, on this machine or on a cluster, from its folder alone, until its "
        "result is there or you press Ctrl-C, which ends the display, not the search. lpes-eval report FOLDER writes "
        "the page of it at any time.",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the folder of a search (its --output)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run ``lpes-eval watch``."""
    from lpes_eval import entries
    from lpes_eval.compare.results import well_formed
    from lpes_eval.report import sources

    folder, progress, seen = args.folder.resolve(), Progress(), 0
    while True:
        done = sources.finished(folder)
        with well_formed(journal := folder / "journal.jsonl", *sources.NO_SEARCH):
            found = list(entries.read(journal).entries.values())
        for entry in found[seen:]:
            progress.show(entry)
        seen = len(found)
        if done:
            print(terminal(f"ended; lpes-eval report {args.folder} writes its page"))
            return 0
        try:
            time.sleep(PAUSE)
        except KeyboardInterrupt:  # the search goes on
            return 0


class Progress:
    """Prints what the entries of a journal come to, of so many individuals and prompts expected (0: not known)."""

    def __init__(self, individuals: int = 0, prompts: float = 0.0) -> None:
        self._expected, self._prompts_expected = individuals, prompts
        self._count = self._prompts = 0
        self._best: Entry | None = None
        self._best_of: dict[tuple[str, int], Entry] = {}  # by measure and prompts
        self._answered, self._took = 0, 0.0  # now, not before

    def show(self, entry: Entry, new: bool = True) -> None:
        """Print a line for an individual; ``new`` if it was measured now."""
        if entry.generation is None:
            return
        self._count, self._prompts = self._count + 1, self._prompts + entry.prompts
        if new:
            self._answered, self._took = self._answered + entry.prompts, self._took + entry.seconds
        harmful, early = any(guard.over for guard in entry.guards.values()), entry.stopped_after > 0
        known = self._best_of.get(kind := (entry.measure, entry.prompts))
        if not (early or harmful or entry.failed) and (known is None or entry.fitness > known.fitness):
            self._best = self._best_of[kind] = entry
        line = [
            f"individual {self._count}" + (f" of about {max(self._expected, self._count)}" if self._expected else ""),
            f"generation {entry.generation}",
            f"{entry.origin:9}",
            "could not be measured" if entry.failed else f"{NAMES[entry.measure]} {entry.fitness:.4f}",
            "given up early" if early else "worsens a guard" if harmful else f"on {entry.prompts} prompts",
            f"best {self._best.fitness:.4f}" if self._best else "",
            f"{entry.seconds:.1f} s" if new else "known",
            self._left(),
        ]
        print(terminal("  ".join(filter(None, line))), flush=True)

    def _left(self) -> str:
        to_come = max(self._prompts_expected - self._prompts, 0)
        if not (self._answered and to_come):
            return ""
        seconds = to_come * self._took / self._answered
        return f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"
