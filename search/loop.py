"""The search itself: ask for individuals, evaluate each one once, tell their fitness, until the optimiser is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lpes_eval.errors import UserError
from search.journal import Journal
from search.optimizer import Individual, Optimizer

Evaluate = Callable[[Individual], dict[str, Any]]
"""Measures an individual: plain data with at least ``fitness``."""
Key = Callable[[Individual], str]
"""What individuals have in common that are evaluated alike: their factors, as many curves give the same."""


def restore(optimizer: Optimizer, journal: Journal, key: Key) -> None:
    """Bring a fresh optimiser to where the journal's last state was.

    A state that cannot be used is left aside, with a note in the journal: the optimiser then draws the generations so
    far again, and the journal still knows their fitness. So is one from before lines of the journal were deleted, as
    their individuals would not be asked for any more.
    """
    if (state := journal.load_state()) is None:
        return
    fresh = optimizer.state_dict()
    try:
        individuals = state.pop("individuals", 0)
        optimizer.load_state_dict(state)
        complete = len(journal.individuals) >= individuals and (
            optimizer.generation == 0 or key(optimizer.best[0]) in journal.entries
        )
        why = "" if complete else "knows individuals that the journal does not"
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        why = "is damaged"
    if why:
        optimizer.load_state_dict(fresh)
        journal.leave_state(why)


def run(
    optimizer: Optimizer,
    evaluate: Evaluate,
    journal: Journal,
    key: Key,
    watch: Callable[[Individual, dict[str, Any], bool], None] = lambda individual, entry, new: None,
) -> tuple[Individual, dict[str, Any]]:
    """Search on from where the optimiser is, which ``restore`` has brought there.

    Args:
        optimizer: made with the journal's settings.
        evaluate: called once for every key that the journal does not know.
        journal: an entered journal.
        key: what individuals have in common that are evaluated alike.
        watch: is told of every individual: its entry, and whether it was evaluated now.

    Returns:
        The fittest individual, and the journal's entry for its factors.
    """
    while not optimizer.done:
        fitness = []
        for individual in optimizer.ask():
            name = key(individual)
            made = {"generation": optimizer.generation, **individual.to_dict()}
            if new := name not in journal.entries:
                journal.record(name, {**made, **evaluate(individual)})
            elif name not in journal.individuals:  # measured as something to beat, and an individual from now on
                journal.record(name, {**journal.entries[name], **made})
            entry = journal.entries[name]
            watch(individual, entry, new)
            fitness.append(entry["fitness"])
        optimizer.tell(fitness)
        journal.save_state(optimizer.state_dict() | {"individuals": len(journal.individuals)})
    fittest, _ = optimizer.best
    return fittest, journal.entries[key(fittest)]
