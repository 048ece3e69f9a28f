"""What a search hands over: guards, the trade-off, and whether factors count as found."""

import json
import re
import shlex
from statistics import mean
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

import toy_search
from lpes_eval.compare.statistics import Difference
from lpes_eval.entries import Entry, GuardCheck
from search import config, ga, guards
from search.evaluator import Evaluator
from search.guards import Guard, rank
from search.held_out import HeldOut, Outcome, reproduce_command
from search.optimizers.ga import GeneticAlgorithm, GeneticConfig
from search.space import Space
from small_searches import SMALL, found, journal, report


def outcome_of(*differences, fitness=0.6, sign=1, worsened=(), corpus=None, held_out=True):
    """Of a search whose factors have this fitness, the plain model 0.5, and these differences on held-out examples."""
    tasks = [SimpleNamespace(name=k, sign=sign) for k, _ in enumerate(differences)]
    compared = {(k, "baseline"): SimpleNamespace(mean=mean) for k, mean in enumerate(differences)}
    measured = {"baseline": SimpleNamespace(fitness=0.5), "found factors": SimpleNamespace(fitness=corpus)}
    held_out = held_out and SimpleNamespace(tasks=tasks, comparisons=compared, measured=measured, worsened=worsened)
    guards = {"g": GuardCheck(1.0, 0.5, [-0.6, -0.4], 0.1)} if "search" in worsened else {}
    plain = Entry("", 0.5)
    return Outcome(plain, Entry("", fitness, guards=guards), None, held_out or None)


def between(low, high, p=0.01):
    return Difference(0.1, 0.2, (low + high) / 2, low, high, p)


def test_factors_count_as_found_where_a_task_is_better_beyond_chance_and_none_worse():
    better, same, worse = between(0.01, 0.2), between(-0.1, 0.1, 0.9), between(-0.2, -0.01)
    assert outcome_of(better, same).shown
    assert outcome_of(worse, sign=-1).shown  # fewer errors
    assert outcome_of(corpus=0.6).shown
    assert outcome_of(held_out=False).shown  # without held-out examples, where they are fitter
    for not_shown in (
        outcome_of(held_out=False, fitness=0.5 + 1e-12),  # sums are rounded
        outcome_of(held_out=False, worsened=["search"]),
        outcome_of(same),
        outcome_of(better, worse),
        outcome_of(better, sign=-1),
        outcome_of(better, fitness=0.5),
        outcome_of(better, worsened=["g"]),
        outcome_of(better, worsened=["search"]),
        outcome_of(corpus=0.5),
        outcome_of(between(0.3, 0.3, p=0.25)),  # all of three questions alike
    ):
        assert not not_shown.shown


def test_factors_that_are_not_shown_to_help_are_a_best_effort(command, tmp_path, monkeypatch):
    monkeypatch.setattr(Outcome, "shown", property(lambda self: False))
    monkeypatch.setattr(HeldOut, "lower", property(lambda self: list(self.guards)))
    assert command(*SMALL, "--held_out_examples", "4")[0] == 0
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert re.search(r"^\| answers that end .*\| (lower|worse) \|$", summary, re.M)
    assert found(tmp_path / "out").name == "best_effort.json"
    assert "best_effort.json" in summary


def test_the_command_that_gives_the_same_scores_has_whatever_changes_them(tmp_path):
    same = "--num_fewshot 0 --apply_chat_template --fewshot_as_multiturn false --system_instruction 'Be brief.' "
    same += "--include_path tasks --batch_size 4 --device cpu --confirm_run_unsafe_code"
    flags = f"{same} --tasks toy* --fewshot_seed 7 --metadata num_keys=9 --gen_kwargs max_gen_toks=3 "
    flags += f"--model_args pretrained=a/b,max_length=99,token=hf_secret --output {tmp_path} --held_out_examples"
    task = SimpleNamespace(name="toy", divided=False, left_out={}, columns=[])

    def read(text):
        words = shlex.split(text)
        at = [k for k, word in enumerate(words) if word.startswith("--")]
        return {words[k]: words[k + 1 : end] for k, end in zip(at, [*at[1:], None], strict=True)}

    def command(*tasks, examples="9", more=()):
        return read(reproduce_command(config.parse([*shlex.split(flags), examples, *more]), tasks))

    expected = read(f"{same} --model lpes --tasks toy --seed 0,1234,1234,7 --limit 9")
    expected |= {"--metadata": ['{"num_keys": 9}'], "--gen_kwargs": ['{"max_gen_toks": 3}']}
    expected["--model_args"] = [f"pretrained=a/b,max_length=99,factors={tmp_path / 'factors.json'}"]
    assert command(task) == expected
    del expected["--limit"]
    assert command(task, examples="500") == expected
    divided = {"--tasks": ["toy,toy_plain"], "--samples": [str(tmp_path / "held_out_samples.json")]}
    toy_plain = SimpleNamespace(**vars(task) | {"name": "toy_plain", "divided": True})
    assert command(task, toy_plain) == expected | divided
    given = command(task, more=["--model_args", 'pretrained=a,b={"c": 1}'])
    assert json.loads(*given["--model_args"])["b"] == {"c": 1}
    task.left_out, task.columns = {20.0: 0.0}, [SimpleNamespace(position=p) for p in (0.0, 40.0)]
    assert json.loads(*command(task)["--metadata"]) == {"num_keys": 9, "positions": [0, 40]}


