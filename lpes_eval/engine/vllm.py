"""vLLM as the engine that answers: factors are changed in the running engine, between individuals.

Prompts and stops are those of the transformers model, which stays on the processor; vLLM loads the weights once.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from lpes_eval.engine.exact import ExactEngine
from lpes_eval.engine.harness import Answers, Order, Settled
from lpes_eval.engine.limits import no_number
from lpes_eval.errors import UserError
from lpes_eval.factors import FIELD

_running: WeakKeyDictionary[nn.Module, tuple[dict[str, Any], Any]] = WeakKeyDictionary()
"""The options and the engine of vLLM's for a transformers model."""


class VLLMEngine(ExactEngine):
    """Has vLLM answer a fixed list of greedy requests; ``options`` are those of ``vllm.LLM``."""

    def __init__(self, lm: Any, requests: Sequence[Any], options: Mapping[str, Any]) -> None:
        try:
            import vllm
        except ImportError as error:
            raise UserError(f"--engine vllm: vLLM cannot be loaded ({error}); install it in this environment") from None
        super().__init__(lm, requests)
        self.identity = {"engine": f"vLLM {vllm.__version__}", "engine_args": dict(options)}
        if _running.get(lm.model, (None, None))[0] != options:
            _running.pop(lm.model, None)  # its memory is needed
            own = {"dtype": str(lm.model.dtype).removeprefix("torch."), "max_model_len": lm.max_length}
            if lm.revision != "main":
                own["revision"] = lm.revision
            carried = {"hf_overrides": {FIELD: 1}, "worker_extension_cls": "lpes_eval.vllm.Worker"}
            try:
                engine = vllm.LLM(lm.model.config._name_or_path, **{**own, **options}, **carried)
            except TypeError as error:  # of its arguments
                raise UserError(f"--engine_args: {error}") from None
            _running[lm.model] = dict(options), engine
        self._llm = _running[lm.model][1]

    def set_factors(self, factors: Sequence[float]) -> None:
        """Answer with these factors from now on; keys that were rotated under others are forgotten."""
        self.factors = tuple(factors)
        self._llm.collective_rpc("set_lpes_factors", args=(list(factors),))
        if not self._llm.reset_prefix_cache():
            raise UserError("vLLM did not reset its prefix cache, whose keys are rotated under other factors")

    def answer(self, order: Order = None, may_stop: bool = False, settled: Settled = None) -> Iterator[Answers]:
        """Answer all at once, as a GPU takes nearly as long for a few of them."""
        from vllm import SamplingParams

        numbers = range(len(self._prompts)) if order is None else [i for together in order for i in together]
        prompts = [self._prompts[i] for i in numbers]
        asked = [SamplingParams(temperature=0, max_tokens=p.max_new, stop=list(p.stops), logprobs=0) for p in prompts]
        found = self._llm.generate([{"prompt_token_ids": p.tokens} for p in prompts], asked, use_tqdm=False)
        answers = {}
        for i, one in zip(numbers, found, strict=True):
            if math.isnan(one.outputs[0].cumulative_logprob):
                raise no_number(self.factors)
            answers[i] = self._responses(i, list(one.outputs[0].token_ids))
        yield answers
