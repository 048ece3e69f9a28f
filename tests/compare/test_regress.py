"""The gate on scores in memory: what it catches, how often it cries wolf, and what it says."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

import simulated
from lpes_eval.compare import gate
from lpes_eval.compare.results import Metric, Results, Task
from simulated import task_of


def run_with(**tasks):
    """A run of tasks, each given by its scores or ready-made, without files."""
    return simulated.as_run({name: task if isinstance(task, Task) else task_of(task) for name, task in tasks.items()})


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


# --- what it catches, and what it does not ---


def test_a_planted_loss_is_caught_even_if_all_answers_are_drawn_anew():
    """Not a rerun but another sample of answers, such as with temperature: the mean over positions still sees it."""
    rng = np.random.default_rng(2)
    old, new = np.full((500, 5), 0.80), np.full((500, 5), 0.75)
    assert sum(regress(simulated.draw(rng, old), simulated.draw(rng, new)).failed for _ in range(20)) >= 19


def test_a_wider_spread_is_caught_where_no_score_fell():
    old = np.zeros((500, 3))
    old[:300] = 1
    new = old.copy()
    new[300:360, 0] = 1
    report = regress(old, new)
    assert failing(report) == ["spread"]
    assert [row.facts["allowed"] > 0 for row in report.rows] == [False] * 4 + [True]  # the spread alone may not grow


def test_a_rise_passes_and_fails_where_lower_is_better():
    old = np.random.default_rng(0).normal(5, 1, (100, 2))
    assert not regress(old, old + 0.1).failed
    assert regress(*(run_with(toy=task_of(side, higher_is_better=False)) for side in (old, old + 0.1))).failed


def test_a_systematic_change_within_the_tolerance_passes():
    """Another precision shifts every score a little, in one direction: certain, but of no account."""
    old = np.random.default_rng(0).normal(0.5, 0.1, (200, 2))
    report = regress(old, old - 0.0005)
    assert not report.failed
    assert all(abs(row.facts["allowed"]) >= 0.001 for row in report.rows)
    assert regress(old, old - 0.0005, tolerance=0.0).failed


def test_the_promises_over_tasks_of_different_size_hold():
    """Tasks of 8, 24 and 200 questions, answers to one question correlated."""
    tasks, losses = simulated.MIXED, ({}, simulated.LOST)
    pairs = [[simulated.failing(seed, tasks, lost) for lost in losses] for seed in range(15)]
    assert sum(bool(failed) for failed, _ in pairs) <= 1
    assert all(failed >= set(simulated.PASSES) for _, failed in pairs)


# --- the largest drop ---


def lost(questions, of=20):
    """Everything right, and then so many questions wrong at all five positions."""
    old, new = np.ones((of, 5)), np.ones((of, 5))
    new[:questions] = 0
    return old, new


def test_a_loss_of_almost_half_that_chance_allows_fails_by_its_size():
    assert not regress(*lost(9)).failed
    assert [regress(*lost(k), max_drop=0.1).failed for k in (2, 3)] == [False, True]
    assert not regress(*lost(3), max_drop=0.1, tolerance=0.2).failed
    one_position = np.ones((20, 5))
    one_position[:9, 2] = 0
    assert not regress(np.ones((20, 5)), one_position, max_drop=0.1).failed
    report = regress(*lost(9), max_drop=0.1)
    assert failing(report) == ["mean"]
    [row] = [row for row in report.rows if row.outcome]
    assert (row.facts["verdict"], row.facts["allowed"]) == ("DROPPED", -0.1)
    assert report.headline == (
        "1 of 7 scores and spreads got worse "
        "(7 tested; a mere rerun fails at most once in 100, or wherever a mean drops by more than 0.1)"
    )
    assert [case.get("name") for case in suite_of(report) if case.find("failure") is not None] == ["mean"]


@pytest.mark.parametrize(("change", "fails"), [(-0.5, False), (0.5, True)])
def test_the_score_of_a_single_task_is_held_to_the_largest_drop_in_its_own_direction(change, fails):
    """Lower is better: 6 questions of 20, one too few for the test, get worse or better, 0.15 on average."""
    scores = (np.array([[first]] * 6 + [[0.5]] * 14) for first in (0.5, 0.5 + change))
    old, new = (run_with(toy=task_of(side, higher_is_better=False)) for side in scores)
    assert not regress(old, new).failed
    assert regress(old, new, max_drop=0.1).failed == fails


# --- what cannot be tested ---


def test_too_few_questions_to_find_any_loss_are_not_called_fine():
    """Seven tests at 0.01: the loss of all of n answers has a probability of 2^-n by chance, and 2^-9 > 0.01 / 7."""
    assert regress(*lost(10, of=10)).failed
    with pytest.raises(gate.NotComparable, match=r"9 questions are too few: .* evaluate at least 10"):
        regress(*lost(9, of=9))
    assert failing(regress(*lost(9, of=9), max_drop=0.1)) == ["mean"]


def test_tasks_with_too_few_questions_are_not_testable_and_cost_the_others_nothing():
    few, many = np.ones((5, 3)), np.ones((40, 3))
    old, new = run_with(few=few, many=many), run_with(few=0 * few, many=many)
    report = regress(old, new)
    assert report.notes == (
        "few, 5 questions: not testable, a loss of all of them cannot be told from chance.",
        "many, 40 questions: a loss of fewer than 9 cannot be told from chance.",
    )
    assert verdicts(report) == ["not testable"] * 5 + ["ok"] * 5
    assert "5 could not be tested" in report.headline
    assert suite_of(report).get("skipped") == "5"
    assert not report.failed
    strict = regress(old, old, strict=True)
    assert strict.failed
    assert suite_of(strict).get("failures") == "5"


@pytest.mark.parametrize(
    ("sizes", "alpha"),
    [({"a": 8, "b": 24}, 0.01), ({"a": 9, "b": 12, "c": 200}, 0.01), ({"alone": 14}, 0.01), ({"alone": 20}, 0.002)],
)
def test_each_task_sees_the_loss_of_as_many_answers_as_is_said_and_of_no_fewer(sizes, alpha):
    """Tasks of very different size, three positions each but for the smallest."""
    whole = {name: np.ones((n, 1 if n < 10 else 3)) for name, n in sizes.items()}
    old = run_with(**whole)
    report = regress(old, old, alpha=alpha)
    assert sum(row.facts["level"] for row in report.rows) <= alpha * (1 + 1e-12)
    shown = (report.to_text(), report.to_markdown(), json.loads(report.to_json())["notes"], report.to_junit())
    for form in map(str, shown):
        said = {int(n): int(k) for n, k in re.findall(r"(\d+) questions: a loss of fewer than (\d+)", form)}
        assert said.keys() == set(sizes.values())
    for name, n in sizes.items():
        for loss in (said[n] - 1, said[n]):
            new = whole[name].copy()
            new[:loss] = 0
            assert regress(old, run_with(**whole | {name: new}), alpha=alpha).failed == (loss == said[n])


def test_what_the_smallest_tasks_need_more_never_exceeds_alpha():
    """The loss of 8 answers has a probability of 2^-8 by chance: at 0.01, two such tasks get it and not a third."""
    run = run_with(**{f"task{i}": np.ones((8, 1)) for i in range(3)})
    levels = [row.facts["level"] for row in regress(run, run, alpha=0.01).rows]
    assert [level > 2**-8 for level in levels] == [True, True, False]
    assert sum(levels) <= 0.01 * (1 + 1e-12)
    run = run_with(few=np.ones((7, 1)), more=np.ones((8, 1)), as_many=np.ones((8, 1)))
    levels = [row.facts["level"] for row in regress(run, run, alpha=0.012).rows]
    assert [level > 0 for level in levels] == [False, True, True]  # one of 7 would take what two of 8 need


def unlogged(task):
    metrics = {key: replace(metric, by_question=None) for key, metric in task.metrics.items()}
    return replace(task, documents=None, prompts=None, metrics=metrics)


def test_without_samples_a_score_is_held_to_its_size_alone():
    good = np.ones((20, 2))
    old, same, worse = (run_with(toy=unlogged(task_of(scores))) for scores in (good, good, good * [0.5, 1.0]))
    with pytest.raises(gate.NotComparable, match="--log_samples, or give --max-drop"):
        regress(old, worse)
    report = regress(old, worse, max_drop=0.1, strict=True)
    assert verdicts(report) == ["not testable", "not testable", "DROPPED", "not testable"]
    assert failing(report) == ["mean"]
    assert [(row.facts["baseline"], row.facts["now"]) for row in report.rows[2:]] == [(1.0, 0.75), (0.0, 0.5)]
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
    averaged = Metric(False, {"all": 7.5}, {"all": (7.5,) * 20})
    metrics = old.tasks["toy"].metrics | {"perplexity,none": averaged}
    was_tested = run_with(toy=replace(old.tasks["toy"], metrics=metrics))
    assert failing(regress(was_tested, new, strict=True)) == ["all"]  # an average that is none any more is no excuse
    [level] = {row.facts["level"] for row in report.rows if row.facts["level"]}
    assert level == gate.ALPHA  # what cannot be tested takes nothing from what can


def test_a_task_of_which_nothing_can_be_tested_fails_under_strict():
    alone = task_of(np.ones((20, 1)))
    alone = replace(alone, metrics={"perplexity,none": Metric(False, {"all": 7.5}, None)})
    run = run_with(tested=np.ones((20, 1)), alone=alone)
    assert not regress(run, run).failed
    assert failing(regress(run, run, strict=True)) == ["all"]


# --- false alarms ---


@pytest.mark.parametrize(
    ("sizes", "noise"),
    [
        *((sizes, None) for sizes in ((8, 24), (6, 7, 9, 40), (12, 200), (80,) * 6)),
        *(((120,), share) for share in (0.002, 0.02, 0.2)),
    ],
)
def test_false_alarms_stay_below_alpha_over_tasks_of_any_size_and_any_noise(sizes, noise):
    """At alpha 0.1, reruns of which answers flip, or all are drawn anew: of 100, 10 may fail; 18 would be p = 0.01."""
    rng = np.random.default_rng(sum(sizes))
    chances = [simulated.chances(rng, np.array([0.9, 0.6, 0.8]), questions=n)[0] for n in sizes]
    truths = [simulated.draw(rng, chance) for chance in chances]

    def run():
        if noise is None:
            drawn = [simulated.draw(rng, chance) for chance in chances]
        else:
            drawn = [simulated.flipped(rng, truth, noise) for truth in truths]
        return run_with(**{f"task{i}": scores for i, scores in enumerate(drawn)})

    assert sum(regress(run(), run(), alpha=0.1).failed for _ in range(100)) <= 17
