"""Whole searches of models that are made up: a formula says which answers are right."""

import hashlib
import math
import re
from statistics import mean

import pytest

from lpes_eval import rope
from lpes_eval.engine import harness
from lpes_eval.methods.lpes import LPES
from search import bench as bench_module
from search import evaluator as evaluator_module
from search import ga, tasks
from search.report import pages
from small_searches import found, journal, report


def luck(*of):
    """From 0 to 1, the same for the same question."""
    return int(hashlib.sha256(repr(of).encode()).hexdigest()[:12], 16) / 16**12


TASK_OF = {}  # by the id of a request


class Answers(harness.HarnessEngine):
    """Gives the answer that was asked for, or none: as ``right`` (factors, number of records, position) is probable."""

    right = None
    question = 0  # the number of the one that ``right`` is asked about

    def _answer_some(self, numbers):
        return {i: [self._answer(self._requests[i])] for i in numbers}

    def _answer(self, request):
        task = TASK_OF[id(request)]
        position, keys = task.positions[request.idx], task.config.metadata.get("num_keys")
        Answers.question = request.doc_id
        probable = type(self).right(self.factors, keys, position)
        return (
            task.target(request.doc, position) if luck(request.doc["question_id"], position) < probable else "nothing"
        )


def log_likelihoods(model, answers):
    """In place of the likelihood of the right answers: the logarithm of how probable they are, and some chance."""
    factors, values = tuple(rope.applied(model)), []
    for task, request, position in answers:
        Answers.question = request.doc_id
        probable = Answers.right(factors, task.config.metadata.get("num_keys"), position)
        values.append(math.log(max(probable, 0.01)) + 0.01 * luck(request.doc["question_id"], factors))
    return values


@pytest.fixture(scope="session")
def lm():
    return LPES(pretrained="reference-kv", batch_size=1, device="cpu")


@pytest.fixture
def search(lm, tmp_path, monkeypatch):
    """Runs the command on a made-up model, and returns the folder of the search."""
    build = tasks._build

    def remembered(*arguments, **options):
        objective = build(*arguments, **options)
        TASK_OF.update((id(request), objective.task) for request in objective.task.instances)
        return objective

    monkeypatch.setattr(tasks, "_build", remembered)
    monkeypatch.setattr(bench_module, "load_model", lambda args, whole: lm)
    monkeypatch.setattr(pages, "draw", lambda *_: None)
    monkeypatch.setattr(harness, "is_cut", lambda *_: False)  # counting tokens takes longer than the search
    engine_for = lambda lm, requests, **speed: (Answers(lm, requests), None)  # noqa: E731
    monkeypatch.setattr(evaluator_module, "engine_for", engine_for)
    gold_answer = lambda lm, objective, request, position: (objective.task, request, position)  # noqa: E731
    monkeypatch.setattr(evaluator_module, "gold_answer", gold_answer)
    monkeypatch.setattr(evaluator_module, "log_likelihoods", log_likelihoods)

    def call(right, *flags, folder="out", status=0):
        monkeypatch.setattr(Answers, "right", staticmethod(right))
        fixed = ["--metadata", "num_keys=8", "--held_out_examples", "0"]
        command = ["--tasks", "kv_retrieval", *fixed, *flags, "--output", str(tmp_path / folder)]
        assert ga.main(command) == status
        return tmp_path / folder

    return call


def test_a_model_that_one_factor_helps_best_ends_with_it(search):
    folder = search(lambda s, keys, position: 0.4 + 0.8 * min(mean(s) - 1, 0.5) if keys == 8 else 1.0)
    assert found(folder).name == "factors.json"
    entries = [entry for entry in journal(folder) if entry.get("factor", 1) > 1.4]
    assert any(entry["origin"] in ("judged", "tuned") and "guards" in entry for entry in entries)
    assert min(report(folder)["factors"]) > 1.4


def test_factors_whose_guards_the_search_left_out_are_not_handed_over_unguarded(search):
    def right(s, keys, position):
        if keys == 4:  # a loss that a quarter of the guard's questions does not show
            return 0.9 if s == (1.0,) * 4 else 0.82
        return 0.4 + min(0.5, abs(s[0] - 1) + abs(s[1] - 1)) - 0.5 * abs(s[2] - 1)

    folder = search(right, "--budget", "750prompts")
    assert found(folder).name == "best_effort.json"
    assert report(folder)["factors"] != [1.0] * 4


def test_a_search_that_goes_on_with_a_larger_budget_ends_as_in_one_go(search):
    def right(s, keys, position):
        first, second, third, fourth = (factor >= 1.2 for factor in s)
        if keys == 4:  # a loss that a quarter of the guard's questions does not show
            return 0.0 if first and Answers.question >= 12 else 1.0
        return (0.1 + 0.9 * first + 0.5 * third - 0.8 * second - 0.8 * fourth) / (1 if Answers.question < 24 else 1.8)

    once = search(right, folder="once")
    search(right, "--budget", "1300prompts", folder="twice")
    twice = search(right, folder="twice")
    assert report(once)["factors"] == report(twice)["factors"]


def test_where_nothing_helps_there_is_no_file_and_no_held_out_prompt(search, capsys):
    folder = search(lambda s, keys, position: 0.5 - 0.2 * abs(mean(s) - 1), "--held_out_examples", "12")
    out = capsys.readouterr().out
    assert report(folder)["factors"] == [1.0] * 4
    assert not list(folder.glob("*s.json")) + list(folder.glob("best_effort.json"))
    assert all(entry["origin"] != "held out" for entry in journal(folder))
    verdict, _, rest = out.rpartition("# Search on kv_retrieval")[2].strip().partition("\n")
    assert re.match(r"The search ended by itself after \d+ individuals: \d+ steps of layers and bands", verdict)
    assert re.search(r"none raises the log-likelihood .*; a gain of less than 0\.\d+ would not have been seen", verdict)
    assert "found factors" not in rest
    assert "lm_eval --model" not in rest


def test_a_budget_that_ends_a_search_without_a_gain_concludes_nothing(search, capsys):
    search(lambda s, keys, position: 0.5 - 0.2 * abs(mean(s) - 1), "--budget", "200prompts")
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"The budget of 200 prompts ended the search after \d+ of about \d+ individuals: so far no", said)
    assert "says nothing about the others" in said
    assert "not worth using" not in said


def test_a_guard_that_has_nothing_to_lose_says_so(search, capsys):
    folder = search(
        lambda s, keys, position: 0.0 if keys == 4 else 0.4 + 0.8 * min(mean(s) - 1, 0.5), "--held_out_examples", "12"
    )
    out = capsys.readouterr().out
    assert 'the guard "kv_retrieval, num_keys=4" guards nothing: the plain model has 0' in out
    assert re.search(r"kv_retrieval, num_keys=4 .*\| nothing to lose \|", out)
    assert 'the guard "answers that end" guards' not in out
    assert "guards" in report(folder)


def test_a_budget_of_prompts_counts_those_of_the_guards(search):
    folder = search(lambda s, keys, position: 0.4 + 0.8 * min(mean(s) - 1, 0.5), "--budget", "2000prompts")
    asked = [(e["prompts"], e.get("guard_prompts", 0)) for e in journal(folder) if e.get("generation") is not None]
    assert sum(of_guards for _, of_guards in asked) == report(folder)["guard_prompts"] > 0
    assert sum(map(sum, asked[:-1])) < 2000 <= sum(map(sum, asked))
