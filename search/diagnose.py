"""The command ``lpes-eval diagnose MODEL``: does accuracy depend on the position, and is a search likely to help?

First the plain model is asked at every position and two or three lengths. Then one band of layers is scaled at a time,
on a few questions, and the best band is asked others: so what it gains there is not the luck of the best of many.
``search.evaluator`` measures all of it, on search examples. Everything is kept in one folder, from which a diagnosis
that was interrupted, or ran out of its ``--budget``, goes on.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_eval.compare.statistics import compare_paired, holm, interval
from lpes_eval.compare.tables import reader_may_leave
from lpes_eval.data import mdqa, source
from lpes_eval.entries import Entry
from lpes_eval.errors import DataError, PromptTooLong, UserError, program
from lpes_eval.flags import at_least, budget, mapping, model_args
from lpes_eval.harness import plugin
from search import config
from search.held_out import as_lm_eval_reads_it, every_ten_seconds
from search.journal import Journal
from search.parser import batch_size, names

if TYPE_CHECKING:
    from search.evaluator import Evaluator
    from search.job import Cutoff

Band = tuple[int, int, float]
POSITIONS = [0.0, 50.0, 100.0]
"""Where the gold item stands while bands of layers are scaled, in percent."""
AT_ONCE = 6
"""Questions between two looks at the time."""
SCANNED = 12
"""Questions on which a band is tried."""
STEPS = (1.2, 1.5)
"""What a band's factors are multiplied by."""
FINEST = 8
"""Bands that the layers are divided into at most."""
LEVEL = 0.05
"""Of its tests."""


@dataclass
class Length:
    """The plain model on one task at one length: ``rows`` has a question's scores at every position."""

    name: str
    evaluator: Evaluator
    title: str
    size: int | None
    rows: list[list[float]] = field(default_factory=list)


@dataclass
class Scan:
    """A task at its own length, with bands of layers scaled.

    Attributes:
        asked: how the command line names it.
        bands: first and last layer and factor of those tried.
        best: the one with the best mean, if any has a better one than the plain model.
        plain: a question's scores at every position without factors, of questions that no band was tried on.
        scaled: the same with the best band.
    """

    name: str
    asked: str
    evaluator: Evaluator
    bands: list[Band] = field(default_factory=list)
    best: Band | None = None
    plain: list[list[float]] = field(default_factory=list)
    scaled: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    prompts: int = 0


@dataclass
class Diagnosis:
    """What was measured; ``refused`` has the lengths that do not fit the window, and why."""

    args: argparse.Namespace
    lm: Any
    lengths: list[Length] = field(default_factory=list)
    scans: list[Scan] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    cut: bool = False
    began: float = field(default_factory=time.monotonic)
    prompts: int = 0
    journal: Journal = None  # type: ignore[assignment]

    def left(self, share: float) -> bool:
        """Whether less than this share of the budget is spent."""
        unit, most = self.args.budget
        spent = time.monotonic() - self.began if unit == "seconds" else self.prompts
        self.cut = self.cut or spent >= share * most
        return spent < share * most

    def measure(
        self, name: str, evaluator: Evaluator, factors: list[float], part: list[int], cutoff: Cutoff | None = None
    ) -> Entry:
        """The journal's entry of this name; what it does not know is measured, and kept there."""
        if name not in self.journal.entries:
            print(f"  {name}", flush=True)
            evaluator.progress = every_ten_seconds()
            measured = evaluator(factors, cutoff, part)
            prompts = measured.stopped_after or evaluator.asked(part)
            self.prompts += prompts
            entry = {"fitness": measured.fitness, "examples": measured.examples}
            self.journal.record(name, {**entry, "seconds": measured.seconds, "prompts": prompts})
        return self.journal.entries[name]


