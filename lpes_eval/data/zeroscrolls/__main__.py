"""The ZeroSCROLLS leaderboard's submission file, from the samples that lm-eval logged: ``Task,ID,Prediction``."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from lpes_eval import files
from lpes_eval.data import zeroscrolls
from lpes_eval.data.source import Asked, asked
from lpes_eval.errors import DataError, program

LEADERBOARD = (*zeroscrolls.NAMES, "quality", "musique", "book_sum_sort")
"""The leaderboard takes a submission of all ten tasks only."""
COLUMNS = ("Task", "ID", "Prediction")


@program("python -m lpes_eval.data.zeroscrolls")
def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m lpes_eval.data.zeroscrolls``: from logged samples to a checked submission file."""
    parser = argparse.ArgumentParser(
        prog="python -m lpes_eval.data.zeroscrolls",
        description="Write the ZeroSCROLLS leaderboard's submission file from the samples of an lm_eval run with "
        "--log_samples and --metadata split=test, and check it against the test files. The leaderboard takes all ten "
        f"tasks only: add the rows of the other ones to the file ({','.join(COLUMNS)}).",
    )
    parser.add_argument("samples", nargs="+", type=Path, help="samples_lpes_zeroscrolls_NAME_*.jsonl, one a task")
    parser.add_argument("--data_dir", help="folder with the tasks' archives, where the run had one (default: the Hub)")
    default = "zero_scrolls_predictions.csv"
    parser.add_argument("--output", type=Path, default=Path(default), metavar="FILE", help=f"default: {default}")
    options = parser.parse_args(arguments)
    request = asked({"data_dir": options.data_dir})
    request = request if request.folder else Asked("official")
    answers: dict[str, dict[str, str]] = {}
    for path in options.samples:
        named = [name for name in zeroscrolls.NAMES if f"_{name}_" in path.name]
        if len(named) != 1:
            raise DataError(f"{path}: the name does not say which task's samples these are; keep lm_eval's file name")
        (task,) = named
        if task in answers:
            raise DataError(f"{path}: {task} has samples in another file too; expected one file a task")
        archive = zeroscrolls.locate(request, task, "test")
        answers[task] = of_samples(path)
        check(task, answers[task], [example.id for example in zeroscrolls.read(archive, task, "test")])
    text = io.StringIO(newline="")
    csv.writer(text).writerows([COLUMNS, *((task, *row) for task in answers for row in answers[task].items())])
    files.write_atomically(options.output, text.getvalue())
    missing = ", ".join(task for task in LEADERBOARD if task not in answers)
    print(f"{options.output}: {', '.join(f'{task} {len(of)}' for task, of in answers.items())}; not in it: {missing}")


def of_samples(path: Path) -> dict[str, str]:
    """Example id -> prediction, from the samples that ``lm_eval --log_samples`` wrote for one task."""
    predictions: dict[str, str] = {}
    for number, sample in enumerate(files.read_jsonl(path, {"doc": {"id": "ID"}, "resps": [["TEXT"]]}), 1):
        name, response = sample["doc"]["id"], sample["resps"][0][0]
        if name in predictions or not isinstance(response, str):
            raise DataError(f"{path}, sample {number}: id {name} stands there twice, or its answer is no text")
        predictions[name] = response
    return predictions


def check(task: str, predictions: dict[str, str], ids: Sequence[str]) -> None:
    """Make sure that there is one prediction for each of ``ids`` and nothing else; raises ``DataError``."""
    for problem, names in (("missing", {*ids} - {*predictions}), ("not in the test set", {*predictions} - {*ids})):
        if names:
            sizes = f"{len(predictions)} predictions for {len(ids)} examples"
            raise DataError(f"submission, {task}: {sizes}; {len(names)} ids are {problem}, such as {min(names)}")


if __name__ == "__main__":
    sys.exit(main())
