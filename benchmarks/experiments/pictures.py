"""The pictures of ``docs/results.md``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.experiments import plan
from benchmarks.experiments.page import GA, METHODS, TITLES, Page, Z, optimizer, scores_of
from benchmarks.experiments.plan import KV, MDQA, SEEDS, SHORT
from lpes_eval.compare import statistics
from lpes_eval.factors import Factors

if TYPE_CHECKING:
    from benchmarks.experiments.bench import Bench

COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#8C8C8C", "#D55E00")
"""Okabe and Ito's palette, told apart with any kind of colour vision; grey for its yellow, which is faint in lines."""
MARKS = "osD^vP*X"


def draw(bench: Bench, folder: Path) -> list[Path]:
    """Draw what has results; returns the pictures written."""
    page = Page(bench)
    drawings: dict[str, Callable[[Page, Any], bool]] = {
        "positions": _draw_positions,
        "factors": _draw_factors,
        "convergence": _draw_convergence,
    }
    import matplotlib
    from matplotlib.figure import Figure

    written = []
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for name, drawing in drawings.items():
            figure = Figure(figsize=(7.2, 3.3), layout="constrained")
            if drawing(page, figure):
                figure.savefig(folder / f"{name}.png", dpi=200, metadata={"Software": None})
                written.append(folder / f"{name}.png")
    return written


def _draw_positions(page: Page, figure: Any) -> bool:
    panels = figure.subplots(1, 2, sharey=True)
    drawn: dict[str, Any] = {}
    for axes, task in zip(panels, (KV, MDQA), strict=True):
        for number, (method, label) in enumerate(METHODS.items()):
            result = page.get(f"main/{SHORT[task]}/{method}")
            if result is None:
                continue
            scores = 100 * scores_of(result)
            errors = Z * np.sqrt(np.diag(statistics.position_covariance(scores)))
            shift = (number - len(METHODS) / 2) * 0.8  # so that bars do not hide each other
            drawn[label] = axes.errorbar(
                np.array([float(position) for position in result["scores"]]) + shift,
                statistics.position_means(scores),
                errors,
                color=COLOURS[number],
                marker=MARKS[number],
                markersize=6 if method == "lpes" else 4,
                linewidth=2 if method == "lpes" else 1,
                elinewidth=0.8,
                capsize=2,
            )
            axes.set_xticks([float(position) for position in result["scores"]])
        axes.set_title(TITLES[task])
        axes.set_xlabel("position of the gold item (%)")
        axes.set_ylim(-3, 103)
    panels[0].set_ylabel("accuracy (%)")
    if drawn:
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=3, frameon=False)
    return bool(drawn)


def _draw_factors(page: Page, figure: Any) -> bool:
    tasks = [task for task in (KV, MDQA) if any(page.get(f"searches/{SHORT[task]}-{seed}") for seed in SEEDS)]
    if not tasks:
        return False
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    drawn = {}
    for axes, task in zip(panels, tasks, strict=True):
        for number, seed in enumerate(SEEDS):
            result = page.get(f"searches/{SHORT[task]}-{seed}")
            if result is None:
                continue
            factors = Factors.from_dict({k: v for k, v in result["found"].items() if k != "origin"})
            values = factors.per_layer(page.bench.reference.layers)
            (drawn[f"search {seed}"],) = axes.plot(
                range(len(values)), values, color=COLOURS[number + 1], marker=MARKS[number], markersize=4, linewidth=1.2
            )
            axes.set_xticks(range(len(values)))
        axes.axhline(1, color="0.6", linewidth=0.8)
        axes.set_title(TITLES[task])
        axes.set_xlabel("layer")
    panels[0].set_ylabel("factor")
    if drawn:
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=5, frameon=False)
    return bool(drawn)


def _draw_convergence(page: Page, figure: Any) -> bool:
    by_generation, by_cost = figure.subplots(1, 2, sharey=True)
    searches = {GA: Page.FIRST} | {optimizer(c): f"controls/{c}" for c in plan.CONTROLS}
    for number, (label, name) in enumerate(searches.items()):
        if result := page.get(name):
            descends = name.startswith("controls/gradient")
            style: dict[str, Any] = {"color": COLOURS[number + 1], "linewidth": 1.2}
            style |= {"linestyle": (0, (4, 2))} if descends else {}
            generations, fittest = zip(*result["fittest_by_generation"], strict=True)
            best = np.array(fittest) if descends else np.maximum.accumulate(fittest)
            by_generation.plot(generations, 100 * best, **style, marker=MARKS[number], markersize=4, label=label)
            prompts, best = cost(result, best_so_far=not descends)
            by_cost.plot(prompts, 100 * best, **style, drawstyle="default" if descends else "steps-post")
    if not by_generation.lines:
        return False
    if base := page.get(Page.FIRST):
        for axes in (by_generation, by_cost):
            at = 100 * base["to_beat"]["baseline"]
            axes.axhline(at, color="0.4", linestyle=":", linewidth=1, label="plain" if axes is by_generation else None)
    by_generation.set_xlabel("generation (gradient descent: epoch)")
    by_generation.set_ylabel("search fitness (%)")
    by_generation.xaxis.get_major_locator().set_params(integer=True)
    by_cost.set_xlabel("prompts answered or differentiated")
    by_cost.set_xscale("log")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return True


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
