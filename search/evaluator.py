"""The harness as fitness: tasks, requests and scores are lm-eval's own; only the answers come faster.

lm-eval builds the requests once, from the examples set aside for searches. For every individual the model gets its
factors in place, answers the requests (``search.answering``, or lm-eval itself where that cannot be exact), and the
task's own filters, ``process_results`` and aggregation turn the answers into a score.

    >>> fitness = Fitness(lm, load_parts(lm, ["kv_retrieval"]))
    >>> fitness([1.0, 1.2, 1.4, 1.3]).fitness
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from lm_eval.api.metrics import mean
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.huggingface import HFLM

from lpes_eval import rng, rope
from lpes_eval.errors import PromptTooLong, UserError
from lpes_eval.factors import Factors
from lpes_eval.files import write_atomically
from search import identity
from search.answering import Answerer, Count, Tokens, is_cut, reason_against
from search.identity import fingerprint, packages
from search.parts import Part
from search.stopping import Race

logger = logging.getLogger(__name__)

BOUNDED = {"acc", "acc_norm", "best_subspan_em", "em", "exact_match", "f1"}
"""Metrics whose values lie between 0 and 1."""
CHECKS = 20
"""How often, at most, an individual is held against the floor while it is being measured."""
Examples = Mapping[str, Sequence[Any]]
"""Each part's metric for every example, by the part's name."""


@dataclass(frozen=True)
class Measured:
    """An individual's fitness and what it is made of.

    Attributes:
        fitness: the weighted sum, higher is better.
        scores: each part's score, by the part's name.
        examples: each part's metric for every example, in the order of ``Part.docs``.
        seconds: time it took; 0 if it was known.
        stopped_after: prompts after which it was given up, 0 if it was not. ``fitness`` and ``scores`` are then what it
            could have reached at best, or, where it was given up as improbable, those of the examples until then; there
            are no ``examples``.
    """

    fitness: float
    scores: dict[str, float]
    examples: dict[str, list[Any]]
    seconds: float = 0.0
    stopped_after: int = 0


class Fitness:
    """Measures factors by tasks.

    Args:
        lm: an lm-eval model over a transformers model; its weights and settings stay as they are.
        parts: what is measured (``load_parts``).
        fast: answer with ``search.answering`` where that is exact.
        share_prefixes: of it, prefill common beginnings once.
        draft: of it, check answers of the past before decoding.
        look_up: of it, check what followed the same tokens before, in the prompt or in the answer.
        few_logits: of it, compute logits only where they decide.
        tokens_per_batch: of it, the batch's size; with ``None`` its own.
        prompts_per_batch: of it, the batch's size in prompts instead.
        cache: where to look up and keep what was measured, across runs.

    Attributes:
        num_layers: layers of the model.
        slow_because: why lm-eval's own loop answers; None where it need not.
        cut: how many prompts lose their beginning because they do not fit the model, by the part's name.
        units: the examples, as parts and numbers in ``Part.docs``, those together that ask one question.

    Raises:
        PromptTooLong: a prompt of a task that comes by position would be cut.
    """

    def __init__(
        self,
        lm: Any,
        parts: Sequence[Part],
        *,
        fast: bool = True,
        share_prefixes: bool = True,
        draft: bool = True,
        look_up: bool = True,
        few_logits: bool = True,
        tokens_per_batch: int | None = None,
        prompts_per_batch: int | None = None,
        cache: FitnessCache | None = None,
    ) -> None:
        self.lm, self.parts = lm, list(parts)
        self.num_layers = len(rope.find_decoder(lm.model).layers)
        self._requests = [request for part in parts for request in part.task.instances]
        self.slow_because = reason_against(lm, self._requests) if fast else "it was asked for"
        self._answerer: Answerer | None = None
        if self.slow_because is None:
            self._answerer = Answerer(
                lm,
                self._requests,
                share_prefixes=share_prefixes,
                draft=draft,
                look_up=look_up,
                few_logits=few_logits,
                tokens_per_batch=tokens_per_batch,
            )
            if prompts_per_batch is not None:
                self._answerer.tokens_per_batch = prompts_per_batch * self._answerer.longest
        self.cut = self._refuse_or_count_cut()
        self.units = self._units()
        self._batch_sizes: dict[int | None, int] = {}
        self._tokens: dict[str, list[Tokens]] = {}
        self.cache = cache
        self._context = self._describe() if cache is not None else ""

    @property
    def prompts(self) -> int:
        """How many prompts one individual is asked."""
        return len(self._requests)

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of these prompts, where they are known."""
        return self._answerer.prompt_tokens if self._answerer is not None else None

    def _refuse_or_count_cut(self) -> dict[str, int]:
        if self._answerer is not None:
            cut = self._answerer.cut
        else:
            cut = [is_cut(self.lm, request) for request in self._requests]
        found = {part.name: 0 for part in self.parts}
        asked = (part for part in self.parts for _ in part.task.instances)
        for part, whether in zip(asked, cut, strict=True):
            found[part.name] += whether
        for part in self.parts:
            if not (number := found[part.name]):
                continue
            said = f"{part.name}: {number} of {len(part.task.instances)} prompts do not fit the model's "
            said += f"{self.lm.max_length} tokens beside their answer"
            if part.position is not None:
                raise PromptTooLong(
                    f"{said}, and cut from the left the gold item would stand elsewhere; take shorter prompts, or a "
                    "model with a longer window (--model_args max_length=N, if it has)"
                )
            logger.warning("%s; lm-eval cuts them from the left", said)
        return {name: number for name, number in found.items() if number}

    def _units(self) -> list[list[tuple[Part, int]]]:
        units: dict[tuple[str, Any], list[tuple[Part, int]]] = {}
        for part in self.parts:
            for order, question in enumerate(part.questions):
                units.setdefault((part.stem, question), []).append((part, order))
        return list(units.values())

    def in_order(self, order: Sequence[int]) -> list[list[int]]:
        """The requests, by number, of each unit in ``order``."""
        of_example: dict[tuple[str, int], list[int]] = {}
        names = (part.name for part in self.parts for _ in part.task.instances)
        for i, (name, request) in enumerate(zip(names, self._requests, strict=True)):
            of_example.setdefault((name, request.doc_id), []).append(i)
        return [[i for part, order in self.units[u] for i in of_example[part.name, order]] for u in order]

    @property
    def count(self) -> Count | None:
        """What answering has cost so far."""
        return self._answerer.count if self._answerer is not None else None

    def __call__(
        self,
        factors: Sequence[float] | Factors,
        parent: Sequence[float] | Factors | None = None,
        floor: float | None = None,
        rival: Examples | None = None,
        error: float = 0.01,
    ) -> Measured:
        """Measure the model with ``factors``, which stay applied.

        Args:
            factors: one a layer, or factors as they are in a file.
            parent: factors whose answers are likely to be similar; measured before, or of no use.
            floor: give up as soon as the fitness cannot reach this any more, were all remaining answers perfect.
            rival: every example's score of an individual whose fitness is ``floor``: give up as soon as it is
                improbable that the fitness reaches it (``search.stopping``), also if the cache would know.
            error: how probable it may be that an individual is given up so which would have reached it.
        """
        values = self._per_layer(factors)
        name = _digest(values)
        floor = floor if self.why_unbounded() is None else None
        race = _Racing(self, name, rival, floor, error) if rival is not None and floor is not None else None
        if self.cache is not None and (known := self.cache.get(self._context, name)) is not None:
            if race is not None and race.lost(known["examples"]):
                return Measured(*race.partial, {}, stopped_after=race.asked)
            return self._score(known["examples"])
        start = time.perf_counter()
        rope.apply(self.lm.model, values)
        drafts = self._tokens.get(_digest(self._per_layer(parent))) if parent is not None else None
        if floor is not None:
            answers, partial = self._answers_while(name, drafts, floor, race)
            if partial is not None:
                if self.cache is not None and all(answers):  # all were under way when it was given up
                    self.cache.put(self._context, name, {"examples": self._examples(answers)})
                asked = race.asked if race is not None else sum(map(bool, answers))
                return Measured(*partial, {}, time.perf_counter() - start, stopped_after=asked)
        else:
            answers = self._answers(name, drafts)
        examples = self._examples(answers)
        measured = self._score(examples, time.perf_counter() - start)
        if self.cache is not None:
            self.cache.put(self._context, name, {"examples": examples})
        return measured

    def _per_layer(self, factors: Sequence[float] | Factors) -> list[float]:
        return factors.per_layer(self.num_layers) if isinstance(factors, Factors) else list(factors)

    def _answers(self, name: str, drafts: Sequence[Tokens] | None) -> list[Any]:
        """A response for every request, ``repeats`` of them where a task asks for several."""
        if self._answerer is not None:
            texts, self._tokens[name] = self._answerer.answer(drafts)
            return [[text] * request.repeats for text, request in zip(texts, self._requests, strict=True)]
        random.seed(DEFAULT_RANDOM_SEED)  # as simple_evaluate, for tasks that sample
        numpy.random.seed(DEFAULT_OTHER_SEED)
        torch.manual_seed(DEFAULT_OTHER_SEED)
        responses: list[list[Any]] = [[] for _ in self._requests]
        by_type: dict[str, list[int]] = {}
        for i, request in enumerate(self._requests):
            by_type.setdefault(request.request_type, []).extend([i] * request.repeats)
        with self._batch_size_found_once():
            for request_type, numbers in by_type.items():
                found = getattr(self.lm, request_type)([self._requests[i] for i in numbers], disable_tqdm=True)
                for i, response in zip(numbers, found, strict=True):
                    responses[i].append(response)
        return responses

    def time_a_batch(self) -> tuple[int, float] | None:
        """Prompts in a batch of prompts drawn evenly, and the seconds that it took under the factors now in force.

        It is the second batch, where there is one: the first also pays for what happens once. None where lm-eval's own
        loop answers, which has no batches to be timed one by one.
        """
        if self._answerer is None:
            return None
        order = self.in_order(rng.shuffled(range(len(self.units)), rng.stream("time")))
        batches, timed = self._answerer.answer_in_batches(order=order), None
        for _ in range(2):
            start = time.perf_counter()
            if (batch := next(batches, None)) is None:
                break
            timed = len(batch), time.perf_counter() - start
        return timed

    @contextlib.contextmanager
    def _batch_size_found_once(self) -> Iterator[None]:
        """Have ``hf`` with batches of ``auto`` try out a length once, and not for every individual anew."""
        if not isinstance(self.lm, HFLM):
            yield
            return
        detect = self.lm._detect_batch_size

        def once(requests: Sequence[Any] | None = None, pos: int = 0) -> int:
            length = len(requests[pos][1] + requests[pos][2]) if requests else None
            if length not in self._batch_sizes:
                self._batch_sizes[length] = detect(requests, pos)
            return self._batch_sizes[length]

        self.lm._detect_batch_size = once
        try:
            yield
        finally:
            del self.lm._detect_batch_size  # the class's own again

    def why_unbounded(self) -> str | None:
        """Why nothing can be said about the fitness before all answers are there; None if something can."""
        if self._answerer is None:
            return f"lm-eval's own loop answers ({self.slow_because})"
        for part in self.parts:
            if part.metric not in BOUNDED or part.task.aggregation().get(part.metric, mean) is not mean:
                return f"{part.metric} of {part.name} is not known to be a mean of values from 0 to 1"
        return None

    def _answers_while(
        self, name: str, drafts: Sequence[Tokens] | None, floor: float, race: _Racing | None
    ) -> tuple[list[Any], tuple[float, dict[str, float]] | None]:
        """As ``_answers``, or the answers so far and fitness and scores to be reported, once it is given up."""
        assert self._answerer is not None
        tokens: dict[int, Tokens] = {}
        answers: list[Any] = [[] for _ in self._requests]
        checked = 0
        for batch in self._answerer.answer_in_batches(drafts, self.in_order(race.order) if race is not None else None):
            tokens |= batch
            for i in batch:
                answers[i] = [self._answerer.text(i, batch[i])] * self._requests[i].repeats
            complete = len(tokens) == len(answers)
            if len(tokens) - checked < len(answers) / CHECKS and not complete:
                continue
            checked = len(tokens)
            if race is not None:  # it looks at question after question, so at the end too: batches decide nothing
                if race.lost(self._examples(answers)):
                    return answers, race.partial
            elif not complete:
                fitness, scores = self._bound(answers)
                if fitness < floor - 1e-9:  # sums are rounded
                    return answers, (fitness, scores)
        self._tokens[name] = [tokens[i] for i in range(len(answers))]
        return answers, None

    def _bound(self, answers: Sequence[Any]) -> tuple[float, dict[str, float]]:
        """The fitness, and its scores, if every answer that is missing were perfect."""
        examples, scores = self._examples(answers), {}
        for part in self.parts:
            perfect = 1.0 if part.sign > 0 else 0.0
            values = [perfect if value is None else value for value in examples[part.name]]
            _check_bounded(part, values)
            scores[part.name] = float(mean(values))
        return sum(part.weight * part.sign * scores[part.name] for part in self.parts), scores

    def _examples(self, answers: Sequence[Any]) -> dict[str, list[Any]]:
        """Each part's metric for every example, as ``lm_eval.evaluate`` collects it; None where no answer is there."""
        missing = {id(request) for request, responses in zip(self._requests, answers, strict=True) if not responses}
        for request, responses in zip(self._requests, answers, strict=True):
            request.resps, request.filtered_resps = responses or [""], {}
        found: dict[str, list[Any]] = {}
        for part in self.parts:
            part.task.apply_filters()
            of_doc: dict[int, list[Any]] = {}
            for request in part.task.instances:
                of_doc.setdefault(request.doc_id, []).append(request)
            values: list[Any] = []
            for order, doc in enumerate(part.docs):
                requests = sorted(of_doc[order], key=lambda request: request.idx)
                if any(id(request) in missing for request in requests):
                    values.append(None)
                    continue
                filtered = [request.filtered_resps[part.filter] for request in requests]
                metrics = part.task.process_results(copy.deepcopy(doc), filtered)
                if part.metric not in metrics:
                    raise UserError(f"{part.name} has no metric {part.metric!r}; it has {', '.join(metrics)}")
                values.append(metrics[part.metric])
            found[part.name] = values
        return found

    def _score(self, examples: dict[str, list[Any]], seconds: float = 0.0) -> Measured:
        scores = {}
        for part in self.parts:
            aggregate = part.task.aggregation().get(part.metric, mean)
            scores[part.name] = float(aggregate(examples[part.name]))
        fitness = sum(part.weight * part.sign * scores[part.name] for part in self.parts)
        return Measured(fitness, scores, examples, seconds)

    def describe(self) -> dict[str, Any]:
        """What is measured, as plain data: equal where the same individual would get the same fitness."""
        asked = [[request.task_name, request.doc_id, request.args] for request in self._requests]
        parts = [
            {
                "task": part.name,
                "version": str(part.task.VERSION),
                "metric": f"{part.metric},{part.filter}",
                "weight": part.weight,
                "examples": len(part.docs),
                "config_sha256": identity.sha256(vars(part.task.config)),
                "code_sha256": identity.code(*_code_of(part.task)),
            }
            for part in self.parts
        ]
        return {
            "parts": parts,
            "requests_sha256": identity.sha256([asked, [part.docs for part in self.parts]]),
            "reading": identity.reading(self.lm),
            "model": fingerprint(self.lm.model),
            "code_sha256": identity.code(type(self.lm), type(self)),
        }

    def _describe(self) -> str:
        described = self.describe()
        for part in described["parts"]:
            del part["weight"]  # examples are kept, not their weighted sum
        return json.dumps({**described, "packages": packages()}, sort_keys=True)


