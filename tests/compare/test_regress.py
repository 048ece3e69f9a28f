"""``lpes-eval regress``: what it catches, how often it cries wolf, and what it says."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from lpes_eval import cli
from lpes_eval.compare import gate, results
from lpes_eval.compare.results import Identity, Model
from lpes_eval.compare.statistics import summarize
from lpes_eval.errors import UserError
from runs import write_run

POSITIONS = (0, 25, 50, 75, 100)


@pytest.fixture(autouse=True)
def outside_of_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)


def baseline_of(scores, *, paired=True, families=None):
    """A baseline of scores (questions, positions) for each family, without files."""
    tasks = {}
    members = {}
    for family, matrix in (families or {"toy": scores}).items():
        names = [f"{family}@{p}" for p in range(matrix.shape[1])]
        members[family] = tuple(names)
        for name, line in zip(names, matrix.T, strict=True):
            n = len(line)
            score = gate.Score(line.mean(), line.std(ddof=1) / math.sqrt(n), True, tuple(line) if paired else None)
            identity = Identity("1", {}, n, tuple(range(n)), "d", "p")
            tasks[name] = gate.Record(identity, len(tasks), {"acc,none": score})
    return gate.Baseline(Model("hf", "tiny", 1), {}, tasks, members)


def run_of(rng, chance):
    return (rng.random(chance.shape) < chance).astype(float)


def rerun(rng, scores, flips):
    """The same answers, but for a share of them that hardware noise turns over."""
    return np.where(rng.random(scores.shape) < flips, 1 - scores, scores)


def failures(runs):
    return sum(gate.regress(baseline_of(old), baseline_of(new)).worse for old, new in runs)


# --- what it catches, and what it does not ---


def test_a_planted_loss_of_five_points_at_every_position_is_caught():
    """500 questions at five positions; 25 answers lost at each, among twice as many that changed by noise."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        old = run_of(rng, np.full((500, 5), 0.8))
        new = rerun(rng, old, 0.02)
        for column in new.T:
            kept = np.flatnonzero(column == 1)
            column[rng.choice(kept, 25, replace=False)] = 0
        assert gate.regress(baseline_of(old), baseline_of(new)).worse


def test_a_planted_loss_of_five_points_at_one_position_is_caught():
    rng = np.random.default_rng(1)
    old = run_of(rng, np.full((500, 5), 0.8))
    new = rerun(rng, old, 0.002)
    new[np.flatnonzero(new[:, 2] == 1)[:25], 2] = 0
    verdict = gate.regress(baseline_of(old), baseline_of(new))
    assert [row.label for row in verdict.rows if row.worse and "%" in row.label] == ["2 %"]


@pytest.mark.parametrize(("questions", "comparable"), [(9, False), (10, True)])
def test_too_few_questions_to_find_any_loss_are_not_called_fine(questions, comparable):
    """Seven tests at 0.01: the loss of all of n answers has a probability of 2^-n by chance, and 2^-9 > 0.01 / 7."""
    old, new = np.ones((questions, 5)), np.zeros((questions, 5))
    if comparable:
        assert gate.regress(baseline_of(old), baseline_of(new)).worse
    else:
        with pytest.raises(gate.NotComparable, match=r"9 questions are too few: .* evaluate at least 10"):
            gate.regress(baseline_of(old), baseline_of(new))


def lost(questions, of):
    """Everything right, and then so many questions wrong at all five positions."""
    old, new = np.ones((of, 5)), np.ones((of, 5))
    new[:questions] = 0
    return baseline_of(old), baseline_of(new)


@pytest.mark.parametrize("alpha", [0.01, 0.002])
def test_the_verdict_says_the_smallest_loss_that_it_could_find(alpha):
    """Found by trying, at 20 questions and seven tests: 10 at alpha 0.01, 12 at 0.002."""
    verdict = gate.regress(*lost(0, of=20), alpha=alpha)
    least = next(n for n in range(21) if gate.regress(*lost(n, of=20), alpha=alpha).worse)
    said = f"20 questions: a loss of fewer than {least} cannot be told from chance."
    assert said in verdict.to_text().splitlines()
    assert f"* {said}" in verdict.to_markdown().splitlines()
    [suite] = ElementTree.fromstring(verdict.to_junit().split("?>", 1)[1])
    assert said in suite.findtext("system-out")


