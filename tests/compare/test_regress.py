"""``lpes-eval regress``: what it catches, how often it cries wolf, and what it says."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from lpes_eval import cli
from lpes_eval.compare import baseline, gate, results
from lpes_eval.compare.results import Metric, Model, Results, Task
from runs import write_run

POSITIONS = (0, 25, 50, 75, 100)


@pytest.fixture(autouse=True)
def outside_of_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)


def task_of(scores, *, higher_is_better=True, samples=True):
    """A task with one metric, of scores (questions, positions)."""
    labels = [f"{p} %" for p in range(scores.shape[1])] if scores.shape[1] > 1 else ["all"]
    values = dict(zip(labels, scores.mean(axis=0).tolist(), strict=True))
    by_question = dict(zip(labels, map(tuple, scores.T.tolist()), strict=True)) if samples else None
    digest = "d" if samples else None
    return Task("1", {}, len(scores), digest, digest, {"acc,none": Metric(higher_is_better, values, by_question)})


def run_with(**tasks):
    """A run of tasks, each given by its scores or ready-made, without files."""
    tasks = {name: task if isinstance(task, Task) else task_of(task) for name, task in tasks.items()}
    return Results(Path("run.json"), Model("hf", "tiny", 1), None, {}, tasks)


def regress(old, new, **options):
    """The gate's report on two runs, or on two arrays of scores."""
    old, new = (side if isinstance(side, Results) else run_with(toy=side) for side in (old, new))
    return gate.regress(old, new, gate.Options(**options))


def failing(report):
    return [row.cells[0] for row in report.rows if row.outcome == "failure"]


def verdicts(report):
    return [row.facts["verdict"] for row in report.rows]


def suite_of(report):
    return ElementTree.fromstring(report.to_junit().split("?>", 1)[1])[0]


def run_of(rng, chance):
    return (rng.random(chance.shape) < chance).astype(float)


def rerun(rng, scores, flips):
    """The same answers, but for a share of them that hardware noise turns over."""
    return np.where(rng.random(scores.shape) < flips, 1 - scores, scores)


# --- what it catches, and what it does not ---


