"""What ``docs/results.md`` says follows from the results that are kept, and from nothing else."""

import json
import random
import re
import shlex
import statistics

import numpy as np
import pytest
from scipy import stats

from benchmarks.experiments import bench as of
from benchmarks.experiments import measure, page, plan, store
from benchmarks.experiments.__main__ import main as run_command
from benchmarks.experiments.bench import Bench, open_bench
from benchmarks.experiments.figures import Difference, Figures, evaluations
from benchmarks.experiments.page import headline, results_page
from benchmarks.experiments.plan import KV, MDQA
from lpes_eval import Factors
from lpes_eval.errors import UserError

LAYERS = 4
SHIPPED = [1.0, 1.6, 1.2, 1.0]


@pytest.fixture
def made(tmp_path):
    """A bench on a made-up model that has shipped factors, without results."""
    Factors.from_list(SHIPPED).save(tmp_path / "model" / "factors.json")
    model = {"name": str(tmp_path / "model"), "sha256": "a" * 64, "layers": LAYERS}
    return Bench(tmp_path / "results", model, {**model, "sha256": "c" * 64})


def answers(questions, positions, share, seed):
    rng = random.Random(seed)
    return {str(p): [int(rng.random() < share) for _ in range(questions)] for p in positions}


def keep(made, name, scores, questions=None, **changed):
    """Keep a result of an experiment as measuring returns it."""
    questions = questions or list(range(len(next(iter(scores.values())))))
    result = {
        **made.wanted(name),
        "command": f"lm_eval for {name}",
        **store.pack(questions, scores),
        "seconds": 2.0,
        "cpu_seconds": 1.0,
        "date": "2026-01-02",
        "versions": {"torch": "0"},
        "hardware": {"processor": "abacus", "cores": 2, "threads": 1, "device": "cpu"},
        **changed,
    }
    made.keep(result)
    return result


def keep_search(made, name, points, **changed):
    found = {"curve": {"kind": "bezier", "points": points}, "num_layers": LAYERS}
    evaluations = [[0, 60, 0.5], [1, 60, 0.7], [1, 60, 0.6], [2, 60, 0.7], [2, 20, None]]
    extra = {"found": found, "evaluations": evaluations, "gradients": 0, "individuals": 30, "prompts": 900}
    return keep(made, name, {"0": [0]}, **(extra | {"fitness": 0.7, "to_beat": {"baseline": 0.4, "PI": 0.5}} | changed))


KV_POSITIONS = plan.POSITIONS[KV]
POINTS = [[0, 1.0], [1, 1.5], [2, 1.3], [3, 1.1]]


def cells(text, label, section=None):
    """The cells of the first row that begins with ``label``, behind ``section``."""
    text = text[text.index(section) :] if section else text
    row = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_accuracy_is_the_share_of_right_answers_and_differences_are_paired_by_question(made):
    plain = answers(40, KV_POSITIONS, 0.4, 1)
    lpes = answers(40, KV_POSITIONS, 0.8, 2)
    keep(made, "main/kv/plain", plain)
    keep(made, "main/kv/lpes", lpes)
    text = results_page(made)
    row = cells(text, "LPES", "### kv_retrieval")
    before, after = (100 * np.transpose([*scores.values()]) for scores in (plain, lpes))  # (questions, positions)
    at, worst_plain, by_question, gains = after.mean(0), before.mean(0).min(), after.mean(1), (after - before).mean(1)
    assert row[1] == "40"
    assert row[2:8] == [f"{share:.1f}" for share in at]
    assert row[8] == f"{at.mean():.1f} ± {stats.t.ppf(0.975, 39) * stats.sem(by_question):.1f}"
    assert row[9] == f"{at.min():.1f}"
    assert row[10].startswith(f"{gains.mean():+.1f} [")
    assert row[11].startswith(f"{at.min() - worst_plain:+.1f} [")
    low, high = map(float, re.findall(r"[-+][\d.]+", row[10])[1:])
    half = 1.96 * stats.sem(gains)
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)  # the page resamples; this is the closed form


def test_results_of_different_sizes_are_paired_on_the_questions_that_both_were_asked(made):
    keep(made, "main/kv/plain", {str(p): [1, 0, 0, 0] for p in KV_POSITIONS}, [7, 8, 9, 10])
    keep(made, "main/kv/lpes", {str(p): [1, 1] for p in KV_POSITIONS}, [9, 7])
    row = cells(results_page(made), "LPES", "### kv_retrieval")
    assert row[1] == "2"
    assert row[10].startswith("+50.0 [")  # 9: from wrong to right; 7: right before; 8 and 10 do not count


