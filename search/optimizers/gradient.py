"""Gradient descent on the factors (App. C): the negative control.

The factors are the only parameters; the loss is the cross-entropy of the reference answer's tokens behind the prompt.
Its gradient flows through the rotary tables, which ``lpes_eval.rope`` computes from a tensor of factors with the
model's own code. The paper finds that this makes the model worse.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpes_eval import rope
from lpes_eval.errors import UserError
from lpes_eval.flags import at_least, positive
from lpes_eval.rng import stream
from lpes_eval.rope import find_decoder
from search.optimizers.base import Config, Optimizer, setting
from search.space import Y_HIGH, Y_LOW, Individual, Points
from search.tasks import Objective


class AnswerLoss:
    """The cross-entropy of the tasks' reference answers, and its gradient with respect to the factors.

    Args:
        lm: an lm-eval model over a transformers model.
        objectives: tasks with generated answers; an example is drawn as often as the weight of its column says.

    Raises:
        UserError: a task whose answers are not generated text.
    """

    def __init__(self, lm: Any, objectives: Sequence[Objective]) -> None:
        self.model = lm.model
        self._weights: list[float] = []
        self._examples: list[list[tuple[list[int], list[int]]]] = []
        for objective in objectives:
            task = objective.task
            if task.OUTPUT_TYPE != "generate_until":
                raise UserError(f"--optimizer gradient needs reference answers in words; {objective.name} has none")
            for number, column in enumerate(objective.columns):
                requests = [request for request in task.instances if column.position is None or request.idx == number]
                self._weights.append(column.weight)
                self._examples.append([self._encode(lm, task, request) for request in requests])

    @staticmethod
    def _encode(lm: Any, task: Any, request: Any) -> tuple[list[int], list[int]]:
        """Tokens of a request's prompt, and of its reference answer."""
        ids, _ = lm.tok_batch_encode([request.args[0]])
        target = task.doc_to_target(request.doc)
        answer = target if isinstance(target, str) else str(target[0])
        return ids[0].tolist(), lm.tok_encode(task.config.target_delimiter + answer, add_special_tokens=False)

    def choose(self, uniform: float, other: float) -> tuple[int, int]:
        """A column, by weight, and an example in it, evenly, from two numbers in [0, 1)."""
        part = 0
        while part < len(self._weights) - 1 and uniform >= self._weights[part]:
            uniform -= self._weights[part]
            part += 1
        return part, int(other * len(self._examples[part]))

    def __call__(self, factors: Sequence[float], numbers: Sequence[tuple[int, int]]) -> tuple[float, list[float]]:
        """The mean loss of these examples under ``factors``, one a layer, and its gradient."""
        values = torch.tensor(factors, dtype=torch.float32, requires_grad=True)
        frozen = [p for p in self.model.parameters() if p.requires_grad]
        total = 0.0
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            rope.apply(self.model, values)
            with torch.enable_grad():
                for part, number in numbers:
                    loss = self._loss(*self._examples[part][number]) / len(numbers)
                    loss.backward()
                    total += loss.item()
        finally:
            rope.remove(self.model)
            for parameter in frozen:
                parameter.requires_grad_(True)
        assert values.grad is not None
        return total, values.grad.tolist()

    def _loss(self, prompt: list[int], answer: list[int]) -> Tensor:
        device = self.model.device
        ids = torch.tensor([prompt + answer], device=device)
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
        return nn.functional.cross_entropy(logits.float(), torch.tensor(answer, device=device))


@dataclass(frozen=True)
class GradientConfig(Config):
    """App. C."""

    learning_rate: float = setting(1e-5, positive, "Adam's", "X")
    epoch_samples: int = setting(2000, at_least(1), "examples an epoch (a generation), drawn by the lambdas", least=1)
    gradient_batch: int = setting(32, at_least(1), "examples a step", least=1)


class GradientDescent(Optimizer):
    """Adam on the factors of all layers, an epoch a generation, kept between 1 and 2.

    Its ``best`` is the individual of the last epoch, not the fittest one: what descending leads to.
    """

    Config = GradientConfig
    title = "gradient descent on one factor a layer (App. C), the negative control"
    needs_every_fitness = True
    BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # Adam (arXiv 1412.6980), Algorithm 1

    @classmethod
    def settle(cls, args: Namespace) -> None:
        """One factor a layer, off the grid; at least one batch an epoch."""
        args.curve, args.continuous = "free", True
        if args.epoch_samples < args.gradient_batch:
            raise UserError(
                f"--epoch_samples {args.epoch_samples}: less than one --gradient_batch, {args.gradient_batch}"
            )

    @classmethod
    def free_curve(cls) -> bool:
        """Yes: there is no curve to descend on."""
        return True

    def _set_up(self, model: Any) -> None:
        self._loss: AnswerLoss = model if isinstance(model, AnswerLoss) else AnswerLoss(*model)
        self._unscaled = len(find_decoder(self._loss.model).layers) - self.space.L
        self._steps = self.config.epoch_samples // self.config.gradient_batch
        self._s = [y for _, y in self.start]
        self._m, self._v, self._t = [0.0] * self.space.L, [0.0] * self.space.L, 0
        self._asking_seconds = 0.0

    @property
    def max_evaluations(self) -> int:
        """The start, and the end of each epoch."""
        return self.generations + 1

    @property
    def asking_seconds(self) -> float:
        """How long the last epoch's passes through the model took."""
        return self._asking_seconds

    def plan(self) -> list[str]:
        """What comes on top of the evaluations."""
        samples, batch = self._steps * self.config.gradient_batch, self.config.gradient_batch
        return [f"{self.generations} x {samples:,} examples forwards and backwards, {self._steps} batches of {batch}"]

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
        began = time.perf_counter()
        rng = stream("gradient", self._seed, self.generation)
        for _ in range(self._steps):
            numbers = [self._loss.choose(rng.random(), rng.random()) for _ in range(self.config.gradient_batch)]
            _, gradient = self._loss([1.0] * self._unscaled + self._s, numbers)
            self._step(gradient[self._unscaled :])
        self._asking_seconds = time.perf_counter() - began

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
