"""What a command's flag may hold: readers for ``argparse``, each of which says what it expected and what it found."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any


def _reader(kind: type, expected: str = "", fits: Callable[[Any], bool] = lambda value: True) -> Callable[[str], Any]:
    """A reader of finite numbers of this kind that fit."""
    any_of_it = {int: "a whole number", float: "a number"}[kind]

    def read(text: str) -> Any:
        try:
            value = kind("" if "_" in text else text)  # Python reads 1_5 as 15
            if not math.isfinite(value):
                raise ValueError(value)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"expected {any_of_it}, not {text!r}") from None
        if not fits(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, not {text.strip()}")
        return value

    return read


whole = _reader(int)
finite = _reader(float)
amount = _reader(float, "0 or more", lambda value: value >= 0)
positive = _reader(float, "more than 0", lambda value: value > 0)
share = _reader(float, "a number between 0 and 1", lambda value: 0 < value < 1)


def at_least(least: int) -> Callable[[str], int]:
    """A whole number, ``least`` or more."""
    return _reader(int, f"at least {least}", lambda value: value >= least)


def numbers(text: str) -> list[float]:
    """Numbers with commas between them."""
    try:
        return [finite(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them, not {text!r}") from None


def budget(text: str) -> tuple[str, float]:
    """How much may be spent: ``("seconds", S)`` for 90s, 10m or 2h, ``("prompts", N)`` for 20000prompts."""
    units = {"prompts": ("prompts", 1), "s": ("seconds", 1), "m": ("seconds", 60), "h": ("seconds", 3600)}
    for unit, (what, size) in units.items():
        if text.endswith(unit):
            try:
                return what, positive(text.removesuffix(unit)) * size
            except argparse.ArgumentTypeError:
                break
    raise argparse.ArgumentTypeError(f"expected 90s, 10m, 2h or 20000prompts, not {text!r}")


def truth(text: str) -> bool:
    """True or false, as a person writes it."""
    if text.lower() not in ("true", "1", "yes", "false", "0", "no"):
        raise argparse.ArgumentTypeError(f"expected true or false, not {text!r}")
    return text.lower() in ("true", "1", "yes")


def mapping(text: str) -> dict[str, Any]:
    """``key=value,key=value`` or a JSON object, read as lm_eval reads it."""
    from lm_eval._cli.utils import key_val_to_dict

    try:
        found: dict[str, Any] = json.loads(text) if text.lstrip().startswith("{") else key_val_to_dict(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected key=value or a JSON object ({error})") from None
    return found


def model_args(text: str) -> dict[str, Any]:
    """Arguments of a command's model; those that the command has a place of its own for are refused."""
    found = mapping(text)
    places = {
        "pretrained": "the model is the command's MODEL",
        "device": "give it as --device",
        "factors": "leave them out (lpes-eval attention has --factors)",
    }
    for name in places.keys() & found.keys():
        raise argparse.ArgumentTypeError(f"{name}={found[name]}: {places[name]}")
    return found