class _Racing:
    """An individual's race against a rival, over the questions in an order drawn for it alone.

    Attributes:
        order: the order, as numbers of ``Fitness.units``.
        asked: prompts that it took to give it up; others may have been answered in the same batch.
        partial: fitness and scores of these.
    """

    def __init__(self, fitness: Fitness, name: str, rival: Examples, floor: float, error: float) -> None:
        self._parts, self._rival, self._floor = fitness.parts, rival, floor
        self._units = fitness.units
        self._prompts = list(map(len, fitness.in_order(range(len(self._units)))))
        # What each unit can add to the fitness: a share of every part's mean for each of its examples.
        share = {part.name: part.weight * part.sign / len(part.docs) for part in self._parts}
        sums = [[share[part.name] for part, _ in unit] for unit in self._units]
        lows = [sum(min(s, 0.0) for s in shares) for shares in sums]
        highs = [sum(max(s, 0.0) for s in shares) for shares in sums]
        self._share = share
        self._race = Race(lows, highs, [self._value(unit, rival) for unit in self._units], error)
        self.order = rng.shuffled(range(len(self._units)), rng.stream("order", name))
        self._next = self.asked = 0
        self._seen: dict[str, list[float]] = {}
        self.partial: tuple[float, dict[str, float]] = (0.0, {})

    def _value(self, unit: Sequence[tuple[Part, int]], examples: Examples) -> float:
        return sum(self._share[part.name] * examples[part.name][order] for part, order in unit)

    def lost(self, examples: Examples) -> bool:
        """Take in the units whose examples are all there (None stands for one that is not), as far as it takes."""
        for number in self.order[self._next :]:
            unit = self._units[number]
            if any(examples[part.name][order] is None for part, order in unit):
                return False
            for part, order in unit:
                _check_bounded(part, [examples[part.name][order]])
                self._seen.setdefault(part.name, []).append(examples[part.name][order])
            self._race.take(number, self._value(unit, examples))
            self._next += 1
            self.asked += self._prompts[number]
            if self._race.lost and len(self._seen) == len(self._parts) and self._next < len(self.order):
                scores = {part.name: float(mean(self._seen[part.name])) for part in self._parts}
                so_far = sum(part.weight * part.sign * scores[part.name] for part in self._parts)
                self.partial = min(so_far, math.nextafter(self._floor, -math.inf)), scores
                return True
        return False