@pytest.mark.parametrize(
    ("right", "bar", "said"),
    [
        ({"plain": 40, "lpes": 60}, "At least 11.2 points", "**met** (+20.0 ["),
        ({"plain": 40, "lpes": 50}, "At least 11.2 points", "**not met**, 1.2 points short (+10.0 ["),
        # Three of a hundred differ: the standard error is 100 √(0.03 × 0.97 / 99) = 1.71, and twice that 3.43.
        ({"plain": 0, "pi": 50, "lpes": 53}, "Better than PI", "**not met**, 0.4 points short (+3.0 ["),
        ({"plain": 50, "moice": 90, "lpes": 60}, "Better than MoICE", "**not met**, LPES is worse by more than two"),
    ],
)
def test_whether_a_bar_is_met_is_computed(made, right, bar, said):
    for name, n in right.items():
        keep(made, f"main/kv/{name}", {str(p): [1] * n + [0] * (100 - n) for p in KV_POSITIONS})
    line = next(line for line in results_page(made).splitlines() if bar in line)
    assert said in line
    assert ("SE 1.7)" in line) == ("pi" in right)


def test_bars_are_judged_on_all_held_out_questions_where_they_were_asked(made):
    for at, n, share in (("main", 20, 0.45), ("all", 100, 0.9)):
        keep(made, f"{at}/kv/plain", answers(n, KV_POSITIONS, 0.4, 1))
        keep(made, f"{at}/kv/lpes", answers(n, KV_POSITIONS, share, 2))
    line = next(line for line in results_page(made).splitlines() if "At least 11.2 points" in line)
    assert "**met**" in line
    assert line.endswith("; 100 questions).")


def test_the_cost_of_a_search_counts_prompts_and_gradients_and_shows_those_measured_to_the_end():
    asked = [[0, 60, 0.5], [1, 20, None], [1, 60, 0.4], [2, 60, 0.7]]
    measured = evaluations({"evaluations": asked, "gradients": 40})  # between two generations
    assert measured.spent.tolist() == [60, 180, 280]
    assert measured.fitness.tolist() == [0.5, 0.4, 0.7]


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.2, 9, "better"), (-9, -0.2, "worse"), (-0.04, 9, "not shown to be better or worse")],
)
def test_better_is_said_of_an_interval_that_leaves_out_0_as_it_is_printed(low, high, said):
    assert Difference((low + high) / 2, low, high).verdict == said


def test_optimisers_are_compared_seed_by_seed(made):
    base, other = [], []
    genetic, cma_es = plan.SEARCHES[KV], plan.seeded("controls/cma-es")
    for means, searches, shares in ((base, genetic, (0.5, 0.6, 0.7)), (other, cma_es, (0.6, 0.8, 0.7))):
        for seed, share in enumerate(shares, 1):
            keep_search(made, searches[seed], POINTS)
            scores = answers(40, KV_POSITIONS, share, seed)
            keep(made, f"{searches[seed]}-held-out", scores)
            means.append(100 * statistics.fmean(map(statistics.fmean, scores.values())))
    row = cells(results_page(made), "CMA-ES from 1", "### Other seeds")
    assert row[1:6] == [*(f"{mean:.1f}" for mean in other), "–", "–"]
    assert row[6:8] == [f"{statistics.fmean(other):.1f}", f"{statistics.stdev(other):.1f}"]
    differences = [b - a for a, b in zip(base, other, strict=True)]
    middle, half = statistics.fmean(differences), 4.30265 * statistics.stdev(differences) / 3**0.5
    assert row[8] == f"{middle:+.1f} [{middle - half:+.1f}, {middle + half:+.1f}]"


def test_what_was_not_measured_or_is_of_another_model_is_said_and_is_no_number(made):
    keep(made, "main/kv/plain", answers(10, KV_POSITIONS, 0.4, 1))
    keep(made, "main/kv/ms_poe", answers(10, KV_POSITIONS, 1.0, 2), model={**made.model, "sha256": "b" * 64})
    text = results_page(made)
    for label, reason in (("LPES", "not run"), ("Ms-PoE", "the result that is there is of another model")):
        row = cells(text, label, "### kv_retrieval")
        assert row[-1].startswith(f"no result: {reason}")
        assert not any(character.isdigit() for character in "".join(row[1:]))
    assert "LPES above plain: not measured." in text
    assert f"1 of {len(made.listed)} experiments" in text


