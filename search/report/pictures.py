"""A search's pictures: convergence, the factors over the layers, and held-out scores by position."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search.held_out import FOUND, PLAIN
from search.tradeoff import front, trades

if TYPE_CHECKING:
    from search.evaluator import Measured
    from search.report.pages import Outcome
    from search.run import Search
    from search.tasks import Objective


def convergence(
    folder: Path, individuals: Sequence[Mapping[str, Any]], to_beat: Mapping[str, Mapping[str, Any]]
) -> None:
    """The fitness of every individual that was measured in full, and of the fittest so far."""
    measured = [entry for entry in individuals if "stopped_after" not in entry]
    by_size: dict[int, list[Mapping[str, Any]]] = {}  # fitness on fewer prompts is another one
    for entry in sorted(measured, key=lambda entry: entry["generation"]):
        by_size.setdefault(entry["prompts"], []).append(entry)
    with _figure(folder / "convergence.png", "generation", "fitness on the search examples") as axes:
        for number, (prompts, entries) in enumerate(sorted(by_size.items())):
            of = f" ({prompts} prompts)" if len(by_size) > 1 else ""
            last, color = number == len(by_size) - 1, _style(FOUND)[0]
            at, fitness = ([entry[name] for entry in entries] for name in ("generation", "fitness"))
            bests = [max(fitness[: k + 1]) for k in range(len(fitness))]
            axes.scatter(at, fitness, s=12, color="0.35" if last else "0.75", label=f"individuals{of}", zorder=3)
            axes.plot(
                at, bests, drawstyle="steps-post", color=color, alpha=1 if last else 0.5, label=f"fittest so far{of}"
            )
        for name, entry in to_beat.items():
            color, line, _ = _style(name)
            axes.axhline(entry["fitness"], color=color, linestyle=line, linewidth=1.5, label=name)


def tradeoff(folder: Path, search: Search, individuals: Sequence[Mapping[str, Any]], outcome: Outcome) -> None:
    """Mean against worst position of every individual that was measured in full, and those that none other beats."""
    from matplotlib.ticker import AutoLocator

    found = trades(individuals, search.evaluator)
    if len(search.evaluator.columns) < 2 or len(front(found)) < 2:
        return
    with _figure(folder / "tradeoff.png", "mean over positions, search examples", "worst position") as axes:
        axes.xaxis.set_major_locator(AutoLocator())  # means are no whole numbers
        harmful = [trade for trade in found if trade.harm]
        for some, face, text in ((found, "0.7", "individuals"), (harmful, "white", "worsens a guard")):
            if some:
                at = [[getattr(trade, name) for trade in some] for name in ("mean", "worst")]
                axes.scatter(*at, s=22, color=face, edgecolors="0.5", label=text, zorder=2)
        best = [trade for trade in front(found) if not trade.harm]
        axes.plot([t.mean for t in best], [t.worst for t in best], color="0.5", lw=1, label="not beaten", zorder=1)
        for name, entry in ((PLAIN, outcome.to_beat[PLAIN]), (FOUND, outcome.best)):
            color, _, marker = _style(name)
            for trade in trades([entry], search.evaluator):
                axes.scatter(trade.mean, trade.worst, s=60, color=color, marker=marker, label=name, zorder=3)


def curve(folder: Path, per_layer: Sequence[float]) -> None:
    """The factors over the layers."""
    with _figure(folder / "curve.png", "layer", "factor") as axes:
        color, line, marker = _style(FOUND)
        axes.plot(range(len(per_layer)), per_layer, line, color=color, marker=marker, markersize=4, label=FOUND)
        axes.axhline(sum(per_layer) / len(per_layer), color=_style("PI")[0], linestyle=":", label="their mean")


def positions(folder: Path, task: Objective, measured: Mapping[str, Measured]) -> None:
    """A task's held-out scores by position, with standard errors."""
    with _figure(folder / f"positions-{task.name}.png", "gold position (%)", "held-out score") as axes:
        at = [float(column.position or 0) for column in task.columns]
        for number, (name, scores) in enumerate(measured.items()):
            values = [scores.scores[column.name] for column in task.columns]
            errors = [_standard_error(scores.examples[column.name]) for column in task.columns]
            color, line, marker = _style(name)
            beside = [position + number - 1 for position in at]  # equal scores do not hide each other
            axes.errorbar(beside, values, errors, color=color, ls=line, marker=marker, ms=4, capsize=2, label=name)
        axes.set_xticks(at)


def _standard_error(values: Sequence[Any]) -> float:
    """The mean's standard error; 0, which draws no bar, where the examples' scores are not plain numbers."""
    if len(values) < 2 or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        return 0.0
    return statistics.stdev(values) / math.sqrt(len(values))


def _style(name: str) -> tuple[str, str, str]:
    """Colour, line and marker of what is called ``name``: the same in every picture, and told apart without colour."""
    if name == FOUND:
        return "#0072B2", "-", "o"
    return ("0.4", "--", "s") if name == PLAIN else ("#E69F00", ":", "^")


@contextmanager
def _figure(path: Any, x: str, y: str) -> Iterator[Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
