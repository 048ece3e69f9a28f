"""Which examples a search may see, and which the reported score is made of."""

from lpes_eval.errors import DataError
from lpes_eval.rng import shuffled, stream

SPLIT_SEED = 20251121
HELD_OUT = 500
SEARCH = 200
SPLITS = ("held_out", "search", "all")


def seed(name: str, search_seed: int = 0) -> str:
    """What split ``name`` is drawn with, as results record it."""
    return str(SPLIT_SEED) + (f", search_seed {search_seed}" if name == "search" else "")


def indices(total: int, name: str, search_seed: int = 0) -> tuple[int, ...]:
    """The numbers of the examples of split ``name``, of a benchmark's ``total``; ``DataError`` for an unknown split.

    Held out are 500 (three fifths of a smaller set) by ``total`` alone; a search draws up to 200 others (Table 8).
    """
    if name not in SPLITS:
        raise DataError(f"split={name!r} is not a split; expected one of {', '.join(SPLITS)}")
    if name == "all":
        return tuple(range(total))
    order = shuffled(range(total), stream("split", SPLIT_SEED, total))
    held = min(HELD_OUT, total * 3 // 5)
    if name == "held_out":
        return tuple(order[:held])
    return tuple(shuffled(sorted(order[held:]), stream("search", SPLIT_SEED, total, search_seed))[:SEARCH])
