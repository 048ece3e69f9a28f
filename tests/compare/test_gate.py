"""The gate on scores in memory and in files: its rows, what it catches, how often it cries wolf, and what it says."""

import copy
import itertools
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpes_eval.compare import gate, results
from lpes_eval.compare.regress import junit, page_of
from lpes_eval.compare.results import Metric, Results, Task
from lpes_eval.errors import UserError
from runs import put, write_tasks
from simulated import chances, draw, run_with, task_of


def regress(old, new, **options):
    old, new = (side if isinstance(side, Results) else run_with(toy=side) for side in (old, new))
    return gate.regress(old, new, gate.Options(**options))


def failing(verdict):
    return [row.label for row in verdict.rows if row.fails]


def outcomes(verdict):
    return [str(row.outcome) for row in verdict.rows]


def suite_of(verdict):
    return ElementTree.fromstring(junit(verdict).split("?>", 1)[1]).find("testsuite")


def metric_of(scores, direction=True):
    """A metric without positions; ``scores`` may be a list, one a question, or a number that is no average."""
    averaged = isinstance(scores, list)
    value = sum(scores) / len(scores) if averaged else scores
    return Metric(direction, {"all": value}, {"all": scores} if averaged else None)


def task_with(**metrics):
    return Task("1", {}, 20, "d", "p", {f"{name},none": metric for name, metric in metrics.items()})


NAMES = st.sampled_from(["acc@5", "acc@50", "acc_worst", "acc_spread", "mrr"]) | st.text("a@_5. |", max_size=4)
DIRECTIONS = st.sampled_from([True, False, None])


@st.composite
def tasks(draw):
    """A task, as the options of `write_run`."""
    n, rng, digits = draw(st.integers(16, 24)), np.random.default_rng(draw(st.integers(0, 9))), draw(st.integers(0, 2))
    positions, names = draw(st.sampled_from([[None], [5], [5, 50], [0, 5, 33.3]])), draw(st.lists(NAMES, max_size=3))
    made = {"scores": {position: rng.random(n).round(digits) for position in positions}}
    made["others"] = {name: (draw(DIRECTIONS), np.ones(n) if digits else rng.random(n)) for name in names}
    return made | {"higher_is_better": draw(DIRECTIONS)}


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    old=st.dictionaries(st.sampled_from(["t", "t_1", "u"]), tasks(), min_size=1), is_group=st.booleans(), data=st.data()
)
def test_a_fall_of_any_score_of_any_task_by_all_its_answers_fails(old, is_group, data):
    """Read from lm-eval's files, also where every score of the other tasks rises, in one group or in none."""
    new, fallen = copy.deepcopy(old), data.draw(st.sampled_from([*old]))
    for task, options in new.items():
        up = options["higher_is_better"]
        lines = [*((up, line) for line in options["scores"].values()), *options["others"].values()]
        for direction, line in [data.draw(st.sampled_from(lines))] if task == fallen else lines:
            line += (-1 if task == fallen else 1) * (-1 if direction is False else 1)
    with tempfile.TemporaryDirectory() as folder:
        sides = []
        for name, made in (("old", old), ("new", new)):
            path = write_tasks(Path(folder, name), **made)
            put(path, ("group_subtasks",), {"all": [*made]} if is_group else {})
            put(path, ("results", "all"), {"acc,none": 0.5})
            sides.append(results.read(path))
    assert regress(*sides).failed
    assert not regress(sides[0], sides[0]).failed


def test_what_the_run_lacks_is_missing_and_fails():
    old = run_with(toy=task_with(acc=metric_of([1.0] * 20), f1=metric_of([1.0] * 20)), other=np.ones((20, 2)))
    new = run_with(toy=task_with(acc=metric_of([1.0] * 20), f1=metric_of(math.nan)), more=np.ones((20, 2)))
    verdict = regress(old, new)
    assert outcomes(verdict) == ["ok", *["missing"] * 6]
    assert failing(verdict) == ["all", "0 %", "1 %", "mean", "worst", "spread"]
    assert "6 are missing" in verdict.headline
    assert "toy, f1, other, acc: missing, the run has no number for it." in verdict.notes
    assert "Not in the baseline, not tested: more." in verdict.notes
    with pytest.raises(UserError, match="none of the baseline's tasks, toy"):
        regress(np.ones((20, 1)), run_with(other=np.ones((20, 1))))


def test_a_wider_spread_is_caught_where_no_score_fell_and_what_rose_is_better():
    old = np.zeros((500, 3))
    old[:300] = 1
    new = old.copy()
    new[300:360, 0] = 1
    verdict = regress(old, new)
    assert outcomes(verdict) == ["better", "ok", "ok", "better", "ok", "worse"]
    assert failing(verdict) == ["spread"]
    assert [row.allowed > 0 for row in verdict.rows] == [False] * 5 + [True]  # the spread alone may not grow


@pytest.mark.parametrize(("higher_is_better", "fall"), [(True, -0.1), (False, 0.1), (None, 0.1), (None, -0.1)])
def test_a_change_for_the_worse_fails_beyond_the_tolerance_and_its_opposite_where_nothing_is_known(
    higher_is_better, fall
):
    old = np.random.default_rng(0).normal(5, 1, (100, 2))

    def verdict(change, **options):
        sides = (run_with(toy=task_of(side, higher_is_better=higher_is_better)) for side in (old, old + change))
        return regress(*sides, **options)

    assert failing(verdict(fall)) == ["0 %", "1 %", "mean", "worst"]
    assert verdict(-fall).failed == (higher_is_better is None)
    assert not verdict(fall / 200).failed
    assert all(abs(row.allowed) >= 0.001 for row in verdict(fall / 200).rows)
    assert verdict(fall / 200, tolerance=0.0).failed


