"""Errors that the person at the keyboard can fix, in one line; a command prints it alone and exits with status 2."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from lpes_eval.text import terminal as plain

P = ParamSpec("P")


def first_line(error: Exception) -> str:
    """First line of an exception's message, or its class name."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class UserError(ValueError):
    """Something in the input that the user can put right, in one line without control characters."""

    def __str__(self) -> str:
        """The message as it is shown."""
        return plain(super().__str__())


class FactorsError(UserError):
    """A factors file, or a value given for ``factors``, that cannot be used."""


class DataError(UserError):
    """A data file that is missing, unreadable, or not in the benchmark's form."""


class PromptTooLong(UserError):
    """A benchmark prompt that does not fit the model's window and may not be cut."""


class UnsupportedModel(UserError):
    """A model whose layers cannot be given factors of their own; the message says why."""


class CacheError(UserError):
    """A key-value cache that was filled under other factors than those now in force."""


def program(name: str) -> Callable[[Callable[P, int | None]], Callable[P, int]]:
    """Make a ``main`` return its exit status: of an error that the user can fix, one line is printed, and it is 2."""

    def decorate(main: Callable[P, int | None]) -> Callable[P, int]:
        @wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return main(*args, **kwargs) or 0
            except UserError as error:
                said = str(error)
            except OSError as error:
                said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            print(f"{name}: error: {said}", file=sys.stderr)
            return 2

        return run

    return decorate
