"""What a search's factors are worth on examples that it has not seen, and the lm_eval command that gives the same."""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lpes_eval.factors import Factors
from lpes_eval.files import write_atomically
from search import guards
from search.config import shown
from search.engines import speed_options

if TYPE_CHECKING:
    from search.evaluator import Evaluator, Measured
    from search.journal import Journal
    from search.run import Search
    from search.tasks import Objective

FOUND = "found factors"
PLAIN = "baseline"
HELD_OUT_NUMBERS = "held_out_samples.json"


@dataclass
class HeldOut:
    """Scores on examples that the search has not seen.

    Attributes:
        tasks: at every position that they have.
        factors: what was measured, by name.
        measured: the scores, by the same names.
        comparisons: (task, name) -> ``PairedComparison`` of the found factors with it, by question.
        guards: what the guards came to (``Guard.check``), by name.
    """

    tasks: list[Objective]
    factors: dict[str, Factors]
    measured: dict[str, Measured]
    comparisons: dict[tuple[str, str], Any]
    guards: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def worsened(self) -> list[str]:
        """The guards that the factors worsen by more than allowed, beyond chance."""
        return [name for name, guard in self.guards.items() if guard["over"]]

    @property
    def lower(self) -> list[str]:
        """The guards that become worse beyond chance, though not shown by more than allowed."""
        found = []
        for name, guard in self.guards.items():
            low, high = guard["interval"]
            best = -(low or 0.0) if "lower_is_better" in guard else high or 0.0
            found += [name] if best < 0 and not guard["over"] else []
        return found


def evaluate_held_out(search: Search, found: Factors) -> HeldOut:
    """Measure the plain model, PI, and the found factors; the guards of the plain model and the found factors too.

    PI has the uniform factor that gained most in the search, or where none did the mean of the found factors (section
    4.1). The journal keeps what was measured, so going on with a finished search measures none of it again.
    """
    from lpes_eval.compare import statistics
    from search import identity
    from search.evaluator import Evaluator

    args, tasks = search.args, list(search.held_out)
    evaluator = Evaluator(search.lm, tasks, cache=search.evaluator.cache, **speed_options(args))
    scaled = found.per_layer()[args.skip :]
    uniform = search.best_uniform or search.uniform(sum(scaled) / len(scaled))
    factors = {PLAIN: search.uniform(1.0)}
    if uniform.digest() != found.digest():
        factors[search.pi(uniform.per_layer(search.evaluator.num_layers)[-1])] = uniform
    factors[FOUND] = found
    watched = guards.load(args, evaluator, "held_out", args.held_out_examples)
    asked = identity.sha256(evaluator.described)
    measured = {name: _measure(name, values, asked, evaluator, search.journal) for name, values in factors.items()}
    comparisons = {}
    for task in tasks:
        rows = {name: _matrix(task, scores.examples) for name, scores in measured.items()}
        mine = rows.pop(FOUND)
        for name, other in rows.items():
            if mine is not None and other is not None:  # a corpus metric has no score of a single example to pair
                comparisons[task.name, name] = statistics.compare_paired(other, mine, higher_is_better=task.sign > 0)
    if any(task.divided for task in tasks):
        numbers = {task.name: task.numbers for task in tasks}
        write_atomically(args.output / HELD_OUT_NUMBERS, json.dumps(numbers) + "\n")
    found_guards = {}
    for guard in watched:
        print(f"  held-out examples: guard {guard.name} ...", flush=True)
        guard.evaluator.progress = every_ten_seconds()
        plain, with_factors = (guard.rows(factors[name], measured[name]) for name in (PLAIN, FOUND))
        found_guards[guard.name] = guard.check(plain, with_factors)
    return HeldOut(tasks, factors, measured, comparisons, found_guards)


def _measure(name: str, factors: Factors, asked: str, evaluator: Evaluator, journal: Journal) -> Measured:
    """The scores under ``factors``, from the journal if they are there."""
    from search.evaluator import Measured

    key, kept = f"held out {asked} {factors.digest()}", ("fitness", "scores", "examples", "seconds", "ended")
    if key not in journal.entries:
        print(f"  held-out examples: {name}, {evaluator.prompts} prompts ...", flush=True)
        evaluator.progress = every_ten_seconds()
        measured = evaluator(factors)
        print(f"    took {timedelta(seconds=round(measured.seconds))}", flush=True)
        entry = {each: getattr(measured, each) for each in kept}
        try:
            journal.record(key, {"generation": None, "origin": "held out", **entry})
        except ValueError:  # JSON has no NaN, which some metrics give
            return measured
    return Measured(**{each: journal.entries[key][each] for each in kept})


def every_ten_seconds() -> Callable[[int, int], None]:
    """Says how many prompts are answered, from time to time, while it is called after every batch."""
    last = time.monotonic()

    def say(answered: int, asked: int) -> None:
        nonlocal last
        if time.monotonic() - last > 10 and answered < asked:
            last = time.monotonic()
            print(f"    {answered} of {asked} prompts answered", flush=True)

    return say


def _matrix(task: Objective, examples: dict[str, list[Any]]) -> Any:
    """Scores of shape (questions, columns), a question's examples averaged; None where not all have finite ones."""
    import numpy as np

    rows: dict[Any, list[list[float]]] = {}
    for question, *scores in zip(task.questions, *(examples[column.name] for column in task.columns), strict=True):
        if not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
            return None
        rows.setdefault(question, []).append(scores)
    return np.array([np.mean(scores, axis=0) for scores in rows.values()])


def reproduce_command(args: argparse.Namespace, tasks: Sequence[Objective], file: str = "factors.json") -> str:
    """The lm_eval command that gives the factors file's scores on the held-out examples of ``tasks``."""
    # A pattern stands here for tasks alone, to lm_eval also for their groups, which it then refuses.
    fitting = {name: fnmatch.filter([task.name for task in tasks], name) or [name] for name in args.tasks}
    limit = args.held_out_examples if args.held_out_examples < 500 else None
    divided = any(task.divided for task in tasks)
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
        **{name: json.dumps(value) for name in ("metadata", "gen_kwargs") if (value := getattr(args, name))},
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
