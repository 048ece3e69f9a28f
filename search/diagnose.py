"""The command ``lpes-eval diagnose MODEL``: does accuracy depend on the position, and will a search find anything?

The plain model answers questions at half a task's length, at its own and at twice it. Then the search that the report
names is begun: its map of what layers bear says whether there is anything to find, and the search goes on from there.
All is in journals, from which the same command goes on.
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

from lpes_eval.compare.statistics import holm, interval
from lpes_eval.compare.tables import finite, ignore_broken_pipe, p_value, text_table
from lpes_eval.data import source
from lpes_eval.errors import DataError, PromptTooLong, UserError, program
from lpes_eval.files import write_atomically
from lpes_eval.flags import at_least, budget, mapping, model_args
from search import config
from search.held_out import as_lm_eval_reads_it, every_ten_seconds
from search.journal import Journal
from search.optimizers.base import Steps
from search.optimizers.layers import Gain, LayerSearch
from search.parser import batch_size, names
from search.space import Individual

if TYPE_CHECKING:
    from lpes_eval.entries import Entry
    from search.evaluator import Evaluator

AT_ONCE = 6
"""Questions between two looks at the time."""
TABLE = 0.5
"""Share of the budget after which the table ends."""
LEVEL = 0.05
"""Of its tests."""


class Map(LayerSearch):
    """The first step of the default search; ``entries`` has what helps, None until that is known."""

    entries: list[Gain] | None = None

    def search(self) -> Steps:
        """End with the start."""
        self.entries = yield from self._map()
        return Individual(self.start, "start")


@dataclass
class Length:
    """The plain model on a task at one length; ``rows`` has a question's score at every position."""

    title: str
    evaluator: Evaluator
    rows: dict[int, list[float]] = field(default_factory=dict)
    cost: float = 0.0  # of a question, in the budget's unit


@dataclass
class Task:
    """A task of the diagnosis, and the search for it that ``words`` start."""

    words: list[str]
    args: argparse.Namespace
    lengths: list[Length] = field(default_factory=list)
    search: Any = None  # search.run.Search, of a Map

    @property
    def name(self) -> str:
        """As the command line has it."""
        return str(self.args.tasks[0])


