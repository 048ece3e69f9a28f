"""Gradient descent on the factors (App. C): the negative control, which in the paper makes the model worse."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from lpes_eval.errors import UserError
from lpes_eval.flags import at_least, positive
from lpes_eval.rng import stream
from search.optimizers.base import Config, Generation, Optimizer, Steps, setting
from search.space import Y_HIGH, Y_LOW, Individual


@dataclass(frozen=True)
class GradientConfig(Config):
    """App. C."""

    learning_rate: float = setting(1e-5, positive, "Adam's", "X")
    epoch_samples: int = setting(2000, at_least(1), "examples an epoch (a generation), drawn by the lambdas")
    gradient_batch: int = setting(32, at_least(1), "examples a step")


class GradientDescent(Optimizer):
    """Adam on the factors of all layers, an epoch a generation, kept between 1 and 2.

    The loss is the cross-entropy of the reference answers (``search.answer_loss``). It ends with the individual of the
    last epoch, not the fittest one. A search that goes on descends again from its start.
    """

    Config = GradientConfig
    title = "gradient descent on one factor a layer (App. C), the negative control"
    free = descends = True

    @classmethod
    def settle(cls, args: Namespace) -> None:
        """No grid, and nothing to give up early; at least one batch an epoch."""
        args.continuous, args.early_stopping = True, "off"
        if args.epoch_samples < args.gradient_batch:
            raise UserError(f"--epoch_samples {args.epoch_samples}: less than --gradient_batch {args.gradient_batch}")

    def _set_up(self, model: Any) -> None:
        from search.answer_loss import AnswerLoss

        self._loss = AnswerLoss(*model) if isinstance(model, tuple) else model
        self._steps = self.config.epoch_samples // self.config.gradient_batch
        self.max_evaluations = self.generations + 1  # the start, and the end of each epoch
        steps, batch = self._steps, self.config.gradient_batch
        samples = f"{self.generations} x {steps * batch:,} examples"
        self.also = f"{samples} forwards and backwards, {steps} batches of {batch}"

    def search(self) -> Steps[Individual]:
        """Yield the start and the end of each epoch; end with the last."""
        import torch

        unscaled = [1.0] * (self._loss.num_layers - self.space.L)
        s = torch.tensor([y for _, y in self.start], dtype=torch.float64, requires_grad=True)
        adam = torch.optim.Adam([s], lr=self.config.learning_rate)
        individual = Individual(self.start, "start")
        yield Generation([individual])
        for epoch in range(1, self.generations + 1):
            rng = stream("gradient", self.seed, epoch)
            for _ in range(self._steps):
                examples = [self._loss.choose(rng.random(), rng.random()) for _ in range(self.config.gradient_batch)]
                _, gradient = self._loss(unscaled + s.tolist(), examples)
                s.grad = torch.tensor(gradient[len(unscaled) :], dtype=s.dtype)
                adam.step()
                with torch.no_grad():
                    s.clamp_(Y_LOW, Y_HIGH)
            points = tuple((x, y) for (x, _), y in zip(self.start, s.tolist(), strict=True))
            individual = Individual(points, "gradient", (individual.points,))
            yield Generation([individual])
        return individual


OPTIMIZER = GradientDescent
