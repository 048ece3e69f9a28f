"""The lm-eval task that this project's benchmarks are: prompts are never cut, and results say where examples came from.

A benchmark is a class in ``lpes_eval.data`` that its YAML names. ``load`` gets lm-eval's merged metadata (model
arguments, then ``--metadata``) as keywords and returns ``(rows, source)``. A benchmark by position is a
``PositionTask``: a question is one example, and its positions are that example's requests.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask

from lpes_eval.compare import statistics
from lpes_eval.data.source import Source
from lpes_eval.errors import DataError, UserError
from lpes_eval.harness import budget
from lpes_eval.harness.budget import Budget
from lpes_eval.harness.plugin import current_lm
from lpes_eval.harness.segments import Segment, join

logger = logging.getLogger(__name__)

SETTINGS = (
    "chat_prompt",
    "cutting",
    "data_dir",
    "length",
    "longest",
    "max_length",
    "num_documents",
    "num_keys",
    "positions",
    "prompt_style",
    "prompt_tokens",
    "search_seed",
    "source",
    "split",
    "stride",
    "text_file",
    "tokenizer",
    "windows",
)
"""What ``--metadata`` may say to this project's tasks; each task's README says what it takes."""
SPLIT = "test"
"""The name under which lm-eval knows whichever split (held-out or search) was asked for."""


def refuse_misspelt(metadata: Mapping[str, Any], complete: bool = False) -> None:
    """Refuse a setting that no task takes: lm-eval passes over it, and other examples than meant are evaluated.

    Args:
        metadata: what the tasks are told, with the model's arguments in it unless ``complete``.
        complete: it is all meant for our tasks, so every name is one of ``SETTINGS``; otherwise only a name that
            nearly is one of them counts as misspelt.

    Raises:
        DataError: names the setting, and the one that was meant.
    """
    for name, value in metadata.items():
        near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.85)
        if name not in SETTINGS and (near or complete):
            meant = f"{near[0]}={value}" if near else f"one of {', '.join(SETTINGS)}"
            raise DataError(f"{name}={value}: no setting of this task; expected {meant} (--metadata)")


class BenchmarkTask(ConfigurableTask):
    """A task that loads its own examples, keeps their source in the results, and refuses prompts that do not fit."""

    _budget: tuple[Any, int, Budget] | None = None

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load the examples."""
        refuse_misspelt(self.config.metadata)
        rows, source = self.load(**self.config.metadata)
        self.dataset = {SPLIT: Dataset.from_list(rows)}
        self.config.metadata["source"] = source.to_dict()
        self.VERSION = source.version(self.config.metadata["version"])

    def load(self, **metadata: Any) -> tuple[list[dict[str, Any]], Source]:
        """The examples, and where they came from; by default through the YAML's ``custom_dataset``."""
        rows, source = self.config.custom_dataset(**metadata)
        return rows, source

    def build_all_requests(self, *, cache_requests: bool = False, **kwargs: Any) -> None:
        """Build all requests anew: ``--cache_requests`` knows neither the source nor the split of these examples.

        Raises:
            UserError: lm-eval evaluates without this package's extension, so that nobody knows what fits the model.
        """
        if "rank" in kwargs:  # lm_eval.evaluate names it; who only looks at requests does not
            self.refuse_without_model()
        if cache_requests:
            logger.warning("%s: --cache_requests is not used, its key does not tell splits apart", self.config.task)
        super().build_all_requests(**kwargs)

    def refuse_without_model(self) -> None:
        """Raise ``UserError`` where the model that is being evaluated is not known."""
        if current_lm() is None:
            raise UserError(
                f"{self.config.task}: lm_eval runs without lpes-eval's extension, so it cannot know what fits the "
                "model, and lm_eval would silently truncate prompts that are too long; unset LPES_EVAL_PLUGIN, or "
                "install lpes-eval again with pip, or evaluate inside lpes_eval.harness.plugin.evaluating(lm)"
            )

    def construct_requests(self, doc: dict, ctx: str | list[str], **kwargs: Any) -> list[Instance] | Instance:
        """Build the requests, after making sure that the harness will not cut the prompt (it cuts from the left).

        Raises:
            PromptTooLong: the prompt and the answer's room exceed the model's window; names both in tokens.
        """
        if self.OUTPUT_TYPE == "generate_until" and isinstance(ctx, str) and current_lm() is not None:
            self.budget().check(ctx, f"{self.config.task}, question {doc.get('question_id')}")
        return super().construct_requests(doc, ctx, **kwargs)

    def budget(self) -> Budget:
        """What a prompt may measure for the model that is being evaluated, by its window and the task's protocol."""
        lm, metadata = current_lm(), self.config.metadata
        new_tokens = self.config.generation_kwargs["max_gen_toks"]
        if self._budget is None or self._budget[:2] != (lm, new_tokens):
            self._budget = (lm, new_tokens, budget.for_model(lm, new_tokens, metadata, metadata.get("prompt_tokens")))
        return self._budget[2]


