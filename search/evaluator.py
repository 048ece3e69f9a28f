"""The harness as fitness: requests and scores are lm-eval's own, and an engine answers (``lpes_eval.engine``).

>>> evaluate = Evaluator(lm, load_tasks(lm, ["kv_retrieval"]))
>>> evaluate([1.0, 1.2, 1.4, 1.3]).fitness
"""

from __future__ import annotations

import copy
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
from lpes_eval.engine import engine_for
from lpes_eval.engine.limits import draws
from lpes_eval.errors import PromptTooLong, UserError
from lpes_eval.factors import Factors
from lpes_eval.harness.task import PositionTask
from search.answer_loss import gold_answer, log_likelihoods
from search.early_stopping import Race
from search.journal import sha256
from search.space import Cutoff, Examples
from search.tasks import Objective

logger = logging.getLogger(__name__)

Shares = Sequence[tuple[str, int, float]]
"""Of a question's examples: the column, the number, and what a score of 1 adds to the fitness."""
BOUNDED = {"acc", "acc_norm", "best_subspan_em", "em", "exact_match", "f1", "first_value_acc"}
"""Metrics whose values lie between 0 and 1."""
CHECKS = 20
"""How often, at most, an individual is held against the cutoff while it is being measured."""


@dataclass(frozen=True)
class Measured:
    """What an entry of the journal has of a measurement; of one that was given up, the scores until then."""

    fitness: float
    scores: dict[str, float]
    examples: Examples
    seconds: float = 0.0
    stopped_after: int = 0
    ended: list[int | None] = field(default_factory=list)


