"""How far a search is, individual by individual: a live display in a terminal, a line each elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from lpes_eval.entries import Entry
from search.guards import rank
from search.report.pages import label, named, seconds
from search.space import Individual

if TYPE_CHECKING:
    from search.run import Search, Watch


@contextmanager
def progress(search: Search, to_beat: Mapping[str, Entry]) -> Iterator[Watch]:
    """Show each individual as it is measured."""
    optimizer = search.optimizer
    asked = prompts = answered = 0
    took = 0.0  # seconds for the prompts answered now: individuals that are known say nothing about the rest
    part = search.measuring
    first: list[float] = []  # the fitness of the initial population
    best: Entry | None = None

    def show(individual: Individual, entry: Entry, new: bool) -> None:
        nonlocal asked, prompts, answered, took, part, best
        asked += 1
        prompts += entry.prompts
        if part != search.measuring:  # on other questions, what is fitter may differ
            part, best = search.measuring, None
        if best is None or (not entry.stopped_after and rank(entry) > rank(best)):
            best = entry
        pace = "known"
        if new and entry.seconds > 0:
            answered += entry.prompts
            took += entry.seconds
            pace = seconds(entry.seconds)
        if search.generation == 0:
            first.append(entry.fitness)
        elif first:
            if len(first) > 1 and len(set(first)) == 1:
                print(  # above the live display, which takes over what is printed
                    f"note: all {len(first)} individuals of the first generation have fitness {first[0]:.4f}, so "
                    "chance decides between them; another --start or --skip may find better ground (docs/search.md)",
                    flush=True,
                )
            first.clear()
        total = max(optimizer.expected_evaluations, asked)
        to_come = max(optimizer.expected_effort * search.evaluator.prompts - prompts, 0)
        left = f"about {seconds(to_come * took / answered)}" if answered and to_come else "-"
        line = (
            f"generation {search.generation}/{optimizer.generations}  individual {asked} of about {total}  "
            f"{individual.origin:9}  fitness {entry.fitness:.4f}  best {best.fitness:.4f}  {pace}  left {left}"
        )
        if live is None:
            print(line, flush=True)
        else:
            rows = named(search, to_beat) | {"best so far": best, "this one": entry}
            live.update(Group(line, _table(search, rows), ProgressBar(total, asked, width=50)))  # a bar ends no line

    with Live(refresh_per_second=4) if sys.stdout.isatty() else nullcontext() as live:
        yield show


def _table(search: Search, rows: Mapping[str, Entry]) -> Table:
    table, several = Table("", box=None, pad_edge=False), len(search.evaluator.objectives) > 1
    for heading in ("fitness", *(label(column, several) for _, column in search.evaluator.columns.values())):
        table.add_column(heading, justify="right")
    for name, entry in rows.items():
        values = [f"{entry.scores.get(column, math.nan):.3f}" for column in search.evaluator.columns]
        table.add_row(name, f"{entry.fitness:.4f}", *values)
    return table
