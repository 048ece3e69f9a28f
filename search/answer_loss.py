"""The loss that gradient descent lowers: the cross-entropy of reference answers, and its gradient over the factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lpes_eval import rope
from lpes_eval.errors import UserError
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
        self.num_layers = len(rope.find_decoder(lm.model).layers)
        self._weights: list[float] = []
        self._examples: list[list[tuple[list[int], list[int]]]] = []
        for objective in objectives:
            task = objective.task
            if task.OUTPUT_TYPE != "generate_until":
                raise UserError(f"--optimizer gradient needs reference answers in words; {objective.name} has none")
            for number, column in enumerate(objective.columns):
                requests = [request for request in task.instances if column.position is None or request.idx == number]
                self._weights.append(column.weight)
                self._examples.append([self._encode(lm, task, request, column.position) for request in requests])

    @staticmethod
    def _encode(lm: Any, task: Any, request: Any, position: float | None) -> tuple[list[int], list[int]]:
        """Tokens of a request's prompt, and of its reference answer."""
        ids, _ = lm.tok_batch_encode([request.args[0]])
        target = task.doc_to_target(request.doc) if position is None else task.written(request.doc, position)
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
