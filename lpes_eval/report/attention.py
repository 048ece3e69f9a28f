"""Pictures of attention: by layer beside the factors, by head, by document; and the decay (Fig. 4, 5)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lpes_eval.compare.results import well_formed
from lpes_eval.drawing import COLORS, INK, Drawing, Picture, short
from lpes_eval.report.sources import NO_ATTENTION, Attention


def pictures(one: Attention) -> list[Picture]:
    """All that there are; ``DataError`` where the data are not what was measured."""
    with well_formed(one.path, *NO_ATTENTION):
        found = [by_layer(one), by_head(one), by_item(one)]
        return found + ([decay(one)] if all(data["decay"] for data in one.data["sets"].values()) else [])


def by_layer(one: Attention) -> Picture:
    """A layer's factor, and below it what its attention goes to: the mean over heads, and a band over all of them."""
    from matplotlib.ticker import MaxNLocator

    shown = ("beginning", "middle", "end", "gold")
    drawing = Drawing("layer", "factor", *(f"{part} (%)" for part in shown), height=7.0)
    for place, (name, data) in enumerate(one.data["sets"].items()):
        layers, label = data["layers"], short(name)
        factors = [data["factors"][h] if data["factors"] else 1.0 for h in layers]
        tips = [f"{name}, layer {h}: factor {s:.3f}" for h, s in zip(layers, factors, strict=True)]
        drawing.marks(label, layers, factors, tips, place, markersize=4)
        for panel, part in enumerate(shown, 1):
            heads = _of_heads(one, data, part)
            low, mean, high = heads.min(axis=1), heads.mean(axis=1), heads.max(axis=1)
            tips = [
                f"{name}, layer {h}, {part}: {mean[i]:.1f} % on average; heads {low[i]:.1f} to {high[i]:.1f} %, "
                f"most head {heads[i].argmax()}"
                for i, h in enumerate(layers)
            ]
            drawing.panels[panel].fill_between(layers, low, high, color=COLORS[place % 6], alpha=0.12, linewidth=0)
            drawing.marks("", layers, mean, tips, place, panel=panel, markersize=4)
    drawing.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    title = f"{_asked(one)}\nlines: mean over heads; bands: all heads"
    caption = f"{one.name}: factor of each layer, and the attention that its answers pay to parts of the context"
    return drawing.picture(one.name, caption, title)


def by_head(one: Attention) -> Picture:
    """The attention of each head of each layer to the gold item, a panel for each set of factors."""
    sets = one.data["sets"]
    drawing = Drawing("layer", *("head" for _ in sets), height=0.6 + 1.7 * len(sets))
    grids = [_of_heads(one, data, "gold").T for data in sets.values()]
    most = max(grid.max() for grid in grids)
    for axes, (name, data), grid in zip(drawing.panels, sets.items(), grids, strict=True):
        layers = data["layers"]  # those without attention leave no gap, as a cell reaches to the next
        edges = np.array([*layers, layers[-1] + 1]) - 0.5, np.arange(len(grid) + 1) - 0.5
        image = axes.pcolormesh(*edges, grid, cmap="cividis", vmin=0, vmax=most, rasterized=True)
        axes.set_title(short(name), loc="right", fontsize=8)
    bar = drawing.axes.figure.colorbar(image, ax=drawing.panels)
    bar.set_label("attention to the gold item (%)", fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=8, colors=INK)
    return drawing.picture(f"{one.name} heads", f"{one.name}: attention of each head to the gold item", _asked(one))


def by_item(one: Attention) -> Picture:
    """The attention to each document or record, where the gold one is the first, the middle and the last asked."""
    asked = one.data["positions"]
    positions = sorted({asked[0], asked[len(asked) // 2], asked[-1]})
    what = "document" if "mdqa" in one.data["task"] else "record"
    drawing = Drawing(what, *(f"gold at {p:g} % (%)" for p in positions), height=0.8 + 1.6 * len(positions))
    for place, (name, data) in enumerate(one.data["sets"].items()):
        for panel, p in enumerate(positions):
            means = 100 * np.mean(data["items"][f"{p:g}"], axis=(0, 1))
            tips = [f"{name}, gold at {p:g} %, {what} {i}: {mean:.2f} %" for i, mean in enumerate(means, 1)]
            numbers = range(1, len(means) + 1)
            drawing.marks("" if panel else short(name), numbers, means, tips, place, panel=panel, markersize=3)
    caption = f"{one.name}: attention to each {what}, mean over layers and heads"
    return drawing.picture(f"{one.name} {what}s", caption, _asked(one))


def decay(one: Attention) -> Picture:
    """How a score falls with the distance of query and key by rotation alone, in each layer."""
    drawing = Drawing("distance of query and key (tokens)", "score relative to distance 0")
    for place, (name, data) in enumerate(one.data["sets"].items()):
        at, curves, color = data["decay"]["distances"], data["decay"]["curves"], COLORS[place % 6]
        for curve in dict.fromkeys(map(tuple, curves)):
            drawing.axes.plot(at, curve, color=color, alpha=0.25, linewidth=0.8)
        drawing.axes.plot(at, np.mean(curves, axis=0), color=color, label=short(name))
    drawing.axes.axhline(0, color="0.5", linewidth=0.6)
    caption = f"{one.name}: long-range decay by rotation alone, for a query and a key of equal entries"
    return drawing.picture(f"{one.name} decay", caption, "thin: the layers; thick: their mean")


def _of_heads(one: Attention, data: Any, part: str) -> NDArray[np.float64]:
    """What each head pays to a part, in percent, shape (layers, heads)."""
    found = data["gold"] if part == "gold" else np.array(data["parts"])[:, :, one.data["parts"].index(part)]
    return 100 * np.array(found)


def _asked(one: Attention) -> str:
    found = one.data
    return f"{short(found['model'])}, {found['task']}: {found['questions']} questions, up to {found['tokens']:,} tokens"