def test_results_with_factors_that_are_no_longer_found_are_not_mixed_in(made):
    name = "searches/kv-1-held-out"
    keep_search(made, "searches/kv-1", POINTS)
    keep(made, name, answers(10, KV_POSITIONS, 0.9, 2))
    assert made.shown(name)[0] is not None
    row = cells(results_page(made), "one factor a layer", "## Control points")
    assert row[-4:] == ["1 of 2", "30", "900", "70.0"]  # converged in, individuals, prompts, fitness
    keep_search(made, "searches/kv-1", [[0, 1.0], [1, 1.5], [2, 1.3], [3, 1.2]])
    assert made.shown(name)[0] is None
    assert "of another model, factors or settings" in made.listing([name])


def test_five_searches_have_the_mean_and_the_variance_of_their_means(made):
    keep(made, "main/kv/plain", answers(30, KV_POSITIONS, 0.4, 1))
    means = []
    for seed in plan.SEEDS:
        keep_search(made, f"searches/kv-{seed}", [[0, 1.0], [1, 1.5], [2, 1.3], [3, 1 + seed / 10]])
        scores = answers(30, KV_POSITIONS, 0.8, seed + 10)
        keep(made, f"searches/kv-{seed}-held-out", scores)
        keep(made, f"searches/kv-{seed}-pi", answers(30, KV_POSITIONS, 0.5, seed + 20))
        means.append(100 * statistics.fmean(map(statistics.fmean, scores.values())))
    text = results_page(made)
    assert f"mean {statistics.fmean(means):.2f}, variance {statistics.variance(means):.3f}" in text
    assert "beats plain and PI by more than two standard errors: **met** (5 of 5 that were measured)" in text
    assert text.count("beats both by more than two standard errors") == 5


def test_short_contexts_are_held_against_their_bar_at_each_length_and_together(made):
    pooled, longest = [], plan.SHORT_LENGTHS[MDQA][-1]
    for task, lengths in plan.SHORT_LENGTHS.items():
        for length in lengths:
            second = 0 if (task, length) == (MDQA, longest) else 1  # half of the questions
            scores = {str(p): [1] * 10 + [second] * 10 for p in plan.POSITIONS[task]}
            pooled += [value for values in scores.values() for value in values]
            keep(made, f"short/{plan.SHORT[task]}-{length}", scores)
    text = results_page(made)
    over = 100 - 50 / len(plan.SHORT_LENGTHS[MDQA])
    assert "The goal is **met** in the mean over these lengths (100.0), met at every length." in text
    assert f"The goal is **missed** in the mean over these lengths ({over:.1f}), missed at {longest} (50.0)" in text
    together = f"{len(pooled):,} answers of both tasks together, {100 * statistics.fmean(pooled):.1f} % are right."
    assert f"Of all {together}" in text


def test_perplexity_is_the_exponential_of_nats_a_token(made):
    alone = [[1.0, 1.4, 1.2, 1.3], [2.0, 2.2, 2.1, 2.3], [9.0, 9.1, 9.0, 9.2]]
    scaled = [[1.0, 1.3, 1.2, 1.3], [1.0, 1.1, 1.0, 1.3], [8.0, 8.1, 8.0, 8.2]]
    for name, nats in (("plain", alone), ("plain-lpes", scaled)):
        keep(made, f"perplexity/{name}", dict(zip(("512", "1024", "1536"), nats, strict=True)), trained_window=700)
    text = results_page(made)
    row = cells(text, "plain", "## Perplexity")
    for cell, nats in zip(row[1:4], alone, strict=True):
        middle, half = statistics.fmean(nats), 1.96 * statistics.stdev(nats) / 2
        expected = [2.718281828459045**x for x in (middle, middle - half, middle + half)]
        assert [float(x) for x in re.findall(r"[\d.]+", cell)] == pytest.approx(expected, rel=0.01)
    assert row[7] == "4"
    assert "- plain: layer factors help at 1024 and hurt at none; at 1536 both are worse than a guess" in text


