"""The figures: for the page, for papers, and for a notebook. Bars and whiskers are 95 % intervals everywhere.

Colours are those of Okabe & Ito, which people tell apart whatever their colour vision; markers differ as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from lpes_eval.files import write_atomically
from lpes_eval.report.sources import Pair, Panel, Run, Search

if TYPE_CHECKING:
    from lpes_eval.compare.results import Metric

COLORS = ("#595959", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
MARKERS = ("s", "o", "^", "D", "v", "P")
INK = "#1a1a1b"
STYLE = {
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "text.parse_math": False,
    "savefig.transparent": True,
}
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Picture:
    """A figure, the name of its files, its caption, and what each marker says when it is pointed at."""

    name: str
    caption: str
    figure: Any
    tips: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it as PNG and SVG."""
        for kind in ("png", "svg"):
            file = BytesIO()
            with _style():
                self.figure.savefig(file, format=kind, dpi=300)
            write_atomically(folder / f"{self.name}.{kind}", file.getvalue())

    def inline(self) -> str:
        """The figure as an SVG element of a page: its colours follow the page, and markers carry their titles."""
        file = BytesIO()
        with _style({"svg.fonttype": "none"}):
            self.figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        ElementTree.register_namespace("", SVG[1:-1])
        ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
        root = ElementTree.fromstring(file.getvalue())
        for group in root.iter(f"{SVG}g"):
            name = group.get("id", "")
            for marker, tip in zip(group.iter(f"{SVG}use"), self.tips.get(name, ()), strict=False):
                ElementTree.SubElement(marker, f"{SVG}title").text = tip
            if name in self.tips:
                del group.attrib["id"]
        for name in ("width", "height"):
            del root.attrib[name]
        root.attrib |= {"role": "img", "aria-label": self.caption}
        text = ElementTree.tostring(root, encoding="unicode")
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", text)
        text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
        for number, color in enumerate(COLORS):
            text = text.replace(color, f"var(--run-{number})")
        return text.replace(INK, "currentColor")


def draw(
    runs: Sequence[Run], panels: Sequence[Panel], pairs: Sequence[Pair], searches: Sequence[Search]
) -> dict[str, list[Picture]]:
    """All figures that these have something to show in, by the section of the page they belong to."""
    of_searches = [picture for search in searches for picture in (progress(search), tradeoff(search))]
    found = {
        "positions": [positions(panel) for panel in panels if panel.by_position],
        "differences": [differences(pair) for pair in pairs],
        "factors": [picture for picture in [layers(runs, searches)] if picture],
        "searches": [picture for picture in of_searches if picture],
    }
    names: list[str] = []
    for pictures in found.values():
        for i, picture in enumerate(pictures):  # two sets of examples may have one name
            names.append(picture.name)
            if (n := names.count(picture.name)) > 1:
                pictures[i] = replace(picture, name=f"{picture.name}-{n}")
    return found


def positions(panel: Panel) -> Picture:
    """Accuracy by position of the gold item, a line for each run (Liu et al., Fig. 1)."""
    tips: dict[str, list[str]] = {}
    counts, ticks = set[int](), set[float]()
    scores: list[float] = []
    task, _, metric_name = panel.title.rpartition(", ")
    with _axes("position of the gold item in the context (%)", metric_name) as axes:
        for run, metric in panel.runs.items():
            values, ends = list(metric.values.values()), [interval(metric, label) for label in metric.values]
            asked = [float(label.removesuffix(" %")) for label in metric.values]
            at = [x + 0.6 * (run.place % 6) for x in asked]  # equal scores do not hide each other
            color, marker, gid = COLORS[run.place % 6], MARKERS[run.place % 6], f"run{run.place}"
            label, line = (f"{_short(run.name)} (published)", "--") if run.is_published else (_short(run.name), "-")
            axes.plot(at, values, line, color=color, marker=marker, label=label, gid=gid)
            known = [end for end in ends if end]
            if len(known) == len(values):
                axes.fill_between(at, *zip(*known, strict=True), color=color, alpha=0.15, linewidth=0)
                counts.update(map(len, (metric.by_question or {}).values()))
            tips[gid] = [
                f"{run.name}, {label}: {value:.3f}" + (f" ({end[0]:.3f} to {end[1]:.3f})" if end else "")
                for label, value, end in zip(metric.values, values, ends, strict=True)
            ]
            scores += values
            ticks.update(asked)
        axes.set_xticks(sorted(ticks))
        if all(0 <= value <= 1 for value in scores):
            axes.set_ylim(-0.02, 1.02)
        n = f"n = {_and(counts)} questions; bands: 95 % intervals" if counts else "no samples logged"
        axes.set_title(f"{task}\n{n}", loc="left")
        _legend(axes)
    caption = f"{panel.title}: score by position of the gold item"
    return Picture(_file(f"positions {panel.title}"), caption, axes.figure, tips)


