"""Files: one reader for all JSON that people hand over, and files written whole or not at all."""

import gzip
import hashlib
import json
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lpes_eval.errors import DataError, UserError, first_line


def shown(value: Any, most: int = 80) -> str:
    """A value as an error shows it: quoted, in one line, and not longer than ``most`` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def parse(text: bytes | str, where: str, finite: bool = True) -> Any:
    """The JSON value of a text in UTF-8, else ``DataError`` that names the place, ``where``.

    Without ``finite``, NaN and Infinity, as Python writes them, are the numbers that they are.
    """
    try:
        return json.loads(text, parse_constant=_refused if finite else float)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(f"{where}: not JSON ({error.msg} at {line}column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {str(error).split(';')[0]}") from None


def _refused(text: str) -> float:
    raise ValueError(f"{text} is not a finite number")


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

    ``required`` are the fields that every line must have; or a line as it should be, whose fields every line must have
    with values of the same types, items of a list like its last one. ``DataError`` names file and line.
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
        wrong = (_unlike(item, like[-1], f"{name}[{number}]") for number, item in enumerate(value))
        return next(filter(None, wrong), "")
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
    except Exception as error:  # no permission, or a broken archive
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
    data = content.encode("utf-8", errors="replace") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            stream.write(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
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


def write_output(path: str | Path, content: str | bytes, mark: str) -> None:
    """Write a command's output, but never over a file that holds something without ``mark`` (``UserError``).

    It stands at the beginning of texts, and anywhere in other files.
    """
    refuse_foreign(Path(path), mark, None if isinstance(content, bytes) else HEAD)
    write_atomically(path, content)


def refuse_foreign(path: Path, mark: str, most: int | None = HEAD) -> None:
    """Refuse to replace a file that holds something without ``mark`` in its first ``most`` bytes (``UserError``)."""
    if path.is_file():
        with path.open("rb") as file:
            before = file.read(most)
        if before and mark.encode() not in before:
            raise UserError(f"{path}: is there and was not written by this command; give another file, or delete it")
