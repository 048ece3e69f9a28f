"""Factors on the Hub, whose place a folder takes here."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError

import lpes_eval
from lpes_eval.cli import main
from lpes_eval.errors import FactorsError
from lpes_eval.factors import parse


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub that has a repository with two files, of which one is in another revision."""

    def download(repo_id, filename, *, revision=None):
        path = tmp_path / (revision or "main") / repo_id / filename
        if not path.is_file():
            raise EntryNotFoundError(f"404: no {filename} in {repo_id}\nmore lines")
        return str(path)

    for place, factor in (("main/owner/repo/factors.json", 1.125), ("v1/owner/repo/more/long.json", 1.25)):
        lpes_eval.Factors.from_uniform(factor).save(tmp_path / place)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


def test_an_address_names_repository_file_and_revision(hub):
    assert parse("hf://owner/repo").uniform == 1.125
    assert parse("hf://owner/repo/more/long.json@v1").uniform == 1.25


@pytest.mark.parametrize(
    ("address", "error"),
    [("hf://owner", "expected hf://OWNER/REPO"), ("hf://owner/repo/none.json", r"\(404: no none.json in owner/repo\)")],
)
def test_what_is_not_there_is_refused_in_one_line(hub, address, error):
    with pytest.raises(FactorsError, match=error) as refused:
        parse(address)
    assert "\n" not in str(refused.value)


@pytest.fixture
def sent(monkeypatch):
    """What a commit to the Hub holds."""
    files = {}

    def commit(repo, operations, commit_message):
        files.update({(repo, each.path_in_repo): each.path_or_fileobj.decode() for each in operations})
        return SimpleNamespace(commit_url="url", oid="abc")

    monkeypatch.setattr(huggingface_hub, "create_repo", lambda repo, **options: None)
    monkeypatch.setattr(huggingface_hub, "create_commit", commit)
    return files


def test_what_is_pushed_is_the_file_and_a_card_with_its_origin(sent, tmp_path, capsys):
    proof = {"differences": [{"task": "kv", "mean": 0.12}], "command": "lm_eval --model lpes"}
    origin = {
        "model": {"name": "lmsys/vicuna", "revision": "[v1](x)\x1b"},
        "proof": proof,
        "model_args": {"gguf_file": "x y"},
    }
    lpes_eval.Factors(uniform=1.25, origin=origin).save(tmp_path / "f.json")
    assert main(["push", str(tmp_path / "f.json"), "me/mine"]) == 0
    assert "factors=hf://me/mine@abc" in capsys.readouterr().out
    assert json.loads(sent["me/mine", "factors.json"]) == json.loads((tmp_path / "f.json").read_text())
    card = sent["me/mine", "README.md"]
    assert 'base_model: "lmsys/vicuna"' in card
    assert "# Layer factors for lmsys/vicuna (\\[v1\\](x)\N{REPLACEMENT CHARACTER})\n" in card
    assert "--model_args 'pretrained=lmsys/vicuna,gguf_file=x y,factors=hf://me/mine'\n" in card
    assert json.loads(card.split("```json")[1].split("```")[0]) == origin


@pytest.mark.parametrize(("origin", "error"), [({}, "origin.model is missing"), ({"model": "a/b"}, "no route")])
def test_factors_of_no_model_are_not_shared_nor_any_where_no_hub_answers(
    sent, tmp_path, capsys, monkeypatch, origin, error
):
    monkeypatch.setattr(huggingface_hub, "create_repo", Mock(side_effect=OSError("no route\nmore")))
    lpes_eval.Factors(uniform=1.2, origin=origin).save(tmp_path / "f.json")
    assert main(["push", str(tmp_path / "f.json"), "me/mine"]) == 2
    assert error in capsys.readouterr().err
    assert not sent
