"""Where the scores of one run of lm-eval came from, read from its results JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from lpes_eval.files import entry


def of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Date, packages, the model's dtype and revision, and the hash of its factors."""
    date, config = raw.get("date"), entry(raw, "config")
    torch = re.search(r"PyTorch version: (\S+)", str(raw.get("pretty_env_info")))
    packages = {
        "lpes_eval": config.get("lpes_eval"),
        "lm_eval": raw.get("lm_eval_version"),
        "transformers": raw.get("transformers_version"),
        "torch": torch and torch[1],
    }
    model = {key: config.get(f"model_{key}") for key in ("dtype", "revision", "sha")}
    model["factors"] = factors(raw).get("sha256")
    return {
        "date": datetime.fromtimestamp(date, UTC).isoformat(timespec="seconds") if isinstance(date, float) else None,
        "packages": {name: _text(version) for name, version in packages.items()},
        "model": {name: _text(value) for name, value in model.items()},
    }


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def model_arguments(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``--model_args``, which lm-eval may have kept as they were typed."""
    arguments = entry(raw, "config").get("model_args")
    if isinstance(arguments, str):
        return dict(pair.split("=", 1) for pair in arguments.split(",") if "=" in pair)
    return dict(arguments or {})


def factors(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the model type said of its factors; nothing where it has none."""
    factors = entry(raw, "config").get("factors")
    return factors if isinstance(factors, dict) else {}


def without_folder(value: Any) -> Any:
    """Cut an absolute path to its last part: the folder is the machine's, and says nothing of what was evaluated."""
    for kind in (PurePosixPath(str(value)), PureWindowsPath(str(value))):
        if kind.is_absolute():
            return kind.name
    return value
