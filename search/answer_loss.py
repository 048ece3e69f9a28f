"""The likelihood of reference answers: as a measure of factors, and as the loss that gradient descent lowers."""

from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from lpes_eval import rope
from lpes_eval.errors import UserError
from search.tasks import Objective


class AnswerLoss:
    """The cross-entropy of the tasks' reference answers, and its gradient with respect to the factors.

    An example is drawn as often as the weight of its column says; ``UserError`` names a task whose answers are not
    generated text.
    """

    def __init__(self, lm: Any, objectives: Sequence[Objective]) -> None:
        self.model = lm.model
        self.num_layers = len(rope.find_decoder(lm.model).layers)
        self._weights: list[float] = []
        self._examples: list[list[tuple[list[int], list[int]]]] = []
        for objective in objectives:
            for number, column in enumerate(objective.columns):
                requests = [r for r in objective.task.instances if column.position is None or r.idx == number]
                self._weights.append(column.weight)
                self._examples.append([gold_answer(lm, objective, request, column.position) for request in requests])

    def choose(self, uniform: float, other: float) -> tuple[int, int]:
        """A column, by weight, and an example in it, evenly, from two numbers in [0, 1)."""
        part = min(bisect(list(accumulate(self._weights)), uniform), len(self._weights) - 1)
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
        ids, wanted = (torch.tensor(tokens, device=self.model.device) for tokens in (prompt + answer, answer))
        logits = self.model(input_ids=ids[None], use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
        return nn.functional.cross_entropy(logits.float(), wanted)


def gold_answer(lm: Any, objective: Objective, request: Any, position: float | None) -> tuple[list[int], list[int]]:
    """Tokens of a request's prompt, and of its reference answer; ``UserError`` where answers are not generated text."""
    task = objective.task
    if task.OUTPUT_TYPE != "generate_until":
        raise UserError(f"{objective.name}: has no reference answers in words, whose likelihood could be measured")
    ids, _ = lm.tok_batch_encode([request.args[0]])
    target = task.doc_to_target(request.doc) if position is None else task.written(request.doc, position)
    answer = target if isinstance(target, str) else str(target[0])
    return ids[0].tolist(), lm.tok_encode(task.config.target_delimiter + answer, add_special_tokens=False)


SHORTEST_PREFIX = 16
"""Tokens that prompts must have in common before their keys and values are worth keeping."""


@torch.no_grad()
def log_likelihoods(model: Any, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    """The mean log-likelihood of each answer's tokens behind its prompt, under the factors that are applied.

    What all prompts begin with goes through the model once; its keys and values serve all of them.
    """
    prompts = [prompt for prompt, _ in pairs]
    ends = [at for at, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1]
    common = min([*ends[:1], *(len(prompt) - 1 for prompt in prompts)])
    cache = DynamicCache(config=model.config)
    if len(prompts) < 2 or common < SHORTEST_PREFIX or not all(type(each) is DynamicLayer for each in cache.layers):
        common = 0  # layers with a window forget what a crop would bring back
    if common:
        ids = torch.tensor([prompts[0][:common]], device=model.device)
        model(input_ids=ids, **rope.with_cache(model, cache), use_cache=True, logits_to_keep=1)
    found = []
    for prompt, answer in pairs:
        ids, wanted = (torch.tensor(t, device=model.device) for t in (prompt[common:] + answer[:-1], answer))
        carried = rope.with_cache(model, cache) if common else {}
        logits = model(input_ids=ids[None], **carried, use_cache=bool(common), logits_to_keep=len(answer)).logits[0]
        found.append(-nn.functional.cross_entropy(logits.float(), wanted).item())
        if common:
            cache.crop(-len(ids))
    return found
