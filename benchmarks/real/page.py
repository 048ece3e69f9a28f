"""The tables and pictures of docs/real-models.md, from the lines that ``benchmarks.real`` has written.

python -m benchmarks.real.page            write the tables between the page's markers, and the pictures
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats

from benchmarks.pages import filled
from benchmarks.real import POSITIONS
from lpes_eval.compare.tables import markdown_table
from lpes_eval.harness.task import gold_index

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/real/results"
PAGE = ROOT / "docs/real-models.md"
PICTURES = ROOT / "docs/real-models"
Values = NDArray[np.float64]
COLORS = ("#595959", "#0072b2", "#d55e00")
SIZES = {"kv_retrieval": "records", "mdqa_pos": "documents"}
MODELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma 3 270M"}
AT = [f"{position:g} %" for position in POSITIONS]
SEARCHED = "13-14:0.5"
"""What the default search ended with on ``DRAWN``."""
DRAWN = ("smollm2", "kv_retrieval", 12, False, False)
"""The lines that the pictures show, as ``read`` has them."""


def read(kind: str) -> dict[tuple[str, str, int, bool, bool], dict[str, dict[int, dict[str, Any]]]]:
    """The lines of a folder: by model, task, size, chat template and metric, then by factors, then by question."""
    groups: dict[Any, dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted((RESULTS / kind).glob("*.jsonl")):
        model, _, task = path.stem.partition("-")
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            of = f"{task} from {line['source']}" if line.get("source") else task
            group = groups[model, of, line["size"], line["chat"], "score" in line]
            group[line["factors"]][line["question"]] = line
    return groups


def table(lines: dict[int, dict[str, Any]], of: str, numbers: Sequence[int] | None = None) -> Values:
    """A value of questions, (questions, positions)."""
    return np.array([lines[number][of] for number in (numbers or sorted(lines))])


def interval(values: Values) -> tuple[float, float, float]:
    """The mean over questions of their means over positions, and its 95 % interval (Student's t)."""
    means = values.mean(1)
    half = stats.t.ppf(0.975, len(means) - 1) * means.std(ddof=1) / len(means) ** 0.5
    return means.mean(), means.mean() - half, means.mean() + half


def metric(lines: dict[int, dict[str, Any]]) -> str:
    """What of a line is its accuracy: the decoded answer's score, or else whether greedy decoding gives the gold."""
    return "score" if "score" in next(iter(lines.values())) else "exact"


def title(model: str, task: str, size: int, chat: bool) -> str:
    return f"{MODELS[model]}, {task}, {size} {SIZES[task.split()[0]]}" + (", chat" if chat else "")


def compared() -> str:
    """Accuracy by position of each set of factors, and what it gains over the plain model on the same questions."""
    rows = []
    for (*group, decoded), by_factors in read("held_out").items():
        first = title(*group) + (", decoded" if decoded and "kv_retrieval" in group else "")
        for name, lines in by_factors.items():
            numbers, of = sorted(lines.keys() & by_factors["plain"].keys()), metric(lines)
            values, plain = (100 * table(side, of, numbers) for side in (lines, by_factors["plain"]))
            gain = "" if name == "plain" else "{:+.1f} [{:+.1f}, {:+.1f}]".format(*interval(values - plain))
            places = {gold_index(p, group[2]): f"{p:g} %" for p in reversed(POSITIONS)}  # those that coincide once
            at = AT if values.shape[1] == len(AT) else sorted(places.values(), key=AT.index)
            by_position = dict(zip(at, values.mean(0), strict=True)) | {"mean": values.mean()}
            cells = [f"{by_position[name]:.1f}" if name in by_position else "" for name in (*AT, "mean")]
            rows.append([first, name, str(len(numbers)), *cells, gain])
            first = ""
    return markdown_table(["model, task", "factors", "n", *AT, "mean", "gain"], rows)


def mapped() -> str:
    """Accuracy of the plain model, and the likelihood of the gold answer, by position and length."""
    rows = []
    for (*group, _), by_factors in read("map").items():
        lines = by_factors["plain"]
        accuracy, likelihood = 100 * table(lines, metric(lines)), table(lines, "ll")
        cells = [f"{a:.0f} ({b:.2f})" for a, b in zip(accuracy.mean(0), likelihood.mean(0), strict=True)]
        mean = "{:.0f} [{:.0f}, {:.0f}]".format(*interval(accuracy))
        rows.append([title(*group), str(len(lines)), *cells, mean])
    return markdown_table(["model, task", "n", *AT, "mean"], rows)


def draw_positions(names: dict[str, str]) -> Figure:
    """Accuracy by position under the factors that ``names`` gives titles, with 95 % intervals."""
    by_factors = read("held_out")[DRAWN]
    figure, axes = pyplot.subplots(figsize=(5.2, 3.1), layout="constrained")
    for (name, label), color, marker in zip(names.items(), COLORS, "so^", strict=False):
        values = table(by_factors[name], metric(by_factors[name])) * 100
        half = stats.t.ppf(0.975, len(values) - 1) * values.std(0, ddof=1) / len(values) ** 0.5
        axes.errorbar(POSITIONS, values.mean(0), half, label=label, color=color, marker=marker, capsize=2, lw=1.5)
    axes.set(xlabel="position of the gold record, %", ylabel="accuracy, %", xticks=POSITIONS, ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure


def draw_map() -> Figure:
    """Log-likelihood of the gold answer by position and length, one panel a model and task."""
    panels: dict[tuple[str, str], dict[int, Values]] = defaultdict(dict)
    for (model, task, size, chat, _), by_factors in read("map").items():
        if not chat:
            panels[model, task][size] = table(by_factors["plain"], "ll").mean(0)
    figure, grid = pyplot.subplots(2, 2, figsize=(7.2, 4.8), layout="constrained")
    for axes, ((model, task), rows) in zip(grid.flat, panels.items(), strict=True):
        sizes = sorted(rows)
        values = np.array([rows[size] for size in sizes])
        axes.imshow(values, cmap="viridis", aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            color = "black" if value > values.min() + 0.6 * np.ptp(values) else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
        axes.set_xticks(range(len(POSITIONS)), [f"{p:g}" for p in POSITIONS])
        axes.set_yticks(range(len(sizes)), [str(size) for size in sizes])
        axes.set_title(f"{MODELS[model]}, {task}", fontsize=9)
        axes.set(xlabel="gold position, %", ylabel=SIZES[task.split()[0]])
    return figure


def draw_layers() -> Figure:
    """What one layer's factor changes in the log-likelihood of the gold answer: a layer a column, a factor a row."""
    by_factors = read("record")[DRAWN]
    plain = by_factors["plain"]
    cells: dict[tuple[float, int], float] = {}
    for name, lines in by_factors.items():
        layer, _, factor = name.partition(":")
        if layer.isdigit() and "+" not in name:
            numbers = sorted(lines.keys() & plain.keys())
            cells[float(factor), int(layer)] = float((table(lines, "ll", numbers) - table(plain, "ll", numbers)).mean())
    factors, layers = sorted({f for f, _ in cells}), sorted({h for _, h in cells})
    values = np.array([[cells.get((f, h), np.nan) for h in layers] for f in factors])
    figure, axes = pyplot.subplots(figsize=(7.2, 2.6), layout="constrained")
    image = axes.imshow(values, cmap="RdBu", vmin=-0.03, vmax=0.03, aspect="auto", origin="lower")
    axes.set_xticks(range(len(layers)), layers, fontsize=7)
    axes.set_yticks(range(len(factors)), [f"{f:g}" for f in factors])
    axes.set(xlabel="layer", ylabel="its factor")
    figure.colorbar(image, label="change of log-likelihood\na token", extend="both")
    return figure


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    texts = {"real_map": mapped(), "real_held_out": compared()}
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), texts), encoding="utf-8")
    names = {"plain": "plain", "all:0.95": "one factor for all layers, 0.95", SEARCHED: "layer factors of the search"}
    figures = {"map": draw_map(), "layers": draw_layers(), "positions": draw_positions(names)}
    for name, figure in figures.items():
        figure.savefig(PICTURES / f"{name}.png", dpi=200)


if __name__ == "__main__":
    main()
