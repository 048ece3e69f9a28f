"""The command ``lpes-eval diagnose MODEL``: does accuracy depend on the position, and is a search likely to help?

The plain model answers questions at two or three lengths. Then comes a map: bands of layers are scaled, one at a time,
and the likelihood of the reference answers is measured, without decoding. The band that makes them likeliest is scored
on other questions, so what it gains there is not the luck of the best of many. The first question of each kind is
timed, and the others are as many as the budget allows. All is in a journal, from which the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_eval.compare.statistics import compare_paired, holm, interval
from lpes_eval.compare.tables import finite, ignore_broken_pipe, p_value, text_table
from lpes_eval.data import source
from lpes_eval.errors import DataError, PromptTooLong, UserError, program
from lpes_eval.files import write_atomically
from lpes_eval.flags import at_least, budget, mapping, model_args
from search import config
from search.held_out import as_lm_eval_reads_it, every_ten_seconds
from search.journal import Journal
from search.optimizers import layers
from search.parser import batch_size, names

if TYPE_CHECKING:
    from search.evaluator import Evaluator

AT_ONCE = 6
"""Questions between two looks at the time."""
MAPPED = 12
"""Questions, at most, that the map is made of."""
FINEST = 8
"""Bands that the layers are divided into at most."""
TABLE, MAP = 0.5, 0.85
"""Shares of the budget after which the table and the map end."""
LEVEL = 0.05
"""Of its tests."""


@dataclass
class Length:
    """The plain model on a task at one length; ``size`` counts its items, ``rows`` has a question's scores."""

    title: str
    size: int | None
    evaluator: Evaluator
    rows: list[list[float]] = field(default_factory=list)

    @property
    def tokens(self) -> float:
        """Of a prompt, a mean."""
        return (self.evaluator.prompt_tokens or math.nan) / self.evaluator.prompts


