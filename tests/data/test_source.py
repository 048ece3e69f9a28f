"""The source of the examples follows from what was asked; files are found, fetched once and checked."""

import gzip
import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from lpes_eval import reference
from lpes_eval.data import mdqa, source
from lpes_eval.errors import DataError
from lpes_eval.factors import Factors


def loaded(name):
    return SimpleNamespace(config=SimpleNamespace(_name_or_path=name))


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("generated", {}),
        *(("generated", {"pretrained": name}) for name in ("reference", "lpes-eval/reference", str(reference.path()))),
        ("generated", {"pretrained": loaded(str(reference.path()))}),
        ("generated", {"pretrained": "lmsys/vicuna-7b-v1.5", "source": "generated"}),
        *(("official", {"pretrained": name}) for name in ("./my-model", loaded("gpt2"))),
        ("official", {"model": "gpt-5"}),
        ("official", {"source": "official"}),
    ],
)
def test_a_named_model_gets_the_official_files_and_the_shipped_one_the_generated_set(kind, asked):
    assert source.asked(asked) == source.Asked(kind)


def test_factors_name_a_model_where_pretrained_does_not(tmp_path):
    for origin, kind in (
        ({}, "generated"),
        ({"model": "reference"}, "generated"),
        ({"model": {"name": "lmsys/vicuna-7b-v1.5", "revision": "main"}}, "official"),
    ):
        Factors.from_list([1.0, 1.5], origin=origin).save(tmp_path / "f.json")
        assert source.asked({"factors": str(tmp_path / "f.json")}) == source.Asked(kind)
        assert source.asked({"factors": str(tmp_path / "f.json"), "pretrained": "gpt2"}) == source.Asked("official")


def test_a_folder_overrides_the_model_and_the_argument_the_environment(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.setenv(source.ENV, str(tmp_path / "a"))
    for model in ({}, {"pretrained": "gpt2"}):
        assert source.asked(model) == source.Asked("folder", tmp_path / "a")
        assert source.asked(model | {"data_dir": str(tmp_path / "b")}) == source.Asked("folder", tmp_path / "b")
    assert source.asked({"source": "generated"}) == source.Asked("generated")
    assert source.asked({"source": "official"}) == source.Asked("official")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"data_dir": "/no/such/folder"}, "data_dir=/no/such/folder.*expected the folder"),
        ({"source": "generated", "data_dir": "/tmp"}, "exclude each other.*drop one"),
        ({}, "LPES_EVAL_DATA=/no/such/folder: no such folder"),
    ],
)
def test_what_cannot_be_met_is_one_clear_line(monkeypatch, metadata, message):
    monkeypatch.setenv(source.ENV, "" if metadata else "/no/such/folder")
    with pytest.raises(DataError, match=message):  # a dot is no end of a line
        source.asked(metadata)


CONTENT = gzip.compress(os.urandom(40_000))


@pytest.fixture
def url(tmp_path, monkeypatch):
    """The address of ``served``, a file with CONTENT in ``tmp_path``, where the cache is too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the server is this test's own
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", str(tmp_path))
    (tmp_path / "served").write_bytes(CONTENT)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/served"
        http.shutdown()


def test_a_file_is_fetched_once_and_whole_whatever_an_interrupted_download_has_left(tmp_path, url):
    part = tmp_path / "lpes_eval" / (url.split("://")[1] + ".1.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT[:15_000])
    for _ in range(2):
        path = source.download(url, "")
        assert path.read_bytes() == CONTENT
        assert tmp_path in path.parents
        (tmp_path / "served").unlink(missing_ok=True)
    with pytest.raises(DataError, match=r"gone is not in the cache and cannot be fetched"):
        source.download(url.replace("served", "gone"), "")
    assert sorted(file.name for file in path.parent.iterdir()) == ["served", "served.1.part"]


def test_offline_and_not_cached_is_one_line_with_file_address_and_ways_out(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", str(tmp_path))
    with pytest.raises(DataError) as refused:  # the tests run with HF_HUB_OFFLINE
        mdqa.OFFICIAL.path(source.Asked("official"), 10)
    address = "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/qa_data/10_total_documents/"
    named = ("data_dir=DIR", "LPES_EVAL_DATA", "source=generated", "HF_HUB_OFFLINE", address)
    assert str(refused.value).startswith("nq-open-10_total_documents_gold_at_0.jsonl.gz is not in the cache")
    assert all(part in str(refused.value) for part in named)
    assert "\n" not in str(refused.value)
