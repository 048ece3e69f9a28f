"""The lm-eval tasks that our benchmarks are: prompts are never cut, and results say where examples came from.

A benchmark is a class in ``lpes_eval.data`` that its YAML names. Its ``load`` gets lm-eval's merged metadata (model
arguments, then ``--metadata``) as keywords and returns ``(rows, source)``.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask
from lm_eval.utils import warning_once

from lpes_eval.compare import statistics
from lpes_eval.data.source import Source
from lpes_eval.errors import DataError, UserError
from lpes_eval.harness import budget
from lpes_eval.harness.plugin import current_lm, follow_evaluations
from lpes_eval.harness.segments import Segment, join
from lpes_eval.harness.settings import checked

follow_evaluations()
logger = logging.getLogger(__name__)

SPLIT = "test"
"""The name under which lm-eval knows whichever split (held-out or search) was asked for."""
UNENDED = "unended"
"""Metric of tasks by position: the share of answers that were cut at the most tokens that they may have."""


class BenchmarkTask(ConfigurableTask):
    """A task that loads its own examples, keeps their source in the results, and refuses prompts that do not fit."""

    load: Callable[..., tuple[list[dict[str, Any]], Source]]
    """The examples, and where they came from."""
    scores: Callable[[dict, list[Any]], dict[str, Any]]
    """Metric -> score of one example."""
    _budget: tuple[Any, int, budget.Budget] | None = None

    def __init__(self, config: dict[str, Any], metrics: Mapping[str, Any], **own: Any) -> None:
        """Take the YAML, ``config``, and ``metrics``: metric -> aggregation."""
        up = own.get("output_type") != "loglikelihood"
        own["metric_list"] = [{"metric": m, "aggregation": a, "higher_is_better": up} for m, a in metrics.items()]
        # where a function is named, lm-eval looks for no implementation of the metrics
        own = {"test_split": SPLIT, "process_results": scored_by_its_class, **own}
        super().__init__(config={key: value for key, value in {**own, **config}.items() if key != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load the examples."""
        self.config.metadata = checked(self.config.metadata)
        rows, source = self.load(**self.config.metadata)
        self.dataset = {SPLIT: Dataset.from_list(rows)}
        self.config.metadata["source"] = asdict(source)
        self.VERSION = source.version(self.config.metadata["version"])

    def build_all_requests(self, *, cache_requests: bool = False, **kwargs: Any) -> None:
        """Build all requests anew; raises ``UserError`` where it is not known which model is evaluated."""
        if "rank" in kwargs:  # lm_eval.evaluate gives it; who only looks does not
            self.refuse_without_model()
        if cache_requests:
            logger.warning("%s: --cache_requests is not used, its key does not tell splits apart", self.config.task)
        super().build_all_requests(**kwargs)
        if kwargs.get("apply_chat_template") and self.OUTPUT_TYPE == "generate_until" and self.instances:
            most = self.config.generation_kwargs["max_gen_toks"]
            budget.warn_of_thoughts(current_lm(), str(self.instances[0].args[0]), most, self.config.task)

    def refuse_without_model(self) -> None:
        """Raise ``UserError`` where the model that is being evaluated is not known."""
        if current_lm() is None:
            way_out = "call lm_eval.simple_evaluate, or evaluate inside lpes_eval.harness.plugin.evaluating(lm)"
            found = "lm_eval.evaluate was imported before this task, so it is not known what fits the model"
            risk = "prompts that are too long would silently be truncated"
            raise UserError(f"{self.config.task}: {found}, and {risk}; {way_out}")

    def construct_requests(self, doc: dict, ctx: str | list[str], **kwargs: Any) -> list[Instance] | Instance:
        """One request a prompt; raises ``PromptTooLong`` where lm-eval would cut it."""
        if isinstance(ctx, list):
            requests: list[Any] = [self.construct_requests(doc, prompt, **kwargs) for prompt in ctx]
            for number, request in enumerate(requests):
                request.idx = number
            return requests
        if self.OUTPUT_TYPE == "generate_until":
            self.budget().check(ctx, f"{self.config.task}, question {doc.get('question_id')}")
        return super().construct_requests(doc, ctx, **kwargs)

    def process_results(self, doc: dict, results: list[Any]) -> dict[str, Any]:
        """The scores of one example; none where only the answers are wanted (``--predict_only``)."""
        return {"bypass": None} if "bypass" in self._metric_fn_list else self.scores(doc, results)

    def budget(self) -> budget.Budget:
        """The budget of a prompt for the model that is being evaluated."""
        if (lm := current_lm()) is None:
            return budget.NO_LIMIT
        asked = (lm, self.config.generation_kwargs["max_gen_toks"])
        if self._budget is None or self._budget[:2] != asked:
            self._budget = (*asked, budget.for_model(*asked, self.config.metadata.get("prompt_tokens")))
        return self._budget[2]


