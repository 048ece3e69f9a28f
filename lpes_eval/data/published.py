"""Where the files of a benchmark are that exists as its authors published it only: no set is generated in its place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lpes_eval.data import source
from lpes_eval.errors import DataError

WAY_OUT = f"give a folder that holds it (--metadata data_dir=DIR, or {source.ENV})"


def asked(metadata: Mapping[str, Any], benchmark: str, file: str) -> source.Asked:
    """As ``source.asked``: a folder, or the official file.

    Raises:
        DataError: as there, and where the generated set was asked for, if only by the shipped model's name.
    """
    request = source.asked(metadata)
    if request.kind == "generated":
        raise DataError(
            f"{benchmark} has no generated set; ask for --metadata source=official, or give a folder with {file} "
            f"(--metadata data_dir=DIR, or {source.ENV})"
        )
    return request


def download(url: str) -> Path:
    """As ``source.download``, without the way out that there is not."""
    return source.download(url, way_out=WAY_OUT)