def build_parser() -> argparse.ArgumentParser:
    """The command line; what ``python -m search.ga`` has too means the same."""
    parser = argparse.ArgumentParser(
        prog="lpes-eval diagnose",
        description="Measure accuracy by position at two or three lengths, scale bands of layers, and say whether a "
        "search for layer factors is likely to help, what it costs here, and how to start it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("pretrained", metavar="MODEL", help="a model's name on the Hub, its folder, or reference")
    add("--tasks", type=names, default="kv_retrieval,mdqa_pos", metavar="TASK,TASK",
        help="tasks by position (default: kv_retrieval,mdqa_pos)")  # fmt: skip
    add("--metadata", type=mapping, default={}, metavar="ARGS", help="settings of the tasks, key=value or JSON")
    add("--model_args", type=model_args, default={}, metavar="ARGS", help="as for lm_eval: dtype=float16,...")
    add("--apply_chat_template", action="store_true", help="use the model's template")
    add("--device", metavar="DEVICE", help="as for lm_eval: cuda, cuda:1, cpu, mps")
    add("--batch_size", type=batch_size, default="auto", metavar="N|auto", help="prompts in a batch")
    add("--questions", type=at_least(2 * SCANNED), default=2 * SCANNED, metavar="N",
        help="at every position, 24 or more (default: 24)")  # fmt: skip
    add("--budget", type=budget, default=("seconds", 600), metavar="10m|2h|20000prompts",
        help="stop after so much, half of it for the table; the same command goes on (default: 10m)")  # fmt: skip
    add("--output", type=Path, metavar="DIR", help="folder of the diagnosis (default: runs/diagnose-MODEL)")
    return parser


@program("diagnose")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    for name, value in {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "LMEVAL_LOG_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    args = build_parser().parse_args(argv)
    if args.output is None:
        args.output = Path("runs") / f"diagnose-{re.sub(r'[^A-Za-z0-9_.+-]+', '_', args.pretrained).strip('_')}"
    try:
        with reader_may_leave():
            diagnose(args)
        return 0
    except KeyboardInterrupt:
        print("\nStopped. What was measured is kept: the same command goes on.", file=sys.stderr)
        return 130


def diagnose(args: argparse.Namespace) -> Diagnosis:
    """Measure, and write the report: text, JSON and a picture."""
    from lpes_eval.config_field import weights
    from search import identity
    from search.model import load_model
    from search.report import diagnosis
    from search.tasks import check_names

    settings = config.defaults()
    settings.model_args = {"pretrained": args.pretrained} | args.model_args
    settings.device, settings.batch_size = args.device, args.batch_size
    if not args.tasks:
        raise UserError("--tasks: names no task")
    check_names(args.tasks)
    plugin.check_examples(args.tasks, args.model_args, args.metadata)
    print(f"Loading {args.pretrained}", flush=True)
    found = Diagnosis(args, load_model(settings))
    for name in dict.fromkeys(args.tasks):
        _load(found, name)
    asked = [length.evaluator for length in found.lengths] + [scan.evaluator for scan in found.scans]
    kept = {
        "weights": weights(found.lm.model),
        "requests": [identity.sha256([request.args for request in one.objectives[0].task.instances]) for one in asked],
        "packages": identity.packages(),
    }
    with Journal(args.output, kept) as found.journal:
        _ask_the_plain_model(found)
        _try_bands(found)
    print("\n" + diagnosis.write(facts(found), args.output), flush=True)
    return found


def _load(found: Diagnosis, name: str) -> None:
    """Build a task's requests: at half its length, at its own and at twice it, and for the bands."""
    from search.evaluator import Evaluator
    from search.tasks import load_tasks

    args, lm = found.args, found.lm

    def build(examples: int, positions: list[float] | None, **size: int) -> Evaluator:
        one = load_tasks(
            lm, [name], examples=examples, positions=positions, metadata={**settings, **size},
            lambdas=[1.0] * len(POSITIONS), apply_chat_template=args.apply_chat_template,
        )  # fmt: skip
        if len(one) > 1 or not one[0].by_position:
            raise UserError(f"--tasks {name}: is not one task by position, such as kv_retrieval or mdqa_pos")
        return Evaluator(lm, one)

    settings = {**args.model_args, **args.metadata}
    evaluator = build(args.questions, None)
    objective = evaluator.objectives[0]
    setting: Any = getattr(objective.task, "SIZE", None)
    size: Any = (objective.task.config.metadata or {}).get(setting)
    for number in (size // 2, size, 2 * size) if size and size >= 4 else (size,):
        title = f"{setting}={number}" if number else objective.name
        try:
            questions = args.questions if number != 2 * (size or 0) else SCANNED  # these take longest
            one = evaluator if number == size else build(questions, None, **{setting: number})
            found.lengths.append(Length(objective.name, one, title, number))
        except (PromptTooLong, DataError) as error:  # a file of one's own has one size
            found.refused.append(f"{name}, {title}: {error}")
    found.scans.append(Scan(objective.name, name, build(SCANNED + args.questions, POSITIONS)))


def _ask_the_plain_model(found: Diagnosis) -> None:
    """Some questions at every length, then the next: with little time, all lengths have fewer."""
    for first in range(0, found.args.questions, AT_ONCE):
        for length in found.lengths:
            part = list(range(len(length.evaluator.questions)))[first : first + AT_ONCE]
            if not part or (first and not found.left(0.5)):
                continue
            name = f"{length.name}, {length.title}: questions {part[0] + 1} to {part[-1] + 1}"
            entry = found.measure(name, length.evaluator, [1.0] * length.evaluator.num_layers, part)
            length.rows += _rows(length.evaluator, entry.examples)


def _try_bands(found: Diagnosis) -> None:
    """One band of layers by one step, on every task, then the next; at last the best band on other questions."""
    from search.job import Cutoff

    def ask(scan: Scan, band: Band | None, part: list[int], cutoff: Cutoff | None = None) -> Entry:
        first, last, step = band or (0, -1, 1.0)
        factors = [step if first <= h <= last else 1.0 for h in range(scan.evaluator.num_layers)]
        what = f"layers {first} to {last} by {step:g}" if band else "plain"
        name = f"{scan.name}, questions {part[0] + 1} to {part[-1] + 1}: {what}"
        entry = found.measure(name, scan.evaluator, factors, part, cutoff)
        scan.seconds, scan.prompts = scan.seconds + entry.seconds, scan.prompts + entry.prompts
        return entry

    parts = {scan.name: list(range(len(scan.evaluator.questions))) for scan in found.scans}
    to_beat = {scan.name: ask(scan, None, parts[scan.name][:SCANNED]) for scan in found.scans}
    for first, last in bands_of(found.scans[0].evaluator.num_layers):
        for band in ((first, last, step) for step in STEPS):
            for scan in (scan for scan in found.scans if found.left(0.85)):
                best = to_beat[scan.name]
                entry = ask(scan, band, parts[scan.name][:SCANNED], Cutoff(best.fitness, best.examples))
                scan.bands.append(band)
                if entry.examples and entry.fitness > best.fitness + 1e-9:
                    scan.best, to_beat[scan.name] = band, entry
    for scan in found.scans:
        if scan.best is not None and (others := parts[scan.name][SCANNED:]) and found.left(1.0):
            scan.plain = _rows(scan.evaluator, ask(scan, None, others).examples)
            scan.scaled = _rows(scan.evaluator, ask(scan, scan.best, others).examples)


def bands_of(num_layers: int) -> list[tuple[int, int]]:
    """The whole stack, its halves, quarters and eighths: (first, last) layer of each."""
    from search.optimizers import layers

    return [(first, end - 1) for first, end in layers.bands_of(num_layers, FINEST)]


def _rows(evaluator: Evaluator, examples: dict[str, list[Any]]) -> list[list[float]]:
    """A question's scores at every position, for those that were asked."""
    rows = zip(*(examples[name] for name in evaluator.columns), strict=True)
    return [list(row) for row in rows if None not in row]


def search_command(found: Diagnosis, name: str) -> str:
    """The command that starts a search on this task."""
    args, command = found.args, ["python", "-m", "search.ga", "--tasks", name]
    model, metadata = {"pretrained": args.pretrained} | args.model_args, args.metadata
    scanned = next(scan.evaluator.objectives[0].task for scan in found.scans if scan.asked == name)
    if isinstance(scanned, mdqa.Task) and source.asked(model | metadata) != source.asked(args.model_args | metadata):
        metadata = metadata | {"source": "generated"}  # else the search would ask a named model the official articles
    for flag, values in (("model_args", model), ("metadata", metadata)):
        if values:
            command += [f"--{flag}", as_lm_eval_reads_it(values)]
    command += ["--device", args.device] if args.device else []
    return shlex.join(command + ["--apply_chat_template"] * args.apply_chat_template)


def search_seconds(found: Diagnosis, scan: Scan) -> float:
    """How long such a search takes at the pace of the scan, held-out evaluation included."""
    from search.run import make_optimizer

    settings = config.complete(config.defaults())
    optimizer = make_optimizer(settings, scan.evaluator)
    searched = (optimizer.expected_effort + 2) * settings.examples * len(settings.positions)
    positions = next(len(length.rows[0]) for length in found.lengths if length.name == scan.name)
    prompts = searched + 3 * settings.held_out_examples * positions
    return float(prompts * scan.seconds / max(scan.prompts, 1))


def position_bias(rows: Sequence[Sequence[float]]) -> float:
    """p of "the position makes no difference": Friedman's test, of right and wrong answers Cochran's Q."""
    from scipy.stats import friedmanchisquare

    columns = list(zip(*rows, strict=True))
    if len(columns) < 3 or len(rows) < 2:
        return math.nan
    if all(len(set(row)) == 1 for row in rows):  # nothing varies, so nothing depends on the position
        return 1.0
    return float(friedmanchisquare(*columns).pvalue)


def facts(found: Diagnosis) -> dict[str, Any]:
    """The report as data; scores are shares of 1."""
    adjusted = holm([position_bias(length.rows) for length in found.lengths])
    lengths = [_length(length, p) for length, p in zip(found.lengths, adjusted, strict=True)]
    layers = found.scans[0].evaluator.num_layers
    scans = [
        _scan(scan, len(STEPS) * len(bands_of(layers)))
        | {"search_seconds": search_seconds(found, scan), "command": search_command(found, scan.asked)}
        for scan in found.scans
    ]
    model = {"name": found.args.pretrained, "layers": layers, "window": found.lm.max_length}
    return {"model": model, "lengths": lengths, "does_not_fit": found.refused, "scans": scans, "cut": found.cut}


def _length(length: Length, p: float) -> dict[str, Any]:
    n, columns = len(length.rows), list(zip(*length.rows, strict=True))
    means = [sum(column) / n for column in columns]
    mean = sum(means) / len(means)
    positions = [
        {"position": column.position, "score": score, "interval": interval(scores)}
        for (_, column), score, scores in zip(length.evaluator.columns.values(), means, columns, strict=True)
    ]
    return {
        "task": length.name,
        "length": length.title,
        "size": length.size,
        "prompt_tokens": (length.evaluator.prompt_tokens or math.nan) / length.evaluator.prompts,
        "questions": n,
        "positions": positions,
        "mean": mean,
        "friedman_p_holm": p,
        "biased": p < LEVEL,
        "gain_if_all_were_as_the_best": max(means) - mean,
        "gain_at_most": 1 - mean,
    }


def _scan(scan: Scan, planned: int) -> dict[str, Any]:
    """The best band, what it changes on questions that it was not chosen by, and what that says about a search."""
    said: dict[str, Any] = {"task": scan.name, "bands_tried": len(scan.bands), "bands": planned, "best": None}
    if scan.best is None:
        return said | {"search": "unlikely" if len(scan.bands) == planned else "uncertain"}
    first, last, factor = scan.best
    said["best"] = {"layers": [first, last], "factor": factor, "positions": POSITIONS}
    if not scan.scaled:
        return said | {"search": "uncertain"}
    change = compare_paired(scan.plain, scan.scaled).mean
    said["best"] |= {"plain": change.a, "gain": change.difference, "interval": [change.low, change.high]}
    said["best"] |= {"p": change.p, "questions": len(scan.plain)}
    if change.difference <= 0:
        return said | {"search": "unlikely"}
    return said | {"search": "likely" if change.p < LEVEL else "uncertain"}


if __name__ == "__main__":
    sys.exit(main())
