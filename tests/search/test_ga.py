"""The command, from its flags to its files, on a toy model."""

import io
import json
import logging
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from search.optimizer import CMAES, GeneticAlgorithm, RandomSearch

from lpes_eval import factors as factors_file
from lpes_eval import rope
from lpes_eval.errors import PromptTooLong, UserError
from search import arguments, ga, held_out, report, setup

REPOSITORY = Path(__file__).parents[2]
Layers = namedtuple("Layers", "num_layers")  # of a fitness, what the optimisers but gradient descent need to know
SMALL = ["--population", "5", "--parents", "3", "--epochs", "2", "--mutations", "3", "--crossovers", "1"]


def part_at(task, position):
    """As much of a ``Part`` as its name and position need."""
    name = f"{task}_pos_{position}"
    return SimpleNamespace(name=name, stem=task, position=float(position), numbers=[0], docs=[{}], divided=False)


@pytest.fixture
def command(toy_lm, task_folder, tmp_path, monkeypatch, capsys):
    """Runs the command on the toy model and returns its exit status and what it printed."""
    monkeypatch.setattr(setup, "load_model", lambda args: toy_lm)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*flags, output=tmp_path / "out"):
        argv = [*flags]
        if "--resume" not in flags:
            argv += [] if "--tasks" in flags else ["--tasks", "toy"]
            argv += ["--include_path", task_folder, "--control_points", "3", "--output", str(output)]
        status = ga.main(argv)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    yield run
    rope.remove(toy_lm.model)


def test_a_search_writes_factors_that_beat_what_it_was_told_to_beat(command, tmp_path):
    status, out, _ = command(*SMALL, "--held_out_examples", "4")
    assert status == 0
    folder = tmp_path / "out"
    report = json.loads((folder / "report.json").read_text())
    found = factors_file.load(folder / "factors.json")
    assert found.per_layer() == report["factors"]
    assert found.origin["fitness"]["value"] == report["best"]["fitness"]
    assert found.origin["search"]["examples"] == 200  # the flag: how many at most
    assert found.origin["search"]["lambdas"] == [0.2, 0.3, 0.5]
    # PI at 1.5 is the first individual (Eq. 8), so no search ends below it
    assert report["best"]["fitness"] >= report["to_beat"]["PI"]["fitness"]
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    individuals = [entry["fitness"] for entry in journal if entry["origin"] != "baseline"]
    assert report["best"]["fitness"] == max(individuals)
    assert [entry["origin"] for entry in journal[:3]] == ["baseline", "PI", "start"]
    assert journal[1]["key"] == journal[2]["key"]  # PI at 1.5 is an individual from when it is asked for
    assert len({entry["key"] for entry in journal}) == len(journal) - 1
    assert set(report["held_out"]) == {"baseline", f"PI {sum(found.per_layer()) / 3:.3f}", "found factors"}
    numbers = json.loads((folder / "held_out_samples.json").read_text())
    assert len(numbers["toy_pos_0"]) == 4
    assert "--samples" in out
    for name in ("summary.md", "convergence.png", "curve.png", "positions-toy.png"):
        assert (folder / name).stat().st_size > 0
    assert out.index("Fitness ") < out.index("To beat:") < out.index("generation 0/2") < out.index("# Search on toy")


