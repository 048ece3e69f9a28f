"""A prompt in labelled pieces, so that a report can show them and an analysis can find their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """A piece of a prompt.

    Attributes:
        label: ``instruction``, ``document 3``, ``gold``, ``question`` and so on.
        text: its characters, white space included.
    """

    label: str
    text: str


def join(segments: Iterable[Segment]) -> str:
    """The prompt that the pieces make."""
    return "".join(segment.text for segment in segments)
