"""Numbers that README and docs quote by hand, held against the results that they come from."""

import json
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest
import yaml
from scipy import stats

from benchmarks.experiments import plan, store
from benchmarks.experiments.page import gain, scores_of
from lpes_eval import files
from lpes_eval.compare import statistics

ROOT = Path(__file__).resolve().parents[1]
RESULTS = store.Results(ROOT / "benchmarks/results/reference")


def result(name):
    found = RESULTS.load(name)
    assert found is not None, name
    return found


def text(name):
    """A document's words, one space between."""
    return " ".join((ROOT / name).read_text().split())


def by_position(name):
    """Percent right at each position."""
    return 100 * scores_of(result(name)).mean(0)


def mean(name):
    return 100 * float(scores_of(result(name)).mean())


def gained(over, of):
    found = gain(result(over), result(of))
    return found.mean, found.low, found.high


def test_the_gains_that_readme_quotes():
    records, articles = gained("all/kv/plain", "all/kv/lpes"), gained("all/mdqa/plain", "all/mdqa/lpes")
    readme = text("README.md")
    for sentence in [
        "+{:.1f} points on records (95 % interval {:.1f} to {:.1f})".format(*records),
        "+{:.1f} on articles ({:.1f} to {:.1f})".format(*articles),
    ]:
        assert sentence in readme


LENGTHS_QUOTED = ("kv-25", "kv-40", "kv-44", "kv-60", "mdqa-5", "mdqa-8", "mdqa-12")


def at_length(length, factors):
    """What factors gain at another length, and the last position in percent, plain and with them."""
    plain, scaled = f"transfer/{length}-plain", f"transfer/{length}-{factors}"
    gains = [number + 0.0 if abs(number) >= 0.05 else 0.0 for number in gained(plain, scaled)]  # no -0.0
    return gains, (by_position(plain)[-1], by_position(scaled)[-1])


def test_the_other_lengths_that_readme_quotes():
    readme = text("README.md")
    shipped = {n: at_length(n, "shipped")[0] for n in LENGTHS_QUOTED}
    for sentence in [
        "gain {:.1f} points at 44 pairs ({:.1f} to {:.1f})".format(*shipped["kv-44"]),
        "{:.1f} at 60 ({:.1f} to {:.1f})".format(*shipped["kv-60"]),
        "{:.1f} at 12 articles ({:.1f} to {:.1f})".format(*shipped["mdqa-12"]),
        "{:+.1f} at 25 pairs ({:.1f} to {:.1f})".format(*shipped["kv-25"]),
        "{:+.1f} at 40 ({:.1f} to {:.1f})".format(*shipped["kv-40"]),
        "{:+.1f} at 5 articles ({:.1f} to {:.1f})".format(*shipped["mdqa-5"]),
        "{:+.1f} at 8 ({:.1f} to {:.1f})".format(*shipped["mdqa-8"]),
        "found on articles alone gain {:.1f} points at 12 ({:.1f} to {:.1f})".format(*at_length("mdqa-12", "lpes")[0]),
        "At 75 pairs {:.0f} % are right without factors and {:.0f} % with them.".format(
            mean("transfer/kv-75-plain"), mean("transfer/kv-75-shipped")
        ),
    ]:
        assert sentence in readme
    for length in ("kv-44", "kv-60", "mdqa-12"):
        assert shipped[length][1] > 0, length
    for length in ("kv-25", "kv-40", "mdqa-5", "mdqa-8"):
        assert abs(shipped[length][0]) < 3.5, length
    right = [mean(f"transfer/{n}-plain") for n in ("kv-25", "kv-40", "mdqa-5", "mdqa-8")]
    assert f"where the plain model has {min(right):.0f} to {max(right):.0f} %" in readme
    last = [
        "{:.0f} % to {:.0f} % at {}".format(*at_length(n, "shipped")[1], n.removeprefix("kv-"))
        for n in ("kv-25", "kv-40", "kv-44")
    ]
    assert f"At the last position of records they lose: {last[0]}, {last[1]}, {last[2]} pairs" in readme


def test_the_other_lengths_that_the_docs_quote():
    docs = text("docs/search.md")
    for sentence in [
        f"At 25 pairs, where the plain model has {mean('transfer/kv-25-plain'):.1f} % and little to gain",
        "the factors of search 1, found at 50 pairs, change the mean by {:.1f} points ({:.1f} to {:.1f})".format(
            *at_length("kv-25", "lpes")[0]
        ),
        "the shipped ones, of a larger search, by {:.1f} ({:.1f} to {:.1f})".format(*at_length("kv-25", "shipped")[0]),
        "At 60 pairs, where the plain model has {:.1f} %, they gain {:.1f} and {:.1f} points".format(
            mean("transfer/kv-60-plain"), *(at_length("kv-60", which)[0][0] for which in ("lpes", "shipped"))
        ),
    ]:
        assert sentence in docs


