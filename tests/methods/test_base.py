"""What every model type refuses before it loads anything."""

import pytest

pytest.importorskip("torch")
from lm_eval.models.huggingface import HFLM
from lpes_eval.models.lpes import LPES

from lpes_eval.errors import UserError


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(HFLM, "_create_model", lambda *_, **__: pytest.fail("weights were loaded"))


def test_a_name_that_neither_the_machine_nor_the_hub_knows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^pretrained=nothere: no folder, and not on the Hub \(.+\); give a model's"):
        LPES(pretrained="nothere")


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(UserError, match=rf"^pretrained={tmp_path}: no config.json in this folder"):
        LPES(pretrained=str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=rf"^pretrained={tmp_path}: its configuration cannot be read \(.+\); give"):
        LPES(pretrained=str(tmp_path))


def test_a_type_that_pytorch_has_not():
    with pytest.raises(UserError, match=r"^dtype=flaot16: no type of PyTorch's; expected auto, float32"):
        LPES(dtype="flaot16")
    with pytest.raises(UserError, match=r"^dtype=nn: "):
        LPES(dtype="nn")
