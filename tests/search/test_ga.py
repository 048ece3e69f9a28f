"""The command, from its flags to its files, on a toy model."""

import json
import math
import re
import shlex
import shutil
import signal
import time
from collections import namedtuple
from statistics import mean
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from lpes_eval import factors as factors_file
from lpes_eval import reference, rope
from lpes_eval.compare.statistics import Difference
from lpes_eval.errors import UserError
from search import config, ga, guards, optimizers, parser, run, search, tradeoff
from search.evaluator import Evaluator
from search.guards import Guard, rank
from search.held_out import HeldOut, reproduce_command
from search.optimizers.gradient import GradientDescent
from search.report.pages import Outcome
from search.report.progress import progress
from search.space import Individual
from search.tasks import Column

Model = namedtuple("Model", "num_layers lm objectives")  # of an evaluator, what optimisers need to know
GA = ["--optimizer", "ga", "--curve", "bezier", "--control_points", "3", "--early_stopping", "off"]
SMALL = [*GA, "--population", "5", "--parents", "3", "--epochs", "2", "--mutations", "3", "--crossovers", "1"]
SEARCH_ONLY = [*SMALL, "--held_out_examples", "0"]


@pytest.fixture
def command(toy_lm, task_folder, tmp_path, monkeypatch, capsys):
    """Runs the command on the toy model and returns its exit status and what it printed."""
    monkeypatch.setattr(run, "load_model", lambda args, whole: toy_lm)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*flags, output=tmp_path / "out"):
        argv = [*flags, "--include_path", task_folder]
        if "--resume" not in flags:
            argv += ["--output", str(output), *([] if "--tasks" in flags else ["--tasks", "toy"])]
        status = ga.main(argv)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    yield call
    rope.remove(toy_lm.model)


