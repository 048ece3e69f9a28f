"""The tables and the plot of ``benchmarks/efficiency.py``."""

from __future__ import annotations

from pathlib import Path
from statistics import median, quantiles

from lpes_eval import methods

TARGET = {"cpu": 1.02, "cuda": 1.01}
"""LPES may cost so many times the plain model, in prefill and in decode."""


def series(cell: dict, name: str, what: str) -> list[float]:
    """A method's seconds in each round: ``prefill``, ``decode`` (the median step), ``sample`` (prefill and steps)."""
    seen = cell["methods"].get(name) or {key: [] for key in ("prefill_s", "decode_s", "step_s")}
    if what == "sample":
        return [prefill + decode for prefill, decode in zip(seen["prefill_s"], seen["decode_s"], strict=True)]
    return seen["prefill_s" if what == "prefill" else "step_s"]


def ratios(cell: dict, name: str, what: str) -> list[float]:
    """A method's time over the plain model's, round by round."""
    return [a / b for a, b in zip(series(cell, name, what), series(cell, "plain", what), strict=False)]


def paired_ratios(cell: dict, what: str) -> list[float]:
    """LPES' time over the plain model's, pair by pair."""
    key = {"prefill": "prefill_s", "decode": "step_s"}[what]
    plain, lpes = (cell["pairs"][name][key] for name in ("plain", "lpes"))
    return [a / b for a, b in zip(lpes, plain, strict=True)]


def quartiles(values: list[float]) -> list[float]:
    return quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def spread(values: list[float], digits: int = 2, unit: float = 1.0) -> str:
    """Median and quartiles."""
    if not values:
        return "–"
    low, _, high = quartiles(values)
    return f"{unit * median(values):.{digits}f} ({unit * low:.{digits}f}–{unit * high:.{digits}f})"


