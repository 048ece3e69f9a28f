"""What a search hands over: guards, the trade-off, and whether factors count as found."""

import json
import re
import shlex
import shutil
from statistics import mean
from types import SimpleNamespace

import pytest

from lpes_eval import factors as factors_file
from lpes_eval.compare.statistics import Difference
from lpes_eval.report import sources
from search import config, ga, guards, run, tradeoff
from search.evaluator import Evaluator
from search.guards import Guard, rank
from search.held_out import HeldOut, reproduce_command
from search.report.pages import Outcome
from search.space import Individual
from search.tasks import Column
from small_searches import SMALL, found, journal, report


def stop_at_the_end(monkeypatch):
    """Ctrl-C when all individuals are measured, before what was found is written."""
    measure = run.Search.measure

    def stopped(search, name, *others):
        if name == "best":
            raise KeyboardInterrupt
        return measure(search, name, *others)

    monkeypatch.setattr(run.Search, "measure", stopped)


@pytest.mark.parametrize("choice", ["mean", "worst", "1,0,0"])
def test_another_individual_of_a_search_that_is_over_can_be_chosen_without_measuring_any(command, tmp_path, choice):
    flags = [*SMALL, "--epochs", "3", "--held_out_examples", "4", "--guard", "none"]
    assert command(*flags)[0] == 0
    before = journal(tmp_path / "out")
    measured = {entry["key"]: entry for entry in before if "examples" in entry and "points" in entry}

    def value(entry):
        scores = list(entry["scores"].values())
        return {"mean": sum(scores) / len(scores), "worst": min(scores), "1,0,0": scores[0]}[choice]

    assert command("--resume", str(tmp_path / "out"), "--choose", choice)[0] == 0
    new = [entry for entry in journal(tmp_path / "out") if entry not in before]
    assert {entry["origin"] for entry in new} <= {"held out"}
    plain = next(entry for entry in before if entry["origin"] == "baseline")
    best = report(tmp_path / "out")["best"]
    assert value(best) == max(map(value, [*measured.values(), plain]))
    assert factors_file.load(found(tmp_path / "out")).digest() == best["key"]


def test_trades_are_of_individuals_in_full_with_errors_counted_down_and_harm_as_worse():
    evaluator = SimpleNamespace(prompts=9, columns={name: (SimpleNamespace(sign=-1), None) for name in "ab"})
    entry = {"prompts": 9, "examples": {}, "scores": {"a": 0.0, "b": 0.5}, "guards": {"g": {"over": 0.0}}}
    entries = [entry, entry | {"prompts": 3}, entry | {"guards": {"g": {"over": 0.25}}}, entry | {"key": "equal"}]
    found = tradeoff.trades(entries, evaluator)
    assert [(trade.mean, trade.worst, trade.harm) for trade in found[:2]] == [(-0.25, -0.5, 0.0), (-0.25, -0.5, 0.25)]
    assert tradeoff.front(found) == found[:1]  # of equals the first


