"""A small Llama, and a guard against loading one."""

import pytest
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from benchmarks.families import tiny_config, tiny_model


@pytest.fixture
def llama():
    return tiny_model(tiny_config("llama"))


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    for owner, name in ((HFLM, "_create_model"), (AutoModelForCausalLM, "from_pretrained")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("weights were loaded"))
