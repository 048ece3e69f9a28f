"""The optimisers of a search: each file in this folder defines one as ``OPTIMIZER``, and its name is a choice."""

import pkgutil
from importlib import import_module

from search.optimizers.base import Optimizer


def names() -> list[str]:
    """The optimisers that there are."""
    return sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"base"})


def load(name: str) -> type[Optimizer]:
    """The optimiser of that name."""
    return import_module(f"{__name__}.{name}").OPTIMIZER