def test_tasks_with_too_few_questions_are_not_testable_and_cost_the_others_nothing():
    few, many = np.ones((5, 3)), np.ones((40, 3))
    base = baseline_of(None, families={"few": few, "many": many})
    verdict = gate.regress(base, baseline_of(None, families={"few": 0 * few, "many": many}))
    assert verdict.notes == (
        "5 questions: not testable, a loss of all of them cannot be told from chance.",
        "40 questions: a loss of fewer than 9 cannot be told from chance.",
    )
    assert [row.verdict for row in verdict.rows] == ["not testable"] * 5 + ["ok"] * 5
    assert "5 could not be tested" in verdict.headline
    [suite] = ElementTree.fromstring(verdict.to_junit().split("?>", 1)[1])
    assert suite.get("skipped") == "5"
    assert not verdict.fails
    strict = gate.regress(base, base, strict=True)
    assert strict.fails
    [suite] = ElementTree.fromstring(strict.to_junit().split("?>", 1)[1])
    assert suite.get("failures") == "5"


def test_a_small_task_beside_a_large_one_keeps_the_power_to_see_all_its_answers_lost():
    small, large = np.ones((8, 1)), np.ones((24, 6))
    base = baseline_of(None, families={"small": small, "large": large})
    verdict = gate.regress(base, baseline_of(None, families={"small": 0 * small, "large": large}))
    assert [row.verdict for row in verdict.rows] == ["WORSE"] + ["ok"] * 8
    assert sum(section.level * len(section.rows) for section in verdict.sections) <= gate.ALPHA
    assert "8 questions: a loss of fewer than 8 cannot be told from chance." in verdict.notes


@pytest.mark.parametrize("sizes", [(8, 24), (6, 7, 9, 40), (12, 200)])
def test_false_alarms_stay_below_alpha_where_families_differ_in_size(sizes):
    """At alpha 0.1, reruns with all answers drawn anew: of 100, 10 may fail; 17 would be beyond chance."""
    rng = np.random.default_rng(sum(sizes))

    def run():
        return baseline_of(None, families={f"of{n}": run_of(rng, np.full((n, 2), 0.7)) for n in sizes})

    assert sum(gate.regress(run(), run(), alpha=0.1).worse for _ in range(100)) <= 17


def test_a_loss_of_almost_half_that_chance_allows_fails_by_its_size():
    base, now = lost(9, of=20)
    assert not gate.regress(base, now).worse
    verdict = gate.regress(base, now, max_drop=0.1)
    assert [(row.label, row.dropped, row.verdict) for row in verdict.rows if row.worse] == [("mean", True, "DROPPED")]
    assert next(row.allowed for row in verdict.rows if row.dropped) == -0.1
    assert "drops by more than 0.1" in verdict.headline
    [suite] = ElementTree.fromstring(verdict.to_junit().split("?>", 1)[1])
    assert [case.get("name") for case in suite if case.find("failure") is not None] == ["mean"]


def test_a_drop_of_just_the_largest_that_is_allowed_passes():
    assert not gate.regress(*lost(2, of=20), max_drop=0.1).worse
    assert gate.regress(*lost(3, of=20), max_drop=0.1).worse
    assert not gate.regress(*lost(3, of=20), max_drop=0.1, tolerance=0.2).worse


def test_one_position_may_drop_by_more_than_the_mean_may():
    base, _ = lost(0, of=20)
    one = np.ones((20, 5))
    one[:9, 2] = 0
    assert not gate.regress(base, baseline_of(one), max_drop=0.1).worse


@pytest.mark.parametrize(("change", "fails"), [(-0.5, False), (0.5, True)])
def test_the_score_of_a_single_task_is_held_to_the_largest_drop_in_its_own_direction(change, fails):
    """Lower is better: 6 questions of 20, one too few for the test, get worse or better, 0.15 on average."""
    base, now = (baseline_of(np.array([[first]] * 6 + [[0.5]] * 14)) for first in (0.5, 0.5 + change))
    for side in (base, now):
        [record] = side.tasks.values()
        [(key, score)] = record.scores.items()
        record.scores[key] = gate.Score(score.value, score.stderr, False, score.by_question)
    assert not gate.regress(base, now).worse
    assert gate.regress(base, now, max_drop=0.1).worse == fails


def test_a_drop_needs_no_standard_error():
    old = baseline_of(np.ones((20, 2)), paired=False)
    new = baseline_of(np.repeat([[0.5, 1.0]], 20, axis=0), paired=False)
    for side in (old, new):
        record = side.tasks["toy@0"]
        score = record.scores["acc,none"]
        record.scores["acc,none"] = gate.Score(score.value, math.nan, True, None)
    assert not gate.regress(old, new).worse
    [mean] = [row for row in gate.regress(old, new, max_drop=0.1).rows if row.worse]
    assert (mean.label, mean.verdict, mean.change.method) == ("mean", "DROPPED", "none")


