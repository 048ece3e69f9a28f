"""The ZeroSCROLLS leaderboard's submission file, from the samples that lm-eval logged: ``Task,ID,Prediction``."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lpes_eval import files
from lpes_eval.data import zeroscrolls
from lpes_eval.data.source import Asked, asked
from lpes_eval.errors import DataError, UserError, program

LEADERBOARD = (*zeroscrolls.NAMES, "quality", "musique", "book_sum_sort")
"""The leaderboard takes a submission of all ten tasks only."""
COLUMNS = ("Task", "ID", "Prediction")

Predictions = dict[str, str]
"""Example id -> prediction."""


@program("python -m lpes_eval.data.zeroscrolls")
def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m lpes_eval.data.zeroscrolls``: from logged samples to a checked submission file."""
    parser = argparse.ArgumentParser(
        prog="python -m lpes_eval.data.zeroscrolls",
        description="Write the ZeroSCROLLS leaderboard's submission file from the samples of an lm_eval run with "
        "--log_samples and --metadata split=test, and check it against the test files.",
    )
    parser.add_argument("samples", nargs="*", type=Path, help="samples_zeroscrolls_*_NAME_*.jsonl, one a task")
    parser.add_argument("--predictions", action="append", default=[], metavar="TASK=FILE.json",
        help="predictions of another task: a JSON object from id to prediction; may be repeated")  # fmt: skip
    parser.add_argument(
        "--data_dir", metavar="DIR", help="folder with the tasks' archives, where the run had one (default: the Hub's)"
    )
    default = "zero_scrolls_predictions.csv"
    parser.add_argument("--output", type=Path, default=Path(default), metavar="FILE", help=f"default: {default}")
    parser.add_argument("--partial", action="store_true", help="accept fewer than the leaderboard's ten tasks")
    options = parser.parse_args(arguments)
    answers = _collect(options.samples, options.predictions)
    request = asked({"data_dir": options.data_dir})
    request = request if request.folder else Asked("official")
    try:
        paths = {task: zeroscrolls.locate(request, task, "test") for task in answers if task in LEADERBOARD}
    except DataError as error:
        raise DataError(str(error).replace("--metadata data_dir=DIR", "--data_dir DIR")) from None
    expected = {task: [e.id for e in zeroscrolls.read(path, task, "test")] for task, path in paths.items()}
    check(answers, expected, options.partial)
    rows = [(task, *row) for task in LEADERBOARD if task in answers for row in answers[task].items()]
    written = io.StringIO(newline="")
    csv.writer(written).writerows([COLUMNS, *rows])
    files.write_atomically(options.output, written.getvalue())
    print(f"{options.output}: {', '.join(f'{task} {len(found)}' for task, found in answers.items())}")


def _collect(samples: Sequence[Path], given: Sequence[str]) -> dict[str, Predictions]:
    """Each task's predictions, from samples or from ``TASK=FILE.json``; a task comes from one file alone."""
    sources: list[tuple[str, Path, Callable[[Path], Any]]] = []
    for path in samples:
        named = [name for name in zeroscrolls.NAMES if f"_{name}_" in path.name]
        if len(named) != 1:
            raise DataError(f"{path}: the name does not say which task's samples these are; keep lm_eval's file name")
        sources.append((named[0], path, of_samples))
    for one in given:
        task, found, file = one.partition("=")
        if not found:
            raise UserError(f"--predictions {one}: expected TASK=FILE.json, such as quality={one}")
        sources.append((task, Path(file), files.read_json))
    origin: dict[str, Path] = {}
    answers: dict[str, Predictions] = {}
    for task, path, read in sources:
        if task in origin:
            both = f"{task}: predictions in {origin[task]} and in {path}"
            raise DataError(f"{both}; expected one file a task, so name the run's own")
        origin[task], answers[task] = path, read(path)
        if not isinstance(answers[task], dict):
            raise DataError(f"{path}: expected one JSON object, id -> prediction")
    return answers


def of_samples(path: Path) -> Predictions:
    """Predictions from the samples that ``lm_eval --log_samples`` wrote for one task.

    Raises:
        DataError: a file that is not such a log, or an id that stands there twice.
    """
    found: Predictions = {}
    for number, sample in enumerate(files.read_jsonl(path, required=("doc", "resps")), 1):
        try:
            name, response = sample["doc"]["id"], sample["resps"][0][0]
        except (TypeError, KeyError, IndexError):
            raise DataError(f"{path}, sample {number}: not a logged sample of ZeroSCROLLS (doc.id, resps)") from None
        if name in found:
            raise DataError(f"{path}, sample {number}: id {name} stands there twice")
        found[name] = response
    return found


def check(answers: Mapping[str, Predictions], expected: Mapping[str, Collection[str]], partial: bool = False) -> None:
    """Make sure that each task has one prediction for each of its ``expected`` ids, and nothing else.

    Raises:
        DataError: unknown tasks, missing ones unless ``partial``, missing or surplus ids, a prediction that is no text.
    """
    if unknown := sorted(set(answers) - set(LEADERBOARD)):
        raise DataError(f"submission: {', '.join(unknown)}: no such task of ZeroSCROLLS")
    if not partial and (missing := [task for task in LEADERBOARD if task not in answers]):
        raise DataError(
            f"submission: no predictions for {', '.join(missing)}; the leaderboard takes all ten tasks only "
            "(give the others' with --predictions TASK=FILE.json, or write the file as it is with --partial)"
        )
    for task, found in answers.items():
        if bad := [name for name, prediction in found.items() if not isinstance(prediction, str)]:
            raise DataError(f"submission, {task}: the prediction for {bad[0]} is no text")
        wanted = set(expected[task])
        for problem, ids in (("missing", wanted - set(found)), ("not in the test set", set(found) - wanted)):
            if ids:
                raise DataError(
                    f"submission, {task}: {len(found)} predictions for {len(wanted)} examples; {len(ids)} ids are "
                    f"{problem}, such as {min(ids)}"
                )


if __name__ == "__main__":
    sys.exit(main())
