"""Layer-specific positional embedding scaling (LPES) for transformers models, and its benchmarks in lm-eval.

    >>> import lpes_eval
    >>> lpes_eval.apply(model, "factors.json")     # every decoder layer rotates at its own position scale
    >>> lpes_eval.save(model, "folder")            # lpes_eval.load_model("folder") has them again
    >>> lpes_eval.remove(model)                    # and back, exactly

On the command line, once installed: ``lm_eval --model lpes --model_args factors=factors.json --tasks kv_retrieval``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpes_eval.factors import Factors, load
    from lpes_eval.rope import apply, remove
    from lpes_eval.saving import load_model, save

__version__ = "0.1.0"
__all__ = ["Factors", "apply", "load", "load_model", "remove", "save"]

_HOMES = {
    "Factors": "factors", "load": "factors", "apply": "rope", "remove": "rope", "load_model": "saving", "save": "saving"
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Fetch a public name from its module when it is first used, so that importing the package costs nothing."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'lpes_eval' has no attribute {name!r}")
    return getattr(import_module(f"lpes_eval.{_HOMES[name]}"), name)
