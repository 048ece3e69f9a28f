"""``lpes-eval regress RESULTS --baseline FILE``: the command."""

import argparse
import os
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Comment, Element, SubElement, indent, tostring

from lpes_eval.compare import baseline, gate, results, tables
from lpes_eval.compare.gate import Options, Outcome, Row, Verdict
from lpes_eval.files import marker, write_output
from lpes_eval.flags import amount, share
from lpes_eval.text import terminal

COMMAND = "lpes-eval regress"
HEADER = ("", "baseline", "now", "change", "still passes", "p", "")


def add_parser(subparsers: Any) -> None:
    """Add ``lpes-eval regress``."""
    parser = subparsers.add_parser(
        "regress",
        help="fail if scores got worse than a committed baseline",
        description="Hold a run of lm_eval against a committed baseline. docs/regress.md says what is tested and how "
        "often a mere rerun fails.",
        epilog="exit status: 0 nothing got worse beyond chance; 1 something did, or is missing, or under --strict "
        "could not be tested; 2 no baseline, or not comparable (another task version, source or set of examples)",
    )
    add = parser.add_argument
    add("results", metavar="RESULTS", help="results JSON of lm_eval, or a folder: the newest in it")
    add("--baseline", metavar="FILE", type=Path, required=True, help="the committed baseline (JSON)")
    add("--update", action="store_true", help="write RESULTS to the baseline instead of testing them")
    add("--markdown", metavar="FILE", help="write the tables as Markdown, too")
    add("--junit", metavar="FILE", help="write JUnit XML, a test case for each row")
    add("--alpha", type=share, default=gate.ALPHA, help=f"false-alarm rate of the whole gate (default: {gate.ALPHA})")
    passes = f"a worsening up to this, in the score's own unit, never fails (default: {gate.TOLERANCE})"
    add("--tolerance", type=amount, default=gate.TOLERANCE, help=passes)
    drops = (
        "fail where a mean over positions, or the score of a task without positions, got worse by more than X, "
        "whatever chance says; for reruns that give the same answers, without a promise on false alarms (default: off)"
    )
    add("--max-drop", type=amount, metavar="X", help=drops)
    strict = "fail where a score cannot be tested (default: where the environment variable CI is set)"
    add("--strict", action=argparse.BooleanOptionalAction, default=bool(os.environ.get("CI")), help=strict)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run ``lpes-eval regress``."""
    path, given = args.baseline, vars(args)
    options = Options(**{name: given[name] for name in Options.__dataclass_fields__})
    now = results.read(args.results)
    if args.update:
        gate.regress(now, now, options)  # refuses what no run could be held against
        baseline.save(now, path)
        print(f"{path}: baseline of {len(now.leaves)} tasks written from {now.path}")
        return 0
    verdict = gate.regress(baseline.load(path), now, options)
    if args.junit:
        write_output(args.junit, junit(verdict), marker(COMMAND))
    tables.publish(page_of(verdict), args.markdown)
    return 1 if verdict.failed else 0


def page_of(verdict: Verdict) -> tables.Page:
    """Lay out what the gate says: a table for each metric of each task."""
    old, now = verdict.baseline, verdict.now
    shown = []
    for (task, key), group in groupby(verdict.rows, lambda row: (row.task, row.metric)):
        rows = [*group]
        questions = f", {rows[0].questions} questions" if rows[0].questions else ""
        title = f"{task}, {key.removesuffix(',none')}{questions}"
        shown.append(tables.Table(title, HEADER, [_cells(row) for row in rows]))
    sides = {"baseline": (old.model, str(old.path)), "now": now.side}
    return tables.Page(COMMAND, sides, shown, verdict.notes, verdict.headline)


def junit(verdict: Verdict) -> str:
    """JUnit XML, a test case a row."""
    root = Element("testsuites")
    root.append(Comment(marker(COMMAND)))
    suite = SubElement(root, "testsuite", name=COMMAND, tests=str(len(verdict.rows)))
    for row in verdict.rows:
        name = f"{row.task}.{row.metric.removesuffix(',none')}"
        case = SubElement(suite, "testcase", classname=terminal(name), name=terminal(row.label))
        outcome = "failure" if row.fails else "skipped" if row.outcome == Outcome.NOT_TESTABLE else ""
        if outcome:
            said = [f"{name} {cell}".strip() for name, cell in zip(HEADER[1:], _cells(row)[1:], strict=True)]
            SubElement(case, outcome, message=terminal(", ".join(filter(None, [*said, row.why]))))
    suite.set("failures", str(len(suite.findall("*/failure"))))
    suite.set("skipped", str(len(suite.findall("*/skipped"))))
    SubElement(suite, "system-out").text = "\n".join(map(terminal, verdict.notes))
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    change, outcome = row.change, row.outcome.upper() if row.fails else str(row.outcome)
    return (
        row.label,
        tables.score(change.old),
        tables.score(change.new),
        tables.signed(change.new - change.old),
        tables.signed(row.allowed),
        tables.p_value(change.p),
        f"{outcome} {row.why}" if row.why == gate.BY_SIZE else outcome,
    )
