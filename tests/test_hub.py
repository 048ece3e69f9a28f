"""Factors on the Hub, whose place a folder takes here."""

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
    """A Hub that has ``owner/repo`` with two files in two revisions."""

    def download(repo_id, filename, *, revision=None):
        path = tmp_path / (revision or "main") / repo_id / filename
        if not path.is_file():
            raise EntryNotFoundError(f"404: no {filename} in {repo_id}\nmore lines")
        return str(path)

    for revision, factor in (("main", 1.1), ("v1", 1.2)):
        for number, name in enumerate(("factors.json", "more/long.json")):
            lpes_eval.Factors.from_uniform(factor + number).save(tmp_path / revision / "owner/repo" / name)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


def test_an_address_names_repository_file_and_revision(hub):
    for file, of_file in (("", 0), ("/more/long.json", 1)):
        for revision, factor in (("", 1.1), ("@v1", 1.2)):
            assert parse(f"hf://owner/repo{file}{revision}").uniform == pytest.approx(factor + of_file)


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("hf://owner", "expected hf://OWNER/REPO"),
        ("hf://owner/repo/none.json", r"the Hub does not give this file \(404: no none.json in owner/repo\)"),
        ("hf://owner/repo@v9", "the Hub does not give this file"),
    ],
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


def test_what_is_pushed_is_the_file_with_its_proof_in_words(sent, tmp_path, capsys):
    row = {"task": "kv", "found_minus": "baseline", "mean": 0.12, "interval": [0.05, 0.19], "questions": 100}
    one = row | {"interval": [None, None], "questions": 1}
    lower = row | {"lower_is_better": True, "mean": -0.3, "interval": [-0.4, -0.2]}
    proof = {
        "differences": [row, one, lower],
        "guards": {"gsm8k": {"over": True}, "half": {"over": False, "interval": [-0.02, -0.01]}},
        "command": "lm_eval --model lpes",
    }
    origin = {"model": {"name": "lmsys/vicuna", "revision": "v1"}, "proof": proof, "packages": {"torch": "2.13"}}
    lpes_eval.Factors(uniform=1.2, origin=origin).save(tmp_path / "f.json")
    assert main(["push", str(tmp_path / "f.json"), "me/mine"]) == 0
    assert "factors=hf://me/mine@abc" in capsys.readouterr().out
    (tmp_path / "again.json").write_text(sent["me/mine", "factors.json"])
    assert lpes_eval.load(tmp_path / "again.json") == lpes_eval.load(tmp_path / "f.json")
    card = sent["me/mine", "README.md"]
    gains = ("+0.120 | +0.050 to +0.190 | 100", "+0.120 | none | 1", "+0.300 | +0.200 to +0.400 | 100")
    guards = ("guard gsm8k: worsened", "guard half: worse beyond chance")
    command = ("--model_args factors=hf://me/mine\n", "    lm_eval --model lpes\n")
    for said in ("# Layer factors for lmsys/vicuna (v1)", *gains, "too narrow", *guards, *command, '"torch": "2.13"'):
        assert said in card


def test_a_card_has_no_control_characters_and_a_proof_of_another_form_is_refused(tmp_path, capsys):
    for proof, status in (({"command": "lm_eval \x1b[2J"}, 0), ({"differences": 5}, 2), ({"guards": [1]}, 2)):
        origin = {"model": "some/mo\x1bdel", "proof": proof}
        lpes_eval.Factors(uniform=1.2, origin=origin).save(tmp_path / "f.json")
        assert main(["push", str(tmp_path / "f.json"), "me/mine", "--dry_run"]) == status
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err
        assert status == 0 or "f.json: origin.proof is not as a search writes it" in said.err


NO_ROUTE = "push me/mine: the Hub does not take it (no route); check name, token, network\n"
NO_MODEL = "origin.model is missing; share factors that a search has written, or name their model\n"


@pytest.mark.parametrize(("origin", "error"), [({}, NO_MODEL), ({"model": "lmsys/vicuna"}, NO_ROUTE)])
def test_factors_of_no_model_are_not_shared_nor_any_where_no_hub_answers(
    sent, tmp_path, capsys, monkeypatch, origin, error
):
    monkeypatch.setattr(huggingface_hub, "create_repo", Mock(side_effect=OSError("no route\nmore")))
    lpes_eval.Factors(uniform=1.2, origin=origin).save(tmp_path / "f.json")
    assert main(["push", str(tmp_path / "f.json"), "me/mine"]) == 2
    assert (capsys.readouterr().err, sent) == (f"lpes-eval: error: {error}", {})
