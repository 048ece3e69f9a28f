"""The pictures of ``docs/results.md``."""

from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.experiments.bench import layer_factors
from benchmarks.experiments.figures import METHOD_LABELS, OPTIMISERS, Figures, Z, evaluations, fittest, percent
from benchmarks.experiments.plan import SEARCHES, SHORT

COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#8C8C8C", "#D55E00")
"""Okabe and Ito's palette, told apart with any kind of colour vision; grey for its yellow, which is faint in lines."""
MARKS = "osD^vP*X"


def positions(figures: Figures, *panels: Any) -> dict[str, Any]:
    """Accuracy by position, a line a method; returns what belongs in the legend, as the others do."""
    drawn: dict[str, Any] = {}
    for axes, (task, short) in zip(panels, SHORT.items(), strict=True):
        for number, (method, label) in enumerate(METHOD_LABELS.items()):
            if (row := figures.get(f"main/{short}/{method}")) is None:
                continue
            scores, at = percent(row), np.array([float(position) for position in row["scores"]])
            drawn[label] = axes.errorbar(
                at + (number - len(METHOD_LABELS) / 2) * 0.8,  # so that bars do not hide each other
                scores.mean(axis=0),
                Z * stats.sem(scores),
                color=COLOURS[number % len(COLOURS)],
                marker=MARKS[number % len(MARKS)],
                markersize=6 if method == "lpes" else 4,
                linewidth=2 if method == "lpes" else 1,
                elinewidth=0.8,
                capsize=2,
            )
            axes.set_xticks(at)
        axes.set(title=task, xlabel="position of the gold item (%)", ylim=(-3, 103))
    panels[0].set_ylabel("accuracy (%)")
    return drawn


def factors(figures: Figures, *panels: Any) -> dict[str, Any]:
    """The factors that searches found, layer by layer."""
    drawn: dict[str, Any] = {}
    for axes, (task, searches) in zip(panels, SEARCHES.items(), strict=True):
        for number, (seed, name) in enumerate(searches.items()):
            if figures.get(name) is None:
                continue
            values = layer_factors(("found", name), figures.bench.model, figures.bench.found)
            style = {"color": COLOURS[number + 1], "marker": MARKS[number], "markersize": 4, "linewidth": 1.2}
            (drawn[f"search {seed}"],) = axes.plot(range(len(values)), values, **style)
            axes.set_xticks(range(len(values)))
        axes.axhline(1, color="0.6", linewidth=0.8)
        axes.set(title=task, xlabel="layer")
    panels[0].set_ylabel("factor")
    return drawn


def convergence(figures: Figures, by_generation: Any, by_cost: Any) -> dict[str, Any]:
    """Fitness by generation and by cost, a line an optimiser."""
    drawn: dict[str, Any] = {}
    for number, (label, name) in enumerate(OPTIMISERS):
        if row := figures.get(name):
            descends = name.startswith("controls/gradient")
            style: dict[str, Any] = {"color": COLOURS[(number + 1) % len(COLOURS)], "linewidth": 1.2}
            style |= {"linestyle": (0, (4, 2))} if descends else {}
            best, measured = fittest(row), evaluations(row).set_index("spent").fitness
            if not descends:
                best, measured = best.cummax(), measured.cummax()
            (drawn[label],) = by_generation.plot(100 * best, **style, marker=MARKS[number], markersize=4)
            by_cost.plot(100 * measured, **style, drawstyle="default" if descends else "steps-post")
    if base := figures.get(OPTIMISERS[0][1]):
        for axes in (by_generation, by_cost):
            drawn["plain"] = axes.axhline(100 * base["to_beat"]["baseline"], color="0.4", linestyle=":", linewidth=1)
    by_generation.set(xlabel="generation (gradient descent: epoch)", ylabel="search fitness (%)")
    by_generation.xaxis.get_major_locator().set_params(integer=True)
    by_cost.set(xlabel="prompts answered or differentiated", xscale="log")
    return drawn


DRAWINGS = {"positions": (positions, 3), "factors": (factors, 5), "convergence": (convergence, 3)}
"""What draws each picture, and the columns of its legend."""


def draw(figures: Figures, folder: Path) -> None:
    """Draw all pictures."""
    import matplotlib
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for name, (drawing, columns) in DRAWINGS.items():
            figure = Figure(figsize=(7.2, 3.3), layout="constrained")
            drawn = drawing(figures, *figure.subplots(1, 2, sharey=True))
            figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=columns, frameon=False)
            figure.savefig(folder / f"{name}.png", dpi=200, metadata={"Software": None})
