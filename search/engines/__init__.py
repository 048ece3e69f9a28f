"""The engine of a search (``lpes_eval.engine``), or several processes whose engines answer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from lpes_eval.engine import Engine, engine_for
from lpes_eval.engine.limits import draws, reason_against
from lpes_eval.errors import UserError


def choose(
    lm: Any, requests: Sequence[Any], *, fast: bool = True, pool: Any = None, **options: Any
) -> tuple[Engine, str | None]:
    """As ``engine_for``; ``pool`` is of several processes, whose engines answer then.

    Raises:
        UserError: as ``engine_for``, or several processes would answer otherwise than one.
    """
    if pool is None:
        return engine_for(lm, requests, fast=fast, **options)
    from search.engines.cluster import ClusterEngine

    if draws(lm, requests):
        way_out = "answer greedily (do_sample=False), or search without --workers"
        raise UserError(f"--workers: answers that are drawn at random depend on who draws them; {way_out}")
    return ClusterEngine(pool, lm, requests), reason_against(lm, requests, fast)


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