def test_the_same_command_and_resume_end_with_the_same_bytes_and_measure_nothing_twice(command, tmp_path):
    flags = [*SMALL, "--held_out_examples", "0"]
    assert command(*flags)[0] == 0
    folder = tmp_path / "out"
    kept = {name: (folder / name).read_bytes() for name in ("factors.json", "journal.jsonl", "state.json")}
    # half of the journal gone, with a torn line at its end, as after a crash
    lines = kept["journal.jsonl"].splitlines(keepends=True)
    (folder / "journal.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]) + b'{"key": "ab')
    (folder / "state.json").unlink()
    (folder / "factors.json").unlink()
    status, out, _ = command("--resume", str(folder))
    assert status == 0
    assert "torn off" in out
    assert (folder / "factors.json").read_bytes() == kept["factors.json"]
    assert command(*flags)[0] == 0
    assert (folder / "factors.json").read_bytes() == kept["factors.json"]
    assert (folder / "state.json").read_bytes() == kept["state.json"]
    assert len((folder / "journal.jsonl").read_bytes().splitlines()) == len(lines)


def test_the_first_individual_may_be_the_fittest(command, tmp_path, monkeypatch):
    """It has the factors of PI at 1.5, which were measured before there was any individual, and is counted as one."""
    flags = ["--population", "1", "--parents", "1", "--epochs", "0", "--held_out_examples", "0"]
    assert command(*flags)[0] == 0
    assert factors_file.load(tmp_path / "out" / "factors.json").per_layer() == [1.5, 1.5, 1.5]
    entries = [json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()]
    assert [(entry["origin"], entry["generation"]) for entry in entries] == [
        ("baseline", None),
        ("PI", None),
        ("start", 0),
    ]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["evaluated"] == 1


def test_early_stopping_asks_less_and_finds_the_same_factors_to_the_byte(command, tmp_path, monkeypatch):
    monkeypatch.setattr("search.fitness.BOUNDED", {"luck"})  # it is one, as conftest.py computes it
    flags = [*SMALL, "--epochs", "4", "--parents", "2", "--held_out_examples", "0", "--no_cache", "--metrics", "luck"]
    flags += ["--tokens_per_batch", "1"]
    reports = {}
    for name, extra in (("patient", []), ("hasty", ["--early_stopping"])):
        assert command(*flags, *extra, output=tmp_path / name)[0] == 0
        reports[name] = json.loads((tmp_path / name / "report.json").read_text())
    assert reports["hasty"]["stopped_early"] > 0
    summary = (tmp_path / "hasty" / "summary.md").read_text()
    assert f"{reports['hasty']['stopped_early']} of them were given up early" in summary
    assert reports["hasty"]["prompts"] < reports["patient"]["prompts"]
    for file in ("factors.json", "settings.json"):
        assert (tmp_path / "hasty" / file).read_bytes() == (tmp_path / "patient" / file).read_bytes()
    journals = [
        {entry["key"]: entry for entry in map(json.loads, (tmp_path / name / "journal.jsonl").read_text().splitlines())}
        for name in ("patient", "hasty")
    ]
    assert journals[0].keys() == journals[1].keys()
    for key, entry in journals[1].items():
        full = journals[0][key]["fitness"]
        assert entry["fitness"] >= full - 1e-9 if "stopped_after" in entry else entry["fitness"] == full


def test_improbable_individuals_are_given_up_and_the_outcome_hangs_on_nothing_else(command, tmp_path, monkeypatch):
    monkeypatch.setattr("search.fitness.BOUNDED", {"luck"})
    flags = [*SMALL, "--epochs", "4", "--parents", "2", "--held_out_examples", "0", "--metrics", "luck"]
    flags += ["--early_stopping", "probable", "--early_stopping_error", "0.5"]
    flags += ["--early_stopping_check", "100"]
    status, out, _ = command(*flags, "--no_cache", output=tmp_path / "one")
    assert status == 0
    journal = [json.loads(line) for line in (tmp_path / "one" / "journal.jsonl").read_text().splitlines()]
    stopped = [entry for entry in journal if "stopped_after" in entry]
    assert stopped
    in_full = {entry["key"].removeprefix("check "): entry for entry in journal if entry["origin"] == "check"}
    assert in_full.keys() == {entry["key"] for entry in stopped}
    assert f"given up, now in full: {len(stopped)} of {len(stopped)} ..." in out
    lost = sum(in_full[entry["key"]]["fitness"] >= entry["floor"] for entry in stopped)
    assert all(set(entry["scores"]) == {"toy_pos_0", "toy_pos_50", "toy_pos_100"} for entry in journal)
    assert all(("examples" in entry) != ("stopped_after" in entry) for entry in journal)
    report = json.loads((tmp_path / "one" / "report.json").read_text())
    assert (report["stopped_early"], report["stopped_early_error"]) == (len(stopped), 0.5)
    summary = (tmp_path / "one" / "summary.md").read_text()
    assert f"{len(stopped)} of them were given up early. That was improbable to be wrong" in summary
    assert "at most 50 % are lost" in summary
    assert report["stopped_early_check"] == {"measured": len(stopped), "lost": lost}
    assert f"Of {len(stopped)} that were measured in full afterwards, {lost} would have" in summary

    # torn apart and gone on with
    lines = (tmp_path / "one" / "journal.jsonl").read_bytes().splitlines(keepends=True)
    factors = (tmp_path / "one" / "factors.json").read_bytes()
    (tmp_path / "one" / "journal.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]))
    (tmp_path / "one" / "state.json").unlink()
    assert command("--resume", str(tmp_path / "one"))[0] == 0
    assert (tmp_path / "one" / "factors.json").read_bytes() == factors
    # with a cache that knows what would have been the answer
    patient = [f for f in flags[:-2] if f not in ("--early_stopping", "probable")]
    assert command(*patient, output=tmp_path / "all")[0] == 0
    assert command(*flags, output=tmp_path / "two")[0] == 0
    assert (tmp_path / "two" / "factors.json").read_bytes() == factors
    again = [json.loads(line) for line in (tmp_path / "two" / "journal.jsonl").read_text().splitlines()]
    assert [entry["key"] for entry in again if "stopped_after" in entry] == [entry["key"] for entry in stopped]


def test_early_stopping_is_refused_where_nothing_can_be_proved(command):
    for flags, message in ([], "not known to be a mean"), (["--metrics", "misses"], "not known"):
        status, _, err = command("--early_stopping", *flags)
        assert status == 2
        assert message in err


def test_ctrl_c_ends_cleanly_says_how_to_go_on_and_loses_nothing(command, tmp_path, monkeypatch):
    flags = [*SMALL, "--held_out_examples", "0", "--no_cache"]
    assert command(*flags, output=tmp_path / "undisturbed")[0] == 0
    evaluate, calls = setup.Search.evaluate, []

    def interrupted(self, individual):
        calls.append(individual)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return evaluate(self, individual)

    monkeypatch.setattr(setup.Search, "evaluate", interrupted)
    status, _, err = command(*flags)
    assert status == 130
    assert f"python -m search.ga --resume {tmp_path / 'out'}" in err
    assert command("--resume", str(tmp_path / "out"))[0] == 0
    measured = [call.points for call in calls]
    assert measured[5] == measured[6]  # the one that was interrupted, and no other, is measured again
    factors = [(tmp_path / name / "factors.json").read_bytes() for name in ("out", "undisturbed")]
    assert factors[0] == factors[1]


def test_other_settings_in_the_same_folder_are_refused_with_the_difference(command):
    flags = [*SMALL, "--held_out_examples", "0"]
    assert command(*flags)[0] == 0
    status, _, err = command(*flags, "--seed", "1", "--examples", "3")
    assert status == 2
    assert "search.seed was 0, is now 1" in err
    assert "fitness.requests_sha256" in err
    assert err.splitlines()[-1].startswith("search: error: ")


def test_dry_run_prints_the_plan_and_measures_and_writes_nothing(command, tmp_path, monkeypatch):
    monkeypatch.setattr(setup.Search, "measure", lambda *_: pytest.fail("measured"))
    status, out, _ = command("--dry_run")
    assert status == 0
    assert "at most 512 individuals" in out
    assert "15 prompts an individual" in out
    assert re.search(r"^Time +\d+ prompts took .* at most about .* to search and .* to evaluate$", out, re.MULTILINE)
    assert not (tmp_path / "out").exists()


def test_the_plan_shows_where_on_the_grid_a_file_lets_the_search_begin(command, tmp_path):
    file = tmp_path / "off-grid.json"
    factors_file.Factors.from_curve("bezier", [(0, 1.04), (0.8, 1.26), (2, 1.71)], num_layers=3).save(file)
    status, out, _ = command("--start", str(file), "--dry_run")
    assert status == 0
    assert "individuals, from 1, 1.3, 1.7\n" in out


@pytest.mark.parametrize(
    ("flags", "kind", "evaluations"),
    [
        ([], GeneticAlgorithm, 512),
        (["--optimizer", "random"], RandomSearch, 504),
        (["--optimizer", "cma-es"], CMAES, 504),
        (["--preset", "quick"], GeneticAlgorithm, 12 + 4 * (6 + 2 * 2)),
        (["--preset", "quick", "--optimizer", "random"], RandomSearch, 5 * (6 + 2 * 2)),
        (["--preset", "quick", "--optimizer", "cma-es"], CMAES, 5 * (6 + 2 * 2)),
        (["--optimizer", "cma-es", "--mutations", "2", "--crossovers", "1", "--epochs", "0"], CMAES, 4),
        (["--preset", "quick", "--epochs", "1"], GeneticAlgorithm, 12 + 1 * (6 + 2 * 2)),
    ],
)
def test_flags_choose_the_optimizer_and_its_budget(flags, kind, evaluations):
    optimizer = setup.make_optimizer(arguments.parse(flags), Layers(32))
    assert type(optimizer) is kind
    assert optimizer.max_evaluations == evaluations


def test_the_start_is_a_number_wide_or_a_file(tmp_path):
    def first(*flags, layers=6):
        return [i.points for i in setup.make_optimizer(arguments.parse(flags), Layers(layers)).ask()]

    assert {y for _, y in first()[0]} == {1.5}
    assert {y for _, y in first("--start", "1.2")[0]} == {1.2}
    assert ((0.0, 1.0), (2.0, 1.0), (3.0, 1.0), (5.0, 1.0)) in first("--start", "wide")
    assert first("--preset", "quick") != first("--preset", "quick", "--start", "1.5")
    points = [(0, 1.0), (1, 1.1), (4, 1.6), (5, 1.3)]
    file = tmp_path / "curve.json"
    factors_file.Factors.from_curve("bezier", points, num_layers=6).save(file)
    assert first("--start", str(file))[0] == tuple(points)
    args = arguments.parse(["--start", str(file)])
    file.unlink()  # its content is part of the search from now on
    assert setup.start_points(args, setup.make_optimizer(args, Layers(6)).space) == tuple(points)
    factors_file.Factors.from_list([1.0, 1.1, 1.9]).save(file)
    assert [y for _, y in first("--start", str(file), "--curve", "free", layers=3)[0]] == [1.0, 1.1, 1.9]
    assert [y for _, y in first("--start", str(file), "--curve", "free", "--skip", "1", layers=3)[0]] == [1.1, 1.9]
    shipped = factors_file.parse("reference").per_layer()
    assert [y for _, y in first("--start", "reference", "--curve", "free", "--continuous")[0]] == shipped
    factors_file.Factors.from_list([1.033, 1.449, 1.25, 1.0]).save(file)
    assert [y for _, y in first("--start", str(file), "--curve", "free", layers=4)[0]] == [1.0, 1.4, 1.3, 1.0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--start", "1.25"], "--start 1.25: is not searched; expected tenths from 1 to 2"),
        (["--start", "2.5", "--continuous"], "--start 2.5: is not searched; expected a factor from 1 to 2"),
        (["--start", "nan"], "--start: .*nan"),
        (["--start", "none.json"], "--start: none.json: no such file"),
        (["--start", "{file}", "--curve", "linear", "--continuous"], "expected 4 control points with x from 0 to 5"),
        (["--start", "wide", "--optimizer", "cma-es"], "no population"),
        (["--start", "1.2", "--optimizer", "random"], "leave it out"),
        (["--start", "{file}"], "add --curve linear"),
        (["--start", "{file}", "--curve", "linear", "--skip", "1"], "let --skip fit the file"),
        (["--start", "{file}", "--curve", "linear"], "expected 4 control points"),
    ],
)
def test_a_start_that_is_none_is_refused(tmp_path, flags, message):
    file = tmp_path / "line.json"
    factors_file.Factors.from_curve("linear", [(0, 1.0), (5, 1.5)], num_layers=6).save(file)
    with pytest.raises(UserError, match=message) as refused:
        setup.make_optimizer(arguments.parse([flag.format(file=file) for flag in flags]), Layers(6))
    assert "\n" not in str(refused.value)


def test_a_blind_first_generation_is_said_to_be_one(command, monkeypatch):
    from search.fitness import Measured

    scores = {f"toy_pos_{p}": 0.0 for p in (0, 50, 100)}
    monkeypatch.setattr("search.fitness.Fitness.__call__", lambda *_: Measured(0.0, scores, {}, 0.1))
    _, out, _ = command(*SMALL, "--held_out_examples", "0")
    assert out.count("individuals of the first generation have fitness 0.0000, so parents are drawn by lot") == 1
    assert out.index("generation 0/2") < out.index("drawn by lot") < out.index("generation 1/2")


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        (["--population", "40", "--preset", "quick"], []),
        (["--optimizer", "random", "--population", "40", "--epochs", "3"], ["--population"]),
        (["--optimizer=gradient", "--curve=linear", "--mutations=3"], ["--curve", "--mutations"]),
        (["--curve", "free", "--control_points", "3", "--max_dy", "0.1"], ["--control_points"]),
        (["--learning_rate", "0.1"], ["--learning_rate"]),
    ],
)
def test_flags_without_effect_are_named(flags, idle):
    assert arguments.without_effect(flags, arguments.parse(flags)) == idle


