"""Gradient descent on the factors, against finite differences."""

import pytest

from lpes_eval import rope
from lpes_eval.errors import UserError
from search.answer_loss import AnswerLoss
from search.evaluator import Evaluator
from search.optimizers.base import drive
from search.optimizers.gradient import GradientConfig, GradientDescent
from search.space import Space


@pytest.fixture(scope="module")
def loss(toy_lm, load):
    return AnswerLoss(toy_lm, load("toy", lambdas=[0.2, 0.3, 0.5]))


def test_the_loss_is_the_likelihood_of_the_answers_under_these_factors(toy_lm, load, loss):
    evaluator = Evaluator(toy_lm, load("toy"))
    for factors in ([1.5, 1.5, 1.5], [1.0, 1.34, 1.9]):
        likelihood = evaluator.likelihood(factors).examples
        expected = -(likelihood["toy@0"][1] + likelihood["toy@100"][3]) / 2
        assert loss(factors, [(0, 1), (2, 3)])[0] == pytest.approx(expected, rel=1e-4)
    assert rope.applied(toy_lm.model) is None


def test_the_gradient_is_the_slope_of_the_loss(toy_lm, loss):
    factors, examples = [1.2, 1.5, 1.7], [(0, 0), (1, 2), (2, 4)]
    toy_lm.model.double()  # finite differences need the digits; angles stay in float32, hence the wide steps
    try:
        _, gradient = loss(factors, examples)
        for h in range(3):
            up, down = list(factors), list(factors)
            up[h] += 2e-3
            down[h] -= 2e-3
            slope = (loss(up, examples)[0] - loss(down, examples)[0]) / 4e-3
            assert gradient[h] == pytest.approx(slope, rel=0.05, abs=2e-3)
        assert any(abs(g) > 1e-2 for g in gradient)
    finally:
        toy_lm.model.float()
    assert all(parameter.requires_grad and parameter.grad is None for parameter in toy_lm.model.parameters())


def test_positions_are_drawn_by_their_weights(loss):
    drawn = [loss.choose(k / 1000, 0.999)[0] for k in range(1000)]
    assert [drawn.count(part) for part in range(3)] == pytest.approx([200, 300, 500], abs=1)
    assert loss.choose(0.0, 0.999)[1] == len(loss._examples[0]) - 1


class Planned:
    num_layers = 3
    choose = staticmethod(lambda uniform, other: (0, 0))

    def __init__(self, gradients):
        self.gradients = iter(gradients)

    def __call__(self, factors, numbers):
        return 0.0, next(self.gradients)


def test_each_step_is_adams_and_stays_within_the_bounds_of_equation_9():
    """Algorithm 1 of arXiv 1412.6980, written out."""
    gradients = [[0.1, -2.0, 0.0], [0.3, 1.0, -0.2], [-0.5, 0.4, 0.1], *[[1.0, -1.0, 0.0]] * 50]
    config, generations = GradientConfig(epoch_samples=2, gradient_batch=2, learning_rate=0.05), []
    optimizer = GradientDescent(Space.free(3, grid=False), config, generations=53, model=Planned(gradients), seed=1)

    def measure(generation):
        generations.extend([y for _, y in individual.points] for individual in generation.individuals)
        return [0.0]

    last = drive(optimizer, measure)
    _, *ours = generations
    assert [y for _, y in last.points] == ours[-1]  # not the fittest, which is the first
    m, v, s = [0.0] * 3, [0.0] * 3, [1.5] * 3
    for t, (g, factors) in enumerate(zip(gradients[:3], ours, strict=False), 1):
        for h in range(3):
            m[h] = 0.9 * m[h] + 0.1 * g[h]
            v[h] = 0.999 * v[h] + 0.001 * g[h] ** 2
            s[h] -= 0.05 * (m[h] / (1 - 0.9**t)) / ((v[h] / (1 - 0.999**t)) ** 0.5 + 1e-8)
        assert factors == pytest.approx(s, abs=1e-9)
    assert ours[-1][:2] == [1.0, 2.0]


def test_it_needs_reference_answers(toy_lm, load):
    with pytest.raises(UserError, match="toy_choice"):
        AnswerLoss(toy_lm, load("toy_choice"))
