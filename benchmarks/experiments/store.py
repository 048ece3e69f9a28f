"""Results on disk: one small JSON file an experiment, whole or not there at all.

A result says what was measured (``settings``, ``model``), with what (``versions``, ``hardware``), when, for how long,
and holds each question's outcome, so that every interval can be computed from it again. Outcomes that are right or
wrong are a string of 0 and 1 a position, in the order of ``questions``.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiments.sources import Model
from lpes_eval import files
from lpes_eval.errors import UserError
from lpes_eval.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
FAILED = ".failed.json"


class Results:
    """A folder of results.

    Args:
        folder: need not be there yet.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, name: str) -> Path:
        """The file of an experiment."""
        return self.folder / f"{name}.json"

    def load(self, name: str) -> dict[str, Any] | None:
        """An experiment's result, if it is there.

        Raises:
            UserError: a file that holds no JSON.
        """
        return _read(self.path(name))

    def failure(self, name: str) -> str | None:
        """Why an experiment gave no result the last time it was tried."""
        found = _read(self.folder / f"{name}{FAILED}")
        return found["error"] if found else None

    def keep(self, name: str, result: Mapping[str, Any]) -> None:
        """Write a result; an earlier failure is forgotten."""
        write_atomically(self.path(name), _dump(result))
        (self.folder / f"{name}{FAILED}").unlink(missing_ok=True)

    def keep_failure(self, name: str, error: str) -> None:
        """Write down that an experiment failed, and why, in one line."""
        write_atomically(self.folder / f"{name}{FAILED}", _dump({"error": error}))

    def factors_path(self, name: str) -> Path:
        """Where the factors of an experiment lie as a factors file."""
        return self.folder / "factors" / f"{name.replace('/', '-')}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(f"{path}: not JSON; delete it to have the experiment run again") from None


def _dump(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


# -- outcomes ----------------------------------------------------------------------------------------------------------


def pack(questions: Sequence[Any], scores: Mapping[Any, Sequence[float]]) -> dict[str, Any]:
    """Questions and their scores by position, compactly; scores that are not 0 or 1 are kept as numbers."""
    packed: dict[str, Any] = {}
    for position, values in scores.items():
        if len(values) != len(questions):
            raise ValueError(f"{position}: {len(values)} scores for {len(questions)} questions")
        binary = all(value in (0, 1) for value in values)
        packed[f"{position}"] = "".join(f"{int(v)}" for v in values) if binary else [round(v, 6) for v in values]
    return {"questions": " ".join(map(str, questions)), "scores": packed}


def unpack(result: Mapping[str, Any]) -> tuple[list[str], list[str], NDArray[np.float64]]:
    """A result's question ids, its positions, and its scores of shape (questions, positions)."""
    questions, scores = result["questions"].split(), result["scores"]
    columns = [[float(value) for value in values] for values in scores.values()]
    return questions, list(scores), np.array(columns).T.reshape(len(questions), len(scores))


def paired(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The scores of two results on the questions that both were asked, row by row and position by position.

    Raises:
        ValueError: no question in common, or other positions.
    """
    of_a, positions_a, scores_a = unpack(a)
    of_b, positions_b, scores_b = unpack(b)
    if positions_a != positions_b:
        raise ValueError(f"positions {positions_a} cannot be paired with {positions_b}")
    row = {question: number for number, question in enumerate(of_b)}
    common = [(number, row[question]) for number, question in enumerate(of_a) if question in row]
    if not common:
        raise ValueError("no question in common")
    rows_a, rows_b = zip(*common, strict=True)
    return scores_a[list(rows_a)], scores_b[list(rows_b)]


# -- circumstances -----------------------------------------------------------------------------------------------------


def model_at(pretrained: str) -> Model:
    """A model in a folder, or ``reference``.

    Raises:
        UserError: no model is there.
    """
    from lpes_eval import reference

    folder = reference.path() if pretrained == "reference" else Path(pretrained)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if not weights.is_file() or not config.is_file():
        raise UserError(f"{pretrained}: no model is there (model.safetensors and config.json); name a model's folder")
    return Model(pretrained, folder, files.sha256(weights), int(json.loads(config.read_text())["num_hidden_layers"]))


def spelled(path: Path) -> str:
    """A path as a command would name it: from the repository's root where it lies within."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def versions() -> dict[str, str]:
    """Versions that answers may depend on."""
    from importlib.metadata import version

    return {"python": platform.python_version()} | {
        name: version(name) for name in ("lpes-eval", "lm-eval", "torch", "transformers")
    }


def hardware(threads: int, device: str = "cpu") -> dict[str, Any]:
    """The machine, and how much of it one experiment was given."""
    processor = platform.processor() or platform.machine()
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        processor = names[0].partition(":")[2].strip()
    except (OSError, IndexError):
        pass
    return {"processor": processor, "cores": os.cpu_count(), "threads": threads, "device": device}