def scored_by_its_class(doc: dict, results: list[Any]) -> dict[str, Any]:
    """Stands in the configuration of a ``BenchmarkTask``, whose own ``process_results`` is what scores."""
    raise NotImplementedError


class PositionTask(BenchmarkTask):
    """A benchmark by position: a question is one example, its positions are the example's requests.

    The results hold ``METRIC@P`` for every position P in percent, ``METRIC``, their mean, and ``METRIC_worst`` and
    ``METRIC_spread`` (best minus worst position); ``STRICT``, where a task has it, and ``unended`` have no such two.
    lm-eval's standard error is clustered by question; those of worst and spread come from a bootstrap of questions.

    A subclass defines ``load``; ``METRIC``; ``SIZE``, the setting that says how many items its contexts have;
    ``example``, which makes of a row what has ``segments`` and ``target`` at a position; and ``metric``, a score.
    """

    METRIC: str
    SIZE: str = ""
    example: Callable[..., Any]
    metric: Callable[[str, Any], float]
    STRICT: str = ""
    """A metric that a model which repeats its context does not satisfy, where ``METRIC`` may be; a search raises it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._position: float | None = None
        super().__init__(config, {self.METRIC: "mean"})

    def segments(self, doc: dict[str, Any], position: float) -> list[Segment]:
        """The prompt of a question with the gold item at ``position`` percent, in labelled pieces."""
        return self.example(**doc).segments(position)

    def target(self, doc: dict[str, Any], position: float) -> str | list[str]:
        """The reference answer, or all that are accepted."""
        return self.example(**doc).target(position)

    def written(self, doc: dict[str, Any], position: float) -> str:
        """A reference answer as a model that is right writes it, whose likelihood a search measures."""
        target = self.target(doc, position)
        return target if isinstance(target, str) else target[0]

    def strict_score(self, doc: dict[str, Any], position: float, answer: str) -> float:
        """``STRICT`` of one answer."""
        raise NotImplementedError

    def settled(self, metric: str, doc: dict[str, Any], position: float, answer: str) -> bool:
        """Whether the answer has this score however it goes on, so that a search may stop decoding it."""
        return False

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load the examples, once it is known at which positions they are asked."""
        settings = checked(self.config.metadata)
        self.positions, items = settings["positions"], settings.get(self.SIZE)
        self.left_out: dict[float, float] = {}
        """Positions with the same gold item as an earlier one -> the first such position."""
        if items:
            first: dict[int, float] = {}
            same = {p: first.setdefault(gold_index(p, items), p) for p in self.positions}
            self.left_out = {p: other for p, other in same.items() if p != other}
            self.positions = [position for position in self.positions if position not in self.left_out]
        if self.left_out:
            named = ", ".join(f"{p:g}" for p in self.left_out)
            what = f"{self.config.task}, {self.SIZE}={items}"
            warning_once(logger, f"{what}: positions {named} % are places of others, and are not asked again")
        super().download(dataset_kwargs, **kwargs)

    def doc_to_text(self, doc: dict, doc_to_text: Any = None) -> str:
        """The prompt at the position whose request is being built."""
        return join(self.segments(doc, self.positions[0] if self._position is None else self._position))

    def doc_to_target(self, doc: Any, doc_to_target: Any = None) -> Any:
        """The reference answer at the position whose request is being built; in logged samples those of all."""
        if self._position is not None:
            return self.target(doc, self._position)
        targets = [self.target(doc, position) for position in self.positions]
        return targets if any(target != targets[0] for target in targets) else targets[0]

    def fewshot_context(self, doc: dict, num_fewshot: int, *args: Any, **kwargs: Any) -> Any:
        """The prompt of every position, with the same examples before each."""
        drawn = self.sampler.rnd.getstate() if num_fewshot else None
        contexts = []
        for position in self.positions:
            self._position = position
            if drawn is not None:
                self.sampler.rnd.setstate(drawn)
            contexts.append(super().fewshot_context(doc, num_fewshot, *args, **kwargs))
        self._position = None
        return contexts

    def construct_requests(self, doc: dict, ctx: str | list[str], **kwargs: Any) -> Any:
        """One request a position, whose ``segments()`` are those of its prompt."""
        requests: Any = super().construct_requests(doc, ctx, **kwargs)
        for request, position in zip(requests, self.positions, strict=True) if isinstance(ctx, list) else ():
            request.segments = partial(self.segments, doc, position)
        return requests

    def scores(self, doc: dict, results: list[Any]) -> dict[str, Any]:
        """The question's scores at every position, their means, and what worst and spread are made of."""
        answers = list(zip(self.positions, results, strict=True))
        scores = [self.metric(answer, self.target(doc, position)) for position, answer in answers]
        # Of lm-eval's table only the names without _stderr become rows; it looks the errors up beside them.
        over = {f"{self.METRIC}_{name}": scores for name in statistics.OVER_POSITIONS}
        columns = self._columns(self.METRIC, scores) | over
        if self.STRICT:
            columns |= self._columns(self.STRICT, [self.strict_score(doc, p, answer) for p, answer in answers])
        if self._budget is not None:
            _, most, limits = self._budget
            columns |= self._columns(UNENDED, [float(limits.fills(answer, most)) for answer in results])
        return columns

    def _columns(self, metric: str, scores: Sequence[Any]) -> dict[str, Any]:
        """The mean of a metric over the positions, and the metric at each."""
        by_position = {f"{metric}{at}": score for at, score in zip(self._at(), scores, strict=True)}
        return {metric: sum(scores) / len(scores), **by_position}

    def aggregation(self) -> dict[str, Any]:
        """How the examples' scores become one number."""
        if "bypass" in self._metric_fn_list:
            return super().aggregation()
        metrics = filter(None, (self.METRIC, self.STRICT, UNENDED))
        names = [f"{metric}{at}" for metric in metrics for at in ("", *self._at())]
        over = {f"{self.METRIC}_{name}": function for name, function in statistics.OVER_POSITIONS.items()}
        return {**dict.fromkeys(names, mean), **over}

    def _at(self) -> list[str]:
        return [f"@{position:g}" for position in self.positions]

    def higher_is_better(self) -> dict[str, bool]:
        """The spread and the share of answers that did not end are better when they are lower."""
        return {name: "_spread" not in name and UNENDED not in name for name in self.aggregation()}

    def after_evaluation(self, results: Mapping[str, Any]) -> None:
        """Warn where ``STRICT`` says less than ``METRIC``; ``results`` are lm-eval's of this task."""
        for at in self._at() if self.STRICT else ():
            loose, strict, cut = (results.get(f"{name}{at},none") for name in (self.METRIC, self.STRICT, UNENDED))
            if loose is not None and loose - strict >= 0.01:
                logger.warning(
                    f"{self.config.task}: {self.METRIC}{at} is {loose:.3f}, but {self.STRICT}{at} is {strict:.3f}: the "
                    f"model repeats its context, and the answer is in it (cut at the most tokens: {cut:.3f} of the "
                    f"answers). Trust {self.STRICT}"
                )