class PositionTask(BenchmarkTask):
    """A benchmark by position: a question is one example, its positions are the example's requests.

    The results hold ``METRIC@P`` for every position P in percent, ``METRIC``, their mean, and ``METRIC_worst`` and
    ``METRIC_spread`` (best minus worst position). An example is a question, so lm-eval's standard error of ``METRIC``
    is the one clustered by question; those of worst and spread come from a bootstrap that draws questions.

    A subclass sets ``METRIC``, and ``SIZE``, the setting that says how long its contexts are; and it defines
    ``load``, ``segments``, ``target`` and ``score``.
    """

    METRIC: str
    SIZE: str

    def __init__(self, config: dict[str, Any]) -> None:
        # Where a function is named, lm-eval does not look for an implementation of the metric.
        super().__init__(config | {"process_results": scored_by_its_class})

    def segments(self, doc: dict[str, Any], position: float) -> list[Segment]:
        """The prompt of a question with the gold item at ``position`` percent, in labelled pieces."""
        raise NotImplementedError

    def target(self, doc: dict[str, Any], position: float) -> str | list[str]:
        """The reference answer, or all that are accepted."""
        raise NotImplementedError

    def score(self, doc: dict[str, Any], position: float, answer: str) -> float:
        """The metric of one answer."""
        raise NotImplementedError

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load the examples, once it is known at which positions they are asked."""
        self.positions = read_positions(self.config.metadata.get("positions"))
        self._position = self.positions[0]
        super().download(dataset_kwargs, **kwargs)

    def doc_to_text(self, doc: dict, doc_to_text: Any = None) -> str:
        """The prompt at the position whose request is being built."""
        return join(self.segments(doc, self._position))

    def doc_to_target(self, doc: Any, doc_to_target: Any = None) -> Any:
        """The reference answer at the position whose request is being built."""
        return self.target(doc, self._position)

    def fewshot_context(self, doc: dict, num_fewshot: int, *args: Any, **kwargs: Any) -> Any:
        """The prompt of every position; with examples before the question, these are the same and stand alike."""
        drawn = self.sampler.rnd.getstate() if num_fewshot else None
        contexts = []
        for position in self.positions:
            self._position = position
            if drawn is not None:
                self.sampler.rnd.setstate(drawn)
            contexts.append(super().fewshot_context(doc, num_fewshot, *args, **kwargs))
        self._position = self.positions[0]
        return contexts

    def construct_requests(self, doc: dict, ctx: str | list[str], **kwargs: Any) -> list[Instance]:
        """One request for each position, in their order."""
        requests = [super(PositionTask, self).construct_requests(doc, prompt, **dict(kwargs)) for prompt in ctx]
        for number, request in enumerate(requests):
            request.idx = number  # type: ignore[union-attr]
        return requests  # type: ignore[return-value]

    def process_results(self, doc: dict, results: list[Any]) -> dict[str, Any]:
        """The question's score at every position, their mean, and what worst and spread are made of."""
        scores = [self.score(doc, p, answer) for p, answer in zip(self.positions, results, strict=True)]
        metric = self.METRIC
        found: dict[str, Any] = {metric: sum(scores) / len(scores)}
        found |= {f"{metric}@{p:g}": score for p, score in zip(self.positions, scores, strict=True)}
        # Of lm-eval's table only the names without _stderr become rows; it looks the errors up beside them.
        return found | {f"{metric}_{name}": scores for name in statistics.OVER_POSITIONS}

    def aggregation(self) -> dict[str, Any]:
        """How the examples' scores become one number."""
        of_each = {f"{self.METRIC}@{p:g}": mean for p in self.positions}
        over = {f"{self.METRIC}_{name}": function for name, function in statistics.OVER_POSITIONS.items()}
        return {self.METRIC: mean, **of_each, **over}

    def higher_is_better(self) -> dict[str, bool]:
        """Only the spread is better when it is lower."""
        return {name: "_spread" not in name for name in self.aggregation()}


def scored_by_its_class(doc: dict, results: list[Any]) -> dict[str, Any]:
    """Stands in a ``PositionTask``'s configuration; ``PositionTask.process_results`` is what scores."""
    raise NotImplementedError


def gold_index(position: float, num_items: int) -> int:
    """Where the gold item stands: ``floor(position * (num_items - 1) / 100)``, with ``position`` in percent."""
    if not 0 <= position <= 100:
        raise DataError(f"position={position} is not a percentage between 0 and 100")
    return int(position * (num_items - 1) // 100)


def read_positions(positions: Any) -> list[float]:
    """Positions from metadata: percentages in rising order.

    Raises:
        DataError: no list of different numbers from 0 to 100.
    """
    valid = isinstance(positions, list | tuple) and all(
        isinstance(p, int | float) and not isinstance(p, bool) and 0 <= p <= 100 for p in positions
    )
    if not valid or not positions or len(set(positions)) < len(positions):
        raise DataError(
            f"positions={positions!r}: expected a list of different percentages from 0 to 100 "
            """(--metadata '{"positions": [0, 50, 100]}')"""
        )
    return sorted(positions)


class PublishedPromptTask(BenchmarkTask):
    """A task whose prompts are the benchmark's own: one message of the user's, and no examples before it.

    A subclass says in ``published_prompt`` what is sent; lm-eval's chat template and system instruction go around it
    here.
    """

    def published_prompt(self, doc: dict, render: Callable[..., str], chat: bool) -> str | list[str]:
        """The prompt as the model gets it, or several, each a request of its own.

        Args:
            doc: the row.
            render: makes the prompt that the model gets from the user's message and, if there is one, the system's.
            chat: whether ``render`` puts it into the model's chat template.
        """
        raise NotImplementedError

    def fewshot_context(
        self,
        doc: dict,
        num_fewshot: int,
        system_instruction: str | None = None,
        apply_chat_template: bool = False,
        fewshot_as_multiturn: bool = False,
        chat_template: Callable[..., str] | None = None,
        gen_prefix: str | None = None,
    ) -> str | list[str]:
        """The prompt as the model gets it.

        Raises:
            DataError: examples were asked for.
        """
        if num_fewshot:
            raise DataError(f"{self.config.task} is asked without examples; drop --num_fewshot {num_fewshot}")

        def render(user: str, system: str = "") -> str:
            return budget.render(user, system, system_instruction, chat_template if apply_chat_template else None)

        return self.published_prompt(doc, render, apply_chat_template)
