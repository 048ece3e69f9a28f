"""The ``ms_poe`` model type: one factor a head, chosen on the prompt (Ms-PoE, arXiv 2403.04797).

lm_eval --model ms_poe --model_args pretrained=lmsys/vicuna-7b-v1.5 --tasks kv_retrieval
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lpes_eval.models.base import RotaryLM, count, real
from lpes_eval.peers import ms_poe

Request = tuple[tuple[str, str], list[int], list[int]]


class MsPoE(RotaryLM):
    """``hf`` with Ms-PoE; everything that ``hf`` takes means the same.

    Heads are ranked on the last token of the prompt: in generation the last token before the answer, in likelihood
    scoring the last token of the context. The windows of rolling likelihood (perplexity) have a context of one token,
    which ranks all heads alike, so that they keep their order.

    Args:
        pretrained: as for ``hf``. Left out: the reference model that is shipped with this package.
        min, max: the least and the greatest factor.
        skip: so many layers at the beginning are left alone; 2 as in the authors' scripts, 0 as in Algorithm 1.
        threshold: attention counts for a head's awareness from so many times its mean on.
        **kwargs: what ``hf`` takes.

    Raises:
        UserError: settings that are not numbers in order.
        UnsupportedModel: a model whose attention cannot be given other rotations; where possible before any weight is
            loaded.
    """

    def __init__(
        self,
        pretrained: Any = None,
        min: Any = ms_poe.MIN,
        max: Any = ms_poe.MAX,
        skip: Any = ms_poe.SKIP,
        threshold: Any = ms_poe.THRESHOLD,
        **kwargs: Any,
    ) -> None:
        self.settings = ms_poe.Settings(
            real("min", min), real("max", max), count("skip", skip), real("threshold", threshold)
        )
        super().__init__(pretrained, **kwargs)
        self.method = ms_poe.MsPoE(self.model, self.settings)
        self._contexts: dict[tuple[int, ...], int] = {}

    def check(self, skeleton: nn.Module) -> None:
        """Refuse a model whose attention cannot be given other rotations."""
        ms_poe.check(skeleton, self.settings)

    def get_model_info(self) -> dict[str, Any]:
        """What ``hf`` reports, and the method's settings."""
        return super().get_model_info() | {"method": {"name": "ms_poe", **vars(self.settings)}}

    @property
    def cache_key(self) -> str:
        """What sets this model's answers apart from the same model's with other settings, for ``--use_cache``."""
        return "ms_poe_" + "_".join(f"{value:g}" for value in vars(self.settings).values())

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        with self.method.prompt_ends_at(context.shape[1] - 1):
            return super()._model_generate(context, max_length, stop, **options)

    # -- likelihood scoring: where does each row's context end?

    def _loglikelihood_tokens(self, requests: list[Request], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        """As ``hf``, in as many rounds as there are contexts that make the same input with different continuations.

        ``hf`` hands ``_model_call`` the inputs alone, padded with 0 at the right. The length of each one's context is
        looked up by its tokens; two requests with the same tokens and different contexts go into different rounds.
        """
        answers: dict[int, tuple[float, bool]] = {}
        waiting = list(enumerate(requests))
        while waiting:
            self._contexts = {}
            now: list[tuple[int, Request]] = []
            later: list[tuple[int, Request]] = []
            for number, request in waiting:
                _, context, continuation = request
                tokens = (context + continuation)[-(self.max_length + 1) :][:-1]
                end = len(tokens) - len(continuation)
                (now if self._contexts.setdefault(_without_zeros(tokens), end) == end else later).append(
                    (number, request)
                )
            try:
                scored = super()._loglikelihood_tokens([request for _, request in now], *args, **kwargs)
            finally:
                self._contexts = {}
            answers.update(zip((number for number, _ in now), scored, strict=True))
            waiting = later
        return [answers[number] for number in range(len(requests))]

    def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        ends = [self._contexts.get(_without_zeros(row), inps.shape[1] - 1) for row in inps.tolist()]
        with self.method.prompt_ends_at(torch.tensor(ends, device=inps.device)):
            return super()._model_call(inps, *args, **kwargs)


def _without_zeros(tokens: list[int]) -> tuple[int, ...]:
    """The tokens without the zeros at the end, which cannot be told from padding."""
    end = len(tokens)
    while end and tokens[end - 1] == 0:
        end -= 1
    return tuple(tokens[:end])