def interval(values: list[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median: the values that as many lie below as a fair coin may show heads.

    Few values have none as narrow as the two at the ends, and get these.
    """
    from scipy.stats import binom

    ordered, rank = sorted(values), int(binom.ppf(0.025, len(values), 0.5))
    low = max(rank - 1, 0)
    return ordered[low], ordered[len(values) - 1 - low]


def _with_interval(values: list[float]) -> str:
    low, high = interval(values)
    return f"{median(values):.3f} ({low:.3f} to {high:.3f})"


def report(results: dict) -> str:
    """The tables, as Markdown."""
    machine, used, settings = results["hardware"], results["versions"], results["settings"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    lines = [
        f"{where}; {settings['dtype']}, PyTorch {used['torch']}, transformers {used['transformers']}. "
        "Medians over interleaved rounds, quartiles in brackets; ratios are to the plain model of the same round. "
        f"A sample is the prefill and {settings['new_tokens']} decoding steps."
        + (" Times are CPU seconds of the process." if settings["cpu_time"] else ""),
    ]
    for cell in results["cells"]:
        model = cell["model"]
        lines += [
            "",
            f"**{cell['shape']}** ({model['parameters'] / 1e6:,.1f} M parameters, {model['layers']} layers, "
            f"{model['heads']} heads, {model['key_value_heads']} of keys), batch {cell['batch']}, prompts of "
            f"{cell['length']:,} tokens, {cell['rounds']} rounds",
            "",
            "| method | prefill, s | decode, ms a step | tokens a second | prefill ratio | decode ratio | "
            "sample ratio | paper | peak memory, GiB |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, seen in cell["methods"].items():
            paper = 1.0 if name == "plain" else methods.load(name).published_time
            published = "–" if paper is None else f"{paper:.2f}"
            if seen["error"] and not seen["prefill_s"]:
                lines.append(f"| {name} | {seen['error']} | | | | | | {published} | |")
                continue
            steps = series(cell, name, "decode")
            peaks = [bytes_ for bytes_ in seen["peak_bytes"] if bytes_ is not None]
            relative = " | ".join(spread(ratios(cell, name, what)) for what in ("prefill", "decode", "sample"))
            lines.append(
                f"| {name} | {spread(series(cell, name, 'prefill'), 3)} | {spread(steps, 2, 1000)} | "
                f"{cell['batch'] / median(steps):,.1f} | {relative} | {published} | "
                f"{f'{median(peaks) / 2**30:.2f}' if peaks else '–'} |"
            )
        if in_step := {what: found for what in ("prefill", "decode") if (found := paired_ratios(cell, what))}:
            words = ", ".join(f"{what} {_with_interval(found)}" for what, found in in_step.items())
            lines += ["", f"LPES / plain in step, {len(in_step['decode'])} pairs: {words}."]
    for cell in results["left_out"]:
        reason = cell.get("error", "no time left")
        lines += ["", f"Left out: {cell['shape']}, batch {cell['batch']}, {cell['length']} tokens ({reason})."]
    if any(paired_ratios(cell, "decode") for cell in results["cells"]):
        lines += ["", verdict(results)]
    return "\n".join(lines) + "\n"


def verdict(results: dict) -> str:
    """Whether LPES costs no more than it may, by the pairs."""
    limit = TARGET["cuda" if results["hardware"].get("gpu") else "cpu"]
    words, every = [], []
    for phase in ("prefill", "decode"):
        found = [(ratios, cell) for cell in results["cells"] if (ratios := paired_ratios(cell, phase))]
        most, cell = max(found, key=lambda each: median(each[0]))
        words.append(
            f"{phase} {_with_interval(most)} at {cell['shape']}, batch {cell['batch']}, {cell['length']} tokens"
        )
        every += [ratios for ratios, _ in found]
    kept = all(median(found) <= limit for found in every)
    surely = sum(interval(found)[1] <= limit for found in every)
    return (
        f"LPES / plain, the largest medians of all cells, with 95 % intervals: {'; '.join(words)}. The target of "
        f"{limit:.2f} is {'met' if kept else 'missed'}; {surely} of the {len(every)} medians have their whole interval "
        "below it."
    )


def plot(results: dict, file: Path) -> None:
    """Ratios to the plain model by prompt length, prefill above decode, a column a shape; LPES' are those in step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    batch = min(cell["batch"] for cell in results["cells"])
    cells = sorted((cell for cell in results["cells"] if cell["batch"] == batch), key=lambda cell: cell["length"])
    shapes = list(dict.fromkeys(cell["shape"] for cell in results["cells"] if cell["batch"] == batch))
    names = list(dict.fromkeys(name for cell in cells for name in cell["methods"] if name != "plain"))
    size = (1.5 + 3.5 * len(shapes), 6)
    figure, axes = plt.subplots(2, len(shapes), figsize=size, squeeze=False, sharey="row", layout="constrained")
    for column, shape in enumerate(shapes):
        own = [cell for cell in cells if cell["shape"] == shape]
        for row, what in enumerate(("prefill", "decode")):
            axis = axes[row][column]
            for color, name in enumerate(names):
                found = [(c, (paired_ratios(c, what) if name == "lpes" else []) or ratios(c, name, what)) for c in own]
                points = [(cell["length"], *quartiles(values)) for cell, values in found if len(values) > 1]
                x, low, middle, high = zip(*points, strict=True) if points else ([], [], [], [])
                errors = [[m - e for m, e in zip(middle, low, strict=True)],
                          [e - m for m, e in zip(middle, high, strict=True)]]  # fmt: skip
                axis.errorbar(x, middle, yerr=errors, marker="o", capsize=3, label=name, color=f"C{color}")
            axis.axhline(1, color="grey", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            lengths = [cell["length"] for cell in own]
            axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.minorticks_off()
        axes[0][column].set_title(shape)
        axes[1][column].set_xlabel("prompt, tokens")
    for row, what in enumerate(("prefill", "decode")):
        axes[row][0].set_ylabel(f"{what}: times the plain model")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=len(labels))
    figure.suptitle(f"batch {batch}; medians and quartiles (lpes: in step with the plain model)", fontsize=9)
    figure.savefig(file, dpi=120, metadata={"Software": None})
    plt.close(figure)
