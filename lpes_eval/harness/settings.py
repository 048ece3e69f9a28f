"""What ``--metadata`` may say to this project's tasks: the names, and what each may be."""

import argparse
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


def _text(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise argparse.ArgumentTypeError("expected a name (a shell variable that is not set?)")
    return value


SETTINGS: dict[str, flags.Reader] = {
    **dict.fromkeys(("data_dir", "split", "text_file"), _text),
    **dict.fromkeys(("length", "longest", "prompt_tokens"), flags.at_least(1)),
    **dict.fromkeys(("num_documents", "num_keys"), flags.at_least(2)),
    "positions": _positions,
    "search_seed": flags.whole,
    "source": flags.one_of("generated", "official", "synthwiki", None),
}
"""Each setting, and what reads its value; a task's README says which it takes."""


def checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the tasks use them, and everything else as it is; ``DataError`` for one that cannot be met."""
    settings = dict(metadata)
    for name in SETTINGS.keys() & metadata.keys():
        settings[name] = flags.of(SETTINGS[name], name, metadata[name], DataError, " (--metadata)")
    return settings


def refuse_unknown(metadata: Mapping[str, Any]) -> None:
    """Refuse a setting that no task of ours takes, and that lm-eval would pass over; raises ``DataError``."""
    for name in metadata.keys() - SETTINGS.keys():
        expected = ", ".join(sorted(SETTINGS))
        raise DataError(f"{name}={metadata[name]}: no setting of this task; expected one of {expected} (--metadata)")