def test_skipped_layers_are_left_alone_and_free_factors_are_one_a_layer():
    optimizer = setup.make_optimizer(arguments.parse(["--skip", "2", "--curve", "free"]), Layers(12))
    assert (optimizer.space.L, optimizer.space.d) == (10, 9)
    with pytest.raises(UserError, match="at least 2 must be left"):
        setup.make_optimizer(arguments.parse(["--skip", "31"]), Layers(32))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume", "nowhere"], "holds no search"),
        (["--resume", "nowhere", "--seed", "3"], "leave the other flags out"),
        (["--model_args", "factors=x.json"], "makes its own factors"),
        (["--metadata", "split=search"], "--metadata split=...: a search takes its own split"),
        (["--lambdas", "0.2,0.3"], "--lambdas: 2 weights for 3 --positions (0, 50, 100); expected one each"),
        (["--output", __file__], "test_ga.py: is a file; expected a folder"),
        (["--search_seed", "1.5"], "--search_seed: expected a whole number, not '1.5'"),
        (["--batch_size", "many"], "--batch_size: expected a whole number, not 'many'"),
        (["--batch_size", "0"], "--batch_size: expected at least 1, not 0"),
        (["--tokens_per_batch", "-5"], "--tokens_per_batch: expected at least 1, not -5"),
        (["--examples", "0"], "--examples: expected at least 1, not 0"),
        (["--held_out_examples", "-2"], "--held_out_examples: expected at least 0, not -2"),
        (["--num_fewshot", "-1"], "--num_fewshot: expected at least 0, not -1"),
        (["--positions", "0,50,x"], "--positions: expected numbers with commas between them, not '0,50,x'"),
        (["--early_stopping_error", "1"], "--early_stopping_error: expected a number between 0 and 1, not 1"),
        (["--early_stopping_error", "x"], "--early_stopping_error: expected a number, not 'x'"),
        (["--gen_kwargs", "do_sample"], "expected key=value or a JSON object"),
        (
            ["--optimizer", "cma-es", "--mutations", "1", "--crossovers", "1"],
            "--crossovers 1: CMA-ES needs 4 individuals",
        ),
        (["--population", "3", "--parents", "5"], "--parents 5: expected at most as many as --population, 3"),
        (["--max_dy", "nan"], "--max_dy: expected a number, not 'nan'"),
        (
            ["--max_dy", "0.05"],
            "--max_dy 0.05: the grid has steps of 0.1 (Table 9); take a multiple, or leave the grid",
        ),
        (["--max_dx", "0.5"], "--max_dx 0.5: the grid has steps of 1 (Table 9)"),
        (["--max_dx", "-1"], "--max_dx: expected 0 or more, not -1"),
        (["--optimizer", "gradient", "--learning_rate", "-1"], "--learning_rate: expected more than 0, not -1"),
        (["--optimizer", "gradient", "--epoch_samples", "8"], "--epoch_samples 8: less than one --gradient_batch, 32"),
        (["--optimizer", "gradient", "--start", "wide"], "--start wide: gradient has no population"),
        (
            ["--optimizer", "gradient", "--early_stopping"],
            "--early_stopping: gradient needs every individual's fitness",
        ),
        (["--fewshot_as_multiturn"], "add --apply_chat_template"),
        (["--limit", "5"], "--limit is a flag of lm_eval that a search does not take: --examples"),
        (["--model", "hf"], "--model is a flag of lm_eval that a search does not take: a search always runs"),
        (["--taskz", "a"], "unrecognized arguments: --taskz"),
        (["--early_stopping_check", "3"], "--early_stopping_check: nothing is given up that could be checked"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_status_2_before_a_model_is_loaded(flags, message, capsys, monkeypatch):
    monkeypatch.setattr("lm_eval.models.huggingface.HFLM.__init__", lambda *_, **__: pytest.fail("loaded"))
    assert ga.main(flags) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_one_of_several_processes_is_refused_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("lm_eval.models.huggingface.HFLM.__init__", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(UserError, match="a search is one process, and this is one of 2; start it with python -m"):
        setup.load_model(arguments.parse([]))


def test_the_command_says_how_to_reproduce_its_scores():
    args = arguments.parse(["--model_args", "pretrained=a/b,dtype=float16", "--device", "cuda", "--output", "o"])
    assert held_out.reproduce_command(args, []) == (
        "lm_eval --model lpes --model_args pretrained=a/b,dtype=float16,factors=o/factors.json "
        "--tasks kv_retrieval --device cuda"
    )


def test_flags_of_lm_eval_are_read_as_lm_eval_reads_them_and_handed_back_to_it():
    from lm_eval._cli.harness import HarnessCLI

    flags = ["--tasks", "a,b*", "c.yaml", "--gen_kwargs", "temperature=0,until=['x,y']", "max_gen_toks=5"]
    flags += ["--metadata", '{"num_keys": 4}', "--model_args", "pretrained=a/b,dtype=float16", "revision=main"]
    flags += ["--num_fewshot", "2", "--apply_chat_template", "--fewshot_as_multiturn", "false"]
    flags += ["--system_instruction", "be brief", "--include_path", "t"]
    args = arguments.parse([*flags, "--fewshot_seed", "5", "--output", "o"])
    theirs = HarnessCLI()._parser.parse_args(["run", *flags])
    for name in ("gen_kwargs", "metadata", "model_args", "num_fewshot", "apply_chat_template", "fewshot_as_multiturn"):
        assert getattr(args, name) == getattr(theirs, name)
    assert args.gen_kwargs == {"temperature": 0, "until": ["x,y"], "max_gen_toks": 5}
    assert args.tasks == ["a", "b*", "c.yaml"]
    # what the search prints at its end gives lm_eval the same again
    again = HarnessCLI()._parser.parse_args(["run", *shlex.split(held_out.reproduce_command(args, []))[1:]])
    for name in ("gen_kwargs", "metadata", "num_fewshot", "apply_chat_template", "fewshot_as_multiturn"):
        assert getattr(again, name) == getattr(theirs, name)
    assert again.system_instruction == "be brief"
    assert again.seed == [0, 1234, 1234, 5]
    assert again.model_args == {**theirs.model_args, "factors": "o/factors.json"}


def test_nested_model_arguments_are_handed_back_to_lm_eval_as_json():
    from lm_eval._cli.harness import HarnessCLI

    model_args = {"pretrained": "a/b", "max_memory": {"0": "10GiB", "cpu": "30GiB"}, "revision": "1"}
    args = arguments.parse(["--model_args", json.dumps(model_args), "--output", "o"])
    again = HarnessCLI()._parser.parse_args(["run", *shlex.split(held_out.reproduce_command(args, []))[1:]])
    assert again.model_args == {**model_args, "factors": "o/factors.json"}


def test_a_pattern_is_handed_to_lm_eval_as_the_tasks_that_it_stands_for():
    args = arguments.parse(["--tasks", "kv_50*,mdqa_pos", "--output", "o"])
    parts = [part_at("kv_50", 0), part_at("kv_50", 100), part_at("mdqa", 0)]
    assert "--tasks kv_50_pos_0,kv_50_pos_100,mdqa_pos " in held_out.reproduce_command(args, parts) + " "


@pytest.mark.parametrize(
    ("tasks", "folder"),
    [
        (["kv_retrieval"], "kv_retrieval-ga-0"),
        (["kv_retrieval_50*", "gsm8k"], "kv_retrieval_50_+gsm8k-ga-0"),
        (["/my/own task.yaml"], "my_own_task.yaml-ga-0"),
    ],
)
def test_the_folder_is_named_after_the_tasks(tasks, folder):
    assert arguments.parse(["--tasks", *tasks]).output == Path("runs") / folder


def test_a_flag_that_is_given_again_adds_to_what_it_said_as_for_lm_eval():
    from lm_eval._cli.harness import HarnessCLI

    flags = shlex.split(
        "--tasks a,b --tasks c --model_args pretrained=x --model_args dtype=float16 --gen_kwargs temperature=0 "
        "--gen_kwargs max_gen_toks=9 --metadata num_keys=4 --metadata search_seed=1"
    )
    ours, theirs = arguments.parse(flags), HarnessCLI()._parser.parse_args(["run", *flags])
    for name in ("tasks", "model_args", "gen_kwargs", "metadata"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_a_cpu_is_not_asked_how_large_a_batch_it_can_take():
    lm = setup.load_model(arguments.parse(["--model_args", "pretrained=reference-kv", "--device", "cpu"]))
    assert lm.batch_size == 1
    lm = setup.load_model(
        arguments.parse(["--model_args", "pretrained=reference-kv", "--device", "cpu", "--batch_size", "3"])
    )
    assert lm.batch_size == 3


def test_help_needs_neither_torch_nor_lm_eval():
    probe = (
        "import sys, search.ga; from search.arguments import build_parser; build_parser().format_help(); "
        "assert not {'torch', 'lm_eval'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": "."})


def test_a_resumed_search_remembers_its_best_and_its_place(command, tmp_path, monkeypatch):
    flags = [*SMALL, "--held_out_examples", "0"]
    evaluate, calls = setup.Search.evaluate, []

    def interrupted(self, individual):
        calls.append(individual)
        if self.optimizer.generation == 2:
            raise KeyboardInterrupt
        return evaluate(self, individual)

    monkeypatch.setattr(setup.Search, "evaluate", interrupted)
    _, before, _ = command(*flags)
    monkeypatch.setattr(setup.Search, "evaluate", evaluate)
    _, after, _ = command("--resume", str(tmp_path / "out"))
    last = [line for line in before.splitlines() if line.startswith("generation")][-1]
    first = next(line for line in after.splitlines() if line.startswith("generation"))
    best = lambda line: float(line.split("best ")[1].split()[0])  # noqa: E731
    assert first.startswith("generation 2/2")
    assert best(first) >= best(last) > 0
    earlier = sum(line.startswith(("generation 0/2", "generation 1/2")) for line in before.splitlines())
    assert f"individual {earlier + 1} " in first  # one that came twice counts twice, as in the run before


def test_the_live_display_shows_what_there_is_to_beat_and_the_best_so_far(toy_lm, task_folder):
    from rich.console import Console
    from search.fitness import Fitness
    from search.parts import load_parts

    args = arguments.parse(["--control_points", "3"])
    fitness = Fitness(toy_lm, load_parts(toy_lm, ["toy"], include_path=task_folder))
    search = setup.Search(args, toy_lm, fitness, setup.make_optimizer(args, fitness), {})
    scores = {part.name: 0.25 for part in fitness.parts}
    tally = report._Tally(search, {"baseline": {"fitness": 0.125, "scores": scores}})
    tally.add({"fitness": 0.5, "scores": scores, "seconds": 2.0}, True)
    tally.add({"fitness": 0.375, "scores": scores, "seconds": 2.0}, True)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report._table(tally, {"fitness": 0.375, "scores": scores}))
    shown = console.export_text()
    assert "generation 0/20" in shown
    assert "individual 2 of at most 512" in shown
    assert "7.5 prompts/s" in shown  # 15 prompts each
    assert "about 17 min" in shown  # 510 more of 2 s each
    for name, fitness_shown in (("baseline", "0.1250"), ("best so far", "0.5000"), ("this one", "0.3750")):
        assert any(name in line and fitness_shown in line for line in shown.splitlines())


def test_a_search_whose_journal_lost_its_best_individual_evaluates_it_again(command, tmp_path):
    assert command(*SMALL, "--held_out_examples", "0")[0] == 0
    folder = tmp_path / "out"
    factors = (folder / "factors.json").read_bytes()
    lines = (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
    best = max(range(3, len(lines)), key=lambda k: json.loads(lines[k])["fitness"])
    assert json.loads(factors)["origin"]["fitness"]["value"] == json.loads(lines[best])["fitness"]
    (folder / "journal.jsonl").write_bytes(b"".join(lines[:best] + lines[best + 1 :]))
    status, out, _ = command("--resume", str(folder))
    assert status == 0
    assert "state.json knows individuals that the journal does not: the generations so far are drawn again" in out
    assert (folder / "factors.json").read_bytes() == factors
    assert len((folder / "journal.jsonl").read_bytes().splitlines()) == len(lines)


@pytest.mark.parametrize("state", ['{"gener', "{}", "[]"])
def test_a_damaged_state_is_said_to_be_and_costs_nothing(command, tmp_path, monkeypatch, state):
    assert command(*SMALL, "--held_out_examples", "0")[0] == 0
    factors = (tmp_path / "out" / "factors.json").read_bytes()
    (tmp_path / "out" / "state.json").write_text(state)
    monkeypatch.setattr(setup.Search, "evaluate", lambda *_: pytest.fail("evaluated again"))
    status, out, _ = command("--resume", str(tmp_path / "out"))
    assert status == 0
    assert out.count("state.json is damaged: the generations so far are drawn again, from the journal") == 1
    assert (tmp_path / "out" / "factors.json").read_bytes() == factors


def test_damaged_arguments_are_no_default_search(tmp_path, capsys):
    (tmp_path / "arguments.json").write_text("[]")
    assert ga.main(["--resume", str(tmp_path)]) == 2
    assert "arguments.json: damaged" in capsys.readouterr().err


def test_a_setting_that_no_task_takes_is_refused_before_the_model(monkeypatch, capsys):
    monkeypatch.setattr(setup, "load_model", lambda args: pytest.fail("loaded"))
    assert ga.main(["--metadata", "num_keyz=6"]) == 2
    assert "num_keyz=6: no setting of this task; expected num_keys=6" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "said"), [(OSError(28, "No space left on device", "j.part"), "j.part: No space")])
