"""What is to be measured of an individual: plain data, which a search can make without a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lpes_eval.factors import Factors
from search.early_stopping import ERROR

Examples = Mapping[str, Sequence[Any]]
"""Each column's metric for every example, by the column's name."""


@dataclass(frozen=True)
class Cutoff:
    """The fitness below which an individual is of no use, and may be given up.

    Attributes:
        fitness: what has to be reached.
        examples: every example's score of the individual that has it, to compare with (``search.early_stopping``).
        error: how probable it may be that an individual is given up which would have reached it; 0 waits for proof.
    """

    fitness: float
    examples: Examples
    error: float = ERROR


@dataclass(frozen=True)
class Job:
    """What is to be measured of an individual.

    Attributes:
        factors: the individual's.
        split: ``search`` or ``held_out``, whose examples are asked.
        part: of these examples the first that is asked, and the one after the last; None for all.
        measure: ``score``, or ``likelihood`` of the reference answers.
        cutoff: when to give up.
        guarded_above: the fitness above which the guards are measured too.
        plain_rows: of the plain model, each guard's score of every question; None to have these scores recorded.
    """

    factors: Factors
    split: str = "search"
    part: tuple[int, int] | None = None
    measure: str = "score"
    cutoff: Cutoff | None = None
    guarded_above: float = math.inf
    plain_rows: Mapping[str, Sequence[float | None]] | None = field(default=None, repr=False)
