"""Searches on simulated models: the truth that they are held against, and the noise that they see."""

import numpy as np
import pytest

from benchmarks import recorded
from benchmarks.landscapes import PLAIN, SEARCHES, factors_of, landscapes, real, search, shown, simulation
from lpes_eval.curves import layer_factors

LANDSCAPES = {landscape.name: landscape for landscape in landscapes(32)}
ONES = [1.0] * 32


def test_what_there_is_to_find_is_where_the_formula_says():
    for name, best in {"sparse": 1.4, "mixed": 1.3}.items():
        factors = [best if 0.25 <= h / 31 < 0.4 else 1.0 for h in range(32)]
        assert LANDSCAPES[name].value(factors) > LANDSCAPES[name].value(ONES) + 20
        assert LANDSCAPES[name].value([best] * 32) < LANDSCAPES[name].value(factors)
    assert LANDSCAPES["only hurts"].value([1.2] * 32) < LANDSCAPES["only hurts"].value(ONES)
    np.testing.assert_allclose(LANDSCAPES["nothing"].accuracy([1.2] * 32), PLAIN)


def test_answers_are_right_as_often_as_the_landscape_says_and_paired_across_factors():
    landscape = LANDSCAPES["smooth"]
    answers = simulation(landscape, 20_000, 0)
    plain, other = answers(ONES), answers([1.0] * 31 + [1.1])
    np.testing.assert_allclose(plain.mean(0), PLAIN, atol=0.015)
    assert np.array_equal(plain, answers(ONES))
    assert 0 < (plain != other).mean() < 0.1  # independent answers would differ in more than 0.4 of all cases


@pytest.mark.parametrize("kind", [kind for kind in SEARCHES if "paper" not in kind.title], ids=lambda kind: kind.title)
def test_every_search_ends_with_factors_and_says_what_it_asked(kind):
    found = search(kind, LANDSCAPES["nothing"], seed=0)
    assert len(found.factors) == 32
    assert all(1 <= factor <= 2 for factor in found.factors)
    assert 0 < found.path[-1][0] <= found.prompts <= 3 * kind.examples * 700
    again = search(kind, LANDSCAPES["nothing"], seed=0)
    assert (again.factors, again.prompts) == (found.factors, found.prompts)


def test_the_default_finds_a_band_and_hands_over_nothing_where_there_is_nothing():
    factors, *_ = search(SEARCHES[0], LANDSCAPES["mixed"], seed=1)
    assert LANDSCAPES["mixed"].value(factors) > LANDSCAPES["mixed"].value(ONES) + 15
    assert shown(LANDSCAPES["mixed"], factors, seed=1)
    assert not shown(LANDSCAPES["nothing"], [1.2] * 32, seed=1)


def test_a_curve_is_that_of_lpes_eval():
    points = ((0, 1.0), (1, 2.0), (30, 1.0), (31, 1.6))
    assert factors_of(points, "bezier", 32) == pytest.approx(layer_factors("bezier", points, 32), abs=1e-5)


def test_gradient_descent_goes_down_the_landscape():
    (kind,) = (kind for kind in SEARCHES if kind.optimizer == "gradient")
    smooth = LANDSCAPES["smooth"]
    best = 1 + 0.5 * np.sin(np.pi * np.arange(32) / 31) ** 2
    assert search(kind, smooth, seed=0).factors == pytest.approx(best, abs=0.1)


@pytest.mark.parametrize("name", recorded.MODELS)
def test_a_recorded_model_is_near_what_was_recorded(name):
    """Held out, a vector's accuracy is predicted better than by its nearest neighbour or by the mean of all."""
    landscape, rows = real(name), recorded.load(name)
    accuracy = [100 * np.mean([part.count("1") / len(part) for part in row["right"]]) for row in rows]
    surrogate, nearest = landscape.error
    assert surrogate < nearest < np.std(accuracy)
    wrong = [abs(landscape.value(row["factors"]) - a) for row, a in zip(rows, accuracy, strict=True)]
    assert np.mean(wrong) < surrogate