def differences(pair: Pair) -> Picture:
    """Paired differences, a row for each score."""
    rows, names = [], []
    for section in pair.report.sections:
        rows += [row.facts for row in section.rows]
        several = sum(section.task == other.task for other in pair.report.sections) > 1
        named = f"{section.task}, {section.metric}" if several else section.task
        of = {"all": named, "spread": f"{named}, spread (less is better)"}
        names += [of.get(row.cells[0], f"{named}, {row.cells[0]}") for row in section.rows]
    height = 1.0 + 0.19 * len(rows)
    with _axes(f"{_short(pair.b.name, 36)} − {_short(pair.a.name, 36)}", "", height) as axes:
        at = list(range(len(rows)))
        for y, row in zip(at, rows, strict=True):
            axes.plot(row["interval"], [y, y], color=COLORS[1], alpha=0.6)
        axes.plot([row["difference"] for row in rows], at, "o", color=COLORS[1], gid="rows")
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(at, names)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        n = _and({section.questions or 0 for section in pair.report.sections})
        axes.set_title(f"n = {n} questions; bars: 95 % intervals, paired", loc="left", x=0)
    tips = [
        f"{name}: {row['a']:.3f} → {row['b']:.3f}, {row['difference']:+.3f} "
        f"({row['interval'][0]:+.3f} to {row['interval'][1]:+.3f}), p = {row['p']:.2g}"
        for name, row in zip(names, rows, strict=True)
    ]
    caption = f"Paired differences, {pair.b.name} − {pair.a.name}"
    return Picture(_file(f"differences {pair.a.name} {pair.b.name}"), caption, axes.figure, {"rows": tips})


def layers(runs: Sequence[Run], searches: Sequence[Search]) -> Picture | None:
    """One factor a layer, of the runs and of what searches found, with the control points of its curve (Fig. 2)."""
    lines: list[tuple[str, list[float], list[tuple[float, float]], int]] = [
        (run.name, run.per_layer, [], run.place) for run in runs if run.per_layer
    ]
    for place, search in enumerate(searches, len(runs)):
        if search.found and search.found.num_layers:
            lines.append((search.name, search.found.per_layer(), search.points, place))
    if not lines:
        return None
    tips = {}
    with _axes("layer", "factor") as axes:
        for name, values, points, place in lines:
            color, marker = COLORS[place % 6], MARKERS[place % 6]
            axes.plot(range(len(values)), values, color=color, marker=marker, label=_short(name), gid=f"layers{place}")
            tips[f"layers{place}"] = [f"{name}, layer {h}: {value:.3f}" for h, value in enumerate(values)]
            if points:
                axes.plot(*zip(*points, strict=True), ":", color=color, marker="x", label=f"{name}: control points")
        axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend(axes)
    return Picture("factors", "Position scaling factor of each layer; 1 is the plain model", axes.figure, tips)


def progress(search: Search) -> Picture | None:
    """The search as it went: every individual, and the fittest so far among those asked as many questions."""
    individuals = search.individuals
    if not individuals:
        return None
    asked, seconds, at = 0, 0.0, []
    for entry in individuals:
        asked, seconds = asked + entry["prompts"], seconds + entry["seconds"]
        at.append((asked, seconds))
    tips = {}
    full = sorted({entry["prompts"] for entry in individuals if "stopped_after" not in entry})
    kinds: dict[str, list[int]] = {}
    for i, entry in enumerate(individuals):
        kind = "given up early" if "stopped_after" in entry else f"measured on {entry['prompts']} prompts"
        kinds.setdefault(kind, []).append(i)
    with _axes("prompts answered so far", "fitness on the search examples") as axes:
        for kind, members in sorted(kinds.items(), key=lambda kind: kind[1][0]):
            early = kind == "given up early"
            number = 0 if early else 1 + full.index(individuals[members[0]]["prompts"]) % 5
            xs, ys = [at[i][0] for i in members], [individuals[i]["fitness"] for i in members]
            face = "none" if early else COLORS[number]
            axes.plot(xs, ys, MARKERS[number], color=COLORS[number], mfc=face, ms=4, label=kind, gid=kind)
            tips[kind] = [_told(i, individuals[i], *at[i]) for i in members]
            if not early:
                best = [max(ys[: k + 1]) for k in range(len(ys))]
                axes.plot(xs, best, drawstyle="steps-post", color=COLORS[number], alpha=0.6)
        for entry in search.entries:
            if entry.get("origin") == "baseline":
                label = f"plain model, {entry['prompts']} prompts"
                axes.axhline(entry["fitness"], color=INK, linewidth=0.8, linestyle=":", label=label)
        state = "" if search.finished else ", not finished"
        axes.set_title(f"{len(individuals)} individuals, {asked:,} prompts, {seconds:,.0f} s{state}", loc="left")
        _legend(axes)
    caption = f"Search {search.name}: fitness of every individual"
    return Picture(_file(f"search {search.name}"), caption, axes.figure, tips)


