"""Files: JSON Lines read with errors that name the line, and files written whole or not at all."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lpes_eval.errors import DataError


def remembered(read: Callable[..., Any]) -> Callable[..., Any]:
    """``read(path, ...)``, which reads a file once as long as it stays the same (its time and size)."""

    @functools.cache
    def once(path: Path, stamp: tuple[int, int], *rest: Any) -> Any:
        return read(path, *rest)

    def again(path: Path, *rest: Any) -> Any:
        try:
            found = path.stat()
        except OSError:
            return read(path, *rest)  # which says what is wrong
        return once(path, (found.st_mtime_ns, found.st_size), *rest)

    return again


def read_jsonl(path: str | Path, required: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield one object a line; blank lines are passed over.

    Args:
        path: a ``.jsonl`` file, or a ``.jsonl.gz``.
        required: the fields that every line must have; or a line that has them, to show where one is missing.

    Raises:
        DataError: no such file, a broken archive, a line that is not a JSON object or lacks a required field.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}); "
                        "expected one JSON object a line"
                    ) from None
                if not isinstance(record, dict):
                    raise DataError(f"{path}, line {number}: found {type(record).__name__}, expected a JSON object")
                if missing := [field for field in required if field not in record]:
                    raise DataError(
                        f"{path}, line {number}: the field {missing[0]!r} is missing; found "
                        f"{', '.join(map(repr, record)) or 'no field'}, expected {_expected(required)}"
                    )
                yield record
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        if not _is_gzip(path):
            raise DataError(
                f"{path}: not a gzip archive; expected one because of its name. If it is text, compress it (gzip) or "
                "take .gz from its name; if it was downloaded, fetch it again"
            ) from None
        raise DataError(
            f"{path}: broken gzip archive after line {number} ({error}); the download may be incomplete, fetch it again"
        ) from None
    except UnicodeDecodeError as error:
        if opener is open and _is_gzip(path):
            raise DataError(f"{path}: a gzip archive; expected text because of its name. Add .gz to it") from None
        raise DataError(f"{path}, after line {number}: not UTF-8 text ({error.reason})") from None


def _expected(required: Collection[str]) -> str:
    if isinstance(required, Mapping):
        return f"a line like {json.dumps(required)}"
    return ", ".join(map(repr, required))


def _is_gzip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def sha256(path: str | Path) -> str:
    """The checksum of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` so that whoever reads, even after a crash, finds the old file or the new one.

    A link stays a link, and the file that it names is written. What is no file, such as a pipe or ``/dev/stdout``,
    cannot be replaced, and is written to as it stands.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            stream.write(data)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