def journal(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def report(folder):
    return json.loads((folder / "report.json").read_text())


def found(folder):
    """The factors file of a search, whichever of the two it is."""
    [path] = [path for name in ("factors.json", "best_effort.json") if (path := folder / name).exists()]
    return path


def stop_at_the_end(monkeypatch):
    """Ctrl-C when all individuals are measured, before what was found is written."""
    measure = run.Search.measure

    def stopped(search, name, *others):
        if name == "best":
            raise KeyboardInterrupt
        return measure(search, name, *others)

    monkeypatch.setattr(run.Search, "measure", stopped)


def test_the_published_search_writes_what_it_found_and_how_it_went(command, tmp_path):
    status, out, _ = command(*SMALL, "--held_out_examples", "4")
    assert status == 0
    folder = tmp_path / "out"
    written, factors = report(folder), factors_file.load(found(folder))
    assert factors.per_layer() == written["factors"]
    assert factors.origin["fitness"]["value"] == written["best"]["fitness"]
    assert factors.origin["search"]["lambdas"] == [1.0, 1.0, 1.0]
    assert factors.origin["search"]["versions"].keys() == {"toy"}
    assert factors.origin["proof"]["differences"] == written["differences"]
    assert factors.origin["proof"]["command"].startswith("lm_eval --model lpes")
    entries = journal(folder)
    assert [entry["origin"] for entry in entries[:3]] == ["baseline", "PI", "start"]
    assert entries[1]["key"] == entries[2]["key"]  # PI at 1.5 is an individual from when it is asked for
    assert written["best"]["fitness"] == max(entry["fitness"] for entry in entries if entry["origin"] != "baseline")
    assert len({entry["key"] for entry in entries}) == len(entries) - 1
    assert {"baseline", "found factors"} <= set(written["held_out"])
    assert set(written["best"]["scores"]) == {"toy@0", "toy@50", "toy@100"}
    for name in ("summary.md", "convergence.png", "curve.png", "positions-toy.png"):
        assert (folder / name).stat().st_size > 0
    assert out.index("Fitness ") < out.index("To beat:") < out.index("generation 0/2") < out.index("# Search on toy")
    assert "lm_eval --model lpes" in out


def test_the_baseline_and_pi_of_a_search_are_measured_under_their_factors(command, tmp_path, monkeypatch):
    monkeypatch.setattr(rope, "apply", apply := Mock(wraps=rope.apply))
    command(*SEARCH_ONLY, "--no_cache")
    assert [list(call.args[1]) for call in apply.call_args_list[:2]] == [[1.0] * 3, [1.5] * 3]
    baseline, pi = journal(tmp_path / "out")[:2]
    assert [entry["origin"] for entry in (baseline, pi)] == ["baseline", "PI"]  # what is equal is measured once
    assert baseline["examples"] != pi["examples"]


@pytest.mark.parametrize("gone", ["half", "all"])
def test_resume_ends_with_the_same_bytes_and_measures_nothing_twice(command, tmp_path, gone):
    assert command(*SEARCH_ONLY)[0] == 0
    folder = tmp_path / "out"
    name = found(folder)
    kept, lines = name.read_bytes(), (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
    whole = lines[: len(lines) // 2] if gone == "half" else []
    (folder / "journal.jsonl").write_bytes(b"".join(whole) + b'{"key": "ab')
    name.unlink()
    status, out, _ = command("--resume", str(folder))
    assert status == 0
    assert "torn off" in out
    assert name.read_bytes() == kept
    assert len((folder / "journal.jsonl").read_bytes().splitlines()) == len(lines)


def test_a_search_that_is_over_can_be_proven_on_more_held_out_examples(command, tmp_path):
    assert command(*SMALL, "--held_out_examples", "2", "--guard", "none")[0] == 0
    before = journal(tmp_path / "out")
    status, out, _ = command("--resume", str(tmp_path / "out"), "--held_out_examples", "4")
    assert status == 0
    assert "held-out examples, 4 questions" in out
    new = [entry for entry in journal(tmp_path / "out") if entry not in before]
    assert {entry["origin"] for entry in new} == {"held out"}


def test_early_stopping_by_proof_asks_less_and_finds_the_same_factors_to_the_byte(command, tmp_path, monkeypatch):
    monkeypatch.setattr("search.evaluator.BOUNDED", {"luck"})  # it is one, as conftest.py computes it
    flags = [*SMALL, "--epochs", "4", "--parents", "2", "--held_out_examples", "0", "--no_cache"]
    flags += ["--tasks", "toy_luck", "--batch_size", "1"]
    reports = {}
    for name, kind in (("patient", "off"), ("hasty", "bound")):
        assert command(*flags, "--early_stopping", kind, output=tmp_path / name)[0] == 0
        reports[name] = report(tmp_path / name)
    assert reports["hasty"]["stopped_early"] > 0
    assert reports["hasty"]["prompts"] < reports["patient"]["prompts"]
    assert found(tmp_path / "hasty").read_bytes() == found(tmp_path / "patient").read_bytes()
    scan = ["--tasks", "toy_luck", "--examples", "3", "--held_out_examples", "0", "--budget", "1prompts"]
    assert command(*scan, "--early_stopping", "bound", output=tmp_path / "scan")[0] == 0
    settings = [report(tmp_path / name)["settings"]["search"] for name in ("hasty", "scan")]
    assert ["early_stopping" in each for each in settings] == [False, True]  # a scan may find others by it


def test_improbable_individuals_are_given_up_and_the_summary_says_at_what_risk(command, tmp_path, monkeypatch):
    monkeypatch.setattr("search.evaluator.BOUNDED", {"luck"})
    flags = [*SMALL, "--epochs", "4", "--parents", "2", "--held_out_examples", "0", "--tasks", "toy_luck"]
    assert command(*flags, "--early_stopping", "probable", "--early_stopping_error", "0.5", "--no_cache")[0] == 0
    entries = journal(tmp_path / "out")
    assert any("stopped_after" in entry for entry in entries)
    assert all(("examples" in entry) != ("stopped_after" in entry) for entry in entries)
    assert "a probability of at most 50 %" in (tmp_path / "out" / "summary.md").read_text()
    status, _, err = command(*flags, "--early_stopping", "probable", "--early_stopping_error", "0.4")
    assert status == 2
    assert "search.early_stopping_error was 0.5, is now 0.4" in err


def test_gradient_descent_has_its_examples_in_the_plan_and_its_time_in_the_seconds(command, tmp_path, monkeypatch):
    step = GradientDescent._step
    monkeypatch.setattr(GradientDescent, "_step", lambda self, g: (time.sleep(0.5), step(self, g)))
    flags = ["--optimizer", "gradient", "--generations", "2", "--epoch_samples", "5", "--gradient_batch", "2"]
    flags += ["--learning_rate", "0.05", "--no_cache", "--skip", "1", "--held_out_examples", "0"]
    status, out, _ = command(*flags)
    assert status == 0
    assert "and 2 x 4 examples forwards and backwards, 2 batches of 2" in out
    entries, factors = journal(tmp_path / "out"), factors_file.load(found(tmp_path / "out"))
    assert [entry["origin"] for entry in entries] == ["baseline", "PI", "start", "gradient", "gradient"]
    assert factors.origin["fitness"]["value"] == entries[-1]["fitness"]  # the last epoch, not the fittest
    assert factors.unscaled_layers == (0,)
    assert entries[-1]["seconds"] > 1


def test_what_was_given_up_is_not_shown_as_the_best_so_far(capsys):
    """A band has to gain more than a point; one given up just below that may have had a higher score until then."""
    optimizer = SimpleNamespace(generation=1, generations=2, expected_evaluations=2, expected_effort=2)
    watched = SimpleNamespace(optimizer=optimizer, evaluator=SimpleNamespace(prompts=10), part=None)
    with progress(watched, {}) as show:
        for fitness, also in ((0.5, {}), (0.505, {"stopped_after": 9})):
            show(Individual((), "band"), {"fitness": fitness, "prompts": 9, "seconds": 1.0, **also}, True)
    assert capsys.readouterr().out.count("best 0.5000") == 2


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


@pytest.mark.parametrize("stop", [None, signal.SIGTERM], ids=["ctrl-c", "SIGTERM"])
def test_ctrl_c_and_sigterm_end_cleanly_say_how_to_go_on_and_lose_nothing(
    command, tmp_path, task_folder, monkeypatch, stop
):
    flags = [*SEARCH_ONLY, "--no_cache"]
    assert command(*flags, output=tmp_path / "undisturbed")[0] == 0
    evaluate, calls = run.Search.evaluate, []

    def interrupted(self, individual):
        calls.append(individual.points)
        if len(calls) == 6:
            if stop is not None:  # its handler raises the same
                signal.raise_signal(stop)
            raise KeyboardInterrupt
        return evaluate(self, individual)

    monkeypatch.setattr(run.Search, "evaluate", interrupted)
    status, _, err = command(*flags)
    assert status == 130
    assert f"python -m search.ga --resume {tmp_path / 'out'} --include_path {task_folder}" in err
    assert factors_file.load(tmp_path / "out" / "best_effort.json").num_layers == 3  # the best until then
    assert command("--resume", str(tmp_path / "out"))[0] == 0
    assert calls[5] == calls[6]  # the one that was interrupted, and no other, is measured again
    assert found(tmp_path / "out").read_bytes() == found(tmp_path / "undisturbed").read_bytes()


def test_a_search_of_which_no_individual_could_be_measured_ends_cleanly(command, monkeypatch):
    entries = [{"fitness": -guards.PENALTY, "scores": {}, "seconds": 0.0, "prompts": 0, "failed": "3 workers died"}]

    def evaluate(*_):
        if not entries:
            raise KeyboardInterrupt
        return entries.pop()

    monkeypatch.setattr(run.Search, "evaluate", evaluate)
    status, out, _ = command(*SEARCH_ONLY, "--start", "1.2")
    assert status == 130
    assert "Best so far" not in out


def test_a_full_disk_ends_the_search_in_one_line_and_it_goes_on_with_more_room(command, tmp_path, disk):
    assert command(*SEARCH_ONLY, output=tmp_path / "undisturbed")[0] == 0
    disk.room = 12
    status, _, err = command(*SEARCH_ONLY, "--no_cache")
    disk.room = math.inf
    assert status == 2
    first, second = err.splitlines()[-2:]
    assert "No space left" in first
    assert "python -m search.ga --resume" in second
    assert command("--resume", str(tmp_path / "out"))[0] == 0
    assert found(tmp_path / "out").read_bytes() == found(tmp_path / "undisturbed").read_bytes()


def test_other_settings_in_the_same_folder_are_refused_with_the_difference(command):
    assert command(*SEARCH_ONLY)[0] == 0
    status, _, err = command(*SEARCH_ONLY, "--seed", "1", "--examples", "3")
    assert status == 2
    assert "search.seed was 0, is now 1" in err
    assert "fitness.requests_sha256" in err


def test_dry_run_prints_the_plan_and_how_long_it_may_take_and_writes_nothing(command, tmp_path):
    assert "Optimizer    bands, from 1 in every layer" in command("--dry_run")[1]
    assert "Budget       600 seconds to search, then it ends\n" in command("--dry_run", "--budget", "10m")[1]
    status, out, _ = command("--dry_run", "--preset", "paper", "--control_points", "3", "--budget", "20000prompts")
    assert status == 0
    assert "Budget       20,000 prompts to search" in out
    assert "at most 20 generations after the first and 512 individuals" in out
    assert re.search(r"^Time +\d+ prompts took .*, so about .* to search and .* to evaluate$", out, re.MULTILINE)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "name", "evaluations"),
    [
        ([], "BandScan", 141),
        (["--preset", "paper"], "GeneticAlgorithm", 512),
        (["--optimizer", "random"], "RandomSearch", 504),
        (["--optimizer", "cma-es"], "CMAES", 504),
        (["--optimizer", "cma-es", "--mutations", "2", "--crossovers", "1", "--generations", "0"], "CMAES", 4),
        (["--optimizer", "ga", "--epochs", "1"], "GeneticAlgorithm", 32 + 24),  # the flag's name in version 0.1
    ],
)
def test_flags_choose_the_optimizer_and_its_budget(flags, name, evaluations):
    args = config.parse(flags)
    assert name != "CMAES" or args.early_stopping is None  # it learns from every fitness
    optimizer = run.make_optimizer(args, Model(32, None, []))
    assert type(optimizer).__name__ == name
    assert optimizer.max_evaluations == evaluations


def test_whatever_says_how_a_task_is_measured_reaches_it():
    flags = ["--tasks", "a", "b", "--model_args", "pretrained=x,token=hf_secret", "--search_seed", "5", "--metadata"]
    flags += ["num_keys=9", "--positions", "0,100", "--lambdas", "1,3", "--task_weights", "2,1", "--metrics", "acc;em"]
    flags += ["--include_path", "tasks", "--num_fewshot", "2", "--fewshot_seed", "7", "--apply_chat_template"]
    flags += ["--fewshot_as_multiturn", "false", "--system_instruction", "Be brief.", "--gen_kwargs", "max_gen_toks=3"]
    assert config.task_options(config.parse([*flags, "--confirm_run_unsafe_code"])) == {
        "metadata": {"pretrained": "x", "search_seed": 5, "num_keys": 9},
        "positions": [0.0, 100.0],
        "lambdas": [1.0, 3.0],
        "weights": [2.0, 1.0],
        "metrics": ["acc", "em"],
        "include_path": "tasks",
        "num_fewshot": 2,
        "fewshot_random_seed": 7,
        "apply_chat_template": True,
        "fewshot_as_multiturn": False,
        "system_instruction": "Be brief.",
        "gen_kwargs": {"max_gen_toks": 3},
        "confirm_run_unsafe_code": True,
    }


def test_the_start_is_a_number_diverse_or_a_file(tmp_path):
    def first(*flags, layers=6):
        args = config.parse(["--optimizer", "ga", "--curve", "bezier", *flags])
        return [i.points for i in run.make_optimizer(args, Model(layers, None, [])).ask()]

    assert {y for _, y in first()[0]} == {1.5}
    assert first() == first("--seed", "0") != first("--seed", "1")
    assert {y for _, y in first("--start", "1.2")[0]} == {1.2}
    plain = ((0.0, 1.0), (2.0, 1.0), (3.0, 1.0), (5.0, 1.0))
    assert plain in first("--start", "diverse")
    assert plain in first("--start", "wide")  # its name in version 0.1
    points, file = [(0, 1.0), (1, 1.1), (4, 1.6), (5, 1.3)], tmp_path / "curve.json"
    factors_file.Factors.from_curve("bezier", points, num_layers=6).save(file)
    assert first("--start", str(file))[0] == tuple(points)
    factors_file.Factors.from_curve("bezier", points, num_layers=7, unscaled_layers=[0]).save(file)
    assert first("--start", str(file), "--skip", "1", layers=7)[0] == tuple(points)
    with pytest.raises(UserError, match=r"leaves layers \[0\] unscaled, the search the first 0; let --skip fit"):
        first("--start", str(file), layers=7)
    factors_file.Factors.from_list([1.033, 1.449, 1.25, 1.0]).save(file)
    with pytest.raises(UserError, match="holds a free curve, and the search has a bezier one"):
        first("--start", str(file), layers=4)
    skipping = first("--start", str(file), "--curve", "free", "--skip", "1", layers=4)
    assert [y for _, y in skipping[0]] == [1.4, 1.3, 1.0]
    assert [y for _, y in first("--start", str(file), "--curve", "free", layers=4)[0]] == [1.0, 1.4, 1.3, 1.0]
    with pytest.raises(UserError, match="--start: 4 control points; expected 3"):
        first("--start", str(file), "--curve", "free", layers=3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--start", "1.25"], "--start 1.25: is not searched; expected tenths from 1 to 2"),
        (["--start", "none.json"], "--start: none.json: no such file"),
        (["--start", "diverse", "--optimizer", "cma-es"], "no population"),
        (["--start", "1.2", "--optimizer", "random"], "leave it out"),
        (["--optimizer", "ga", "--max_dy", "0.25"], "--max_dy 0.25: the grid has steps of 0.1"),
        (["--optimizer", "cma-es", "--mutations", "1", "--crossovers", "1"], "CMA-ES needs 4"),
        (["--optimizer", "random", "--mutations", "0", "--crossovers", "0"], "a generation has no individual"),
        (["--optimizer", "gradient", "--epoch_samples", "1"], "--epoch_samples 1: less than one"),
        (["--metadata", "split=search"], "--metadata split="),
        (["--metadata", "positions=0"], "--positions"),
        *(  # they rise, so that weights go with them in a resumed search too
            (["--positions", text], rf"--positions: found {text[0]}.*; expected different percentages from 0 to 100 in")
            for text in ("100,0,50", "0,50,101", "0,50,50")
        ),
        (["--lambdas", "0.5,0.5"], "--lambdas: 2 weights for 3"),
        (["--choose", "1,0"], "--choose"),
        (["--choose", "1,-1,1"], "--choose: expected weights of 0 or more"),
        (["--examples", "0"], "--examples: expected at least 1, not 0"),
        (["--limit", "3"], "--limit is a flag of lm_eval"),
        *(
            (["--budget", text], "--budget: expected 90s, 10m, 2h or")
            for text in ("10", "m", "0prompts", "1 day", "nanm")
        ),
        (["--engine_args", "max_num_seqs=4"], "--engine_args: they are vLLM's"),
        (["--engine", "vllm", "--model_args", "peft=a"], "--engine vllm: .* without --model_args peft="),
        (["--ray_address", "auto"], "--ray_address: only workers"),
        (["--fewshot_as_multiturn", "true"], "--fewshot_as_multiturn: only a chat template"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line_before_a_model_is_loaded(flags, message):
    with pytest.raises(UserError, match=message) as refused:
        config.parse(flags)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "toyy"], "no task, group or tag is called 'toyy'"),
        (["--tasks", "zeroscrolls"], "ZeroSCROLLS has no examples to search on"),
        (["--guard", "toyy"], "--guard toyy: no task, group or tag is called 'toyy'"),
        (["--include_path", "nowhere"], "--include_path nowhere: no such folder"),
        (["--tasks", "FOLDER/empty.yaml"], "empty.yaml: cannot be read as tasks"),
        (["--model_args", "batch_size=4"], "--model_args batch_size=...: .* --batch_size"),
    ],
)
def test_what_no_search_can_take_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch, flags, message):
    monkeypatch.setattr("lpes_eval.methods.lpes.LPES.create_from_arg_obj", lambda *args, **kwargs: 1 / 0)
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(UserError, match=message):
        run.load(config.parse([flag.replace("FOLDER", str(tmp_path)) for flag in flags]))


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


