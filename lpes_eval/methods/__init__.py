"""The methods: layer factors and what they are compared with, one file or folder each.

The module ``lpes_eval.methods.NAME`` is the method NAME and lm-eval's model type NAME; its class is ``Method``.

    >>> method = methods.load("ms_poe").apply(model, max=2)
    >>> model.generate(**inputs)
    >>> method.detach()                                  # bit for bit the plain model again
"""

import pkgutil
from importlib import import_module
from typing import Any

SHARED = ("attention", "base", "interception", "prompt", "tables")
"""Modules in this package that are no methods: what several methods use."""


def names() -> list[str]:
    """The names of all methods, in alphabetical order; nothing is imported for it."""
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name not in SHARED]


def load(name: str) -> Any:
    """The class of a method, a subclass of :class:`lpes_eval.methods.base.MethodLM`."""
    return import_module(f"{__name__}.{name}").Method
