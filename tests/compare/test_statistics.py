"""Statistics by position, against closed forms, second implementations, enumeration and simulation."""

import itertools
import math
import statistics as stdlib

import numpy as np
import pytest
from scipy import stats

from lpes_eval.compare import statistics as st


def answers(questions, accuracies, ability=1.0, seed=0, runs=1):
    """Right-or-wrong answers of one model, correlated over positions through each question's difficulty."""
    rng = np.random.default_rng(seed)
    difficulty = rng.normal(size=(questions, 1)) * ability
    logit = np.log(np.array(accuracies) / (1 - np.array(accuracies)))
    chance = 1 / (1 + np.exp(-(logit + difficulty)))
    drawn = [(rng.random(chance.shape) < chance).astype(float) for _ in range(runs)]
    return drawn[0] if runs == 1 else drawn


# --- standard errors ---


def test_standard_error_of_a_position_is_the_textbook_one():
    scores = answers(40, [0.7, 0.4])
    summary = st.summarize(scores)
    for column, estimate in enumerate(summary.means):
        line = list(scores[:, column])
        assert estimate.value == pytest.approx(stdlib.mean(line))
        assert estimate.stderr == pytest.approx(stdlib.stdev(line) / math.sqrt(40))


def test_standard_error_of_the_mean_is_that_of_the_questions_own_averages():
    scores = answers(50, [0.9, 0.5, 0.7])
    by_question = [stdlib.mean(row) for row in scores.tolist()]
    summary = st.summarize(scores)
    assert summary.mean.value == pytest.approx(stdlib.mean(by_question))
    assert summary.mean.stderr == pytest.approx(stdlib.stdev(by_question) / math.sqrt(50))


def test_asking_a_question_again_at_other_positions_adds_no_certainty_if_the_answer_is_the_same():
    once = answers(60, [0.6])[:, :1]
    five_times = np.repeat(once, 5, axis=1)
    assert st.mean_over_positions(five_times).stderr == pytest.approx(st.mean_over_positions(once).stderr)


def test_covariance_with_missing_questions_equals_a_sum_written_out():
    scores = answers(12, [0.6, 0.5, 0.8])
    scores[[0, 3], 0] = np.nan
    scores[[3, 7, 8], 2] = np.nan
    expected = np.zeros((3, 3))
    for p, q in itertools.product(range(3), repeat=2):
        n_p, n_q = (sum(not math.isnan(s) for s in scores[:, c]) for c in (p, q))
        mean_p, mean_q = (stdlib.mean(s for s in scores[:, c] if not math.isnan(s)) for c in (p, q))
        for row in scores:
            if not math.isnan(row[p]) and not math.isnan(row[q]):
                expected[p, q] += (row[p] - mean_p) * (row[q] - mean_q) / math.sqrt(n_p * (n_p - 1) * n_q * (n_q - 1))
    assert st.position_covariance(scores) == pytest.approx(expected)
    assert st.mean_over_positions(scores).stderr == pytest.approx(math.sqrt(expected.sum()) / 3)


def test_a_position_counts_the_same_however_many_questions_it_has():
    scores = np.array([[1.0, 0.0], [1.0, np.nan], [1.0, np.nan]])
    assert st.mean_over_positions(scores).value == pytest.approx(0.5)


def test_worst_and_spread_far_apart_have_the_errors_of_the_positions_they_come_from():
    scores = answers(400, [0.95, 0.8, 0.3], seed=3)
    summary = st.summarize(scores, [0, 50, 100], replicates=4000)
    covariance = np.cov(scores.T) / 400
    assert summary.worst_position == 100
    assert summary.best_position == 0
    assert summary.worst.value == pytest.approx(scores[:, 2].mean())
    assert summary.worst.stderr == pytest.approx(math.sqrt(covariance[2, 2]), rel=0.04)
    contrast = math.sqrt(covariance[0, 0] + covariance[2, 2] - 2 * covariance[0, 2])
    assert summary.spread.value == pytest.approx(scores[:, 0].mean() - scores[:, 2].mean())
    assert summary.spread.stderr == pytest.approx(contrast, rel=0.04)


def test_bootstrap_agrees_with_the_formula_for_few_questions_too():
    scores = np.array([[10.0, 1.0], [12.0, 2.0], [11.0, 4.0], [14.0, 3.0]])
    summary = st.summarize(scores, replicates=40_000)
    assert summary.worst.stderr == pytest.approx(summary.means[1].stderr, rel=0.02)


