"""The command ``lpes-eval diagnose MODEL``: does accuracy depend on the position, and will a search find anything?

The plain model is asked at several lengths, then a search is begun; all in journals, with which the command goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_eval.compare.statistics import holm, interval
from lpes_eval.compare.tables import finite, ignore_broken_pipe
from lpes_eval.data import source
from lpes_eval.errors import DataError, PromptTooLong, UserError, program
from lpes_eval.files import write_atomically
from lpes_eval.flags import at_least, budget, mapping, model_args
from lpes_eval.report import figures
from search import config
from search.held_out import as_lm_eval_reads_it, every_ten_seconds
from search.journal import Journal, packages, sha256
from search.optimizers.layers import Map
from search.parser import batch_size, names
from search.report.pages import render

if TYPE_CHECKING:
    from search.evaluator import Evaluator
    from search.run import Search

AT_ONCE = 6  # questions between two looks at the time
TABLE = 0.5  # share of the budget after which the table ends
NO_NAME = r"[^A-Za-z0-9_.+-]+"  # what the name of a folder has none of


class Diagnosis:
    """What is measured for a command line, some questions at a time, as long as its budget lasts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began, self.prompts, self.cut = args, time.monotonic(), 0.0, False
        self.searches: dict[str, Search] = {}  # by task
        self.evaluators: dict[tuple[str, str], Evaluator] = {}  # by task and length
        self.cost: dict[tuple[str, str], float] = {}  # of a question, in the budget's unit
        self.notes: list[str] = []

    def left(self, share: float) -> float:
        """What is left of this share of the budget, in its unit."""
        unit, most = self.args.budget
        return float(share * most - (time.monotonic() - self.began if unit == "seconds" else self.prompts))

    def load(self) -> None:
        """Load the model and the searches, and build each task at half its length, at its own and at twice it."""
        from lpes_eval.harness import plugin
        from search import run
        from search.tasks import check_names

        lm = None
        check_names(self.args.tasks)
        plugin.check_examples(self.args.tasks, self.args.model_args, self.args.metadata)
        print(f"Loading {self.args.pretrained}", flush=True)
        for task in dict.fromkeys(self.args.tasks):
            search = self.searches[task] = run.load(config.parse(search_words(self.args, task)), lm, Map)
            lm = search.bench.lm
            own = self._build(search, task)
            setting, size = own.objectives[0].size
            for number in (size // 2, size, 2 * size) if size >= 4 else (size,):
                title = f"{setting}={number}" if number else task
                try:
                    evaluator = own if number == size else self._build(search, task, **{setting: number})
                    self.evaluators[task, title] = evaluator
                except (PromptTooLong, DataError) as error:  # a file of one's own has one size
                    self.notes.append(f"Does not fit: {task}, {title}: {error}")

    def _build(self, search: Search, task: str, **size: int) -> Evaluator:
        from search.evaluator import Evaluator
        from search.tasks import load_tasks

        options = config.task_options(search.args)
        options["metadata"] |= size
        options["positions"] = options["positions"] if "positions" in self.args.metadata else None
        objectives = load_tasks(search.bench.lm, [task], examples=self.args.questions, **options)
        if len(objectives) > 1 or not objectives[0].by_position:
            raise UserError(f"--tasks {task}: is not one task by position, such as kv_retrieval or mdqa_pos")
        if objectives[0].note:
            self.notes.append(", ".join([*(f"{key}={value}" for key, value in size.items()), objectives[0].note]))
        return Evaluator(search.bench.lm, objectives)

    def measure(self, journal: Journal) -> None:
        """The table, all lengths by turns as time may be short; then the beginning of every search."""
        most = self.args.questions
        ends = [end for end in (1, 3, *range(AT_ONCE, most, AT_ONCE)) if end < most]
        for first, end in pairwise([0, *ends, most]):
            for length in self.evaluators:
                self._ask(journal, length, range(first, end))
        for number, task in enumerate(self.searches, 1):
            self._map(task, TABLE + (1 - TABLE) * number / len(self.searches))

    def _ask(self, journal: Journal, length: tuple[str, str], part: range) -> None:
        evaluator, name, left = self.evaluators[length], ", ".join(length), self.left(TABLE)
        key = f"{name}, from question {part[0] + 1}"
        if key in journal.entries:
            return
        if left <= 0 or left < len(part) * self.cost.get(length, 0.0):
            self.cut = True
            return
        print(f"  {name}: questions {part[0] + 1} to {part[-1] + 1}", flush=True)
        evaluator.progress = every_ten_seconds()
        measured, prompts = evaluator([1.0] * evaluator.num_layers, part=part, settle=True), evaluator.asked(part)
        data = {"fitness": measured.fitness, "measure": "score", "origin": name, "examples": measured.examples}
        journal.record(key, data | {"seconds": measured.seconds, "prompts": prompts})
        self.prompts += prompts
        self.cost[length] = (left - self.left(TABLE)) / len(part)

    def _map(self, task: str, share: float) -> None:
        search, say, (unit, _) = self.searches[task], every_ten_seconds("steps measured"), self.args.budget
        print(f"  {task}: the search's map of what layers bear", flush=True)
        with Journal(search.args.output, search.settings) as journal:
            search.journal, before = journal, sum(getattr(entry, unit) for entry in journal.individuals)
            search.args.budget = (unit, before + max(0.0, self.left(share)))
            search.run(lambda *_: say(len(journal.individuals), search.optimizer.mapped))  # type: ignore[attr-defined]
        self.prompts += search.spent["prompts"] - before if unit == "prompts" else 0
        self.cut |= search.cut

    def facts(self, journal: Journal) -> dict[str, Any]:
        """The report as data; scores are shares of 1."""
        said: dict[str, Any] = {"model": self.args.pretrained, "lengths": [], "searches": []}
        for (task, title), evaluator in self.evaluators.items():
            entries = [entry for entry in journal.entries.values() if entry.origin == f"{task}, {title}"]
            asked = [zip(*entry.examples.values(), strict=True) for entry in entries]
            if not (rows := [row for part in asked for row in part if None not in row]):
                continue
            positions = [
                {"position": column.position, "score": sum(scores) / len(rows), "interval": interval(scores)}
                for (_, column), scores in zip(evaluator.columns.values(), zip(*rows, strict=True), strict=True)
            ]
            mean = sum(place["score"] for place in positions) / len(positions)
            tokens = (evaluator.prompt_tokens or math.nan) / evaluator.prompts
            one: dict[str, Any] = {"task": task, "length": title, "prompt_tokens": tokens, "questions": len(rows)}
            one |= {"positions": positions, "mean": mean, "friedman_p_holm": position_bias(rows)}
            one["gain_if_all_were_as_the_best"] = max(place["score"] for place in positions) - mean
            said["lengths"].append(one)
        adjusted = holm([one["friedman_p_holm"] for one in said["lengths"]])
        for one, p in zip(said["lengths"], adjusted, strict=True):
            one["friedman_p_holm"] = p
        for task, search in self.searches.items():
            optimizer: Any = search.optimizer
            found = [
                {"layers": [first, end - 1], "factor": factor, "gain": gain.mean, "questions": len(gain.differences)}
                for gain in optimizer.entries or ()
                for (first, end), factor in gain.change.items()
            ]
            says = "not known yet" if optimizer.entries is None else "likely" if found else "unlikely"
            one = {"task": task, "search": says, "found": found, "said": optimizer.said}
            said["searches"].append(one | {"command": config.command(search_words(self.args, task))})
        return said | {"notes": self.notes, "cut": self.cut}


def write(folder: Path, said: dict[str, Any]) -> str:
    """Write the report, as data and text, and a picture a task of what is known; returns the text."""
    for task, lengths in groupby(said["lengths"], key=itemgetter("task")):
        rows: dict[str, dict[float, float]] = {}
        for one in lengths:
            scores = {place["position"]: place["score"] for place in one["positions"]}
            rows[f"{one['length']}, {one['prompt_tokens']:,.0f} tokens"] = scores
        figures.lengths(task, rows).save(folder, ("png",))
    write_atomically(folder / "diagnosis.json", json.dumps(finite(said), indent=2, allow_nan=False) + "\n")
    text = render("diagnosis.txt.j2", **said).strip()
    write_atomically(folder / "diagnosis.txt", text + "\n")
    return f"{text}\n\nMore: {folder}/diagnosis.json and lengths-TASK.png"


def position_bias(rows: Sequence[Sequence[float]]) -> float:
    """p of "the position makes no difference": Friedman's test, of right and wrong answers Cochran's Q."""
    from scipy.stats import friedmanchisquare

    columns = list(zip(*rows, strict=True))
    if len(columns) < 3 or len(rows) < 2:
        return math.nan
    if all(len(set(row)) == 1 for row in rows):  # nothing varies, so nothing depends on the position
        return 1.0
    return float(friedmanchisquare(*columns).pvalue)


def search_words(args: argparse.Namespace, name: str) -> list[str]:
    """The flags of a search for this task, on the data of the diagnosis."""
    model, metadata, words = {"pretrained": args.pretrained} | args.model_args, dict(args.metadata), ["--tasks", name]
    positions = metadata.pop("positions", [])
    if name.startswith("mdqa_pos") and source.asked(model | metadata).kind == "official":
        metadata.setdefault("source", "generated")  # else a named model would be asked the official articles
    for flag, values in (("model_args", model), ("metadata", metadata), ("gen_kwargs", args.gen_kwargs)):
        words += [f"--{flag}", as_lm_eval_reads_it(values)] if values else []
    words += ["--positions", ",".join(f"{position:g}" for position in positions)] if positions else []
    for flag in ("device", "batch_size"):
        words += [f"--{flag}", str(getattr(args, flag))] if getattr(args, flag) not in (None, "auto") else []
    words += ["--apply_chat_template"] * args.apply_chat_template
    return [*words, "--output", str(args.output / f"search-{re.sub(NO_NAME, '_', name)}")]


def build_parser() -> argparse.ArgumentParser:
    """The command line; what ``python -m search.ga`` has too means the same."""
    parser = argparse.ArgumentParser(
        prog="lpes-eval diagnose",
        description="Measure accuracy by position at several lengths, and say whether a search is likely to help.",
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
    return parser


@program("diagnose")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; what was measured before somebody stopped it is reported too."""
    config.prepare_process()
    args = build_parser().parse_args(argv)
    if not args.tasks:
        raise UserError("--tasks: names no task")
    if args.output is None:
        args.output = Path("runs") / f"diagnose-{re.sub(NO_NAME, '_', args.pretrained).strip('_')}"
    with ignore_broken_pipe():
        diagnosis, status = Diagnosis(args), 0
        diagnosis.load()
        evaluators = [*diagnosis.evaluators.values()]
        requests = [sha256([r.args for r in one.objectives[0].task.instances]) for one in evaluators]
        settings = {"weights": evaluators[0].engine.weights(), "requests": requests, "packages": packages()}
        with Journal(args.output, {"diagnosis": settings}) as journal:
            try:
                diagnosis.measure(journal)
            except KeyboardInterrupt:
                diagnosis.cut, status = True, 130
            print("\n" + write(args.output, diagnosis.facts(journal)), flush=True)
        return status
