"""One reader for what people hand over: what means the same to everybody is read, all else is refused in a sentence."""

import gzip
import json
import os

import pytest

from lpes_eval import files
from lpes_eval.errors import DataError

HOSTILE = {
    "an integer of 5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    "deep nesting": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "NaN": b'{"a": NaN}',
    "not UTF-8": b'{"a": "\xff"}',
    "not JSON": b"{'a': 1}",
    "not an object": b"[1]",
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_what_does_not_mean_the_same_to_everybody_is_refused_with_file_and_line(tmp_path, line):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=f"^{path}, line 3: ") as refused:
        list(files.read_jsonl(path))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_what_is_no_file_of_its_name_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")  # to read it would be to wait
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "text.jsonl.gz").write_text("{}")
    (tmp_path / "archive.jsonl").write_bytes(gzip.compress(b"{}"))
    (tmp_path / "text.zip").write_text("{}")
    (tmp_path / "half.jsonl.gz").write_bytes(gzip.compress(os.urandom(9000))[:-20])
    names = ["half.jsonl.gz", "pipe.jsonl", "folder.jsonl", "text.jsonl.gz", "archive.jsonl", "none.jsonl", "text.zip"]
    for name in (*names, "x" * 300):
        with pytest.raises(DataError, match=f"^{tmp_path / name}"):
            list(files.read_jsonl(tmp_path / name, member="m" if name.endswith("zip") else None))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"name": 1}, "'name' is int"),
        ({"sizes": "12"}, "'sizes' is str"),
        ({"sizes": [1, True]}, r"'sizes'\[1\] is bool"),
        ({"parts": [{"title": "t"}, {}]}, r"'parts'\[1\] has no 'title'"),
    ],
)
def test_a_line_that_is_not_like_the_one_shown_is_refused_with_that_one(tmp_path, change, wrong):
    like = {"name": "NAME", "sizes": [1], "parts": [{"title": "TITLE"}]}
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps({**like, "more": None}) + "\n" + json.dumps(like | change))
    with pytest.raises(DataError, match=f"line 2: {wrong}, expected a line like") as refused:
        list(files.read_jsonl(path, like))
    assert json.loads(str(refused.value).split("a line like ")[1]) == like
