"""What tells a model's weights from others: a hash that goes with factors and into the key of ``--use_cache``."""

import hashlib
import json
import logging
from typing import Any

import torch
from torch import nn

from lpes_eval.errors import plain
from lpes_eval.factors import Factors

SAMPLED = 1024  # values of each weight that are hashed

logger = logging.getLogger(__name__)


def fingerprint(model: nn.Module) -> dict[str, str] | None:
    """The type of a model's weights, and a hash of some values of each; None where there are no values."""
    parameters = list(model.named_parameters())
    if not parameters or any(parameter.is_meta for _, parameter in parameters):
        return None
    digest = hashlib.sha256()
    for name, parameter in parameters:
        values = parameter.detach().reshape(-1)
        some = values[:: max(1, len(values) // SAMPLED)].cpu().contiguous().view(torch.uint8)
        name = name.replace("_orig_mod.", "")  # which torch.compile puts in
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + some.numpy().tobytes())
    return {"dtype": str(parameters[0][1].dtype).removeprefix("torch."), "sha256": digest.hexdigest()}


def config_sha256(model: Any) -> str:
    """A hash of a model's configuration and of that of its generation, whatever folder they are from."""
    generation = getattr(model, "generation_config", None)
    described = model.config.to_dict(), generation.to_diff_dict() if generation is not None else {}
    for name in ("_name_or_path", "transformers_version"):
        for part in described:
            part.pop(name, None)
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()


def cache_key(lm: Any, method: str, settings: Any) -> str:
    """What sets the answers of an ``hf`` model under a method apart from all others, for ``--use_cache``."""
    config = lm.model.config
    name = [getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None)]
    asked = [getattr(lm, name, None) for name in ("max_length", "add_bos_token", "think_end_token", "enable_thinking")]
    known = [method, settings, fingerprint(lm.model) or name, config_sha256(lm.model), asked]
    known = json.dumps(known, sort_keys=True, default=str)
    return f"{method}_{hashlib.sha256(known.encode()).hexdigest()[:16]}"


def warn_of_other_weights(model: nn.Module, factors: Factors) -> None:
    """Say so in one line where the factors were found on other weights of the same type than the model's."""
    if not (expected := factors.origin.get("weights")):
        return
    here = fingerprint(model)
    if here is not None and here["dtype"] == expected.get("dtype") and here != expected:
        name, revision = factors.model
        of = plain((name or "another model") + (f", revision {revision}" if revision else ""))
        logger.warning("the factors were found on other weights (of %s); measure what they do to this model", of)
