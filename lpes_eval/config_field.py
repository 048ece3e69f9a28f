"""Factors in a model's configuration: the field ``lpes_factors``, which ``config.json`` carries from folder to folder.

It holds what a factors file holds, or whatever else may be given as ``factors``. ``lpes_eval.save`` writes it, and
transformers keeps a field that it does not know.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lpes_eval.errors import FactorsError, plain
from lpes_eval.factors import Factors, parse

FIELD = "lpes_factors"
SAMPLED = 1024
"""Values of each weight that tell a model from others: evenly spaced, so that a large model takes no longer."""

logger = logging.getLogger(__name__)


def holder(config: Any) -> Any:
    """The part of a model's configuration that has the field: its language model's."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def carried(config: Any, of_its_depth: bool = True) -> Factors | None:
    """The factors that a configuration carries, if any; an override of vLLM's stands beside the language model's.

    Raises:
        FactorsError: the field holds no factors, or, ``of_its_depth``, those of a model of another depth.
    """
    found = getattr(config, FIELD, getattr(holder(config), FIELD, None))
    if found is None:
        return None
    try:
        factors = Factors.from_dict(found, "factors") if isinstance(found, Mapping) else parse(found)
        if of_its_depth and isinstance(depth := getattr(holder(config), "num_hidden_layers", None), int):
            factors.per_layer(depth)
    except FactorsError as error:
        raise FactorsError(f"{FIELD} in config.json: {error}") from None
    return factors


def carry(config: Any, factors: Factors | None) -> None:
    """Have a configuration carry these factors, or none."""
    if config is not None:
        for part in (config, holder(config)):
            part.__dict__.pop(FIELD, None)
        if factors is not None:
            setattr(holder(config), FIELD, factors.to_dict())


def weights(model: nn.Module) -> dict[str, str] | None:
    """What tells a model's weights from others: their type, and a hash of some values of each; None without values."""
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


def warn_of_other_weights(model: nn.Module, factors: Factors) -> None:
    """Say so in one line where the factors were found on other weights of the same type than the model's."""
    if not (found_on := factors.origin.get("weights")):
        return
    here = weights(model)
    if here is not None and here["dtype"] == found_on.get("dtype") and here != found_on:
        name, revision = factors.model
        of = plain((name or "another model") + (f", revision {revision}" if revision else ""))
        logger.warning("the factors were found on other weights (of %s); measure what they do to this model", of)
