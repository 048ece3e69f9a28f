"""The model of a search, as lm-eval would load it."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

from lpes_eval.errors import UserError
from lpes_eval.methods.lpes import LPES
from search.config import WHOLE


class WithoutWeights(LPES):
    """What the driver needs of a model whose weights its workers have: configuration, modules and tokenizer."""

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        import torch

        self._device = torch.device("meta")
        super()._create_model(*args, **kwargs | {"parallelize": False})


def load_model(args: argparse.Namespace, whole: bool = True) -> Any:
    """The ``lpes`` model; not ``whole``, without weights, which its workers have."""
    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(
            f"a search is one process, and this is one of {processes}; start it with python -m search.ga. One model on "
            "several GPUs: --model_args parallelize=True; several searches at once: another --seed on each GPU"
        )
    if "factors" in args.model_args:
        raise UserError("--model_args factors=...: a search makes its own factors; leave them out")
    for name in args.model_args.keys() & {"batch_size", "device"}:
        raise UserError(f"--model_args {name}=...: is a flag of its own; give it as --{name}")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    kind, device = LPES, args.device
    if getattr(args, "engine", None) == "vllm":  # which finds its own
        device = "cpu"
    if not whole and not WHOLE & args.model_args.keys():
        kind, device = WithoutWeights, "cpu"
    lm = kind.create_from_arg_obj(args.model_args, {"batch_size": args.batch_size, "device": device})
    lm.note_carried_factors()
    return lm
