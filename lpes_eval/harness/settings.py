"""What ``--metadata`` may say to this project's tasks: the names, and what each may be. All are checked at one door."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from lpes_eval.errors import DataError
from lpes_eval.files import shown


def _whole(least: int | None) -> Callable[[Any], int]:
    """Whole numbers, however lm-eval hands them over: ``--metadata`` may bring 256, 256.0 or "256"."""

    def read(value: Any) -> int:
        whole = not isinstance(value, bool) and re.fullmatch(r"-?[0-9]{1,18}(\.0)?", str(value))
        if not whole or (least is not None and float(value) < least):
            raise ValueError("a whole number" + (f" of {least} or more" if least is not None else ""))
        return int(str(value).removesuffix(".0"))

    return read


def _one_of(*choices: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value is not None and value not in choices:
            raise ValueError(f"one of {', '.join(map(str, choices))}")
        return value

    return read


def _positions(value: Any) -> list[float]:
    numbers = isinstance(value, list | tuple) and all(type(p) in (int, float) and 0 <= p <= 100 for p in value)
    if not numbers or not value or len(set(value)) < len(value):
        raise ValueError("""a list of different percentages from 0 to 100, as in '{"positions": [0, 50, 100]}'""")
    return sorted(value)


SETTINGS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("data_dir", "max_length", "split", "text_file", "tokenizer"), lambda value: value),
    **dict.fromkeys(("length", "longest", "prompt_tokens", "stride", "windows"), _whole(1)),
    **dict.fromkeys(("num_documents", "num_keys"), _whole(2)),
    "chat_prompt": _one_of(True, False),
    "cutting": _one_of("prompt", "authors"),
    "positions": _positions,
    "prompt_style": _one_of("vicuna", "llama2", "chat"),
    "search_seed": _whole(None),
    "source": _one_of("generated", "official", "folder", "synthwiki"),
}
"""Each setting, and what reads its value; a task's README says which it takes."""


def checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the tasks use them, and everything else as it is.

    Raises:
        DataError: one that is empty, or is not what it may be, or whose name is nearly that of a setting.
    """
    refuse_misspelt(metadata)
    found = dict(metadata)
    for name in SETTINGS.keys() & metadata.keys():
        value = metadata[name]
        if isinstance(value, str) and not value.strip():
            raise DataError(f"{name}= is empty (a shell variable that is not set?); give a value, or leave it out")
        try:
            found[name] = SETTINGS[name](value)
        except ValueError as expected:
            raise DataError(f"{name}={shown(value)}: expected {expected} (--metadata)") from None
    return found


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
            meant = f"{near[0]}={value}" if near else f"one of {', '.join(sorted(SETTINGS))}"
            raise DataError(f"{name}={value}: no setting of this task; expected {meant} (--metadata)")