@pytest.mark.parametrize(
    ("shares", "scores"),
    [
        ({"a": 0.9, "b": 0.1}, {"fittest": {"a": 0.9, "b": 0.3}, "other": {"a": 0.5, "b": 0.8}}),
        ({"a": 0.1, "b": 0.9}, {"fittest": {"a": 0.5, "b": 0.6}, "other": {"a": 0.6, "b": 0.0}}),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("positions", [(0.0, 50.0, 100.0), ()])
def test_other_lambdas_weigh_the_positions_of_a_task_and_no_task_against_another(shares, scores, positions, sign):
    lambdas = [0.2, 0.3, 0.5]
    a = [Column(f"a@{p:g}", "acc", shares["a"] * w, p) for p, w in zip((0.0, 50.0, 100.0), lambdas, strict=True)]
    b = [Column(f"b@{p:g}", "acc", shares["b"] * w, p) for p, w in zip(positions, lambdas, strict=False)]
    b = b or [Column("b", "acc", shares["b"])]
    objectives = [SimpleNamespace(sign=sign, columns=columns) for columns in (a, b)]
    columns = {column.name: (task, column) for task in objectives for column in task.columns}
    entry = {"prompts": 9, "examples": {}, "fitness": 0}
    entries = [
        entry | {"key": name, "scores": {c: sign * of[c.partition("@")[0]] for c in columns}}
        for name, of in scores.items()
    ]
    evaluator = SimpleNamespace(prompts=9, columns=columns)
    for choice in (lambdas, [2, 3, 5]):
        found = tradeoff.ranked(tradeoff.trades(entries, evaluator), choice, evaluator)
        assert [trade.entry["key"] for trade in found] == ["fittest", "other"]


def test_what_choose_takes_is_guarded_now_where_the_search_left_it_out(command, tmp_path, monkeypatch):
    flags = [*SMALL, "--epochs", "3", "--held_out_examples", "0", "--guard", "toy_plain:hits:0.5"]
    assert command(*flags)[0] == 0
    shutil.copytree(tmp_path / "out", tmp_path / "harmed")
    before = journal(tmp_path / "out")
    for _ in range(2):
        assert command("--resume", str(tmp_path / "out"), "--choose", "0,0,1")[0] == 0
    [late] = [entry for entry in journal(tmp_path / "out") if entry not in before]
    best = report(tmp_path / "out")["best"]
    assert late["key"] == f"guards of {best['key']}"
    assert best["guards"] == late["guards"]
    assert best["guards"].keys() == {"answers that end", "toy_plain:hits"}
    in_the_tradeoff = sources.search("out", tmp_path / "out").individuals
    assert [entry["guards"] for entry in in_the_tradeoff if entry["key"] == best["key"]] == [late["guards"]]
    monkeypatch.setattr(Guard, "check", lambda *_: late["guards"]["toy_plain:hits"] | {"over": 0.1})
    assert command("--resume", str(tmp_path / "harmed"), "--choose", "0,0,1")[0] == 0
    assert report(tmp_path / "harmed")["best"]["key"] != best["key"]


def test_where_choose_takes_the_plain_model_its_factors_are_1_whatever_a_curve_of_ones_own_gives():
    plain = factors_file.Factors.from_uniform(1.0, num_layers=3)
    entry = {"key": plain.digest(), "prompts": 4, "examples": {}, "scores": {"a": 1.0}, "fitness": 1.0}
    evaluator = SimpleNamespace(prompts=4, columns={"a": (SimpleNamespace(sign=1), Column("a", "acc", 1.0))})
    journal = SimpleNamespace(entries={plain.digest(): entry}, individuals={})
    args = SimpleNamespace(choose="mean")
    made = SimpleNamespace(journal=journal, uniform=lambda f: plain, evaluator=evaluator, args=args)
    assert run.Search.chosen(made, Individual(((0.0, 1.4),), "band"), entry) == (plain, entry)


@pytest.mark.parametrize(
    ("fitness", "interval", "shown"),
    [
        (0.6, None, True),
        (0.5, None, False),
        (0.5 + 1e-12, None, False),  # sums are rounded
        (0.4, None, False),
        (0.6, (0.01, 0.2, 0.03), True),
        (0.6, (-0.01, 0.2, 0.06), False),
        (0.6, (-0.3, -0.1, 0.01), False),
        (0.5, (0.01, 0.2, 0.03), False),
        (0.6, (0.3, 0.3, 0.25), False),  # all of three questions alike
        (0.6, (0.3, 0.3, 0.01), True),
    ],
)
def test_factors_count_as_found_only_where_they_are_better_than_the_plain_model(fitness, interval, shown):
    held_out = None
    if interval:
        low, high, p = interval
        mean = Difference(0.1, 0.2, 0.1, low, high, p, "exchange")
        tasks, compared = [SimpleNamespace(name="t", sign=1)], {("t", "baseline"): SimpleNamespace(mean=mean)}
        held_out = SimpleNamespace(tasks=tasks, comparisons=compared, worsened=[])
    assert Outcome({"baseline": {"fitness": 0.5}}, {"fitness": fitness}, None, held_out).shown is shown


def test_factors_count_as_found_where_no_task_and_no_guard_is_worse_and_fewer_errors_are_better():
    def shown(*intervals, sign=1, worsened=(), fitness=0.6, over=0.0):
        """Of tasks with these differences, or of a corpus metric with this fitness."""
        means = [Difference(0.1, 0.2, 0.1, low, high, 0.01, "exchange") for low, high in intervals]
        tasks = [SimpleNamespace(name=k, sign=sign) for k, _ in enumerate(means)]
        compared = {(k, "baseline"): SimpleNamespace(mean=mean) for k, mean in enumerate(means)}
        measured = {"baseline": SimpleNamespace(fitness=0.5), "found factors": SimpleNamespace(fitness=fitness)}
        held_out = SimpleNamespace(tasks=tasks, comparisons=compared, measured=measured, worsened=worsened)
        best = {"fitness": 0.6, "guards": {"g": {"over": over}}}
        return Outcome({"baseline": {"fitness": 0.5}}, best, None, held_out).shown

    better, same, worse = (0.01, 0.2), (-0.1, 0.1), (-0.2, -0.01)
    assert shown(better, same)
    assert shown(worse, sign=-1)
    assert shown()
    assert not any((shown(same), shown(better, worse), shown(better, sign=-1), shown(fitness=0.5)))
    assert not any((shown(better, worsened=["g"]), shown(better, over=0.1), shown(worsened=["g"])))


def test_factors_that_are_not_shown_to_help_are_a_best_effort(command, tmp_path, monkeypatch):
    monkeypatch.setattr(Outcome, "shown", property(lambda self: False))
    monkeypatch.setattr(HeldOut, "lower", property(lambda self: list(self.guards)))
    assert command(*SMALL, "--held_out_examples", "4")[0] == 0
    assert re.search(
        r"^\| answers that end .*\| (lower|worse) \|$", (tmp_path / "out" / "summary.md").read_text(), re.M
    )
    assert not (tmp_path / "out" / "factors.json").exists()
    assert (tmp_path / "out" / "best_effort.json").exists()
    assert "best_effort.json" in (tmp_path / "out" / "summary.md").read_text()


def test_the_command_that_gives_the_same_scores_has_whatever_changes_them(tmp_path):
    flags = "--tasks toy* --num_fewshot 0 --fewshot_seed 7 --apply_chat_template --fewshot_as_multiturn false "
    flags += "--system_instruction 'Be brief.' --metadata num_keys=9 --gen_kwargs max_gen_toks=3 --include_path tasks "
    flags += "--model_args pretrained=a/b,max_length=99,token=hf_secret --batch_size 4 --device cpu "
    flags += "--confirm_run_unsafe_code --held_out_examples"
    tasks = [SimpleNamespace(name=name, divided=name == "toy_plain") for name in ("toy", "toy_plain")]

    def command(tasks, examples, *more):
        args = config.parse([*shlex.split(flags), examples, *more, "--output", str(tmp_path)])
        words = shlex.split(reproduce_command(args, tasks))
        at = [k for k, word in enumerate(words) if word.startswith("--")]
        return {words[k]: words[k + 1 : end] for k, end in zip(at, [*at[1:], None], strict=True)}

    model_args = f"pretrained=a/b,max_length=99,factors={tmp_path / 'factors.json'}"
    expected = {"model": "lpes", "model_args": model_args, "tasks": "toy", "device": "cpu", "num_fewshot": "0"}
    expected |= {"include_path": "tasks", "system_instruction": "Be brief.", "batch_size": "4", "limit": "9"}
    expected |= {"fewshot_as_multiturn": "false", "seed": "0,1234,1234,7", "metadata": '{"num_keys": 9}'}
    expected = {f"--{name}": [value] for name, value in (expected | {"gen_kwargs": '{"max_gen_toks": 3}'}).items()}
    expected |= {"--apply_chat_template": [], "--confirm_run_unsafe_code": []}
    assert command(tasks[:1], "9") == expected
    del expected["--limit"]
    assert command(tasks[:1], "500") == expected
    divided = {"--tasks": ["toy,toy_plain"], "--samples": [str(tmp_path / "held_out_samples.json")]}
    assert command(tasks, "9") == expected | divided
    given = command(tasks, "9", "--model_args", 'pretrained=a,b={"c": 1}', "--batch_size", "auto")
    assert json.loads(*given["--model_args"])["b"] == {"c": 1}
    assert "--batch_size" not in given


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
    monkeypatch.setattr(Guard, "check", lambda *args: check(*args) | {"over": 0.1})
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
    stop_at_the_end(monkeypatch)
    command(*SMALL, output=tmp_path / "stopped")
    so_far = factors_file.load(tmp_path / "stopped" / "best_effort.json").digest()
    assert so_far not in {entry["key"] for entry in fitter}


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
        [guard] = guards.load(config.parse(flags), evaluator, split, 4)
        asked[split] = guard.evaluator.prompts
    assert asked == {"search": 4 * 2, "held_out": 4 * 3}


def test_a_scan_asks_and_guards_a_quarter_of_the_questions_before_it_asks_all(command, tmp_path, monkeypatch):
    monkeypatch.setattr("search.evaluator.FEWEST", 1)
    flags = ["--examples", "5", "--held_out_examples", "0", "--guard", "toy_plain:hits:0.5", "--guard_examples", "5"]
    assert command(*flags, "--early_stopping", "off")[0] == 0
    entries = {entry["key"]: entry for entry in journal(tmp_path / "out")}
    few = {key: entry for key, entry in entries.items() if key.endswith(" 2")}  # of five questions, at three positions
    assert {entry["prompts"] for entry in few.values()} == {6}
    assert {entry["prompts"] for key, entry in entries.items() if key not in few} == {15}
    for key, entry in few.items():
        asked = [values[:2] for values in entry["examples"].values()]
        assert list(entry["examples"].values()) == [[*values, None, None, None] for values in asked]
        assert entry["fitness"] == pytest.approx(mean(value for values in asked for value in values))
        if whole := entries.get(key.split()[0]):
            assert asked == [values[:2] for values in whole["examples"].values()]
    [plain] = [entry["guard_rows"]["toy_plain:hits"] for entry in entries.values() if "guard_rows" in entry]
    guarded = [entry["guards"]["toy_plain:hits"]["plain"] for entry in few.values() if "guards" in entry]
    assert guarded == [pytest.approx(mean(plain[:2]))] * len(guarded) != []
    assert {entry["guard_prompts"] for entry in few.values() if "guards" in entry} == {2}
    assert command(*flags, "--early_stopping", "off", "--budget", "260prompts", output=tmp_path / "cut")[0] == 0
    finalists = [entry for entry in journal(tmp_path / "cut") if entry["origin"] == "finalist"]
    assert 1 < len(finalists) < 6
    fittest = max(finalists, key=lambda entry: entry["fitness"])  # of the scan another was, on two questions
    assert report(tmp_path / "cut")["best"]["key"] == fittest["key"] != finalists[0]["key"]
    stop_at_the_end(monkeypatch)
    command(*flags, "--early_stopping", "off", "--budget", "260prompts", output=tmp_path / "stopped")
    assert factors_file.load(tmp_path / "stopped" / "best_effort.json").digest() == fittest["key"]


def test_one_example_is_enough_to_search_with_and_shows_no_guard_worse(command, tmp_path):
    assert command(*SMALL, "--examples", "1", "--held_out_examples", "1")[0] == 0
    assert report(tmp_path / "out")["guards"]["answers that end"]["interval"] == [None, None]


def test_a_guard_is_worsened_by_more_than_is_allowed_and_beyond_chance_only():
    guard = Guard("g", 0.1, SimpleNamespace(objectives=[SimpleNamespace(sign=1)]))
    plain = [1.0] * 12
    assert guard.check(plain, plain)["over"] == 0
    assert guard.check(plain, [0.0] * 1 + [1.0] * 11)["over"] == 0  # within what is allowed
    assert guard.check([1.0, 0.0] * 6, [0.0, 1.0] * 5 + [0.0, 0.0])["over"] == 0  # by chance
    assert guard.check(plain, [0.0] * 3 + [1.0] * 9)["over"] == 0  # not shown to be more than is allowed
    assert guard.check(plain, [0.0] * 6 + [1.0] * 6)["over"] == pytest.approx(0.4)
    assert guard.check([1.0] * 3, [0.0] * 3)["over"] == 0  # three questions show nothing, though all changed alike
    guard.evaluator.objectives[0].sign = -1
    lower = guard.check([-3.0] * 12, [-5.0] * 6 + [-4.0] * 6)
    assert (lower["plain"], lower["found"], lower["over"]) == (3.0, 4.5, pytest.approx(1.4))
    assert 1 < lower["interval"][0] < 1.5 < lower["interval"][1] < 2
    assert [HeldOut([], {}, {}, {}, {"g": {**lower, "over": over}}).lower for over in (0.0, 1.4)] == [["g"], []]
    entry = {"fitness": 0.9, "guards": {"g": {"over": 0.4}}}
    assert rank(entry) < rank({"fitness": -100.0})
    assert rank(entry) > rank(entry | {"guards": {"g": {"over": 0.5}}})


@pytest.mark.parametrize(
    ("measured", "factor"),
    [
        ({1.2: [1, 1, 1, 0], 1.5: [1, 0, 1, 0]}, 1.2),
        ({1.5: [0, 0, 0, 1]}, None),
        ({1.5: [1, None, None, None]}, None),  # all right, but so is the plain model on this question
        ({1.2: [1, 1, None, None], 1.5: [1, 1, 1, 0]}, 1.2),
    ],
)
def test_the_uniform_factor_to_compare_with_is_the_one_that_gains_most_on_the_same_questions(measured, factor):
    def uniform(f):
        return factors_file.Factors.from_list([f])

    def score(examples):
        return SimpleNamespace(fitness=mean(value for value in examples["acc"] if value is not None))

    entries = {
        uniform(f).digest(): {"factor": f, "fitness": score({"acc": values}).fitness, "examples": {"acc": values}}
        for f, values in ({1.0: [1, 0, 1, 0]} | measured).items()
    }
    entries["given up"] = {"factor": 1.9, "fitness": 0.9, "stopped_after": 2}
    made = SimpleNamespace(
        journal=SimpleNamespace(entries=entries), evaluator=SimpleNamespace(score=score), uniform=uniform
    )
    made.plain_on = lambda examples: run.Search.plain_on(made, examples)
    assert run.Search.best_uniform.fget(made) == (factor and uniform(factor))
