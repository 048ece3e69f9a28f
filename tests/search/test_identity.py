"""Hashes that tell code and settings apart, and are the same in every process."""

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")

from search import identity

REPOSITORY = Path(__file__).parents[2]


def imported(path):
    """The module in a file, read anew."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A task's module that takes a function from one helper, and another helper as a module."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "identity_one.py").write_text("def mark(text):\n    return len(text)\n")
    (tmp_path / "identity_two.py").write_text("LIMIT = 3\n")
    (tmp_path / "identity_none.py").write_text("LIMIT = 3\n")
    (tmp_path / "identity_task.py").write_text(
        "import json, torch\nimport identity_two\nfrom identity_one import mark\n"
        "def process_results(doc, results):\n    return {'hits': mark(results[0]) > identity_two.LIMIT}\n"
        "class Filter:\n    def apply(self, resps, docs):\n        return resps\n"
    )
    yield imported(tmp_path / "identity_task.py")
    for name in ("identity_one", "identity_two", "identity_task"):
        sys.modules.pop(name, None)


def test_code_is_the_file_and_what_it_imports_from_and_nothing_installed(task, tmp_path):
    before = identity.code(task.process_results)
    assert identity.code(task.process_results) == before
    for named in (task.Filter, partial(task.Filter, 3), {"metric": [task.process_results]}):
        assert identity.code(named) == before
    assert identity.code(len, sys, sum, subprocess.run) == identity.code()  # Python's own
    for name, counts in (("none", False), ("one", True), ("two", True), ("task", True)):
        file = tmp_path / f"identity_{name}.py"
        text = file.read_text()
        file.write_text(text + "# changed\n")
        assert (identity.code(task.process_results) != before) == counts
        file.write_text(text)
    assert identity.code(task.process_results) == before


def test_plain_data_is_the_same_in_every_process():
    program = (
        "from search import identity\n"
        "def named(): pass\n"
        "value = {'set': {'a', 'b', 'c', 'd'}, 'function': named, 'object': object(), 'class': identity.Path}\n"
        "print(identity.sha256(value), identity.code(named, identity.plain))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": ".", "PYTHONHASHSEED": seed},
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
