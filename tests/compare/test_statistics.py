"""Statistics by position, against closed forms, second implementations, enumeration and simulation."""

import itertools
import math
import statistics as stdlib

import numpy as np
import pytest
from scipy import stats

from lpes_eval.compare import statistics as st
from simulated import chances, draw


def answers(questions, accuracies, seed=0, runs=1):
    """Right-or-wrong answers of one model, correlated over positions through each question's difficulty."""
    rng = np.random.default_rng(seed)
    (chance,) = chances(rng, accuracies, questions=questions)
    drawn = [draw(rng, chance) for _ in range(runs)]
    return drawn[0] if runs == 1 else drawn


def test_standard_error_of_the_mean_is_that_of_the_questions_own_averages():
    scores = answers(50, [0.9, 0.5, 0.7])
    by_question = [stdlib.mean(row) for row in scores.tolist()]
    mean = st.mean_over_positions(scores)
    assert mean.value == pytest.approx(stdlib.mean(by_question))
    assert mean.stderr == pytest.approx(stdlib.stdev(by_question) / math.sqrt(50))
    same_answers = np.repeat(scores[:, :1], 5, axis=1)  # add no certainty
    assert st.mean_over_positions(same_answers).stderr == pytest.approx(st.mean_over_positions(scores[:, :1]).stderr)


def test_worst_and_spread_far_apart_have_the_errors_of_the_positions_they_come_from():
    scores = answers(400, [0.95, 0.8, 0.3], seed=3)
    worst, spread = st.worst_position(scores), st.spread(scores)
    covariance = np.cov(scores.T) / 400
    assert worst.value == pytest.approx(scores[:, 2].mean())
    assert worst.stderr == pytest.approx(math.sqrt(covariance[2, 2]), rel=0.04)
    contrast = math.sqrt(covariance[0, 0] + covariance[2, 2] - 2 * covariance[0, 2])
    assert spread.value == pytest.approx(scores[:, 0].mean() - scores[:, 2].mean())
    assert spread.stderr == pytest.approx(contrast, rel=0.04)
    few = np.array([[10.0, 1.0], [12.0, 2.0], [11.0, 4.0], [14.0, 3.0]])
    assert st.worst_position(few).stderr == pytest.approx(stdlib.stdev(few[:, 1]) / 2, rel=0.04)


def test_lm_eval_is_given_these_numbers_also_where_little_is_known():
    scores = answers(30, [0.6, 0.9]).tolist()
    worst, spread = st.worst_position(scores), st.spread(scores)
    given = [aggregate(scores) for aggregate in st.OVER_POSITIONS.values()]
    assert given == [worst.value, worst.stderr, spread.value, spread.stderr]
    of_one = {name: aggregate([[1.0, 0.0]]) for name, aggregate in st.OVER_POSITIONS.items()}
    assert of_one == {"worst": 0.0, "worst_stderr": "N/A", "spread": 1.0, "spread_stderr": "N/A"}
    one_position = np.array(scores)[:, :1]
    assert st.worst_position(one_position) == st.mean_over_positions(one_position)
    assert st.spread(one_position) == st.Estimate(0.0, 0.0)
    perplexity = np.array([[3.0, 9.0], [5.0, 7.0], [4.0, 8.0]])
    assert st.compare_paired(perplexity, perplexity, higher_is_better=False).worst.a == 8.0


def test_interval_of_paired_proportions_covers_where_the_plain_wald_interval_does_not():
    """Few discordant pairs, 60 questions: 2 % lost and 4 % gained."""
    rng = np.random.default_rng(5)
    adjusted = wald = 0
    for _ in range(1000):
        _, losses, gains = rng.multinomial(60, [0.94, 0.02, 0.04])
        low, high = st.paired_proportions_interval(losses, gains, 60)
        adjusted += low <= 0.02 <= high
        d = (gains - losses) / 60
        half = 1.96 * math.sqrt(((gains + losses) / 60 - d**2) / 60)
        wald += d - half <= 0.02 <= d + half
    assert st.paired_proportions_interval(10, 20, 100)[0] == pytest.approx(
        10 / 102 - 1.959964 * math.sqrt((32 / 102 - (10 / 102) ** 2) / 102), abs=1e-6
    )  # the published formula: 21/102 and 11/102
    assert adjusted / 1000 >= 0.945
    assert wald / 1000 < 0.92


def test_paired_differences_count_each_question_against_itself():
    a, b = answers(80, [0.6, 0.7], seed=1, runs=2)
    found = st.compare_paired(a, b)
    for column, difference in enumerate(found.positions):
        losses, gains = (int((one > other)[:, column].sum()) for one, other in ((a, b), (b, a)))
        assert difference.difference == pytest.approx((gains - losses) / 80)
        assert difference.p == pytest.approx(stats.binomtest(losses, losses + gains, 0.5).pvalue)
    assert found.mean.difference == pytest.approx(b.mean() - a.mean())
    assert found.worst.difference == pytest.approx(b.mean(axis=0).min() - a.mean(axis=0).min())
    assert found.spread.difference == pytest.approx(np.ptp(b.mean(axis=0)) - np.ptp(a.mean(axis=0)))


