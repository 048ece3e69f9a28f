"""Which examples a search may see, and which the reported score is made of."""

from __future__ import annotations

from dataclasses import dataclass

from lpes_eval.errors import DataError
from lpes_eval.rng import shuffled, stream

SPLIT_SEED = 20251121
HELD_OUT = 500
SEARCH = 200
SPLITS = ("held_out", "search", "all")


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
        """The example numbers of split ``name``.

        ``all`` is the whole set, for comparison with published scores of factors that were searched on something else.

        Raises:
            DataError: an unknown split.
        """
        if name not in SPLITS:
            raise DataError(f"split={name!r} is not a split; expected one of {', '.join(SPLITS)}")
        return tuple(range(self.total)) if name == "all" else self.search if name == "search" else self.held_out


def split(total: int, search_seed: int = 0) -> Split:
    """Divide ``total`` examples: 500 held out (three fifths of a smaller set), up to 200 of the rest for the search."""
    order = shuffled(range(total), stream("split", SPLIT_SEED, total))
    held = min(HELD_OUT, total * 3 // 5)
    rest = shuffled(sorted(order[held:]), stream("search", SPLIT_SEED, total, search_seed))
    return Split(total, tuple(order[:held]), tuple(rest[:SEARCH]), search_seed)
