"""lm-eval's own loop as an engine, for what ``lpes_eval.engine.exact`` cannot answer exactly; the others' base."""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs

from lpes_eval import rope, weights
from lpes_eval.engine.limits import is_cut, no_number

AT_ONCE = 48
"""Requests between two looks at the answers, where an individual may be given up early."""
Order = Sequence[Sequence[int]] | None  # requests by number: some together, then the next
Answers = dict[int, list[Any]]  # requests' responses, by number
Settled = Callable[[int, str], bool] | None


class HarnessEngine:
    """Answers a fixed list of lm-eval's instances as ``lm_eval.evaluate`` would."""

    prompt_tokens: int | None = None
    """Tokens of all prompts together, where they are known."""
    identity: Mapping[str, Any] = {}
    """What answers, where it is not this machine's transformers: scores of other engines are kept apart."""

    def __init__(self, lm: Any, requests: Sequence[Any]) -> None:
        self.lm, self._requests = lm, list(requests)
        self.num_layers = len(rope.find_decoder(lm.model).layers)
        self.cut = [is_cut(lm, request) for request in requests]  # whose prompt loses its beginning
        self.factors: tuple[float, ...] = ()  # those now in force, one a layer
        self.unended: set[int] = set()  # requests whose last answer was cut
        self._batch_sizes: dict[int | None, int] = {}

    def fingerprint(self) -> dict[str, Any]:
        """What tells the model from others: its weights, both configurations, device and attention."""
        model = self.lm.model
        return {
            **(self.weights() or {}),
            "config_sha256": weights.config_sha256(model),
            "device": next(model.parameters()).device.type,
            "attention": str(getattr(model.config, "_attn_implementation", None)),
        }

    def weights(self) -> dict[str, str] | None:
        """Of the weights a hash and their type, as a factors file keeps it."""
        return weights.fingerprint(self.lm.model)

    def set_factors(self, factors: Sequence[float]) -> None:
        """Answer with these factors from now on, one a layer."""
        self.factors = tuple(factors)
        rope.apply(self.lm.model, factors)

    def answer(self, order: Order = None, may_stop: bool = False, settled: Settled = None) -> Iterator[Answers]:
        """Answer in batches, smaller ones where the caller ``may_stop`` after any.

        ``settled(number, text)`` says whether an answer, as far as it is written, need not go on; an engine may ask it.
        """
        random.seed(DEFAULT_RANDOM_SEED)  # as simple_evaluate, for tasks that sample
        numpy.random.seed(DEFAULT_OTHER_SEED)
        torch.manual_seed(DEFAULT_OTHER_SEED)
        waiting = [i for together in order for i in together] if order is not None else range(len(self._requests))
        at_once = AT_ONCE if may_stop else max(1, len(waiting))
        with self._own_loop():
            for first in range(0, len(waiting), at_once):
                yield self._answer_some(waiting[first : first + at_once])

    def _answer_some(self, numbers: Sequence[int]) -> Answers:
        responses: Answers = {i: [] for i in numbers}
        by_type: dict[str, list[int]] = {}
        for i in numbers:
            by_type.setdefault(self._requests[i].request_type, []).extend([i] * (self._requests[i].repeats or 1))
        for request_type, repeated in by_type.items():
            found = getattr(self.lm, request_type)([self._requests[i] for i in repeated], disable_tqdm=True)
            for i, response in zip(repeated, found, strict=True):
                if any(part != part for part in (response if isinstance(response, tuple) else [response])):
                    raise no_number(self.factors)
                responses[i].append(response)
                if request_type == "generate_until":
                    most = normalize_gen_kwargs(self._requests[i].args[1], self.lm.max_gen_toks)["max_gen_toks"]
                    length = len(self.lm.tok_encode(response, add_special_tokens=False))
                    (self.unended.discard if length < most else self.unended.add)(i)
        return responses

    @contextlib.contextmanager
    def _own_loop(self) -> Iterator[None]:
        """Have ``hf`` try out ``batch_size=auto`` once a length, and show no bar for every rolling likelihood."""
        if not isinstance(self.lm, HFLM):
            yield
            return
        detect, likelihoods = self.lm._detect_batch_size, self.lm._loglikelihood_tokens
        fast, self.lm.fast = getattr(self.lm, "fast", False), False  # or ours would ask an engine

        def once(requests: Sequence[Any] | None = None, pos: int = 0) -> int:
            length = len(requests[pos][1] + requests[pos][2]) if requests else None
            if length not in self._batch_sizes:
                self._batch_sizes[length] = detect(requests, pos)
            return self._batch_sizes[length]

        self.lm._detect_batch_size = once
        self.lm._loglikelihood_tokens = lambda *args, **given: likelihoods(*args, **{**given, "disable_tqdm": True})
        try:
            yield
        finally:
            self.lm.fast = fast
            del self.lm._detect_batch_size, self.lm._loglikelihood_tokens  # the class's own again