def test_a_fresh_headline_is_held_against_the_kept_intervals(made, tmp_path):
    kept = Bench(tmp_path / "kept", made.model, made.second)
    scores = answers(100, KV_POSITIONS, 0.5, 1)
    for bench, of_lpes in ((kept, scores), (made, answers(100, KV_POSITIONS, 0.9, 2))):
        keep(bench, "main/kv/plain", scores)
        keep(bench, "main/kv/lpes", of_lpes)
    said = headline(made, kept).splitlines()
    assert next(line for line in said if line.startswith("plain:")).split(" is ")[1].startswith("within")
    assert next(line for line in said if line.startswith("LPES:")).split(" is ")[1].startswith("OUTSIDE")
    assert "PI, mean of LPES's factors: no result." in said


# -- where factors come from -------------------------------------------------------------------------------------------


FOUND = ("found", "s")


@pytest.mark.parametrize(
    ("source", "layers", "factors"),
    [
        (("shipped", KV), 4, SHIPPED),
        (("chosen", "s"), 4, [1.1] * 4),
        (("mean", ("shipped", KV)), 4, [1.2] * 4),
        (("half", "first", ("shipped", KV)), 4, [1.0, 1.6, 1.0, 1.0]),
        (("half", "last", ("shipped", KV)), 4, [1.0, 1.0, 1.2, 1.0]),
        (("half", "last", FOUND), 5, [1.0, 1.0, 1.4, 1.25, 1.1]),
        (FOUND, 4, [1.0, 1.5, 1.3, 1.1]),
        (FOUND, 7, [1.0, 1.25, 1.5, 1.4, 1.3, 1.2, 1.1]),
        (("moved", None, 0.3, "s"), 4, [1.3, 1.8, 1.6, 1.4]),
        (("moved", 1, -0.3, "s"), 4, [1.0, 1.2, 1.3, 1.1]),
        (("found", "free"), 2, [1.0, 1.5]),  # without a curve they stay with their layers
        (("found", "free"), 6, [1.0, 1.5, 1.3, 1.1, 1.0, 1.0]),
    ],
)
def test_sources_derive_factors_from_others(made, source, layers, factors):
    kind, points = ("free", [1.0, 1.5, 1.3, 1.1]) if source[-1] == "free" else ("linear", POINTS)
    found = {"found": {"curve": {"kind": kind, "points": points}, "num_layers": LAYERS}, "chosen": 1.1}
    model = {**made.model, "layers": layers}
    assert of.layer_factors(source, model, lambda name: found) == pytest.approx(factors)


@pytest.mark.parametrize(
    ("source", "factors", "argument"),
    [
        (None, None, {}),
        (("mean", ("shipped", KV)), [1.2] * 6, {"factors": 1.2}),
        (("shipped", KV), [1.0, 1.1] * 3, {"factors": "reference"}),
        (FOUND, [1.0, 1.1] * 3, {"factors": [1.0, 1.1] * 3}),
    ],
)
def test_factors_are_given_to_lm_eval_as_a_user_would_give_them(source, factors, argument):
    assert of.model_args(source, {"model": {"name": "reference"}, "factors": factors}) == argument
    elsewhere = of.model_args(source, {"model": {"name": "m"}, "factors": factors})
    assert elsewhere["pretrained"] == "m"
    assert elsewhere.get("factors") == ("m/factors.json" if source == ("shipped", KV) else argument.get("factors"))


# -- running -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, made):
    """Runs experiments with a stand-in for measuring: which ones were measured, and how many failed."""
    measured = []

    def measures(kind, row, model_args):
        measured.append(row["name"])
        if row["name"] == "curves/linear":
            raise UserError("out of paper")
        found = {"curve": {"kind": "bezier", "points": POINTS}, "num_layers": LAYERS}
        return {**row, "seconds": 1.0, "cpu_seconds": 1.0, "chosen": 1.1, "found": found}

    def carry_out(*names):
        measured.clear()
        failed = made.run(made.with_needs(names), 1)
        return list(measured), failed

    monkeypatch.setattr(measure, "in_its_own_process", measures)
    return carry_out


def test_nothing_is_measured_twice_and_what_is_needed_comes_first(made, run):
    assert run("searches/kv-1-held-out") == (["searches/kv-1", "searches/kv-1-held-out"], 0)
    both = ("searches/kv-1-held-out", "main/kv/uniform")
    assert run(*both) == (["main/kv/uniform-choice", "main/kv/uniform"], 0)
    made.results = store.tables(made.folder)  # as another process finds them
    assert run(*both) == ([], 0)


