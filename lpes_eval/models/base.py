"""What the model types share: lm-eval's ``hf`` with the shipped model as its default, and checks before loading."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from lm_eval.models.huggingface import HFLM
from torch import nn

from lpes_eval import reference
from lpes_eval.errors import UserError


class RotaryLM(HFLM):
    """``hf`` for models with rotary position embeddings; everything that ``hf`` takes means the same.

    Args:
        pretrained: as for ``hf``. Left out, or ``reference``: the model that is shipped with this package;
            ``reference-kv`` is the smaller one.
        **kwargs: what ``hf`` takes.

    Raises:
        UserError: ``pretrained`` names no model, ``dtype`` no type of PyTorch's, or ``device`` a GPU that PyTorch does
            not find.
    """

    def __init__(self, pretrained: Any = None, **kwargs: Any) -> None:
        if pretrained is None or (isinstance(pretrained, str) and pretrained in reference.NAMES):
            pretrained = str(reference.path(reference.NAMES[pretrained or "reference"]))
        if isinstance(pretrained, str):
            pretrained = os.path.expanduser(pretrained)
            _check_folder(pretrained, weights_elsewhere=bool(kwargs.get("gguf_file")))
        if not torch.cuda.is_available():  # hf takes its default, cuda, at its word
            kwargs.setdefault("device", "cpu")
        _check_device(kwargs.get("device"))
        _check_dtype(kwargs.get("dtype"))
        super().__init__(pretrained=pretrained, **kwargs)

    def needs_check(self) -> bool:
        """Whether there is anything to check before the weights are loaded."""
        return True

    def check(self, skeleton: nn.Module) -> None:
        """Refuse a model that this type cannot run, by looking at all its modules and no weight."""

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        """Read the model's configuration, and check the model that it describes."""
        try:
            super()._get_config(pretrained, **kwargs)
        except OSError as error:
            here = "its configuration cannot be read" if os.path.isdir(pretrained) else "no folder, and not on the Hub"
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"pretrained={pretrained}: {here} ({reason}); give a model's folder or its name on the Hub"
            ) from None
        if kwargs.get("trust_remote_code") or kwargs.get("gguf_file") or not self.needs_check():
            return
        if type(self._config) in transformers.AutoModelForCausalLM._model_mapping:
            with torch.device("meta"):  # every module and no weight
                self.check(transformers.AutoModelForCausalLM.from_config(self._config))


def _check_folder(pretrained: str, weights_elsewhere: bool) -> None:
    """Refuse what is spelled as a path and is no folder, and a folder that holds no model.

    Raises:
        UserError: there is no such folder, or no configuration in it.
    """
    if not os.path.isdir(pretrained):
        if pretrained.startswith((".", "/", "~")):
            raise UserError(f"pretrained={pretrained}: no such folder; give a model's folder or its name on the Hub")
    elif not weights_elsewhere and not os.path.isfile(os.path.join(pretrained, "config.json")):
        raise UserError(f"pretrained={pretrained}: no config.json in this folder; give a folder with a model in it")


def _check_dtype(dtype: Any) -> None:
    """Refuse a name that is none of PyTorch's types, which ``hf`` would end on as an attribute that is missing.

    Raises:
        UserError: no such type.
    """
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise UserError(f"dtype={dtype}: no type of PyTorch's; expected auto, float32, float16, bfloat16, ...")


def _check_device(device: Any) -> None:
    """Refuse a GPU that is not there, which ``hf`` would end on after loading, or quietly replace by another one.

    Raises:
        UserError: no such device, by its name or on this machine.
    """
    try:
        found = torch.device(device or "cpu")
    except RuntimeError:
        raise UserError(f"device={device}: no device of PyTorch's; expected cpu, cuda, cuda:1, mps, ...") from None
    if found.type != "cuda":
        return
    if not torch.cuda.is_available():
        if found.index == 0:  # lm_eval says cuda:0 where nobody said anything, and hf then takes the processor
            return
        reason = f"PyTorch {torch.__version__} finds no GPU here"
        raise UserError(f"device={device}: {reason}; leave it out for the processor, or install a build for your GPU")
    if found.index is not None and found.index >= (there := torch.cuda.device_count()):
        raise UserError(f"device={device}: there are {there} GPUs, counted from 0; take cuda:0 to cuda:{there - 1}")


def real(name: str, given: Any) -> float:
    """A number that the user gave for the argument ``name``.

    Raises:
        UserError: something else.
    """
    try:
        if isinstance(given, bool):
            raise TypeError
        return float(given)
    except (TypeError, ValueError):
        raise UserError(f"{name}={given}: expected a number") from None


def count(name: str, given: Any) -> int:
    """A whole number, 0 or more, that the user gave for the argument ``name``.

    Raises:
        UserError: something else.
    """
    try:
        value = real(name, given)
    except UserError:
        value = -1.0
    if value < 0 or not value.is_integer():
        raise UserError(f"{name}={given}: expected a whole number, 0 or more")
    return int(value)
