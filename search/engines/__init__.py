"""The port to a model: set these factors, answer these requests.

An evaluation knows no more of a model than ``Engine``. ``exact`` answers greedy requests fast; ``harness`` is lm-eval's
own loop, for everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from search.engines.limits import reason_against


class Engine(Protocol):
    """What answers a fixed list of lm-eval's requests.

    Attributes:
        num_layers: layers of the model.
        cut: for each request, whether its prompt loses its beginning, as it does not fit the model's window.
        unended: requests whose last answer did not end by itself, but at the most tokens that it may have.
    """

    num_layers: int
    cut: list[bool]
    unended: set[int]

    def set_factors(self, factors: Sequence[float]) -> None:
        """Answer with these factors from now on, one a layer."""

    def answer(self, order: Sequence[Sequence[int]] | None = None) -> Iterator[dict[int, list[Any]]]:
        """Each request's responses, by its number, some at a time.

        Args:
            order: the requests by number, as they are to be answered: some together, then the next.
        """


def choose(
    lm: Any,
    requests: Sequence[Any],
    *,
    fast: bool = True,
    share_prefixes: bool = True,
    tokens_per_batch: int | None = None,
    prompts_per_batch: int | None = None,
    pool: Any = None,
) -> tuple[Engine, str | None]:
    """The engine for these requests, and why it is lm-eval's own loop; None where it is the fast one.

    Args:
        lm: the lm-eval model.
        requests: lm-eval's instances.
        fast: answer by ``exact`` where that can be exact.
        share_prefixes: of it, prefill common beginnings once.
        tokens_per_batch: of it, the batch's size.
        prompts_per_batch: of it, the batch's size in prompts instead.
        pool: of several processes, whose engines answer then.
    """
    from search.engines.exact import ExactEngine
    from search.engines.harness import HarnessEngine

    reason = reason_against(lm, requests) if fast else "it was asked for"
    if pool is not None:
        from search.engines.cluster import ClusterEngine

        return ClusterEngine(pool, lm, requests), reason
    if reason is not None:
        return HarnessEngine(lm, requests), reason
    engine = ExactEngine(lm, requests, share_prefixes=share_prefixes)
    if tokens_per_batch is not None:
        engine.tokens_per_batch = tokens_per_batch
    if prompts_per_batch is not None:
        engine.tokens_per_batch = prompts_per_batch * engine.longest
    return engine, None
