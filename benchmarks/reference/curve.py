"""Draw a training log: ``python -m benchmarks.reference.curve LOG.jsonl OUT.png``."""

import argparse
import sys
from itertools import groupby
from pathlib import Path

from lpes_eval import files
from lpes_eval.errors import UserError, program

AVERAGED = 5
"""Log lines that one drawn point averages, because neighbouring batches differ in length."""
NAMED = 0.012
"""Share of the steps that a level needs for its name to be written over it: names of narrower ones would overlap."""
SHARES = {
    "right": "answer tokens right (copying: all repeated tokens)",
    "answers": "whole answers right",
    "documents_answers": "whole answers about articles right",
}


def draw(log: Path, out: Path) -> None:
    """Loss and share of right answers by step, with the levels of the recipe as bands.

    Raises:
        UserError: no log, or one without a line; or ``out`` is of a kind that matplotlib does not write.
    """
    from matplotlib.figure import Figure

    lines = list(files.read_jsonl(log, required=("step", "level", "loss")))
    if not lines:
        raise UserError(f"{log}: the file is empty; expected a training's log.jsonl")
    first, last = lines[0]["step"], lines[-1]["step"]
    figure = Figure(figsize=(9, 7), layout="constrained")
    names, above, below = figure.subplots(3, 1, sharex=True, height_ratios=(2, 3, 3))
    names.axis("off")
    drawn = {}
    for i, (level, group) in enumerate(groupby(lines, key=lambda line: line["level"])):
        part = list(group)
        start, end = part[0]["step"], part[-1]["step"]
        for axes in (names, above, below):
            axes.axvspan(start, end, color="0.93" if i % 2 else "0.98", lw=0)
        if end - start > NAMED * (last - first):
            where = {"transform": names.get_xaxis_transform(), "ha": "center", "va": "bottom"}
            names.text((start + end) / 2, 0.04, _name(level), rotation=90, fontsize=7, **where)
        runs = [part[k : k + AVERAGED] for k in range(0, len(part), AVERAGED)]
        for number, key in enumerate(("loss", *SHARES)):
            known = [(run[len(run) // 2]["step"], [line[key] for line in run if key in line]) for run in runs]
            if points := [(step, sum(values) / len(values)) for step, values in known if values]:
                axes = below if key in SHARES else above
                (drawn[key],) = axes.plot(*zip(*points, strict=True), color=f"C{number}")
    above.set(yscale="log", ylabel="training loss, nats a token")
    below.set(xlabel="step", ylabel="share right on fresh batches", ylim=(0, 1.02), xlim=(first, max(last, first + 1)))
    shares = {words: drawn[key] for key, words in SHARES.items() if key in drawn}
    figure.legend(shares.values(), shares.keys(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(out, dpi=90)
    except ValueError as error:
        raise UserError(f"{out}: {error}") from None


def _name(level: str) -> str:
    """A level of the recipe in words: ``16x44+5`` is up to 44 records of whole UUIDs (16 bytes), up to 5 articles."""
    if level == "copy":
        return "copying"
    records, _, articles = level.partition("+")
    size, pairs = records.split("x")
    of = "" if size == "16" else f" of {size} bytes"
    return f"up to {pairs} pairs{of}" + {"": "", "1": ", 1 article"}.get(articles, f", {articles} articles")


@program("curve")
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference.curve", description="Draw a training log.")
    parser.add_argument("log", type=Path, help="a run's log.jsonl")
    parser.add_argument("out", type=Path, help="the picture to write, .png or .svg")
    given = parser.parse_args(arguments)
    draw(given.log, given.out)


if __name__ == "__main__":
    sys.exit(main())
