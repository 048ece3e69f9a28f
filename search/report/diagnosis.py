"""A diagnosis in words, as data and as a picture (``search.diagnose`` measures)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lpes_eval.compare.tables import finite, p_value, text_table
from lpes_eval.files import write_atomically
from search.report.pages import seconds


def _text(said: dict[str, Any], folder: Path) -> str:
    model = said["model"]
    parts = [f"{model['name']}: {model['layers']} layers, a window of {model['window']:,} tokens"]
    for task in _tasks(said):
        lengths = [one for one in said["lengths"] if one["task"] == task]
        if lengths:
            parts.append(_table(task, lengths) + "\n" + _bias(lengths, model["window"]))
    parts += [f"Does not fit: {reason}" for reason in said["does_not_fit"]]
    parts += [_verdict(scan) for scan in said["scans"]]
    if said["cut"]:
        parts.append("The budget ended this before all was measured: the same command goes on.")
    parts.append(f"More: {folder}/diagnosis.json and positions.png")
    return "\n\n".join(parts)


def _table(task: str, lengths: Sequence[dict[str, Any]]) -> str:
    positions = sorted({at["position"] for one in lengths for at in one["positions"]})
    header = [task, "questions", *(f"{position:g} %" for position in positions), "mean", "p of no bias"]
    rows = []
    for one in lengths:
        scores = {at["position"]: f"{100 * at['score']:.0f} ({_span(at['interval'])})" for at in one["positions"]}
        cells = [scores.get(position, "–") for position in positions]
        cells += [f"{100 * one['mean']:.0f}", p_value(one["friedman_p_holm"])]
        rows.append([one["length"], str(one["questions"]), *cells])
    title = "Right answers in percent by position of the gold item, 95 % intervals (p: Friedman's test, Holm)"
    return f"{title}\n{text_table(header, rows)}"


def _bias(lengths: Sequence[dict[str, Any]], window: int) -> str:
    biased = ", ".join(one["length"] for one in lengths if one["biased"])
    most = max(lengths, key=lambda one: one["gain_if_all_were_as_the_best"])
    lines = [
        f"Accuracy depends on the position beyond chance at {biased}." if biased else "No position bias beyond chance.",
        f"If every position were as good as the best, {most['length']} would gain "
        f"{100 * most['gain_if_all_were_as_the_best']:.0f} points; if every answer were right, "
        f"{100 * most['gain_at_most']:.0f}.",
    ]
    sized = [one for one in lengths if one["size"] and math.isfinite(one["prompt_tokens"])]
    if len(sized) > 1:
        small, large = sized[0], sized[-1]
        slope = (large["prompt_tokens"] - small["prompt_tokens"]) / (large["size"] - small["size"])
        fits = large["size"] + int((window - 100 - large["prompt_tokens"]) / slope)
        lines.append(
            f"A prompt of {large['length']} has {large['prompt_tokens']:,.0f} tokens; about {fits} fit the window."
        )
    return "\n".join(lines)


def _verdict(scan: dict[str, Any]) -> str:
    best, tried = scan["best"], f"{scan['task']}: {scan['bands_tried']} of {scan['bands']} bands of layers tried"
    if best is None:
        lines = [f"{tried}; none is better than the plain model." if scan["bands_tried"] else f"{tried}."]
    else:
        first, last = best["layers"]
        band = f"{f'layer {first}' if first == last else f'layers {first} to {last}'} by {best['factor']:g}"
        lines = [f"{tried}; the best is {band}."]
        if "gain" in best:
            at = ", ".join(f"{position:g}" for position in best["positions"]) + " %"
            lines.append(
                f"On {best['questions']} other questions, at {at}, it changes the mean of {100 * best['plain']:.0f} by "
                f"{100 * best['gain']:+.0f} points ({_span(best['interval'])}; p = {p_value(best['p'])})."
            )
    says = {
        "likely": "A search is likely to help.",
        "uncertain": "A search may help; this does not show it.",
        "unlikely": "A search is unlikely to help.",
    }[scan["search"]]
    takes = seconds(scan["search_seconds"])
    return "\n".join([*lines, f"{says} It takes about {takes} on this machine:", f"  {scan['command']}"])


def _span(ends: Sequence[float]) -> str:
    low, high = (100 * end for end in ends)
    return f"{low:.0f} to {high:.0f}"


def _tasks(said: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(one["task"] for one in said["scans"]))


def write(said: dict[str, Any], folder: Path) -> str:
    """Write ``diagnosis.txt``, ``diagnosis.json`` and ``positions.png`` of what a diagnosis says; returns the text."""
    text, tasks = _text(said, folder), _tasks(said)
    write_atomically(folder / "diagnosis.txt", text + "\n")
    write_atomically(folder / "diagnosis.json", json.dumps(finite(said), indent=2, allow_nan=False) + "\n")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(tasks), 3.4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for one in (one for one in said["lengths"] if one["task"] == task):
            at = [100 * point["score"] for point in one["positions"]]
            ends = [[100 * end for end in point["interval"]] for point in one["positions"]]
            errors = [[max(0.0, y - low), max(0.0, high - y)] for y, (low, high) in zip(at, ends, strict=True)]
            xs = [point["position"] for point in one["positions"]]
            axes.errorbar(xs, at, list(zip(*errors, strict=True)), marker="o", ms=4, capsize=2, label=one["length"])
        axes.set(title=task, xlabel="position of the gold item (%)", ylabel="right answers (%)", ylim=(-3, 103))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(folder / "positions.png", dpi=150)
    return text
