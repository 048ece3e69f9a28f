"""ZeroSCROLLS (Shaham et al. 2023, arXiv 2305.14196): prompts that come with the data, and the leaderboard's file.

Each task is an archive ``NAME.zip`` that holds ``NAME/validation.jsonl`` and ``NAME/test.jsonl``; the archive is read
where it lies, and so is a folder it was unpacked to. Only the validation files (about 20 examples each) are sure to
have references. All of them are held out: there is no set to search on.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpes_eval import files
from lpes_eval.errors import DataError
from lpes_eval.files import write_atomically
from lpes_eval.harness.budget import Budget

SUMMARIES = ("gov_report", "summ_screen_fd", "qmsum", "squality")
ANSWERS = ("qasper", "narrative_qa")
NAMES = (*SUMMARIES, *ANSWERS, "space_digest")
LEADERBOARD = (*NAMES, "quality", "musique", "book_sum_sort")
"""The leaderboard takes a submission of all ten tasks only."""

FILES = {"held_out": "validation", "test": "test"}
"""Split -> file of the benchmark."""

URL = "https://huggingface.co/datasets/tau/zero_scrolls/resolve/main"
COLUMNS = ("Task", "ID", "Prediction")

_POSITIONS = ("document_start_index", "document_end_index", "query_start_index", "query_end_index")
_TEXTS = ("id", "input", "truncation_seperator")  # the benchmark's spelling
_NO_EXPLANATION = "Do not provide any explanation."


@dataclass(frozen=True)
class Example:
    """One example, with its references; positions are characters of ``input``.

    Attributes:
        id: the benchmark's name of the example.
        input: the whole prompt.
        document: where the document starts and ends.
        query: where the question and what follows it (``Answer:``) starts, and where the question ends.
        separator: what stands for the part of a document that was cut off.
        references: all accepted outputs; none in an unlabelled file.
    """

    id: str
    input: str
    document: tuple[int, int]
    query: tuple[int, int]
    separator: str
    references: tuple[str, ...]


def file_for(split: str) -> str:
    """The name of a split's file, without its suffix.

    Raises:
        DataError: an unknown split, or the search's.
    """
    if split == "search":
        raise DataError(
            "ZeroSCROLLS has no examples to search on: its few labelled ones are all held out for the reported score; "
            "search on another task (kv_retrieval, mdqa_pos), and score the result here"
        )
    if split not in FILES:
        raise DataError(f"split={split!r} is not a split of ZeroSCROLLS; expected one of {', '.join(FILES)}")
    return FILES[split]


def locate(folder: Path, name: str, split: str) -> Path:
    """The task's archive or unpacked file in a local folder.

    Raises:
        DataError: neither is there.
    """
    unpacked = f"{file_for(split)}.jsonl"
    for home in (folder, folder / "zero_scrolls", folder / "zeroscrolls"):
        for path in (home / name / unpacked, home / f"{name}.zip"):
            if path.is_file():
                return path
    raise DataError(f"{folder}: neither {name}.zip nor {name}/{unpacked} is there; get the archive from {url(name)}")


def url(name: str) -> str:
    """Where a task's archive is published."""
    return f"{URL}/{name}.zip"


def read(path: str | Path, name: str, split: str) -> list[Example]:
    """The examples of one task, in the file's order; lines with the same id are one example with several references.

    Args:
        path: the archive ``NAME.zip``, or the ``.jsonl`` file itself.
        name: the task's name, which is also the folder's in the archive.
        split: ``held_out`` or ``test``.

    Raises:
        DataError: the file is missing, broken or not in the benchmark's form.
    """
    path = Path(path)
    member = f"{name}/{file_for(split)}.jsonl"
    if path.suffix == ".zip":
        where, lines = f"{path}, {member}", _read_archive(path, member)
    else:
        where, lines = str(path), files.read_jsonl(path, required=(*_TEXTS, *_POSITIONS))
    examples: dict[str, Example] = {}
    for number, line in enumerate(lines, 1):
        example = _parse(line, f"{where}, example {number}")
        first = examples.setdefault(example.id, example)
        if first is not example:
            examples[example.id] = replace(first, references=first.references + example.references)
    if not examples:
        raise DataError(f"{where}: the file holds no example")
    return list(examples.values())


def _read_archive(path: Path, member: str) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{path}, {member}, line {number}: not JSON ({error})") from None
                if not isinstance(record, dict):
                    raise DataError(f"{path}, {member}, line {number}: expected a JSON object")
                yield record
    except KeyError:
        raise DataError(f"{path}: the archive does not hold {member}") from None
    except (zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError) as error:
        raise DataError(f"{path}: broken archive ({error}); the download may be incomplete, fetch it again") from None
    except (OSError, RuntimeError) as error:  # RuntimeError is what zipfile has for a member with a password
        raise DataError(
            f"{path}: {member} cannot be read ({error}); check its permissions, or fetch it again"
        ) from None


def _parse(line: Mapping[str, Any], where: str) -> Example:
    for field in _TEXTS:
        if not isinstance(line.get(field), str):
            raise DataError(f"{where}: {field!r} is missing or no text")
    for field in _POSITIONS:
        if type(line.get(field)) is not int:
            raise DataError(f"{where}: {field!r} is missing or no whole number")
    start, end, query, query_end = (line[field] for field in _POSITIONS)
    if not 0 <= start <= end <= query <= query_end <= len(line["input"]):
        raise DataError(
            f"{where}: document {start}..{end} and query {query}..{query_end} do not follow each other in an input of "
            f"{len(line['input'])} characters"
        )
    output = line.get("output")
    if output is not None and not isinstance(output, str):
        raise DataError(f"{where}: 'output' is {type(output).__name__}, expected a text, or null where there is none")
    return Example(
        line["id"],
        line["input"],
        (start, end),
        (query, query_end),
        line["truncation_seperator"],
        (output,) if output else (),
    )


def for_chat(example: Example, name: str) -> Example:
    """The benchmark's own change of a prompt for chat models (section 3.2): no response header such as ``Answer:``.

    Question answering and aggregation also get ``Do not provide any explanation.`` at the end of their instruction.
    """
    (start, end), (query, query_end) = example.document, example.query
    text, shift = example.input[:query_end], 0
    if name not in SUMMARIES:
        instruction, blank, rest = text.partition("\n\n")
        text = f"{instruction.strip()} {_NO_EXPLANATION}{blank}{rest}"
        shift = len(text) - query_end
    return replace(example, input=text, document=(start + shift, end + shift), query=(query + shift, query_end + shift))


def fit(example: Example, budget: Budget, render: Callable[[str], str]) -> str:
    """The input, whole if the prompt fits; else with its document cut at the end, as the benchmark cuts it.

    Then come the instruction, as much of the document as there is room for, the separator (a sentence that says that
    the rest is omitted), and the text from the query on.

    Args:
        example: what to fit.
        budget: of the model.
        render: turns the text into the prompt as the model gets it (chat template).

    Raises:
        PromptTooLong: instruction and query alone leave no room for the document.
    """
    if budget.fits(render(example.input)):
        return example.input
    start, end = example.document
    head, tail = example.input[:start], example.separator + example.input[example.query[0] :]
    cut = budget.longest_beginning(
        example.input[start:end], lambda beginning: render(head + beginning + tail), f"ZeroSCROLLS, {example.id}"
    )
    return head + cut + tail


# -- the leaderboard's submission file --------------------------------------------------------------------------------


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