def test_guards_that_were_measured_late_stand_in_the_tradeoff():
    entries = {"k": {"key": "k", "generation": 1}, "guards of k": {"generation": None, "guards": {"g": {"over": 0.3}}}}
    assert guards.with_late(entries) == {"k": entries["k"] | {"guards": {"g": {"over": 0.3}}}}


def test_flags_without_effect_are_named():
    flags = ["--optimizer", "random", "--population", "40", "--curve", "free", "--control_points", "3"]
    assert config.without_effect(flags, config.parse(flags)) == ["--control_points", "--population"]


def test_a_blind_first_generation_is_said_to_be_one(command, monkeypatch):
    from search.evaluator import Measured

    scores = {f"toy@{p}": 0.0 for p in (0, 50, 100)}
    monkeypatch.setattr("search.evaluator.Evaluator.__call__", lambda *_: Measured(0.0, scores, {}, 0.1))
    _, out, _ = command(*SEARCH_ONLY, "--guard", "none")
    assert out.count("individuals of the first generation have fitness 0.0000") == 1


def test_a_fitness_that_is_not_finite_is_an_error_that_names_factors_and_task(command, monkeypatch):
    monkeypatch.setattr("lm_eval.api.metrics.mean", lambda values: float("nan"))
    monkeypatch.setattr("search.tasks.Objective.aggregation", lambda self, column: lambda values: float("nan"))
    status, _, err = command(*SMALL)
    assert status == 2
    assert "the fitness of factors 1, 1, 1 is nan" in err
    assert "toy@0" in err


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


