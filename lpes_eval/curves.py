"""From control points to one factor a layer (Eq. 3-6 and Appendix D of the LPES paper).

A curve is drawn over depth by control points ``(x, y)``: ``x`` places a point between the first and the last scaled
layer, ``y`` is a scaling factor. Layers stand at even distances, so only the *ratios* of the ``x`` matter. Five kinds:

=========  ============================================================================================
bezier     degree ``d = len(points) - 1 >= 1``; ``s_h = y(t(x_h))``, ``t`` by bisection (Eq. 3-6, App. D)
linear     straight lines between neighbouring points (Tables 6 and 16)
step       the ``y`` of the last point at or before the layer (Table 6)
free       one ``y`` a layer and no curve: the paper's "brute force" (Table 7)
authors    as the authors' working repository reads a Bezier curve, other than Eq. 5 and 6: ``y`` at evenly spaced
           ``t``, whatever the ``x``, and the first point is the last layer's
=========  ============================================================================================
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, get_args

CurveKind = Literal["bezier", "linear", "step", "free", "authors"]
KINDS: tuple[str, ...] = get_args(CurveKind)
Point = tuple[float, float]


def layer_factors(kind: CurveKind, points: Sequence[Point] | Sequence[float], num_layers: int) -> list[float]:
    """Evaluate a curve at each of ``num_layers`` (L in Eq. 6), within the range of the points' ``y``.

    ``points`` are at least two ``(x, y)`` with strictly increasing ``x``; for ``free``, the factors.
    """
    if kind == "free":
        return list(points)  # type: ignore[arg-type]
    xs, ys = zip(*points, strict=True)
    # Places along the curve, 0 at the first control point and 1 at the last: the form in which only ratios are left.
    knots = tuple((x - xs[0]) / (xs[-1] - xs[0]) for x in xs)
    places = [h / max(1, num_layers - 1) for h in range(num_layers)]  # Eq. 6
    low, high = min(ys), max(ys)
    return [min(max(SHAPES[kind](knots, ys, place), low), high) for place in places]


def _bezier_at(knots: tuple[float, ...], ys: tuple[float, ...], place: float) -> float:
    """``y(t)`` at the ``t`` where ``x(t) = place`` (Eq. 5); ``x(t)`` rises strictly because the knots do."""
    low, high = 0.0, 1.0
    while (t := (low + high) / 2) not in (low, high):  # until no double lies between
        if de_casteljau(knots, t) < place:
            low = t
        else:
            high = t
    return de_casteljau(ys, high)


def de_casteljau(values: Sequence[float], t: float) -> float:
    """A Bernstein sum (Eq. 3, 4) by repeated interpolation: stable, and exact where all values are equal."""
    level = list(values)
    while len(level) > 1:
        level = [a + t * (b - a) for a, b in pairwise(level)]
    return level[0]


def _linear_at(knots: Sequence[float], ys: Sequence[float], place: float) -> float:
    k = min(bisect_right(knots, place), len(knots) - 1) - 1
    return ys[k] + (place - knots[k]) / (knots[k + 1] - knots[k]) * (ys[k + 1] - ys[k])


SHAPES: dict[str, Callable[[tuple[float, ...], tuple[float, ...], float], float]] = {
    "bezier": _bezier_at,
    "linear": _linear_at,
    "step": lambda knots, ys, place: ys[bisect_right(knots, place) - 1],
    "authors": lambda knots, ys, place: de_casteljau(ys[::-1], place),
}
"""A curve's value at a place between 0 and 1, from the places and the values of its control points."""
