"""The search for layer factors: ``python -m search.ga``, ``lpes-eval search``, and ``search()`` in a program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpes_eval.entries import Entry
    from lpes_eval.factors import Factors
    from search.held_out import Outcome
    from search.optimizers.base import Optimizer


@dataclass(frozen=True)
class Result:
    """What a search came to.

    ``shown`` and ``verdict`` say whether the factors are worth using: better than the plain model, beyond chance where
    held-out examples say so, and no guard made worse. ``history`` are the individuals, ``outcome`` has the scores.
    """

    factors: Factors
    shown: bool
    verdict: str
    history: list[Entry]
    outcome: Outcome
    folder: Path


def search(
    *tasks: str, optimizer: str | type[Optimizer] | None = None, preset: str = "default", **flags: Any
) -> Result:
    """Search layer factors, as the command does: progress is printed, and a search that was stopped goes on.

    Args:
        *tasks: as for ``lm_eval --tasks``; ``kv_retrieval`` by default.
        optimizer: the name of an optimiser, or a subclass of ``search.optimizers.base.Optimizer``.
        preset: as the flag.
        **flags: the command's other flags by name, such as ``model_args={"pretrained": "org/name"}``, ``budget="10m"``
            or ``positions=[0, 50, 100]``, each read as on the command line.

    Raises:
        UserError: a flag that is not known, or what the command refuses.
        KeyboardInterrupt: the best factors so far are in ``best_effort.json``, if there are better ones than 1.

    Example:

        >>> result = search("kv_retrieval", examples=12, held_out_examples=50)
        >>> result.factors.per_layer()
    """
    from lpes_eval.errors import UserError
    from search import config, ga, run
    from search.parser import words
    from search.report.pages import verdict

    kind = optimizer if isinstance(optimizer, type) else None
    flags = {"tasks": list(tasks) or None, "optimizer": None if kind else optimizer, "preset": preset} | flags
    try:
        args = config.read(words(flags))
    except UserError as error:
        raise UserError(f"search(): {error}") from None
    if args.dry_run:
        raise UserError("search(): dry_run: is the command's alone")
    args.optimizer = kind.__name__ if kind else args.optimizer
    config.complete(args, kind)
    made = run.load(args, kind=kind)
    outcome = ga.run(made)
    assert outcome is not None
    return Result(outcome.found, outcome.shown, verdict(made, outcome), made.journal.individuals, outcome, args.output)
