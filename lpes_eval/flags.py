"""Values that a user types: a reader makes one of a text or a value out of JSON, or raises ``argparse``'s error."""

import json
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

from lpes_eval.errors import UserError
from lpes_eval.files import shown

Reader = Callable[[Any], Any]


def of(reader: Reader, name: str, value: Any, kind: type[UserError] = UserError, where: str = "") -> Any:
    """What the reader makes of the value of an argument; ``UserError`` that names the argument where it cannot."""
    try:
        return reader(value)
    except ArgumentTypeError as error:
        expected = str(error).partition(", not ")[0]
        text = value if isinstance(value, str | int | float) else shown(value)
        raise kind(f"{name}={text}: {expected}{where}") from None


def _number(kind: type, name: str, expected: str = "", fits: Callable[[Any], bool] = lambda value: True) -> Reader:
    """Numbers, whole ones however lm_eval hands them over: 256, 256.0 or "256"."""
    pattern = r"[-+]?[0-9]{1,18}(\.0)?" if kind is int else r"[-+.0-9eE]+"  # Python reads 1_5 as 15

    def read(value: Any) -> Any:
        text = str(value).strip(" ")
        try:
            if isinstance(value, bool) or not re.fullmatch(pattern, text) or not math.isfinite(float(text)):
                raise ValueError
            result = kind(text.removesuffix(".0"))
        except ValueError:
            raise ArgumentTypeError(f"expected {name}, not {shown(value)}") from None
        if not fits(result):
            raise ArgumentTypeError(f"expected {expected}, not {value}")
        return result

    return read


whole, finite = _number(int, "a whole number"), _number(float, "a number")
amount = _number(float, "a number", "0 or more", lambda value: value >= 0)
positive = _number(float, "a number", "more than 0", lambda value: value > 0)
share = _number(float, "a number", "a number between 0 and 1", lambda value: 0 < value < 1)


def at_least(least: int) -> Reader:
    """A whole number, ``least`` or more."""
    return _number(int, "a whole number", f"at least {least}", lambda value: value >= least)


def one_of(*choices: Any) -> Reader:
    """One of the choices, or None where that is one of them."""

    def read(value: Any) -> Any:
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            named = " or ".join(str(choice) for choice in choices if choice is not None)
            raise ArgumentTypeError(f"expected {named}, not {shown(value)}")
        return value

    return read


def numbers(text: str) -> list[float]:
    """Numbers with commas between them."""
    try:
        return [finite(part) for part in text.split(",")]
    except ArgumentTypeError:
        raise ArgumentTypeError(f"expected numbers with commas between them, not {text!r}") from None


def budget(text: str) -> tuple[str, float]:
    """How much may be spent: ``("seconds", S)`` for 90s, 10m or 2h, ``("prompts", N)`` for 20000prompts."""
    units = {"prompts": ("prompts", 1), "s": ("seconds", 1), "m": ("seconds", 60), "h": ("seconds", 3600)}
    number = re.sub("(prompts|[smh])$", "", text)
    try:
        what, size = units[text.removeprefix(number)]
        return what, positive(number) * size
    except (KeyError, ArgumentTypeError):
        raise ArgumentTypeError(f"expected 90s, 10m, 2h or 20000prompts, not {text!r}") from None


def truth(text: str) -> bool:
    """True or false, as a person writes it."""
    if text.lower() not in ("true", "1", "yes", "false", "0", "no"):
        raise ArgumentTypeError(f"expected true or false, not {text!r}")
    return text.lower() in ("true", "1", "yes")


def mapping(text: str) -> dict[str, Any]:
    """``key=value,key=value`` or a JSON object, read as lm_eval reads it."""
    from lm_eval._cli.utils import key_val_to_dict

    try:
        read: dict[str, Any] = json.loads(text) if text.lstrip().startswith("{") else key_val_to_dict(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r}: expected key=value or a JSON object ({error})") from None
    return read


def model_args(text: str) -> dict[str, Any]:
    """Arguments of a command's model; those that the command has a place of its own for are refused."""
    args = mapping(text)
    if own := {"pretrained", "device", "factors"} & args.keys():
        raise ArgumentTypeError(f"{min(own)}={args[min(own)]}: the command has a place of its own for it")
    return args
