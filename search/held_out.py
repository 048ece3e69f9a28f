"""What a search's factors are worth on examples that it has not seen, and the lm_eval command that gives the same."""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from lpes_eval.entries import Entry, GuardCheck
from lpes_eval.factors import Factors
from lpes_eval.files import write_atomically
from search import guards
from search.config import shown
from search.space import Job

if TYPE_CHECKING:
    from lpes_eval.compare.statistics import Difference
    from search.run import Search
    from search.tasks import Objective

FOUND = "found factors"
PLAIN = "baseline"
HELD_OUT_NUMBERS = "held_out_samples.json"


@dataclass
class HeldOut:
    """Scores on examples that the search has not seen."""

    tasks: list[Objective]
    """At every position that they have."""
    factors: dict[str, Factors]
    measured: dict[str, Entry]
    comparisons: dict[tuple[str, str], Any]
    """(task, name) -> ``PairedComparison`` of the found factors with it, by question."""
    guards: Mapping[str, GuardCheck] = field(default_factory=dict)

    @property
    def worsened(self) -> list[str]:
        """The guards that the factors worsen by more than allowed, beyond chance."""
        return [name for name, guard in self.guards.items() if guard.over]

    @property
    def lower(self) -> list[str]:
        """The guards that become worse beyond chance, though not shown by more than allowed."""
        return [name for name, guard in self.guards.items() if guard.lower and not guard.over]

    def proof(self) -> dict[str, Any]:
        """What the found factors gain over the others, and cost the guards, as plain data."""
        signs = {task.name: task.sign for task in self.tasks}
        differences = [
            {
                "task": task,
                "found_minus": name,
                "mean": comparison.mean.difference,
                "interval": [comparison.mean.low, comparison.mean.high],
                "p": comparison.mean.p,
                "questions": comparison.questions,
                **({"lower_is_better": True} if signs[task] < 0 else {}),
            }
            for (task, name), comparison in self.comparisons.items()
        ]
        return {"differences": differences, "guards": to_builtins(self.guards)}


@dataclass
class Outcome:
    """What a search came to: the entries of the plain model and of the best individual, and its factors."""

    plain: Entry
    best: Entry
    found: Factors
    held_out: HeldOut | None = None
    """The scores on held-out examples; None where these were left out, or are still to come."""
    file: str = "factors.json"
    """The name of the factors file, empty where there is none."""

    @property
    def nothing(self) -> bool:
        """Whether the best factors are those of the plain model."""
        return set(self.found.per_layer()) == {1.0}

    @property
    def fitter(self) -> bool:
        """Whether the factors are fitter than the plain model on the search examples, and worsen no guard there."""
        return self.best.fitness > self.plain.fitness + 1e-9 and not guards.over(self.best)  # sums are rounded

    @property
    def shown(self) -> bool:
        """Whether the factors are better than the plain model, beyond chance where held-out examples say so."""
        held_out = self.held_out
        if held_out is None or not self.fitter:
            return self.fitter
        pairs = [(task, held_out.comparisons.get((task.name, PLAIN))) for task in held_out.tasks]
        compared = [direction(paired.mean, task.sign) for task, paired in pairs if paired]
        if not compared:  # corpus metrics: nothing to pair
            return held_out.measured[FOUND].fitness > held_out.measured[PLAIN].fitness and not held_out.worsened
        return 1 in compared and -1 not in compared and not held_out.worsened


def direction(difference: Difference, sign: int) -> int:
    """1 where the interval shows an improvement, -1 where it shows a loss, 0 where it shows neither."""
    return 0 if difference.by_chance else sign * ((difference.low > 0) - (difference.high < 0))


def evaluate_held_out(search: Search, found: Factors) -> HeldOut:
    """Measure the plain model, PI, and the found factors; the guards of the plain model and the found factors too.

    PI has the uniform factor that gained most in the search, else the mean of the found factors (section 4.1).
    """
    from lpes_eval.compare import statistics

    args, tasks = search.args, list(search.held_out)
    scaled = found.per_layer()[args.skip :]
    uniform = search.best_uniform or search.uniform(sum(scaled) / len(scaled))
    factors = {PLAIN: search.uniform(1.0)}
    if uniform.digest() != found.digest():
        factors[search.pi(uniform.per_layer(search.evaluator.num_layers)[-1])] = uniform
    factors[FOUND] = found
    settle, plain_rows = guards.settles(search.plain.ended), None
    measured: dict[str, Entry] = {}
    for name, values in factors.items():  # the plain model first
        above = -math.inf if name in (PLAIN, FOUND) else math.inf
        job = Job(values, "held_out", settle=settle, guarded_above=above, plain_rows=plain_rows)
        measured[name] = _measure(search, name, job)
        plain_rows = measured[PLAIN].guard_rows
    comparisons = {}
    for task in tasks:
        rows = {name: _matrix(task, entry.examples) for name, entry in measured.items()}
        mine = rows.pop(FOUND)
        for name, other in rows.items():
            if mine is not None and other is not None:  # a corpus metric has none
                comparisons[task.name, name] = statistics.compare_paired(other, mine, higher_is_better=task.sign > 0)
    if any(task.divided for task in tasks):
        numbers = {task.name: task.numbers for task in tasks}
        write_atomically(args.output / HELD_OUT_NUMBERS, json.dumps(numbers) + "\n")
    return HeldOut(tasks, factors, measured, comparisons, measured[FOUND].guards)


