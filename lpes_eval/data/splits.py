"""Which examples a search may see, and which the reported score is made of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from lpes_eval.errors import DataError
from lpes_eval.rng import shuffled, stream

SPLIT_SEED = 20251121
HELD_OUT = 500
SEARCH = 200
SPLITS = ("held_out", "search")


@dataclass(frozen=True)
class Split:
    """Which of a benchmark's ``total`` examples the search may see, and which the reported score is made of.

    Held-out examples depend on ``total`` alone. A search draws from all others, so that searches on different samples
    (Table 8, ``search_seed``) are still scored on the same examples, none of which any of them saw.
    """

    total: int
    held_out: tuple[int, ...]
    search: tuple[int, ...]
    search_seed: int

    def seed(self, name: str) -> str:
        """What split ``name`` was drawn with, as results record it."""
        return str(SPLIT_SEED) + (f", search_seed {self.search_seed}" if name == "search" else "")

    def indices(self, name: str) -> tuple[int, ...]:
        """The example numbers of split ``name`` (``held_out`` or ``search``)."""
        if name not in SPLITS:
            raise DataError(f"split={name!r} is not a split; expected one of {', '.join(SPLITS)}")
        return self.held_out if name == "held_out" else self.search


def whole_seed(search_seed: Any) -> int:
    """``search_seed`` as a whole number, from whatever lm-eval makes of ``--metadata``: -1 can arrive as -1.0.

    Raises:
        DataError: it is not a whole number.
    """
    if isinstance(search_seed, float) and search_seed.is_integer():
        return int(search_seed)
    if isinstance(search_seed, bool) or not re.fullmatch("-?[0-9]+", str(search_seed)):
        raise DataError(f"search_seed={search_seed!r} is not a whole number, as --metadata search_seed=1 would be")
    return int(search_seed)


def check_enough(total: int, path: Any) -> None:
    """That a file's ``total`` examples can be divided.

    Raises:
        DataError: fewer than two.
    """
    if total < 2:
        raise DataError(
            f"{path}: {total or 'no'} example{'s' * (total != 1)} in it; expected one a line and at least two, to hold "
            "out and to search on. If the file was downloaded, fetch it again"
        )


def split(total: int, search_seed: int = 0, num_search: int = SEARCH) -> Split:
    """Divide ``total`` examples: 500 held out (three fifths of a smaller set), up to 200 of the rest for the search.

    Raises:
        DataError: a ``search_seed`` that is not a whole number.
    """
    search_seed = whole_seed(search_seed)
    order = shuffled(range(total), stream("split", SPLIT_SEED, total))
    held = min(HELD_OUT, total * 3 // 5)
    rest = shuffled(sorted(order[held:]), stream("search", SPLIT_SEED, total, search_seed))
    return Split(total, tuple(order[:held]), tuple(rest[:num_search]), search_seed)
