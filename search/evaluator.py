"""The harness as fitness: tasks, requests and scores are lm-eval's own; an engine answers.

lm-eval builds the requests once, from the examples set aside for searches. For every individual the engine sets the
factors and answers the requests (``lpes_eval.engine``), and the task's own filters, ``process_results`` and aggregation
turn the answers into scores.

    >>> evaluate = Evaluator(lm, load_tasks(lm, ["kv_retrieval"]))
    >>> evaluate([1.0, 1.2, 1.4, 1.3]).fitness
"""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from lm_eval.api.metrics import mean

from lpes_eval import rng
from lpes_eval.engine.exact import ExactEngine
from lpes_eval.engine.harness import HarnessEngine
from lpes_eval.engine.limits import draws
from lpes_eval.errors import PromptTooLong, UserError
from lpes_eval.factors import Factors
from search import engines, identity
from search.cache import FitnessCache
from search.early_stopping import ERROR, Race
from search.engines.cluster import Asked, ClusterEngine, Order
from search.tasks import Column, Objective

logger = logging.getLogger(__name__)

BOUNDED = {"acc", "acc_norm", "best_subspan_em", "em", "exact_match", "f1"}
"""Metrics whose values lie between 0 and 1."""
FEWEST = 12
"""Questions of a task on which an individual is measured at the least, if there are so many."""
CHECKS = 20
"""How often, at most, an individual is held against the cutoff while it is being measured."""
Examples = Mapping[str, Sequence[Any]]
"""Each column's metric for every example, by the column's name."""
Scored = dict[tuple[str, int], Mapping[str, Any]]
"""What ``process_results`` said of an example, by its task and number."""


@dataclass(frozen=True)
class Measured:
    """An individual's fitness and what it is made of.

    Attributes:
        fitness: the weighted sum, higher is better.
        scores: each column's score, by its name.
        examples: each column's metric for every example, in the order of ``Objective.docs``; None where the example was
            not asked.
        seconds: time it took; 0 if it was known.
        ended: for every prompt 1 where its answer ended by itself, 0 where it was cut at the most tokens allowed, None
            where it was not asked.
        stopped_after: prompts after which it was given up, 0 if it was not. ``fitness`` and ``scores`` are then those
            of the examples until then; there are no ``examples``.
    """

    fitness: float
    scores: dict[str, float]
    examples: dict[str, list[Any]]
    seconds: float = 0.0
    stopped_after: int = 0
    ended: list[int | None] = field(default_factory=list)


@dataclass(frozen=True)
class Cutoff:
    """The fitness below which an individual is of no use, and may be given up.

    Attributes:
        fitness: what has to be reached.
        examples: every example's score of the individual that has it, to compare with (``search.early_stopping``).
        error: how probable it may be that an individual is given up which would have reached it; 0 waits for proof.
    """

    fitness: float
    examples: Examples
    error: float = ERROR


