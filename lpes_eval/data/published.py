"""What the benchmarks share whose files and protocols are their authors': no set is generated in a file's place."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from lpes_eval.data import source
from lpes_eval.errors import DataError
from lpes_eval.harness.task import SPLIT, PublishedPromptTask

WAY_OUT = f"give a folder that holds it (--metadata data_dir=DIR, or {source.ENV})"


class ExamTask(PublishedPromptTask):
    """What ZeroSCROLLS and L-Eval share: greedy answers of up to 512 tokens to prompts without examples."""

    def __init__(
        self,
        config: dict[str, Any],
        load: Callable[..., tuple[list[dict[str, Any]], source.Source]],
        score: Callable[[dict[str, Any], list[str]], dict[str, Any]],
        metrics: Mapping[str, Any],
    ) -> None:
        """Fill in the task's configuration.

        Args:
            config: what the YAML says; it goes before all else.
            load: loads the rows, and says where they came from.
            score: row, answers -> metric -> score; a function of a module, because results keep a copy of it.
            metrics: metric -> aggregation.
        """
        own = {
            "custom_dataset": load,
            "test_split": SPLIT,
            "output_type": "generate_until",
            "num_fewshot": 0,
            "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": 512},
            "process_results": score,
            "metric_list": [
                {"metric": name, "aggregation": how, "higher_is_better": True} for name, how in metrics.items()
            ],
        }
        super().__init__({**own, **config})

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load the rows."""
        whole_numbers(self.config.metadata, "prompt_tokens")
        super().download(dataset_kwargs, **kwargs)


def asked(metadata: Mapping[str, Any], benchmark: str, file: str) -> source.Asked:
    """As ``source.asked``: a folder, or the official file.

    Raises:
        DataError: as there, and where the generated set was asked for, if only by the shipped model's name.
    """
    request = source.asked(metadata)
    if request.kind == "generated":
        raise DataError(
            f"{benchmark} has no generated set; ask for --metadata source=official, or give a folder with {file} "
            f"(--metadata data_dir=DIR, or {source.ENV})"
        )
    return request


def download(url: str) -> Path:
    """As ``source.download``, without the way out that there is not."""
    return source.download(url, way_out=WAY_OUT)


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Refuse a setting that has no such value.

    Raises:
        DataError: names the setting and what it may be.
    """
    if value not in choices:
        raise DataError(f"{name}={value!r}: expected one of {', '.join(choices)} (--metadata)")


def whole_numbers(metadata: MutableMapping[str, Any], *names: str) -> None:
    """Make whole numbers of the settings ``names``, where they are given; ``--metadata`` may bring 256.0 or "256".

    Raises:
        DataError: names a setting that is no whole number above 0.
    """
    for name in set(names) & set(metadata):
        if not re.fullmatch(r"0*[1-9][0-9]{0,8}(\.0)?", str(metadata[name])):
            raise DataError(f"{name}={metadata[name]!r}: expected a whole number above 0 (--metadata {name}=N)")
        metadata[name] = int(float(metadata[name]))