def test_the_token_of_the_hub_stands_in_no_file_and_no_output(command, tmp_path):
    arguments = "pretrained=some/model,trust_remote_code=True,token=hf_secret"
    _, out, err = command(*SMALL, "--held_out_examples", "4", "--model_args", arguments)
    files = [path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix in (".json", ".jsonl", ".md")]
    assert "trust_remote_code" in out
    assert "hf_secret" not in "".join([out, err, *files])


def test_the_command_that_gives_the_same_scores_has_whatever_changes_them(tmp_path):
    flags = ["--tasks", "toy*", "--num_fewshot", "0", "--fewshot_seed", "7", "--apply_chat_template", "--metadata"]
    flags += ["num_keys=9", "--fewshot_as_multiturn", "false", "--system_instruction", "Be brief.", "--gen_kwargs"]
    flags += [
        "max_gen_toks=3",
        "--model_args",
        "pretrained=a/b,max_length=99,token=hf_secret",
        "--include_path",
        "tasks",
    ]
    flags += ["--batch_size", "4", "--device", "cpu", "--confirm_run_unsafe_code", "--held_out_examples"]
    tasks = [SimpleNamespace(name=name, divided=name == "toy_plain") for name in ("toy", "toy_plain")]

    def command(tasks, examples, *more):
        args = config.parse([*flags, examples, *more, "--output", str(tmp_path)])
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


