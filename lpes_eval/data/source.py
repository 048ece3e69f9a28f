"""Which data a task runs on, where the files are, and how the results say so.

The source is decided by what was asked for, never by what could be reached: a model that is named gets the benchmark's
official files, the shipped reference model the generated set, and ``--metadata source=...`` or a data folder overrides
both. Nothing falls back to anything else; what is missing is an error that names the file.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from lpes_eval import files
from lpes_eval.errors import DataError
from lpes_eval.files import write_atomically

ENV = "LPES_EVAL_DATA"
KINDS = ("generated", "official", "folder")
WAY_OUT = f"give a folder that holds it (--metadata data_dir=DIR, or {ENV}), or ask for --metadata source=generated"


@dataclass(frozen=True)
class Asked:
    """What was asked for.

    Attributes:
        kind: ``generated``, ``official`` (downloaded, then cached), or ``folder``.
        folder: the local folder, for ``folder`` alone.
    """

    kind: str
    folder: Path | None = None


@dataclass(frozen=True)
class Source:
    """Where a task's examples came from, in the form in which the results keep it.

    Attributes:
        kind: ``generated``, ``official`` or ``folder``.
        name: the set's name, such as ``nq-open-oracle+drawn``.
        location: the file's path or address; for a generated set, the generator and its seed.
        sha256: of the file's bytes; for a generated set, of the examples themselves.
        split: ``held_out`` or ``search``.
        split_seed: what the split was drawn with.
        total: how many examples the set has.
        examples: how many of them are in the split.
    """

    kind: str
    name: str
    location: str
    sha256: str
    split: str
    split_seed: str
    total: int
    examples: int

    def to_dict(self) -> dict[str, Any]:
        """For ``metadata`` of a task's configuration, from where it gets into the results JSON."""
        return asdict(self)

    def version(self, version: Any) -> str:
        """A task's version with the set's name behind it: what the results table prints."""
        return f"{version} {self.kind}" if self.kind == self.name else f"{version} {self.kind}: {self.name}"


def asked(metadata: Mapping[str, Any]) -> Asked:
    """Decide the source from lm-eval's merged metadata (model arguments, then ``--metadata``) and the environment.

    In this order: ``source`` and ``data_dir`` of the metadata, the folder named by ``LPES_EVAL_DATA``, the model.

    Raises:
        DataError: an unknown ``source``, a folder that is none, or two wishes that exclude each other.
    """
    kind, folder = metadata.get("source"), metadata.get("data_dir")
    if kind is not None and kind not in KINDS:
        raise DataError(f"source={kind!r} is not a source; expected one of {', '.join(KINDS)}")
    if folder == "":
        raise DataError("data_dir= is empty (a shell variable that is not set?); name the folder, or leave it out")
    if folder and kind not in (None, "folder"):
        raise DataError(f"source={kind} and data_dir={folder} exclude each other; drop one of the two")
    if kind in (None, "folder") and (folder := folder or os.environ.get(ENV)):
        path, given = Path(str(folder)), "data_dir" if metadata.get("data_dir") else ENV
        try:
            path = path.expanduser()
        except RuntimeError as error:  # ~ of somebody whom this machine does not know
            raise DataError(f"{given}={folder}: {error}; expected the folder with the benchmark's files") from None
        if not path.is_dir():
            raise DataError(f"{given}={folder}: no such folder; expected the folder with the benchmark's files")
        return Asked("folder", path)
    if kind == "folder":
        raise DataError(f"source=folder names no folder; add data_dir=DIR to --metadata, or set {ENV}")
    return Asked(kind or ("official" if names_a_model(metadata) else "generated"))


def names_a_model(metadata: Mapping[str, Any]) -> bool:
    """Whether a model other than the shipped one was named: by ``pretrained``, ``model``, or the factors' origin.

    A loaded model that is handed over in place of a name goes by the name that it was loaded from.
    """
    name = metadata.get("pretrained") or metadata.get("model")
    if name is None and metadata.get("factors") is not None:
        from lpes_eval import factors

        origin = factors.parse(metadata["factors"]).origin.get("model")
        name = origin.get("name") if isinstance(origin, Mapping) else origin
    if name is None:
        return False
    if not isinstance(name, str | os.PathLike):
        name = getattr(getattr(name, "config", None), "_name_or_path", "")
    return not is_shipped(str(name))


def is_shipped(name: str) -> bool:
    """Whether a model's name or path means the reference model that comes with this package."""
    from lpes_eval import reference

    home = Path(reference.__file__).resolve().parent
    return name in reference.NAMES or home in Path(name).expanduser().resolve().parents