def tradeoff(search: Search) -> Picture | None:
    """Mean against worst position of the individuals measured on most questions, and what none other beats."""
    full = [entry for entry in search.individuals if "stopped_after" not in entry]
    most = max((entry["prompts"] for entry in full), default=0)
    asked_most = [
        entry for entry in search.entries if entry.get("prompts") == most and len(entry.get("scores", ())) > 1
    ]
    kinds: dict[str, list[Mapping[str, Any]]] = {"plain model": [], "worsens a guard": [], "individual": []}
    for entry in asked_most:
        if entry.get("generation") is None:
            kinds["plain model"] += [entry] if entry.get("origin") == "baseline" else []
        elif "stopped_after" not in entry:
            harmful = any(guard["over"] for guard in entry.get("guards", {}).values())
            kinds["worsens a guard" if harmful else "individual"].append(entry)
    if len(kinds["worsens a guard"] + kinds["individual"]) < 2 or any(entry["fitness"] < 0 for entry in asked_most):
        return None  # a fitness below 0 is of a metric where lower is better: no common direction
    tips, front = {}, []
    with _axes("mean over tasks and positions", "worst of them") as axes:
        for number, (kind, entries) in zip((0, 2, 1), kinds.items(), strict=True):
            points = [(math.fsum(found) / len(found), min(found)) for e in entries for found in [e["scores"].values()]]
            front = sorted({p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)})
            if points:
                color, face = COLORS[number], "none" if number == 2 else COLORS[number]
                axes.plot(*zip(*points, strict=True), MARKERS[number], color=color, mfc=face, label=kind, gid=kind)
            tips[kind] = [
                f"{kind}: mean {mean:.3f}, worst {worst:.3f}; factors {_factors(entry)}"
                for (mean, worst), entry in zip(points, entries, strict=True)
            ]
        if front:  # that of the last kind
            axes.plot(*zip(*front, strict=True), color=COLORS[1], alpha=0.6, label="not beaten by any other")
        axes.set_title(f"individuals measured on {most} search prompts", loc="left")
        _legend(axes)
    caption = f"Search {search.name}: mean against worst position, guards kept or not"
    return Picture(_file(f"tradeoff {search.name}"), caption, axes.figure, tips)


def interval(metric: Metric, label: str) -> tuple[float, float] | None:
    """The 95 % interval of a score: Wilson's for right-or-wrong answers, the normal one for others."""
    from scipy.stats import binomtest, norm

    scores = (metric.by_question or {}).get(label, ())
    n = len(scores)
    if n < 2:
        return None
    if set(scores) <= {0.0, 1.0}:
        found = binomtest(int(sum(scores)), n).proportion_ci(method="wilson")
        return float(found.low), float(found.high)
    mean = math.fsum(scores) / n
    half = float(norm.ppf(0.975)) * math.sqrt(math.fsum((x - mean) ** 2 for x in scores) / (n * (n - 1)))
    return mean - half, mean + half


def _told(number: int, entry: Mapping[str, Any], asked: int, seconds: float) -> str:
    early = ", given up early" if "stopped_after" in entry else ""
    return (
        f"individual {number + 1}, generation {entry['generation']}, {entry.get('origin', '')}: fitness "
        f"{entry['fitness']:.4f} on {entry['prompts']} prompts{early}; {asked:,} prompts and {seconds:,.0f} s so far; "
        f"factors {_factors(entry)}"
    )


def _factors(entry: Mapping[str, Any]) -> str:
    return " ".join(f"{y:g}" for _, y in entry["points"]) if entry.get("points") else f"{entry.get('factor', '')}"


def _and(counts: set[int]) -> str:
    return ", ".join(map(str, sorted(counts)))


def _file(title: str) -> str:
    return re.sub(r"[^\w.-]+", "-", title).strip("-")


def _legend(axes: Any) -> None:
    lines, names = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, names)) <= 28 else 1
    axes.figure.legend(lines, names, loc="outside lower left", ncols=columns, fontsize=8)


def _short(name: str, most: int = 60) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-most // 2 :]}"


@contextmanager
def _style(more: Mapping[str, Any] = {}) -> Iterator[None]:
    from matplotlib import rc_context

    style: dict[Any, Any] = {**STYLE, **more}
    with rc_context(style):
        yield


@contextmanager
def _axes(x: str, y: str, height: float = 3.2) -> Iterator[Any]:
    from matplotlib.figure import Figure

    with _style():
        axes = Figure(figsize=(5.2, height), layout="constrained").add_subplot()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        yield axes
