"""Seeded drawing that gives the same examples on every machine and Python version.

Only ``Random.random()`` and ``Random.getrandbits()`` are used, the Mersenne Twister's own output, which stays the same
for a given seed. ``shuffle`` and ``sample`` carry no such promise, so their few lines stand here.
"""

import hashlib
from collections.abc import Iterable, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def stream(*key: str | int) -> Random:
    """A random stream of its own for every key, unrelated to the streams of other keys."""
    digest = hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()
    return Random(int.from_bytes(digest[:16], "big"))


def below(n: int, rng: Random) -> int:
    """An integer in ``[0, n)``."""
    return int(rng.random() * n)


def choice(items: Sequence[T], rng: Random) -> T:
    """One of ``items``."""
    return items[below(len(items), rng)]


def shuffled(items: Iterable[T], rng: Random) -> list[T]:
    """``items`` in a drawn order (Fisher-Yates)."""
    out = list(items)
    for i in range(len(out) - 1, 0, -1):
        j = below(i + 1, rng)
        out[i], out[j] = out[j], out[i]
    return out