def find(folder: Path, name: str, subfolders: Sequence[str] = ()) -> Path | None:
    """``name`` in ``folder`` itself, or in one of the places where the benchmark's own repository keeps it.

    Where a name ends in ``.gz``, the file may also lie there uncompressed, without that ending.
    """
    names = (name, name.removesuffix(".gz"))
    candidates = (folder / subfolder / one for subfolder in ("", *subfolders) for one in names)
    return next((path for path in candidates if path.is_file()), None)


def other_sizes(folder: Path, pattern: str, size: str, subfolders: Sequence[str] = ()) -> str:
    """Which files of the same kind there are for other sizes, and how to ask for them; empty where there are none.

    Args:
        folder: where a file was looked for.
        pattern: what files of its kind are called, without ``.gz``. Their size is the first number in it.
        size: what the metadata calls it.
        subfolders: as for ``find``; may be patterns too.
    """
    found = {
        int(re.findall("[0-9]+", path.name)[0]): path.name
        for place in ("", *subfolders)
        for ending in ("", ".gz")
        for path in folder.glob(str(PurePath(place, pattern + ending)))
    }
    if not found:
        return ""
    names, numbers = [found[number] for number in sorted(found)], map(str, sorted(found))
    there = "there is" if len(names) == 1 else "there are"
    return f" ({there} {', '.join(names)}: add {size}={' or '.join(numbers)} to --metadata)"


def missing(folder: Path, name: str, origin: str, others: str = "") -> DataError:
    """The error for a file that should be in a local folder and is not; ``others`` are those of ``other_sizes``."""
    return DataError(
        f"{folder}: {name} is not there{others}; get it from {origin}, or ask for --metadata source=generated"
    )


def download(url: str, sha256: str | None = None, way_out: str = WAY_OUT) -> Path:
    """Fetch a file once and keep it in the cache of ``datasets`` (``HF_DATASETS_CACHE``).

    An interrupted download goes on where it stopped. The checksum is written beside the file when it is first complete,
    and the file is checked against it (or against ``sha256``, where the benchmark's authors give one) at every use.

    Raises:
        DataError: offline and not cached (the message ends with ``way_out``), or a file that is not the one that was
            fetched; names the file and its address.
    """
    import datasets

    cache = Path(datasets.config.DOWNLOADED_DATASETS_PATH) / "lpes_eval" / url.split("://", 1)[1]
    record = cache.with_name(cache.name + ".sha256")
    if not cache.is_file():
        try:
            _fetch(url, cache)
        except DataError as error:
            raise DataError(f"{error}; {way_out}") from None
    found = files.sha256(cache)
    if sha256 is None and record.is_file():
        sha256 = record.read_text(encoding="utf-8").strip()
    if sha256 is None:
        write_atomically(record, found + "\n")
    elif found != sha256:
        raise DataError(
            f"{cache}: SHA-256 is {found}, expected {sha256}; delete the file and run again to fetch it anew"
        )
    return cache


def _fetch(url: str, target: Path) -> None:
    """Download to ``target``, through a part file that a later call completes."""
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with FileLock(str(part) + ".lock"):
        if target.is_file():  # another process was faster
            return
        if _fetch_part(url, part, target.name) == "again":
            _fetch_part(url, part, target.name)
        os.replace(part, target)


def _fetch_part(url: str, part: Path, name: str) -> Literal["done", "again"]:
    """Complete ``part``; ``again`` where what was already there proved useless and is gone."""
    from huggingface_hub.file_download import http_get

    resumed = part.stat().st_size if part.is_file() else 0
    try:
        with part.open("ab") as file:
            http_get(url, file, resume_size=resumed, displayed_filename=name)
        if part.name.endswith(".gz.part"):
            with gzip.open(part) as archive:
                while archive.read(1 << 20):
                    pass
    except Exception as error:  # whatever the HTTP client raises: offline mode, no route, no such page, cut off
        broken = isinstance(error, gzip.BadGzipFile | EOFError | zlib.error)
        refused = getattr(getattr(error, "response", None), "status_code", None) == 416  # nothing left to resume
        if broken or refused:
            part.unlink()
            if resumed:
                return "again"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if type(error).__name__ == "OfflineModeIsEnabled":
            reason = "HF_HUB_OFFLINE is set"
        raise DataError(f"{name} is not in the cache and cannot be fetched from {url} ({reason})") from None
    return "done"