class Evaluator:
    """Measures factors by tasks, on this machine.

    Args:
        lm: an lm-eval model over a transformers model; its weights and settings stay as they are.
        objectives: what is measured (``load_tasks``).
        cache: where to look up and keep what was measured, across runs.
        speed: ``search.engines.choose``'s further arguments.

    Attributes:
        engine: what answers.
        num_layers: layers of the model.
        prompts: how many prompts one individual is asked.
        prompt_tokens: their tokens; None where lm-eval's own loop answers.
        slow_because: why lm-eval's own loop answers; None where it need not.
        columns: all columns of the objectives, by name.
        progress: called with the number of answers so far, and of all, after every batch.
        questions: the examples, as objectives and numbers in ``Objective.docs``, those together that ask one question.

    Raises:
        PromptTooLong: a prompt of a task by position would be cut.
    """

    def __init__(
        self, lm: Any, objectives: Sequence[Objective], *, cache: FitnessCache | None = None, **speed: Any
    ) -> None:
        self.lm, self.objectives, self.cache = lm, list(objectives), cache
        self.progress: Callable[[int, int], None] = lambda answered, asked: None
        self._requests = [request for objective in objectives for request in objective.task.instances]
        self.engine, self.slow_because = engines.choose(lm, self._requests, **speed)
        self.num_layers = self.engine.num_layers
        self.prompts, self.prompt_tokens = len(self._requests), self.engine.prompt_tokens
        self.columns: dict[str, tuple[Objective, Column]] = {
            column.name: (objective, column) for objective in objectives for column in objective.columns
        }
        self._refuse_cut()
        self._scored: dict[str, Scored] = {}  # of factors that are measured, or expected
        self._numbers: dict[tuple[str, int], list[int]] = {}  # of an example: its requests
        for i, request in enumerate(self._requests):
            self._numbers.setdefault((request.task_name, request.doc_id), []).append(i)
        found: dict[tuple[str, Any], list[tuple[Objective, int]]] = {}
        for objective in objectives:
            for number, question in enumerate(objective.questions):
                found.setdefault((objective.name, question), []).append((objective, number))
        self.questions = list(found.values())

    def asked(self, part: Sequence[int] | None) -> int:
        """How many prompts some of the questions have (None: all)."""
        return self.prompts if part is None else sum(map(len, self.in_order(part)))

    def _refuse_cut(self) -> None:
        cut = iter(self.engine.cut)
        for objective in self.objectives:
            asked = len(objective.task.instances)
            if not (number := sum(next(cut) for _ in range(asked))):
                continue
            text = f"{objective.name}: {number} of {asked} prompts do not fit the model's {self.lm.max_length} tokens "
            text += "beside their answer"
            if objective.by_position:
                raise PromptTooLong(
                    f"{text}, and cut from the left the gold item would stand elsewhere; take shorter prompts, or a "
                    "model with a longer window (--model_args max_length=N, if it has)"
                )
            logger.warning("%s; lm-eval cuts them from the left", text)

    def in_order(self, order: Sequence[int]) -> Order:
        """The requests, by number, of each question in ``order``."""
        return tuple(
            tuple(i for objective, number in self.questions[u] for i in self._numbers[objective.name, number])
            for u in order
        )

    def part(self, share: float) -> list[int] | None:
        """The first questions of every task, by number, so that they are this share of all; None for all of them."""
        asked = [
            number
            for number, question in enumerate(self.questions)
            if question[0][1] < max(FEWEST, math.ceil(share * len(question[0][0].docs)))
        ]
        return None if len(asked) == len(self.questions) else asked

    def __call__(
        self, factors: Sequence[float] | Factors, cutoff: Cutoff | None = None, part: Sequence[int] | None = None
    ) -> Measured:
        """Measure the model with ``factors``, one a layer, which stay applied.

        Args:
            factors: one a layer, or factors as they are in a file.
            cutoff: when to give up.
            part: the questions to ask, by number; by default all.
        """
        factors = factors if isinstance(factors, Factors) else Factors.from_list(factors)
        kept, race, order = self._to_ask(factors, cutoff, part)
        if (known := self._known(kept)) is not None:
            if race is not None and race.lost(known["examples"]):
                return Measured(*race.partial, {}, stopped_after=race.asked)
            return self.score(known["examples"], ended=known.get("ended", []))
        start = time.perf_counter()
        self.engine.set_factors(factors.per_layer(self.num_layers))
        some = race is not None or part is not None or isinstance(self.engine, ClusterEngine)  # it hands out questions
        answers = self._answers(order if some else None, race, scored := self._scored.setdefault(kept, {}))
        examples = self._examples(answers, scored)
        del self._scored[kept]
        seconds = time.perf_counter() - start
        ended = [int(i not in self.engine.unended) if answer else None for i, answer in enumerate(answers)]
        whole = all(answers[i] for together in order for i in together)
        if self.cache is not None and whole:  # of one given up too, where all were under way by then
            self.cache.put(self._context, kept, {"examples": examples, "ended": ended})
        if race is not None and race.over:
            return Measured(*race.partial, {}, seconds, stopped_after=race.asked)
        return self.score(examples, seconds, ended)

    def expect(
        self,
        coming: Sequence[Factors],
        cutoff: Cutoff | None,
        part: Sequence[int] | None,
        guess: Callable[[], Sequence[Factors]] | None = None,
    ) -> None:
        """Factors that are to be measured next: an engine of several processes begins with what is not known.

        ``guess`` says what may come after them, as far as it can be told by then.
        """

        def asked(coming: Sequence[Factors]) -> Asked:
            found = []
            for factors in coming:
                kept, race, order = self._to_ask(factors, cutoff, part)
                if self._known(kept) is None:
                    found.append((factors.per_layer(self.num_layers), order, race is not None))
            return found

        self._scored.clear()
        if isinstance(self.engine, ClusterEngine):
            self.engine.expect(asked(coming), guess and (lambda: asked(guess())))

    def peek(self, factors: Factors, cutoff: Cutoff | None, part: Sequence[int] | None) -> float:
        """The fitness of factors that are expected, by the answers so far; -inf until half of them are there."""
        assert isinstance(self.engine, ClusterEngine)  # no other one guesses
        kept, _, order = self._to_ask(factors, cutoff, part)
        found = self.engine.found(factors.per_layer(self.num_layers), order)
        if 2 * len(found) < sum(map(len, order)):
            return -math.inf
        answers = [found.get(i, []) for i in range(len(self._requests))]
        examples = self._examples(answers, self._scored.setdefault(kept, {}))
        if not all(any(value is not None for value in values) for values in examples.values()):
            return -math.inf
        return self.score(examples).fitness

    def _to_ask(
        self, factors: Factors, cutoff: Cutoff | None, part: Sequence[int] | None
    ) -> tuple[str, _Racing | None, Order]:
        """The factors' name in the cache, their race, and the requests in the order in which they are asked."""
        name, questions = factors.digest(self.num_layers), list(range(len(self.questions)) if part is None else part)
        race = _Racing(self, name, cutoff, questions) if cutoff is not None and self.why_unbounded is None else None
        kept = name if part is None else f"{name} {questions}"
        return kept, race, self.in_order(questions if race is None else race.order)

    def _known(self, kept: str) -> dict[str, Any] | None:
        return self.cache.get(self._context, kept) if self.cache is not None else None

    def _answers(self, order: Sequence[Sequence[int]] | None, race: _Racing | None, scored: Scored) -> list[Any]:
        """The responses to every request; none to what is not in the order, or was not asked before the race was lost.

        Without an order all are asked.
        """
        answers: list[Any] = [[] for _ in self._requests]
        total = len(answers) if order is None else sum(map(len, order))
        answered = checked = 0
        for batch in self.engine.answer(order, may_stop=race is not None):
            for i, responses in batch.items():
                answers[i] = responses
            answered += len(batch)
            self.progress(answered, total)
            if race is None or (answered - checked < total / CHECKS and answered < total):
                continue
            checked = answered
            if race.lost(self._examples(answers, scored)):  # question after question: batches decide nothing
                break
        return answers

    def time_two_batches(self) -> tuple[int, float]:
        """Prompts in two batches (of each worker) drawn evenly, and the seconds they took under the plain model."""
        self.engine.set_factors([1.0] * self.num_layers)
        order = self.in_order(rng.shuffled(range(len(self.questions)), rng.stream("time")))
        start = time.perf_counter()
        batches = islice(self.engine.answer(order, may_stop=True), 2 * self.engine.workers)
        return sum(map(len, batches)), time.perf_counter() - start

    @cached_property
    def why_unbounded(self) -> str | None:
        """Why nothing can be said about the fitness before all answers are there; None if something can."""
        for request in self._requests:
            if draws(self.lm, [request]):
                return f"{request.task_name} draws its answers at random"
        for objective, column in self.columns.values():
            if objective.metric not in BOUNDED or objective.aggregation(column) is not mean:
                return f"{column.metric} of {objective.name} is not known to be a mean of values from 0 to 1"
        return None

    def _examples(self, answers: Sequence[Any], scored: Scored) -> dict[str, list[Any]]:
        """Each column's metric for every example, as ``evaluate`` collects it; None where an answer is missing.

        ``scored`` has the examples that are scored already, and is given the others.
        """
        for request, responses in zip(self._requests, answers, strict=True):
            request.resps, request.filtered_resps = responses or [""], {}
        found: dict[str, list[Any]] = {name: [] for name in self.columns}
        for objective in self.objectives:
            objective.task.apply_filters()
            for number, doc in enumerate(objective.docs):
                numbers = self._numbers[objective.name, number]
                metrics = scored.get((objective.name, number))
                if metrics is None and all(answers[i] for i in numbers):
                    requests = sorted((self._requests[i] for i in numbers), key=lambda request: request.idx)
                    filtered = [request.filtered_resps[objective.filter] for request in requests]
                    metrics = objective.task.process_results(copy.deepcopy(doc), filtered)
                    scored[objective.name, number] = metrics
                for column in objective.columns:
                    if metrics is not None and column.metric not in metrics:
                        has = ", ".join(metrics)
                        raise UserError(f"{objective.name} has no metric {column.metric!r}; it has {has}")
                    found[column.name].append(None if metrics is None else metrics[column.metric])
        return found

    def score(self, examples: Examples, seconds: float = 0.0, ended: Sequence[int | None] = ()) -> Measured:
        """Fitness and scores of what the examples got; those that were not asked (None) do not count."""
        asked = {name: [value for value in examples[name] if value is not None] for name in self.columns}
        scores = {name: float(o.aggregation(column)(asked[name])) for name, (o, column) in self.columns.items()}
        kept = {name: list(values) for name, values in examples.items()}
        return Measured(self._weighted(scores), scores, kept, seconds, ended=list(ended))

    def only(self, examples: Examples, part: Sequence[int], ended: Sequence[int | None] = ()) -> Measured:
        """Of examples that are all known, those of some questions."""
        prompts = {i for together in self.in_order(part) for i in together}
        asked = {(objective.name, number) for u in part for objective, number in self.questions[u]}
        return self.score(
            {
                name: [v if (objective.name, n) in asked else None for n, v in enumerate(examples[name])]
                for name, (objective, _) in self.columns.items()
            },
            ended=[one if i in prompts else None for i, one in enumerate(ended)],
        )

    def _weighted(self, scores: Mapping[str, float]) -> float:
        return sum(column.weight * objective.sign * scores[name] for name, (objective, column) in self.columns.items())

    def describe(self) -> dict[str, Any]:
        """What is measured, as plain data: equal where the same individual would get the same fitness."""
        asked = [[request.task_name, request.doc_id, request.args] for request in self._requests]
        return {
            "tasks": [
                {
                    "task": objective.name,
                    "version": str(objective.task.VERSION),
                    "weights": {column.metric: column.weight for column in objective.columns},
                    "filter": objective.filter,
                    **({"lower_is_better": True} if objective.sign < 0 else {}),
                    "examples": len(objective.docs),
                    "config_sha256": identity.sha256(_settings(objective.task)),
                    "code_sha256": identity.code(*_code_of(objective.task)),
                }
                for objective in self.objectives
            ],
            "requests_sha256": identity.sha256([asked, [objective.docs for objective in self.objectives]]),
            "reading": identity.reading(self.lm),
            "model": self.engine.fingerprint(),
            "code_sha256": identity.code(type(self.lm), type(self), ExactEngine, HarnessEngine),
            **self.engine.identity,
        }

    @cached_property
    def described(self) -> dict[str, Any]:
        """``describe()`` as it was first, which reads all of the model's weights."""
        return self.describe()

    @cached_property
    def _context(self) -> str:
        """What the examples' scores depend on, for the cache: not the weights, which make one sum of them."""
        tasks = [{**task, "weights": list(task["weights"])} for task in self.described["tasks"]]
        return json.dumps({**self.described, "tasks": tasks, "packages": identity.packages()}, sort_keys=True)