def test_where_lower_is_better_the_worst_position_is_the_highest_and_the_spread_stays_positive():
    perplexity = np.array([[3.0, 9.0], [5.0, 7.0], [4.0, 8.0]])
    summary = st.summarize(perplexity, ["near", "far"], higher_is_better=False)
    assert (summary.worst_position, summary.best_position) == ("far", "near")
    assert summary.worst.value == 8.0
    assert summary.spread.value == 4.0


def test_bootstrap_error_of_the_worst_position_matches_the_scatter_of_fresh_samples():
    accuracies = [0.9, 0.75, 0.65, 0.8]
    worsts, errors = [], []
    for seed in range(200):
        summary = st.summarize(answers(300, accuracies, seed=seed), replicates=200)
        worsts.append(summary.worst.value)
        errors.append(summary.worst.stderr)
    assert stdlib.mean(errors) == pytest.approx(stdlib.stdev(worsts), rel=0.15)


def test_one_question_has_no_standard_error():
    summary = st.summarize([[1.0, 0.0]])
    assert (summary.mean.value, summary.spread.value) == (0.5, 1.0)
    assert all(math.isnan(e.stderr) for e in (*summary.means, summary.mean, summary.worst, summary.spread))


def test_equal_scores_everywhere_have_standard_error_zero():
    summary = st.summarize(np.ones((20, 3)))
    assert all(e.stderr == 0 for e in (*summary.means, summary.mean, summary.worst, summary.spread))
    assert summary.spread.value == 0


def test_a_single_position_is_its_own_worst_and_has_no_spread():
    scores = answers(30, [0.6, 0.5])[:, :1]
    summary = st.summarize(scores)
    assert summary.worst == summary.mean == summary.means[0]
    assert summary.spread == st.Estimate(0.0, 0.0)


def test_same_scores_give_the_same_numbers_in_every_call():
    scores = answers(50, [0.6, 0.5, 0.9])
    assert st.summarize(scores) == st.summarize(scores.copy())


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (np.empty((0, 3)), "at least one"),
        (np.ones(3), "shape"),
        ([[1.0, np.nan], [0.0, np.nan]], "position 1"),
        ([[1.0, np.inf]], "finite"),
    ],
)
def test_scores_that_have_no_summary_are_refused(scores, message):
    with pytest.raises(ValueError, match=message):
        st.summarize(scores)


def test_position_summary_lines_up_questions_whatever_their_order():
    scores = {0: {7: 1.0, 8: 0.0, 9: 1.0}, 50: {9: 0.0, 7: 1.0}}
    summary = st.position_summary(scores)
    assert summary.positions == (0, 50)
    assert summary.questions == 3
    assert [e.value for e in summary.means] == pytest.approx([2 / 3, 0.5])
    assert summary == st.summarize([[1, 1], [0, np.nan], [1, 0]], [0, 50])


def test_summary_takes_the_keys_that_lm_eval_prints():
    keyed = st.summarize(answers(20, [0.5, 0.9])).as_results("acc")
    assert set(keyed) == {
        *("acc,none", "acc_stderr,none", "acc_worst,none", "acc_worst_stderr,none"),
        *("acc_spread,none", "acc_spread_stderr,none"),
    }


# --- two models ---


@pytest.mark.parametrize(("losses", "gains"), [(0, 0), (0, 1), (3, 0), (5, 5), (2, 9), (40, 60), (700, 600)])
def test_mcnemar_is_the_exact_binomial_test(losses, gains):
    expected = stats.binomtest(losses, losses + gains, 0.5).pvalue if losses + gains else 1.0
    assert st.mcnemar(losses, gains) == pytest.approx(expected)


def test_interval_of_paired_proportions_covers_where_the_plain_wald_interval_does_not():
    """Few discordant pairs, 60 questions: 2 % lost and 4 % gained."""
    rng = np.random.default_rng(5)
    adjusted = wald = 0
    for _ in range(2000):
        _, losses, gains = rng.multinomial(60, [0.94, 0.02, 0.04])
        low, high = st.paired_proportions_interval(losses, gains, 60)
        adjusted += low <= 0.02 <= high
        d = (gains - losses) / 60
        half = 1.96 * math.sqrt(((gains + losses) / 60 - d**2) / 60)
        wald += d - half <= 0.02 <= d + half
    assert adjusted / 2000 >= 0.945
    assert wald / 2000 < 0.92