def test_factors_that_are_asked_for_again_cost_no_budget(command, tmp_path):
    flags = ["--optimizer", "random", "--control_points", "2", "--mutations", "20", "--crossovers", "0"]
    flags += ["--generations", "9", "--examples", "5", "--held_out_examples", "0"]
    assert command(*flags)[0] == 0
    asked = [entry["prompts"] for entry in journal(tmp_path / "out") if entry["generation"] is not None]
    assert len(asked) < 200  # of 200 draws some have the same factors
    assert command(*flags, "--budget", f"{sum(asked) + 1}prompts", output=tmp_path / "again")[0] == 0
    assert "The budget ended" not in (tmp_path / "again" / "summary.md").read_text()


def test_a_smaller_budget_takes_nothing_back_that_was_measured(command, tmp_path):
    assert command(*SEARCH_ONLY)[0] == 0
    before = found(tmp_path / "out").read_bytes(), journal(tmp_path / "out")
    assert command(*SEARCH_ONLY, "--budget", "1prompts")[0] == 0
    after = json.loads(found(tmp_path / "out").read_bytes())
    assert after["origin"]["search"].pop("budget") == ["prompts", 1]
    assert (after, journal(tmp_path / "out")) == (json.loads(before[0]), before[1])


def test_a_budget_ends_the_search_with_the_fittest_and_a_larger_one_goes_on(command, tmp_path):
    assert command(*SEARCH_ONLY, output=tmp_path / "whole")[0] == 0
    assert command(*SEARCH_ONLY, "--budget", "60prompts")[0] == 0
    entries = [entry for entry in journal(tmp_path / "out") if entry["generation"] is not None]
    assert len(entries) == 4  # of 15 prompts each
    assert report(tmp_path / "out")["best"]["fitness"] == max(entry["fitness"] for entry in entries)
    cut = "The budget ended the search in generation 0 of"
    assert cut in (tmp_path / "out" / "summary.md").read_text()
    assert command("--resume", str(tmp_path / "out"), "--budget", "1h")[0] == 0
    assert cut not in (tmp_path / "out" / "summary.md").read_text()
    whole, out = (json.loads(found(tmp_path / name).read_text()) for name in ("whole", "out"))
    assert out["origin"]["search"].pop("budget") == ["seconds", 3600]
    assert out == whole


