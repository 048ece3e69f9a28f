"""The figures of the page: what runs, pairs of runs and searches show. Bars and bands are 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean
from typing import Any

from lpes_eval.compare.results import position_of
from lpes_eval.drawing import COLORS, INK, Drawing, Line, Picture, factors, short
from lpes_eval.report.sources import Attention, Pair, Panel, Run, Search, numbered


def draw(
    runs: Sequence[Run],
    panels: Sequence[Panel],
    pairs: Sequence[Pair],
    searches: Sequence[Search],
    attentions: Sequence[Attention],
) -> dict[str, list[Picture]]:
    """All figures that these have something to show in, by section of the page; those of one name are numbered."""
    from lpes_eval.report import attention

    found: dict[str, list[Picture | None]] = {
        "positions": [positions(panel) for panel in panels if panel.by_position],
        "differences": [differences(pair) for pair in pairs],
        "factors": [layers(runs, searches)],
        "searches": [
            picture
            for search in searches
            for picture in (progress(search), progress(search, "seconds"), tradeoff(search))
        ],
        "attention": [picture for one in attentions for picture in attention.pictures(one)],
    }
    names = iter(numbered([one.name for pictures in found.values() for one in pictures if one], "-{}"))
    return {section: [replace(one, name=next(names)) for one in pictures if one] for section, pictures in found.items()}


def positions(panel: Panel) -> Picture:
    """Accuracy by position of the gold item, a line for each run (Liu et al., Fig. 1)."""
    from lpes_eval.compare.statistics import interval

    task, _, metric_name = panel.title.rpartition(", ")
    drawing = Drawing("position of the gold item in the context (%)", metric_name)
    counts, ticks, scores = set[int](), set[float](), list[float]()
    for run, metric in panel.runs.items():
        values, ends = list(metric.values.values()), [interval(metric.scores(label)) for label in metric.values]
        asked = [position_of(label) for label in metric.values]
        at = [x + 0.6 * (run.place % 6) for x in asked]  # equal scores do not hide each other
        tips = [
            f"{run.name}, {label}: {value:.3f}" + (f" ({end[0]:.3f} to {end[1]:.3f})" if end else "")
            for label, value, end in zip(metric.values, values, ends, strict=True)
        ]
        name, line = (f"{short(run.name)} (published)", "--") if run.is_published else (short(run.name), "-")
        drawing.marks(name, at, values, tips, run.place, linestyle=line)
        if all(ends):
            low, high = zip(*filter(None, ends), strict=True)
            drawing.axes.fill_between(at, low, high, color=COLORS[run.place % 6], alpha=0.15, linewidth=0)
            counts.add(metric.questions)
        scores += values
        ticks.update(asked)
    drawing.axes.set_xticks(sorted(ticks))
    if all(0 <= value <= 1 for value in scores):
        drawing.axes.set_ylim(-0.02, 1.02)
    n = f"n = {_and(counts)} questions; bands: 95 % intervals" if counts else "no samples logged"
    caption = f"{panel.title}: score by position of the gold item"
    return drawing.picture(f"positions {panel.title}", caption, f"{task}\n{n}")


def differences(pair: Pair) -> Picture:
    """Paired differences, a row for each score."""
    rows: list[Mapping[str, Any]] = []
    names: list[str] = []
    for section in pair.report.sections:
        rows += [vars(row.difference) | {"interval": (row.difference.low, row.difference.high)} for row in section.rows]
        several = sum(section.task == other.task for other in pair.report.sections) > 1
        named = f"{section.task}, {section.metric}" if several else section.task
        of = {"all": named, "spread": f"{named}, spread (less is better)"}
        names += [of.get(row.label, f"{named}, {row.label}") for row in section.rows]
    tips = [
        f"{name}: {row['a']:.3f} → {row['b']:.3f}, {row['difference']:+.3f} "
        f"({row['interval'][0]:+.3f} to {row['interval'][1]:+.3f}), p = {row['p']:.2g}"
        for name, row in zip(names, rows, strict=True)
    ]
    drawing = Drawing(f"{short(pair.b.name, 36)} − {short(pair.a.name, 36)}", "", height=1.0 + 0.19 * len(rows))
    for y, row in enumerate(rows):
        drawing.axes.plot(row["interval"], [y, y], color=COLORS[1], alpha=0.6)
    drawing.marks("", [row["difference"] for row in rows], range(len(rows)), tips, 1, linestyle="")
    drawing.axes.axvline(0, color=INK, linewidth=0.8)
    drawing.axes.set_yticks(range(len(rows)), names)
    drawing.axes.set_ylim(len(rows) - 0.5, -0.5)
    n = _and({section.questions or 0 for section in pair.report.sections})
    caption = f"Paired differences, {pair.b.name} − {pair.a.name}"
    title = f"n = {n} questions; bars: 95 % intervals, paired"
    return drawing.picture(f"differences {pair.a.name} {pair.b.name}", caption, title)


def layers(runs: Sequence[Run], searches: Sequence[Search]) -> Picture | None:
    """One factor a layer, of the runs and of what searches found, with the control points of its curve (Fig. 2)."""
    lines: list[Line] = [(run.name, run.results.per_layer, run.place, ()) for run in runs if run.results.per_layer]
    for place, search in enumerate(searches, len(runs)):
        if search.found and search.found.num_layers:
            values = search.found.per_layer()
            lines.append((search.name, values, place, search.found.control_points()))
    return factors(lines) if lines else None


def progress(search: Search, cost: str = "prompts") -> Picture | None:
    """The search as it went: every individual, a line as long as what it took, in ``prompts`` or ``seconds``.

    With it stands the fittest so far among those asked as many questions.
    """
    if not (individuals := search.individuals):
        return None
    what = {"prompts": "prompts answered so far", "seconds": "seconds spent on individuals so far"}[cost]
    drawing = Drawing(what, "fitness on the search examples")
    full = sorted({entry["prompts"] for entry in search.full})
    asked, seconds = 0, 0.0
    marks: dict[int, list[tuple[float, float, str]]] = {}  # by place among the sizes, 0 for what was given up
    for number, entry in enumerate(individuals, 1):
        asked, seconds = asked + entry["prompts"], seconds + entry["seconds"]
        early = "stopped_after" in entry
        tip = (
            f"individual {number}, generation {entry['generation']}, {entry.get('origin', '')}: fitness "
            f"{entry['fitness']:.4f} on {entry['prompts']} prompts{', given up early' if early else ''}; "
            f"{asked:,} prompts and {seconds:,.0f} s so far; factors {_factors(entry)}"
        )
        place = 0 if early else 1 + full.index(entry["prompts"])
        end = {"prompts": asked, "seconds": seconds}[cost]
        marks.setdefault(place, []).append((end, entry["fitness"], tip))
        drawing.axes.hlines(entry["fitness"], end - entry[cost], end, color=COLORS[place % 6], alpha=0.6)
    for place, some in sorted(marks.items()):
        xs, ys, tips = zip(*some, strict=True)
        name = f"measured on {full[place - 1]} prompts" if place else "given up early"
        drawing.marks(name, xs, ys, tips, place, linestyle="", hollow=not place, markersize=4)
        if place:
            drawing.axes.plot(xs, list(accumulate(ys, max)), drawstyle="steps-post", color=COLORS[place % 6], alpha=0.6)
    for entry in search.baselines:
        label = f"plain model, {entry['prompts']} prompts"
        drawing.axes.axhline(entry["fitness"], color=INK, linewidth=0.8, linestyle=":", label=label)
    title = f"{len(individuals)} individuals, {asked:,} prompts, {seconds:,.0f} s"
    caption = f"Search {search.name}: fitness of every individual, by {cost}"
    name = f"search {search.name}" + (" seconds" if cost == "seconds" else "")
    return drawing.picture(name, caption, title + ("" if search.finished else ", not finished"))


def tradeoff(search: Search) -> Picture | None:
    """Mean against worst position of the individuals measured on most questions, and what none other beats."""
    most = max((entry["prompts"] for entry in search.full), default=0)
    full = [entry for entry in search.full if entry["prompts"] == most and len(entry["scores"]) > 1]
    if len(full) < 2 or search.lower:  # no common direction
        return None
    harmful = [entry for entry in full if any(guard["over"] for guard in entry.get("guards", {}).values())]
    plain = [one for one in search.baselines if one["prompts"] == most]
    fine = [entry for entry in full if entry not in (*harmful, *plain)]
    drawing = Drawing("mean over tasks and positions", "worst of them")
    for name, place, entries in (("plain model", 0, plain), ("worsens a guard", 2, harmful), ("individual", 1, fine)):
        points = [(fmean(entry["scores"].values()), min(entry["scores"].values())) for entry in entries]
        tips = [
            f"{name}: mean {mean:.3f}, worst {worst:.3f}; factors {_factors(entry)}"
            for (mean, worst), entry in zip(points, entries, strict=True)
        ]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        drawing.marks(name, xs, ys, tips, place, linestyle="", hollow=place == 2)
    if front := sorted({p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)}):
        drawing.axes.plot(*zip(*front, strict=True), color=COLORS[1], alpha=0.6, label="not beaten by any other")
    caption = f"Search {search.name}: mean against worst position, guards kept or not"
    return drawing.picture(f"tradeoff {search.name}", caption, f"individuals measured on {most} search prompts")


def _factors(entry: Mapping[str, Any]) -> str:
    return " ".join(f"{y:g}" for _, y in entry["points"]) if entry.get("points") else f"{entry.get('factor', '')}"


def _and(counts: set[int]) -> str:
    return ", ".join(map(str, sorted(counts)))
