"""The error rate of giving up early: exact of small populations, and simulated of large ones."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.early_stopping import Bet, Race

ERROR = 0.05


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.integers(0, 4), min_size=2, max_size=5), surplus=st.sampled_from([0.0, 0.5]))
def test_a_bet_that_cannot_win_is_a_fair_game_at_best(values, surplus):
    """The mean over all orders, at every step: 1 where the total is just reached, and less where it is exceeded."""
    total = sum(values) - surplus
    orders = list(itertools.permutations(values))
    wealth = [0.0] * len(values)
    for order in orders:
        bet = Bet(len(values), 0, 4, total)
        for step, value in enumerate(order):
            bet.take(value)
            wealth[step] += bet.wealth / len(orders)
    for mean in wealth:
        assert mean <= 1 + 1e-9
        assert surplus > 0 or mean == pytest.approx(1)


def population(rng, questions, shared):
    """The parent's and an individual's answers, 1 or 0, with equal totals."""
    rival = [float(rng.random() < 0.6) for _ in range(questions)]
    moved = [k for k in range(questions) if rng.random() > shared]
    own = list(rival)
    for k, other in zip(moved, rng.sample(moved, len(moved)), strict=True):
        own[k] = rival[other]
    return rival, own


def run(rival, own, order, error):
    """How many questions were asked before it was given up; None if it was not."""
    n = len(rival)
    race = Race([0.0] * n, [1 / n] * n, [y / n for y in rival], error)
    for asked, k in enumerate(order, 1):
        race.take(k, own[k] / n)
        if race.lost:
            return asked
    return None


@pytest.mark.parametrize("shared", [0.0, 0.5])
def test_individuals_that_reach_the_parent_are_given_up_more_rarely_than_stated(shared):
    rng, runs, lost = random.Random(1), 500, 0
    for _ in range(runs):
        rival, own = population(rng, 100, shared)
        lost += run(rival, own, rng.sample(range(100), 100), ERROR) is not None
    assert lost <= ERROR * runs + 3 * math.sqrt(ERROR * (1 - ERROR) * runs)


@pytest.mark.parametrize(("accuracy", "at_most"), [(0.0, 12), (0.2, 40), (0.4, 130)])
def test_poor_individuals_are_given_up_soon(accuracy, at_most):
    """By the median, against a parent at 0.6. Proof would take 80 questions for the first, and 120 for the next."""
    rng, asked = random.Random(2), []
    for _ in range(20):
        rival, own = ([float(rng.random() < rate) for _ in range(200)] for rate in (0.6, accuracy))
        asked.append(run(rival, own, rng.sample(range(200), 200), error=0.01) or 200)
    assert statistics.median(asked) <= at_most


def test_what_is_proved_is_given_up_whatever_the_error_rate():
    """The last of the questions cannot make up for the first ones any more."""
    assert run([1.0] * 120 + [0.0] * 80, [0.0] * 200, range(200), error=1e-300) == 82  # 81 wrong ones are the proof


def test_tasks_where_lower_is_better_and_units_of_unequal_weight():
    rng = random.Random(3)
    weights = [rng.random() for _ in range(60)]
    rival = [-w * (rng.random() < 0.2) for w in weights]
    worse = [-w * (rng.random() < 0.7) for w in weights]
    for own, lost in ((rival, False), ([0.0] * 60, False), (worse, True)):
        race = Race([-w for w in weights], [0.0] * 60, rival, 0.01)
        for k in rng.sample(range(60), 60):
            race.take(k, own[k])
        assert race.lost == lost
