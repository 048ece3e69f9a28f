"""Set these factors, answer these requests: ``exact`` greedy ones fast, ``harness`` by lm-eval's loop, ``vllm``."""

from collections.abc import Mapping, Sequence
from typing import Any

from lpes_eval.engine.exact import ExactEngine
from lpes_eval.engine.harness import HarnessEngine
from lpes_eval.engine.limits import reason_against
from lpes_eval.errors import UserError


def engine_for(
    lm: Any, requests: Sequence[Any], *, fast: bool = True, vllm: Mapping[str, Any] | None = None, **options: Any
) -> tuple[HarnessEngine, str | None]:
    """The engine for lm-eval's instances, and why it is lm-eval's own loop; None where it is the fast one.

    ``vllm`` has vLLM answer, with these options (``UserError`` where it cannot); others are those of ``ExactEngine``.
    """
    reason = reason_against(lm, requests) if fast else "it was asked for"
    if vllm is not None:
        from lpes_eval.engine.vllm import VLLMEngine

        if reason is not None:
            raise UserError(f"--engine vllm: {reason}; leave it out")
        return VLLMEngine(lm, requests, vllm), None
    if reason is not None:
        return HarnessEngine(lm, requests), reason
    return ExactEngine(lm, requests, **options), None
