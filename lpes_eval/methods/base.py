"""What the methods share: settings that read themselves, a place in a model, and lm-eval's ``hf`` around it."""

import dataclasses
import logging
import os
from typing import Any, ClassVar

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import nn
from tqdm import tqdm

import lpes_eval
from lpes_eval import flags, reference, weights
from lpes_eval.engine import engine_for
from lpes_eval.errors import UserError, first_line
from lpes_eval.harness.plugin import separate_caches

logger = logging.getLogger("lm_eval")
separate_caches()


class InModel:
    """A method inside a model; a subclass is a dataclass of its settings, read in ``__post_init__`` (``UserError``)."""

    plain = False  # whether it leaves every model as it is

    def read(self, config: Any) -> None:
        """Take over what the model's configuration says of the method."""

    def check(self, model: nn.Module) -> None:
        """Refuse a model that the method cannot run in (``UserError``), as far as is seen without weights."""

    def attach(self, model: nn.Module) -> None:
        """Put the method into a transformers model; ``UserError`` where they do not fit, or another method is in it."""

    def detach(self) -> None:
        """Leave the model exactly as it was."""

    def describe(self) -> dict[str, Any]:
        """The settings in force, as they are recorded with results."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]


class MethodLM(HFLM):
    """``hf`` with a method in the model; its arguments are those of ``hf`` and the fields of ``Inside``.

    Args:
        pretrained: as for ``hf``; left out, or ``reference``: the shipped model; ``reference-kv`` is the smaller one.
        fast: whether greedy answers come from ``lpes_eval.engine`` where it gives those of ``hf`` at batch size 1.
        **kwargs: the method's settings, and what else ``hf`` takes. For the engine a ``batch_size`` of 2 or more is the
            most prompts at once; with ``auto`` and 1, lm-eval's default, memory alone decides.

    ``UserError`` as ``InModel.attach``, where possible before any weight is loaded; or for an argument that cannot be.
    """

    title: ClassVar[str]  # in prose, and of its section in docs/methods.md
    paper: ClassVar[str]  # its arXiv id
    published_time: ClassVar[float | None] = None
    """Seconds a sample over the plain model's in Table 5 of the LPES paper (Vicuna-7B, one H100)."""
    Inside: ClassVar[Any]
    by_engine: ClassVar[bool] = False  # whether lpes_eval.engine answers as hf does

    def __init__(self, pretrained: Any = None, fast: bool = True, **kwargs: Any) -> None:
        if not isinstance(fast, bool):
            raise UserError(f"fast={fast}: expected True or False")
        self.fast = fast and self.by_engine
        own = {field.name for field in dataclasses.fields(self.Inside) if field.init}
        self.method = self.Inside(**{name: kwargs.pop(name) for name in own & kwargs.keys()})
        if pretrained is None:
            pretrained = self.default_model(kwargs)
        if isinstance(pretrained, str | os.PathLike):
            pretrained = os.path.expanduser(reference.folder(pretrained))
        if not torch.cuda.is_available() and str(kwargs.get("device") or "cuda:0") == "cuda:0":
            kwargs["device"] = "cpu"  # lm_eval says cuda:0 by default
        check_device(kwargs.get("device"))
        try:
            super().__init__(pretrained=pretrained, **kwargs)
        except TypeError as error:  # hf hands on what it does not know
            if "unexpected keyword argument" not in str(error):
                raise
            raise UserError(f"--model_args: {error}; neither hf nor this model type takes it") from error
        self.method.attach(self.model)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> Any:
        """A model by a text of arguments, whose lists are read as the command reads them."""
        return cls.create_from_arg_obj(flags.mapping(arg_string), additional_config)

    @classmethod
    def apply(cls, model: nn.Module, **settings: Any) -> Any:
        """Put the method into a transformers model until ``detach``; the settings are the model type's arguments."""
        method = cls.Inside(**settings)
        method.attach(model)
        return method

    @classmethod
    def benchmark_settings(cls, model: nn.Module) -> dict[str, Any]:
        """The settings with which the method's cost is measured."""
        return {}

    def default_model(self, kwargs: dict[str, Any]) -> str:
        """Which model to load where the user names none; it may add to what ``hf`` is given."""
        return "reference"

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        try:
            super()._get_config(pretrained, **kwargs)
        except Exception as error:  # of many classes
            found = "its configuration cannot be read" if os.path.isdir(pretrained) else "no such folder on disk or Hub"
            said = f"{found} ({' '.join(str(error).split())})"
            raise UserError(f"pretrained={pretrained}: {said}; give a model's folder or its name on the Hub") from None
        self.method.read(self._config)
        known = type(self._config) in transformers.AutoModelForCausalLM._model_mapping
        if known and not (kwargs.get("trust_remote_code") or self.method.plain):
            with torch.device("meta"):  # every module and no weight
                self.method.check(transformers.AutoModelForCausalLM.from_config(self._config))

    def get_model_info(self) -> dict[str, Any]:
        """What ``hf`` reports, the version of this package, and ``recorded``."""
        return super().get_model_info() | {"lpes_eval": lpes_eval.__version__, **self.recorded()}

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """As ``hf``, which answers itself only where the engine would not give its answers; a line says why."""
        if not self.fast:
            return super().generate_until(requests, disable_tqdm)
        most = None if self.batch_size in (1, "auto") else int(self.batch_size)
        engine, reason = engine_for(self, requests, prompts_per_batch=most)
        if reason is not None:
            logger.info("hf's own loop answers, because %s", reason)
            return super().generate_until(requests, disable_tqdm)
        answers: dict[int, str] = {}
        with tqdm(requests, disable=disable_tqdm or self.rank != 0, desc="Running generate_until requests") as bar:
            for batch in engine.answer():
                for number, (text, *_) in batch.items():
                    answers[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                bar.update(len(batch))
        return [answers[number] for number in range(len(requests))]

    @property
    def engine_answers(self) -> bool:
        """Whether the engine, asked the same requests, gives this model's answers."""
        return self.fast and type(self).generate_until is MethodLM.generate_until

    def recorded(self) -> dict[str, Any]:
        """What is kept of the method with the results: its name and settings."""
        return {"method": {"name": type(self).__module__.rpartition(".")[2], **self.method.describe()}}

    @property
    def cache_key(self) -> str:
        """What sets this model's answers apart from those of other models and settings, for ``--use_cache``."""
        name = type(self).__module__.rpartition(".")[2]
        return weights.cache_key(self, name, self.method.describe())


def check_device(device: Any) -> None:
    """Refuse a device that is not there; ``hf`` would fail after loading, or silently use another one."""
    try:
        torch.empty(1, device=device or "cpu")
    except (RuntimeError, AssertionError) as error:  # the second without CUDA
        said = f"PyTorch {torch.__version__} cannot use it ({first_line(error)})"
        raise UserError(f"device={device}: {said}; expected cpu, cuda, cuda:1, mps, ...") from None