def test_a_full_disk_is_one_line_and_says_how_to_go_on(command, tmp_path, monkeypatch, error, said):
    def full(*_, **__):
        raise error

    monkeypatch.setattr("search.report.write", full)
    status, _, err = command(*SMALL, "--held_out_examples", "0")
    assert status == 2
    assert f"\nsearch: error: {said}" in err
    assert f"go on with: python -m search.ga --resume {tmp_path / 'out'}" in err


@pytest.mark.parametrize(
    ("here", "plain", "low", "high", "says"),
    [
        (0.5, 0.5, 0.1, 0.2, "no individual is fitter than the plain model"),
        (0.6, 0.5, 0.1, 0.2, "better than the plain model"),
        (0.6, 0.5, -0.2, -0.1, "worse than the plain model"),
        (0.6, 0.5, -0.1, 0.1, "not clearly better or worse than the plain model"),
    ],
)
def test_the_verdict_goes_by_the_held_out_examples(here, plain, low, high, says):
    part = part_at("toy", 0)
    part.sign, part.questions, part.task = 1, [1, 2], SimpleNamespace(config=SimpleNamespace(metadata=None))
    difference = SimpleNamespace(difference=(low + high) / 2, low=low, high=high)
    held_out = SimpleNamespace(parts=[part], comparisons={("toy", "baseline"): SimpleNamespace(mean=difference)})
    search = SimpleNamespace(args=SimpleNamespace(skip=0, curve="free"))
    found = factors_file.Factors.from_curve("free", [1.0, 1.2], num_layers=2)
    said = report.verdict(search, {"baseline": {"fitness": plain}}, {"fitness": here}, found, held_out)
    assert says in said
    assert ("2 questions are too narrow" in said) == (here > plain)
    assert "Position Interpolation" not in said
    uniform = factors_file.Factors.from_curve("free", [1.2, 1.2], num_layers=2)
    said = report.verdict(search, {"baseline": {"fitness": 0.1}}, {"fitness": here}, uniform, None)
    assert "not measured on held-out examples" in said
    assert "this is Position Interpolation" in said


