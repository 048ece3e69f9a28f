"""Curves over depth against closed forms and a second implementation."""

from math import comb

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lpes_eval.curves import layer_factors

YS = st.integers(10, 20).map(lambda y: y / 10)
POINTS = st.dictionaries(st.integers(0, 31), YS, min_size=2, max_size=6).map(lambda ys: sorted(ys.items()))


def bernstein(values, t):
    d = len(values) - 1
    return sum(comb(d, k) * t**k * (1 - t) ** (d - k) * value for k, value in enumerate(values))


def densely(points, num_layers):
    """Eq. 3-6 read off a polyline of 20,000 points of the curve."""
    xs, ys = zip(*points, strict=True)
    t = np.linspace(0, 1, 20_001)
    return np.interp(np.linspace(xs[0], xs[-1], num_layers), bernstein(xs, t), bernstein(ys, t))


@pytest.mark.parametrize(
    "points", [[(0, 1.0), (1, 2.0), (2, 1.0), (31, 2.0)], [(3, 1.9), (9, 1.0), (12, 1.7), (20, 1.2), (30, 1.4)]]
)
def test_a_bezier_curve_gives_what_a_dense_sampling_of_it_gives(points):
    assert layer_factors("bezier", points, 32) == pytest.approx(densely(points, 32), abs=1e-5)


def test_linear_and_step_read_off_by_hand():
    assert layer_factors("linear", [(4, 1.1), (9, 1.9)], 5) == pytest.approx([1.1, 1.3, 1.5, 1.7, 1.9])
    points = [(0, 1.0), (2, 2.0), (3, 1.5)]
    assert layer_factors("linear", points, 7) == pytest.approx([1.0, 1.25, 1.5, 1.75, 2.0, 1.75, 1.5])
    assert layer_factors("step", points, 7) == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 1.5]
    assert layer_factors("free", [1.3, 1.1], 2) == [1.3, 1.1]


@given(POINTS, st.integers(2, 48), st.sampled_from(["bezier", "linear", "step"]))
@example([(0, 1.3), (1, 1.3), (5, 1.3)], 9, "bezier")  # equal points give exactly their factor
def test_factors_lie_within_the_range_of_the_points_and_meet_both_ends(points, num_layers, kind):
    ys = [y for _, y in points]
    factors = layer_factors(kind, points, num_layers)
    assert all(min(ys) <= s <= max(ys) for s in factors)
    assert (factors[0], factors[-1]) == pytest.approx((ys[0], ys[-1]))


@given(POINTS, st.integers(1, 48), st.integers(2, 9), st.integers(0, 9), st.sampled_from(["bezier", "step"]))
def test_stretching_and_shifting_x_changes_no_factor_to_the_last_bit(points, num_layers, stretch, shift, kind):
    moved = [(x * stretch + shift, y) for x, y in points]
    assert layer_factors(kind, moved, num_layers) == layer_factors(kind, points, num_layers)


def test_the_authors_reading_takes_evenly_spaced_t_from_the_last_point_to_the_first():
    """As their script sums it: over i of binomial(n, i) (1 - t)^i t^(n - i) y_i, whatever x is."""
    ys = [1.2, 1.35, 1.75, 1.5]
    expected = [
        sum(comb(3, i) * (1 - t) ** i * t ** (3 - i) * y for i, y in enumerate(ys)) for t in np.linspace(0, 1, 30)
    ]
    for xs in ((4.7, 10, 19.7, 28.8), (0, 1, 2, 31)):
        found = layer_factors("authors", list(zip(xs, ys, strict=True)), 30)
        assert found == pytest.approx(expected, abs=1e-12)
    assert (expected[0], expected[-1]) == (1.5, 1.2)
