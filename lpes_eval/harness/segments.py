"""Prompts as labelled parts, so that a report can show them and an analysis can find their tokens."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """A part of a prompt, and what it is; ``begin`` first and ``end`` last characters stay where items are swapped."""

    label: str
    text: str
    begin: int = 0
    end: int = 0

    @property
    def core(self) -> str:
        """The item without what belongs to its place."""
        return self.text[self.begin : len(self.text) - self.end]

    def framed(self, core: str) -> str:
        """Another item in this place."""
        return self.text[: self.begin] + core + self.text[len(self.text) - self.end :]


def join(segments: Iterable[Segment]) -> str:
    """The prompt."""
    return "".join(segment.text for segment in segments)
