"""The page and the pictures of ``benchmarks.landscapes``."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import recorded


def page(rows: Sequence[dict[str, Any]], searches: Sequence[Any], models: Iterable[Any]) -> str:
    """The tables and pictures of these searches on these landscapes, in Markdown."""
    frame = _table(rows)
    words = Path(__file__).with_name("landscapes.md").read_text(encoding="utf-8")
    lines = [words.format_map(_summary(frame, searches, models))]
    for title, group in frame.groupby("title"):
        names, timed = list(dict.fromkeys(group.landscape)), int(group.seconds.notna().any())
        heads = ["search", *names, "prompts", *["seconds"] * timed]
        lines += ["", f"## {title}", "", f"![gain against {title}]({_file(title)})", ""]
        lines += [f"| {' | '.join(heads)} |", "| --- |" + " --: |" * (len(heads) - 1)]
        for kind in searches:
            of_search, cells = group[group.search == kind.title], [kind.title]
            for name in names:
                found = of_search[of_search.landscape == name]
                gain = f"{found.gain.mean():+.1f} ± {1.96 * found.gain.sem():.1f}"
                cells.append(f"{gain}; {found.shown.sum()}/{len(found)}")
            cells.append(f"{of_search.prompts.mean():,.0f}")
            cells += ["–" if kind.optimizer == "gradient" else f"{of_search.seconds.mean():,.0f}"] * timed
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _summary(frame: pd.DataFrame, searches: Sequence[Any], models: Iterable[Any]) -> dict[str, Any]:
    """The numbers in the page's text."""
    default, paper = frame.search == searches[0].title, frame.search == "`--preset paper`"
    nothing, hurts = (frame[default & (frame.landscape == name)].shown for name in ("nothing", "only hurts"))
    errors = {each.name: each.error for each in models if each.error}
    real, best = frame.real, frame.landscape.map(frame.groupby("landscape").gain.max())

    def near(title: str) -> str:
        found = (frame.gain >= best - 2)[real & (frame.search == title)].groupby(frame.landscape, sort=False)
        return ", ".join(f"{some.sum()} of {len(some)} ({name})" for name, some in found)

    def each(number: int) -> str:
        return ", ".join(f"{error[number]:.1f} ({name})" for name, error in errors.items())

    gains = frame.groupby(["search", "landscape", "layers"]).gain.mean()
    beaten = []
    for kind in searches:
        ahead = (gains[kind.title] - gains[searches[0].title]).sort_index(level="layers")
        more = [f"{gain:.1f} in {name} of {layers} layers" for (name, layers), gain in ahead.items() if gain > 1]
        beaten += [f"{kind.title} ({', '.join(more)})"] if more else []
    return {
        "beaten": "; ".join(beaten) or "none",
        "nothing_seeds": len(nothing) // frame[frame.landscape == "nothing"].layers.nunique(),
        "seeds": frame[~default].groupby(["landscape", "layers", "search"]).size().min(),
        "vectors": ", ".join(f"{len(recorded.load(name))} ({name})" for name in errors),
        "errors": each(0),
        "nearest": each(1),
        "ratio": frame[paper & ~real].prompts.mean() / frame[default & ~real].prompts.mean(),
        "real_ratio": frame[paper & real].prompts.mean() / frame[default & real].prompts.mean(),
        "alarms": nothing.sum(),
        "nothing": len(nothing),
        "alarm_share": 100 * nothing.mean(),
        "let_through": hurts.sum(),
        "hurt": len(hurts),
        "near": near(searches[0].title),
        "nearer": near(searches[1].title),
        "published": near(searches[2].title),
    }


def _table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The rows, whether each is of a recorded model, and the title of its section."""
    frame = pd.DataFrame(rows)
    frame["real"] = frame.landscape.isin(list(recorded.MODELS))
    frame["title"] = frame.layers.map("Simulated models of {} layers".format).where(~frame.real, "Recorded models")
    return frame


def _file(title: str) -> str:
    return f"landscapes-{title.lower().replace(' ', '-')}.png"


def pictures(rows: Sequence[dict[str, Any]], searches: Sequence[Any], folder: Path) -> None:
    """The true gain of the best so far against what was spent, averaged over seeds, with 95 % intervals."""
    from matplotlib.figure import Figure

    for title, group in _table(rows).groupby("title"):
        names = [name for name in dict.fromkeys(group.landscape) if name != "nothing"]
        against = [("prompts", 0), ("seconds of model time", 1)][: 2 if group.seconds.notna().any() else 1]
        figure = Figure(figsize=(3 * len(names) + 2, 2.9 * len(against)), layout="constrained")
        axes = figure.subplots(len(against), len(names), squeeze=False, sharey="col")
        for column, name in enumerate(names):
            for line, (what, number) in enumerate(against):
                axis, of_landscape = axes[line, column], group[group.landscape == name]
                for color, kind in enumerate(searches):
                    if number and kind.optimizer == "gradient":
                        continue  # its seconds have no backward passes in them
                    paths = of_landscape[of_landscape.search == kind.title].path.tolist()
                    first = max(1, *(path[0][number] for path in paths))
                    grid = np.geomspace(first, max(first + 1, *(path[-1][number] for path in paths)), 60)
                    gains = np.array([_along(path, number, grid) for path in paths])
                    mean, half = gains.mean(0), 1.96 * gains.std(0, ddof=1) / math.sqrt(len(gains))
                    axis.plot(grid, mean, color=f"C{color}", lw=2.2 if color == 0 else 1.2, label=kind.title)
                    axis.fill_between(grid, mean - half, mean + half, color=f"C{color}", alpha=0.2, lw=0)
                axis.axhline(0, color="0.6", lw=0.8, zorder=0)
                axis.set(xscale="log", xlabel=what, ylabel="" if column else "true gain in points")
                axis.spines[["top", "right"]].set_visible(False)
                if line == 0:
                    axis.set_title(name)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        labels = [label.replace("`", "") for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(names)), frameon=False)
        figure.savefig(folder / _file(title), dpi=110)


def _along(path: Sequence[Sequence[float]], number: int, grid: np.ndarray) -> np.ndarray:
    """The gain of the best so far at each amount spent; 0, the plain model's, before the first one."""
    at = np.searchsorted([point[number] for point in path], grid, side="right")
    return np.array([0.0, *(point[2] for point in path)])[at]