def test_the_other_methods_that_readme_quotes():
    said = []
    for task in ("kv", "mdqa"):
        for method in ("attention_buckets", "moice"):
            over = gain(result(f"main/{task}/lpes"), result(f"main/{task}/{method}"))
            assert abs(over.mean) < 2 * over.error
            said.append(f"{over.mean:+.1f}")
    assert "on records {} and {} points, on articles {} and {}; 16 questions".format(*said) in text("README.md")
    peers = text("docs/peers.md")
    first_alone, both = ([mean(f"main/{t}/{m}") for t in ("kv", "mdqa")] for m in ("ms_poe-skip-1", "ms_poe"))
    said = "on 50 questions {:.1f} % on KV and {:.1f} % on MDQA, where `skip=2` has {:.1f} % and {:.1f} %."
    assert said.format(*first_alone, *both) in peers


def test_the_positions_that_readme_quotes():
    readme = text("README.md")
    kv, kv_lpes = by_position("main/kv/plain"), by_position("main/kv/lpes")
    mdqa, mdqa_lpes = by_position("main/mdqa/plain"), by_position("main/mdqa/lpes")
    first = f"the first position (records {kv[0]:.0f} % to {kv_lpes[0]:.0f} %,"
    assert f"{first} articles {mdqa[0]:.0f} % to {mdqa_lpes[0]:.0f} %, of 100 questions)" in readme
    assert f"rises on articles ({mdqa[-1]:.0f} % to {mdqa_lpes[-1]:.0f} %)" in readme
    assert f"but not on records ({kv[-1]:.0f} % to {kv_lpes[-1]:.0f} %)" in readme
    assert kv_lpes[-1] < kv[-1]
    assert (mdqa_lpes > mdqa).all()


def test_what_one_factor_for_all_layers_does_as_readme_and_docs_say():
    readme, docs = text("README.md"), text("docs/search.md")
    best = {task: result(f"main/{task}/uniform")["factors"][0] for task in ("kv", "mdqa")}
    chosen_on = {task: dict(result(f"main/{task}/uniform-choice")["fitness"]) for task in best}
    right = mean("main/mdqa/uniform"), mean("main/mdqa/lpes")
    over = gained("main/mdqa/uniform", "main/mdqa/lpes")
    assert best["kv"] == 1
    for sentence in [
        f"with {best['mdqa']:g}, the best one on search examples, "
        + "{:.1f} % are right, with layer factors {:.1f} % ".format(*right)
        + "(difference {:+.1f}, {:.1f} to {:.1f}, 100 questions)".format(*over),
        f"none of the {len(chosen_on['kv']) - 1} that were tried",
    ]:
        assert sentence in readme
    kv = {factor: f"{100 * value:.0f} %" for factor, value in chosen_on["kv"].items()}
    most = 100 * max(value for factor, value in chosen_on["kv"].items() if factor >= 1.15)
    assert f"the plain model has {kv[1.0]} (weighted by λ), 1.02 has {kv[1.02]}, 1.05 {kv[1.05]}" in docs
    assert f"and 1.15 or more at most {most:.0f} %" in docs
    assert f"(On articles {best['mdqa']:g} is the best.)" in docs


@pytest.mark.parametrize("task", ["kv_retrieval", "mdqa_pos"])
@pytest.mark.parametrize(("method", "block"), [("plain", 0), ("lpes", 1)])
def test_the_tables_that_readme_prints(task, method, block):
    """They are of the first twenty held-out questions, as ``--limit 20`` takes them."""
    _, positions, scores = store.unpack(result(f"all/{task.partition('_')[0]}/{method}"))
    printed = printed_in_readme(block)
    shown = re.findall(rf"^\| - {task}\w*_pos_(\d+) *\|.*?[↑↓] *\| *([\d.]+)\|", printed, re.M)
    group = re.search(rf"^\|{task} .*?[↑↓] *\| *([\d.]+)\|.*?\|([\d.]+)\|$", printed, re.M)
    assert [float(position) for position, _ in shown] == [float(position) for position in positions]
    assert [float(value) for _, value in shown] == pytest.approx(list(scores[:20].mean(0)), abs=5e-5)
    estimate = statistics.mean_over_positions(scores[:20])
    assert [float(group[1]), float(group[2])] == pytest.approx([estimate.value, estimate.stderr], abs=5e-5)