class Diagnosis:
    """What is measured for a command line, question by question, as long as its budget lasts."""

    def __init__(self, args: argparse.Namespace, began: float) -> None:
        self.args, self.began, self.prompts, self.cut = args, began, 0, False
        words = [search_words(args, name) for name in dict.fromkeys(args.tasks)]
        self.tasks = [Task(each, config.parse(each)) for each in words]
        self.notes: list[str] = []

    def left(self, share: float) -> float:
        """What is left of this share of the budget, in its unit."""
        unit, most = self.args.budget
        return float(share * most - (time.monotonic() - self.began if unit == "seconds" else self.prompts))

    def load(self, lm: Any, task: Task) -> None:
        """Build a task's requests, at half its length, at its own and at twice it, and its search."""
        from search import run
        from search.evaluator import Evaluator
        from search.tasks import load_tasks

        def build(**size: int) -> Evaluator:
            options = config.task_options(task.args)
            options["metadata"] = options["metadata"] | size
            if not self.args.positions:
                options |= {"positions": None, "lambdas": None}
            objectives = load_tasks(lm, [task.name], examples=self.args.questions, **options)
            if len(objectives) > 1 or not objectives[0].by_position:
                raise UserError(f"--tasks {task.name}: is not one task by position, such as kv_retrieval or mdqa_pos")
            if objectives[0].note:
                self.notes.append(", ".join([*(f"{key}={value}" for key, value in size.items()), objectives[0].note]))
            return Evaluator(lm, objectives)

        own = build()
        setting: Any = getattr(own.objectives[0].task, "SIZE", None)
        size: Any = (own.objectives[0].task.config.metadata or {}).get(setting)
        for number in (size // 2, size, 2 * size) if size and size >= 4 else (size,):
            title = f"{setting}={number}" if number else task.name
            try:
                evaluator = own if number == size else build(**{setting: number})
                task.lengths.append(Length(title, evaluator))
            except (PromptTooLong, DataError) as error:  # a file of one's own has one size
                self.notes.append(f"Does not fit: {task.name}, {title}: {error}")
        task.search = run.load(task.args, lm, Map)

    def measure(self, journal: Journal) -> None:
        """The table, then the beginning of every search."""
        lengths = {f"{task.name}, {length.title}": length for task in self.tasks for length in task.lengths}
        for entry in journal.entries.values():
            _take(lengths[entry.origin], entry)
        most = self.args.questions
        for end in sorted({1, 3, *range(AT_ONCE, most, AT_ONCE), most}):  # little time: fewer at every length
            for name, length in lengths.items():
                self._ask(journal, name, length, range(min(end, most)))
        for number, task in enumerate(self.tasks, 1):
            self._map(task, TABLE + (1 - TABLE) * number / len(self.tasks))

    def _ask(self, journal: Journal, name: str, length: Length, questions: Iterable[int]) -> None:
        """Measure what is missing of these questions, as far as the table's share of the budget goes."""
        evaluator = length.evaluator
        while missing := [u for u in questions if u not in length.rows]:
            left = self.left(TABLE)
            number = min(AT_ONCE, int(left / length.cost)) if length.cost else 1
            if left <= 0 or number < 1:
                self.cut = True
                return
            part = missing[:number]
            print(f"  {name}: questions {part[0] + 1} to {part[-1] + 1}", flush=True)
            evaluator.progress = every_ten_seconds()
            measured = evaluator([1.0] * evaluator.num_layers, part=part)
            data = {"fitness": measured.fitness, "measure": "score", "origin": name, "examples": measured.examples}
            data |= {"seconds": measured.seconds, "prompts": evaluator.asked(part)}
            _take(length, journal.record(f"{name}, from question {part[0] + 1}", data))
            self.prompts += evaluator.asked(part)
            length.cost = (left - self.left(TABLE)) / len(part)

    def _map(self, task: Task, share: float) -> None:
        """Begin the task's search with its map, as far as this share of the budget goes."""
        search, (unit, _) = task.search, self.args.budget
        print(f"  {task.name}: the search's map of what layers bear", flush=True)
        say = every_ten_seconds("steps measured")
        with Journal(search.args.output, search.settings) as search.journal:
            before = search.journal.individuals
            search.args.budget = (unit, sum(getattr(entry, unit) for entry in before) + max(0.0, self.left(share)))

            def watch(individual: Individual, entry: Entry, new: bool) -> None:
                self.prompts += entry.prompts if new else 0
                say(len(search.journal.individuals), search.optimizer.mapped)

            search.run(watch)
        self.cut |= search.cut


def _take(length: Length, entry: Entry) -> None:
    """Take in what a journal says of some questions."""
    for u, row in enumerate(zip(*entry.examples.values(), strict=True)):
        if None not in row:
            length.rows[u] = list(row)


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
    words += ["--apply_chat_template"] * args.apply_chat_template
    return [*words, "--output", str(args.output / f"search-{re.sub(r'[^A-Za-z0-9_.+-]+', '_', name)}")]


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
    adjusted = holm([position_bias([*length.rows.values()]) for _, length in asked])
    return {
        "model": diagnosis.args.pretrained,
        "lengths": [_length(task.name, length, p) for (task, length), p in zip(asked, adjusted, strict=True)],
        "searches": [_search(task) for task in diagnosis.tasks],
        "notes": diagnosis.notes,
        "cut": diagnosis.cut,
    }


def _length(name: str, length: Length, p: float) -> dict[str, Any]:
    evaluator, columns = length.evaluator, list(zip(*length.rows.values(), strict=True))
    means = [sum(column) / len(column) for column in columns]
    return {
        "task": name,
        "length": length.title,
        "prompt_tokens": (evaluator.prompt_tokens or math.nan) / evaluator.prompts,
        "questions": len(length.rows),
        "positions": [
            {"position": column.position, "score": mean, "interval": interval(scores)}
            for (_, column), mean, scores in zip(evaluator.columns.values(), means, columns, strict=True)
        ],
        "mean": sum(means) / len(means),
        "friedman_p_holm": p,
        "gain_if_all_were_as_the_best": max(means) - sum(means) / len(means),
    }


def _search(task: Task) -> dict[str, Any]:
    """What the search's map says."""
    optimizer = task.search.optimizer
    entries = optimizer.entries
    says = "not known yet" if entries is None else "likely" if entries else "unlikely"
    found = [
        {"layers": [first, end - 1], "factor": factor, "gain": gain.mean, "questions": len(gain.differences)}
        for gain in entries or ()
        for (first, end), factor in gain.change.items()
    ]
    command = config.command(task.words)
    return {"task": task.name, "search": says, "found": found, "said": optimizer.said, "command": command}


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
    parts += [*said["notes"], *map(_verdict, said["searches"])]
    if said["cut"]:
        parts.append("The budget ended this before all was measured: the same command goes on.")
    return "\n\n".join(parts)


def _verdict(one: dict[str, Any]) -> str:
    says = f"{one['task']}: {one['said']}"
    if one["search"] == "likely":
        best = one["found"][0]
        first, last = best["layers"]
        where = f"layer {first}" if first == last else f"layers {first} to {last}"
        says += f"; {best['factor']:g} in {where} changes the likelihood most, by {best['gain']:+.3f} on"
        says += f" {best['questions']} other questions. A search is likely to help. It goes on from here:"
    elif one["search"] == "unlikely":
        says += ". A search would end here: it is unlikely to help. Its command:"
    else:
        says = f"{one['task']}: whether a search is likely to help is not known yet; it would go on with the map:"
    return f"{says}\n  {one['command']}"


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
        description="Measure accuracy by position at two or three lengths, begin a search for layer factors, and say "
        "whether it is likely to help and how to go on with it.",
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
    evaluators = [length.evaluator for task in diagnosis.tasks for length in task.lengths]
    settings = {
        "weights": evaluators[0].engine.weights(),
        "requests": [identity.sha256([r.args for r in one.objectives[0].task.instances]) for one in evaluators],
        "packages": identity.packages(),
    }
    status = 0
    with Journal(args.output, {"diagnosis": settings}) as journal:
        try:
            diagnosis.measure(journal)
        except KeyboardInterrupt:
            diagnosis.cut, status = True, 130
        print("\n" + write(diagnosis), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