def _measure(search: Search, name: str, job: Job) -> Entry:
    key, entries = f"held out {search.args.held_out_examples} {job.factors.digest()}", search.journal.entries
    known = entries.get(key)
    if known is not None and (name != FOUND or known.guards or not job.plain_rows):  # what was PI has no guards
        return known
    evaluator = search.bench.evaluator("held_out")
    print(f"  held-out examples: {name}, {evaluator.prompts} prompts ...", flush=True)
    evaluator.progress = every_ten_seconds()
    data = {"origin": "held out", **search.measured(job)}
    try:
        return search.journal.record(key, data)
    except ValueError:  # JSON has no NaN, which some metrics give
        return Entry(key, **data)


def every_ten_seconds(what: str = "prompts answered") -> Callable[[int, int], None]:
    """Says how much is done, from time to time, while it is called with that and with how much there is in all."""
    last = time.monotonic()

    def say(done: int, there_are: int) -> None:
        nonlocal last
        if time.monotonic() - last > 10 and done < there_are:
            last = time.monotonic()
            print(f"    {done} of {there_are} {what}", flush=True)

    return say


def _matrix(task: Objective, examples: dict[str, list[Any]]) -> Any:
    """Scores (questions, columns) of what was asked, a question's examples averaged; None where one is not finite."""
    import numpy as np

    rows: dict[Any, list[list[float]]] = {}
    for question, *scores in zip(task.questions, *(examples[column.name] for column in task.columns), strict=True):
        if None in scores:
            continue
        if not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
            return None
        rows.setdefault(question, []).append(scores)
    return np.array([np.mean(scores, axis=0) for scores in rows.values()])


def smallest_gain(task: Objective, plain: Entry, other: Entry | None) -> float | None:
    """The smallest gain in a task's mean that would have been beyond chance; None where one question says nothing.

    It is half of the 95 % interval of the difference of two measurements, on the questions that both were asked; where
    none differs, of two independent ones that vary as the plain model's does.
    """
    from lpes_eval.compare import statistics

    examples = other.examples if other else plain.examples
    rows, others = _matrix(task, plain.where(examples)), _matrix(task, examples)
    if rows is None or others is None or len(rows) < 2:
        return None
    difference = statistics.compare_paired(rows, others).mean
    independent = float(1.96 * (2 / len(rows)) ** 0.5 * rows.mean(axis=1).std(ddof=1))
    half = (difference.high - difference.low) / 2 or independent
    return half if math.isfinite(half) and half > 0 else None


def reproduce_command(args: argparse.Namespace, tasks: Sequence[Objective], file: str = "factors.json") -> str:
    """The lm_eval command that gives the factors file's scores on the held-out examples of ``tasks``."""
    # A pattern stands here for tasks alone, to lm_eval also for their groups, which it then refuses.
    fitting = {name: fnmatch.filter([task.name for task in tasks], name) or [name] for name in args.tasks}
    limit = args.held_out_examples if args.held_out_examples < 500 else None
    divided = any(task.divided for task in tasks)
    metadata = dict(args.metadata)
    if any(task.left_out for task in tasks):
        places = {column.position for task in tasks for column in task.columns if column.position is not None}
        metadata["positions"] = sorted(places)
    flags = {
        "model": "lpes",
        "model_args": as_lm_eval_reads_it({**shown(args.model_args), "factors": str(args.output / file)}),
        "tasks": ",".join(task for name in args.tasks for task in fitting[name]),
        **{name: getattr(args, name) for name in ("device", "num_fewshot", "include_path", "system_instruction")},
        "batch_size": None if args.batch_size == "auto" else args.batch_size,
        "apply_chat_template": args.apply_chat_template,
        "fewshot_as_multiturn": "false" if args.fewshot_as_multiturn is False else None,
        "seed": None if args.fewshot_seed == 1234 else f"0,1234,1234,{args.fewshot_seed}",
        "confirm_run_unsafe_code": args.confirm_run_unsafe_code,
        "metadata": json.dumps(metadata) if metadata else None,
        "gen_kwargs": json.dumps(args.gen_kwargs) if args.gen_kwargs else None,
        "samples": args.output / HELD_OUT_NUMBERS if divided else None,
        "limit": None if divided else limit,
    }
    command = ["lm_eval"]
    for name, value in flags.items():
        if value is not None and value is not False:
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(command)


def as_lm_eval_reads_it(arguments: dict[str, Any]) -> str:
    """``key=value,key=value``, or JSON where that would be read as something else."""
    from lm_eval._cli.utils import key_val_to_dict

    text = ",".join(f"{key}={value}" for key, value in arguments.items())
    try:
        return text if "{" not in text and key_val_to_dict(text) == arguments else json.dumps(arguments)
    except ValueError:
        return json.dumps(arguments)
