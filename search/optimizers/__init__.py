"""The optimisers of a search, one file each: a file in this folder that defines ``OPTIMIZER`` is one of them.

A name on the command line is the file's name. Each is a generator that yields individuals and gets back their fitness;
none knows what it optimises.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from search.optimizers.base import Optimizer


def names() -> list[str]:
    """The optimisers that there are."""
    return sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"base"})


def load(name: str) -> type[Optimizer]:
    """The optimiser of that name."""
    return import_module(f"{__name__}.{name}").OPTIMIZER
