"""Where the scores of one run of lm-eval came from, read from its results JSON."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

LM_EVALS_SEEDS = "0,1234,1234,1234"
"""Those of a run without ``--seed``."""


def of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Date, command, packages, the model's dtype and revision, and the hash of its factors."""
    date, config = raw.get("date"), raw.get("config") or {}
    torch = re.search(r"PyTorch version: (\S+)", raw.get("pretty_env_info") or "")
    return {
        "date": datetime.fromtimestamp(date, UTC).isoformat(timespec="seconds") if isinstance(date, float) else None,
        "command": _command(raw),
        "packages": {
            "lpes_eval": config.get("lpes_eval"),
            "lm_eval": raw.get("lm_eval_version"),
            "transformers": raw.get("transformers_version"),
            "torch": torch[1] if torch else None,
        },
        "model": {key: config.get(f"model_{key}") for key in ("dtype", "revision", "sha")}
        | {"factors": factors(raw).get("sha256")},
    }


def _command(raw: Mapping[str, Any]) -> str:
    """The lm_eval command that makes such a run again, and keeps its samples, which every comparison needs.

    The results do not tell ``--metadata`` and ``--num_fewshot`` from a task's own settings, so these are not there.
    """
    config, groups = raw.get("config") or {}, raw.get("group_subtasks") or {}
    children = {child for group in groups.values() for child in group}
    asked = dict.fromkeys(name for name in (*groups, *raw["configs"]) if name not in children)
    seeds = ",".join(str(config.get(f"{kind}_seed")) for kind in ("random", "numpy", "torch", "fewshot"))
    options = {
        "--model_args": _spelled({key: without_folder(value) for key, value in model_arguments(raw).items()}),
        "--tasks": ",".join(asked),
        "--limit": None if config.get("limit") is None else f"{config['limit']:.15g}",
        "--batch_size": str(config.get("batch_size") or ""),
        "--gen_kwargs": _spelled(config.get("gen_kwargs") or {}),
        "--seed": seeds if "fewshot_seed" in config and seeds != LM_EVALS_SEEDS else "",
        "--system_instruction": raw.get("system_instruction"),
    }
    words = ["lm_eval", "--model", str(config.get("model", ""))]
    words += [word for option, value in options.items() if value for word in (option, value)]
    words += ["--apply_chat_template"] if raw.get("chat_template") else []
    return shlex.join([*words, "--log_samples", "--output_path", "results"])


def model_arguments(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``--model_args``, which lm-eval may have kept as they were typed."""
    arguments = (raw.get("config") or {}).get("model_args") or {}
    if isinstance(arguments, str):
        arguments = dict(pair.split("=", 1) for pair in arguments.split(",") if "=" in pair)
    return dict(arguments)


def factors(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the model type said of its factors; nothing where it has none."""
    found = (raw.get("config") or {}).get("factors")
    return found if isinstance(found, dict) else {}


def _spelled(arguments: Mapping[str, Any]) -> str:
    """Arguments as lm_eval reads them from a command: ``a=1,b=2``, or JSON where that would be taken apart wrongly."""
    plain = all(isinstance(value, str | int | float) and "," not in str(value) for value in arguments.values())
    return ",".join(f"{key}={value}" for key, value in arguments.items()) if plain else json.dumps(dict(arguments))


def without_folder(value: Any) -> Any:
    """Cut an absolute path to its last part: the folder is the machine's, and says nothing of what was evaluated."""
    for kind in (PurePosixPath(str(value)), PureWindowsPath(str(value))):
        if kind.is_absolute():
            return kind.name
    return value
