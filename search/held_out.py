"""What a search's factors are worth on examples that it has not seen, and the lm_eval command that gives the same."""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_eval.errors import UserError
from lpes_eval.factors import Factors
from lpes_eval.files import write_atomically
from search.arguments import metadata_of, speed_options, task_options

if TYPE_CHECKING:
    from search.fitness import Measured
    from search.parts import Part
    from search.setup import Search

FOUND = "found factors"
HELD_OUT_NUMBERS = "held_out_samples.json"


@dataclass
class HeldOut:
    """Scores on examples that the search has not seen.

    Attributes:
        parts: the tasks, at every position that they have.
        factors: what was measured: name -> factors.
        measured: the same names -> scores.
        comparisons: the found factors against each other name, paired by question, one for each task that comes by
            position or stands alone: (task, name) -> ``PairedComparison``.
    """

    parts: list[Any]
    factors: dict[str, Factors]
    measured: dict[str, Measured]
    comparisons: dict[tuple[str, str], Any]


def load_held_out(args: argparse.Namespace, lm: Any) -> list[Part]:
    """The tasks on held-out examples, at every position that they have: before the search, as they may be refused."""
    from search.parts import load_parts

    if not args.held_out_examples:
        return []
    options = {**task_options(args), "positions": None}
    try:
        return load_parts(
            lm,
            args.tasks,
            split="held_out",
            metadata=metadata_of(args),
            examples=args.held_out_examples,
            **options,
        )
    except UserError as error:
        raise UserError(f"held-out examples: {error}; or leave these out (--held_out_examples 0)") from None


def evaluate_held_out(search: Search, found: Factors) -> HeldOut:
    """Measure baseline, PI at the mean of the found factors (section 4.1), and the found factors."""
    from lpes_eval.scoring import statistics
    from search.fitness import Fitness

    args, parts = search.args, list(search.held_out)
    fitness = Fitness(search.lm, parts, cache=search.fitness.cache, **speed_options(args))
    scaled = found.per_layer()[args.skip :]
    mean = sum(scaled) / len(scaled)
    factors = {
        "baseline": search.uniform(1.0),
        search.pi(mean): search.uniform(mean),
        FOUND: found,
    }
    kept = _Kept(args.output / "held_out.json", fitness.describe())
    measured: dict[str, Measured] = {}
    for name, values in factors.items():
        if (known := kept.get(values)) is not None:
            measured[name] = known
            continue
        print(f"  held-out examples: {name}, {fitness.prompts} prompts ...", flush=True)
        start = time.perf_counter()
        measured[name] = fitness(values, factors["baseline"])
        kept.put(values, measured[name])
        print(f"    took {timedelta(seconds=round(time.perf_counter() - start))}", flush=True)
    comparisons = {}
    for task, members in groups(parts).items():
        rows = {name: _matrix(members, found_scores.examples) for name, found_scores in measured.items()}
        if any(matrix is None for matrix in rows.values()):
            continue  # a corpus metric has no score of a single example to pair
        for name in factors:
            if name != FOUND:
                comparisons[task, name] = statistics.compare_paired(
                    rows[name], rows[FOUND], higher_is_better=members[0].sign > 0
                )
    if not all(own_split(part) for part in parts):
        numbers = {part.name: part.numbers for part in parts}
        write_atomically(args.output / HELD_OUT_NUMBERS, json.dumps(numbers) + "\n")
    return HeldOut(parts, factors, measured, comparisons)