def test_a_planted_loss_of_five_points_at_every_position_is_caught():
    """500 questions at five positions; 25 answers lost at each, among twice as many that changed by noise."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        old = run_of(rng, np.full((500, 5), 0.8))
        new = rerun(rng, old, 0.02)
        for column in new.T:
            column[rng.choice(np.flatnonzero(column == 1), 25, replace=False)] = 0
        assert regress(old, new).failed


def test_a_planted_loss_of_five_points_at_one_position_is_caught():
    rng = np.random.default_rng(1)
    old = run_of(rng, np.full((500, 5), 0.8))
    new = rerun(rng, old, 0.002)
    new[np.flatnonzero(new[:, 2] == 1)[:25], 2] = 0
    assert [label for label in failing(regress(old, new)) if "%" in label] == ["2 %"]


def test_a_planted_loss_is_caught_even_if_all_answers_are_drawn_anew():
    """Not a rerun but another sample of answers, such as with temperature: the mean over positions still sees it."""
    rng = np.random.default_rng(2)
    old, new = np.full((500, 5), 0.80), np.full((500, 5), 0.75)
    assert sum(regress(run_of(rng, old), run_of(rng, new)).failed for _ in range(20)) >= 19


def test_a_wider_spread_is_caught_where_no_score_fell():
    old = np.zeros((500, 3))
    old[:300] = 1
    new = old.copy()
    new[300:360, 0] = 1
    assert failing(regress(old, new)) == ["spread"]


def test_a_better_run_passes():
    rng = np.random.default_rng(3)
    old = run_of(rng, np.full((500, 5), 0.7))
    assert not regress(old, np.maximum(old, run_of(rng, np.full((500, 1), 0.3)))).failed


def test_where_lower_is_better_a_rise_fails():
    old = np.random.default_rng(0).normal(5, 1, (100, 2))
    assert not regress(old, old + 0.1).failed
    assert regress(*(run_with(toy=task_of(side, higher_is_better=False)) for side in (old, old + 0.1))).failed


def test_a_systematic_change_within_the_tolerance_passes():
    """Another precision shifts every score a little, in one direction: certain, but of no account."""
    old = np.random.default_rng(0).normal(0.5, 0.1, (200, 2))
    assert not regress(old, old - 0.0005).failed
    assert regress(old, old - 0.0005, tolerance=0.0).failed


# --- the largest drop ---


def lost(questions, of=20):
    """Everything right, and then so many questions wrong at all five positions."""
    old, new = np.ones((of, 5)), np.ones((of, 5))
    new[:questions] = 0
    return old, new


def test_a_loss_of_almost_half_that_chance_allows_fails_by_its_size():
    assert not regress(*lost(9)).failed
    report = regress(*lost(9), max_drop=0.1)
    assert failing(report) == ["mean"]
    [row] = [row for row in report.rows if row.outcome]
    assert (row.facts["verdict"], row.facts["allowed"]) == ("DROPPED", -0.1)
    assert "drops by more than 0.1" in report.headline
    assert [case.get("name") for case in suite_of(report) if case.find("failure") is not None] == ["mean"]


def test_a_drop_of_just_the_largest_that_is_allowed_passes():
    assert not regress(*lost(2), max_drop=0.1).failed
    assert regress(*lost(3), max_drop=0.1).failed
    assert not regress(*lost(3), max_drop=0.1, tolerance=0.2).failed


def test_one_position_may_drop_by_more_than_the_mean_may():
    old, new = lost(0)
    new[:9, 2] = 0
    assert not regress(old, new, max_drop=0.1).failed


@pytest.mark.parametrize(("change", "fails"), [(-0.5, False), (0.5, True)])
def test_the_score_of_a_single_task_is_held_to_the_largest_drop_in_its_own_direction(change, fails):
    """Lower is better: 6 questions of 20, one too few for the test, get worse or better, 0.15 on average."""
    scores = (np.array([[first]] * 6 + [[0.5]] * 14) for first in (0.5, 0.5 + change))
    old, new = (run_with(toy=task_of(side, higher_is_better=False)) for side in scores)
    assert not regress(old, new).failed
    assert regress(old, new, max_drop=0.1).failed == fails


# --- what cannot be tested ---


@pytest.mark.parametrize(("questions", "comparable"), [(9, False), (10, True)])
def test_too_few_questions_to_find_any_loss_are_not_called_fine(questions, comparable):
    """Seven tests at 0.01: the loss of all of n answers has a probability of 2^-n by chance, and 2^-9 > 0.01 / 7."""
    old, new = lost(questions, of=questions)
    if comparable:
        assert regress(old, new).failed
    else:
        with pytest.raises(gate.NotComparable, match=r"9 questions are too few: .* evaluate at least 10"):
            regress(old, new)
        assert failing(regress(old, new, max_drop=0.1)) == ["mean"]


@pytest.mark.parametrize("alpha", [0.01, 0.002])
def test_the_verdict_says_the_smallest_loss_that_it_could_find(alpha):
    """Found by trying, at 20 questions and seven tests: 10 at alpha 0.01, 12 at 0.002."""
    report = regress(*lost(0), alpha=alpha)
    least = next(n for n in range(21) if regress(*lost(n), alpha=alpha).failed)
    said = f"20 questions: a loss of fewer than {least} cannot be told from chance."
    assert said in report.to_text().splitlines()
    assert f"* {said}" in report.to_markdown().splitlines()
    assert said in suite_of(report).findtext("system-out")
    assert said in json.loads(report.to_json())["notes"]


def test_tasks_with_too_few_questions_are_not_testable_and_cost_the_others_nothing():
    few, many = np.ones((5, 3)), np.ones((40, 3))
    old, new = run_with(few=few, many=many), run_with(few=0 * few, many=many)
    report = regress(old, new)
    assert report.notes == (
        "5 questions: not testable, a loss of all of them cannot be told from chance.",
        "40 questions: a loss of fewer than 9 cannot be told from chance.",
    )
    assert verdicts(report) == ["not testable"] * 5 + ["ok"] * 5
    assert "5 could not be tested" in report.headline
    assert suite_of(report).get("skipped") == "5"
    assert not report.failed
    strict = regress(old, old, strict=True)
    assert strict.failed
    assert suite_of(strict).get("failures") == "5"


@pytest.mark.parametrize("sizes", [{"few": 8, "many": 24}, {"a": 9, "b": 12, "c": 200}, {"alone": 14}])
def test_each_task_sees_the_loss_of_as_many_answers_as_is_said_and_of_no_fewer(sizes):
    """Tasks of very different size, three positions each but for the smallest."""
    whole = {name: np.ones((n, 1 if n < 10 else 3)) for name, n in sizes.items()}
    old = run_with(**whole)
    report = regress(old, old)
    assert sum(row.facts["level"] for row in report.rows) <= gate.ALPHA * (1 + 1e-12)
    said = {int(n): int(k) for n, k in re.findall(r"(\d+) questions: a loss of fewer than (\d+)", report.to_text())}
    for name, n in sizes.items():
        for loss in (said[n] - 1, said[n]):
            new = whole[name].copy()
            new[:loss] = 0
            assert regress(old, run_with(**whole | {name: new})).failed == (loss == said[n])


def test_without_samples_a_score_is_held_to_its_size_alone():
    good = np.ones((20, 2))
    old, same, worse = (run_with(toy=task_of(scores, samples=False)) for scores in (good, good, good * [0.5, 1.0]))
    with pytest.raises(gate.NotComparable, match="--log_samples, or give --max-drop"):
        regress(old, worse)
    report = regress(old, worse, max_drop=0.1, strict=True)
    assert verdicts(report) == ["not testable", "not testable", "DROPPED", "not testable"]
    assert failing(report) == ["mean"]
    passed = regress(old, same, max_drop=0.1, strict=True)
    assert verdicts(passed)[2] == "ok by size"
    assert not passed.failed


def with_perplexity(scores, value):
    task = task_of(scores)
    return replace(task, metrics=task.metrics | {"perplexity,none": Metric(False, {"all": value}, None)})


def test_a_score_that_is_no_average_is_not_testable_but_the_scores_of_its_samples_are():
    """As the perplexity of ``lpes_ppl``, beside the nats a token of each text."""
    scores = np.ones((20, 1))
    old, new = (run_with(toy=with_perplexity(scores, value)) for value in (7.5, 8.5))
    report = regress(old, new, strict=True)
    assert verdicts(report) == ["ok", "not testable"]
    assert not report.failed
    assert suite_of(report).get("skipped") == "1"
    assert "toy, perplexity: not testable, not an average over its samples." in report.notes
    assert "which fails" not in report.headline
    assert failing(regress(old, new, max_drop=0.5)) == ["all"]
    [level] = {row.facts["level"] for row in report.rows if row.facts["level"]}
    assert level == gate.ALPHA  # what cannot be tested takes nothing from what can


def test_a_task_of_which_nothing_can_be_tested_fails_under_strict():
    alone = task_of(np.ones((20, 1)))
    alone = replace(alone, metrics={"perplexity,none": Metric(False, {"all": 7.5}, None)})
    run = run_with(tested=np.ones((20, 1)), alone=alone)
    assert not regress(run, run).failed
    assert failing(regress(run, run, strict=True)) == ["all"]


# --- false alarms ---


@pytest.mark.parametrize("flips", [0.002, 0.02, 0.2])
def test_false_alarms_of_noisy_reruns_stay_below_alpha(flips):
    """At alpha = 0.1: 300 reruns, of which 30 may fail; 43 would be beyond chance (p = 0.01)."""
    rng = np.random.default_rng(int(flips * 1000))
    truth = run_of(rng, np.tile([0.9, 0.6, 0.8], (120, 1)))
    pairs = ((rerun(rng, truth, flips), rerun(rng, truth, flips)) for _ in range(300))
    assert sum(regress(old, new, alpha=0.1).failed for old, new in pairs) <= 43


@pytest.mark.parametrize("sizes", [(8, 24), (6, 7, 9, 40), (12, 200), (80,) * 6])
def test_false_alarms_stay_below_alpha_over_tasks_of_any_size(sizes):
    """At alpha 0.1, reruns with all answers drawn anew: of 100, 10 may fail; 18 would be beyond chance (p = 0.01)."""
    rng = np.random.default_rng(sum(sizes))
    chances = [1 / (1 + np.exp(-rng.normal(1, 1.5, (n, 1)) - np.zeros(2))) for n in sizes]

    def run():
        return run_with(**{f"task{i}": run_of(rng, chance) for i, chance in enumerate(chances)})

    assert sum(regress(run(), run(), alpha=0.1).failed for _ in range(100)) <= 17


def test_the_level_is_shared_among_all_tests():
    scores = np.ones((10, 3))
    report = regress(run_with(a=scores, b=scores), run_with(a=scores, b=scores), alpha=0.05)
    assert [row.facts["level"] for row in report.rows] == pytest.approx([0.05 / 10] * 10)


# --- from files ---


def write_answers(folder, accuracy=0.8, seed=0, questions=100, **options):
    rng = np.random.default_rng(seed)
    answers = run_of(rng, np.full((questions, len(POSITIONS)), accuracy))
    return write_run(folder, {p: list(line) for p, line in zip(POSITIONS, answers.T, strict=True)}, **options)


def call(*arguments):
    return cli.main(["regress", *map(str, arguments)])


def add_task(path, name, *, samples=True):
    """Give the run a copy of its task ``toy``, with or without its samples."""
    data = json.loads(path.read_text())
    for key in ("results", "configs", "versions", "n-samples"):
        data[key][name] = data[key]["toy"]
    path.write_text(json.dumps(data))
    for logged in path.parent.glob("samples_toy_*") if samples else ():
        logged.with_name(logged.name.replace("toy", name)).write_text(logged.read_text())


def damage(path, place, value):
    """Put a value in a place of a JSON file."""
    data = json.loads(path.read_text())
    at = data
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    path.write_text(json.dumps(data))


@pytest.fixture
def committed(tmp_path):
    path = tmp_path / "baseline.json"
    assert call(write_answers(tmp_path / "first"), "--baseline", path, "--update") == 0
    return path


def test_baseline_written_and_read_is_the_run(tmp_path, committed):
    run = results.read(tmp_path / "first")
    assert baseline.load(committed) == replace(run, path=committed)


def test_scores_that_are_not_right_or_wrong_survive_the_file_exactly(tmp_path):
    scores = {0: [0.1, 1 / 3, 0.7], 50: [2.0, 1e-9, 0.3]}
    run = results.read(write_run(tmp_path / "run", scores))
    baseline.save(run, tmp_path / "b.json")
    metric = baseline.load(tmp_path / "b.json").tasks["toy"].metrics["acc,none"]
    assert metric == run.tasks["toy"].metrics["acc,none"]
    assert metric.by_question["50 %"] == (2.0, 1e-9, 0.3)


def test_baseline_of_500_questions_and_five_positions_is_small(tmp_path):
    path = tmp_path / "b.json"
    call(write_answers(tmp_path / "run", questions=500), "--baseline", path, "--update")
    assert path.stat().st_size < 6000


def test_provenance_names_versions_model_date_and_command_but_no_folder_of_the_machine(tmp_path):
    model = ("hf", {"pretrained": str(tmp_path / "models" / "tiny")}, 7)
    path = tmp_path / "b.json"
    call(write_answers(tmp_path / "run", model=model), "--baseline", path, "--update")
    data = json.loads(path.read_text())
    assert data["model"] == {"kind": "hf", "name": "tiny", "parameters": 7}
    assert data["provenance"]["packages"]["transformers"] == "5.23.0"
    assert data["provenance"]["packages"]["torch"] == "2.13.0+cpu"
    assert data["provenance"]["date"] == "2026-11-21T13:39:22+00:00"
    assert data["provenance"]["command"].startswith("lm_eval --model hf --model_args pretrained=tiny --tasks toy")
    assert str(tmp_path) not in path.read_text()


def test_a_shipped_model_is_the_same_under_each_of_its_names(tmp_path):
    def run(folder, arguments):
        return write_answers(tmp_path / folder, model=("lpes", arguments, 1142656))

    baseline = str(tmp_path / "b.json")
    assert call(run("plain", {}), "--baseline", baseline, "--update") == 0
    assert call(run("named", {"pretrained": "lpes-eval/reference"}), "--baseline", baseline) == 0
    assert call(run("other", {"pretrained": "reference-kv"}), "--baseline", baseline) == 4


def test_a_worse_run_fails_with_1(tmp_path, committed, capsys):
    assert call(write_answers(tmp_path / "worse", accuracy=0.3), "--baseline", committed) == 1
    assert re.search(r"^mean .* WORSE$", capsys.readouterr().out, re.MULTILINE)


def test_a_drop_fails_with_1_on_request(tmp_path, committed, capsys):
    folder, before = tmp_path / "worse", baseline.load(committed).tasks["toy"].metrics["acc,none"].by_question
    write_run(folder, {p: [0.0] * 5 + list(before[f"{p} %"][5:]) for p in POSITIONS})
    assert call(folder, "--baseline", committed) == 0
    assert call(folder, "--baseline", committed, "--max-drop", "0.01") == 1
    assert re.search(r"^mean .* DROPPED$", capsys.readouterr().out, re.MULTILINE)


def test_of_several_results_below_a_folder_the_one_that_was_taken_is_named(tmp_path, committed, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_answers(tmp_path / "runs" / "tiny", date="2026-11-21T13-00-00.000001")
    write_answers(tmp_path / "runs" / "large", date="2026-11-22T08-00-00.000001", model=("hf", {"pretrained": "x"}, 9))
    write_answers(tmp_path / "runs" / "tiny", date="2026-11-20T13-00-00.000001")
    taken = str(Path("runs", "large", "results_2026-11-22T08-00-00.000001.json"))
    assert call("runs", "--baseline", "baseline.json") == 4
    assert f"{taken} against baseline.json: another model" in capsys.readouterr().err
    assert call("runs", "--baseline", "baseline.json", "--other-model", "--markdown", "summary.md") == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "baseline  hf tiny, 1,000 parameters: baseline.json",
        f"now       hf x, 9 parameters: {taken}",
    ]
    assert f"* now: hf x, 9 parameters: {taken}\n" in Path("summary.md").read_text()
    assert call("runs", "--baseline", "other.json", "--update") == 0
    assert f"other.json: baseline of 1 tasks written from {taken}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"version": 2.0}, "task version 1.0 and 2.0"),
        ({"model": ("hf", {"pretrained": "large"}, 1000)}, "--other-model"),
        ({"model": ("hf", {"pretrained": "tiny"}, 2000)}, "2,000 parameters"),
        ({"text": "riddle"}, "another set of examples"),
        ({"first_question": 50}, "another set of examples"),
        ({"questions": 50}, "100 and 50 examples"),
        ({"samples": False, "metadata": {"source": {"kind": "official"}}}, "source kind None and official"),
        ({"chat": "User: "}, "--other-prompts"),
        ({"group": "else"}, "the baseline has toy, the run has not"),
        ({"metric": "f1"}, "the baseline has acc,none of toy (0 %), the run has not"),
    ],
)
def test_what_cannot_be_compared_is_4(tmp_path, committed, capsys, other, message):
    assert call(write_answers(tmp_path / "run", **other), "--baseline", committed) == 4
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("run", "baseline", "status", "message"),
    [
        ("other", "baseline.json", 4, "task version"),
        ("nowhere", "baseline.json", 2, "no such file"),
        ("other", "none.json", 3, "--update"),
    ],
)
def test_reports_are_written_where_nothing_could_be_compared(tmp_path, committed, run, baseline, status, message):
    write_answers(tmp_path / "other", version=2.0)
    junit, markdown = tmp_path / "junit.xml", tmp_path / "summary.md"
    reports = ("--junit", junit, "--markdown", markdown)
    assert call(tmp_path / run, "--baseline", tmp_path / baseline, *reports) == status
    assert ElementTree.parse(junit).getroot()[0].get("errors") == "1"
    assert "could not compare" in markdown.read_text()
    assert message in markdown.read_text()


def test_what_differs_without_harm_is_named_and_passes(tmp_path, committed, capsys):
    path = write_answers(tmp_path / "run")
    add_task(path, "new_task")
    path.write_text(path.read_text().replace('"5.23.0"', '"5.24.0"'))
    assert call(path, "--baseline", committed) == 0
    printed = capsys.readouterr().out
    assert "nothing got worse" in printed
    assert "Not in the baseline, not tested: new_task." in printed
    assert "packages transformers: 5.23.0 in the baseline, 5.24.0 now." in printed


@pytest.mark.parametrize(
    ("other", "option"),
    [({"chat": "User: "}, "--other-prompts"), ({"model": ("hf", {"pretrained": "large"}, 9)}, "--other-model")],
)
def test_what_differs_on_purpose_is_compared_on_request(tmp_path, committed, other, option):
    assert call(write_answers(tmp_path / "run", **other), "--baseline", committed, option) == 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"format": "lpes-eval baseline", "format_version": 99}',
        '{"format": "lpes-eval baseline", "format_version": 2}',
    ],
)
def test_a_file_that_is_no_baseline_is_2(tmp_path, committed, capsys, content):
    committed.write_text(content)
    assert call(write_answers(tmp_path / "run"), "--baseline", committed) == 2
    assert "--update" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("tasks", "toy", "metrics", "acc,none", "by_question", "0 %"), "1"),
        (("tasks", "toy", "metrics", "acc,none", "by_question", "0 %"), "2" * 100),
        (("tasks", "toy", "metrics", "acc,none", "by_question"), {}),
        (("tasks", "toy", "metrics", "acc,none", "values"), {}),
        (("tasks", "toy", "metrics", "acc,none", "values", "0 %"), "x"),
        (("tasks", "toy", "examples"), [1]),
        (("tasks", "toy", "data"), 7),
        (("tasks",), {}),
        (("model",), "tiny"),
        (("provenance",), [1]),
    ],
)
def test_a_damaged_baseline_is_an_error_of_use(tmp_path, committed, capsys, place, value):
    damage(committed, place, value)
    assert call(write_answers(tmp_path / "run"), "--baseline", committed) == 2
    assert f"{committed}: damaged baseline" in capsys.readouterr().err


def test_what_is_not_testable_fails_in_ci_unless_told_otherwise(tmp_path, monkeypatch, capsys):
    path = tmp_path / "b.json"
    run = write_answers(tmp_path / "a")
    add_task(run, "unlogged", samples=False)
    call(run, "--baseline", path, "--update")
    assert "7 of its scores and spreads are not testable" in capsys.readouterr().out
    assert call(run, "--baseline", path) == 0
    assert call(run, "--baseline", path, "--strict") == 1
    monkeypatch.setenv("CI", "true")
    assert call(run, "--baseline", path) == 1
    assert call(run, "--baseline", path, "--no-strict") == 0


def test_a_gate_that_could_test_nothing_is_4(tmp_path, committed, capsys):
    unlogged = write_answers(tmp_path / "a", samples=False)
    assert call(unlogged, "--baseline", tmp_path / "b.json", "--update") == 4
    assert "--log_samples" in capsys.readouterr().err
    assert not (tmp_path / "b.json").exists()
    assert call(unlogged, "--baseline", committed) == 4
    assert "--log_samples" in capsys.readouterr().err


def test_a_baseline_without_samples_is_for_the_largest_drop(tmp_path):
    path = tmp_path / "b.json"
    runs = [write_answers(tmp_path / name, accuracy, samples=False) for name, accuracy in (("a", 0.8), ("b", 0.6))]
    assert call(runs[0], "--baseline", path, "--update", "--max-drop", "0.1") == 0
    assert [call(run, "--baseline", path, "--max-drop", "0.1", "--strict") for run in runs] == [0, 1]


def test_a_baseline_of_too_few_questions_is_not_written(tmp_path, committed, capsys):
    before = committed.read_text()
    assert call(write_answers(tmp_path / "few", questions=5), "--baseline", committed, "--update") == 4
    assert "5 questions are too few" in capsys.readouterr().err
    assert committed.read_text() == before


def test_update_replaces_the_baseline_whole_also_one_of_another_version(tmp_path, committed):
    damage(committed, ("format_version",), 0)
    call(write_answers(tmp_path / "other", accuracy=0.3), "--baseline", committed, "--update")
    assert call(write_answers(tmp_path / "run", accuracy=0.3), "--baseline", committed) == 0
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []


# --- reports ---


def test_junit_has_a_failed_case_for_each_worse_row(tmp_path, committed):
    target = tmp_path / "junit.xml"
    assert call(write_answers(tmp_path / "bad", accuracy=0.3), "--baseline", committed, "--junit", target) == 1
    [suite] = ElementTree.parse(target).getroot()
    failed = {case.get("name") for case in suite if case.find("failure") is not None}
    assert failed >= {"0 %", "25 %", "50 %", "75 %", "100 %", "mean"}
    assert (suite.get("tests"), suite.get("failures")) == ("7", str(len(failed)))


def test_a_reader_that_leaves_early_does_not_turn_a_failure_into_a_success(tmp_path, committed):
    worse = write_answers(tmp_path / "worse", accuracy=0.2)
    command = [sys.executable, "-m", "lpes_eval.cli", "regress", str(worse), "--baseline", str(committed)]
    read, write = os.pipe()
    os.close(read)
    assert subprocess.run(command, stdout=write, check=False).returncode == 1
    os.close(write)


def test_the_same_text_in_another_folder_is_the_same_data(tmp_path):
    ours = write_run(tmp_path / "a", {None: [1.0] * 9}, metadata={"text_file": "/home/ann/book.txt"})
    theirs = write_run(tmp_path / "b", {None: [1.0] * 9}, metadata={"text_file": "/ci/book.txt"})
    assert not regress(results.read(ours), results.read(theirs)).failed


def test_markdown_holds_the_table_of_the_terminal(tmp_path, committed, capsys):
    target = tmp_path / "summary.md"
    call(write_answers(tmp_path / "bad", accuracy=0.3), "--baseline", committed, "--markdown", target)
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if line.endswith(("WORSE", "ok"))]
    written = [
        line.replace("|", " ").split()
        for line in target.read_text().splitlines()
        if "WORSE |" in line or "ok |" in line
    ]
    assert len(printed) == 7
    assert written == printed


def test_summary_of_github_actions_is_appended_to(tmp_path, committed, monkeypatch):
    target = tmp_path / "summary.md"
    target.write_text("from another step\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(target))
    call(write_answers(tmp_path / "run"), "--baseline", committed, "--markdown", target)
    assert target.read_text().startswith("from another step\n## lpes-eval regress: nothing got worse")


# --- files that are not what they should be ---


@pytest.mark.parametrize("text", ["notes", '{"results": {}}', "[]"])
def test_update_does_not_overwrite_what_is_no_baseline(tmp_path, text, capsys):
    path = tmp_path / "b.json"
    path.write_text(text)
    assert call(write_answers(tmp_path / "run"), "--baseline", path, "--update") == 2
    assert "is not a baseline" in capsys.readouterr().err
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("results", "toy"), [1]),
        (("configs", "toy"), "x"),
        (("configs", "toy", "metadata"), [1]),
        (("config", "model_args"), 5),
        (("config", "limit"), "x"),
        (("config",), [1]),
        (("n-samples", "toy"), 7),
        (("higher_is_better", "toy"), "up"),
        (("group_subtasks",), {"g": 5}),
    ],
)
def test_results_in_another_form_are_an_error_of_use_that_names_the_file(tmp_path, committed, place, value, capsys):
    path = write_answers(tmp_path / "run")
    damage(path, place, value)
    assert call(path, "--baseline", committed) in (2, 4)
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"metrics": 5}, {"prompt_hash": None}, {"doc_hash": [1]}])
def test_samples_in_another_form_are_an_error_of_use(tmp_path, committed, change):
    path = write_answers(tmp_path / "run")
    [samples] = path.parent.glob("samples_*")
    lines = [json.loads(line) | change for line in samples.read_text().splitlines()]
    samples.write_text("\n".join(map(json.dumps, lines)))
    assert call(path, "--baseline", committed) in (2, 4)


def test_a_task_may_have_a_slash_in_its_name(tmp_path):
    path = write_answers(tmp_path / "run")
    path.write_text(path.read_text().replace('"toy"', '"group/toy"'))
    assert call(path, "--baseline", tmp_path / "b.json", "--update", "--max-drop", "0.1") == 0


def test_names_bring_no_markup_and_no_control_characters_into_reports():
    name = "a\x1b[31m\n# heading ![x](y) <img> | b\ud800"
    report = regress(*(run_with(**{name: np.ones((20, 2))}) for _ in range(2)))
    assert len(suite_of(report)) == 5
    assert "\x1b" not in report.to_text()
    text = report.to_markdown()
    assert "\x1b" not in text
    assert "\n# heading" not in text
    assert "![" not in text
    assert "<img" not in text
