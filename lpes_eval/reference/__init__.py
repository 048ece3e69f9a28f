"""The reference models: small, shipped with the package, and biased by position at the default size of their tasks."""

from pathlib import Path
from typing import Any

NAMES = {"reference": "base", "lpes-eval/reference": "base", "reference-kv": "kv", "lpes-eval/reference-kv": "kv"}
"""What the shipped models are called, as ``pretrained`` and in a factors file's origin: name -> folder."""


def path(name: str = "base") -> Path:
    """Folder of a shipped model, ready for ``from_pretrained``: ``base``, or ``kv``, the smaller one for records."""
    return Path(__file__).resolve().parent / name


def folder(pretrained: Any) -> Any:
    """The folder of a shipped model, where ``pretrained`` is the name of one; anything else as it is."""
    return path(NAMES[pretrained]) if isinstance(pretrained, str) and pretrained in NAMES else pretrained
