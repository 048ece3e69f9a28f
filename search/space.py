"""What is searched: control points, the individual that holds them, and what is to be measured of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from lpes_eval.errors import UserError
from lpes_eval.factors import Factors
from lpes_eval.rng import below

Points = tuple[tuple[float, float], ...]
"""(P_0, ..., P_d): one pair (P_k^x, P_k^y) a control point."""

Y_LOW, Y_START, Y_HIGH = 1.0, 1.5, 2.0  # Eq. 8 and 9
X_STEPS, Y_STEPS = 1, 10
"""Table 9: grid steps in one unit. Steps are counted as integers, so nothing drifts off the grid."""


@dataclass(frozen=True)
class Individual:
    """A candidate of a search, the operator that made it, and the points that it was made from."""

    points: Points
    origin: str
    parents: tuple[Points, ...] = ()


@dataclass(frozen=True)
class Space:
    """The ``d + 1`` control points that may be searched, over ``L`` scaled layers (App. B).

    ``grid`` is Table 9's, 1 in x and 0.1 in y; ``fixed_x`` leaves x where Eq. 8 puts them; ``low`` is the least y.
    """

    L: int
    d: int = 3
    grid: bool = True
    fixed_x: bool = False
    low: float = Y_LOW

    def __post_init__(self) -> None:
        """Refuse what Eq. 10 leaves no room for."""
        if self.d < 1 or self.L < 2 or (self.grid and self.d > self.L - 1):
            grid = f"on the grid their x are different whole numbers from 0 to {self.L - 1} (Table 9, Eq. 10)"
            way = "take fewer --control_points, or leave the grid (--continuous)"
            raise UserError(f"{self.d + 1} control points do not fit {self.L} layer(s): {grid}; {way}")

    @classmethod
    def free(cls, L: int, grid: bool = True, low: float = Y_LOW) -> Space:
        """One factor a layer and no curve (Table 7, "brute force"): a control point stands on every layer."""
        return cls(L, L - 1, grid, fixed_x=True, low=low)

    def start(self, y: float = Y_START) -> Points:
        """The same y everywhere, at the x of Eq. 8 (where the search sets out from 1.5), rounded to the grid."""
        return self.nearest(tuple((k * (self.L - 1) / self.d, y) for k in range(self.d + 1)))

    def nearest(self, points: Points) -> Points:
        """The points themselves, or where they come to stand on the grid."""
        if not self.grid:
            return points
        return tuple((float(math.floor(x + 0.5)), math.floor(y * Y_STEPS + 0.5) / Y_STEPS) for x, y in points)

    def contains(self, points: Points) -> bool:
        """Whether the points obey Eq. 10, the range of y, and the grid."""
        return (
            len(points) == self.d + 1
            and points[0][0] >= 0
            and points[-1][0] <= self.L - 1
            and all(a < b for (a, _), (b, _) in pairwise(points))
            and all(self.allows(y) for _, y in points)
            and (not self.fixed_x or all(x == at for (x, _), (at, _) in zip(points, self.start(), strict=True)))
            and (not self.grid or all(x == round(x) for x, _ in points))
        )

    def allows(self, y: float) -> bool:
        """Whether a control point may stand at this height (Eq. 9), on Table 9's grid or off it."""
        return self.low <= y <= Y_HIGH and (not self.grid or y == round(y * Y_STEPS) / Y_STEPS)

    @property
    def heights(self) -> str:
        """These heights, as a refusal names them."""
        span = f"{self.low:g} to {Y_HIGH:g}"
        return f"tenths from {span} (--continuous leaves the grid)" if self.grid else f"a factor from {span}"

    def uniform(self, low: float, high: float, steps: int, rng: Random) -> float:
        """A number from ``[low, high]``, both ends included on a grid of ``steps`` in one unit."""
        if not self.grid:
            return min(low + (high - low) * rng.random(), high)
        first, last = math.ceil(low * steps - 1e-9), math.floor(high * steps + 1e-9)
        return (first + below(last - first + 1, rng)) / steps


Examples = Mapping[str, Sequence[Any]]
"""Each column's metric for every example, by the column's name."""


@dataclass(frozen=True)
class Cutoff:
    """The fitness of an individual, with its examples' scores; what is less fit may be given up early.

    ``error`` is the highest probability that one is given up which would have reached it.
    """

    fitness: float
    examples: Examples
    error: float


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
    settle: bool = False
    """Whether answers need not go on once their score is settled."""
    guarded_above: float = math.inf
    """The fitness above which the guards are measured too."""
    plain_rows: Mapping[str, Sequence[float | None]] | None = field(default=None, repr=False)
    """Of the plain model, each guard's score of every question; None to have these scores recorded."""