@dataclass
class Task:
    """A task of the diagnosis; ``args`` are those of the search that ``words`` start.

    ``tried`` are the bands of the map (first and last layer, factor), by how much likelier they make the answers;
    ``plain`` and ``scaled`` the scores of the questions on which the best of them is checked.
    """

    words: list[str]
    args: argparse.Namespace
    lengths: list[Length] = field(default_factory=list)
    evaluator: Evaluator = None  # type: ignore[assignment]
    mapped: int = 0
    tried: dict[tuple[int, int, float], float] = field(default_factory=dict)
    plain: list[list[float]] = field(default_factory=list)
    scaled: list[list[float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As the command line has it."""
        return str(self.args.tasks[0])


class Diagnosis:
    """What is measured for a command line, question by question, as long as its budget lasts."""

    def __init__(self, args: argparse.Namespace, began: float) -> None:
        self.args, self.began, self.prompts, self.cut = args, began, 0, False
        self.tasks = [
            Task(words := search_words(args, name), config.parse(words)) for name in dict.fromkeys(args.tasks)
        ]
        self.notes: list[str] = []
        self.rows: dict[str, dict[int, list[float]]] = {}  # of what was measured, by question: its value at positions
        self.cost: dict[tuple[str, str], float] = {}  # of a question, in the budget's unit
        self.journal: Journal = None  # type: ignore[assignment]

    def left(self, share: float) -> float:
        """What is left of this share of the budget, in its unit."""
        unit, most = self.args.budget
        return float(share * most - (time.monotonic() - self.began if unit == "seconds" else self.prompts))

    def ask(
        self, name: str, what: str, evaluator: Evaluator, factors: list[float], questions: Iterable[int], share: float,
        measure: str = "score",
    ) -> dict[int, list[float]]:  # fmt: skip
        """The rows of these questions: the journal's, and what this share of the budget allows to measure."""
        rows, kind = self.rows.setdefault(f"{name}: {what}", {}), (name, measure)
        while missing := [u for u in questions if u not in rows]:
            left = self.left(share)
            number = min(AT_ONCE, int(left / self.cost[kind])) if kind in self.cost else 1
            if left <= 0 or number < 1:
                self.cut = True
                break
            part = missing[:number]
            print(f"  {name}: {what}, questions {part[0] + 1} to {part[-1] + 1}", flush=True)
            evaluator.progress = every_ten_seconds()
            measured = evaluator.likelihood(factors, part) if measure == "likelihood" else evaluator(factors, part=part)
            entry = {"fitness": measured.fitness, "measure": measure, "origin": f"{name}: {what}"}
            entry |= {"examples": measured.examples, "seconds": measured.seconds, "prompts": evaluator.asked(part)}
            self.take(self.journal.record(f"{name}: {what}, from question {part[0] + 1}", entry))
            self.prompts += evaluator.asked(part)
            self.cost[kind] = (left - self.left(share)) / len(part)
        return {u: rows[u] for u in questions if u in rows}

    def take(self, entry: Any) -> None:
        """Take in what the journal says of some questions."""
        for u, row in enumerate(zip(*entry.examples.values(), strict=True)):
            if None not in row:
                self.rows.setdefault(entry.origin, {})[u] = list(row)

    def load(self, lm: Any, task: Task) -> None:
        """Build a task's requests: at half its length, at its own and at twice it, and for the map."""
        from search.evaluator import Evaluator
        from search.tasks import load_tasks

        def build(examples: int, everywhere: bool, **size: int) -> Evaluator:
            options = config.task_options(task.args)
            options["metadata"] = options["metadata"] | size
            if everywhere and not self.args.positions:
                options |= {"positions": None, "lambdas": None}
            objectives = load_tasks(lm, [task.name], examples=examples, **options)
            if len(objectives) > 1 or not objectives[0].by_position:
                raise UserError(f"--tasks {task.name}: is not one task by position, such as kv_retrieval or mdqa_pos")
            if everywhere and objectives[0].note:
                self.notes.append(", ".join([*(f"{key}={value}" for key, value in size.items()), objectives[0].note]))
            return Evaluator(lm, objectives)

        own = build(self.args.questions, True)
        setting: Any = getattr(own.objectives[0].task, "SIZE", None)
        size: Any = (own.objectives[0].task.config.metadata or {}).get(setting)
        for number in (size // 2, size, 2 * size) if size and size >= 4 else (size,):
            title = f"{setting}={number}" if number else task.name
            try:
                evaluator = own if number == size else build(self.args.questions, True, **{setting: number})
                task.lengths.append(Length(title, number, evaluator))
            except (PromptTooLong, DataError) as error:  # a file of one's own has one size
                self.notes.append(f"Does not fit: {task.name}, {title}: {error}")
        task.evaluator = build(MAPPED + self.args.questions, False)

    def measure(self) -> None:
        """The table, the map, and the check of what the map says is best."""
        try:
            self._table()
        finally:
            for task in self.tasks:
                for length in task.lengths:
                    length.rows = list(self.rows.get(f"{task.name}, {length.title}: plain", {}).values())
        for number, task in enumerate(self.tasks, 1):
            self._map(task, TABLE + (MAP - TABLE) * number / len(self.tasks))
        for number, task in enumerate(self.tasks, 1):
            self._check(task, MAP + (1 - MAP) * number / len(self.tasks))

    def _table(self) -> None:
        """One question at every length, then the next ones: with little time, all lengths have fewer."""
        most = self.args.questions
        for number in sorted({1, 3, *range(AT_ONCE, most, AT_ONCE), most}):
            for task in self.tasks:
                for length in task.lengths:
                    plain = [1.0] * length.evaluator.num_layers
                    questions = range(min(number, most))
                    self.ask(f"{task.name}, {length.title}", "plain", length.evaluator, plain, questions, TABLE)

    def _map(self, task: Task, share: float) -> None:
        """How much likelier each band by each step makes the answers, on as many questions as all of them can have."""
        layers = task.evaluator.num_layers
        plain, name, bands = [1.0] * layers, f"{task.name}, map", bands_of(layers)
        if not self.ask(name, "plain", task.evaluator, plain, range(1), share, "likelihood"):
            return
        known = min((len(self.rows.get(f"{name}: {label(band)}", {})) for band in bands), default=0)
        cost = self.cost.get((name, "likelihood"), 0.0)
        questions = range(max(known, 1, min(MAPPED, int(self.left(share) / cost / (len(bands) + 1)) if cost else 1)))
        before = self.ask(name, "plain", task.evaluator, plain, questions, share, "likelihood")
        for band in bands:
            scaled = factors_of(band, layers)
            after = self.ask(name, label(band), task.evaluator, scaled, before, share, "likelihood")
            if len(after) == len(before):
                gains = [new - old for u in before for new, old in zip(after[u], before[u], strict=True)]
                task.tried[band] = sum(gains) / len(gains)
        task.mapped = len(before)

    def _check(self, task: Task, share: float) -> None:
        """The scores of the best band and of the plain model, on questions that the map did not see."""
        if not task.tried or task.tried[best := max(task.tried, key=task.tried.__getitem__)] <= 0:
            return
        layers, name = task.evaluator.num_layers, f"{task.name}, check"
        for end in range(AT_ONCE, self.args.questions + AT_ONCE, AT_ONCE):
            questions = range(MAPPED, MAPPED + min(end, self.args.questions))
            plain = self.ask(name, "plain", task.evaluator, [1.0] * layers, questions, share)
            scaled = self.ask(name, label(best), task.evaluator, factors_of(best, layers), plain, share)
        task.plain, task.scaled = [plain[u] for u in scaled], list(scaled.values())


def bands_of(num_layers: int) -> list[tuple[int, int, float]]:
    """The whole stack, its halves, quarters and eighths by each step: first and last layer, and factor."""
    return [(first, end - 1, step) for first, end in layers.bands_of(num_layers, FINEST) for step in layers.STEPS]


def factors_of(band: tuple[int, int, float], num_layers: int) -> list[float]:
    """One factor a layer."""
    first, last, step = band
    return [step if first <= h <= last else 1.0 for h in range(num_layers)]


def label(band: tuple[int, int, float]) -> str:
    """A band as a person names it."""
    first, last, step = band
    return f"{f'layer {first}' if first == last else f'layers {first} to {last}'} by {step:g}"


def search_words(args: argparse.Namespace, name: str) -> list[str]:
    """The flags of a search for this task, on the data of the diagnosis."""
    model, metadata, words = {"pretrained": args.pretrained} | args.model_args, dict(args.metadata), ["--tasks", name]
    args.positions = metadata.pop("positions", args.positions)
    if name.startswith("mdqa_pos") and source.asked(model | metadata).kind == "official":
        metadata.setdefault("source", "generated")  # else a named model would be asked the official articles
    for flag, values in (("model_args", model), ("metadata", metadata), ("gen_kwargs", args.gen_kwargs)):
        words += [f"--{flag}", as_lm_eval_reads_it(values)] if values else []
    words += ["--positions", ",".join(f"{position:g}" for position in args.positions)] if args.positions else []
    for flag in ("device", "batch_size"):
        words += [f"--{flag}", str(getattr(args, flag))] if getattr(args, flag) not in (None, "auto") else []
    return words + ["--apply_chat_template"] * args.apply_chat_template


def search_seconds(diagnosis: Diagnosis, task: Task) -> float:
    """How long such a search takes at the pace of the table, held-out evaluation included; NaN if nothing is known."""
    from search.run import make_optimizer

    own = [entry for entry in diagnosis.journal.entries.values() if entry.origin.endswith("plain") and entry.seconds]
    own = [entry for entry in own if entry.origin.startswith(f"{task.name}, ") and entry.measure == "score"]
    prompts = (make_optimizer(task.args, task.evaluator).expected_effort + 2) * task.args.examples
    prompts *= len(task.evaluator.columns)
    prompts += 3 * task.args.held_out_examples * len(task.lengths[0].evaluator.columns)
    pace = sum(entry.seconds for entry in own) / max(1, sum(entry.prompts for entry in own))
    return prompts * pace if own else math.nan


def position_bias(rows: Sequence[Sequence[float]]) -> float:
    """p of "the position makes no difference": Friedman's test, of right and wrong answers Cochran's Q."""
    from scipy.stats import friedmanchisquare

    columns = list(zip(*rows, strict=True))
    if len(columns) < 3 or len(rows) < 2:
        return math.nan
    if all(len(set(row)) == 1 for row in rows):  # nothing varies, so nothing depends on the position
        return 1.0
    return float(friedmanchisquare(*columns).pvalue)


def facts(diagnosis: Diagnosis) -> dict[str, Any]:
    """The report as data; scores are shares of 1."""
    asked = [(task, length) for task in diagnosis.tasks for length in task.lengths if length.rows]
    adjusted = holm([position_bias(length.rows) for _, length in asked])
    return {
        "model": diagnosis.args.pretrained,
        "lengths": [_length(task.name, length, p) for (task, length), p in zip(asked, adjusted, strict=True)],
        "maps": [_map(diagnosis, task) for task in diagnosis.tasks],
        "notes": diagnosis.notes,
        "cut": diagnosis.cut,
    }


def _length(name: str, length: Length, p: float) -> dict[str, Any]:
    columns = list(zip(*length.rows, strict=True))
    means = [sum(column) / len(column) for column in columns]
    return {
        "task": name,
        "length": length.title,
        "prompt_tokens": length.tokens,
        "questions": len(length.rows),
        "positions": [
            {"position": column.position, "score": mean, "interval": interval(scores)}
            for (_, column), mean, scores in zip(length.evaluator.columns.values(), means, columns, strict=True)
        ],
        "mean": sum(means) / len(means),
        "friedman_p_holm": p,
        "gain_if_all_were_as_the_best": max(means) - sum(means) / len(means),
    }


def _map(diagnosis: Diagnosis, task: Task) -> dict[str, Any]:
    """What the map and the check after it say about a search."""
    best = max(task.tried, key=task.tried.__getitem__, default=None)
    said: dict[str, Any] = {"task": task.name, "bands": len(bands_of(task.evaluator.num_layers)), "search": "uncertain"}
    said |= {"tried": {label(band): gain for band, gain in task.tried.items()}, "questions": task.mapped, "best": None}
    said |= {"command": config.command(task.words), "search_seconds": search_seconds(diagnosis, task)}
    if best is None or task.tried[best] <= 0:
        return said | {"search": "unlikely" if len(task.tried) == said["bands"] else "uncertain"}
    said["best"] = {"band": label(best), "likelier": task.tried[best]}
    if len(task.scaled) < 2:
        return said
    change = compare_paired(task.plain, task.scaled).mean
    said["best"] |= {"plain": change.a, "gain": change.difference, "interval": [change.low, change.high]}
    said["best"] |= {"p": change.p, "questions": len(task.plain)}
    likely = "likely" if change.p < LEVEL else "uncertain"
    return said | {"search": likely if change.difference > 0 else "unlikely"}


def text(said: dict[str, Any]) -> str:
    """The report for a person."""
    parts = [f"{said['model']}: right answers in percent by position of the gold item, 95 % intervals"]
    for task in dict.fromkeys(one["task"] for one in said["lengths"]):
        lengths = [one for one in said["lengths"] if one["task"] == task]
        at = sorted({place["position"] for one in lengths for place in one["positions"]})
        rows = []
        for one in lengths:
            cells = {p["position"]: f"{100 * p['score']:.0f} ({_span(p['interval'])})" for p in one["positions"]}
            rows.append([one["length"], f"{one['prompt_tokens']:,.0f}", str(one["questions"])])
            rows[-1] += [*(cells.get(p, "") for p in at), f"{100 * one['mean']:.0f}", p_value(one["friedman_p_holm"])]
        header = [task, "tokens", "questions", *(f"{p:g} %" for p in at), "mean", "p of no bias"]
        biased = ", ".join(one["length"] for one in lengths if one["friedman_p_holm"] < LEVEL)
        most = max(lengths, key=lambda one: one["gain_if_all_were_as_the_best"])
        gain = f"{100 * most['gain_if_all_were_as_the_best']:.0f} points"
        parts.append(
            f"{text_table(header, rows)}\n"
            + (f"The position matters beyond chance at {biased}." if biased else "No position bias beyond chance.")
            + f" If every position were as good as the best, {most['length']} would gain {gain}."
        )
    parts += said["notes"]
    parts += [_verdict(one, said["cut"]) for one in said["maps"]]
    if said["cut"]:
        parts.append("The budget ended this before all was measured: the same command goes on.")
    return "\n\n".join(parts)


def _verdict(one: dict[str, Any], cut: bool) -> str:
    best, tried = one["best"], f"{len(one['tried'])} of {one['bands']}" if cut else str(one["bands"])
    lines = [f"{one['task']}: the reference answers under {tried} scaled bands of layers, {one['questions']} questions"]
    if not one["tried"]:
        lines = [f"{one['task']}: no band of layers was tried, as the budget went to the table; give a larger --budget"]
    elif best is None:
        lines.append("None makes them likelier than the plain model does.")
    else:
        lines.append(f"{best['band']} makes them likeliest: {best['likelier']:+.3f} in log-likelihood a token.")
    if best and "gain" in best:
        lines.append(
            f"On {best['questions']} other questions it changes the score of {100 * best['plain']:.0f} by "
            f"{100 * best['gain']:+.0f} points ({_span(best['interval'])}; p = {p_value(best['p'])})."
        )
    takes = f"about {one['search_seconds'] / 60:.0f} min" if math.isfinite(one["search_seconds"]) else "a while"
    says = {
        "likely": "is likely to help",
        "uncertain": "may help; this does not show it",
        "unlikely": "is unlikely to help",
    }
    return "\n".join(
        [*lines, f"A search {says[one['search']]}. It takes {takes} on this machine:", f"  {one['command']}"]
    )


def _span(ends: Sequence[float] | None) -> str:
    return f"{100 * ends[0]:.0f} to {100 * ends[1]:.0f}" if ends else "–"


def write(diagnosis: Diagnosis) -> str:
    """Write ``diagnosis.txt``, ``diagnosis.json`` and a picture a task of what is known; returns the text."""
    from lpes_eval.report import figures

    folder, said = diagnosis.args.output, facts(diagnosis)
    for task in diagnosis.tasks:
        shown = {
            f"{one['length']}, {one['prompt_tokens']:,.0f} tokens": {
                p["position"]: p["score"] for p in one["positions"]
            }
            for one in said["lengths"]
            if one["task"] == task.name
        }
        if shown:
            figures.lengths(task.name, shown).save(folder, ("png",))
    write_atomically(folder / "diagnosis.json", json.dumps(finite(said), indent=2, allow_nan=False) + "\n")
    write_atomically(folder / "diagnosis.txt", text(said) + "\n")
    return f"{text(said)}\n\nMore: {folder}/diagnosis.json and lengths-TASK.png"


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
    add("--gen_kwargs", type=mapping, default={}, metavar="ARGS", help="as for lm_eval: max_gen_toks=20,...")
    add("--model_args", type=model_args, default={}, metavar="ARGS", help="as for lm_eval: dtype=float16,...")
    add("--apply_chat_template", action="store_true", help="use the model's template")
    add("--device", metavar="DEVICE", help="as for lm_eval: cuda, cuda:1, cpu, mps")
    add("--batch_size", type=batch_size, default="auto", metavar="N|auto", help="prompts in a batch")
    add("--questions", type=at_least(1), default=24, metavar="N", help="at every position, at most (default: 24)")
    add("--budget", type=budget, default=("seconds", 600), metavar="10m|2h|20000prompts",
        help="stop after so much, half of it for the table; the same command goes on (default: 10m)")  # fmt: skip
    add("--output", type=Path, metavar="DIR", help="folder of the diagnosis (default: runs/diagnose-MODEL)")
    parser.set_defaults(positions=None)
    return parser


@program("diagnose")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    began = time.monotonic()
    for name, value in {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "LMEVAL_LOG_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args = build_parser().parse_args(argv)
    if not args.tasks:
        raise UserError("--tasks: names no task")
    if args.output is None:
        args.output = Path("runs") / f"diagnose-{re.sub(r'[^A-Za-z0-9_.+-]+', '_', args.pretrained).strip('_')}"
    with ignore_broken_pipe():
        return diagnose(Diagnosis(args, began))


def diagnose(diagnosis: Diagnosis) -> int:
    """Measure, and write the report, also of what was measured before somebody stopped it."""
    from lpes_eval.harness import plugin
    from search import identity
    from search.model import load_model
    from search.tasks import check_names

    args = diagnosis.args
    check_names(args.tasks)
    plugin.check_examples(args.tasks, args.model_args, args.metadata)
    print(f"Loading {args.pretrained}", flush=True)
    lm = load_model(diagnosis.tasks[0].args)
    for task in diagnosis.tasks:
        diagnosis.load(lm, task)
    evaluators = [task.evaluator for task in diagnosis.tasks]
    evaluators += [length.evaluator for task in diagnosis.tasks for length in task.lengths]
    settings = {
        "weights": evaluators[0].engine.weights(),
        "requests": [identity.sha256([r.args for r in one.objectives[0].task.instances]) for one in evaluators],
        "packages": identity.packages(),
    }
    status = 0
    with Journal(args.output, {"diagnosis": settings}) as diagnosis.journal:
        for entry in diagnosis.journal.entries.values():
            diagnosis.take(entry)
        try:
            diagnosis.measure()
        except KeyboardInterrupt:
            diagnosis.cut, status = True, 130
        print("\n" + write(diagnosis), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
