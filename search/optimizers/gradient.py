"""Gradient descent on the factors (App. C): the negative control.

The factors are the only parameters; the loss is the cross-entropy of the reference answer's tokens behind the prompt
(``search.answer_loss``). The paper finds that this makes the model worse.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lpes_eval.errors import UserError
from lpes_eval.flags import at_least, positive
from lpes_eval.rng import stream
from search.optimizers.base import Config, Optimizer, setting
from search.space import Y_HIGH, Y_LOW, Individual, Points


@dataclass(frozen=True)
class GradientConfig(Config):
    """App. C."""

    learning_rate: float = setting(1e-5, positive, "Adam's", "X")
    epoch_samples: int = setting(2000, at_least(1), "examples an epoch (a generation), drawn by the lambdas")
    gradient_batch: int = setting(32, at_least(1), "examples a step")


class GradientDescent(Optimizer):
    """Adam on the factors of all layers, an epoch a generation, kept between 1 and 2.

    Its ``best`` is the individual of the last epoch, not the fittest one: what descending leads to.
    """

    Config = GradientConfig
    title = "gradient descent on one factor a layer (App. C), the negative control"
    needs_every_fitness = descends = True
    ignores = ("curve",)
    BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # Adam (arXiv 1412.6980), Algorithm 1

    @classmethod
    def settle(cls, args: Namespace) -> None:
        """One factor a layer, off the grid; at least one batch an epoch."""
        args.curve, args.continuous = "free", True
        if args.epoch_samples < args.gradient_batch:
            raise UserError(
                f"--epoch_samples {args.epoch_samples}: less than one --gradient_batch, {args.gradient_batch}"
            )

    def _set_up(self, model: Any) -> None:
        from search.answer_loss import AnswerLoss  # imports torch, which --help does not need

        self._loss = AnswerLoss(*model) if isinstance(model, tuple) else model
        self._unscaled = self._loss.num_layers - self.space.L
        self._steps = self.config.epoch_samples // self.config.gradient_batch
        self._s = [y for _, y in self.start]
        self._m, self._v, self._t = [0.0] * self.space.L, [0.0] * self.space.L, 0
        self.max_evaluations = self.generations + 1  # the start, and the end of each epoch
        steps, batch = self._steps, self.config.gradient_batch
        samples = f"{self.generations} x {steps * batch:,} examples"
        self.also = f"{samples} forwards and backwards, {steps} batches of {batch}"

    def _propose(self) -> list[list[Individual]]:
        before = self._points()
        if self.generation == 0:
            return [[Individual(before, "start")]]
        if state := self.history.get(self.generation, {}).get("state"):  # descended before the search was interrupted
            self._s, self._m, self._v, self._t = list(state["s"]), list(state["m"]), list(state["v"]), state["t"]
        else:
            self._descend()
        kept = {"s": list(self._s), "m": list(self._m), "v": list(self._v), "t": self._t}
        return [[Individual(self._points(), "gradient", (before,), kept)]]

    def _descend(self) -> None:
        rng = stream("gradient", self._seed, self.generation)
        for _ in range(self._steps):
            numbers = [self._loss.choose(rng.random(), rng.random()) for _ in range(self.config.gradient_batch)]
            _, gradient = self._loss([1.0] * self._unscaled + self._s, numbers)
            self._step(gradient[self._unscaled :])

    def _step(self, gradient: Sequence[float]) -> None:
        self._t += 1
        for h, g in enumerate(gradient):
            self._m[h] = self.BETA_1 * self._m[h] + (1 - self.BETA_1) * g
            self._v[h] = self.BETA_2 * self._v[h] + (1 - self.BETA_2) * g * g
            m_hat = self._m[h] / (1 - self.BETA_1**self._t)
            v_hat = self._v[h] / (1 - self.BETA_2**self._t)
            s = self._s[h] - self.config.learning_rate * m_hat / (v_hat**0.5 + self.EPSILON)
            self._s[h] = min(max(s, Y_LOW), Y_HIGH)

    def _points(self) -> Points:
        return tuple((x, s) for (x, _), s in zip(self.space.start(), self._s, strict=True))

    def _learn(self, survivors: dict[Points, float], fitness: Sequence[float]) -> None:
        self._best = self.ask()[0], float(fitness[0])


OPTIMIZER = GradientDescent
