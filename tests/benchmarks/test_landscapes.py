"""Searches on simulated models: the truth that they are held against, and the noise that they see."""

import numpy as np
import pytest

from benchmarks.landscapes import PLAIN, SEARCHES, Simulation, landscapes, search, shown

LANDSCAPES = {landscape.name: landscape for landscape in landscapes(32)}
ONES = [1.0] * 32


def test_what_there_is_to_find_is_where_the_formula_says():
    for name, landscape in LANDSCAPES.items():
        best = {"sparse": 1.4, "mixed": 1.3}.get(name, 1.0)
        factors = [best if 0.25 <= h / 31 < 0.4 else 1.0 for h in range(32)]
        if name in ("sparse", "mixed"):
            assert landscape.value(factors) > landscape.value(ONES) + 20
            assert landscape.value([best] * 32) < landscape.value(factors)
        if name in ("only hurts", "nothing"):
            assert landscape.value([1.2] * 32) <= landscape.value(ONES)
        np.testing.assert_allclose(LANDSCAPES["nothing"].accuracy(factors), PLAIN)


def test_answers_are_right_as_often_as_the_landscape_says_and_paired_across_factors():
    landscape = LANDSCAPES["smooth"]
    simulation = Simulation(landscape, 20_000, 0)
    plain, other = simulation.answers(ONES), simulation.answers([1.0] * 31 + [1.1])
    np.testing.assert_allclose(plain.mean(0), PLAIN, atol=0.015)
    assert np.array_equal(plain, simulation.answers(ONES))
    assert 0 < (plain != other).mean() < 0.1  # independent answers would differ in more than 0.4 of all cases


@pytest.mark.parametrize("kind", [kind for kind in SEARCHES if "paper" not in kind.title], ids=lambda kind: kind.title)
def test_every_search_ends_with_factors_and_says_what_it_asked(kind):
    factors, prompts = search(kind, LANDSCAPES["nothing"], seed=0)
    assert len(factors) == 32
    assert all(1 <= factor <= 2 for factor in factors)
    assert 0 < prompts <= 3 * kind.examples * 700
    assert search(kind, LANDSCAPES["nothing"], seed=0) == (factors, prompts)


def test_the_default_finds_a_band_and_hands_over_nothing_where_there_is_nothing():
    factors, _ = search(SEARCHES[0], LANDSCAPES["mixed"], seed=1)
    assert LANDSCAPES["mixed"].value(factors) > LANDSCAPES["mixed"].value(ONES) + 15
    assert shown(LANDSCAPES["mixed"], factors, seed=1)
    assert not shown(LANDSCAPES["nothing"], [1.2] * 32, seed=1)
