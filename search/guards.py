"""What factors must not cost: the same task at half the length, answers that end, and whatever other task a user names.

A guard is measured for every individual that is fitter than the plain model and than what the optimiser gives up. It
is worse where its mean over questions falls by more than is allowed, beyond chance: the 95 % interval of the difference
(``compare_paired``) lies below what is allowed. An individual that makes a guard worse ranks behind all that do not
(Deb, Comput. Methods Appl. Mech. Eng. 186, 2000).
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lpes_eval.errors import UserError
from lpes_eval.factors import Factors
from search.config import task_options
from search.engines import speed_options

if TYPE_CHECKING:
    from search.evaluator import Evaluator, Measured

logger = logging.getLogger(__name__)

PENALTY = 1e6
"""Individuals that worsen a guard are told to the optimiser as so much less fit than any score."""
LATE = "guards of {}"
"""The journal's key of guards that were measured after the entry of that key, which the search goes by."""


@dataclass
class Guard:
    """A score that must not fall by more than ``max_drop``.

    With ``ends`` it is the share of answers that end by themselves, which the search's own evaluator counts.
    ``seconds`` is the time that it has taken so far; what was known takes none.
    """

    name: str
    max_drop: float
    evaluator: Evaluator
    ends: bool = False
    seconds: float = 0.0

    def rows(self, factors: Factors, measured: Measured, share: float = 1.0) -> list[float | None]:
        """The score of every question under ``factors``, of which ``measured`` is the search's own measurement.

        A guard of its own asks this share of its questions. None stands where a question was not asked.
        """
        evaluator, rows = self.evaluator, []
        if self.ends:
            rows = [[measured.ended[i] for i in order] for order in evaluator.in_order(range(len(evaluator.questions)))]
        else:
            own = evaluator(factors, part=evaluator.part(share))
            self.seconds += own.seconds
            for question in evaluator.questions:
                found = [(task.sign, own.examples[column.name][n]) for task, n in question for column in task.columns]
                if not all(value is None or isinstance(value, int | float) for _, value in found):
                    raise UserError(
                        f"--guard {self.name}: its metric is no average of the examples' scores; name another one "
                        "(--guard TASK:METRIC)"
                    )
                rows.append([None if value is None else sign * value for sign, value in found])
        return [None if None in row else float(sum(row) / len(row)) for row in rows]  # type: ignore[arg-type]

    def prompts(self, share: float) -> int:
        """How many ``rows`` asks beyond the search's own measurement."""
        return 0 if self.ends else self.evaluator.asked(self.evaluator.part(share))

    def check(self, plain: Sequence[float | None], found: Sequence[float | None]) -> dict[str, Any]:
        """How the questions' scores compare with the plain model's: as plain data, for the journal.

        One question gives no interval, and shows nothing.
        """
        import numpy as np

        from lpes_eval.compare import statistics

        both = np.array([pair for pair in zip(plain, found, strict=True) if None not in pair], dtype=float)
        difference = statistics.compare_paired(both[:, :1], both[:, 1:], replicates=2000).mean
        drop, ends = -difference.difference, [difference.low, difference.high]
        worse = bool(difference.high < -self.max_drop) and not difference.by_chance
        lower = not self.ends and all(task.sign < 0 for task in self.evaluator.objectives)
        sign = -1.0 if lower else 1.0  # as the metric has it
        return {
            "plain": sign * float(both[:, 0].mean()),
            "found": sign * float(both[:, 1].mean()),
            "interval": [end if math.isfinite(end) else None for end in sorted(sign * end for end in ends)],
            "over": drop - self.max_drop if worse else 0.0,
            **({"lower_is_better": True} if lower else {}),
        }


def check_names(args: argparse.Namespace) -> None:
    """Refuse guards that stand for no task, before a model is loaded; raises ``UserError``."""
    from search import tasks

    for guard in args.guard:
        if guard["task"] != "none":
            with _named(guard):
                tasks.check_names([guard["task"]], args.include_path)


@contextmanager
def _named(guard: Mapping[str, Any]) -> Iterator[None]:
    """Within it, an error says which guard it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"--guard {guard['task']}: {error}") from None


def load(args: argparse.Namespace, evaluator: Evaluator, split: str, examples: int) -> list[Guard]:
    """The guards of a search, on the examples of a split; ``evaluator`` is the one of the search's tasks on it.

    Raises:
        UserError: a guard that was asked for cannot be measured. One that nobody asked for is left out with a warning.
    """
    from search.evaluator import Evaluator
    from search.tasks import load_tasks

    asked, guards = [guard for guard in args.guard if guard["task"] != "none"], []
    options = {**task_options(args), "split": split, "examples": examples, "weights": None}
    if split == "held_out":
        options["positions"] = None

    def measured_by(task: str, metric: str | None, **size: int) -> Evaluator:
        own = {"metrics": [metric] if metric else None, "metadata": options["metadata"] | size}
        found = load_tasks(evaluator.lm, [task], **options | own)
        return Evaluator(evaluator.lm, found, cache=evaluator.cache, **speed_options(args))

    if len(asked) == len(args.guard):  # nobody said none
        by_position = [objective for objective in evaluator.objectives if objective.by_position]
        if by_position and all(o.task.OUTPUT_TYPE == "generate_until" for o in evaluator.objectives):
            guards.append(Guard("answers that end", 0.02, evaluator, ends=True))
        for objective in by_position:
            setting: Any = getattr(objective.task, "SIZE", None)
            size = (objective.task.config.metadata or {}).get(setting) or 0
            if size < 4:
                continue
            try:
                half = measured_by(objective.name, None, **{setting: size // 2})
                guards.append(Guard(f"{objective.name}, {setting}={size // 2}", 0.01, half))
            except UserError as reason:
                logger.warning("%s is not guarded at half its length: %s", objective.name, reason)
    for guard in asked:
        with _named(guard):
            found = measured_by(guard["task"], guard["metric"])
        name = ":".join(filter(None, (guard["task"], guard["metric"])))
        if name in (each.name for each in guards):
            raise UserError(f"--guard {name}: is given twice")
        guards.append(Guard(name, guard["max_drop"], found))
    return guards


def over(entry: Mapping[str, Any]) -> float:
    """By how much an individual worsens its guards in all, beyond what is allowed; 0 where it worsens none."""
    return float(sum(guard["over"] for guard in entry.get("guards", {}).values()))


def rank(entry: Mapping[str, Any]) -> float:
    """An individual's fitness, as an optimiser is told it."""
    worsened = over(entry)
    return -PENALTY * (1 + worsened) if worsened else float(entry["fitness"])