def gold_index(position: float, num_items: int) -> int:
    """Where the gold item stands: ``floor(position * (num_items - 1) / 100)``, with ``position`` in percent."""
    if not 0 <= position <= 100:
        raise DataError(f"position={position} is not a percentage between 0 and 100")
    return int(round(position * (num_items - 1), 9) // 100)  # 100 * 5 / 19 times 19 is less than 500 in binary


class ExamTask(BenchmarkTask):
    """A benchmark without examples, 512 tokens an answer: ``load``, ``prompts``, ``doc_to_text`` and ``scores``."""

    prompts: Callable[[dict, Callable[..., str], bool], str | list[str]]
    """Of a row, of what renders a message, and of whether there is a chat template: the prompt, or several."""

    def __init__(self, config: dict[str, Any], metrics: Mapping[str, Any]) -> None:
        generation = {"until": [], "do_sample": False, "max_gen_toks": 512}
        super().__init__(config, metrics, output_type="generate_until", num_fewshot=0, generation_kwargs=generation)

    def fewshot_context(self, doc: dict, num_fewshot: int, **options: Any) -> str | list[str]:
        """The prompt as the model gets it."""
        chat = bool(options.get("apply_chat_template"))
        template = options.get("chat_template") if chat else None
        around = partial(budget.render, system_instruction=options.get("system_instruction"), chat_template=template)
        return self.prompts(doc, around, chat)
