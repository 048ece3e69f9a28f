"""Nothing evaluated is ever lost: the folder of a search, and its memory, the journal.

``journal.jsonl`` begins with the settings. Then comes one line for every individual evaluated, on the disk before the
next one is begun; a key's last line counts (``lpes_eval.entries``). The optimiser is deterministic and the journal
knows every fitness that it was sent: going on means running it again from the start.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from lpes_eval import entries
from lpes_eval.entries import Entry
from lpes_eval.errors import UserError


class Journal:
    """A search's folder, held by this process alone from ``with`` to the end of its block.

    ``settings`` decide what the search finds, as plain data; ``notes`` are sentences on how the folder was found.

    Raises:
        UserError: from ``with``: another process is at work in the folder, it belongs to a search with other settings,
            it is damaged elsewhere than at the end of the journal, or it holds files but no search.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.settings = json.loads(json.dumps(settings, allow_nan=False))
        self.entries: dict[str, Entry] = {}
        self.notes: list[str] = []
        self._path = self.folder / "journal.jsonl"

    def __enter__(self) -> Journal:
        """Lock the folder and read it."""
        from filelock import FileLock, Timeout

        self._lock = FileLock(self.folder / ".lock", timeout=0)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Before anything is written; hidden are a lock, and what is left of a file whose writer was killed.
            names = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
            if names and self._path.name not in names:
                raise UserError(f"{self.folder}: holds {names[0]} but no search; take an empty folder or a new name")
            self._lock.acquire()
        except Timeout:
            text = "another search is at work in this folder; wait for it to end or take another folder"
            raise UserError(f"{self.folder}: {text}") from None
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be used ({error.strerror}); take another folder") from None
        try:
            settings = self._read()
            self._file = self._path.open("ab")
            if settings is None:
                self._write({"settings": self.settings})
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Free the folder; there is nothing left to write."""
        try:
            self._file.close()  # which fails on a full disk
        finally:
            self._lock.release()

    @property
    def individuals(self) -> list[Entry]:
        """The entries of individuals: what else is measured is of no generation."""
        return [entry for entry in self.entries.values() if entry.generation is not None]

    def record(self, key: str, data: Mapping[str, Any]) -> Entry:
        """Keep what was measured for ``key``: when this returns it is on the disk.

        Returns the entry as it will be read again; ``ValueError``: it is not an entry's data (JSON has no NaN).
        """
        entry = entries.entry_of({"key": key, **data})
        self._write(to_builtins(entry))
        self.entries[key] = entry
        return entry

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> dict[str, Any] | None:
        """Read the journal, cut off a torn line, and return the settings that it holds."""
        if not self._path.exists():
            return None
        settings, self.entries, torn = entries.read(self._path)
        if settings is not None and (changes := _differences(settings, self.settings)):
            way = "take these settings back, or another folder for a new search (--output)"
            raise UserError(f"{self.folder}: was begun with other settings ({'; '.join(changes)}); {way}")
        if torn:
            os.truncate(self._path, self._path.stat().st_size - torn)
            self.notes.append(f"{self._path}: the last line was torn off in writing and has been dropped")
        return settings


def _differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Where two plain values differ, one phrase a place."""
    if isinstance(before, dict) and isinstance(now, dict):
        dot = "." if name else ""
        places = {f"{name}{dot}{key}": (before.get(key), now.get(key)) for key in before | now}
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        places = {f"{name}[{i}]": pair for i, pair in enumerate(zip(before, now, strict=True))}
    else:
        return [] if before == now else [f"{name} was {json.dumps(before)}, is now {json.dumps(now)}"]
    return [phrase for place, pair in places.items() for phrase in _differences(*pair, place)]


def sha256(value: Any) -> str:
    """A hash of plain data; of what JSON does not know, its ``repr`` counts."""
    return hashlib.sha256(json.dumps(value, default=repr).encode()).hexdigest()


def packages() -> dict[str, str]:
    """Versions that answers and scores may depend on."""
    names = ("lpes-eval", "lm-eval", "transformers", "tokenizers", "torch", "numpy")
    return {name: version(name) for name in names}