def test_a_budget_does_not_end_the_search_with_what_was_given_up(command, tmp_path, monkeypatch):
    evaluate = run.Search.evaluate

    def given_up(search, individual):  # just below what would have been kept, and above what was
        entry = evaluate(search, individual)
        cutoff = search.optimizer.cutoff
        return entry if cutoff is None else entry | {"fitness": cutoff[1] - 1e-6, "stopped_after": 1}

    monkeypatch.setattr(run.Search, "evaluate", given_up)
    flags = ["--examples", "5", "--held_out_examples", "0", "--guard", "none", "--budget", "60prompts"]
    assert command(*flags, "--lambdas", "0.2,0.3,0.5")[0] == 0  # so that PI at 1.5 is not better
    assert report(tmp_path / "out")["stopped_early"] > 0
    assert report(tmp_path / "out")["factors"] == [1.0] * 3


def test_going_on_after_a_success_keeps_the_best_so_far(command, tmp_path, monkeypatch):
    monkeypatch.setattr(Outcome, "shown", property(lambda self: True))
    flags = [*SMALL, "--held_out_examples", "4", "--guard", "none"]
    assert command(*flags, "--budget", "60prompts")[0] == 0
    success = factors_file.load(found(tmp_path / "out")).digest()

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.Search, "evaluate", stopped)
    assert command(*flags)[0] == 130
    assert factors_file.load(tmp_path / "out" / "best_effort.json").digest() == success


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


