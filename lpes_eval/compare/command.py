"""``lpes-eval compare A B``: the command."""

import argparse
from typing import Any

from lpes_eval.compare import results, tables
from lpes_eval.compare.comparison import Comparison, compare

COMMAND = "lpes-eval compare"
HEADER = ("", "A", "B", "B − A", "95 % interval", "p", "p (Holm)")


def add_parser(subparsers: Any) -> None:
    """Add ``lpes-eval compare``."""
    parser = subparsers.add_parser(
        "compare",
        help="paired differences between two runs, with intervals and p-values",
        description="Compare two runs of lm_eval on the same examples, question by question, from their logged samples "
        "(lm_eval --log_samples --output_path). docs/statistics.md says what each number is.",
    )
    add = parser.add_argument
    add("a", metavar="A", help="results JSON of lm_eval, or a folder: the newest results in it")
    add("b", metavar="B", help="the results to compare with A")
    add("--markdown", metavar="FILE", help="write the tables as Markdown, too")
    add("--flips", action="store_true", help="list the samples that flipped, by each task's first metric")
    prompts = "compare the same examples in other prompts, such as with and without a chat template"
    add("--other-prompts", action="store_true", help=prompts)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run ``lpes-eval compare``."""
    a, b = results.read(args.a), results.read(args.b)
    comparison = compare(a, b, prompts_may_differ=args.other_prompts)
    tables.publish(page_of(comparison, args.flips), args.markdown)
    return 0


def page_of(comparison: Comparison, with_flips: bool = False) -> tables.Page:
    """Lay out a comparison: a table for each metric of each task."""
    from lpes_eval.compare import flips

    shown, zeros = [], []
    for section in comparison.sections:
        title = f"{section.task}, {section.metric}"
        if any(row.difference.a or row.difference.b for row in section.rows):
            cells = [row.cells for row in section.rows]
            shown.append(tables.Table(f"{title}, {section.questions} questions", HEADER, cells))
        else:
            zeros.append(title)
    notes = [*comparison.notes, *([f"0 everywhere in both runs: {'; '.join(zeros)}."] if zeros else [])]
    found = flips.of(comparison) if with_flips else ()
    changed = [flips.table(flipped, section.task, section.metric) for section, flipped in found]
    sides = {"A": comparison.a.side, "B": comparison.b.side}
    return tables.Page(COMMAND, sides, shown, notes, flips=changed)