class Evaluator:
    """Measures factors by tasks (``load_tasks``), on this machine.

    The weights and settings of the lm-eval model stay as they are. ``speed`` are further arguments of ``engine_for``,
    whose ``fast`` is the model's own choice. After every batch ``progress`` is called with the number of answers so
    far, and of all. ``PromptTooLong``: a prompt of a task by position would be cut.
    """

    questions: list[list[tuple[Objective, int]]]
    """The examples, as objectives and numbers in ``Objective.docs``, those together that ask one question."""

    def __init__(self, lm: Any, objectives: Sequence[Objective], **speed: Any) -> None:
        self.lm, self.objectives = lm, list(objectives)
        self.progress: Callable[[int, int], None] = lambda answered, prompts: None
        self._requests = [request for objective in objectives for request in objective.task.instances]
        speed = {"fast": getattr(lm, "engine_answers", True)} | speed
        self.engine, self.slow_because = engine_for(lm, self._requests, **speed)
        self.num_layers = self.engine.num_layers
        self.prompts, self.prompt_tokens = len(self._requests), self.engine.prompt_tokens
        self.columns = {column.name: (objective, column) for objective in objectives for column in objective.columns}
        self._refuse_cut()
        self._numbers: dict[tuple[str, int], list[int]] = {}  # of an example: its requests, in lm-eval's order
        for i, request in sorted(enumerate(self._requests), key=lambda pair: pair[1].idx):
            self._numbers.setdefault((request.task_name, request.doc_id), []).append(i)
        questions: dict[tuple[str, Any], list[tuple[Objective, int]]] = {}
        for objective in objectives:
            for number, question in enumerate(objective.questions):
                questions.setdefault((objective.name, question), []).append((objective, number))
        self.questions = list(questions.values())

    def _refuse_cut(self) -> None:
        cut = iter(self.engine.cut)
        for objective in self.objectives:
            prompts = len(objective.task.instances)
            if not (number := sum(islice(cut, prompts))):
                continue
            text = f"{objective.name}: {number} of {prompts} prompts do not fit the model's {self.lm.max_length} "
            text += "tokens beside their answer"
            if objective.by_position:
                way = "take shorter prompts, or a model with a longer window (--model_args max_length=N, if it has)"
                raise PromptTooLong(f"{text}, and cut from the left the gold item would stand elsewhere; {way}")
            logger.warning("%s; lm-eval cuts them from the left", text)

    def in_order(self, part: Sequence[int] | None) -> list[list[int]]:
        """The requests, by number, of each of these questions (None: all)."""
        asked = [self.questions[u] for u in self._all(part)]
        return [[i for task, number in question for i in self._numbers[task.name, number]] for question in asked]

    def asked(self, part: Sequence[int] | None) -> int:
        """How many prompts some of the questions have (None: all)."""
        return sum(map(len, self.in_order(part)))

    def part(self, examples: tuple[int, int] | None) -> list[int] | None:
        """The questions of every task's examples from the first of these numbers to before the second; None for all."""
        if examples is None:
            return None
        first, end = examples
        part = [number for number, question in enumerate(self.questions) if first <= question[0][1] < end]
        return None if len(part) == len(self.questions) else part

    def by_question(self, examples: Examples, part: Sequence[int] | None, measure: str = "score") -> list[float]:
        """What each question came to, so that their mean is the fitness; empty where the fitness is no mean."""
        is_mean = all(objective.aggregation(column) is mean for objective, column in self.columns.values())
        if measure == "score" and not is_mean:
            return []
        shares = self.shares(self._all(part), signed=measure == "score")
        return [len(shares) * _value(of_question, examples) for of_question in shares]

    def shares(self, part: Sequence[int], signed: bool = True) -> list[Shares]:
        """What each question can add to the fitness: a share of every column's mean for each of its examples."""
        questions = [self.questions[u] for u in part]
        asked = Counter(c.name for together in questions for objective, _ in together for c in objective.columns)
        return [
            [
                (column.name, number, column.weight * (objective.sign if signed else 1) / asked[column.name])
                for objective, number in together
                for column in objective.columns
            ]
            for together in questions
        ]

    def _all(self, part: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.questions)) if part is None else part

    @property
    def has_likelihood(self) -> bool:
        """Whether ``likelihood`` can be measured: of generated answers, by transformers."""
        written = all(objective.task.OUTPUT_TYPE == "generate_until" for objective in self.objectives)
        return written and "engine" not in self.engine.identity

    def __call__(
        self,
        factors: Sequence[float] | Factors | None,
        cutoff: Cutoff | None = None,
        part: Sequence[int] | None = None,
        settle: bool = False,
    ) -> Measured:
        """Measure the model with ``factors``, one a layer or as in a file, which stay applied; None leaves it as it is.

        ``part`` are the questions to ask, by number (by default all), ``cutoff`` says when to give up. With ``settle``
        answers end, and count as cut, once nothing can change their score (``PositionTask.settled``).
        """
        race, order = None, None if part is None else self.in_order(part)
        start = time.perf_counter()
        if factors is not None:
            factors = factors if isinstance(factors, Factors) else Factors.from_list(factors)
            if cutoff is not None and self.why_unbounded is None:
                race = _Racing(self, factors.digest(self.num_layers), cutoff, self._all(part))
                order = self.in_order(race.order)
            self.engine.set_factors(factors.per_layer(self.num_layers))
        answers, examples = self._answers(order, race, self._settled if settle else None)
        seconds = time.perf_counter() - start
        if race is not None and race.partial is not None:
            return Measured(*race.partial, {}, seconds, stopped_after=race.asked)
        ended = [int(i not in self.engine.unended) if answer else None for i, answer in enumerate(answers)]
        return self.score(examples, seconds, ended)

    def _settled(self, i: int, answer: str) -> bool:
        """Whether nothing can change the score of a request's answer any more."""
        request = self._requests[i]
        [objective] = [each for each in self.objectives if each.name == request.task_name]
        task = objective.task
        if not (isinstance(task, PositionTask) and objective.by_position and objective.filter == "none"):
            return False
        return task.settled(objective.metric, request.doc, task.positions[request.idx], answer)

    def _answers(
        self, order: Sequence[Sequence[int]] | None, race: _Racing | None, settled: Callable[[int, str], bool] | None
    ) -> tuple[list[Any], dict[str, list[Any]]]:
        """The responses to every request (none where it was not asked), and each column's metric for every example."""
        answers: list[Any] = [[] for _ in self._requests]
        scored: dict[tuple[str, int], Mapping[str, Any]] = {}
        total = len(answers) if order is None else sum(map(len, order))
        answered = checked = 0
        for batch in self.engine.answer(order, may_stop=race is not None, settled=settled):
            for i, responses in batch.items():
                answers[i] = responses
            answered += len(batch)
            self.progress(answered, total)
            if race is None or (answered - checked < total / CHECKS and answered < total):
                continue
            checked = answered
            if race.lost(self._examples(answers, scored)):  # question after question: batches decide nothing
                break
        return answers, self._examples(answers, scored)

    def _examples(
        self, answers: Sequence[Any], scored: dict[tuple[str, int], Mapping[str, Any]]
    ) -> dict[str, list[Any]]:
        """Each column's metric for every example, as ``evaluate`` collects it; None where an answer is missing."""
        for request, responses in zip(self._requests, answers, strict=True):
            request.resps, request.filtered_resps = responses or [""], {}
        examples: dict[str, list[Any]] = {name: [] for name in self.columns}
        for objective in self.objectives:
            objective.task.apply_filters()
            for number, doc in enumerate(objective.docs):
                numbers = self._numbers[objective.name, number]
                metrics = scored.get((objective.name, number))
                if metrics is None and all(answers[i] for i in numbers):
                    filtered = [self._requests[i].filtered_resps[objective.filter] for i in numbers]
                    metrics = objective.task.process_results(copy.deepcopy(doc), filtered)
                    scored[objective.name, number] = metrics
                for column in objective.columns:
                    if metrics is not None and column.metric not in metrics:
                        has = ", ".join(metrics)
                        raise UserError(f"{objective.name} has no metric {column.metric!r}; it has {has}")
                    examples[column.name].append(None if metrics is None else metrics[column.metric])
        return examples

    def score(self, examples: Examples, seconds: float = 0.0, ended: Sequence[int | None] = ()) -> Measured:
        """Fitness and scores of what the examples got; those that were not asked (None) do not count."""
        scores = {}
        for name, (objective, column) in self.columns.items():
            values = [value for value in examples[name] if value is not None]
            scores[name] = float(objective.aggregation(column)(values))
        return Measured(self.weighted(scores), scores, examples, seconds, ended=list(ended))

    def weighted(self, scores: Mapping[str, float]) -> float:
        """The fitness of these columns' scores."""
        return sum(column.weight * objective.sign * scores[name] for name, (objective, column) in self.columns.items())

    def likelihood(self, factors: Sequence[float] | Factors, part: Sequence[int] | None = None) -> Measured:
        """The mean log-likelihood of the reference answers' tokens as the scores: one pass a prompt, no decoding."""
        factors = factors if isinstance(factors, Factors) else Factors.from_list(factors)
        start = time.perf_counter()
        self.engine.set_factors(factors.per_layer(self.num_layers))
        examples: dict[str, list[Any]] = {name: [None] * len(of.docs) for name, (of, _) in self.columns.items()}
        for u in self._all(part):
            for objective, number in self.questions[u]:
                both = zip(self._numbers[objective.name, number], objective.columns, strict=True)
                pairs = [gold_answer(self.lm, objective, self._requests[i], column.position) for i, column in both]
                for column, value in zip(objective.columns, log_likelihoods(self.lm.model, pairs), strict=True):
                    examples[column.name][number] = value
        scores = {name: mean([v for v in values if v is not None]) for name, values in examples.items()}
        fitness = sum(column.weight * scores[name] for name, (_, column) in self.columns.items())
        return Measured(fitness, scores, examples, time.perf_counter() - start)

    def time_two_batches(self) -> tuple[int, float]:
        """Prompts in two batches drawn evenly, and the seconds they took under the plain model."""
        self.engine.set_factors([1.0] * self.num_layers)
        order = self.in_order(rng.shuffled(range(len(self.questions)), rng.stream("time")))
        start = time.perf_counter()
        batches = islice(self.engine.answer(order, may_stop=True, settled=self._settled), 2)
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

    def describe(self) -> dict[str, Any]:
        """What is asked, as plain data: equal where the same questions are asked and weighted in the same way."""
        requests = [[request.task_name, request.doc_id, request.args] for request in self._requests]
        return {
            "tasks": [
                {
                    "task": objective.name,
                    "version": str(objective.task.VERSION),
                    "weights": {column.metric: column.weight for column in objective.columns},
                    "filter": objective.filter,
                    **({"lower_is_better": True} if objective.sign < 0 else {}),
                    "examples": len(objective.docs),
                }
                for objective in self.objectives
            ],
            "requests_sha256": sha256([requests, [objective.docs for objective in self.objectives]]),
        }


