"""``lpes-eval regress RESULTS --baseline FILE``: the command."""

from __future__ import annotations

import argparse
import os
from itertools import groupby
from pathlib import Path
from typing import Any

from lpes_eval.compare import baseline, gate, results, tables
from lpes_eval.compare.gate import Options, Outcome, Row, Verdict
from lpes_eval.compare.results import Results
from lpes_eval.errors import UserError
from lpes_eval.flags import amount, share

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
    tables.add_outputs(parser, "json", "markdown", "junit")
    add("--flips", action="store_true", help="list the samples that flipped, of each score that fell")
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


def run(arguments: argparse.Namespace) -> int:
    """Run ``lpes-eval regress``."""
    path, given = arguments.baseline, vars(arguments)
    options = Options(**{name: given[name] for name in Options.__dataclass_fields__})
    if arguments.update:
        return _update(results.read(arguments.results), path, options)
    now = results.read(arguments.results)
    if not path.exists():
        raise UserError(f"{path}: no baseline there; write one with {COMMAND} RESULTS --baseline {path} --update")
    verdict = gate.regress(baseline.load(path), now, options)
    tables.publish(page_of(verdict, arguments.flips), arguments)
    return 1 if verdict.failed else 0


def _update(now: Results, path: Path, options: Options) -> int:
    verdict = gate.regress(now, now, options)  # refuses what no run could be held against
    baseline.save(now, path)
    untested = verdict.count(Outcome.NOT_TESTABLE)
    print(
        f"{path}: baseline of {len(now.every_task)} tasks written from {now.path}; {untested} scores are not testable"
    )
    return 0


def page_of(verdict: Verdict, with_flips: bool = False) -> tables.Page:
    """Lay out what the gate says: a table for each metric of each task."""
    from lpes_eval.compare import flips

    old, now = verdict.baseline, verdict.now
    shown, changed = [], []
    for (task, key), group in groupby(verdict.rows, lambda row: (row.task, row.metric)):
        rows, metric = [*group], key.removesuffix(",none")
        questions = rows[0].questions
        title = f"{task}, {metric}" + (f", {questions} questions" if questions else "")
        facts = {"task": task, "metric": metric, "questions": questions or None, "rows": [*map(_facts, rows)]}
        shown.append(tables.Table(title, HEADER, [_cells(row) for row in rows], data=facts))
        fell = {row.label for row in rows if row.questions and row.change.worsening > 0}
        labels = {"" if label == "all" else label for label in fell - {"mean", "worst", "spread"}}
        if with_flips and labels and not now.every_task[task].members:  # its tasks have the same flips
            found = [flip for flip in flips.flipped(old, now, task, key) if flip["position"] in labels]
            changed.append(flips.table(found, task, metric))
    sides = {"baseline": (str(old.model), str(old.path)), "now": now.side}
    return tables.Page(COMMAND, sides, shown, verdict.notes, verdict.headline, changed)


def _facts(row: Row) -> dict[str, Any]:
    change = row.change
    numbers = {"baseline": change.old, "now": change.new, "change": change.new - change.old, "p": change.p}
    names = ("allowed", "level", "outcome", "by_size", "fails", "why")
    return {"row": row.label, **numbers, **{name: getattr(row, name) for name in names}}


def _cells(row: Row) -> tuple[str, ...]:
    change, outcome = row.change, row.outcome.upper() if row.fails else str(row.outcome)
    return (
        row.label,
        tables.score(change.old),
        tables.score(change.new),
        tables.signed(change.new - change.old),
        tables.signed(row.allowed),
        tables.p_value(change.p),
        f"{outcome} by size" if row.by_size else outcome,
    )
