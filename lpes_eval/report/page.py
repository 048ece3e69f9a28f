"""``lpes-eval report PATH... -o report.html``: one page of runs, searches, and the answers that flipped."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_eval.compare import tables
from lpes_eval.files import check_output, marker, write_output

if TYPE_CHECKING:
    from lpes_eval.report.figures import Picture
    from lpes_eval.report.sources import Pair, Panel, Run, Search

ROOM = 6_000_000
"""So many characters of prompts are put into a page; a prompt beyond that is left out."""

COMMAND = "lpes-eval report"
KINDS = ("instruction", "context", "gold", "question", "prompt")


def add_parser(subparsers: Any) -> None:
    """Add ``lpes-eval report``."""
    parser = subparsers.add_parser(
        "report",
        help="one HTML page of runs and searches, with the samples that flipped",
        description="Write one page, which needs no network, from results of lm_eval and the folders of searches. Each "
        "run is paired with the first one before it on the same examples. docs/report.md says what is on the page.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="results JSON of lm_eval, or a folder: the newest results in it, a search, or what `attention` measured",
    )
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help="the page (default: report.html)")
    parser.add_argument("--figures", metavar="DIR", help="write the figures as PNG and PDF into this folder, too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run ``lpes-eval report``."""
    size = write(arguments.paths, arguments.output, arguments.figures)
    also = f"; figures in {arguments.figures}" if arguments.figures else ""
    print(f"{arguments.output}: {size / 1e6:.1f} MB{also}")
    return 0


def write(
    paths: Sequence[str | Path],
    output: str | Path,
    figures: str | Path | None = None,
    prompts_may_differ: bool = False,
) -> int:
    """Write the page, and its figures into a folder if one is named; returns the page's size in bytes.

    Raises:
        UserError: a path that is neither results nor a search; a file that cannot be written.
    """
    from lpes_eval.report import sources
    from lpes_eval.text import html

    check_output(output, marker(COMMAND))
    runs, searches, attentions = sources.read(paths)
    panels = sources.panels(runs)
    pairs, notes = sources.pairs(runs, prompts_may_differ)
    flips, left_out = _packed(pairs)
    pictures = _pictures(runs, panels, pairs, searches, attentions)
    if figures:
        for picture in (one for section in pictures.values() for one in section):
            picture.save(Path(figures))
    page = html(
        "lpes_eval.report",
        "report.html.j2",
        version=version("lpes-eval"),
        mark=marker(COMMAND),
        runs=runs,
        searches=searches,
        pictures=pictures,
        panels=panels,
        pairs=pairs,
        notes=notes + ([f"{left_out} prompts were left out to keep the page small."] if left_out else []),
        flips=tables.finite(flips),
    )
    write_output(output, page, marker(COMMAND))
    return len(page.encode())


def _pictures(
    runs: Sequence[Run],
    panels: Sequence[Panel],
    pairs: Sequence[Pair],
    searches: Sequence[Search],
    attentions: Mapping[str, Any],
) -> dict[str, list[Picture]]:
    """All figures that these have something to show in, by section of the page; those of one name are numbered."""
    from lpes_eval import factors
    from lpes_eval.report import figures, sources

    lines: list[figures.Line] = [
        (run.name, run.place, run.results.per_layer, ()) for run in runs if run.results.per_layer
    ]
    for place, search in enumerate(searches, len(runs)):
        if search.factors and (best := factors.load(search.factors)).num_layers:
            lines.append((search.name, place, best.per_layer(), best.control_points()))
    of_searches = [draw(search) for search in searches for draw in (figures.progress, figures.tradeoff)]
    drawn = {
        "positions": [figures.positions(panel.title, panel.lines) for panel in panels if panel.by_position],
        "differences": [figures.differences(pair) for pair in pairs],
        "factors": [figures.factors(lines)] if lines else [],
        "searches": [picture for picture in of_searches if picture],
        "attention": [figures.attention(name, data) for name, data in attentions.items()],
    }
    names = iter(sources.numbered([picture.name for pictures in drawn.values() for picture in pictures], "-{}"))
    return {
        section: [replace(picture, name=next(names)) for picture in pictures] for section, pictures in drawn.items()
    }


def _packed(pairs: Iterable[Pair]) -> tuple[dict[str, Any], int]:
    """The samples that flipped from each pair's first run to its second, in the first metric of each task, for JSON.

    ``texts`` has every piece of a prompt once. A sample's prompt is a list of [kind, first text, number of texts], the
    kind one of ``KINDS``; it is empty where there was no more room. How many such there are comes with the data.
    """
    from lpes_eval.compare.flips import flipped

    flips = (
        {"pair": pair.title, "task": task, **vars(sample)}
        for pair in pairs
        for (_, task), key in pair.report.first_metrics().items()
        for sample in flipped(pair.a.results, pair.b.results, task, key)
    )
    samples: list[dict[str, Any]] = []
    known: dict[str, int] = {}  # text -> its number
    spent = left_out = 0
    for sample in flips:
        segments = [segment for segment in sample.pop("segments") if segment.text]
        spans: list[list[int]] = []
        samples.append({**sample, "prompt": spans})
        size = sum(len(segment.text) for segment in segments if segment.text not in known)
        if spent + size > ROOM:
            left_out += 1
            continue
        spent += size
        for segment in segments:
            kind = KINDS.index(segment.label if segment.label in KINDS else "context")
            at = known.setdefault(segment.text, len(known))
            if spans and spans[-1][0] == kind and sum(spans[-1][1:]) == at:
                spans[-1][2] += 1
            else:
                spans.append([kind, at, 1])
    return {"samples": samples, "texts": [*known], "kinds": KINDS}, left_out
