"""Which prompts begin alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]

SHORTEST_PREFIX = 16
"""Tokens that prompts must have in common before it is worth splitting them."""


@dataclass
class Group:
    """Prompts (by their number) that begin with the same tokens, and go through the model in one row."""

    prefix: Tokens
    members: list[int]


def share(prompts: Sequence[Tokens]) -> list[Group]:
    """Group prompts whose common beginning is at least half of each; in sorted order these are neighbours.

    A prefix never is a whole prompt: the last token is what the model is asked about.
    """
    groups: list[Group] = []
    for i in sorted(range(len(prompts)), key=lambda i: prompts[i]):
        beginning = prompts[i][:-1]
        if groups:
            last = groups[-1]
            pairs = zip(last.prefix, beginning, strict=False)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            longest = max(len(prompts[j]) for j in (i, *last.members))
            if common >= max(SHORTEST_PREFIX, longest / 2):
                last.prefix = beginning[:common]
                last.members.append(i)
                continue
        groups.append(Group(beginning, [i]))
    return groups