def test_until_held_out_examples_have_decided_factors_are_a_best_effort(command, tmp_path, monkeypatch):
    def stopped(*_):
        assert found(tmp_path / "out").name == "best_effort.json"
        raise KeyboardInterrupt

    monkeypatch.setattr(Outcome, "shown", property(lambda self: True))
    monkeypatch.setattr(ga, "evaluate_held_out", stopped)
    assert command(*SMALL, "--held_out_examples", "4")[0] == 130
    assert found(tmp_path / "out").name == "best_effort.json"


def test_factors_that_worsen_a_guard_rank_last_and_are_not_handed_over(command, tmp_path, monkeypatch):
    check = Guard.check  # as if every individual that is fitter lost a tenth
    monkeypatch.setattr(Guard, "check", lambda *args: replace(check(*args), over=0.1))
    status, out, _ = command(*SMALL, "--held_out_examples", "4")
    assert status == 0
    plain, *others = journal(tmp_path / "out")
    assert set(plain["guard_rows"]) == {"answers that end"}  # the toy has no size, so no half of it
    fitter = [entry for entry in others if entry["origin"] != "held out" and entry["fitness"] > plain["fitness"]]
    assert fitter
    assert all(entry["guards"]["answers that end"]["over"] == 0.1 for entry in fitter)
    assert report(tmp_path / "out")["best"]["fitness"] <= plain["fitness"]
    assert not (tmp_path / "out" / "factors.json").exists()
    assert "no individual is fitter than the plain model without making a guard worse" in out


def test_any_task_with_a_score_of_every_example_can_be_a_guard(command, tmp_path):
    status, out, _ = command(*SMALL, "--held_out_examples", "4", "--guard", "toy_plain:hits:0.5", "--guard", "none")
    assert status == 0
    assert re.search(r"\| toy_plain:hits +\| +\d\.\d{4} +\| +\d\.\d{4}", out)
    status, _, err = command(*SMALL, "--guard", "words_toy", output=tmp_path / "corpus")
    assert status == 2
    assert "--guard words_toy: its metric is no average" in err


def test_held_out_examples_guard_a_task_at_all_its_positions(toy_lm, load, task_folder):
    flags = ["--include_path", task_folder, "--positions", "0,100", "--lambdas", "1,1", "--guard", "toy"]
    evaluator = Evaluator(toy_lm, load("toy", "toy_choice"))
    asked = {}
    for split in ("search", "held_out"):  # a choice has no answer that ends
        [guard] = guards.load(config.parse(flags), evaluator, split, 4, lambda tasks: Evaluator(toy_lm, tasks))
        asked[split] = guard.evaluator.prompts
    assert asked == {"search": 4 * 2, "held_out": 4 * 3}


def test_a_guard_is_worsened_by_more_than_is_allowed_and_beyond_chance_only():
    guard = Guard("g", 0.1, SimpleNamespace(objectives=[SimpleNamespace(sign=1)]))
    plain = [1.0] * 12
    assert guard.check(plain, plain).over == 0
    assert guard.check(plain, [0.0] * 1 + [1.0] * 11).over == 0  # within what is allowed
    assert guard.check([1.0, 0.0] * 6, [0.0, 1.0] * 5 + [0.0, 0.0]).over == 0  # by chance
    assert guard.check(plain, [0.0] * 3 + [1.0] * 9).over == 0  # not shown to be more than is allowed
    assert guard.check(plain, [0.0] * 6 + [1.0] * 6).over == pytest.approx(0.4)
    assert guard.check([1.0] * 3, [0.0] * 3).over == 0  # three questions show nothing, though all changed alike
    guard.evaluator.objectives[0].sign = -1
    lower = guard.check([-3.0] * 12, [-5.0] * 6 + [-4.0] * 6)
    assert (lower.plain, lower.found, lower.over) == (3.0, 4.5, pytest.approx(1.4))
    assert 1 < lower.interval[0] < 1.5 < lower.interval[1] < 2
    assert [HeldOut([], {}, {}, {}, {"g": replace(lower, over=over)}).lower for over in (0.0, 1.4)] == [["g"], []]
    entry = Entry("", 0.9, guards={"g": replace(lower, over=0.4)})
    assert rank(entry) < rank(Entry("", -100.0))
    assert rank(entry) > rank(replace(entry, guards={"g": replace(lower, over=0.5)}))


@pytest.mark.parametrize(
    ("measured", "factor"),
    [
        ({1.5: [1, None, None, None]}, None),  # all right, but so is the plain model on this question
        ({1.2: [1, 1, None, None], 1.5: [1, 1, 1, 0]}, 1.2),
    ],
)
def test_the_uniform_factor_to_compare_with_is_the_one_that_gains_most_on_the_same_questions(measured, factor):
    class Bench(toy_search.Bench):
        def score(self, examples):
            return SimpleNamespace(fitness=mean(value for value in examples["acc"] if value is not None))

    search = toy_search.search(GeneticAlgorithm(Space(8), GeneticConfig()), Bench())
    entries = {"given up": Entry("", 0.9, factor=1.9, stopped_after=2)}
    for f, values in ({1.0: [1, 0, 1, 0]} | measured).items():
        fitness, key = mean(value for value in values if value is not None), search.uniform(f).digest()
        entries[key] = Entry(key, fitness, factor=f, examples={"acc": values})
    search.journal = SimpleNamespace(entries=entries)
    assert search.best_uniform == (factor and search.uniform(factor))
