"""Shared by all tests: no network, and few threads, so that two cores are enough."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are so small that a second thread only waits for the first
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("LPES_EVAL_DATA", None)

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_list_of_packages():
    """lm-eval has pip list the installed packages for every result, which takes longer than the evaluation."""
    from torch.utils import collect_env

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect_env, "get_pip_packages", lambda *_: ("pip3", ""))
        yield


@pytest.fixture
def threads():
    """Puts back how many threads torch uses, which a test changes."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def task_manager():
    """lm-eval's index of this project's tasks alone."""
    from lpes_eval.harness.plugin import own_tasks

    return lambda **metadata: own_tasks(metadata)


@pytest.fixture(scope="session")
def evaluate(task_manager):
    """lm-eval's results on this project's tasks, of short answers."""

    def run(lm, tasks, limit=None, options=(), **metadata):
        import lm_eval

        options = {"gen_kwargs": {"max_gen_toks": 8}, "bootstrap_iters": 0, **dict(options)}
        return lm_eval.simple_evaluate(lm, tasks=tasks, limit=limit, task_manager=task_manager(**metadata), **options)

    return run
