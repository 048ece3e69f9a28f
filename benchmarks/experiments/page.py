"""The pages: ``docs/results.md`` and its pictures, and the numbers in other documents.

    python -m benchmarks.experiments.page            write them
    python -m benchmarks.experiments.page --check    say what is not up to date, and write nothing

A document's numbers stand between ``<!-- numbers: NAME -->`` and ``<!-- /numbers -->``; what comes there is the block
NAME of ``templates/numbers.md.j2``. Words are in the templates, and what they say is computed from the results.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.experiments import figures as of
from benchmarks.experiments import pictures, plan, store
from benchmarks.experiments.bench import Bench, open_bench
from lpes_eval.errors import UserError, program
from lpes_eval.files import write_atomically

DOCUMENTS = ("README.md", "docs/*.md", "lpes_eval/reference/*/README.md")
"""Where numbers are written between markers."""
BLOCK = re.compile(r"(?P<begin><!-- numbers: (?P<name>\w+) -->)(?P<text>.*?)(?P<end><!-- /numbers -->)", re.S)


def templates(bench: Bench) -> Any:
    """The templates' environment, with all that they ask for."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    figures = of.Figures(bench)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown
    )
    environment.filters |= {
        "get": figures.get,
        "pct": lambda value: f"{value:.0f} %",
        "listed": lambda factors: ", ".join(f"{x:.3g}" for x in (factors[:1] if len(set(factors)) == 1 else factors)),
        "enumerated": lambda words: " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])),
    }
    environment.tests["has"] = figures.get
    environment.globals |= vars(plan) | vars(of) | {"fmean": statistics.fmean, "stdev": statistics.stdev}
    environment.globals |= {"bench": bench, "figures": figures}
    return environment


def results_page(bench: Bench) -> str:
    """``docs/results.md``."""
    text = templates(bench).get_template("results.md.j2").render()
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def headline(bench: Bench, kept: Bench) -> str:
    """The headline table of a fresh run, held against the results that are kept."""
    return str(templates(bench).get_template("headline.md.j2").render(kept=of.Figures(kept)))


def documents(bench: Bench, page: Path, root: Path) -> dict[Path, str]:
    """Every document that is written, and its text; other documents than the page only with the results kept here.

    Raises:
        UserError: a marker of a name that no block has.
    """
    found, template = {page: results_page(bench)}, templates(bench).get_template("numbers.md.j2")

    def numbers(path: Path, match: re.Match[str]) -> str:
        if (name := match["name"]) not in template.blocks:
            known = ", ".join(sorted(template.blocks))
            raise UserError(f"{path}: numbers: {name}: no block of numbers.md.j2 is called so; there are {known}")
        words = "".join(template.blocks[name](template.new_context())).strip()
        space = "\n" if "\n" in match["text"] or "\n" in words else ""  # numbers in a sentence stay in its line
        return f"{match['begin']}{space}{words}{space}{match['end']}"

    for path in [path for pattern in DOCUMENTS for path in sorted(root.glob(pattern))]:
        text = path.read_text(encoding="utf-8")
        if page == root / "docs/results.md" != path and BLOCK.search(text):
            found[path] = BLOCK.sub(partial(numbers, path), text)
    return found


@program("page")
def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages and pictures, or check them, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments.page", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--results", type=Path, default=store.KEPT, metavar="DIR", help="where results are kept")
    add("--out", type=Path, default=store.ROOT / "docs/results.md", metavar="FILE", help="the page, whose pictures go "
        "to results/ beside it; the default one comes with the numbers in other documents")  # fmt: skip
    add("--check", action="store_true", help="write nothing; exit with 1 if a document is not up to date")
    args = parser.parse_args(argv)
    bench = open_bench(args.results)
    texts = documents(bench, args.out, store.ROOT)
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if args.check:
            print(f"{store.spelled(path)} is not up to date: python -m benchmarks.experiments.page")
        else:
            write_atomically(path, texts[path])
    if not args.check:
        pictures.draw(of.Figures(bench), args.out.parent / "results")
        print(f"{len(stale)} of {len(texts)} documents changed")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
