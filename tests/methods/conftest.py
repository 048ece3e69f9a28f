"""A small Llama, and a guard against loading one."""

from dataclasses import replace

import pytest
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from checks import answers, evaluate
from lpes_eval import reference
from lpes_eval.methods.moice import router
from tiny_models import tiny_config, tiny_model


@pytest.fixture
def llama():
    return tiny_model(tiny_config("llama"))


@pytest.fixture(scope="session")
def answers_of_hf(task_manager):
    """What lm-eval's own ``hf`` answers, on the reference model."""
    return answers(evaluate(HFLM(pretrained=str(reference.path()), device="cpu", batch_size=4), task_manager))


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    for owner, name in ((HFLM, "_create_model"), (AutoModelForCausalLM, "from_pretrained")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("weights were loaded"))


@pytest.fixture(scope="session")
def routed(tmp_path_factory):
    """Folders with routers for the reference model, for other bases than the published ones."""
    described = router.read(reference.path() / router.SHIPPED).config
    path = tmp_path_factory.mktemp("routers")
    for name, bases in (("other", (30.0, 100.0, 300.0)), ("same", (1e4, 1e4))):
        router.write(router.Router(replace(described, bases=bases, top_k=2)), path / name / router.FILE)
    return path
