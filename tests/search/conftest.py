"""A small model with definite opinions, and small lm-eval tasks for it, made on the spot."""

from functools import partial
from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from lpes_eval import rope
from search import bench, ga
from search.report import pages


@pytest.fixture(scope="session")
def toy_lm():
    """An ``lpes`` model: a Llama with large random weights, so that factors change answers and ties do not occur."""
    from transformers import AutoTokenizer

    from lpes_eval import reference
    from lpes_eval.methods.lpes import LPES
    from tiny_models import tiny_config, tiny_model

    tokenizer = AutoTokenizer.from_pretrained(reference.path())
    options = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    options |= {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    options |= {"num_key_value_heads": 1, "max_position_embeddings": 1024, "initializer_range": 0.25}
    model = tiny_model(tiny_config("llama", **options))
    return LPES(pretrained=model, tokenizer=tokenizer, batch_size=5, device="cpu")


@pytest.fixture(scope="session")
def load(toy_lm, task_folder):
    from search.tasks import load_tasks

    return lambda *names, **options: load_tasks(toy_lm, names, include_path=task_folder, **options)


@pytest.fixture(scope="session")
def task_folder():
    """Tasks as somebody else would write them: generated text by position, multiple choice, and an error rate."""
    return str(Path(__file__).with_name("toy_tasks"))


@pytest.fixture
def few_tasks(monkeypatch):
    """Without lm-eval's own tasks, which take seconds to list."""
    few = partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("search.tasks.TaskManager", lambda **given: few(**given | few.keywords))
    monkeypatch.setattr("search.tasks._listed", lambda *folders: few(include_path=[*folders]))


@pytest.fixture
def command(toy_lm, task_folder, tmp_path, monkeypatch, capsys):
    """Runs the command on the toy model, without pictures, and returns its exit status and what it printed."""
    monkeypatch.setattr(bench, "load_model", lambda args, whole: toy_lm)
    monkeypatch.setattr(pages, "draw", lambda *_: None)  # the pictures take longer than the search

    def call(*flags, output=tmp_path / "out"):
        task = [] if "--tasks" in flags else ["--tasks", "toy"]
        status = ga.main([*flags, "--include_path", task_folder, "--output", str(output), *task])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    yield call
    rope.remove(toy_lm.model)
