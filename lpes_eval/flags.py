"""What a command's flag may hold: readers for ``argparse``, each of which says what it expected and what it found."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, not {text!r}") from None


def at_least(least: int) -> Callable[[str], int]:
    """A whole number, ``least`` or more."""

    def read(text: str) -> int:
        if (value := whole(text)) < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, not {value}")
        return value

    return read


def finite(text: str) -> float:
    """A number, neither infinite nor NaN."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, not {text!r}")
    return value


def amount(text: str) -> float:
    """A number, 0 or more."""
    if (value := finite(text)) < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, not {value:g}")
    return value


def positive(text: str) -> float:
    """A number above 0."""
    if (value := finite(text)) <= 0:
        raise argparse.ArgumentTypeError(f"expected more than 0, not {value:g}")
    return value


def share(text: str) -> float:
    """A number between 0 and 1, both excluded."""
    if not 0 < (value := finite(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, not {value:g}")
    return value


def numbers(text: str) -> list[float]:
    """Numbers with commas between them."""
    try:
        return [finite(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them, not {text!r}") from None


def budget(text: str) -> tuple[str, float]:
    """How much may be spent: ``("seconds", S)`` for 90s, 10m or 2h, ``("prompts", N)`` for 20000prompts."""
    units = {"prompts": 0, "s": 1, "m": 60, "h": 3600}
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        amount_of = positive(text.removesuffix(unit)) if unit else 0.0
    except argparse.ArgumentTypeError:
        amount_of = 0.0
    if not amount_of:
        raise argparse.ArgumentTypeError(f"expected 90s, 10m, 2h or 20000prompts, not {text!r}")
    return ("prompts", amount_of) if unit == "prompts" else ("seconds", amount_of * units[unit])


def truth(text: str) -> bool:
    """True or false, as a person writes it."""
    if text.lower() not in ("true", "1", "yes", "false", "0", "no"):
        raise argparse.ArgumentTypeError(f"expected true or false, not {text!r}")
    return text.lower() in ("true", "1", "yes")