@pytest.mark.parametrize(("curve", "advised"), [("bezier", True), ("free", False)])
def test_who_found_nothing_is_told_of_factors_without_a_curve_unless_that_was_tried(curve, advised):
    search = SimpleNamespace(args=SimpleNamespace(skip=0, curve=curve))
    plain = factors_file.Factors.from_list([1.0, 1.0])
    said = report.verdict(search, {"baseline": {"fitness": 0.5}}, {"fitness": 0.5}, plain, None)
    assert ("(--curve free)" in said) == advised


def test_held_out_examples_that_are_refused_are_refused_before_the_search(command, tmp_path, monkeypatch):
    from search import parts

    load_parts = parts.load_parts

    def refusing(lm, tasks, **options):
        if options.get("split") == "held_out":
            raise PromptTooLong("toy, question 7: 1100 prompt tokens, at most 1000")
        return load_parts(lm, tasks, **options)

    monkeypatch.setattr(parts, "load_parts", refusing)
    status, _, err = command(*SMALL)
    assert status == 2
    assert "held-out examples: toy, question 7: 1100 prompt tokens, at most 1000; or leave these out" in err
    assert not (tmp_path / "out").exists()
    assert command(*SMALL, "--held_out_examples", "0")[0] == 0


def test_what_the_search_found_is_reported_even_if_the_held_out_evaluation_fails(command, tmp_path, monkeypatch):
    def failing(search, found):
        raise UserError("no")

    monkeypatch.setattr(ga, "evaluate_held_out", failing)
    assert command(*SMALL, "--held_out_examples", "4")[0] == 2
    assert "held_out" not in json.loads((tmp_path / "out" / "report.json").read_text())
    assert "On the search examples" in (tmp_path / "out" / "summary.md").read_text()


