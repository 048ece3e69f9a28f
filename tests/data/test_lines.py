"""Files in the benchmarks' form are read, and every other line is refused with its place and what is wrong with it."""

import re
import zipfile
from pathlib import Path

import pytest

from lpes_eval.data import kv, leval, mdqa, perplexity, zeroscrolls
from lpes_eval.errors import DataError

CONTEXTS = mdqa.LINE["ctxs"]


def read_archived(path):
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
        archive.write(path, "qasper/validation.jsonl")
    return zeroscrolls.read(path.with_suffix(".zip"), "qasper", "held_out")


READERS = {  # benchmark -> a reader of a file, and a line that it reads
    "kv": (lambda path: kv.read(path, 2), kv.LINE),
    "mdqa": (lambda path: mdqa.read(path, 2), mdqa.LINE),
    "leval": (lambda path: leval.read(path, "sci_fi"), {**leval.LINE, "outputs": ["True [fact: False]"]}),
    "zeroscrolls": (read_archived, {**zeroscrolls.LINE, "output": "x"}),
    "perplexity": (perplexity.read, {"text": "TEXT"}),
}


@pytest.mark.parametrize("benchmark", READERS)
def test_a_line_of_the_form_that_errors_show_is_read_and_no_other(tmp_path, benchmark, write):
    read, good = READERS[benchmark]
    assert len(read(write(tmp_path / "f.jsonl", good))) == 1
    without = {key: value for key, value in good.items() if key != next(iter(good))}
    message = f"the field '{next(iter(good))}' is missing; found .*expected a line like {{"
    with pytest.raises(DataError, match=rf"^{tmp_path}/f\..*, line 2: {message}"):
        read(write(tmp_path / "f.jsonl", good, without))


@pytest.mark.parametrize(
    ("benchmark", "change", "message"),
    [
        ("kv", {"ordered_kv_records": [["KEY", "VALUE"]]}, "example 2: 1 records, expected 2"),
        ("kv", {"ordered_kv_records": [["a", 1], ["b", "2"]]}, r"line 2: 'ordered_kv_records'\[0\]\[1\] is int"),
        ("kv", {"key": "z"}, "example 2: the asked record .* is not in"),
        ("kv", {"ordered_kv_records": [["KEY", "VALUE"], ["KEY", "2"]]}, "example 2: key 'KEY' stands 2 times"),
        ("kv", {}, "example 2: the same as example 1, so a search could see a held-out one; remove it"),
        ("mdqa", {}, "example 2: the same as example 1"),
        ("mdqa", {"question": " "}, "example 2: 'question' or 'answers' is empty"),
        ("mdqa", {"answers": ["x", " "]}, "example 2: .* or holds an empty text"),
        ("mdqa", {"ctxs": [{"title": "t", "text": None}]}, "line 2: 'text' is NoneType"),
        ("mdqa", {"ctxs": CONTEXTS * 10}, "example 2: 20 documents in 'ctxs', expected 2"),
        ("mdqa", {"ctxs": [CONTEXTS[0]] * 2}, "example 2: 2 documents .* expected one"),
        ("leval", {"instructions": ["q", "r"]}, "example 2: 2 instructions but 1 outputs"),
        ("leval", {"outputs": [" "]}, "example 2: 'outputs' holds an empty text"),
        ("leval", {"outputs": ["True"]}, "example 2: the reference 'True' has no"),
        ("zeroscrolls", {"query_start_index": "5"}, "line 2: 'query_start_index' is str"),
        ("zeroscrolls", {"query_start_index": 10**6}, "example 2: .* do not follow each other"),
        ("zeroscrolls", {"output": ["a"]}, "example 2: 'output' is list"),
        ("perplexity", {"text": 1}, "line 2: 'text' is int"),
    ],
)
def test_a_line_that_cannot_be_used_is_refused_with_its_place(tmp_path, benchmark, change, message, write):
    read, good = READERS[benchmark]
    path = write(tmp_path / "f.jsonl", good, {**good, **change})
    with pytest.raises(DataError, match=rf"^{path.with_suffix('')}.*{message}"):
        read(path)


def test_the_lines_that_the_readmes_show_are_read(tmp_path, write):
    for folder, read, size, beginning in (
        ("mdqa_pos", mdqa.read, 2, "Document [1](Title: New mill)"),
        ("kv_retrieval", kv.read, 3, "Extract the value"),
    ):
        page = Path(__file__).resolve().parents[2] / "tasks" / folder / "README.md"
        (shown,) = re.findall(r"^```json\n(.*)\n```$", page.read_text(), re.M)
        (question,) = read(write(tmp_path / "f.jsonl", shown), size)
        assert beginning in question.prompt(100)
    assert question.prompt(100).endswith('"beta": "23"}\n\nKey: "beta"\nCorresponding value:')


def test_where_a_size_is_not_in_the_folder_its_file_and_address_are_named(tmp_path, write):
    write(tmp_path / "kv-retrieval-8_keys.jsonl")
    with pytest.raises(DataError, match=r"kv-retrieval-75_keys\.jsonl\.gz is not there; get it from https://"):
        kv.load(num_keys=75, data_dir=str(tmp_path))
