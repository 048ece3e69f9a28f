"""``lpes-eval compare A B``: the command."""

from __future__ import annotations

import argparse
from typing import Any

from lpes_eval.compare import results, tables
from lpes_eval.compare.comparison import Comparison, compare
from lpes_eval.flags import share

COMMAND = "lpes-eval compare"


def add_parser(subparsers: Any) -> None:
    """Add ``lpes-eval compare``."""
    parser = subparsers.add_parser(
        "compare",
        help="paired differences between runs, with intervals and p-values",
        description="Compare runs of lm_eval with a first one on the same examples, question by question, from their "
        "logged samples (lm_eval --log_samples --output_path). docs/statistics.md says what each number is.",
    )
    add = parser.add_argument
    add("a", metavar="A", help="results JSON of lm_eval, or a folder: the newest results in it")
    add("others", metavar="B", nargs="+", help="the results to compare with A, one or more")
    tables.add_outputs(parser, "json", "markdown")
    add("--flips", action="store_true", help="list the samples that flipped, by each task's first metric")
    add("--confidence", type=share, default=0.95, help="coverage of the intervals (default: 0.95)")
    prompts = "compare the same examples in other prompts, such as with and without a chat template"
    add("--other-prompts", action="store_true", help=prompts)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run ``lpes-eval compare``."""
    runs = [results.read(path) for path in (arguments.a, *arguments.others)]
    comparison = compare(*runs, confidence=arguments.confidence, prompts_may_differ=arguments.other_prompts)
    tables.publish(page_of(comparison, arguments.flips), arguments)
    return 0


def page_of(comparison: Comparison, with_flips: bool = False) -> tables.Page:
    """Lay out a comparison: a table for each metric of each task."""
    from lpes_eval.compare import flips

    several = len(comparison.runs) > 2
    interval = f"{comparison.confidence * 100:g} % interval"
    shown, changed = [], []
    for section in comparison.sections:
        letter = section.letter
        header = ("", "A", letter, f"{letter} − A", interval, "p", "p (Holm)")
        title = f"{section.task}, {section.metric}, {section.questions} questions"
        facts = {"task": section.task, "metric": section.metric, "questions": section.questions}
        facts |= {"rows": [row.facts for row in section.rows], **({"sides": ["A", letter]} if several else {})}
        shown.append(tables.Table(title, header, [row.cells for row in section.rows], data=facts))
    for section, found in flips.of(comparison) if with_flips else ():
        title = f"{section.letter} − A, {section.metric}" if several else section.metric
        changed.append(flips.table(found, section.task, title))
    sides = {letter: run.side for letter, run in comparison.runs.items()}
    data = {"confidence": comparison.confidence}
    return tables.Page(COMMAND, sides, shown, comparison.notes, flips=changed, data=data)