@pytest.mark.parametrize("task", ["kv_retrieval", "mdqa_pos"])
def test_the_comparison_that_readme_prints(task):
    short = task.partition("_")[0]
    a, b = (scores_of(result(f"all/{short}/{method}"))[:20] for method in ("plain", "lpes"))
    section = next(part for part in printed_in_readme(2).split("\n\n") if part.startswith(task))
    rows = [re.split(r"  +", line) for line in section.splitlines()[3:]]
    compared = statistics.compare_paired(a, b)
    expected = [*compared.positions, compared.mean, compared.worst, compared.spread]
    assert len(rows) == len(expected)
    for (label, was, now, difference, interval, *_), true in zip(rows, expected, strict=True):
        assert f"{true.difference:+.4f}" == difference, label
        assert f"{true.low:+.4f} to {true.high:+.4f}" == interval, label
        assert float(now) - float(was) == pytest.approx(true.difference, abs=1e-4)


def printed_in_readme(block):
    return re.findall(r"^```text\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)[block]


def seeds(name):
    """The searches that one is made of; the first seed's result has the bare name."""
    return [plan.seeded(name, seed) for seed in plan.SEEDED.get(name, (1,))]


GA = "genetic algorithm from 1"
SEEDS = {
    GA: [f"searches/kv-{seed}" for seed in range(1, 6)],
    "the same, 4-point Bézier (`--curve bezier`)": seeds("curves/bezier"),
    "CMA-ES from 1": seeds("controls/cma-es"),
    "random search": seeds("controls/random"),
    "gradient descent from 1": seeds("controls/gradient-1"),
    "gradient descent from 1.5": seeds("controls/gradient"),
    "genetic algorithm from 1.5, as published": seeds("controls/start-1.5"),
    "genetic algorithm, `--start wide`": seeds("controls/start-wide"),
}


def over_seeds(search, other):
    """The mean difference between two searches, of the seeds that both have, and its 95 % t interval."""
    pairs = zip(SEEDS[search], SEEDS[other], strict=False)
    found = [mean(f"{a}-held-out") - mean(f"{b}-held-out") for a, b in pairs]
    interval = stats.t.interval(0.95, len(found) - 1, fmean(found), stats.sem(found))
    return fmean(found), *interval


@pytest.mark.parametrize("search", SEEDS)
def test_the_searches_of_several_seeds_that_the_docs_list(search):
    found = [mean(f"{name}-held-out") for name in SEEDS[search]]
    several = len(found) > 1
    over = "{:+.1f} [{:.1f}, {:.1f}]".format(*over_seeds(search, GA)) if several and search != GA else ""
    summary = f"{fmean(found):.1f} | {stdev(found):.1f} | {over}" if several else "| |"
    row = f"| {search} | {', '.join(f'{value:.1f}' for value in found)} | {summary} |".replace("  ", " ")
    assert row in text("docs/search.md")


def test_what_the_docs_conclude_from_these_searches():
    plain = mean("main/kv/plain")
    for search in ("CMA-ES from 1", "random search", "gradient descent from 1"):
        _, low, high = over_seeds(search, GA)
        assert low < 0 < high
    assert over_seeds("the same, 4-point Bézier (`--curve bezier`)", GA)[2] < 0
    assert sum(mean(f"{name}-held-out") < plain for name in SEEDS["gradient descent from 1"]) == 2
    assert mean("controls/start-1.5-held-out") < plain / 2


@pytest.mark.parametrize("model", ["base", "kv"])
def test_a_card_has_the_checksum_that_sha256sum_prints(model):
    folder = ROOT / "lpes_eval/reference" / model
    card = text(f"lpes_eval/reference/{model}/README.md")
    printed = files.sha256(folder / "model.safetensors")
    assert f"`sha256sum model.safetensors` gives another, because the file has a header too: `{printed}`" in card


def test_the_five_searches_that_the_docs_sum_up():
    docs, gains, over_pi = text("docs/search.md"), {}, {}
    for task in ("kv", "mdqa"):
        names = [f"searches/{task}-{n}" for n in range(1, 6)]
        gains[task] = [gained(f"main/{task}/plain", f"{name}-held-out")[0] for name in names]
        over_pi[task] = [gain(result(f"{name}-pi"), result(f"{name}-held-out")) for name in names]
    kv, mdqa = gains["kv"], gains["mdqa"]
    assert f"they gain {min(kv):.1f} to {max(kv):.1f} points over the plain model, {fmean(kv):.1f} on average" in docs
    assert set(result("searches/kv-4-held-out")["factors"]) == {1.0}
    assert [one.clear for one in over_pi["kv"]] == [True, True, True, False, True]
    assert not any(one.clear for one in over_pi["mdqa"])
    over = [one.mean for one in over_pi["mdqa"]]
    assert f"by more than two standard errors ({min(over):.1f} to {max(over):.1f} points)" in docs
    assert f"they gain {min(mdqa):.1f} to {max(mdqa):.1f} points" in docs
    best = max(mean(f"searches/mdqa-{n}-held-out") for n in range(1, 6))
    uniform = mean("main/mdqa/uniform")
    assert f"best of the five has {best:.1f} %, and the best uniform factor on search examples {uniform:.1f} %" in docs
    apart = max(kv) - min(kv), max(mdqa) - min(mdqa)
    assert f"on records their results are up to {apart[0]:.0f} points apart, on articles up to {apart[1]:.0f}" in docs
    lambdas = mean("lambda/equal-held-out"), mean("lambda/end-held-out")
    found = "on records {:.1f} with the default, {:.1f} with equal weights and {:.1f} with"
    assert found.format(mean("searches/kv-1-held-out"), *lambdas) in docs


MEASURES = {
    "`simple_evaluate` (all 20)": "simple_evaluate",
    "all measures (all 20)": "all measures",
    "past answers do not serve as drafts": "no past answers as drafts",
    "nothing is looked up": "no lookup of what repeats",
    "no drafts at all": "no drafts at all",
    "shared prefixes are computed for every prompt": "no shared prefixes",
    "logits everywhere": "logits everywhere",
    "batches of a fixed number": "batches of a fixed number",
    "lm-eval's own loop": "lm-eval's own loop",
    "requests are built for every individual": "requests built for every individual",
}
SPEED = json.loads((ROOT / "benchmarks/results/search_speed.json").read_text())
FOUR = [one for one in SPEED["individuals"] if "no drafts at all" in one["seconds"]]


def of_four(kind, measure, field=None):
    return sum(one[kind][measure] if field is None else one[kind][measure][field] for one in FOUR)


@pytest.mark.parametrize("label", MEASURES)
def test_the_measures_of_speed_that_the_docs_list(label):
    measure, every = MEASURES[label], SPEED["individuals"] if label.endswith("(all 20)") else FOUR
    seconds, all_measures = (sum(one["seconds"][which] for one in every) for which in (measure, "all measures"))
    times = "1" if measure == "all measures" else f"{seconds / all_measures:.2f}"
    counted = all(measure in one["counts"] for one in FOUR)
    steps = f" {of_four('counts', measure, 'steps'):,}" if counted else ""
    assert f"| {label} | {seconds / len(every):.1f} | {times} |{steps} |" in text("docs/search.md")


def test_what_past_answers_save_as_the_docs_say():
    docs, past = text("docs/search.md"), "no past answers as drafts"
    without, all_measures = (of_four("counts", measure, "steps") for measure in (past, "all measures"))
    saved = without - all_measures
    assert f"Past answers alone save {100 * saved / without:.0f} % of the steps ({saved} of {without:,})" in docs
    with_them, without_them = (of_four("seconds", measure) / len(FOUR) for measure in ("all measures", past))
    assert f"the four individuals took {with_them:.1f} seconds each with them and {without_them:.1f} without" in docs
    share = of_four("seconds", "all measures") / of_four("seconds", "no drafts at all")
    assert "Drafts as a whole save half of the steps and a seventh of the time" in docs
    assert (round(100 * all_measures / of_four("counts", "no drafts at all", "steps"), -1), round(7 * share)) == (50, 6)
    assert of_four("counts", "no drafts at all", "steps") == of_four("counts", "no drafts at all", "tokens")
    summary = SPEED["summary"]
    each = summary["times_faster_an_individual"]
    assert f"{summary['times_faster']:.1f} times as fast as calling `simple_evaluate` for every individual" in docs
    assert f"({each['least']:.1f} to {each['most']:.1f} times, depending on the individual)" in docs
    exact = json.loads((ROOT / "benchmarks/results/search_exact.json").read_text())["summary"]["rows"]["all measures"]
    assert f"For all {exact['answers']:,} answers" in docs
    assert f"With drafts, {exact['steps']:,} of {exact['tokens']:,} decode steps remained." in docs


def test_the_workflow_to_copy_installs_what_its_environment_names():
    workflow = yaml.safe_load((ROOT / ".github/workflows/regress.yml").read_text())
    steps = workflow["jobs"]["regress"]["steps"]
    installs = [step["run"] for step in steps if "pip install" in step.get("run", "")]
    assert [command.split()[2] for command in installs] == ['"$LPES_EVAL"']
    cached = [step["with"] for step in steps if step.get("with", {}).get("cache")]
    assert all(list(ROOT.glob(one["cache-dependency-path"])) for one in cached)  # without such a file, the step fails
    rows = re.findall(r"^\| ((?:`[A-Z_]+`(?:, )?)+) \|", (ROOT / "docs/regress.md").read_text(), re.M)
    assert set(re.findall("[A-Z_]+", " ".join(rows))) == set(workflow["env"])
