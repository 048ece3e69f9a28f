"""The pictures of ``docs/results.md``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiments.figures import FIRST, GA, METHODS, OPTIMIZERS, Figures, Z, scores_of
from benchmarks.experiments.plan import SEEDS, SHORT
from lpes_eval.compare import statistics
from lpes_eval.factors import Factors

COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#8C8C8C", "#D55E00")
"""Okabe and Ito's palette, told apart with any kind of colour vision; grey for its yellow, which is faint in lines."""
MARKS = "osD^vP*X"


@dataclass(frozen=True)
class Drawing:
    """What draws a picture, and whose results are on it."""

    draw: Callable[[Figures, Any, Any], dict[str, Any]]
    experiments: str
    columns: int

    def shows(self, figures: Figures) -> bool:
        """Whether there is anything to draw."""
        return any(fnmatch(name, self.experiments) and figures.get(name) for name in figures.bench.listed)


def draw(figures: Figures, folder: Path) -> list[Path]:
    """Draw what has results; returns the pictures written."""
    import matplotlib
    from matplotlib.figure import Figure

    written = []
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for name, drawing in DRAWINGS.items():
            if drawing.shows(figures):
                figure = Figure(figsize=(7.2, 3.3), layout="constrained")
                panels = figure.subplots(1, 2, sharey=True)
                drawn = drawing.draw(figures, *panels)
                legend = {"loc": "outside lower center", "ncols": drawing.columns, "frameon": False}
                figure.legend(drawn.values(), drawn.keys(), **legend)
                written.append(folder / f"{name}.png")
                figure.savefig(written[-1], dpi=200, metadata={"Software": None})
    return written


def _positions(figures: Figures, *panels: Any) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    for axes, (task, short) in zip(panels, SHORT.items(), strict=True):
        for number, (method, label) in enumerate(METHODS.items()):
            if (result := figures.get(f"main/{short}/{method}")) is None:
                continue
            scores, at = scores_of(result), np.array([float(position) for position in result["scores"]])
            shift = (number - len(METHODS) / 2) * 0.8  # so that bars do not hide each other
            drawn[label] = axes.errorbar(
                at + shift,
                statistics.position_means(scores),
                Z * np.sqrt(np.diag(statistics.position_covariance(scores))),
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


def _factors(figures: Figures, *panels: Any) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    for axes, (task, short) in zip(panels, SHORT.items(), strict=True):
        for number, seed in enumerate(SEEDS):
            if (result := figures.get(f"searches/{short}-{seed}")) is None:
                continue
            factors = Factors.from_dict({k: v for k, v in result["found"].items() if k != "origin"})
            values = factors.per_layer(figures.bench.reference.layers)
            style = {"color": COLOURS[number + 1], "marker": MARKS[number], "markersize": 4, "linewidth": 1.2}
            (drawn[f"search {seed}"],) = axes.plot(range(len(values)), values, **style)
            axes.set_xticks(range(len(values)))
        axes.axhline(1, color="0.6", linewidth=0.8)
        axes.set(title=task, xlabel="layer")
    panels[0].set_ylabel("factor")
    return drawn


def _convergence(figures: Figures, by_generation: Any, by_cost: Any) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    searches = {GA: FIRST} | {label: f"controls/{name}" for name, label in OPTIMIZERS.items()}
    for number, (label, name) in enumerate(searches.items()):
        if result := figures.get(name):
            descends = name.startswith("controls/gradient")
            style: dict[str, Any] = {"color": COLOURS[(number + 1) % len(COLOURS)], "linewidth": 1.2}
            style |= {"linestyle": (0, (4, 2))} if descends else {}
            generations, fittest = zip(*result["fittest_by_generation"], strict=True)
            best = np.array(fittest) if descends else np.maximum.accumulate(fittest)
            (drawn[label],) = by_generation.plot(generations, 100 * best, **style, marker=MARKS[number], markersize=4)
            prompts, best = cost(result, best_so_far=not descends)
            by_cost.plot(prompts, 100 * best, **style, drawstyle="default" if descends else "steps-post")
    if base := figures.get(FIRST):
        for axes in (by_generation, by_cost):
            drawn["plain"] = axes.axhline(100 * base["to_beat"]["baseline"], color="0.4", linestyle=":", linewidth=1)
    by_generation.set(xlabel="generation (gradient descent: epoch)", ylabel="search fitness (%)")
    by_generation.xaxis.get_major_locator().set_params(integer=True)
    by_cost.set(xlabel="prompts answered or differentiated", xscale="log")
    return drawn


def cost(result: dict[str, Any], *, best_so_far: bool) -> tuple[Any, Any]:
    """What a search had spent when it had measured each of its individuals, and what it had reached.

    Args:
        result: a search's.
        best_so_far: whether the best fitness so far is meant, or the individual's own.

    Returns:
        Prompts, those of gradients included, and fitness, of those individuals that were measured to the end.
    """
    spent, at, fitness = 0, [], []
    for generation, prompts, value in result["evaluations"]:
        spent += prompts
        if value is not None:
            at.append(spent + generation * result["gradients"])
            fitness.append(value)
    values = np.array(fitness)
    return np.array(at), np.maximum.accumulate(values) if best_so_far else values


DRAWINGS = {
    "positions": Drawing(_positions, "main/*/*", 3),
    "factors": Drawing(_factors, "searches/*-?", 5),
    "convergence": Drawing(_convergence, "controls/*", 3),
}