def test_a_planted_loss_is_caught_even_if_all_answers_are_drawn_anew():
    """Not a rerun but another sample of answers, such as with temperature: the mean over positions still sees it."""
    rng = np.random.default_rng(2)
    caught = failures((run_of(rng, np.full((500, 5), 0.80)), run_of(rng, np.full((500, 5), 0.75))) for _ in range(20))
    assert caught >= 19


def test_a_wider_spread_is_caught_where_no_score_fell():
    old = np.zeros((500, 3))
    old[:300] = 1
    new = old.copy()
    new[300:360, 0] = 1
    verdict = gate.regress(baseline_of(old), baseline_of(new))
    assert [row.label for row in verdict.rows if row.worse] == ["spread"]


def test_a_better_run_passes():
    rng = np.random.default_rng(3)
    old = run_of(rng, np.full((500, 5), 0.7))
    new = np.maximum(old, run_of(rng, np.full((500, 1), 0.3)))
    assert not gate.regress(baseline_of(old), baseline_of(new)).worse


def test_where_lower_is_better_a_rise_fails():
    old = np.random.default_rng(0).normal(5, 1, (100, 2))
    base, now = baseline_of(old), baseline_of(old + 0.1)
    assert not gate.regress(base, now).worse
    for side in (base, now):
        for record in side.tasks.values():
            [(key, score)] = record.scores.items()
            record.scores[key] = gate.Score(score.value, score.stderr, False, score.by_question)
    assert gate.regress(base, now).worse


def test_a_systematic_change_within_the_tolerance_passes():
    """Another precision shifts every score a little, in one direction: certain, but of no account."""
    old = np.random.default_rng(0).normal(0.5, 0.1, (200, 2))
    now = baseline_of(old - 0.0005)
    assert not gate.regress(baseline_of(old), now).worse
    assert gate.regress(baseline_of(old), now, tolerance=0.0).worse


# --- false alarms ---


@pytest.mark.parametrize("flips", [0.002, 0.02, 0.2])
def test_false_alarms_of_noisy_reruns_stay_below_alpha(flips):
    """At alpha = 0.1: 300 reruns, of which 30 may fail; 43 would be beyond chance (p = 0.01)."""
    rng = np.random.default_rng(int(flips * 1000))
    truth = run_of(rng, np.tile([0.9, 0.6, 0.8], (120, 1)))
    failed = sum(
        gate.regress(baseline_of(rerun(rng, truth, flips)), baseline_of(rerun(rng, truth, flips)), alpha=0.1).worse
        for _ in range(300)
    )
    assert failed <= 43


def test_false_alarms_stay_below_alpha_over_many_tasks():
    """Six families of three positions: thirty tests a run, and still one alarm in ten runs at most."""
    rng = np.random.default_rng(7)
    chances = {f"task{i}": 1 / (1 + np.exp(-rng.normal(1, 1.5, (80, 1)) - np.zeros(3))) for i in range(6)}

    def once():
        drawn = [{name: run_of(rng, chance) for name, chance in chances.items()} for _ in range(2)]
        old, new = (baseline_of(None, families=families) for families in drawn)
        return gate.regress(old, new, alpha=0.1).worse

    assert sum(once() for _ in range(80)) <= 15


def test_false_alarms_stay_below_alpha_without_samples():
    rng = np.random.default_rng(9)
    difficulty = rng.normal(0.5, 1.5, (200, 1)) + np.array([1.0, 0.0, 0.5])
    chance = 1 / (1 + np.exp(-difficulty))
    failed = 0
    for _ in range(300):
        old, new = (baseline_of(run_of(rng, chance), paired=False) for _ in range(2))
        failed += gate.regress(old, new, alpha=0.1).worse
    assert failed <= 43


def test_the_level_is_shared_among_all_tests():
    scores = np.ones((10, 3))
    verdict = gate.regress(*(baseline_of(None, families={"a": scores, "b": scores}) for _ in range(2)), alpha=0.05)
    assert len(verdict.rows) == 2 * (3 + 2)
    assert {section.level for section in verdict.sections} == {0.05 / 10}


# --- from files ---