def test_going_on_with_a_finished_search_measures_nothing_even_without_a_cache(command, tmp_path, monkeypatch):
    assert command(*SMALL, "--held_out_examples", "4", "--no_cache")[0] == 0
    files = [tmp_path / "out" / name for name in ("summary.md", "report.json")]
    before = [file.read_text() for file in files]
    monkeypatch.setattr("search.fitness.Fitness.__call__", lambda *_: pytest.fail("measured again"))
    status, out, _ = command("--resume", str(tmp_path / "out"))
    assert status == 0
    assert "The search itself is at its end." in out
    assert "to go at this pace" not in out
    assert json.loads(files[1].read_text()) == json.loads(before[1])
    held_out = lambda text: text[text.index("## toy: held-out") :]  # noqa: E731
    assert held_out(files[0].read_text()) == held_out(before[0])


def test_a_fitness_that_is_not_finite_is_an_error_that_names_factors_and_task(command, monkeypatch):
    from search.fitness import Measured

    scores = {"toy_pos_0": 0.5, "toy_pos_50": float("inf"), "toy_pos_100": 0.5}
    monkeypatch.setattr("search.fitness.Fitness.__call__", lambda *_: Measured(float("inf"), scores, {}, 0.1))
    status, _, err = command(*SMALL, "--held_out_examples", "0")
    assert status == 2
    assert err.splitlines()[-1].startswith("search: error: the fitness of factors 1, 1, 1 is inf, by toy_pos_50 (inf)")


