"""Tokenised prompts, and which of them begin alike."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]

AHEAD = 12
"""Tokens of a draft that are checked at once: of a wrong one all that follows is computed for nothing, and every row of
the batch is padded to the longest."""
SHORTEST_PREFIX = 16
"""Tokens that prompts must have in common before it is worth splitting them."""


@dataclass
class Prompt:
    """One request, tokenised."""

    tokens: Tokens
    until: list[str]
    stops: list[tuple[str, int]]  # each stop, and in how many of the last tokens lm-eval looks for it
    max_new: int
    cut: bool = False

    def __post_init__(self) -> None:
        """Keep the tokens as bytes, which are searched fast."""
        self.raw = array("i", self.tokens)

    def look_up(self, so_far: Tokens) -> Tokens:
        """What followed the answer's last two tokens when they last stood in the prompt or the answer, if they did.

        Where that leads up to the answer's end, it goes round: two tokens that alternate may do so for long.
        """
        if len(so_far) < 2:
            return ()
        size = self.raw.itemsize
        at = (self.raw.tobytes() + array("i", so_far[:-1]).tobytes()).rfind(array("i", so_far[-2:]).tobytes())
        if at < 0 or at % size:  # a mention across the borders of tokens is none
            return ()
        followed = (self.tokens + so_far)[at // size + 2 :][:AHEAD]
        return (followed * AHEAD)[: min(AHEAD, self.max_new - len(so_far))]


@dataclass
class Group:
    """Prompts (by their number) that begin with the same tokens."""

    prefix: Tokens
    members: list[int]


def share(prompts: Sequence[Prompt]) -> list[Group]:
    """Group prompts whose common beginning is at least half of each; in sorted order these are neighbours."""
    groups: list[Group] = []
    for i in sorted(range(len(prompts)), key=lambda i: prompts[i].tokens):
        tokens = prompts[i].tokens
        if groups:
            last = groups[-1]
            # A prefix never is a whole prompt: the last token is what the model is asked about.
            beginning = last.prefix or prompts[last.members[0]].tokens[:-1]
            together = min(common(beginning, tokens), len(tokens) - 1)
            longest = max(len(tokens), *(len(prompts[j].tokens) for j in last.members))
            if together >= max(SHORTEST_PREFIX, longest / 2):
                last.prefix = tokens[:together]
                last.members.append(i)
                continue
        groups.append(Group((), [i]))
    return groups


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    return next((k for k in range(n) if a[k] != b[k]), n)


def halves(batch: list[Group]) -> list[list[Group]]:
    """The same prompts in two batches; a single group gives up its prefix's being shared by all of it."""
    if len(batch) == 1:
        prefix, members = batch[0].prefix, batch[0].members
        middle = (len(members) + 1) // 2
        return [[Group(prefix, members[:middle])], [Group(prefix, members[middle:])]]
    middle = len(batch) // 2
    return [batch[:middle], batch[middle:]]
