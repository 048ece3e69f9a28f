"""``lpes-eval compare A B``: the command."""

from __future__ import annotations

import argparse
from dataclasses import replace
from string import ascii_uppercase as LETTERS
from typing import Any

from lpes_eval.compare import results, tables
from lpes_eval.compare.compare import compare
from lpes_eval.errors import UserError
from lpes_eval.flags import share
from lpes_eval.report import page


def add_parser(subparsers: Any) -> None:
    """Add ``lpes-eval compare``."""
    parser = subparsers.add_parser(
        "compare",
        help="paired differences between runs, with intervals and p-values",
        description="Compare runs of lm_eval with a first one on the same examples, question by question, from their "
        "logged samples (lm_eval --log_samples --output_path). docs/statistics.md says what each number is.",
    )
    parser.add_argument("a", metavar="A", help="results JSON of lm_eval, or a folder: the newest results in it")
    parser.add_argument("others", metavar="B", nargs="+", help="the results to compare with A, one or more")
    tables.add_outputs(parser, "json", "markdown")
    parser.add_argument("--html", metavar="FILE", help="write the page that lpes-eval report makes of these runs, too")
    parser.add_argument(
        "--flips", action="store_true", help="list the samples that flipped, by each task's first metric"
    )
    parser.add_argument(
        "--confidence",
        type=share,
        default=0.95,
        help="coverage of the intervals (default: 0.95; the page of --html: always 0.95)",
    )
    parser.add_argument(
        "--other-prompts",
        action="store_true",
        help="compare the same examples in other prompts, such as with and without a chat template",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run ``lpes-eval compare``."""
    from lpes_eval.compare import flips

    if len(arguments.others) >= len(LETTERS):
        raise UserError(f"{len(arguments.others)} runs to compare with A; expected {len(LETTERS) - 1} at most")
    a, *others = [results.read(path) for path in (arguments.a, *arguments.others)]
    report = compare(a, *others, confidence=arguments.confidence, prompts_may_differ=arguments.other_prompts)
    if arguments.flips:
        runs = dict(zip(LETTERS[1:], others, strict=False))
        found = tuple(
            flips.section(flips.flipped(a, runs[b], task, metric), task, f"{b} − A, {metric}" if others[1:] else metric)
            for (b, task), metric in flips.first_metrics(report).items()
        )
        report = replace(report, flips=found)
    if arguments.html:
        page.write([arguments.a, *arguments.others], arguments.html, prompts_may_differ=arguments.other_prompts)
    tables.publish(report, arguments)
    return 0