def _value(shares: Shares, examples: Examples) -> float:
    return sum(share * examples[column][number] for column, number, share in shares)


class _Racing:
    """An individual's race against the cutoff's, over the questions in an order drawn for it alone.

    ``asked`` are the prompts that it took to give it up, and ``partial`` fitness and scores of these, None until then.
    """

    partial: tuple[float, dict[str, float]] | None = None

    def __init__(self, evaluator: Evaluator, name: str, cutoff: Cutoff, questions: Sequence[int]) -> None:
        self._evaluator, self._cutoff = evaluator, cutoff.fitness
        self._shares = evaluator.shares(questions)
        lows = [sum(min(share, 0.0) for *_, share in shares) for shares in self._shares]
        highs = [sum(max(share, 0.0) for *_, share in shares) for shares in self._shares]
        reached = [_value(shares, cutoff.examples) for shares in self._shares]
        self._race = Race(lows, highs, reached, cutoff.error, margin=cutoff.fitness - math.fsum(reached))
        self._prompts = list(map(len, evaluator.in_order(questions)))
        self._order = rng.shuffled(range(len(questions)), rng.stream("order", name))
        self.order = [questions[k] for k in self._order]
        self._next = self.asked = 0
        self._seen: dict[str, list[float]] = {}

    def lost(self, examples: Examples) -> bool:
        """Take in the questions whose examples are all there (None stands for one that is not), as far as it takes."""
        for question in self._order[self._next :]:
            shares = self._shares[question]
            if any(examples[column][number] is None for column, number, _ in shares):
                break
            for column, number, _ in shares:
                if not 0 <= (value := examples[column][number]) <= 1:
                    metric = self._evaluator.columns[column][1].metric
                    raise UserError(f"{column}: {metric} is not from 0 to 1; take --early_stopping off")
                self._seen.setdefault(column, []).append(value)
            self._race.take(question, _value(shares, examples))
            self._next += 1
            self.asked += self._prompts[question]
            columns = self._evaluator.columns
            if self._race.lost and len(self._seen) == len(columns) and self._next < len(self._order):
                scores = {column: float(mean(values)) for column, values in self._seen.items()}
                self.partial = min(self._evaluator.weighted(scores), math.nextafter(self._cutoff, -math.inf)), scores
                return True
        return False
