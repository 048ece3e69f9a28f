"""What answers a model's requests: set these factors, answer these requests.

An evaluation knows no more of a model than that. ``exact`` answers greedy requests fast, ``harness`` is lm-eval's own
loop, for everything, and ``vllm`` has vLLM answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lpes_eval.engine.exact import ExactEngine
from lpes_eval.engine.harness import HarnessEngine
from lpes_eval.engine.limits import reason_against
from lpes_eval.errors import UserError

Engine = HarnessEngine


def engine_for(
    lm: Any,
    requests: Sequence[Any],
    *,
    fast: bool = True,
    vllm: Mapping[str, Any] | None = None,
    prompts_per_batch: int | None = None,
    **options: Any,
) -> tuple[Engine, str | None]:
    """The engine for these requests, and why it is lm-eval's own loop; None where it is the fast one.

    Args:
        lm: the lm-eval model.
        requests: lm-eval's instances.
        fast: answer by ``exact`` where that can be exact.
        vllm: have vLLM answer, with these options.
        prompts_per_batch: the most prompts that are answered at once; by default as many as memory allows.
        **options: further ones of ``ExactEngine``.

    Raises:
        UserError: vLLM cannot answer these requests.
    """
    reason = reason_against(lm, requests, fast)
    if vllm is not None:
        from lpes_eval.engine.vllm import VLLMEngine

        if reason is not None:
            raise UserError(f"--engine vllm: {reason}; leave it out")
        return VLLMEngine(lm, requests, vllm), None
    if reason is not None:
        return HarnessEngine(lm, requests), reason
    return ExactEngine(lm, requests, prompts_per_batch=prompts_per_batch, **options), None