def test_interval_of_paired_proportions_is_the_published_formula():
    """n = 100, 10 lost and 20 gained, one added to each of the two: 21/102 and 11/102."""
    centre, spread = 10 / 102, math.sqrt((32 / 102 - (10 / 102) ** 2) / 102)
    assert st.paired_proportions_interval(10, 20, 100) == pytest.approx(
        (centre - 1.959964 * spread, centre + 1.959964 * spread), abs=1e-6
    )


def test_paired_differences_count_each_question_against_itself():
    a, b = answers(80, [0.6, 0.7], seed=1, runs=2)
    found = st.compare_paired(a, b)
    for column, difference in enumerate(found.positions):
        losses = int(((a == 1) & (b == 0))[:, column].sum())
        gains = int(((a == 0) & (b == 1))[:, column].sum())
        assert difference.difference == pytest.approx((gains - losses) / 80)
        assert difference.p == pytest.approx(stats.binomtest(losses, losses + gains, 0.5).pvalue)
        assert difference.method == "mcnemar"
    assert found.mean.difference == pytest.approx(b.mean() - a.mean())
    assert found.worst.difference == pytest.approx(b.mean(axis=0).min() - a.mean(axis=0).min())
    assert found.spread.difference == pytest.approx(np.ptp(b.mean(axis=0)) - np.ptp(a.mean(axis=0)))


def test_exchange_and_bootstrap_agree_with_the_paired_t_test_on_many_smooth_scores():
    rng = np.random.default_rng(2)
    a = rng.normal(size=(400, 1))
    b = a + rng.normal(0.1, 1.0, size=(400, 1))
    found = st.compare_paired(a, b, replicates=40_000).positions[0]
    expected = stats.ttest_rel(b[:, 0], a[:, 0])
    interval = expected.confidence_interval(0.95)
    assert found.method == "exchange"
    assert found.p == pytest.approx(expected.pvalue, abs=0.01)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=0.01)


def exchanges(a, b):
    """The share of all exchanges of two models whose averages differ as much as theirs, written out."""
    signs = np.array(list(itertools.product([1, -1], repeat=len(a))))
    sums = np.abs(signs @ (b - a).sum(axis=1))
    return np.mean(sums >= sums[0] - 1e-9)


def test_five_questions_that_all_got_better_are_no_certainty():
    """Exchanged question by question that happens once in 2^4, in one direction or the other."""
    found = st.compare_paired(np.zeros((5, 4)), np.ones((5, 4)))
    assert found.mean.p == 2**-4
    assert found.worst.p == 2**-4
    assert {difference.p for difference in found.positions} == {2**-4}


@pytest.mark.parametrize("questions", [2, 3, 7, 12])
def test_p_of_the_mean_of_few_questions_is_the_share_of_all_exchanges(questions):
    for seed in range(5):
        a, b = answers(questions, [0.4, 0.6, 0.5], seed=seed, runs=2)
        found = st.compare_paired(a, b)
        assert found.mean.method == "exchange"
        assert found.mean.p == pytest.approx(exchanges(a, b))
        smooth = st.compare_paired(a + b / 3, b - a / 7)
        assert smooth.positions[1].p == pytest.approx(exchanges((a + b / 3)[:, 1:2], (b - a / 7)[:, 1:2]))


def test_exchanges_drawn_at_random_give_the_p_of_all_of_them():
    a, b = answers(17, [0.4, 0.6, 0.5], ability=0.2, seed=21, runs=2)
    b += np.arange(17)[:, None] / 100 - 0.2  # every question differs: more than are counted out
    assert st.compare_paired(a, b, replicates=40_000).mean.p == pytest.approx(exchanges(a, b), abs=0.01)
    assert 0.01 < exchanges(a, b) < 0.9


def test_p_of_worst_and_spread_is_never_below_what_the_questions_that_differ_can_show():
    for seed in range(30):
        a, b = answers(6, [0.2, 0.5, 0.9], seed=seed)[:, :3], answers(6, [0.9, 0.5, 0.1], seed=seed + 99)
        differ = int((a != b).any(axis=1).sum())
        found = st.compare_paired(a, b)
        assert min(found.worst.p, found.spread.p) >= min(1.0, 2.0 ** (1 - differ))


def test_equally_good_models_of_few_questions_differ_no_more_often_than_p_says():
    """1,000 pairs of 8 questions: at 0.1, 100 expected at most, and 123 would be beyond chance (p = 0.01)."""
    pairs = (answers(8, [0.7, 0.6, 0.8], seed=seed, runs=2) for seed in range(1000))
    assert sum(st.compare_paired(a, b, replicates=50).mean.p <= 0.1 for a, b in pairs) <= 123


