"""What tells one search's measurements from another's: what was asked, and the packages that answered and scored."""

from __future__ import annotations

import contextlib
import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def sha256(value: Any) -> str:
    """A hash of plain data; of what JSON does not know, its ``repr`` counts."""
    return hashlib.sha256(json.dumps(value, default=repr).encode()).hexdigest()


def packages() -> dict[str, str]:
    """Versions that answers and scores may depend on."""
    versions = {}
    for name in ("lpes-eval", "lm-eval", "transformers", "tokenizers", "torch", "numpy", "cmaes"):
        with contextlib.suppress(PackageNotFoundError):  # cmaes is an extra
            versions[name] = version(name)
    return versions
