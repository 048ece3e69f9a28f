"""Factors on the Hub, whose place a folder takes here."""

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError

import lpes_eval
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
            (tmp_path / revision / "owner/repo" / name).parent.mkdir(parents=True, exist_ok=True)
            lpes_eval.Factors.from_uniform(factor + number).save(tmp_path / revision / "owner/repo" / name)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


@pytest.mark.parametrize(
    ("address", "factor"),
    [
        ("hf://owner/repo", 1.1),
        ("hf://owner/repo@v1", 1.2),
        ("hf://owner/repo/more/long.json", 2.1),
        ("hf://owner/repo/more/long.json@v1", 2.2),
    ],
)
def test_an_address_names_repository_file_and_revision(hub, address, factor):
    assert parse(address).uniform == pytest.approx(factor)


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
