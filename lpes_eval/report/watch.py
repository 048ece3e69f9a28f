"""``lpes-eval watch FOLDER``: a search as it runs, here or on a cluster, read from its journal."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_eval.errors import plain

if TYPE_CHECKING:
    from lpes_eval.report.sources import Search

SHOWN = 12
"""The last individuals that have a line in a terminal."""
PAUSE = 1.0
"""Seconds between two looks."""


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
    """Run ``lpes-eval watch``: a live display in a terminal, elsewhere a line for each individual."""
    from rich.live import Live

    from lpes_eval.report import sources

    printed = 0
    with Live(refresh_per_second=4) if sys.stdout.isatty() else nullcontext() as live:
        while True:
            search = sources.search(arguments.folder.resolve().name, arguments.folder)
            if live is not None:
                live.update(_display(search))
            else:
                for line in _lines(search)[printed:]:
                    print(plain("  ".join(line)), flush=True)
                printed = len(search.individuals)
            if search.finished:
                break
            try:
                time.sleep(PAUSE)
            except KeyboardInterrupt:  # the search goes on
                return 0
    if live is None:
        print("\n".join(plain(f"{name}: {value}") for name, value in search.facts.items() if value))
    return 0


def _lines(search: Search) -> list[tuple[str, ...]]:
    """Of each individual its number, generation, origin, fitness, the fittest like it so far, and what it cost."""
    lines, best = list[tuple[str, ...]](), dict[int, float]()
    for number, entry in enumerate(search.individuals, 1):
        asked, fitness, early = entry["prompts"], entry["fitness"], "stopped_after" in entry
        if not early:
            best[asked] = max(fitness, best.get(asked, fitness))
        so_far = "given up early" if early else f"best {best[asked]:.4f} on {asked} prompts"
        generation, origin = f"generation {entry['generation']}", str(entry.get("origin", ""))
        lines.append((str(number), generation, origin, f"fitness {fitness:.4f}", so_far, f"{entry['seconds']:.1f} s"))
    return lines


def _display(search: Search) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts, last = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    for name, value in search.facts.items():
        facts.add_row(name, Text(str(value or "–")))
    for entry in search.baselines:
        facts.add_row("plain model", f"{entry['fitness']:.4f} on {entry['prompts']} prompts")
    for line in _lines(search)[-SHOWN:]:
        last.add_row(*map(Text, line))
    since = time.time() - (search.folder / "journal.jsonl").stat().st_mtime
    now = "ended" if search.finished else f"the last one was measured {since:,.0f} s ago; Ctrl-C stops watching alone"
    return Group(Text(f"{search.name}: {now}", style="bold"), facts, Text(), last)
