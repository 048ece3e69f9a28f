"""What the model types share: lm-eval's ``hf`` with the shipped model as its default, and checks before loading."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import Any, ClassVar, Protocol

import torch
import transformers
from lm_eval.models.huggingface import HFLM
from torch import nn

from lpes_eval import reference
from lpes_eval.errors import UserError


class Applied(Protocol):
    """A method inside a model."""

    def detach(self) -> None:
        """Leave the model exactly as it was."""

    def describe(self) -> dict[str, Any]:
        """The settings in force, as they are recorded with results."""


class RotaryLM(HFLM):
    """``hf`` for models with rotary position embeddings; everything that ``hf`` takes means the same.

    Args:
        pretrained: as for ``hf``. Left out, or ``reference``: the model that is shipped with this package;
            ``reference-kv`` is the smaller one.
        **kwargs: what ``hf`` takes.

    Attributes:
        title: what the method is called in prose; its section in docs/methods.md has this title.
        paper: its arXiv id.
        published_time: seconds a sample over the plain model's in Table 5 of the LPES paper (Vicuna-7B, one H100,
            MDQA), where it has the method.

    Raises:
        UserError: ``pretrained`` names no model, ``dtype`` no type of PyTorch's, or ``device`` a GPU that PyTorch does
            not find.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    published_time: ClassVar[float | None] = None

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

    @classmethod
    def apply(cls, model: nn.Module, **settings: Any) -> Applied:
        """Put the method into a transformers model; the settings are the model type's arguments.

        Raises:
            UserError: as the model type does.
        """
        raise NotImplementedError

    @classmethod
    def benchmark_settings(cls, model: nn.Module) -> dict[str, Any]:
        """The settings with which the method's cost is measured: its defaults, where it has them."""
        return {}

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


class MethodLM(RotaryLM):
    """A model type whose arguments are the fields of ``Settings`` and whose method is an ``Inside(model, settings)``.

    Attributes:
        Settings: a dataclass that reads its fields as a user may write them, and refuses what makes no sense.
        Inside: the method inside a model, an ``Applied``; its static ``check(model, settings)`` raises what can be
            seen without weights.
        settings, method: this model's.
    """

    Settings: ClassVar[Any]
    Inside: ClassVar[Any]

    def __init__(self, pretrained: Any = None, **kwargs: Any) -> None:
        own = {field.name for field in dataclasses.fields(self.Settings)} & kwargs.keys()
        self.settings = self.Settings(**{name: kwargs.pop(name) for name in own})
        super().__init__(pretrained, **kwargs)
        self.method = self.Inside(self.model, self.settings)

    @classmethod
    def apply(cls, model: nn.Module, **settings: Any) -> Any:
        """Put the method into a transformers model until ``detach``; the settings are the model type's arguments."""
        return cls.Inside(model, cls.Settings(**settings))

    def check(self, skeleton: nn.Module) -> None:
        """Refuse a model that this method cannot run in."""
        self.Inside.check(skeleton, self.settings)

    def get_model_info(self) -> dict[str, Any]:
        """What ``hf`` reports, and the method's name and settings."""
        name = type(self).__module__.rpartition(".")[2]
        return super().get_model_info() | {"method": {"name": name, **self.method.describe()}}

    @property
    def cache_key(self) -> str:
        """What sets this model's answers apart from the same model's with other settings, for ``--use_cache``."""
        settings = json.dumps(self.method.describe(), sort_keys=True)
        return f"{type(self).__module__.rpartition('.')[2]}_{hashlib.sha256(settings.encode()).hexdigest()[:16]}"


def _check_folder(pretrained: str, weights_elsewhere: bool) -> None:
    """Refuse what is spelled as a path and is no folder, and a folder that holds no model."""
    if not os.path.isdir(pretrained):
        if pretrained.startswith((".", "/", "~")):
            raise UserError(f"pretrained={pretrained}: no such folder; give a model's folder or its name on the Hub")
    elif not weights_elsewhere and not os.path.isfile(os.path.join(pretrained, "config.json")):
        raise UserError(f"pretrained={pretrained}: no config.json in this folder; give a folder with a model in it")


def _check_dtype(dtype: Any) -> None:
    """Refuse a name that is none of PyTorch's types; ``hf`` would fail with a missing attribute."""
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise UserError(f"dtype={dtype}: no type of PyTorch's; expected auto, float32, float16, bfloat16, ...")


def _check_device(device: Any) -> None:
    """Refuse a GPU that is not there; ``hf`` would fail after loading, or silently use another one."""
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
    """A number that the user gave for the argument ``name``; ``UserError`` for something else."""
    try:
        if isinstance(given, bool):
            raise TypeError
        return float(given)
    except (TypeError, ValueError):
        raise UserError(f"{name}={given}: expected a number") from None


def count(name: str, given: Any) -> int:
    """A whole number, 0 or more, that the user gave for the argument ``name``; ``UserError`` for something else."""
    try:
        value = real(name, given)
    except UserError:
        value = -1.0
    if value < 0 or not value.is_integer():
        raise UserError(f"{name}={given}: expected a whole number, 0 or more")
    return int(value)


def one_of(name: str, given: Any, choices: tuple[str, ...]) -> str:
    """One of the choices that the user has for the argument ``name``; ``UserError`` for something else."""
    if given not in choices:
        raise UserError(f"{name}={given}: expected {' or '.join(choices)}")
    return given
