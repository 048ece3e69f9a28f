"""Prompts as labelled parts, so that a report can show them and an analysis can find their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """A part of a prompt, to the byte, and what it is (``instruction``, ``gold``, ``document 2``, ``question`` ...)."""

    label: str
    text: str


def join(segments: Iterable[Segment]) -> str:
    """The prompt."""
    return "".join(segment.text for segment in segments)
