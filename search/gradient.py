"""Gradient descent on the factors (App. C): the negative control.

The factors are the only parameters; the loss is the cross-entropy of the reference answer's tokens behind the prompt.
Its gradient flows through the rotary tables, which ``lpes_eval.rope`` computes from a tensor of factors with the
model's own code. The paper finds that this makes the model worse.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lpes_eval import rope
from lpes_eval.errors import UserError
from search.optimizer import Y_HIGH, Y_LOW, Individual, Optimizer, Points, Space
from search.parts import Part


class AnswerLoss:
    """The cross-entropy of the tasks' reference answers, and its gradient with respect to the factors.

    Args:
        lm: an lm-eval model over a transformers model.
        parts: tasks with generated answers; an example is drawn from a part as often as its weight says.

    Raises:
        UserError: a task whose answers are not generated text.
    """

    def __init__(self, lm: Any, parts: Sequence[Part]) -> None:
        self.model = lm.model
        self._weights = [part.weight for part in parts]
        self._examples: list[list[tuple[list[int], list[int]]]] = []
        for part in parts:
            if part.task.OUTPUT_TYPE != "generate_until":
                raise UserError(f"--optimizer gradient needs reference answers in words, which {part.name} has not")
            examples = []
            for request in part.task.instances:
                ids, _ = lm.tok_batch_encode([request.args[0]])
                target = part.task.doc_to_target(request.doc)
                answer = target if isinstance(target, str) else str(target[0])
                delimiter = part.task.config.target_delimiter
                examples.append((ids[0].tolist(), lm.tok_encode(delimiter + answer, add_special_tokens=False)))
            self._examples.append(examples)

    def draw(self, uniform: float, other: float) -> tuple[int, int]:
        """An example's part, by weight, and its number in it, evenly, from two numbers in [0, 1)."""
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


class GradientDescent(Optimizer):
    """Adam on the factors of all layers, an epoch a generation, kept between 1 and 2.

    Args:
        space: ``Space.free(L, grid=False)``.
        loss: gives the gradient.
        unscaled: layers before these that are left alone.
        T: epochs.
        samples: examples an epoch, at most: it takes whole batches.
        batch: examples a step.
        learning_rate: Adam's.
        start: what it sets out from; by default Eq. 8.
        seed: of the random generator.

    Its ``best`` is the individual of the last epoch, not the fittest one: what descending leads to.
    """

    BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # Adam (arXiv 1412.6980), Algorithm 1

    def __init__(
        self,
        space: Space,
        loss: AnswerLoss,
        *,
        unscaled: int = 0,
        T: int = 30,
        samples: int = 2000,
        batch: int = 32,
        learning_rate: float = 1e-5,
        start: Points | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(space, T, seed)
        if batch < 1 or samples < batch or not learning_rate > 0:
            raise UserError(
                f"samples={samples}, batch={batch}, learning_rate={learning_rate}: expected at least one batch, and a "
                "learning rate above 0"
            )
        self._loss, self._unscaled = loss, unscaled
        self._steps, self._batch, self._learning_rate = samples // batch, batch, learning_rate
        self._s = [y for _, y in start or space.start()]
        self._m, self._v, self._t = [0.0] * space.L, [0.0] * space.L, 0
        self._last: tuple[Individual, float] | None = None
        self._asking_seconds = 0.0

    @property
    def max_evaluations(self) -> int:
        """The start, and the end of each epoch."""
        return self._T + 1

    @property
    def epoch_samples(self) -> int:
        """Examples an epoch: whole batches of them."""
        return self._steps * self._batch

    @property
    def asking_seconds(self) -> float:
        """How long the last epoch's passes through the model took."""
        return self._asking_seconds

    @property
    def best(self) -> tuple[Individual, float]:
        """The individual of the last epoch, and its fitness."""
        if self._last is None:
            raise ValueError("no individual: nothing has been told yet")
        return self._last

    def _propose(self) -> list[list[Individual]]:
        before = self._points()
        if self._i == 0:
            return [[Individual(before, "start")]]
        began = time.perf_counter()
        for _ in range(self._steps):
            numbers = [self._loss.draw(self._rng.random(), self._rng.random()) for _ in range(self._batch)]
            _, gradient = self._loss([1.0] * self._unscaled + self._s, numbers)
            self._step(gradient[self._unscaled :])
        self._asking_seconds = time.perf_counter() - began
        return [[Individual(self._points(), "gradient", (before,))]]

    def _step(self, gradient: Sequence[float]) -> None:
        self._t += 1
        for h, g in enumerate(gradient):
            self._m[h] = self.BETA_1 * self._m[h] + (1 - self.BETA_1) * g
            self._v[h] = self.BETA_2 * self._v[h] + (1 - self.BETA_2) * g * g
            m_hat = self._m[h] / (1 - self.BETA_1**self._t)
            v_hat = self._v[h] / (1 - self.BETA_2**self._t)
            s = self._s[h] - self._learning_rate * m_hat / (v_hat**0.5 + self.EPSILON)
            self._s[h] = min(max(s, Y_LOW), Y_HIGH)

    def _points(self) -> Points:
        return tuple((x, s) for (x, _), s in zip(self.space.start(), self._s, strict=True))

    def _learn(self, survivors: dict[Points, float], fitness: Sequence[float]) -> None:
        self._last = self.ask()[0], float(fitness[0])

    def state_dict(self) -> dict[str, Any]:
        """As ``Optimizer.state_dict``, and the factors with Adam's moments."""
        last = self._last and [self._last[0].to_dict(), self._last[1]]
        adam = {"s": list(self._s), "m": list(self._m), "v": list(self._v), "t": self._t}
        return super().state_dict() | {"adam": adam, "last": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As ``Optimizer.load_state_dict``, and the factors with Adam's moments."""
        super().load_state_dict(state)
        adam, last = state["adam"], state["last"]
        self._s, self._m, self._v, self._t = list(adam["s"]), list(adam["m"]), list(adam["v"]), adam["t"]
        self._last = (Individual.from_dict(last[0]), last[1]) if last else None