def test_what_another_search_measured_says_nothing_about_the_time(command, tmp_path):
    flags = [*SEARCH_ONLY, "--guard", "toy_plain"]
    assert "at the plain model's pace" in command(*flags)[1]
    out = command(*flags, output=tmp_path / "again")[1]
    assert "at the plain model's pace" not in out
    assert {entry["seconds"] for entry in journal(tmp_path / "again")} == {0.0}


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


def test_weights_of_positions_are_refused_for_tasks_without_and_no_shots_are_kept(command, tmp_path):
    plain = ["--tasks", "toy_plain", *SMALL]
    status, _, err = command(*plain, "--choose", "0.2,0.3,0.5")
    assert status == 2
    assert "--choose: weights are for tasks by position" in err
    assert command(*plain, "--num_fewshot", "0", output=tmp_path / "shots")[0] == 0
    assert factors_file.load(found(tmp_path / "shots")).origin["search"]["num_fewshot"] == 0


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


def test_a_program_searches_as_the_command_does(command, toy_lm, task_folder, tmp_path, capsys):
    flags = {"include_path": task_folder, "generations": 1, "population": 4, "parents": 2, "held_out_examples": 4}
    result = search("toy", model=toy_lm, optimizer="ga", output=tmp_path / "out", **flags)
    assert result.factors.per_layer() == factors_file.load(found(tmp_path / "out")).per_layer()
    assert toy_lm.layer_factors is None  # as it was
    assert result.verdict in capsys.readouterr().out
    assert {entry["key"] for entry in result.history} <= {entry["key"] for entry in journal(tmp_path / "out")}
    assert result.plot().axes[0].get_ylabel() == "fitness on the search examples"

    class Fixed(optimizers.load("random")):
        def _propose(self):
            return [[Individual(self.space.line(1.2, 1.2), "fixed")]]

    own = search("toy", model=toy_lm, optimizer=Fixed, output=tmp_path / "own", **flags)
    assert own.factors.per_layer() == [1.2] * 3
    recorded = factors_file.load(found(tmp_path / "own")).origin["search"]
    assert recorded["optimizer"] == "Fixed"
    assert recorded.keys() & {"mutations", "finest"} == {"mutations"}  # its own settings, not the default's

    def rising(points, num_layers):
        return [1 + h * (points[-1][1] - 1) for h in range(num_layers)]

    flags |= {"control_points": 2}
    own = search("toy", model=toy_lm, optimizer=Fixed, curve=rising, output=tmp_path / "curve", **flags)
    assert own.factors.per_layer() == pytest.approx([1.0, 1.2, 1.4])
    assert len(own.history[0]["points"]) == 2
    with pytest.raises(UserError, match=r"curve: bands gives every layer its own factor"):
        search("toy", model=toy_lm, curve=rising)
    for flag, value in (("workers", 2), ("dry_run", True), ("resume", tmp_path)):
        with pytest.raises(UserError, match=rf"search\(\): {flag}: "):
            search("toy", model=toy_lm, **{flag: value})


