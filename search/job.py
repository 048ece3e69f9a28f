"""What is to be measured of an individual: plain data, which a search can make without a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lpes_eval.factors import Factors

Examples = Mapping[str, Sequence[Any]]
"""Each column's metric for every example, by the column's name."""


@dataclass(frozen=True)
class Cutoff:
    """The fitness below which an individual is of no use, and may be given up (``search.early_stopping``)."""

    fitness: float
    examples: Examples
    """Every example's score of the individual that has this fitness."""
    error: float
    """How probable it may be that an individual is given up which would have reached it."""


@dataclass(frozen=True)
class Job:
    """What is to be measured of an individual."""

    factors: Factors
    split: str = "search"
    """``search`` or ``held_out``, whose examples are asked."""
    part: tuple[int, int] | None = None
    """Of these examples the first that is asked, and the one after the last; None for all."""
    measure: str = "score"
    """``score``, or ``likelihood`` of the reference answers."""
    cutoff: Cutoff | None = None
    guarded_above: float = math.inf
    """The fitness above which the guards are measured too."""
    plain_rows: Mapping[str, Sequence[float | None]] | None = field(default=None, repr=False)
    """Of the plain model, each guard's score of every question; None to have these scores recorded."""