class _Kept:
    """The held-out measurements of a search's folder: going on with a finished search measures none again.

    Args:
        path: a JSON file; one that cannot be read counts as not there.
        told: what is measured; measurements of anything else are dropped.
    """

    def __init__(self, path: Path, told: dict[str, Any]) -> None:
        self._path = path
        self._data: dict[str, Any] = {"told": json.loads(json.dumps(told)), "measured": {}}
        try:
            found = json.loads(path.read_bytes())
            if found["told"] == self._data["told"] and isinstance(found["measured"], dict):
                self._data = found
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def get(self, factors: Factors) -> Measured | None:
        from search.fitness import Measured

        found = self._data["measured"].get(factors.digest())
        return found and Measured(**found)

    def put(self, factors: Factors, measured: Measured) -> None:
        entry = {name: getattr(measured, name) for name in ("fitness", "scores", "examples", "seconds")}
        self._data["measured"][factors.digest()] = entry
        write_atomically(self._path, json.dumps(self._data, default=lambda number: number.item()) + "\n")  # numpy


def own_split(part: Any) -> bool:
    """Whether the task itself hands out the held-out examples; any other task's were picked by number."""
    return not part.divided


def groups(parts: Sequence[Any]) -> dict[str, list[Any]]:
    """Parts that are one task at several positions, under the name they share; any other part by itself."""
    found: dict[str, list[Any]] = {}
    for part in parts:
        found.setdefault(part.stem, []).append(part)
    return found


def _matrix(parts: Sequence[Any], examples: dict[str, list[Any]]) -> Any:
    """Scores of shape (questions, positions), a question's examples averaged; None where not all have finite ones."""
    from lpes_eval.scoring import statistics

    if not all(_is_finite(value) for part in parts for value in examples[part.name]):
        return None
    scores: dict[str, dict[Any, float]] = {}
    for part in parts:
        of_question: dict[Any, list[float]] = {}
        for question, value in zip(part.questions, examples[part.name], strict=True):
            of_question.setdefault(question, []).append(float(value))
        scores[part.name] = {question: sum(values) / len(values) for question, values in of_question.items()}
    return statistics.question_matrix(scores)[2]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def reproduce_command(args: argparse.Namespace, parts: Sequence[Any]) -> str:
    """The lm_eval command that gives the factors file's scores on the held-out examples of ``parts``."""
    model_args = {**args.model_args, "factors": str(args.output / "factors.json")}
    command = ["lm_eval", "--model", "lpes", "--model_args", _as_lm_eval_reads_it(model_args)]
    # A pattern stands here for tasks alone, to lm_eval also for their groups, which it then refuses.
    fitting = {name: fnmatch.filter([part.name for part in parts], name) for name in args.tasks}
    command += ["--tasks", ",".join(task for name in args.tasks for task in fitting[name] or [name])]
    for flag in ("device", "num_fewshot", "include_path", "system_instruction"):
        if (value := getattr(args, flag)) is not None:
            command += [f"--{flag}", str(value)]
    if args.batch_size != "auto":
        command += ["--batch_size", str(args.batch_size)]
    if args.apply_chat_template:
        command += [
            "--apply_chat_template",
            *([args.apply_chat_template] if args.apply_chat_template is not True else []),
        ]
    if args.fewshot_as_multiturn is False:
        command += ["--fewshot_as_multiturn", "false"]
    if args.fewshot_seed != 1234:
        command += ["--seed", f"0,1234,1234,{args.fewshot_seed}"]
    if args.confirm_run_unsafe_code:
        command += ["--confirm_run_unsafe_code"]
    for flag in ("metadata", "gen_kwargs"):
        if value := getattr(args, flag):
            command += [f"--{flag}", json.dumps(value)]
    if not all(own_split(part) for part in parts):
        command += ["--samples", str(args.output / HELD_OUT_NUMBERS)]
    elif args.held_out_examples < 500:
        command += ["--limit", str(args.held_out_examples)]
    return shlex.join(command)


def _as_lm_eval_reads_it(arguments: dict[str, Any]) -> str:
    """``key=value,key=value``, or JSON where that would be read as something else."""
    from lm_eval._cli.utils import key_val_to_dict

    text = ",".join(f"{key}={value}" for key, value in arguments.items())
    try:
        return text if "{" not in text and key_val_to_dict(text) == arguments else json.dumps(arguments)
    except ValueError:
        return json.dumps(arguments)