def test_pi_as_the_best_individual_is_counted_drawn_and_remembered(command, tmp_path, monkeypatch):
    from search.fitness import Fitness, Measured

    def measured(self, factors, *_):
        values = self._per_layer(factors)
        fitness = 1.0 if values == [1.5] * 3 else 0.1 + sum(values) / 100
        return Measured(fitness, {part.name: fitness for part in self.parts}, {}, 0.5)

    monkeypatch.setattr(Fitness, "__call__", measured)
    _, undisturbed, _ = command(*SMALL, "--held_out_examples", "0", output=tmp_path / "whole")
    journal = [json.loads(line) for line in (tmp_path / "whole" / "journal.jsonl").read_text().splitlines()]
    of_a_generation = [entry for entry in journal if entry["generation"] is not None]
    found = json.loads((tmp_path / "whole" / "report.json").read_text())
    assert found["evaluated"] == len(of_a_generation) == len({entry["key"] for entry in journal}) - 1
    assert max(entry["fitness"] for entry in of_a_generation) == found["best"]["fitness"] == 1.0
    assert set(found["to_beat"]["PI"]) == {"key", "fitness", "scores", "seconds"}
    assert "PI 1.500" in undisturbed

    evaluate = setup.Search.evaluate

    def interrupted(self, individual):
        if self.optimizer.generation == 2:
            raise KeyboardInterrupt
        return evaluate(self, individual)

    monkeypatch.setattr(setup.Search, "evaluate", interrupted)
    command(*SMALL, "--held_out_examples", "0")
    monkeypatch.setattr(setup.Search, "evaluate", evaluate)
    _, resumed, _ = command("--resume", str(tmp_path / "out"))
    place = lambda text: [x.split("  left")[0] for x in text.splitlines() if x.startswith("generation 2")]  # noqa: E731
    assert place(resumed) == place(undisturbed)