class _Racing:
    """An individual's race against the cutoff's, over the questions in an order drawn for it alone.

    Attributes:
        order: the questions in their order, by number.
        over: whether it was given up.
        asked: prompts that it took to give it up; others may have been answered in the same batch.
        partial: fitness and scores of these.
    """

    def __init__(self, evaluator: Evaluator, name: str, cutoff: Cutoff, questions: Sequence[int]) -> None:
        self._evaluator, self._cutoff = evaluator, cutoff.fitness
        self._examples_of = [
            [(column.name, number) for objective, number in evaluator.questions[u] for column in objective.columns]
            for u in questions
        ]
        asked = Counter(column for examples in self._examples_of for column, _ in examples)
        # What each question can add to the fitness: a share of every column's mean for each of its examples.
        self._share = {
            name: column.weight * objective.sign / asked[name]
            for name, (objective, column) in evaluator.columns.items()
        }
        self._prompts = list(map(len, evaluator.in_order(questions)))
        sums = [[self._share[column] for column, _ in examples] for examples in self._examples_of]
        lows = [sum(min(s, 0.0) for s in shares) for shares in sums]
        highs = [sum(max(s, 0.0) for s in shares) for shares in sums]
        reached = [self._value(number, cutoff.examples) for number in range(len(self._examples_of))]
        self._race = Race(lows, highs, reached, cutoff.error, margin=cutoff.fitness - math.fsum(reached))
        self._order = rng.shuffled(range(len(questions)), rng.stream("order", name))
        self.order = [questions[k] for k in self._order]
        self.over, self._next, self.asked = False, 0, 0
        self._seen: dict[str, list[float]] = {}
        self.partial: tuple[float, dict[str, float]] = (0.0, {})

    def _value(self, question: int, examples: Examples) -> float:
        return sum(self._share[column] * examples[column][number] for column, number in self._examples_of[question])

    def lost(self, examples: Examples) -> bool:
        """Take in the questions whose examples are all there (None stands for one that is not), as far as it takes."""
        for question in self._order[self._next :]:
            members = self._examples_of[question]
            if any(examples[column][number] is None for column, number in members):
                return False
            for column, number in members:
                if not 0 <= (value := examples[column][number]) <= 1:
                    metric = self._evaluator.columns[column][1].metric
                    raise UserError(f"{column}: {metric} is not from 0 to 1; leave --early_stopping out")
                self._seen.setdefault(column, []).append(value)
            self._race.take(question, self._value(question, examples))
            self._next += 1
            self.asked += self._prompts[question]
            if self._race.lost and len(self._seen) == len(self._share) and self._next < len(self._order):
                scores = {column: float(mean(values)) for column, values in self._seen.items()}
                fitness = self._evaluator._weighted(scores)
                self.partial = min(fitness, math.nextafter(self._cutoff, -math.inf)), scores
                self.over = True
                break
        return self.over


def _code_of(task: Any) -> list[Any]:
    """Whatever a task's scores are computed by."""
    metrics = getattr(task, "_metric_fn_list", {})
    return [type(task), vars(task.config), metrics, task.aggregation(), [e.filters for e in task._filters]]


def _settings(task: Any) -> dict[str, Any]:
    """A task's configuration, wherever its YAML file lies."""
    metadata = {name: value for name, value in (task.config.metadata or {}).items() if name != "config_source"}
    return {**vars(task.config), "metadata": metadata}
