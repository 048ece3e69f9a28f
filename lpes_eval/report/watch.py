"""A search's journal, entry by entry: live while it runs, and ``lpes-eval watch FOLDER`` at any time, anywhere.

In a terminal it is a display that changes; elsewhere each individual has a line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_eval.text import terminal

if TYPE_CHECKING:
    from lpes_eval.entries import Entry

SHOWN = 12
"""The last individuals that have a line in a terminal."""
PAUSE = 1.0
"""Seconds between two looks at a folder."""
NAMES = {"score": "fitness", "likelihood": "log-likelihood"}
BASELINE = "baseline"
"""The origins of what there is to beat."""


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


def run(arguments: argparse.Namespace) -> int:
    """Run ``lpes-eval watch``."""
    from lpes_eval import entries
    from lpes_eval.report import sources

    folder, seen = arguments.folder.resolve(), 0
    sources.search(folder.name, folder)  # something else is refused before anything is shown
    with live(folder.name) as show:
        while True:
            done = sources.finished(folder)
            found = list(entries.read(folder / "journal.jsonl").entries.values())
            for entry in found[seen:]:
                show(entry)
            seen = len(found)
            if done:
                print(terminal(f"ended; lpes-eval report {arguments.folder} writes its page"))
                return 0
            try:
                time.sleep(PAUSE)
            except KeyboardInterrupt:  # the search goes on
                return 0


class Progress:
    """What the entries of a journal come to, as they are measured.

    So many individuals and prompts are expected; 0 where that is not known.
    """

    def __init__(self, name: str, individuals: int = 0, prompts: float = 0.0) -> None:
        self.name, self.expected, self.prompts_expected = name, individuals, prompts
        self.count = self.prompts = 0
        self.rows: dict[str, Entry] = {}  # what there is to beat, the best so far, and the last one
        self._best: dict[tuple[str, int], Entry] = {}  # by what was measured, and on how many prompts
        self._lines: deque[str] = deque(maxlen=SHOWN)
        self._answered, self._took = 0, 0.0  # now: what was known before says nothing about the time to come
        self._first: set[float] = set()  # the fitness of the first generation

    def add(self, entry: Entry, new: bool = True) -> list[str]:
        """Take in an entry; the lines that say so. ``new`` is whether it was measured now."""
        if entry.generation is None:
            if entry.origin == BASELINE:
                self.rows[entry.origin] = entry
            return []
        said = []
        if entry.generation == 0:
            self._first.add(entry.fitness)
        else:
            if self.count > 1 and len(self._first) == 1:
                said.append(
                    f"note: all {self.count} individuals of the first generation have fitness {self._first.pop():.4f}, "
                    "so chance decides between them; another --start or --skip may find better ground (docs/search.md)"
                )
            self._first.clear()
        self.count, self.prompts = self.count + 1, self.prompts + entry.prompts
        if new:
            self._answered, self._took = self._answered + entry.prompts, self._took + entry.seconds
        harmful, early = any(guard.over for guard in entry.guards.values()), entry.stopped_after > 0
        best = self.rows.get("best so far")
        known = self._best.get(kind := (entry.measure, entry.prompts))
        if not (early or harmful or entry.failed) and (known is None or entry.fitness > known.fitness):
            best = self._best[kind] = entry
        self.rows |= {"best so far": best or entry, "this one": entry}
        line = [
            f"individual {self.count}" + (f" of about {max(self.expected, self.count)}" if self.expected else ""),
            f"generation {entry.generation}",
            f"{entry.origin:9}",
            "could not be measured" if entry.failed else f"{NAMES[entry.measure]} {entry.fitness:.4f}",
            "given up early" if early else "worsens a guard" if harmful else f"on {entry.prompts} prompts",
            f"best {best.fitness:.4f}" if best else "",
            f"{entry.seconds:.1f} s" if new else "known",
            self._left(),
        ]
        said.append(terminal("  ".join(filter(None, line))))
        self._lines.append(said[-1])
        return said

    def _left(self) -> str:
        to_come = max(self.prompts_expected - self.prompts, 0)
        if not (self._answered and to_come):
            return ""
        seconds = to_come * self._took / self._answered
        return f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"

    def display(self) -> Any:
        """What a terminal shows now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table("", "fitness", box=None, pad_edge=False)
        columns = list(dict.fromkeys(name for entry in self.rows.values() for name in entry.scores))
        for column in columns:
            table.add_column(Text(terminal(column)), justify="right")
        for name, entry in self.rows.items():
            scores = [f"{entry.scores[column]:.3f}" if column in entry.scores else "–" for column in columns]
            table.add_row(name, f"{entry.fitness:.4f}", *scores)
        bar = [ProgressBar(max(self.expected, self.count), self.count, width=50)] if self.expected else []
        return Group(Text(terminal(self.name), style="bold"), table, *map(Text, self._lines), *bar)


@contextmanager
def live(name: str, individuals: int = 0, prompts: float = 0.0) -> Iterator[Callable[..., None]]:
    """Show a search's entries as they come: called with an entry, and whether it was measured now."""
    from rich.live import Live

    progress = Progress(name, individuals, prompts)
    moving = sys.stdout.isatty()
    with Live(get_renderable=progress.display, refresh_per_second=4) if moving else nullcontext():

        def show(entry: Entry, new: bool = True) -> None:
            lines = progress.add(entry, new)
            for line in lines[:-1] if moving else lines:  # above the display
                print(line, flush=True)

        yield show
