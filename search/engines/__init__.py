"""The port to a model: set these factors, answer these requests.

An evaluation knows no more of a model than that. ``harness`` is lm-eval's own loop, for everything; ``exact`` answers
greedy requests fast, and ``vllm`` has vLLM answer them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lpes_eval.errors import UserError
from search.engines.limits import draws, reason_against

if TYPE_CHECKING:
    from search.engines.harness import HarnessEngine


def choose(
    lm: Any,
    requests: Sequence[Any],
    *,
    fast: bool = True,
    pool: Any = None,
    vllm: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[HarnessEngine, str | None]:
    """The engine for these requests, and why it is lm-eval's own loop; None where it is the fast one.

    Args:
        lm: the lm-eval model.
        requests: lm-eval's instances.
        fast: answer by ``exact`` where that can be exact.
        pool: of several processes, whose engines answer then.
        vllm: have vLLM answer, with these options.
        **options: those of ``ExactEngine``.

    Raises:
        UserError: vLLM cannot answer these requests, or several processes would answer them otherwise than one.
    """
    from search.engines.exact import ExactEngine
    from search.engines.harness import HarnessEngine

    reason = reason_against(lm, requests) if fast else "it was asked for"
    if vllm is not None:
        from search.engines.vllm import VLLMEngine

        if reason is not None:
            raise UserError(f"--engine vllm: {reason}; leave it out")
        return VLLMEngine(lm, requests, vllm), None
    if pool is not None:
        from search.engines.cluster import ClusterEngine

        if draws(lm, requests):
            way_out = "answer greedily (do_sample=False), or search without --workers"
            raise UserError(f"--workers: answers that are drawn at random depend on who draws them; {way_out}")
        return ClusterEngine(pool, lm, requests), reason
    if reason is not None:
        return HarnessEngine(lm, requests), reason
    return ExactEngine(lm, requests, **options), None