def test_a_failure_stops_what_needs_it_and_nothing_else_and_leaves_an_earlier_result(made, run, capsys):
    earlier = keep_search(made, "curves/linear", POINTS, settings={"flags": "--generations 2"})
    measured, failed = run("curves/linear-held-out", "curves/step-held-out")
    assert measured == ["curves/linear", "curves/step", "curves/step-held-out"]
    assert failed == 2
    said = capsys.readouterr().out
    assert "curves/linear: failed: out of paper" in said
    assert "curves/linear-held-out: failed: curves/linear has no result" in said
    assert made.results["search"]["curves/linear"] == json.loads(json.dumps(earlier))


def test_what_is_measured_is_a_whole_row_and_a_failed_process_is_a_reason(made, monkeypatch):
    row = {"name": "main/kv/plain", "settings": made.listed["main/kv/plain"].settings, "model": made.model}
    with pytest.raises(UserError, match=r"its process ended with status 1: .*no config.json in this folder"):
        measure.in_its_own_process("evaluate", {**row, "factors": None}, {"pretrained": made.model["name"]})
    monkeypatch.setitem(measure.KINDS, "evaluate", lambda row, model_args: {"chosen": 1})
    whole = measure.carry_out("evaluate", row, {})
    assert whole.keys() == {*row, "chosen", "seconds", "cpu_seconds", "date", "versions", "hardware"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--jobs", "0"], "--jobs: expected at least 1"),
        (["--results", __file__], f"--results {__file__}: is a file"),
        (["--only", "main/xyz"], "--only main/xyz"),
    ],
)
def test_a_wrong_flag_is_named_before_anything_is_measured(flags, words, capsys):
    try:
        status = run_command([*flags, "--list"])
    except SystemExit as refused:
        status = refused.code
    assert status == 2
    assert words in capsys.readouterr().err


def test_the_headline_is_six_evaluations_and_every_search_flag_is_one_of_the_command(made, capsys):
    from search import config

    assert run_command(["--preset", "headline", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    for experiment in made.listed.values():
        if experiment.kind == "search":
            assert config.parse(shlex.split(experiment.settings["flags"])).held_out_examples == 0


# -- what is kept, and the pages made of it ----------------------------------------------------------------------------


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """What the repository keeps, wherever the command is started."""
    monkeypatch.chdir(tmp_path)
    return open_bench()


def test_every_result_that_is_kept_is_whole_and_of_today_s_plan(kept):
    there = [result for table in kept.results.values() for result in table.values()]
    assert len(there) > 160
    for result in there:
        assert kept.shown(result["name"]) == (result, "")
        assert {"command", "date", "versions", "hardware", "seconds", "cpu_seconds"} <= set(result)
        if "scores" in result:
            scores = store.scores(result)
            assert scores.index.is_unique
            assert not scores.isna().to_numpy().any()


def test_the_documents_say_what_the_kept_results_give(kept, capsys):
    assert page.main(["--check"]) == 0, capsys.readouterr().out


def test_a_document_that_says_another_number_is_found(kept, tmp_path):
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text("With it <!-- numbers: ms_poe -->0 %<!-- /numbers -->.\n")
    texts = page.documents(kept, tmp_path / "docs/results.md", tmp_path)
    right = "".join(kept.results["evaluate"]["main/kv/ms_poe"]["scores"].values())
    percent = 100 * right.count("1") / len(right)
    assert f"`skip=2` has {percent:.1f} % and" in texts[readme]
    assert texts[readme].count("\n") == 1
    readme.write_text("<!-- numbers: nonsense --><!-- /numbers -->")
    with pytest.raises(UserError, match="numbers: nonsense"):
        page.documents(kept, tmp_path / "docs/results.md", tmp_path)


def test_what_the_words_around_the_numbers_conclude(kept):
    """The templates compute what is better; these conclusions they take for granted."""
    figures = Figures(kept)
    # "The kind of curve matters most" and "The start matters"
    assert figures.over_ga("genetic algorithm from 1, Bézier curve").verdict == "worse"
    assert figures.score("controls/start-1.5-held-out").mean < figures.score("main/kv/plain").mean / 2
    uniform = figures.gain("main/mdqa/uniform", "main/mdqa/lpes").mean  # "nearly as well"
    assert uniform.low < 0 < uniform.high