class FitnessCache:
    """Every example's score under factors that were measured before, in a folder that searches share.

    An entry is a small JSON file, replaced whole, so any number of processes may read and write at once. Its name is a
    hash of what the scores depend on: factors, model, tokenizer, requests with their documents, the tasks' settings and
    source files, package versions, and this package's own source files where they are not an installed version. What a
    task's code reads from elsewhere is not in it.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._warned = False

    def _path(self, context: str, name: str) -> Path:
        key = hashlib.sha256(f"{context}\n{name}".encode()).hexdigest()
        return self._folder / key[:2] / f"{key}.json"

    def get(self, context: str, name: str) -> dict[str, Any] | None:
        """What is known about factors ``name`` (their digest); a file that cannot be read counts as not there."""
        try:
            entry = json.loads(self._path(context, name).read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(entry, dict) or (entry.get("context"), entry.get("factors")) != (context, name):
            return None
        return entry

    def put(self, context: str, name: str, entry: Mapping[str, Any]) -> None:
        """Keep an entry; where the folder cannot be written to, say so once and keep nothing."""
        text = json.dumps({"context": context, "factors": name, **entry}, default=lambda number: number.item())  # numpy
        try:
            write_atomically(self._path(context, name), text + "\n")
        except OSError as error:
            if not self._warned:
                logger.warning("%s: what is measured cannot be kept for other searches (%s)", self._folder, error)
            self._warned = True


def _code_of(task: Any) -> list[Any]:
    """Whatever a task's scores are computed by."""
    metrics = getattr(task, "_metric_fn_list", {})
    return [type(task), vars(task.config), metrics, task.aggregation(), [e.filters for e in task._filters]]


def _digest(per_layer: Sequence[float]) -> str:
    return Factors(factors=tuple(per_layer)).digest()


def _check_bounded(part: Part, values: Sequence[Any]) -> None:
    if not all(0 <= value <= 1 for value in values):
        raise UserError(f"{part.metric} of {part.name} is not from 0 to 1; leave --early_stopping out")
