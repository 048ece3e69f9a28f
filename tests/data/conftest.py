"""What the benchmarks' tests share: lines in a file, a toy model, and an evaluation with it."""

import gzip
import json
from pathlib import Path

import pytest

import tiny_llama


@pytest.fixture(autouse=True)
def no_folder_in_the_environment(monkeypatch):
    monkeypatch.delenv("LPES_EVAL_DATA", raising=False)


@pytest.fixture(scope="session")
def write():
    """Writes lines of JSON, or texts as they are, to a file, compressed where it is called ``.gz``."""

    def put(path: Path, *lines) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

    return put


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_llama.tokenizer()


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """lm-eval's model of a toy Llama that was trained on ``window`` tokens."""
    from lm_eval.models.huggingface import HFLM

    folders = {}

    def model(window: int, **arguments):
        if window not in folders:
            folders[window] = tiny_llama.save(tmp_path_factory.mktemp("model"), window)
        return HFLM(str(folders[window]), device="cpu", batch_size=2, **arguments)

    return model


@pytest.fixture(scope="session")
def evaluate(task_manager):
    def run(lm, tasks, limit=None, options=(), **metadata):
        import lm_eval

        options = {"gen_kwargs": {"max_gen_toks": 8}, "bootstrap_iters": 0, **dict(options)}
        return lm_eval.simple_evaluate(lm, tasks=tasks, limit=limit, task_manager=task_manager(**metadata), **options)

    return run