def exchanges(a, b):
    """The share of all exchanges of two models whose averages differ as much as theirs, written out."""
    signs = np.array(list(itertools.product([1, -1], repeat=len(a))))
    sums = np.abs(signs @ (b - a).sum(axis=1))
    return np.mean(sums >= sums[0] - 1e-9)


def test_p_of_the_mean_is_the_share_of_all_exchanges():
    assert st.compare_paired(np.zeros((5, 4)), np.ones((5, 4))).worst.p == 2**-4  # all better: no certainty
    for questions, seed in itertools.product([2, 3, 7, 12], range(5)):
        a, b = answers(questions, [0.4, 0.6, 0.5], seed=seed, runs=2)
        found = st.compare_paired(a, b)
        assert found.mean.p == pytest.approx(exchanges(a, b))
        smooth = st.compare_paired(a + b / 3, b - a / 7)
        assert smooth.positions[1].p == pytest.approx(exchanges((a + b / 3)[:, 1:2], (b - a / 7)[:, 1:2]))
    a, b = answers(17, [0.4, 0.6, 0.5], seed=21, runs=2)
    b += np.arange(17)[:, None] / 100 - 0.2  # every question differs: more than are counted out, so some are drawn
    assert st.compare_paired(a, b, replicates=40_000).mean.p == pytest.approx(exchanges(a, b), abs=0.01)
    assert 0.01 < exchanges(a, b) < 0.9


def test_intervals_cover_the_truth_as_often_as_they_say():
    """150 pairs of models, of 150 questions; the truth is that of 40,000."""
    accuracies, covered = ([0.9, 0.6, 0.75], [0.9, 0.75, 0.8]), []
    of_a, of_b = (chance.mean(axis=0) for chance in chances(np.random.default_rng(0), *accuracies, questions=40_000))
    truth = np.array([*(of_b - of_a), (of_b - of_a).mean(), of_b.min() - of_a.min(), np.ptp(of_b) - np.ptp(of_a)])
    for seed in range(150):
        rng = np.random.default_rng(seed)
        a, b = (draw(rng, chance) for chance in chances(rng, *accuracies, questions=150))
        found = st.compare_paired(a, b, replicates=300)
        ends = [(one.low, one.high) for one in (*found.positions, found.mean, found.worst, found.spread)]
        low, high = np.transpose(ends)
        covered.append((low <= truth) & (truth <= high))
    shares = np.mean(covered, axis=0)
    assert (shares >= 0.91).all(), shares
    assert shares[3] <= 0.985


def test_equal_runs_differ_by_nothing_and_one_question_shows_nothing():
    a = answers(30, [0.5, 0.9])
    found = st.compare_paired(a, a)
    for difference in (*found.positions, found.mean, found.worst, found.spread):
        assert (difference.difference, difference.p) == (0.0, 1.0)
        assert difference.low <= 0 <= difference.high
    assert all(change.p == 1.0 and change.worsening == 0 for change in st.rerun_changes(a, a, 0.5))
    one_question = st.compare_paired([[1.0, 0.5]], [[0.5, 0.5]]).mean
    assert one_question.difference == -0.25
    assert np.isnan([one_question.p, one_question.low]).all()


def test_holm_gives_the_values_of_r():
    """p.adjust(c(0.04, 0.01, 0.03, NA, 0.05, 0.02), "holm") of R, which does not count what was not tested."""
    expected = [0.09, 0.05, 0.09, math.nan, 0.09, 0.08]
    assert st.holm([0.04, 0.01, 0.03, math.nan, 0.05, 0.02]) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("level", [0.3, 0.05])
def test_exchange_test_agrees_with_all_exchanges_written_out(level):
    rng = np.random.default_rng(8)
    old, new = rng.normal(size=(2, 9, 3))
    worse_mean, wider = [], []
    for swap in itertools.product([False, True], repeat=9):
        which = np.array(swap)[:, None]
        first, second = np.where(which, new, old), np.where(which, old, new)
        worse_mean.append(first.mean() - second.mean())
        wider.append(np.ptp(second.mean(axis=0)) - np.ptp(first.mean(axis=0)))
    *_, mean, _, spread = st.rerun_changes(old, new, level)
    for change, null in ((mean, worse_mean), (spread, wider)):  # of which the first is what was seen
        assert change.worsening == pytest.approx(null[0])
        assert change.p == pytest.approx(np.mean(np.array(null) >= null[0] - 1e-12))
        assert change.allowed == pytest.approx(np.quantile(null, 1 - level), abs=0.06)


def test_exchange_test_of_one_position_is_one_sided_mcnemar():
    old, new = answers(100, [0.6, 0.6], seed=3, runs=2)
    losses, gains = (int((one > other)[:, 0].sum()) for one, other in ((old, new), (new, old)))
    expected = stats.binomtest(losses, losses + gains, 0.5, alternative="greater").pvalue
    assert st.rerun_changes(old, new, 0.05)[0].p == pytest.approx(expected)
    drawn = st.rerun_changes(old * 3, new * 3, 0.05)[0]  # 0 and 3: no longer right or wrong
    assert drawn.p == pytest.approx(expected, abs=0.015)
