"""``lpes-eval report PATH... -o report.html``: one page of runs, searches, and the answers that flipped."""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_eval.files import marker, write_output

if TYPE_CHECKING:
    from lpes_eval.report.figures import Picture
    from lpes_eval.report.sources import Contents

COMMAND = "lpes-eval report"


def add_parser(subparsers: Any) -> None:
    """Add ``lpes-eval report``."""
    parser = subparsers.add_parser(
        "report",
        help="one HTML page of runs and searches, with the samples that flipped",
        description="Write one page, which needs no network, from results of lm_eval and the folders of searches. Each "
        "run is paired with the first one before it on the same examples. docs/report.md says what is on the page.",
    )
    paths = "results JSON of lm_eval, or a folder: the newest results in it, or a search"
    parser.add_argument("paths", nargs="+", metavar="PATH", help=paths)
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help="the page (default: report.html)")
    parser.add_argument("--figures", metavar="DIR", help="write the figures as PNG and PDF into this folder, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run ``lpes-eval report``."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from lpes_eval.compare import flips
    from lpes_eval.report import sources

    contents = sources.read(args.paths)
    drawn = pictures(contents)
    for picture in (one for of_section in drawn.values() for one in of_section):
        if args.figures:
            picture.save(Path(args.figures))
    environment = Environment(
        loader=PackageLoader("lpes_eval.report"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        vars(contents),
        version=version("lpes-eval"),
        mark=marker(COMMAND),
        pictures=drawn,
        flips={pair.title: [*flips.of(pair.report)] for pair in contents.pairs},
        flips_table=flips.table,
    )
    write_output(args.output, page, marker(COMMAND))
    print(f"{args.output}: {len(page) / 1e6:.1f} MB")
    return 0


def pictures(contents: Contents) -> dict[str, list[Picture]]:
    """All figures that have something to show, by section of the page; those of one name are numbered."""
    from lpes_eval import factors
    from lpes_eval.report import figures, sources

    runs, searches = contents.runs, contents.searches
    with_factors = [run for run in runs if run.results.per_layer]
    lines: list[figures.Line] = [(run.name, run.place, run.results.per_layer) for run in with_factors]
    for place, search in enumerate(searches, len(runs)):
        if search.factors and (best := factors.load(search.factors)).num_layers:
            lines.append((search.name, place, best.per_layer()))
    of_searches = [draw(search) for search in searches for draw in (figures.progress, figures.tradeoff)]
    drawn = {
        "positions": [figures.positions(panel.title, panel.lines) for panel in contents.panels if panel.by_position],
        "factors": [figures.factors(lines)] if lines else [],
        "searches": [picture for picture in of_searches if picture],
    }
    names = iter(sources.numbered([picture.name for of_section in drawn.values() for picture in of_section], "-{}"))
    return {section: [replace(picture, name=next(names)) for picture in shown] for section, shown in drawn.items()}