def write_answers(folder, accuracy=0.8, seed=0, questions=100, **options):
    rng = np.random.default_rng(seed)
    answers = run_of(rng, np.full((questions, len(POSITIONS)), accuracy))
    return write_run(folder, {p: list(line) for p, line in zip(POSITIONS, answers.T, strict=True)}, **options)


def call(*arguments):
    return cli.main(["regress", *map(str, arguments)])


@pytest.fixture
def committed(tmp_path):
    path = tmp_path / "baseline.json"
    assert call(write_answers(tmp_path / "first"), "--baseline", path, "--update") == 0
    return path


def test_baseline_written_and_read_is_the_run(tmp_path, committed):
    assert gate.load(committed) == gate.snapshot(results.read(tmp_path / "first"))


def test_scores_that_are_not_right_or_wrong_survive_the_file_exactly(tmp_path):
    scores = {0: [0.1, 1 / 3, 0.7], 50: [2.0, 1e-9, 0.3]}
    run = gate.snapshot(results.read(write_run(tmp_path / "run", scores)))
    run.save(tmp_path / "b.json")
    assert gate.load(tmp_path / "b.json") == run
    assert run.tasks["toy@50"].scores["acc,none"].by_question == (2.0, 1e-9, 0.3)


@pytest.mark.parametrize(
    "questions",
    [(0, 1, 2, 3, 7, 9, 10), (5,), ("nq-1", "nq-2"), (-2, -1, 0), (3, 10, "x"), tuple(range(500))],
)
def test_question_ids_survive_the_file(tmp_path, questions):
    n = len(questions)
    record = gate.Record(Identity("1", {}, n, questions, "d", "p"), 0, {"acc,none": gate.Score(1, 0, True, (1.0,) * n)})
    baseline = gate.Baseline(Model("hf", "tiny", None), {}, {"a": record, "b": record}, {"toy": ("a", "b")})
    baseline.save(tmp_path / "b.json")
    assert gate.load(tmp_path / "b.json") == baseline
    assert len(json.loads((tmp_path / "b.json").read_text())["questions"]) == 1


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


def test_the_same_run_again_passes(tmp_path, committed, capsys):
    assert call(write_answers(tmp_path / "again"), "--baseline", committed) == 0
    assert "nothing got worse" in capsys.readouterr().out


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
    folder, before = tmp_path / "worse", gate.load(committed).tasks
    lines = {p: list(before[f"toy@{p}"].scores["acc,none"].by_question) for p in POSITIONS}
    write_run(folder, {p: [0.0] * 5 + line[5:] for p, line in lines.items()})
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
    assert f"other.json: baseline of 5 tasks written from {taken}" in capsys.readouterr().out


def test_no_baseline_is_3(tmp_path, capsys):
    assert call(write_answers(tmp_path / "run"), "--baseline", tmp_path / "none.json") == 3
    assert "--update" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"version": 2.0}, "task version 1.0 and 2.0"),
        ({"model": ("hf", {"pretrained": "large"}, 1000)}, "--other-model"),
        ({"model": ("hf", {"pretrained": "tiny"}, 2000)}, "2,000 parameters"),
        ({"text": "riddle"}, "another set of examples"),
        ({"first_question": 50}, "50 of 100 questions in common"),
        ({"questions": 50}, "100 and 50 examples"),
        ({"samples": False, "metadata": {"source": {"kind": "official"}}}, "source kind None and official"),
        ({"chat": "User: "}, "--other-prompts"),
        ({"group": "else"}, "the baseline has toy@0 and 4 more"),
    ],
)
def test_what_cannot_be_compared_is_4(tmp_path, committed, capsys, other, message):
    assert call(write_answers(tmp_path / "run", **other), "--baseline", committed) == 4
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


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
        '{"format": "lpes-eval baseline", "format_version": 1}',
    ],
)
def test_a_file_that_is_no_baseline_is_2(tmp_path, committed, capsys, content):
    committed.write_text(content)
    assert call(write_answers(tmp_path / "run"), "--baseline", committed) == 2
    assert "--update" in capsys.readouterr().err


def test_a_baseline_that_lost_a_score_is_damaged(tmp_path, committed):
    data = json.loads(committed.read_text())
    score = data["tasks"]["toy@0"]["scores"]["acc,none"]
    score["by_question"] = score["by_question"][1:]
    committed.write_text(json.dumps(data))
    with pytest.raises(UserError, match="99 scores for 100 questions"):
        gate.load(committed)


