"""The rows of position groups, of results as ``lm_eval.evaluate`` returns them."""

import copy
import math

import pytest

from lpes_eval.scoring import positions


def evaluated(answers, metric="acc"):
    """Results of one group; position -> (question id, score) of each sample."""
    names = {position: f"toy_pos_{position}" for position in answers}
    return {
        "results": {"toy": {f"{metric},none": 0.0}},
        "groups": {"toy": {"alias": "toy", f"{metric},none": 0.0}},
        "group_subtasks": {"toy": list(names.values())},
        "configs": {name: {"metadata": {"position": position}} for position, name in names.items()},
        "higher_is_better": {name: {metric: True} for name in names.values()},
        "samples": {
            names[position]: [
                {"doc_id": number, "doc": {"question_id": question}, "filter": "none", metric: score}
                for number, (question, score) in enumerate(samples)
            ]
            for position, samples in answers.items()
        },
    }


def test_a_questions_samples_at_one_position_are_averaged():
    """Question 7 is there three times at 0 %: (1 + 0 + 0) / 3 for it, 1 for question 8."""
    results = evaluated({0: [(7, 1.0), (7, 0.0), (7, 0.0), (8, 1.0)], 50: [(7, 0.0), (8, 1.0)]})
    positions.summarise(results)
    row = results["groups"]["toy"]
    assert row["acc,none"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert row["acc_worst,none"] == pytest.approx(1 / 2)
    assert row["acc_spread,none"] == pytest.approx(2 / 3 - 1 / 2)
    assert results["results"]["toy"]["acc,none"] == row["acc,none"]


@pytest.mark.parametrize("score", [(-12.5, 3), math.inf, math.nan, None, "no answer"])
def test_a_metric_that_is_no_finite_number_is_left_as_lm_eval_has_it(score):
    results = evaluated({0: [(1, 1.0), (2, score)], 50: [(1, 1.0), (2, 0.0)]})
    before = copy.deepcopy({key: results[key] for key in ("results", "groups", "higher_is_better")})
    positions.summarise(results)
    assert {key: results[key] for key in before} == before


def test_an_error_leaves_the_results_as_they_were(monkeypatch):
    results = evaluated({0: [(1, 1.0), (2, 0.0)], 50: [(1, 1.0), (2, 0.0)]})
    results["groups"]["other"] = {"acc,none": 0.0}
    results["group_subtasks"]["other"] = ["a", "b"]
    results["configs"] |= {"a": {"metadata": {"position": 0}}, "b": {"metadata": {"position": 50}}}
    before = copy.deepcopy(results)
    with pytest.raises(KeyError):  # no samples of a
        positions.summarise(results)
    assert results == before
