"""The lm-eval task that this project's benchmarks are: prompts are never cut, and results say where examples came from.

A benchmark's YAML names this class and a ``custom_dataset`` function, which gets lm-eval's merged metadata (model
arguments, then ``--metadata``) as keywords and returns ``(rows, source)``.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from lpes_eval.errors import DataError, UserError
from lpes_eval.harness import budget
from lpes_eval.harness.budget import Budget
from lpes_eval.harness.plugin import current_lm

logger = logging.getLogger(__name__)

SETTINGS = (
    "chat_prompt",
    "cutting",
    "data_dir",
    "longest",
    "max_length",
    "num_documents",
    "num_keys",
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
        """Load the examples through the YAML's ``custom_dataset``."""
        refuse_misspelt(self.config.metadata)
        rows, source = self.config.custom_dataset(**self.config.metadata)
        self.dataset = {SPLIT: Dataset.from_list(rows)}
        self.config.metadata["source"] = source.to_dict()
        self.VERSION = source.version(self.config.metadata["version"])

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
                f"{self.config.task}: lm_eval runs without lpes-eval's extension, so nobody knows what fits the model, "
                "and prompts that are too long would be cut unseen; expected the extension to be active: unset "
                "LPES_EVAL_PLUGIN, or install lpes-eval again with pip, or evaluate inside "
                "lpes_eval.harness.plugin.evaluating(lm)"
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
