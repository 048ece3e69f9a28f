"""The submission file of the ZeroSCROLLS leaderboard (arXiv 2305.14196), from the samples that lm-eval logged."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from lpes_eval import files
from lpes_eval.data.zeroscrolls import COLUMNS, LEADERBOARD, NAMES, locate, read
from lpes_eval.errors import DataError
from lpes_eval.files import write_atomically


def predictions(samples: str | Path) -> dict[str, str]:
    """Predictions by example id, from the samples that ``lm_eval --log_samples`` wrote for one task.

    Raises:
        DataError: a file that is not such a log, or an id that stands there twice.
    """
    found: dict[str, str] = {}
    for number, sample in enumerate(files.read_jsonl(samples, required=("doc", "resps")), 1):
        doc, responses = sample["doc"], sample["resps"]
        try:
            name, response = doc["id"], responses[0][0]
        except (TypeError, KeyError, IndexError):
            raise DataError(f"{samples}, sample {number}: not a logged sample of ZeroSCROLLS (doc.id, resps)") from None
        if name in found:
            raise DataError(f"{samples}, sample {number}: id {name} stands there twice")
        found[name] = response
    return found


def check_submission(
    answers: Mapping[str, Mapping[str, str]], expected: Mapping[str, Collection[str]], partial: bool = False
) -> None:
    """Make sure that each task has one prediction for each of its test examples, and nothing else.

    Args:
        answers: task -> id -> prediction.
        expected: task -> the ids of its test examples, for the tasks whose data are at hand.
        partial: whether fewer than the leaderboard's ten tasks are acceptable.

    Raises:
        DataError: unknown or missing tasks, missing or surplus ids, a prediction that is no text.
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
        if task not in expected:
            continue
        wanted = set(expected[task])
        for problem, ids in (("missing", wanted - set(found)), ("not in the test set", set(found) - wanted)):
            if ids:
                raise DataError(
                    f"submission, {task}: {len(found)} predictions for {len(wanted)} examples; {len(ids)} ids are "
                    f"{problem}, such as {min(ids)}"
                )


def write_submission(path: str | Path, answers: Mapping[str, Mapping[str, str]]) -> None:
    """Write the leaderboard's CSV file (Task, ID, Prediction), and read it again to be sure that nothing was lost."""
    rows = [(task, name, text) for task in LEADERBOARD if task in answers for name, text in answers[task].items()]
    written = io.StringIO(newline="")
    csv.writer(written, lineterminator="\n").writerows([COLUMNS, *rows])
    written.seek(0)
    if [tuple(row) for row in csv.reader(written)] != [COLUMNS, *rows]:
        raise DataError(f"{path}: a prediction cannot be written as CSV without loss")
    write_atomically(path, written.getvalue())


def main(arguments: Iterable[str] | None = None) -> int:
    """``python -m lpes_eval.data.zeroscrolls``: from logged samples to a checked submission file."""
    import argparse
    import sys

    from lpes_eval.errors import UserError

    parser = argparse.ArgumentParser(
        prog="python -m lpes_eval.data.zeroscrolls",
        description="Write the ZeroSCROLLS leaderboard's submission file from the samples of an lm_eval run with "
        "--log_samples and --metadata split=test, and check it against the test files.",
    )
    parser.add_argument("samples", nargs="*", type=Path, help="samples_zeroscrolls_*_NAME_*.jsonl, one a task")
    parser.add_argument("--predictions", action="append", default=[], metavar="TASK=FILE.json")
    parser.add_argument("--data_dir", type=Path, required=True, help="folder with the tasks' archives")
    parser.add_argument("--output", type=Path, default=Path("zero_scrolls_predictions.csv"))
    parser.add_argument("--partial", action="store_true", help="accept fewer than the leaderboard's ten tasks")
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        answers = _collected(options.samples, options.predictions)
        expected = {
            task: [e.id for e in read(locate(options.data_dir, task, "test"), task, "test")] for task in answers
        }
        check_submission(answers, expected, options.partial)
        write_submission(options.output, answers)
    except UserError as error:
        sys.stderr.write(f"{parser.prog}: error: {error}\n")
        return 2
    counts = ", ".join(f"{task} {len(found)}" for task, found in answers.items())
    sys.stdout.write(f"{options.output}: {counts}\n")
    return 0


def _collected(samples: Iterable[Path], given: Iterable[str]) -> dict[str, dict[str, str]]:
    """Each task's predictions, from samples or from ``TASK=FILE.json``; a task comes from one file alone."""
    files: dict[str, Path] = {}
    answers: dict[str, dict[str, str]] = {}
    sources: list[tuple[str, Path, Callable[[Path], dict[str, str]]]]
    sources = [(_task_of(path), path, predictions) for path in samples]
    sources += [(task, Path(file), _json_predictions) for task, _, file in (one.partition("=") for one in given)]
    for task, path, read_them in sources:
        if task in files:
            raise DataError(
                f"{task}: predictions in {files[task]} and in {path}; expected one file a task, so name the run's own"
            )
        files[task], answers[task] = path, read_them(path)
    return answers


def _task_of(samples: Path) -> str:
    found = [name for name in NAMES if f"_{name}_" in samples.name]
    if len(found) != 1:
        raise DataError(f"{samples}: the name does not say which task's samples these are; keep lm_eval's file name")
    return found[0]


def _json_predictions(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected one JSON object, id -> prediction")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
