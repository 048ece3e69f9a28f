"""For methods that need to know a prompt's parts: where its last token stands, and which are its documents."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from lm_eval.api.instance import Instance
from torch import Tensor
from tqdm import tqdm

from lpes_eval.errors import UserError
from lpes_eval.harness.segments import Segment, join
from lpes_eval.methods.attention import Call
from lpes_eval.methods.base import MethodLM
from lpes_eval.methods.interception import Interception

Request = tuple[tuple[str, str], list[int], list[int]]


class PromptInterception(Interception):
    """An ``Interception`` that knows where each row's prompt ends."""

    _end: Tensor | None = None  # columns, on the processor

    @contextmanager
    def prompt_ends_at(self, column: Tensor | int) -> Iterator[None]:
        """The prompt's last token is in this column, or one column a row, where no cache is filled; else the last."""
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
        end = torch.tensor(length - 1)
        if self._end is not None:
            end = self._end
            if int(end.max()) >= length:
                found = f"the prompt ends in column {end.max()}, and the first pass has {length} columns"
                raise UserError(f"{self.name}: {found}; run it in one pass (leave out prefill_chunk_size)")
        elif self.padding is not None:
            end = length - 1 - self.padding[:, -length:].flip(-1).long().argmax(-1)
        return end.to(call.query.device).expand(batch)


class PromptLM(MethodLM):
    """``hf`` that tells its method where prompts end: before the answer, or at the end of a likelihood's context."""

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        with self.method.prompt_ends_at(context.shape[1] - 1):
            return super()._model_generate(context, max_length, stop, **options)

    def _loglikelihood_tokens(self, requests: list[Request], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        answers = []
        for request in tqdm(requests, disable=len(requests) == 1):
            _, context, continuation = request
            length = min(len(context) + len(continuation) - 1, self.max_length)  # of the input, cut at the left
            with self.method.prompt_ends_at(length - len(continuation)):
                answers += super()._loglikelihood_tokens([request], disable_tqdm=True)
        return answers


class DocumentsLM(MethodLM):
    """``hf`` that answers ``generate_until`` requests of tasks by position, whose prompts have labelled segments."""

    def parts(self, request: Any) -> tuple[str, list[Segment], str]:
        """What stands before a request's instruction, documents and question; these; and what stands behind them.

        ``UserError``: the request does not say which its documents are, or a chat template has changed them.
        """
        if (segments_of := getattr(request, "segments", None)) is None:
            raise self._refused(request)
        segments: list[Segment] = segments_of()
        before, is_there, after = request.args[0].partition(join(segments))
        if not is_there:
            template = "the chat template changes the text of a prompt; leave --apply_chat_template out"
            raise UserError(f"{self.title}: {template}")
        return before, segments, after

    def loglikelihood(self, requests: list[Instance], *args: Any, **kwargs: Any) -> NoReturn:
        """Not defined: raises ``UserError``."""
        raise self._refused(requests[0])

    loglikelihood_rolling = loglikelihood

    def _refused(self, request: Any) -> UserError:
        expected = "expected generated answers of a task by position, such as mdqa_pos or kv_retrieval"
        return UserError(f"{self.title}: {request.task_name} does not say where its documents stand; {expected}")
