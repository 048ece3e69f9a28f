"""The optimisers of a search, one file each: a file in this folder that defines ``OPTIMIZER`` is one of them.

A name on the command line is the file's name, with ``-`` for ``_``. Each is a generator that yields individuals and
gets back their fitness; none knows what it optimises.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from lpes_eval.errors import UserError
from search.optimizers.base import Optimizer


def names() -> list[str]:
    """The optimisers that there are."""
    modules = {module.name for module in pkgutil.iter_modules(__path__)} - {"base"}
    return sorted(name.replace("_", "-") for name in modules)


def load(name: str) -> type[Optimizer]:
    """The optimiser of that name.

    Raises:
        UserError: there is none, as where a search with an optimiser of a program's own is resumed without it.
    """
    if name not in names():
        known = ", ".join(names())
        raise UserError(f"--optimizer {name}: expected one of {known}; one of your own is handed to search.search()")
    optimizer: type[Optimizer] = import_module(f"{__name__}.{name.replace('-', '_')}").OPTIMIZER
    return optimizer
