"""The ``moice`` model type: seven RoPE bases in every head, mixed by a trained router (MoICE, arXiv 2406.19598).

lm_eval --model moice --model_args pretrained=lmsys/vicuna-7b-v1.5,router=DIR_OR_FILE --tasks kv_retrieval
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from lpes_eval import files, reference
from lpes_eval.errors import UserError
from lpes_eval.models.base import RotaryLM
from lpes_eval.peers import attention, moice
from lpes_eval.peers import router as routers


class MoICE(RotaryLM):
    """``hf`` with MoICE; everything that ``hf`` takes means the same.

    Args:
        pretrained: as for ``hf``. Left out: the reference model that is shipped with this package.
        router: a file, or the folder that ``python -m lpes_eval.peers.train_router`` wrote. May be left out for the
            reference model where a router for it is shipped.
        **kwargs: what ``hf`` takes.

    Raises:
        UserError: no router, a damaged one, or one for another model; before any weight is loaded, except for a model
            that is handed over loaded.
        UnsupportedModel: a model whose rotary embedding is not of the default kind; before any weight is loaded.
    """

    def __init__(self, pretrained: Any = None, router: Any = None, **kwargs: Any) -> None:
        name = pretrained or "reference"
        shipped = reference.path(reference.NAMES[name]) if isinstance(name, str) and name in reference.NAMES else None
        self._name = str(shipped or name) if isinstance(name, str) else None
        self.router_file = _router_file(router, shipped)
        self.router = routers.read(self.router_file)
        super().__init__(pretrained, **kwargs)
        self.check(self.model)
        self.method = moice.apply(self.model, self.router)

    def check(self, skeleton: nn.Module) -> None:
        """Refuse a model without a base of its own, and one that the router was not made for."""
        attention.own_base(skeleton, moice.NAME)
        attention.check(skeleton, moice.NAME)
        found = routers.describe(skeleton.config, self._name)
        routers.check(self.router.config, self.router_file, found)

    def get_model_info(self) -> dict[str, Any]:
        """What ``hf`` reports, and the router: where it is from, its checksum, and how it was trained."""
        config = self.router.config
        method = {
            "name": "moice",
            "router": str(self.router_file),
            "sha256": files.sha256(self.router_file),
            "bases": config.bases,
            "top_k": config.top_k,
            "model": config.model,
            "training": dict(config.training),
        }
        return super().get_model_info() | {"method": method}

    @property
    def cache_key(self) -> str:
        """What sets this model's answers apart from the same model's with another router, for ``--use_cache``."""
        return f"moice_{files.sha256(self.router_file)[:16]}"


def _router_file(given: Any, shipped: Path | None) -> Path:
    """The file of the router that was asked for, or of the one that is shipped with the model."""
    if given is not None:
        return routers.find(str(given))
    if shipped is not None and (shipped / routers.FILE).is_file():
        return shipped / routers.FILE
    raise UserError(
        "moice needs router=FILE_OR_FOLDER, a router that was trained for the model; train one with "
        "python -m lpes_eval.peers.train_router"
    )
