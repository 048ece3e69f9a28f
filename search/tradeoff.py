"""Mean against worst position against guards: what the individuals of a search trade for each other.

The fitness weighs the positions beforehand (the lambdas). ``--choose`` weighs them afterwards, among the individuals
that the search measured in full; nothing of these is measured again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from search.guards import over

if TYPE_CHECKING:
    from search.evaluator import Evaluator
    from search.tasks import Column, Objective


class Trade(NamedTuple):
    """An individual's scores, so that higher is better.

    Attributes:
        entry: its entry in the journal.
        mean: over tasks and positions.
        worst: the lowest of them.
        harm: by how much it worsens guards beyond what is allowed.
    """

    entry: Mapping[str, Any]
    mean: float
    worst: float
    harm: float


def trades(entries: Sequence[Mapping[str, Any]], evaluator: Evaluator) -> list[Trade]:
    """Those of ``entries`` that were measured in full, on all search examples."""
    found = []
    for entry in entries:
        if entry.get("prompts") == evaluator.prompts and "examples" in entry:
            scores = [objective.sign * entry["scores"][name] for name, (objective, _) in evaluator.columns.items()]
            found.append(Trade(entry, sum(scores) / len(scores), min(scores), over(entry)))
    return found


def front(found: Sequence[Trade]) -> list[Trade]:
    """What no other one beats (Pareto), the best mean first; of equals the first that was measured."""
    goals = {(trade.mean, trade.worst, -trade.harm): trade for trade in reversed(found)}

    def beaten(mine: tuple[float, float, float]) -> bool:
        """Whether another is nowhere worse and somewhere better."""
        return any(theirs != mine and all(a >= b for a, b in zip(theirs, mine, strict=True)) for theirs in goals)

    return [goals[each] for each in sorted(goals, reverse=True) if not beaten(each)]


def ranked(found: Sequence[Trade], choice: str | list[float], evaluator: Evaluator) -> list[Trade]:
    """In the order of ``choice`` (``mean``, ``worst``, or one weight a position), the fitter of equals first."""
    columns = list(evaluator.columns.values())
    positions = dict.fromkeys(column.position for _, column in columns if column.position is not None)
    weights: dict[float, float] = {}
    if isinstance(choice, list):
        weights = dict(zip(positions, (weight / sum(choice) for weight in choice), strict=True))

    def weight(objective: Objective, column: Column) -> float:
        """A position's is its share of its task's; a task without positions keeps its own."""
        if column.position is None:
            return column.weight
        return weights[column.position] * sum(each.weight for each in objective.columns)

    def value(trade: Trade) -> tuple[float, float, float]:
        first = trade.worst if choice == "worst" else trade.mean
        if isinstance(choice, list):
            first = sum(weight(task, c) * task.sign * trade.entry["scores"][c.name] for task, c in columns)
        return first, trade.mean, trade.entry["fitness"]

    return sorted(found, key=value, reverse=True)
