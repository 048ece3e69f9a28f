"""Every figure, for the page and for papers, in the colours of Okabe & Ito, which all people tell apart."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lpes_eval.compare.results import Metric, position_of
from lpes_eval.files import marker, write_output
from lpes_eval.text import terminal

if TYPE_CHECKING:
    from lpes_eval.report.sources import Search

COLORS = ("#595959", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
MARKERS = ("s", "o", "^", "D", "v", "P")
INK = "#1a1a1b"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False),
    "axes.titlesize": 9,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "svg.hashsalt": "lpes-eval",
}
MARK = marker("lpes-eval")
METADATA: dict[str, Any] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "Creator": MARK},
    "png": {"Software": MARK},
}
MANY = 1_000
"""More marks than these are drawn as pixels, not each as a shape."""

Line = tuple[str, int, Sequence[float]]
"""The factors of a name: its place among the colours, and one factor a layer."""


@dataclass(frozen=True)
class Picture:
    """A figure, the name of its files, and its caption."""

    name: str
    caption: str
    figure: Any

    def save(self, folder: Path, kinds: Sequence[str] = ("png", "pdf")) -> None:
        """Write it in these formats; ``UserError`` where another file is in the way."""
        for kind in kinds:
            write_output(folder / f"{self.name}.{kind}", self._file(kind, 300), MARK)

    def data(self) -> str:
        """The address of an image on a page that holds the figure itself."""
        return "data:image/svg+xml;base64," + base64.b64encode(self._file("svg", 200)).decode()

    def _file(self, kind: str, dpi: int) -> bytes:
        file = BytesIO()
        with _style():
            self.figure.savefig(file, format=kind, dpi=dpi, metadata=METADATA[kind])
        return file.getvalue()


def _style() -> Any:
    from matplotlib import rc_context

    return rc_context(STYLE)


class Drawing:
    """A figure while it is drawn: panels above each other over one x."""

    def __init__(self, x: str, *ys: str, height: float = 3.2) -> None:
        from matplotlib.figure import Figure

        with _style():
            self.figure = Figure(figsize=(5.2, height), layout="constrained")
            self.panels = list(self.figure.subplots(len(ys), sharex=True, squeeze=False)[:, 0])
        self.axes = self.panels[0]
        self.panels[-1].set_xlabel(x)
        for axes, y in zip(self.panels, ys, strict=True):
            axes.set_ylabel(y)

    def marks(self, name: str, xs: Any, ys: Any, place: int, panel: int = 0, hollow: bool = False, **how: Any) -> None:
        """Draw marks of one kind, if there are any, in the colour and shape of its place."""
        color = COLORS[place % 6]
        how |= {"marker": MARKERS[place % 6], "color": color, "markerfacecolor": "none" if hollow else color}
        with _style():
            if len(xs):
                self.panels[panel].plot(xs, ys, label=name, rasterized=len(xs) > MANY, **how)

    def picture(self, name: str, caption: str, title: str = "") -> Picture:
        """The figure with its title, and a legend of what has a name."""
        with _style():
            self.axes.set_title(title, loc="left", x=0)
            lines, names = self.axes.get_legend_handles_labels()
            columns = 2 if max(map(len, names), default=0) <= 28 else 1
            if names:
                self.figure.legend(lines, names, loc="outside lower left", ncols=columns, fontsize=8)
        return Picture(re.sub(r"[^\w.-]+", "-", terminal(name)).strip("-"), caption, self.figure)


def positions(title: str, lines: Sequence[tuple[str, int, Metric]]) -> Picture:
    """Accuracy by position of the gold item (Liu et al., Fig. 1), a line for each name, place and metric."""
    from lpes_eval.compare.statistics import interval

    task, _, metric_name = title.rpartition(", ")
    drawing = Drawing("position of the gold item in the context (%)", short(metric_name))
    counts, ticks, scores = set[int](), set[float](), list[float]()
    for name, place, metric in lines:
        at = [position_of(label) for label in metric.values]
        xs = [x + 0.6 * (place % 6) for x in at]  # equal scores do not hide each other
        drawing.marks(short(name), xs, list(metric.values.values()), place)
        if all(ends := [interval(metric.scores(label)) for label in metric.values]):
            low, high = zip(*filter(None, ends), strict=True)
            drawing.axes.fill_between(xs, low, high, color=COLORS[place % 6], alpha=0.15, linewidth=0)
            counts.add(metric.questions)
        scores += metric.values.values()
        ticks.update(at)
    drawing.axes.set_xticks(sorted(ticks))
    if all(0 <= value <= 1 for value in scores):
        drawing.axes.set_ylim(-0.02, 1.02)
    n = f"n = {', '.join(map(str, sorted(counts)))} questions; bands: 95 % intervals" if counts else "no samples logged"
    caption = f"{title}: score by position of the gold item"
    return drawing.picture(f"positions {title}", caption, f"{short(task)}\n{n}")


def factors(lines: Sequence[Line]) -> Picture:
    """One factor a layer (Fig. 2)."""
    drawing = Drawing("layer", "factor")
    for name, place, values in lines:
        drawing.marks(short(name), range(len(values)), values, place)
    drawing.axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    drawing.axes.xaxis.get_major_locator().set_params(integer=True)
    return drawing.picture("factors", "Position scaling factor of each layer; 1 is the plain model")


def progress(search: Search) -> Picture | None:
    """Every individual, a line as long as the prompts that it took, and the fittest so far of those asked as many."""
    if not (individuals := search.individuals):
        return None
    drawing = Drawing("prompts answered so far", "fitness on the search examples")
    ends = list(accumulate(entry.prompts for entry in individuals))
    alike: dict[int, list[int]] = {0: []}  # by prompts; 0: given up
    for number, entry in enumerate(individuals):
        if entry.measure == "score":
            alike.setdefault(0 if entry.stopped_after else entry.prompts, []).append(number)
    for place, (prompts, numbers) in enumerate(sorted(alike.items())):
        xs, ys, color = [ends[i] for i in numbers], [individuals[i].fitness for i in numbers], COLORS[place % 6]
        begun = [ends[i] - individuals[i].prompts for i in numbers]
        drawing.axes.hlines(ys, begun, xs, color=color, alpha=0.6, rasterized=len(xs) > MANY)
        name = f"measured on {prompts} prompts" if prompts else "given up early"
        drawing.marks(name, xs, ys, place, linestyle="", hollow=not prompts, markersize=4)
        if prompts:
            drawing.axes.plot(xs, list(accumulate(ys, max)), drawstyle="steps-post", color=color, alpha=0.6)
    if search.plain:
        label = f"plain model, {search.plain.prompts} prompts"
        drawing.axes.axhline(search.plain.fitness, color=INK, linewidth=0.8, linestyle=":", label=label)
    seconds = sum(entry.seconds for entry in individuals)
    title = f"{len(individuals):,} individuals, {ends[-1]:,} prompts, {seconds:,.0f} s"
    caption = f"Search {search.name}: fitness of every individual"
    return drawing.picture(f"search {search.name}", caption, title + ("" if search.finished else ", not finished"))


def tradeoff(search: Search) -> Picture | None:
    """Mean against worst position of the individuals measured on most questions, and what none other beats."""
    full, plain = [entry for entry in search.full if len(entry.scores) > 1], search.plain
    if len(full) < 2 or search.lower:  # no common direction
        return None
    by_kind: dict[str, list[tuple[float, float]]] = {"plain model": [], "worsens a guard": [], "individual": []}
    key, prompts = plain.key if plain else None, full[0].prompts
    if plain and plain.prompts == prompts:
        full = [plain, *(entry for entry in full if entry.key != key)]
    for entry in full:
        harmful = any(guard.over for guard in entry.guards.values())
        kind = "plain model" if entry.key == key else "worsens a guard" if harmful else "individual"
        by_kind[kind].append((fmean(entry.scores.values()), min(entry.scores.values())))
    drawing = Drawing("mean over tasks and positions", "worst of them")
    for (kind, points), place in zip(by_kind.items(), (0, 2, 1), strict=True):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        drawing.marks(kind, xs, ys, place, linestyle="", hollow=place == 2)
    front: list[tuple[float, float]] = []
    for point in sorted(by_kind["individual"], reverse=True):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    if front:
        drawing.axes.plot(*zip(*front, strict=True), color=COLORS[1], alpha=0.6, label="not beaten by any other")
    caption = f"Search {search.name}: mean against worst position, guards kept or not"
    return drawing.picture(f"tradeoff {search.name}", caption, f"individuals measured on {prompts} search prompts")


def attention(data: Mapping[str, Any]) -> Picture:
    """A layer's factor, and below it the share of its attention that goes to each region, a mean over heads."""
    drawing = Drawing("layer", "factor", *(f"{region} (%)" for region in data["regions"]), height=7.0)
    for place, (label, one) in enumerate(data["sets"].items()):
        layers = one["layers"]
        drawing.marks(short(label), layers, [one["factors"][h] if one["factors"] else 1.0 for h in layers], place)
        for panel, column in enumerate(zip(*one["shares"], strict=True), 1):
            drawing.marks("", layers, [100 * share for share in column], place, panel, markersize=4)
    drawing.axes.xaxis.get_major_locator().set_params(integer=True)
    title = f"{short(data['model'])}, {data['task']}: {data['questions']} questions, up to {data['tokens']:,} tokens"
    return drawing.picture(
        "attention", "factor of each layer, and the attention that its answers pay to regions", title
    )


def lengths(title: str, rows: Mapping[str, Mapping[float, float]]) -> Picture:
    """The score by length and position, shortest length on top: a cell for each, empty where nothing was asked."""
    import numpy as np

    at = sorted({position for scores in rows.values() for position in scores})
    grid = np.array([[scores.get(position, np.nan) for position in at] for scores in rows.values()])
    drawing = Drawing("position of the gold item in the context (%)", "", height=1.2 + 0.45 * len(rows))
    with _style():
        image = drawing.axes.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        drawing.axes.set_xticks(range(len(at)), [f"{position:g}" for position in at])
        drawing.axes.set_yticks(range(len(rows)), [short(name, 40) for name in rows])
        for (y, x), score in np.ndenumerate(grid):
            if not np.isnan(score):
                color = "white" if score < 0.5 else INK
                drawing.axes.text(x, y, f"{100 * score:.0f}", ha="center", va="center", color=color)
        drawing.figure.colorbar(image, ax=drawing.axes).set_label("score")
    return drawing.picture(f"lengths {title}", f"{title}: score by length and position", short(title))


def short(name: str, most: int = 60) -> str:
    """A name that has room in a picture."""
    name = terminal(name)
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-most // 2 :]}"
