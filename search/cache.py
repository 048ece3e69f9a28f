"""What was measured once is not measured again: every example's score, in a folder that searches share."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lpes_eval.files import write_atomically

logger = logging.getLogger(__name__)


class FitnessCache:
    """Every example's score under factors that were measured before.

    An entry is a small JSON file, replaced whole, so any number of processes may read and write at once. Its name is a
    hash of what the scores depend on: factors, model, tokenizer, requests with their documents, the tasks' settings and
    source files, package versions, and this package's own source files where they are not an installed version. What a
    task's code reads from elsewhere is not in it. The folder is ``$XDG_CACHE_HOME/lpes-eval/fitness`` by default.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = Path(folder or base / "lpes-eval" / "fitness")
        self._warned = False

    def _path(self, context: str, name: str) -> Path:
        key = hashlib.sha256(f"{context}\n{name}".encode()).hexdigest()
        return self._folder / key[:2] / f"{key}.json"

    def get(self, context: str, name: str) -> dict[str, Any] | None:
        """What is known about factors ``name`` (their digest); a file that cannot be read counts as not there."""
        try:
            entry = json.loads(self._path(context, name).read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(entry, dict) or (entry.get("context"), entry.get("factors")) != (context, name):
            return None
        return entry

    def put(self, context: str, name: str, entry: Mapping[str, Any]) -> None:
        """Keep an entry; where the folder cannot be written to, say so once and keep nothing."""
        text = json.dumps({"context": context, "factors": name, **entry}, default=lambda number: number.item())  # numpy
        try:
            write_atomically(self._path(context, name), text + "\n")
        except OSError as error:
            if not self._warned:
                logger.warning("%s: what is measured cannot be kept for other searches (%s)", self._folder, error)
            self._warned = True
