"""What methods share that treat a prompt's last token in a way of its own: where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpes_eval.errors import UserError
from lpes_eval.methods.attention import Call
from lpes_eval.methods.base import MethodLM
from lpes_eval.methods.interception import Interception

Request = tuple[tuple[str, str], list[int], list[int]]


class PromptInterception(Interception):
    """An ``Interception`` that knows where each row's prompt ends."""

    _end: Tensor | None = None  # columns, on the processor: asking a GPU would take time

    def check(self, model: Any) -> None:
        """Refuse a model of which it is not known where prompts end, too."""
        super().check(model)
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise UserError(f"{self.name}: the adapter puts tokens of its own before the prompt; leave it out")
        if model.config._attn_implementation == "flex_attention":
            raise UserError(f"{self.name} cannot use masks of flex_attention; load the model with another one (sdpa)")

    @contextmanager
    def prompt_ends_at(self, column: Tensor | int) -> Iterator[None]:
        """The prompt's last token is in this column, or in one column a row, of whatever is run without a filled cache.

        Otherwise it is each row's last token that is not padding, of whatever the first pass has: of the prompt and
        the answer so far without a cache, of the prompt and the first guesses in speculative decoding, and of the first
        chunk where a prompt comes in chunks. So it is needed there; and chunks are then refused (``UserError``), for
        the method needs a prompt that is there as a whole.
        """
        self._end = torch.as_tensor(column).cpu()
        try:
            yield
        finally:
            self._end = None

    def prompt_is_all(self, call: Call) -> bool:
        """Whether all rows' prompts are known to end in the last column."""
        if self._end is not None:
            return bool((self._end == call.query.shape[2] - 1).all())
        return self.padding is None

    def prompt_end(self, call: Call) -> Tensor:
        """The column of each row's last token of the prompt, (B,)."""
        batch, _, length, _ = call.query.shape
        device = call.query.device
        if self._end is not None:
            if (furthest := int(self._end.max())) >= length:
                raise UserError(
                    f"{self.name}: the prompt ends in column {furthest}, and the first pass has {length} columns; run "
                    "the whole prompt in one pass (leave out prefill_chunk_size)"
                )
            return self._end.to(device).expand(batch)
        if self.padding is None:
            return torch.full((batch,), length - 1, device=device)
        return (length - 1 - self.padding[:, -length:].flip(-1).long().argmax(-1)).to(device)


class PromptLM(MethodLM):
    """``hf`` that tells its method where prompts end.

    In generation it is the last token before the answer, in likelihood scoring the last token of the context. The
    windows of rolling likelihood (perplexity) have a context of one token.
    """

    _ends: dict[tuple[int, ...], int] = {}  # noqa: RUF012 (replaced, never changed): input -> the column of its context's end

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        with self.method.prompt_ends_at(context.shape[1] - 1):
            return super()._model_generate(context, max_length, stop, **options)

    def _loglikelihood_tokens(self, requests: list[Request], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        """As ``hf``, in as many rounds as there are contexts that make the same input with different continuations.

        ``hf`` hands ``_model_call`` the inputs alone, padded with 0 at the right. The length of each one's context is
        looked up by its tokens; two requests with the same tokens and different contexts go into different rounds.
        """
        answers: dict[int, tuple[float, bool]] = {}
        while len(answers) < len(requests):
            self._ends, now = {}, []
            for number, (_, context, continuation) in enumerate(requests):
                tokens = (context + continuation)[-(self.max_length + 1) :][:-1]
                end = len(tokens) - len(continuation)
                if number not in answers and self._ends.setdefault(_without_zeros(tokens), end) == end:
                    now.append(number)
            scored = super()._loglikelihood_tokens([requests[number] for number in now], *args, **kwargs)
            answers |= zip(now, scored, strict=True)
        self._ends = {}
        return [answers[number] for number in range(len(requests))]

    def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        ends = [self._ends.get(_without_zeros(row), inps.shape[1] - 1) for row in inps.tolist()]
        with self.method.prompt_ends_at(torch.tensor(ends)):
            return super()._model_call(inps, *args, **kwargs)


def _without_zeros(tokens: list[int]) -> tuple[int, ...]:
    """The tokens without the zeros at the end, which cannot be told from padding."""
    return tuple(np.trim_zeros(tokens, "b"))
