"""How far a search is, individual by individual: a live display in a terminal, a line each elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from search.report.pages import Entry, label, named, seconds
from search.space import Individual

if TYPE_CHECKING:
    from search.run import Search, Watch


class _Status:
    """What was asked, measured and found so far."""

    def __init__(self, search: Search, to_beat: Mapping[str, Entry]) -> None:
        self.search, self.to_beat = search, to_beat
        self.asked, self.measured, self.spent = 0, 0, 0.0
        self.first: list[float] = []  # the fitness of the initial population
        self.note = ""
        self.best: Entry | None = None

    def add(self, entry: Entry, new: bool) -> None:
        self.asked += 1
        if new and entry["seconds"] > 0:  # a cache knows others, which says nothing about those to come
            self.measured += 1
            self.spent += entry["seconds"]
        if self.best is None or entry["fitness"] > self.best["fitness"]:
            self.best = entry
        self.note = ""
        if self.search.optimizer.generation == 0:
            self.first.append(entry["fitness"])
        elif self.first:
            self.note = self.search.optimizer.note(self.first)
            self.first = []

    @property
    def left(self) -> str:
        if self.measured == 0:
            return "-"
        individuals = max(self.search.optimizer.expected_evaluations - self.asked, 1)
        return "about " + seconds(individuals * self.spent / self.measured)

    @property
    def pace(self) -> str:
        return f"{self.spent / self.measured:.1f} s an individual" if self.measured else "-"

    @property
    def place(self) -> str:
        optimizer = self.search.optimizer
        return f"generation {optimizer.generation}/{optimizer.generations}"


@contextmanager
def progress(search: Search, to_beat: Mapping[str, Entry]) -> Iterator[Watch]:
    """Show each individual as it is measured."""
    status = _Status(search, to_beat)
    if not sys.stdout.isatty():

        def line(individual: Individual, entry: dict[str, Any], new: bool) -> None:
            status.add(entry, new)
            if status.note:
                print(f"note: {status.note}", flush=True)
            best = status.best["fitness"] if status.best else 0.0
            took = seconds(entry["seconds"]) if new and entry["seconds"] > 0 else "known"
            print(
                f"{status.place}  individual {status.asked}  {individual.origin:9}  fitness {entry['fitness']:.4f}  "
                f"best {best:.4f}  {took}  left {status.left}",
                flush=True,
            )

        yield line
        return

    from rich.live import Live

    with Live(_table(status, None), refresh_per_second=4) as live:

        def show(individual: Individual, entry: dict[str, Any], new: bool) -> None:
            status.add(entry, new)
            if status.note:
                live.console.print(f"note: {status.note}")
            live.update(_table(status, entry))

        yield show


def _table(status: _Status, last: Entry | None) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    search = status.search
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("fitness", justify="right")
    for _, column in search.evaluator.columns.values():
        table.add_column(label(column, len(search.evaluator.objectives) > 1), justify="right")
    rows = [
        *named(search, status.to_beat).items(),
        ("best so far", status.best),
        ("this one", last),
    ]
    for name, entry in rows:
        if entry is not None:
            values = [f"{entry['scores'][column]:.3f}" for column in search.evaluator.columns]
            table.add_row(name, f"{entry['fitness']:.4f}", *values)
    total = search.optimizer.expected_evaluations
    bar = ProgressBar(total=max(total, status.asked), completed=status.asked, width=50)
    head = f"{status.place}   individual {status.asked} of about {total}   {status.pace}   left {status.left}"
    return Group(head, bar, table)
