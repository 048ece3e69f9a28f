"""Where a training stands, in one safetensors file: weights, AdamW's moments, and what the run notes about itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as serialized

from lpes_eval.errors import UserError
from lpes_eval.files import write_atomically


def save(file: Path, model: torch.nn.Module, optimizer: torch.optim.AdamW, **notes: Any) -> None:
    """Write the file, whole or not at all; ``notes`` are JSON values."""
    tensors = {}
    for name, weight in model.named_parameters():
        tensors[f"weight.{name}"] = weight.detach().cpu().contiguous()
        for key, moment in optimizer.state[weight].items():
            tensors[f"{key}.{name}"] = moment.detach().cpu().contiguous()
    written = {key: json.dumps(value) for key, value in notes.items()}
    write_atomically(file, serialized(tensors, metadata=written))


def notes(file: Path, *expected: str) -> list[Any]:
    """The notes of these names; raises ``UserError`` where the file is damaged or has none of them."""
    with _opened(file) as stored:
        written = stored.metadata() or {}
        return [json.loads(written[name]) for name in expected]


def restore(file: Path, model: torch.nn.Module, optimizer: torch.optim.AdamW | None = None) -> None:
    """Put the weights in place, and the moments if there is an optimizer; raises as ``notes``."""
    with _opened(file) as stored, torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(stored.get_tensor(f"weight.{name}"))
            if optimizer is not None:
                optimizer.state[weight] = {
                    key: stored.get_tensor(f"{key}.{name}").to("cpu" if key == "step" else weight.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except Exception as error:
        raise UserError(f"{file}: cannot be read as a checkpoint ({error}); delete it to begin anew") from None
