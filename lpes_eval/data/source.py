"""Which data a task runs on, where the files are, and how the results say so.

The source follows from what was asked for, never from what could be reached: a named model gets the official files, the
shipped reference model the generated set, and ``--metadata source=...`` or a data folder overrides both.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from lpes_eval import files
from lpes_eval.data import splits
from lpes_eval.errors import DataError, first_line

ENV = "LPES_EVAL_DATA"


@dataclass(frozen=True)
class Asked:
    """What was asked for: ``generated``, ``official`` (downloaded), ``synthwiki``, or the files in a ``folder``."""

    kind: str
    folder: Path | None = None


def asked(metadata: Mapping[str, Any]) -> Asked:
    """Decide by lm-eval's merged metadata (``source`` or ``data_dir``), else ``LPES_EVAL_DATA``, else the model.

    ``DataError``: a folder that is none, or two settings that exclude each other.
    """
    kind, folder = metadata.get("source"), metadata.get("data_dir")
    if folder and kind is not None:
        raise DataError(f"source={kind} and data_dir={folder} exclude each other; drop one of the two")
    name, folder = ("data_dir", folder) if folder else (ENV, os.environ.get(ENV))
    if folder and kind is None:
        path = Path(str(folder)).expanduser()
        if not path.is_dir():
            raise DataError(f"{name}={folder}: no such folder; expected the folder with the benchmark's files")
        return Asked("folder", path)
    return Asked(kind or ("official" if _names_a_model(metadata) else "generated"))


def _names_a_model(metadata: Mapping[str, Any]) -> bool:
    """Whether a model other than the shipped one was named: by ``pretrained``, ``model``, or the factors' origin."""
    from lpes_eval import factors, reference

    name = metadata.get("pretrained") or metadata.get("model")
    if name is None and metadata.get("factors") is not None:
        name, _ = factors.parse(metadata["factors"]).model
    if name is None:
        return False
    name = str(getattr(name.config, "_name_or_path", "") if hasattr(name, "config") else name)
    shipped = reference.path().parent
    return name not in reference.NAMES and shipped not in Path(name).expanduser().resolve().parents


@dataclass(frozen=True)
class Files:
    """The files that a benchmark's authors publish at ``url``, one for each size or subset: ``{}`` stands for it.

    Below a local folder a file lies in one of ``places``. Some benchmarks have a ``generated`` set too.
    """

    benchmark: str
    name: str
    url: str
    places: tuple[str, ...] = ()
    generated: bool = False

    def path(self, request: Asked, which: Any = "") -> Path:
        """The file that was asked for, downloaded if need be; a ``DataError`` says the ways to get it."""
        way_out = f"give a folder that holds it (--metadata data_dir=DIR, or {ENV})"
        way_out += ", or ask for --metadata source=generated" if self.generated else ""
        if request.kind not in ("official", "folder"):
            message = f"{self.benchmark} has no {request.kind} set; ask for --metadata source=official"
            raise DataError(f"{message}, or {way_out}")
        address = f"{self.url}/{self.name}".format(which)
        if request.folder is None:
            return download(address, way_out)
        name = self.name.format(which)
        for place, ending in product(("", *self.places), (name, name.removesuffix(".gz"))):
            path = request.folder / place.format(which) / ending
            if path.is_file():
                return path
        raise DataError(f"{request.folder}: {name} is not there; get it from {address}; {way_out}")


def download(url: str, way_out: str) -> Path:
    """Fetch a file once and keep it in the cache of ``datasets``; a ``DataError`` ends with ``way_out``."""
    import datasets
    from huggingface_hub.file_download import http_get

    target = Path(datasets.config.DOWNLOADED_DATASETS_PATH) / "lpes_eval" / url.split("://", 1)[1]
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            http_get(url, file, displayed_filename=target.name)
        os.replace(part, target)
    except Exception as error:  # offline, no route, no such page, cut off
        missing = f"{target.name} is not in the cache and cannot be fetched from {url} ({first_line(error)})"
        raise DataError(f"{missing}; {way_out}") from None
    finally:
        part.unlink(missing_ok=True)
    return target


def read_examples(
    path: Path, like: Mapping[str, Any], parse: Callable[[int, Any], Any], member: str = "", divided: bool = False
) -> list[Any]:
    """What ``parse(number, line)`` makes of each line of a file that is ``like`` this one (``files.read_jsonl``).

    ``DataError`` also where ``parse`` raises ValueError, and for a line that a ``divided`` file has twice.
    """
    found: list[Any] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(files.read_jsonl(path, like, member or None)):
        try:
            if divided and (first := lines.setdefault(json.dumps(line), number)) != number:
                raise ValueError(f"the same as example {first + 1}, so a search could see a held-out one; remove it")
            found.append(parse(number, line))
        except ValueError as wrong:
            raise DataError(f"{path}, example {number + 1}: {wrong}") from None
    return found


@dataclass(frozen=True)
class Source:
    """Where a task's ``examples`` of a set's ``total`` came from: a file, or a generator and the examples' checksum."""

    kind: str
    name: str
    location: str
    sha256: str
    split: str
    split_seed: str
    total: int
    examples: int

    def version(self, version: Any) -> str:
        """A task's version with the set's name behind it: what the results table prints."""
        return f"{version} {self.kind}" if self.kind == self.name else f"{version} {self.kind}: {self.name}"


def draw(
    split: str,
    search_seed: int,
    kind: str,
    name: str,
    location: str | Path,
    total: int,
    example: Callable[[int], Any],
    content: Callable[[Any], Any] | None = None,
    numbers: Sequence[int] | None = None,
) -> tuple[list[dict[str, Any]], Source]:
    """The examples of a split of a set of ``total``, as rows, and where they came from.

    ``example`` makes the one of a number, a dataclass; ``content`` what of a generated one goes into the checksum.
    ``numbers`` are by default ``splits.indices``. ``DataError``: an unknown split, or fewer than two examples.
    """
    if total < 2:
        raise DataError(
            f"{location}: {total or 'no'} example{'s' * (total != 1)} in it; expected two or more, "
            "one a line, to hold out and to search on; delete a downloaded file to fetch it again"
        )
    chosen = splits.indices(total, split, search_seed) if numbers is None else numbers
    examples = [example(number) for number in chosen]
    made = content and sha256(json.dumps([content(one) for one in examples]).encode()).hexdigest()
    digest, seed = made or files.sha256(location), splits.seed(split, search_seed)
    source = Source(kind, name, str(location), digest, split, seed, total, len(examples))
    return [asdict(one) for one in examples], source
