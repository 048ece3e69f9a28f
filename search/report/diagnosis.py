"""A diagnosis in words, as data and as a picture (``search.diagnose`` measures)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lpes_eval.compare.tables import finite, p_value, text_table
from lpes_eval.files import write_atomically
from lpes_eval.report.figures import interval
from search.report.pages import seconds

if TYPE_CHECKING:
    from search.diagnose import Diagnosis, Length, Scan

LEVEL = 0.05


def position_bias(rows: Sequence[Sequence[float]]) -> float:
    """p of "the position makes no difference": Friedman's test, of right and wrong answers Cochran's Q."""
    from scipy.stats import friedmanchisquare

    columns = list(zip(*rows, strict=True))
    if len(columns) < 3 or len(rows) < 2:
        return math.nan
    if all(len(set(row)) == 1 for row in rows):  # nothing varies, so nothing depends on the position
        return 1.0
    return float(friedmanchisquare(*columns).pvalue)


def facts(found: Diagnosis) -> dict[str, Any]:
    """The report as data; scores are shares of 1."""
    from lpes_eval.compare.statistics import holm
    from search.diagnose import STEPS, bands_of, search_command, search_seconds

    adjusted = holm([position_bias(length.rows) for length in found.lengths])
    lengths = [_length(length, p) for length, p in zip(found.lengths, adjusted, strict=True)]
    layers = found.scans[0].evaluator.num_layers
    scans = [
        _scan(scan, len(STEPS) * len(bands_of(layers)))
        | {"search_seconds": search_seconds(found, scan), "command": search_command(found, scan.asked)}
        for scan in found.scans
    ]
    model = {"name": found.args.pretrained, "layers": layers, "window": found.lm.max_length}
    return {"model": model, "lengths": lengths, "does_not_fit": found.refused, "scans": scans, "cut": found.cut}


def _length(length: Length, p: float) -> dict[str, Any]:
    n, columns = len(length.rows), list(zip(*length.rows, strict=True))
    means = [sum(column) / n for column in columns]
    mean = sum(means) / len(means)
    positions = [
        {"position": column.position, "score": score, "interval": interval(scores)}
        for column, score, scores in zip(length.objective.columns, means, columns, strict=True)
    ]
    return {
        "task": length.objective.name,
        "length": length.title,
        "size": length.size,
        "prompt_tokens": length.tokens,
        "questions": n,
        "positions": positions,
        "mean": mean,
        "friedman_p_holm": p,
        "biased": p < LEVEL,
        "gain_if_all_were_as_the_best": max(means) - mean,
        "gain_at_most": 1 - mean,
    }


def _scan(scan: Scan, planned: int) -> dict[str, Any]:
    """The best band, what it changes on questions that it was not chosen by, and what that says about a search."""
    from lpes_eval.compare.statistics import compare_paired

    said: dict[str, Any] = {"task": scan.name, "bands_tried": len(scan.bands), "bands": planned, "best": None}
    if scan.best is None:
        return said | {"search": "unlikely" if len(scan.bands) == planned else "uncertain"}
    first, last, factor = scan.best
    said["best"] = {"layers": [first, last], "factor": factor}
    if not scan.scaled:
        return said | {"search": "uncertain"}
    change = compare_paired(scan.plain, scan.scaled).mean
    said["best"] |= {"plain": change.a, "gain": change.difference, "interval": [change.low, change.high]}
    said["best"] |= {"p": change.p, "questions": len(scan.plain)}
    if change.difference <= 0:
        return said | {"search": "unlikely"}
    return said | {"search": "likely" if change.p < LEVEL else "uncertain"}


def _text(found: Diagnosis, said: dict[str, Any]) -> str:
    model = said["model"]
    parts = [f"{model['name']}: {model['layers']} layers, a window of {model['window']:,} tokens"]
    for task in found.args.tasks:
        lengths = [one for one in said["lengths"] if one["task"] == task]
        if lengths:
            parts.append(_table(task, lengths) + "\n" + _bias(lengths, model["window"]))
    parts += [f"Does not fit: {reason}" for reason in said["does_not_fit"]]
    parts += [_verdict(scan) for scan in said["scans"]]
    if said["cut"]:
        parts.append("The budget ended this before all was measured: the same command goes on.")
    parts.append(f"More: {found.args.output}/diagnosis.json and positions.png")
    return "\n\n".join(parts)


def _table(task: str, lengths: Sequence[dict[str, Any]]) -> str:
    at_each = [f"{at['position']:g} %" for at in lengths[0]["positions"]]
    header = [task, "questions", *at_each, "mean", "p of no bias"]
    rows = []
    for one in lengths:
        cells = [f"{100 * at['score']:.0f} ({_span(at['interval'])})" for at in one["positions"]]
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
    from search.diagnose import POSITIONS

    best, tried = scan["best"], f"{scan['task']}: {scan['bands_tried']} of {scan['bands']} bands of layers tried"
    if best is None:
        lines = [f"{tried}; none is better than the plain model." if scan["bands_tried"] else f"{tried}."]
    else:
        first, last = best["layers"]
        band = f"{f'layer {first}' if first == last else f'layers {first} to {last}'} by {best['factor']:g}"
        lines = [f"{tried}; the best is {band}."]
        if "gain" in best:
            at = ", ".join(f"{position:g}" for position in POSITIONS) + " %"
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


def write(found: Diagnosis) -> str:
    """Write ``diagnosis.txt``, ``diagnosis.json`` and ``positions.png``; returns the text."""
    folder, said = found.args.output, facts(found)
    text = _text(found, said)
    write_atomically(folder / "diagnosis.txt", text + "\n")
    write_atomically(folder / "diagnosis.json", json.dumps(finite(said), indent=2, allow_nan=False) + "\n")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(found.args.tasks), 3.4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(found.args.tasks), squeeze=False)[0], found.args.tasks, strict=True):
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