def test_without_samples_scores_are_compared_unpaired(tmp_path, committed, capsys):
    path = write_answers(tmp_path / "bad", accuracy=0.3, samples=False)
    assert call(path, "--baseline", committed) == 1
    assert "unpaired" in capsys.readouterr().out
    assert call(write_answers(tmp_path / "good", samples=False), "--baseline", committed) == 0


def test_without_samples_the_groups_own_row_is_sharper_than_the_bound(tmp_path, capsys):
    """Answers that differ over positions: the mean's standard error is half the bound, and seven points are seen."""

    def write(name, accuracy, seed):
        path = write_answers(tmp_path / name, accuracy, seed=seed, questions=500)
        data = json.loads(path.read_text())
        answers = gate.snapshot(results.read(path))
        matrix = [record.scores["acc,none"].by_question for record in answers.tasks.values()]
        summary = summarize(np.array(matrix).T).as_results("acc")
        bounded, with_row = json.loads(json.dumps(data)), data
        bounded["results"]["toy"].pop("acc_spread,none")
        with_row["results"]["toy"] |= summary
        for samples in (tmp_path / name).glob("samples_*"):
            samples.unlink()
        return [(path.with_name(f"{kind}.json"), run) for kind, run in (("bounded", bounded), ("row", with_row))]

    status = []
    for (old, old_run), (new, new_run) in zip(write("old", 0.80, 1), write("new", 0.73, 2), strict=True):
        old.write_text(json.dumps(old_run))
        new.write_text(json.dumps(new_run))
        call(old, "--baseline", tmp_path / "b.json", "--update")
        assert gate.load(tmp_path / "b.json") == gate.snapshot(results.read(old))
        call(new, "--baseline", tmp_path / "b.json")
        [mean] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mean")]
        status.append(mean.split()[-1])
    assert status == ["ok", "WORSE"]


def test_a_baseline_with_samples_keeps_no_second_copy_of_mean_and_spread(tmp_path):
    path = write_answers(tmp_path / "run")
    data = json.loads(path.read_text())
    data["results"]["toy"] |= {f"acc_spread{kind},none": 0.1 for kind in ("", "_stderr")}
    path.write_text(json.dumps(data))
    assert gate.snapshot(results.read(path)).groups == {}


def test_score_without_standard_error_and_samples_is_not_tested(tmp_path, capsys):
    path = tmp_path / "b.json"
    right, wrong = ({0: [x] * 9, 50: [0.0, 1.0, *[0.0] * 7]} for x in (1.0, 0.0))
    partly = {0: "N/A", 50: 0.1}
    call(write_run(tmp_path / "a", right, samples=False, stderr=partly), "--baseline", path, "--update")
    assert call(write_run(tmp_path / "b", wrong, samples=False, stderr=partly), "--baseline", path) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines if line[-2:] == ["not", "testable"]] == ["0", "mean", "spread"]


def test_what_is_not_testable_fails_in_ci_unless_told_otherwise(tmp_path, monkeypatch):
    path = tmp_path / "b.json"
    partly = {0: "N/A", 50: 0.1}
    run = write_run(tmp_path / "a", {0: [1.0] * 9, 50: [0.0, *[1.0] * 8]}, samples=False, stderr=partly)
    call(run, "--baseline", path, "--update")
    assert call(run, "--baseline", path) == 0
    assert call(run, "--baseline", path, "--strict") == 1
    monkeypatch.setenv("CI", "true")
    assert call(run, "--baseline", path) == 1
    assert call(run, "--baseline", path, "--no-strict") == 0


def test_a_gate_that_could_test_nothing_is_4(tmp_path, capsys):
    path = tmp_path / "b.json"
    nothing = {0: "N/A", 50: "N/A"}
    run = write_run(tmp_path / "a", {0: [1.0] * 9, 50: [1.0] * 9}, samples=False, stderr=nothing)
    assert call(run, "--baseline", path, "--update") == 4
    assert "--log_samples" in capsys.readouterr().err
    assert not path.exists()
    gate.snapshot(results.read(run)).save(path)
    assert call(run, "--baseline", path) == 4
    assert "--log_samples" in capsys.readouterr().err


def test_a_baseline_of_too_few_questions_is_not_written(tmp_path, committed, capsys):
    before = committed.read_text()
    assert call(write_answers(tmp_path / "few", questions=5), "--baseline", committed, "--update") == 4
    assert "5 questions are too few" in capsys.readouterr().err
    assert committed.read_text() == before