def test_interval_of_the_mean_treats_a_question_as_one_cluster():
    """Five positions with the same answers say no more than one."""
    a, b = (np.repeat(run[:, :1], 5, axis=1) for run in answers(200, [0.6], seed=4, runs=2))
    once, five = st.compare_paired(a[:, :1] * 2, b[:, :1] * 2).mean, st.compare_paired(a * 2, b * 2).mean
    assert (five.low, five.high) == pytest.approx((once.low, once.high))


def test_intervals_cover_the_truth_as_often_as_they_say():
    accuracies_a, accuracies_b = [0.9, 0.6, 0.75], [0.9, 0.75, 0.8]
    rng = np.random.default_rng(0)
    logit_a, logit_b = (np.log(np.array(x) / (1 - np.array(x))) for x in (accuracies_a, accuracies_b))

    def draw(questions):
        z = rng.normal(size=(questions, 1))
        chances = (1 / (1 + np.exp(-(logit + z))) for logit in (logit_a, logit_b))
        return [(rng.random(chance.shape) < chance).astype(float) for chance in chances]

    a, b = (run.mean(axis=0) for run in draw(400_000))
    truth = {"mean": (b - a).mean(), "worst": b.min() - a.min(), "spread": np.ptp(b) - np.ptp(a)}
    covered = dict.fromkeys(truth, 0)
    for seed in range(250):
        found = st.compare_paired(*draw(150), replicates=300, seed=seed)
        for name, value in truth.items():
            covered[name] += getattr(found, name).low <= value <= getattr(found, name).high
    assert all(share / 250 >= 0.91 for share in covered.values()), covered
    assert covered["mean"] / 250 <= 0.985


def test_a_score_counts_only_where_both_have_one():
    a = np.array([[1.0, 1.0], [0.0, np.nan], [1.0, 0.0]])
    b = np.array([[1.0, np.nan], [1.0, 1.0], [1.0, 1.0]])
    found = st.compare_paired(a, b)
    assert (found.positions[1].a, found.positions[1].b) == (0.0, 1.0)
    assert found.positions[0].difference == pytest.approx(1 / 3)


def test_one_question_gives_no_interval_for_what_is_bootstrapped():
    found = st.compare_paired([[1.0, 0.5]], [[0.5, 0.5]])
    assert found.mean.difference == -0.25
    assert math.isnan(found.mean.p)
    assert math.isnan(found.mean.low)


def test_equal_runs_differ_by_nothing():
    a = answers(30, [0.5, 0.9])
    found = st.compare_paired(a, a)
    for difference in (*found.positions, found.mean, found.worst, found.spread):
        assert (difference.difference, difference.p) == (0.0, 1.0)
        assert difference.low <= 0 <= difference.high


def test_holm_gives_the_values_of_r():
    """p.adjust(c(0.01, 0.02, 0.03, 0.04, 0.05), "holm") of R."""
    assert st.holm([0.04, 0.01, 0.03, 0.05, 0.02]) == pytest.approx([0.09, 0.05, 0.09, 0.09, 0.08])


def test_holm_does_not_count_what_was_not_tested():
    adjusted = st.holm([0.02, math.nan, 0.5])
    assert adjusted[0] == pytest.approx(0.04)
    assert math.isnan(adjusted[1])


# --- two runs of one model ---


def spread_of(run):
    return np.ptp(run.mean(axis=0))


@pytest.mark.parametrize("level", [0.3, 0.05])
def test_exchange_test_agrees_with_all_exchanges_written_out(level):
    rng = np.random.default_rng(8)
    old, new = rng.normal(size=(2, 9, 3))
    worse_mean, wider = [], []
    for swap in itertools.product([False, True], repeat=9):
        which = np.array(swap)[:, None]
        first, second = np.where(which, new, old), np.where(which, old, new)
        worse_mean.append(first.mean() - second.mean())
        wider.append(spread_of(second) - spread_of(first))
    found = st.rerun_changes(old, new, level)
    for change, null, seen in (
        (found.mean, worse_mean, old.mean() - new.mean()),
        (found.spread, wider, spread_of(new) - spread_of(old)),
    ):
        assert change.worsening == pytest.approx(seen)
        assert change.p == pytest.approx(np.mean(np.array(null) >= seen - 1e-12), abs=0.012)
        assert change.allowed == pytest.approx(np.quantile(null, 1 - level), abs=0.06)


