"""The methods: layer factors and what they are compared with, one file or folder each.

The module ``lpes_eval.methods.NAME`` is the method NAME and lm-eval's model type NAME. Its class, ``Method``, is the
one thing that other code needs: a :class:`lpes_eval.methods.base.MethodLM`. A new file here is a new method: the model
types, the benchmark of costs and the documentation's test take their lists from ``names()``.

    >>> from lpes_eval import methods
    >>> method = methods.load("ms_poe").apply(model, max=2)
    >>> model.generate(**inputs)
    >>> method.detach()                                  # bit for bit the plain model again
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from lpes_eval.errors import UserError

SHARED = ("attention", "base", "interception", "prompt", "tables")
"""Modules in this package that are no methods: what several methods use."""


def names() -> list[str]:
    """The names of all methods, in alphabetical order; nothing is imported for it."""
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name not in SHARED]


def load(name: str) -> Any:
    """The class of a method, a subclass of :class:`lpes_eval.methods.base.MethodLM`.

    Raises:
        UserError: there is no method of this name.
    """
    if name not in names():
        raise UserError(f"{name}: no such method; expected one of {', '.join(names())}")
    return import_module(f"{__name__}.{name}").Method
