"""What ``--metadata`` may say to this project's tasks: the names, and what each may be."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from typing import Any

from lpes_eval import flags
from lpes_eval.errors import DataError


def _positions(value: Any) -> list[float]:
    numbers = isinstance(value, list | tuple) and all(type(p) in (int, float) and 0 <= p <= 100 for p in value)
    if not numbers or not value or len(set(value)) < len(value):
        example = '{"positions": [0, 50, 100]}'
        raise argparse.ArgumentTypeError(f"expected a list of different percentages from 0 to 100, as in '{example}'")
    return sorted(value)


SETTINGS: dict[str, flags.Reader] = {
    **dict.fromkeys(("data_dir", "max_length", "split", "text_file", "tokenizer"), lambda value: value),
    **dict.fromkeys(("length", "longest", "prompt_tokens", "stride", "windows"), flags.at_least(1)),
    **dict.fromkeys(("num_documents", "num_keys"), flags.at_least(2)),
    "chat_prompt": flags.one_of(True, False, None),
    "cutting": flags.one_of("prompt", "authors", None),
    "positions": _positions,
    "prompt_style": flags.one_of("vicuna", "llama2", "chat", None),
    "search_seed": flags.whole,
    "source": flags.one_of("generated", "official", "folder", "synthwiki", None),
}
"""Each setting, and what reads its value; a task's README says which it takes."""


def checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the tasks use them, and everything else as it is; ``DataError`` for one that cannot be met."""
    refuse_misspelt(metadata)
    settings = dict(metadata)
    for name in SETTINGS.keys() & metadata.keys():
        value = metadata[name]
        if isinstance(value, str) and not value.strip():
            raise DataError(f"{name}= is empty (a shell variable that is not set?); give a value, or leave it out")
        settings[name] = flags.of(SETTINGS[name], name, value, DataError, " (--metadata)")
    return settings


def refuse_misspelt(metadata: Mapping[str, Any], complete: bool = False) -> None:
    """Refuse a setting that no task takes and that lm-eval would pass over; raises ``DataError``.

    Without ``complete`` the model's arguments are in ``metadata``, so only a name close to a setting's is refused.
    """
    for name, value in metadata.items():
        near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.85)
        if name not in SETTINGS and (near or complete):
            meant = f"{near[0]}={value}" if near else f"one of {', '.join(sorted(SETTINGS))}"
            raise DataError(f"{name}={value}: no setting of this task; expected {meant} (--metadata)")