def test_a_program_hands_over_what_the_command_line_would_take(tmp_path):
    read = parser.read({"positions": [50, 0], "guard": ["gsm8k", "ppl::0.2"], "output": tmp_path / "x",
                        "tasks": ["kv_retrieval,mdqa_pos", "gsm8k"], "metadata": ["num_keys=25"], "start": tmp_path,
                        "metrics": ["acc,none", "em"], "continuous": True, "epochs": 3})  # fmt: skip
    typed = ["--start", str(tmp_path), "--positions", "50,0", "--guard", "gsm8k", "--guard", "ppl::0.2", "--output",
             str(tmp_path / "x"), "--tasks", "kv_retrieval,mdqa_pos", "gsm8k", "--metadata", "num_keys=25", "--metrics",
             "acc,none;em", "--continuous", "--epochs", "3"]  # fmt: skip
    assert read == config.given(typed)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"populaton": 3}, "populaton: no flag of a search"),
        ({"budget": 600}, "budget: expected 90s, 10m, 2h or 20000prompts, not '600'"),
        ({"engine": "VLLM"}, "engine: expected one of transformers, vllm, not 'VLLM'"),
        ({"early_stopping": "of"}, "early_stopping: expected one of bound, probable, off"),
        ({"early_stopping": None}, "early_stopping: expected a value, not None"),
        ({"preset": "papr"}, "preset: expected one of default, paper, quick"),
        ({"optimizer": "genetic"}, "optimizer: expected one of bands, "),
        ({"curve": 5}, "curve: expected one of "),
        ({"examples": 2.5}, "examples: expected a whole number, not '2.5'"),
        ({"choose": "wrst"}, "choose: expected mean, worst, or weights"),
        ({"model": object()}, "model: found object, expected a name, or a loaded model of type lpes"),
        ({"no_cache": "yes"}, "no_cache: expected True or False, not 'yes'"),
        ({"positions": [0, "x"]}, "positions: expected numbers"),
    ],
)
def test_a_program_learns_which_of_its_values_no_search_takes(flags, message):
    with pytest.raises(UserError, match=rf"^search\(\): {message}"):
        search("kv_retrieval", **flags)


@pytest.mark.parametrize(
    ("loaded", "named"), [("some/model", "some/model"), (str(reference.path("kv")), "lpes-eval/reference-kv")]
)
def test_a_model_that_a_program_hands_over_goes_by_the_name_that_it_was_loaded_from(
    toy_lm, task_folder, tmp_path, monkeypatch, loaded, named
):
    monkeypatch.setattr(toy_lm.model.config, "_name_or_path", loaded)
    monkeypatch.setattr(toy_lm, "given", {"dtype": torch.float32, "max_length": 99, "factors": 1.2, "batch_size": 4})
    flags = {"include_path": task_folder, "generations": 0, "population": 4, "parents": 2, "held_out_examples": 0}
    search("toy", model=toy_lm, optimizer="ga", output=tmp_path / "out", **flags)
    origin = factors_file.load(found(tmp_path / "out")).origin
    assert (origin["model"], origin["model_args"]) == (named, {"dtype": "float32", "max_length": 99})


def test_a_program_may_name_the_model_and_a_preset(monkeypatch):
    def load(args, lm, *others):
        raise UserError(f"{args.model_args['pretrained']}, {lm}, {args.optimizer}")

    monkeypatch.setattr(run, "load", load)
    with pytest.raises(UserError, match="some/model, None, ga"):
        search("kv_retrieval", model="some/model", preset="paper")


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