def test_exchange_test_of_one_position_is_one_sided_mcnemar():
    old, new = answers(100, [0.6, 0.6], seed=3, runs=2)
    losses, gains = int(((old > new)[:, 0]).sum()), int(((new > old)[:, 0]).sum())
    expected = stats.binomtest(losses, losses + gains, 0.5, alternative="greater").pvalue
    exact = st.rerun_changes(old, new, 0.05).positions[0]
    assert exact.method == "mcnemar"
    assert exact.p == pytest.approx(expected)
    drawn = st.rerun_changes(old * 3, new * 3, 0.05).positions[0]  # 0 and 3: no longer right or wrong
    assert drawn.method == "exchange"
    assert drawn.p == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("loss", range(0, 31, 3))
def test_a_change_is_significant_exactly_where_it_exceeds_what_is_allowed(loss, scale):
    old, new = np.zeros((100, 2)), np.zeros((100, 2))
    old[:loss] = 1  # lost at both positions
    new[60:70] = 1  # ten gained
    found = st.rerun_changes(old * scale, new * scale, 0.01)
    for change in (*found.positions, found.mean, found.spread):
        assert (change.p < 0.01) == (change.worsening > change.allowed + 1e-12)


def test_where_lower_is_better_a_rise_is_the_worsening():
    rng = np.random.default_rng(0)
    old = rng.normal(5, 1, size=(50, 2))
    found = st.rerun_changes(old, old + rng.normal(0.5, 0.5, size=(50, 2)), 0.01, higher_is_better=False)
    assert found.mean.worsening > found.mean.allowed
    assert all(change.p < 0.01 for change in found.positions)


def test_an_identical_rerun_is_never_worse():
    old = answers(40, [0.5, 0.8])
    found = st.rerun_changes(old, old, 0.5)
    assert all(c.p == 1.0 and c.worsening == 0 for c in (*found.positions, found.mean, found.spread))


def test_without_samples_the_difference_is_held_against_both_standard_errors():
    change = st.unpaired_change(st.Estimate(0.80, 0.03), st.Estimate(0.70, 0.04), 0.05, worse_when_higher=False)
    assert change.allowed == pytest.approx(0.05 * stats.norm.isf(0.05))
    assert change.p == pytest.approx(stats.norm.sf(2.0))
    assert st.unpaired_change(st.Estimate(0.1, 0.0), st.Estimate(0.2, math.nan), 0.05, worse_when_higher=True).p != 0


@pytest.mark.parametrize("level", [0.01, 0.00125])
@pytest.mark.parametrize("questions", [2, 3, 5, 10, 20, 50])
def test_without_samples_false_alarms_are_rare_for_few_questions_too(questions, level):
    """All outcomes of two runs that answer each question right with probability p, one independent of the other."""
    right = np.arange(questions + 1) / questions
    errors = np.sqrt(right * (1 - right) / (questions - 1))
    estimates = [st.Estimate(*pair) for pair in zip(right, errors, strict=True)]
    p_values = [
        [st.unpaired_change(a, b, level, worse_when_higher=False, questions=questions).p for b in estimates]
        for a in estimates
    ]
    alarm = np.array(p_values) < level
    for share in np.linspace(0.1, 0.9, 9):
        chance = stats.binom.pmf(np.arange(questions + 1), questions, share)
        assert chance @ alarm @ chance <= 1.1 * level


def test_without_samples_what_passes_is_what_is_allowed():
    old = st.Estimate(0.9, 0.05)
    change = st.unpaired_change(old, st.Estimate(0.5, 0.1), 0.01, worse_when_higher=False, questions=20)
    just = st.Estimate(0.9 - change.allowed, 0.1)
    assert st.unpaired_change(old, just, 0.01, worse_when_higher=False, questions=20).p == pytest.approx(0.01)
    few = st.unpaired_change(st.Estimate(1.0, 0.0), st.Estimate(0.0, 0.0), 0.01, worse_when_higher=False, questions=3)
    assert (few.p, few.allowed) == (0.125, math.inf)
    one = st.unpaired_change(old, old, 0.01, worse_when_higher=False, questions=1)
    assert one.method == "none"


def test_errors_bounded_without_samples_are_never_below_the_clustered_ones():
    for seed in range(20):
        scores = answers(100, [0.9, 0.6, 0.7], ability=2.0, seed=seed)
        summary = st.summarize(scores)
        bounded = st.from_reported(summary.means)
        assert bounded.mean.value == pytest.approx(summary.mean.value)
        assert bounded.mean.stderr >= summary.mean.stderr
        assert bounded.spread.value == pytest.approx(summary.spread.value)
        assert bounded.spread.stderr >= 0.95 * summary.spread.stderr