def test_individuals_that_a_cache_knew_say_nothing_about_the_time_to_go():
    optimizer = SimpleNamespace(max_evaluations=10, generation=0, told_so_far=0)
    search = SimpleNamespace(optimizer=optimizer, fitness=SimpleNamespace(prompts=4))
    tally = report._Tally(search, {})
    for _ in range(4):
        tally.add({"fitness": 0.5, "seconds": 0.0}, True)
    assert tally.eta == "-"
    tally.add({"fitness": 0.5, "seconds": 3.0}, True)
    assert tally.eta == "about 15.0 s"


def test_the_plan_counts_held_out_prompts_and_checks(command, monkeypatch):
    monkeypatch.setattr("search.fitness.BOUNDED", {"luck"})
    flags = ["--metrics", "luck", "--early_stopping", "--early_stopping_check", "3", "--held_out_examples", "4"]
    _, out, _ = command(*SMALL, *flags, "--dry_run")
    assert f"at most {15 * (5 + 2 * 5 + 2 + 3)} prompts" in out
    assert "45 of these to check what was given up" in out
    assert "and 24 held-out prompts at the end" in out  # two positions, three factors


def test_scores_of_several_tasks_by_position_are_told_apart():
    parts = [part_at(task, position) for task in ("kv", "mdqa") for position in (0, 100)]
    search = SimpleNamespace(fitness=SimpleNamespace(parts=parts))
    entry = {"scores": {part.name: 0.5 for part in parts}}
    assert report.scores(search, entry) == "kv 0 %: 0.500  kv 100 %: 0.500  mdqa 0 %: 0.500  mdqa 100 %: 0.500"
    search.fitness.parts = parts[:2]
    assert report.scores(search, entry) == "0%: 0.500  100%: 0.500"


def test_examples_of_one_question_are_paired_by_their_mean(command, tmp_path, monkeypatch):
    from search.parts import Part

    monkeypatch.setattr(Part, "questions", property(lambda part: [number % 3 for number in part.numbers]))
    flags = ["--population", "2", "--parents", "1", "--epochs", "0", "--held_out_examples", "7"]
    assert command(*flags, "--tasks", "toy_plain")[0] == 0
    folder = tmp_path / "out"
    kept = json.loads((folder / "held_out.json").read_text())
    numbers = json.loads((folder / "held_out_samples.json").read_text())["toy_plain"]
    rows = [measured["examples"]["toy_plain"] for measured in kept["measured"].values()]
    means = [
        [statistics.fmean(v for v, n in zip(row, numbers, strict=True) if n % 3 == q) for q in range(3)] for row in rows
    ]
    difference = json.loads((folder / "report.json").read_text())["differences"][0]
    assert difference["questions"] == 3
    # The last of those measured are the factors found; where they are uniform, PI is not measured apart.
    assert difference["mean"] == pytest.approx(statistics.fmean(means[-1]) - statistics.fmean(means[0]))
    summary = (folder / "summary.md").read_text()
    assert "7 examples of 3 questions" in summary
    assert "Examples that share a question are averaged" in summary
    assert "worst position" not in summary  # a task without positions has none


def test_one_held_out_question_gives_no_interval_and_valid_json(command, tmp_path):
    flags = ["--population", "1", "--parents", "1", "--epochs", "0", "--held_out_examples", "1"]
    assert command(*flags, "--metadata", "search_seed=3")[0] == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=pytest.fail)
    assert found["differences"][0]["interval"] == [None, None]
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "without an interval, as one question gives none; worst position" in summary
    assert "nan" not in summary
    assert "held-out examples, 1 question" in summary
    assert "search sample 3" in summary


def test_free_factors_name_no_control_points(command, tmp_path):
    flags = ["--population", "1", "--parents", "1", "--epochs", "0", "--held_out_examples", "0", "--curve", "free"]
    assert command(*flags)[0] == 0
    assert "control_points" not in factors_file.load(tmp_path / "out" / "factors.json").origin["search"]


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        ("ga", "mutations crossovers start population parents crossover_tries max_dx max_dy"),
        ("cma-es", "mutations crossovers start"),
        ("random", "mutations crossovers"),
        ("gradient", "learning_rate epoch_samples gradient_batch start"),
    ],
)
def test_a_search_is_known_by_the_flags_that_decide_what_it_finds(optimizer, names):
    """In this order, as searches that are there already have them."""
    always = "optimizer curve control_points continuous skip seed epochs"
    assert [*arguments.SETTINGS, *arguments.SETTINGS_OF[optimizer]] == f"{always} {names}".split()
