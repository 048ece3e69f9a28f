"""Files: one reader for all JSON that people hand over, and files written whole or not at all."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import shutil
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lpes_eval.errors import DataError, UserError, first_line


def shown(value: Any, most: int = 80) -> str:
    """A value as an error shows it: quoted, in one line, and not longer than ``most`` characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # too deep; an integer of thousands of digits
        text = type(value).__name__
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def parse(text: bytes | str, where: str, finite: bool = True) -> Any:
    """The JSON value of a text in UTF-8, if it means the same to every reader; ``where`` names the place in errors.

    Without ``finite``, NaN and Infinity, as Python writes them, are the numbers that they are. ``DataError``: not
    UTF-8, not JSON, a key twice, a number that is not finite or has thousands of digits, nesting of a thousand levels,
    or half of a surrogate pair, which no file can hold.
    """
    number = _finite if finite else float
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=_object, parse_float=number, parse_constant=number)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(f"{where}: not JSON ({error.msg} at {line}column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {str(error).split(';')[0]}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"the key {shown(key)} stands twice in an object")
        data[key] = value
    return data


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{shown(text)} is not a finite number")
    return number


def entry(data: Any, *keys: str) -> Mapping[str, Any]:
    """The object in a place of a JSON value; empty where nothing is there, ``TypeError`` where something else is."""
    for number in range(len(keys) + 1):
        data = {} if data is None else data
        if not isinstance(data, dict):
            raise TypeError(f"{' '.join(keys[:number]) or 'all'} is {type(data).__name__}, expected an object")
        data = data.get(keys[number]) if number < len(keys) else data
    return dict(data)


def read_json(path: str | Path) -> Any:
    """The JSON value of a file; see ``parse``."""
    return parse(b"".join(_lines(Path(path), None)), str(path))


def read_jsonl(
    path: str | Path, required: Collection[str] | Mapping[str, Any] = (), member: str | None = None, finite: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield one object a line of a ``.jsonl``, a ``.jsonl.gz``, or a ``.zip`` that holds ``member``.

    ``required`` are the fields that every line must have; or a line as it should be, whose fields every line must have,
    with values of the same types. An item of a list must be like one of those in that line. ``finite`` is as ``parse``
    has it. ``DataError`` names file and line.
    """
    expected = f"a line like {json.dumps(required)}" if isinstance(required, Mapping) else ", ".join(required)
    for number, line in enumerate(_lines(Path(path), member), 1):
        if not line.strip():
            continue
        place = f"{path}, {member}, line {number}" if member else f"{path}, line {number}"
        record = parse(line, place, finite)
        if not isinstance(record, dict):
            raise DataError(f"{place}: found {type(record).__name__}, expected a JSON object")
        if missing := [field for field in required if field not in record]:
            found = ", ".join(map(shown, list(record)[:20])) or "no field"
            raise DataError(f"{place}: the field {missing[0]!r} is missing; found {found}, expected {expected}")
        if isinstance(required, Mapping) and (wrong := _unlike(record, required, "the line")):
            raise DataError(f"{place}: {wrong}, expected {expected}")
        yield record


def _unlike(value: Any, like: Any, name: str) -> str:
    """What of a value is not as in the example ``like``; empty where all is."""
    if type(value) is not type(like):
        return f"{name} is {type(value).__name__}"
    if isinstance(like, dict):
        if missing := [key for key in like if key not in value]:
            return f"{name} has no {missing[0]!r}"
        return next(filter(None, (_unlike(value[key], like[key], repr(key)) for key in like)), "")
    if isinstance(like, list):
        for number, item in enumerate(value):
            wrong = [_unlike(item, one, f"{name}[{number}]") for one in like]
            if all(wrong):
                return wrong[-1]
    return ""


def _lines(path: Path, member: str | None) -> Iterator[bytes]:
    """The lines of a file, or of a member of an archive."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise DataError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
        opened = gzip.open if path.suffix == ".gz" else open
        with zipfile.ZipFile(path).open(member) if member else opened(path, "rb") as file:
            yield from file
    except DataError:
        raise
    except KeyError:
        raise DataError(f"{path}: the archive does not hold {member}") from None
    except Exception as error:  # no permission, and whatever gzip and zipfile meet in a broken archive
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{path}: cannot be read ({reason}); check its name, or delete it and fetch it again") from None


def sha256(path: str | Path) -> str:
    """The checksum of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` so that whoever reads, even after a crash, finds the old file or the new one.

    A link stays a link, and the file that it names is written. A pipe or ``/dev/stdout`` is written to as it stands.
    """
    path = Path(os.path.realpath(path))
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            stream.write(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            if path.exists():  # its permissions stay
                shutil.copymode(path, part)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:  # of a full disk Python does not say where
        error.filename = error.filename or str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


HEAD = 4096
"""So many bytes at the beginning of an output hold its marker."""


def marker(command: str) -> str:
    """What a command puts at the beginning of a file that it writes, in a comment or an entry."""
    return f"written by {command}, which replaces this file when it is run again"


def check_output(path: str | Path, mark: str) -> None:
    """Refuse a file (``UserError``) that is there already, unless its beginning holds ``mark``.

    A pipe, and the summary of a job on GitHub, are written to as they are.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file")
    if not path.is_file() or _is_job_summary(path):
        return
    try:
        with path.open("rb") as file:
            is_ours = mark.encode() in file.read(HEAD)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give another file") from None
    if not is_ours:
        raise UserError(f"{path}: is there and was not written by this command; give another file, or delete it")


def write_output(path: str | Path, content: str | bytes, mark: str) -> None:
    """Write a command's output, but never over a file that the command did not write; raises as ``check_output``.

    ``mark`` tells the command's outputs from other files, and is in the first ``HEAD`` bytes of the ``content``. The
    file that ``$GITHUB_STEP_SUMMARY`` names is shared by the steps of a job, and is appended to.
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    assert mark.encode() in data[:HEAD], mark
    check_output(path, mark)
    try:
        if _is_job_summary(path):
            with path.open("ab") as file:
                file.write(data)
        else:
            write_atomically(path, data)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); give another file") from None


def _is_job_summary(path: Path) -> bool:
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    return bool(summary) and os.path.realpath(path) == os.path.realpath(str(summary))
