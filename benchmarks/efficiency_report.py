"""The tables and the plot of ``benchmarks/efficiency.py``."""

from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
from scipy.stats import quantile_test

from lpes_eval import methods
from lpes_eval.compare.tables import markdown_table

TARGET = {"cpu": 1.02, "cuda": 1.01}
"""LPES may cost so many times the plain model, in prefill and in decode."""


def named(cell: dict) -> str:
    """What a cell measures, in words."""
    return f"{cell['shape']}, batch {cell['batch']}, {cell['length']} tokens"


def samples(cell: dict, name: str) -> pd.DataFrame:
    """A method's samples, those in step with the plain model where there are any, and ratios to its times.

    These are ``prefill``, ``decode`` (the median step) and ``sample`` (prefill and steps).
    """
    rows = pd.DataFrame(cell["rows"])
    rows["sample_s"], rows["plain_sample_s"] = (rows[f"{p}prefill_s"] + rows[f"{p}decode_s"] for p in ("", "plain_"))
    for ratio, what in (("prefill", "prefill_s"), ("decode", "step_s"), ("sample", "sample_s")):
        rows[ratio] = rows[what] / rows[f"plain_{what}"]
    own = rows[rows.method == name]
    return own[own.in_step] if own.in_step.any() else own


def spread(values: pd.Series, digits: int = 2, unit: float = 1.0) -> str:
    """Median and quartiles."""
    low, middle, high = (unit * values).quantile([0.25, 0.5, 0.75])
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def interval(values: list[float]) -> tuple[float, float]:
    """The sign test's 95 % confidence interval of the median; of few values, which have none, the two at the ends."""
    found = quantile_test(values).confidence_interval()
    return float(np.fmax(found.low, min(values))), float(np.fmin(found.high, max(values)))


def report(results: dict) -> str:
    """The tables, as Markdown."""
    machine, used, settings = results["hardware"], results["versions"], results["settings"]
    compiled = "compiled " if settings.get("compiled") else ""
    where = machine.get("gpu") or f"{machine['processor']}, {machine['threads']} threads"
    lines = [
        f"{where}; {settings['dtype']}, PyTorch {used['torch']}, transformers {used['transformers']}. "
        "Medians, quartiles in brackets; ratios are to the plain model, in step with it where two caches fit. "
        f"A sample is the prefill and {settings['new_tokens']} {compiled}decoding steps."
    ]
    header = ["method", "samples", "prefill, s", "decode, ms a step", "tokens a second", "prefill ratio"]
    header += ["decode ratio", "sample ratio", "paper", "peak memory, GiB"]
    for cell in results["cells"]:
        model, rows, measured = cell["model"], [], {row["method"] for row in cell["rows"]}
        for name in filter(measured.__contains__, cell["settings"]):
            seen, paper = samples(cell, name), 1.0 if name == "plain" else methods.load(name).published_time
            peak = seen.peak_bytes.iloc[0]  # that of a pass by itself, the same in all samples
            cells = [name, str(len(seen)), spread(seen.prefill_s, 3), spread(seen.step_s, 2, 1000)]
            cells += [f"{cell['batch'] / seen.step_s.median():,.1f}", spread(seen.prefill), spread(seen.decode)]
            cells += [spread(seen["sample"]), f"{paper:.2f}" if paper else "–", f"{peak / 2**30:.2f}" if peak else "–"]
            rows.append(cells)
        lines += [
            "",
            f"**{cell['shape']}** ({model['parameters'] / 1e6:,.1f} M parameters, {model['layers']} layers, "
            f"{model['heads']} heads, {model['key_value_heads']} of keys), batch {cell['batch']}, prompts of "
            f"{cell['length']:,} tokens, {cell['rounds']} rounds",
            "",
            markdown_table(header, rows),
        ]
    for cell in results["left_out"]:
        what = f"{cell['method']} in " if "method" in cell else ""
        lines += ["", f"Left out: {what}{named(cell)} ({cell['error']})."]
    if judged := verdict(results):
        lines += ["", judged]
    return "\n".join(lines) + "\n"


def verdict(results: dict) -> str:
    """Whether LPES costs no more than it may."""
    limit = TARGET["cuda" if results["hardware"].get("gpu") else "cpu"]
    cells = [cell for cell in results["cells"] if any(row["method"] == "lpes" for row in cell["rows"])]
    if not cells:
        return ""
    words, every = [], []
    for phase in ("prefill", "decode"):
        found = [list(samples(cell, "lpes")[phase]) for cell in cells]
        most, cell = max(zip(found, cells, strict=True), key=lambda each: median(each[0]))
        low, high = interval(most)
        words.append(f"{phase} {median(most):.3f} ({low:.3f} to {high:.3f}) at {named(cell)}")
        every += found
    kept = all(median(found) <= limit for found in every)
    surely = sum(interval(found)[1] <= limit for found in every)
    return (
        f"LPES / plain, the largest medians of all cells, with 95 % intervals: {'; '.join(words)}. The target of "
        f"{limit:.2f} is {'met' if kept else 'missed'}; {surely} of the {len(every)} medians have their whole interval "
        "below it."
    )


def plot(results: dict, file: Path) -> None:
    """Ratios to the plain model by prompt length at the smallest batch, prefill above decode, a column a shape."""
    from matplotlib.figure import Figure

    batch = min(cell["batch"] for cell in results["cells"])
    cells = sorted((cell for cell in results["cells"] if cell["batch"] == batch), key=lambda cell: cell["length"])
    shapes = list(dict.fromkeys(cell["shape"] for cell in results["cells"] if cell["batch"] == batch))
    names = list(dict.fromkeys(row["method"] for cell in cells for row in cell["rows"] if row["method"] != "plain"))
    figure = Figure(figsize=(1.5 + 3.5 * len(shapes), 6), layout="constrained")
    axes = figure.subplots(2, len(shapes), squeeze=False, sharey="row")
    for column, shape in enumerate(shapes):
        own = [cell for cell in cells if cell["shape"] == shape]
        lengths = [cell["length"] for cell in own]
        for axis, what in zip(axes[:, column], ("prefill", "decode"), strict=True):
            for name in names:
                found = [samples(cell, name)[what].quantile([0.25, 0.5, 0.75]) for cell in own]
                errors = [[middle - low for low, middle, _ in found], [high - middle for _, middle, high in found]]
                axis.errorbar(lengths, [q[0.5] for q in found], yerr=errors, marker="o", capsize=3, label=name)
            axis.axhline(1, color="grey", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.minorticks_off()
            if column == 0:
                axis.set_ylabel(f"{what}: times the plain model")
        axes[0][column].set_title(shape)
        axes[1][column].set_xlabel("prompt, tokens")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=3 * len(shapes))
    figure.suptitle(f"batch {batch}; medians and quartiles", fontsize=9)
    figure.savefig(file, dpi=120, metadata={"Software": None})
