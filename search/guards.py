"""What factors must not cost: the same task at half the length, answers that end, and whatever other task a user names.

A guard is worse where the 95 % interval of its difference (``compare_paired``) lies below what is allowed. An
individual that makes one worse ranks behind all that do not (Deb, Comput. Methods Appl. Mech. Eng. 186, 2000).
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lpes_eval.entries import Entry, GuardCheck
from lpes_eval.errors import UserError
from lpes_eval.factors import Factors
from search.config import task_options

if TYPE_CHECKING:
    from search.evaluator import Evaluator, Measured
    from search.tasks import Objective

logger = logging.getLogger(__name__)

ENDS_MAX_DROP = 0.02
"""How much smaller the share of answers that end by themselves may become."""
PENALTY = 1e6
"""Individuals that worsen a guard are told to the optimiser as so much less fit than any score."""


@dataclass
class Guard:
    """A score that must not fall by more than ``max_drop``."""

    name: str
    max_drop: float
    evaluator: Evaluator
    ends: bool = False
    """Whether it is the share of answers that end by themselves, which the search's own evaluator counts."""

    def rows(self, factors: Factors, measured: Measured, settle: bool = False) -> list[float | None]:
        """Every question's score under ``factors``, which the search ``measured``; None where it was not asked."""
        evaluator, rows = self.evaluator, list[Any]()
        if self.ends:
            rows = [[measured.ended[i] for i in numbers] for numbers in evaluator.in_order(None)]
        else:
            guarded = evaluator(factors, settle=settle)
            for question in evaluator.questions:
                of_columns = [(task.sign, guarded.examples[c.name][n]) for task, n in question for c in task.columns]
                if not all(isinstance(value, int | float) for _, value in of_columns):
                    text = "its metric is no average of the examples' scores; name another one (--guard TASK:METRIC)"
                    raise UserError(f"--guard {self.name}: {text}")
                rows.append([sign * value for sign, value in of_columns])
        return [None if None in row else float(sum(row) / len(row)) for row in rows]

    def check(self, plain: Sequence[float | None], scaled: Sequence[float | None]) -> GuardCheck:
        """How the questions' scores under factors compare with the plain model's; one question shows nothing."""
        import numpy as np

        from lpes_eval.compare import statistics

        both = np.array([pair for pair in zip(plain, scaled, strict=True) if None not in pair], dtype=float)
        difference = statistics.compare_paired(both[:, :1], both[:, 1:], replicates=2000).mean
        drop, ends = -difference.difference, [difference.low, difference.high]
        worse = bool(difference.high < -self.max_drop) and not difference.by_chance
        lower = not self.ends and all(task.sign < 0 for task in self.evaluator.objectives)
        sign = -1.0 if lower else 1.0  # as the metric has it
        return GuardCheck(
            plain=sign * float(both[:, 0].mean()),
            found=sign * float(both[:, 1].mean()),
            interval=[end if math.isfinite(end) else None for end in sorted(sign * end for end in ends)],
            over=float(drop - self.max_drop) if worse else 0.0,
            lower_is_better=lower,
        )

    def describe(self) -> dict[str, Any]:
        """What it asks and allows, as plain data."""
        asked = {} if self.ends else self.evaluator.describe()
        return {"name": self.name, "max_drop": self.max_drop, **asked}


@contextmanager
def named(guard: Mapping[str, Any]) -> Iterator[None]:
    """Within it, an error says which guard it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"--guard {guard['task']}: {error}") from None


def load(
    args: argparse.Namespace,
    evaluator: Evaluator,
    split: str,
    examples: int,
    measured_by: Callable[[Sequence[Objective]], Evaluator],
) -> list[Guard]:
    """The guards of a search, on so many examples of a split at most; ``measured_by`` makes other tasks' evaluators.

    ``UserError`` names a guard that was asked for and cannot be measured; another one is left out with a warning.
    """
    from search.tasks import load_tasks

    asked_for, guards = [guard for guard in args.guard if guard["task"] != "none"], []
    options = {**task_options(args), "split": split, "examples": examples, "weights": None}
    if split == "held_out":
        options["positions"] = None

    def build(task: str, metric: str | None, **size: int) -> Evaluator:
        changed = {"metrics": [metric] if metric else None, "metadata": options["metadata"] | size}
        return measured_by(load_tasks(evaluator.lm, [task], **options | changed))

    if len(asked_for) == len(args.guard):
        by_position = [objective for objective in evaluator.objectives if objective.by_position]
        if by_position and all(o.task.OUTPUT_TYPE == "generate_until" for o in evaluator.objectives):
            guards.append(Guard("answers that end", ENDS_MAX_DROP, evaluator, ends=True))
        for objective in by_position:
            setting, size = objective.size
            if size < 4:
                continue
            try:
                half = build(objective.name, None, **{setting: size // 2})
                guards.append(Guard(f"{objective.name}, {setting}={size // 2}", 0.01, half))
            except UserError as reason:
                logger.warning("%s is not guarded at half its length: %s", objective.name, reason)
    for guard in asked_for:
        with named(guard):
            other = build(guard["task"], guard["metric"])
        name = ":".join(filter(None, (guard["task"], guard["metric"])))
        if name in (each.name for each in guards):
            raise UserError(f"--guard {name}: is given twice")
        guards.append(Guard(name, guard["max_drop"], other))
    return guards


def settles(ended: Sequence[int | None]) -> bool:
    """Whether answers need not go on once their score is settled: where hardly any of the plain model's ended."""
    known = [one for one in ended if one is not None]
    return sum(known) <= ENDS_MAX_DROP * len(known)


def over(entry: Entry) -> float:
    """By how much an individual worsens its guards in all, beyond what is allowed; 0 where it worsens none."""
    return sum(guard.over for guard in entry.guards.values())


def rank(entry: Entry) -> float:
    """An individual's fitness, as an optimiser is told it."""
    worsened = over(entry)
    return -PENALTY * (1 + worsened) if worsened else entry.fitness
