"""What tells one fitness from another: settings, code and weights; and nothing that differs between processes."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lpes_eval.engine.harness import fingerprint
from search import identity
from search.evaluator import Evaluator
from search.tasks import load_tasks
from test_evaluator import edit

REPOSITORY = Path(__file__).parents[2]


def test_code_is_the_file_and_what_it_imports_from_and_nothing_installed(tmp_path, monkeypatch):
    """Of a task's module that takes a function from one helper, and another helper as a module."""
    (tmp_path / "identity_one.py").write_text("def mark(text):\n    return len(text)\n")
    (tmp_path / "identity_two.py").write_text("LIMIT = 3\n")
    (tmp_path / "identity_none.py").write_text("LIMIT = 3\n")
    (tmp_path / "identity_task.py").write_text(
        "import json, torch\nimport identity_two\nfrom identity_one import mark\n"
        "def process_results(doc, results):\n    return {'hits': mark(results[0]) > identity_two.LIMIT}\n"
        "class Filter:\n    def apply(self, resps, docs):\n        return resps\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = importlib.import_module("identity_task")
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
            env=os.environ | {"PYTHONPATH": ".", "PYTHONHASHSEED": seed},
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("utils.py", '"hits": shared', '"hits": 1 - shared'),
        ("answer.txt", "c", "d"),
        ("toy_plain.yaml", "repeats: 1", "repeats: 2"),
        ("toy_plain.yaml", 'regex_pattern: "(.*)"', 'regex_pattern: "(.)"'),
    ],
    ids=["process_results", "reference answers", "repeats", "filter"],
)
def test_a_task_that_was_edited_is_another_fitness(toy_lm, task_folder, tmp_path, file, before, after):
    folder = shutil.copytree(task_folder, tmp_path / "tasks")
    filters = 'filter_list: [{name: all, filter: [{function: regex, regex_pattern: "(.*)"}, {function: take_first}]}]'
    edit(folder / "utils.py", '"c" if i % 2 else "e"', f"open({str(folder / 'answer.txt')!r}).read()")
    (folder / "answer.txt").write_text("c")
    with (folder / "toy_plain.yaml").open("a") as plain:
        plain.write(f"\nrepeats: 1\n{filters}\n")
    load = lambda: Evaluator(toy_lm, load_tasks(toy_lm, ["toy_plain"], include_path=str(folder)))  # noqa: E731
    described = load().describe()
    assert load().describe() == described
    edit(folder / file, before, after)
    assert load().describe() != described


@pytest.fixture
def fitness(toy_lm, load):
    return Evaluator(toy_lm, load("toy"))


@pytest.mark.parametrize(
    ("name", "value"), [("_max_length", 1000), ("add_bos_token", True), ("truncation", True), ("max_gen_toks", 300)]
)
def test_a_model_that_reads_the_same_text_as_other_tokens_is_another_fitness(toy_lm, fitness, monkeypatch, name, value):
    before = fitness.describe()
    owner = type(toy_lm) if name == "max_gen_toks" else toy_lm  # a property
    monkeypatch.setattr(owner, name, value)
    assert fitness.describe() != before


def test_so_is_another_tokenizer_or_generation_config(toy_lm, fitness, monkeypatch):
    before = fitness.describe()
    with monkeypatch.context() as patch:
        patch.setattr(toy_lm.model.generation_config, "repetition_penalty", 1.1)
        assert fitness.describe()["model"] != before["model"]
    assert fitness.describe() == before
    tokenizer = type(toy_lm.tokenizer).from_pretrained(toy_lm.tokenizer.name_or_path)
    monkeypatch.setattr(toy_lm, "tokenizer", tokenizer)
    assert fitness.describe() == before
    tokenizer.add_tokens(["red0 "])
    assert fitness.describe()["reading"] != before["reading"]


@pytest.mark.parametrize("file", ["lpes_eval/rope.py", "lpes_eval/curves.py", "lpes_eval/engine/exact.py"])
def test_so_is_other_code_of_this_package(fitness, monkeypatch, file):
    before, read = fitness.describe(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"#" * self.as_posix().endswith(file))
    assert fitness.describe()["code_sha256"] != before["code_sha256"]


def test_so_are_other_prompts_another_filter_and_for_the_cache_other_packages(toy_lm, load, monkeypatch):
    (plain,) = load("toy_plain")
    fitness = Evaluator(toy_lm, [plain])
    for other in (*load("toy_plain", system_instruction="Answer."), replace(plain, filter="other")):
        assert Evaluator(toy_lm, [other]).describe() != fitness.describe()
    before = fitness._context
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    assert Evaluator(toy_lm, [plain])._context != before


def test_how_it_is_measured_and_what_was_measured_before_is_no_other_fitness(toy_lm, load, fitness):
    parts, before = load("toy"), fitness.describe()
    for switch in ({}, {"fast": False}, {"share_prefixes": False}, {"tokens_per_batch": 40}):
        other = Evaluator(toy_lm, parts, **switch)
        assert other.describe() == before
        other([1.0, 1.5, 1.2])
        assert other.describe() == before


def test_a_task_whose_file_lies_elsewhere_is_the_same_fitness(fitness, monkeypatch):
    before, metadata = fitness.describe(), fitness.objectives[0].task.config.metadata
    assert metadata["config_source"]
    monkeypatch.setitem(metadata, "config_source", "/elsewhere/toy.yaml")
    assert fitness.describe() == before
    monkeypatch.setitem(metadata, "other", 1)
    assert fitness.describe() != before


def test_another_weight_is_another_model(toy_lm):
    before = fingerprint(toy_lm.model)
    assert fingerprint(toy_lm.model) == before
    weight = toy_lm.model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        kept = weight[0, 0].item()
        weight[0, 0] += 1
        assert fingerprint(toy_lm.model) != before
        weight[0, 0] = kept