def test_a_score_that_cannot_be_tested_does_not_hide_that_the_others_are_too_few(tmp_path, capsys):
    """As in ``lpes_ppl``, whose perplexity has no standard error beside a score of each text that has."""
    runs = []
    for name, score in (("a", 1.0), ("b", 0.0)):
        run = write_run(tmp_path / name, {None: [score] * 2})
        raw = json.loads(run.read_text())
        raw["results"]["toy"] |= {"other,none": score, "other_stderr,none": "N/A"}
        run.write_text(json.dumps(raw))
        runs.append(run)
    assert call(runs[0], "--baseline", tmp_path / "base.json", "--update") == 4
    gate.snapshot(results.read(runs[0])).save(tmp_path / "base.json")
    assert call(runs[1], "--baseline", tmp_path / "base.json") == 4
    assert capsys.readouterr().err.count("2 questions are too few") == 2


def test_a_score_that_cannot_be_tested_takes_nothing_from_the_others(tmp_path):
    run = write_run(tmp_path / "a", {None: [1.0, 0.0] * 20})
    alone = gate.snapshot(results.read(run))
    raw = json.loads(run.read_text())
    raw["results"]["toy"] |= {"other,none": 1.0, "other_stderr,none": "N/A"}
    run.write_text(json.dumps(raw))
    both = gate.snapshot(results.read(run))
    levels = {section.level for run in (both, alone) for section in gate.regress(run, run).sections}
    assert max(levels) == gate.ALPHA


def test_a_metric_that_the_run_lacks_is_4(tmp_path, committed, capsys):
    assert call(write_answers(tmp_path / "run", metric="f1"), "--baseline", committed) == 4
    assert "the baseline has acc,none of toy@0, the run has not" in capsys.readouterr().err


def test_a_task_that_the_baseline_lacks_is_named(tmp_path, committed, capsys):
    path = write_answers(tmp_path / "run")
    data = json.loads(path.read_text())
    for key in ("results", "configs", "versions"):
        data[key]["new_task"] = data[key]["toy"]
    path.write_text(json.dumps(data))
    assert call(path, "--baseline", committed) == 0
    assert "Not in the baseline, not tested: new_task@0" in capsys.readouterr().out


def test_another_package_version_is_named_and_does_not_fail(tmp_path, committed, capsys):
    path = write_answers(tmp_path / "run")
    path.write_text(path.read_text().replace('"5.23.0"', '"5.24.0"'))
    assert call(path, "--baseline", committed) == 0
    assert "packages transformers: 5.23.0 in the baseline, 5.24.0 now." in capsys.readouterr().out


def test_update_replaces_the_baseline_whole(tmp_path, committed):
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


def test_reports_are_written_where_nothing_could_be_compared(tmp_path, committed):
    junit, markdown = tmp_path / "junit.xml", tmp_path / "summary.md"
    path = write_answers(tmp_path / "run", version=2.0)
    assert call(path, "--baseline", committed, "--junit", junit, "--markdown", markdown) == 4
    [suite] = ElementTree.parse(junit).getroot()
    assert suite.get("errors") == "1"
    assert "task version" in markdown.read_text()


def test_reports_are_written_where_there_is_no_result_to_read(tmp_path, committed):
    page = tmp_path / "page.md"
    assert call(tmp_path / "nowhere", "--baseline", committed, "--markdown", page) == 2
    assert "could not compare" in page.read_text()


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
    gate.regress(gate.snapshot(results.read(ours)), gate.snapshot(results.read(theirs)))


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


def test_update_replaces_a_baseline_of_another_version(tmp_path, committed):
    committed.write_text(json.dumps(json.loads(committed.read_text()) | {"format_version": 0}))
    assert call(write_answers(tmp_path / "run"), "--baseline", committed, "--update") == 0


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
    data = json.loads(path.read_text())
    at = data
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    path.write_text(json.dumps(data))
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
    assert call(path, "--baseline", tmp_path / "b.json", "--update") == 0


def test_names_bring_no_markup_and_no_control_characters_into_reports():
    name = "a\x1b[31m\n# heading ![x](y) <img> | b\ud800"
    verdict = gate.regress(*(baseline_of(None, families={name: np.ones((20, 2))}) for _ in range(2)))
    [suite] = ElementTree.fromstring(verdict.to_junit().split("?>", 1)[1])
    assert len(suite) == 5
    assert "\x1b" not in verdict.to_text()
    text = verdict.to_markdown()
    assert "\x1b" not in text
    assert "\n# heading" not in text
    assert "![" not in text
    assert "<img" not in text