def lost(questions, of=20):
    """Everything right, and then so many questions wrong at all five positions."""
    old, new = np.ones((of, 5)), np.ones((of, 5))
    new[:questions] = 0
    return old, new


def test_a_loss_that_chance_allows_fails_by_its_size():
    assert not regress(*lost(9)).failed
    assert [regress(*lost(k), max_drop=0.1).failed for k in (2, 3)] == [False, True]
    assert not regress(*lost(3), max_drop=0.1, tolerance=0.2).failed
    one_position = np.ones((20, 5))
    one_position[:9, 2] = 0
    assert not regress(np.ones((20, 5)), one_position, max_drop=0.1).failed
    verdict = regress(*lost(9), max_drop=0.1)
    [(label, *_, allowed, _, outcome)] = [row for row in page_of(verdict).tables[0].rows if "by size" in row[-1]]
    assert (label, allowed, outcome) == ("mean", "-0.1000", "WORSE by size")
    assert verdict.headline == "1 of 8 scores got worse"
    assert [case.get("name") for case in suite_of(verdict) if case.find("failure") is not None] == ["mean"]


def test_each_task_sees_the_loss_of_as_many_answers_as_is_said_and_of_no_fewer():
    """Tasks of very different size, three positions each but for the smallest, which is said not to be testable."""
    whole = {name: np.ones((n, 1 if n < 10 else 3)) for name, n in (("few", 8), ("some", 24), ("many", 200))}
    old = run_with(**whole)
    verdict = regress(old, old)
    assert verdict.notes == [
        "13 tests at 0.00077 each: of n questions, a loss of fewer than 11 cannot be told from chance.",
        "few, acc: not testable, fewer than 11 questions.",
    ]
    assert outcomes(verdict) == ["not testable"] + ["ok"] * 12
    assert (verdict.failed, suite_of(verdict).get("skipped")) == (False, "1")
    assert suite_of(regress(old, old, strict=True)).get("failures") == "1"
    for name, loss in itertools.product(("some", "many"), (10, 11)):
        new = whole[name].copy()
        new[:loss] = 0
        assert regress(old, run_with(**whole | {name: new})).failed == (loss == 11)


def test_without_samples_a_score_is_held_to_its_size_alone():
    def unlogged(scores):
        task = task_of(scores)
        metrics = {key: replace(metric, by_question=None) for key, metric in task.metrics.items()}
        return run_with(toy=replace(task, documents=None, prompts=None, metrics=metrics))

    good = np.ones((20, 2))
    old, worse = unlogged(good), unlogged(good * [0.5, 1.0])
    with pytest.raises(UserError, match="--log_samples, or give --max-drop"):
        regress(old, worse)
    verdict = regress(old, worse, max_drop=0.1, strict=True)
    assert outcomes(verdict) == ["not testable", "not testable", "worse", "not testable", "not testable"]
    assert failing(verdict) == ["mean"]
    assert [(row.change.old, row.change.new) for row in verdict.rows[2:]] == [(1.0, 0.75), (1.0, 0.5), (0.0, 0.5)]
    passed = regress(old, old, max_drop=0.1, strict=True)
    assert (outcomes(passed)[2], passed.rows[2].why, passed.failed) == ("ok", "by size", False)


def test_a_score_that_is_no_average_is_excused_where_it_got_no_worse():
    """As the perplexity of ``lpes_ppl``, beside the nats a token of each text."""
    old, worse, as_average = (
        run_with(toy=task_with(acc=metric_of([1.0] * 20), perplexity=metric_of(value, False)))
        for value in (7.5, 8.5, [7.5] * 20)
    )
    verdict = regress(old, old, strict=True)
    assert outcomes(verdict) == ["ok", "not testable"]
    assert "toy, perplexity: not testable, not an average over its samples." in verdict.notes
    assert not verdict.failed
    assert "1 tests at 0.01 each" in verdict.notes[0]  # what cannot be tested takes nothing from what can
    assert regress(old, worse, strict=True).failed
    assert not regress(old, worse).failed
    assert failing(regress(old, worse, max_drop=0.5)) == ["all"]
    assert regress(as_average, old, strict=True).failed  # an average that is none any more is no excuse


@pytest.mark.parametrize(("sizes", "noise"), [((8, 24), None), ((24, 24, 24), None), ((120,), 0.02)])
def test_false_alarms_stay_below_alpha_over_tasks_of_any_size_and_any_noise(sizes, noise):
    """At alpha 0.1, reruns of which answers flip, or all are drawn anew: of 60, 6 may fail; 13 would be p < 0.01."""
    rng = np.random.default_rng(sum(sizes))
    of_tasks = [chances(rng, [0.9, 0.6, 0.8], questions=n)[0] for n in sizes]
    truths = [draw(rng, chance) for chance in of_tasks]

    def run():
        drawn = [draw(rng, chance) for chance in of_tasks]
        if noise is not None:
            drawn = [np.where(rng.random(truth.shape) < noise, 1 - truth, truth) for truth in truths]
        return run_with(**{f"task{i}": scores for i, scores in enumerate(drawn)})

    assert sum(regress(run(), run(), alpha=0.1).failed for _ in range(60)) <= 12
