"""The port to a model: set these factors, answer these requests.

An evaluation knows no more of a model than that. ``harness`` is lm-eval's own loop, for everything; ``exact`` answers
greedy requests fast, and ``vllm`` has vLLM answer them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lpes_eval.errors import UserError

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
    from search.engines.limits import draws, reason_against

    if vllm is not None:
        from search.engines.vllm import VLLMEngine

        if (reason := reason_against(lm, requests)) is not None:
            raise UserError(f"--engine vllm: {reason}; leave it out")
        return VLLMEngine(lm, requests, vllm), None
    if pool is not None:
        from search.engines.cluster import ClusterEngine

        if draws(lm, requests):
            way_out = "answer greedily (do_sample=False), or search without --workers"
            raise UserError(f"--workers: answers that are drawn at random depend on who draws them; {way_out}")
        return ClusterEngine(pool, lm, requests), reason_against(lm, requests, fast)
    from search.engines.exact import local

    return local(lm, requests, fast, **options)


def speed_options(args: argparse.Namespace) -> dict[str, Any]:
    """The part of a search's command line that changes no answer: ``choose``'s further arguments."""
    from search.engines import cluster

    speed = {
        "fast": not args.lm_eval_loop,
        "prompts_per_batch": None if args.batch_size == "auto" else args.batch_size,
    }
    if args.engine == "vllm":
        return speed | {"vllm": args.engine_args}
    return speed | {"pool": cluster.pool(args, speed)}
