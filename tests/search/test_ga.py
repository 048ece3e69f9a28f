"""The command, from its flags to its files, on a toy model."""

import errno
import json
import os
import re
import shlex
import signal
import time
from unittest.mock import Mock

from lpes_eval import factors as factors_file
from lpes_eval import rope
from search import ga
from search.answer_loss import AnswerLoss
from search.bench import Bench
from search.held_out import Outcome
from search.report import pages
from small_searches import SEARCH_ONLY, SMALL, found, journal, report

DRAW = pages.draw


def test_the_published_search_writes_what_it_found_and_how_it_went(command, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "draw", DRAW)
    status, out, _ = command(*SMALL, "--held_out_examples", "4", "--num_fewshot", "0")
    assert status == 0
    folder = tmp_path / "out"
    written, factors = report(folder), factors_file.load(found(folder))
    assert factors.per_layer() == written["factors"]
    assert factors.origin["fitness"]["value"] == written["best"]["fitness"]
    assert factors.origin["search"]["lambdas"] == [1.0, 1.0, 1.0]
    assert factors.origin["search"]["num_fewshot"] == 0
    assert factors.origin["search"]["versions"].keys() == {"toy"}
    assert factors.origin["proof"]["differences"] == written["differences"]
    assert factors.origin["proof"]["command"].startswith("lm_eval --model lpes")
    entries = journal(folder)
    assert [entry["origin"] for entry in entries[:2]] == ["baseline", "start"]
    assert entries[1]["factor"] == 1.5
    assert written["best"]["fitness"] == max(entry["fitness"] for entry in entries if entry["origin"] != "baseline")
    assert len({entry["key"] for entry in entries}) == len(entries)
    assert {"baseline", "found factors"} <= set(written["held_out"])
    assert set(written["best"]["scores"]) == {"toy@0", "toy@50", "toy@100"}
    for name in ("summary.md", "convergence.png", "curve.png", "positions-toy.png"):
        assert (folder / name).stat().st_size > 0
    assert out.index("Fitness ") < out.index("To beat:") < out.index("generation 0") < out.index("# Search on toy")
    assert "lm_eval --model lpes" in out


def test_the_baseline_and_the_start_of_a_search_are_measured_under_their_factors(command, tmp_path, monkeypatch):
    monkeypatch.setattr(rope, "apply", apply := Mock(wraps=rope.apply))
    command(*SEARCH_ONLY)
    assert [list(call.args[1]) for call in apply.call_args_list[:2]] == [[1.0] * 3, [1.5] * 3]
    baseline, start = journal(tmp_path / "out")[:2]
    assert baseline["examples"] != start["examples"]


def test_the_same_command_goes_on_and_ends_with_the_same_bytes_and_measures_nothing_twice(command, tmp_path):
    assert command(*SEARCH_ONLY)[0] == 0
    folder = tmp_path / "out"
    name = found(folder)
    kept, lines = name.read_bytes(), (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "journal.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]) + b'{"key": "ab')
    name.unlink()
    status, out, _ = command(*SEARCH_ONLY)
    assert status == 0
    assert "torn off" in out
    assert name.read_bytes() == kept
    assert len((folder / "journal.jsonl").read_bytes().splitlines()) == len(lines)


def test_a_search_that_is_over_can_be_proven_on_more_held_out_examples(command, tmp_path):
    assert command(*SMALL, "--held_out_examples", "2", "--guard", "none")[0] == 0
    before = journal(tmp_path / "out")
    status, out, _ = command(*SMALL, "--guard", "none", "--held_out_examples", "4")
    assert status == 0
    assert "held-out examples, 4 questions" in out
    new = [entry for entry in journal(tmp_path / "out") if entry not in before]
    assert {entry["origin"] for entry in new} == {"held out"}


def test_improbable_individuals_are_given_up_and_the_summary_says_at_what_risk(command, tmp_path):
    flags = [*SMALL, "--epochs", "4", "--parents", "2", "--held_out_examples", "0", "--tasks", "toy_luck"]
    assert command(*flags, "--early_stopping", "probable", "--early_stopping_error", "0.5")[0] == 0
    entries = journal(tmp_path / "out")
    assert any("stopped_after" in entry for entry in entries)
    assert all(("examples" in entry) != ("stopped_after" in entry) for entry in entries)
    assert "a probability of at most 50 %" in (tmp_path / "out" / "summary.md").read_text()


def test_gradient_descent_has_its_examples_in_the_plan_and_its_time_in_the_seconds(command, tmp_path, monkeypatch):
    loss = AnswerLoss.__call__
    monkeypatch.setattr(AnswerLoss, "__call__", lambda *args: (time.sleep(0.2), loss(*args))[1])
    flags = ["--optimizer", "gradient", "--generations", "2", "--epoch_samples", "5", "--gradient_batch", "2"]
    flags += ["--learning_rate", "0.05", "--skip", "1", "--held_out_examples", "0"]
    status, out, _ = command(*flags)
    assert status == 0
    assert "and 2 x 4 examples forwards and backwards, 2 batches of 2" in out
    entries, factors = journal(tmp_path / "out"), factors_file.load(found(tmp_path / "out"))
    assert [entry["origin"] for entry in entries] == ["baseline", "start", "gradient", "gradient"]
    assert factors.origin["fitness"]["value"] == entries[-1]["fitness"]  # the last epoch, not the fittest
    assert factors.unscaled_layers == (0,)
    assert entries[-1]["seconds"] > 0.4


def stopped_at(monkeypatch, number):
    """SIGTERM, which ends a search as Ctrl-C does, at so many measurements; returns what is asked for."""
    measure, asked = Bench.measure, []

    def stopped(self, job):
        asked.append(job.factors.digest())
        if len(asked) == number:
            signal.raise_signal(signal.SIGTERM)
        return measure(self, job)

    monkeypatch.setattr(Bench, "measure", stopped)
    return asked


def test_a_search_that_is_stopped_prints_the_command_that_goes_on_and_loses_nothing(command, tmp_path, monkeypatch):
    assert command(*SEARCH_ONLY, output=tmp_path / "undisturbed")[0] == 0
    asked = stopped_at(monkeypatch, 8)
    status, _, err = command(*SEARCH_ONLY)
    assert status == 130
    assert factors_file.load(tmp_path / "out" / "best_effort.json").num_layers == 3  # the best until then
    python, m, module, *flags = shlex.split(err.rpartition("go on with: ")[2])
    assert (python, m, module) == ("python", "-m", "search.ga")
    assert ga.main(flags) == 0
    assert asked[7] == asked[8]  # the one that was interrupted, and no other, is measured again
    assert len(set(asked)) == len(asked) - 1
    assert found(tmp_path / "out").read_bytes() == found(tmp_path / "undisturbed").read_bytes()


def test_a_full_disk_ends_the_search_in_one_line_and_it_goes_on_with_more_room(command, tmp_path, monkeypatch):
    assert command(*SEARCH_ONLY, output=tmp_path / "undisturbed")[0] == 0
    fsync, written = os.fsync, []

    def write(descriptor):
        written.append(descriptor)
        if len(written) > 12:  # the end of what is written does not get there
            os.truncate(descriptor, os.fstat(descriptor).st_size - 20)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", write)
        status, _, err = command(*SEARCH_ONLY)
    assert status == 2
    first, second = err.splitlines()[-2:]
    assert "No space left" in first
    assert "go on with: python -m search.ga" in second
    assert command(*SEARCH_ONLY)[0] == 0
    assert found(tmp_path / "out").read_bytes() == found(tmp_path / "undisturbed").read_bytes()


def test_other_settings_in_the_same_folder_are_refused_with_the_difference(command):
    assert command(*SEARCH_ONLY)[0] == 0
    status, _, err = command(*SEARCH_ONLY, "--seed", "1", "--examples", "3")
    assert status == 2
    assert "search.seed was 0, is now 1" in err
    assert "fitness.requests_sha256" in err


def test_dry_run_prints_the_plan_and_how_long_it_may_take_and_writes_nothing(command, tmp_path):
    assert "Optimizer    layers, from 1 in every layer" in command("--dry_run")[1]
    status, out, _ = command("--dry_run", "--preset", "paper", "--control_points", "3", "--budget", "2000prompts")
    assert status == 0
    assert "Budget       2,000 prompts to search" in out
    assert "at most 20 generations after the first and 512 individuals" in out
    assert re.search(r"^Time +\d+ prompts took .*, so about .* to search, when .*, and then .* held-out", out, re.M)
    assert not (tmp_path / "out").exists()


def test_a_fitness_that_is_not_finite_is_an_error_that_names_factors_and_task(command, monkeypatch):
    monkeypatch.setattr("search.tasks.Objective.aggregation", lambda self, column: lambda values: float("nan"))
    status, _, err = command(*SMALL)
    assert status == 2
    assert "the fitness of factors 1, 1, 1 is nan" in err
    assert "toy@0" in err


def test_the_token_of_the_hub_stands_in_no_file_and_no_output(command, tmp_path):
    arguments = "pretrained=some/model,trust_remote_code=True,token=hf_secret"
    _, out, err = command(*SMALL, "--held_out_examples", "4", "--model_args", arguments)
    files = [path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix in (".json", ".jsonl", ".md")]
    assert "trust_remote_code" in out
    assert "hf_secret" not in "".join([out, err, *files])


def test_factors_that_are_asked_for_again_cost_no_budget(command, tmp_path):
    flags = [*SEARCH_ONLY, "--control_points", "2", "--mutations", "10", "--crossovers", "0", "--skip", "1"]
    flags += ["--examples", "2"]
    assert command(*flags)[0] == 0
    asked = [entry["prompts"] for entry in journal(tmp_path / "out") if entry.get("generation") is not None]
    assert len(asked) < 5 + 2 * 10  # some have the same factors
    assert command(*flags, "--budget", f"{sum(asked) + 1}prompts", output=tmp_path / "again")[0] == 0
    assert "The budget of" not in (tmp_path / "again" / "summary.md").read_text()


def test_a_budget_ends_the_search_with_the_fittest_and_a_larger_one_goes_on(command, tmp_path):
    assert command(*SEARCH_ONLY, output=tmp_path / "whole")[0] == 0
    assert command(*SEARCH_ONLY, "--budget", "60prompts")[0] == 0
    entries = [entry for entry in journal(tmp_path / "out") if entry.get("generation") is not None]
    assert len(entries) == 4  # of 15 prompts each
    assert report(tmp_path / "out")["best"]["fitness"] == max(entry["fitness"] for entry in entries)
    cut = "The budget of 60 prompts ended the search after 4 of about"
    assert cut in (tmp_path / "out" / "summary.md").read_text()
    for flag, budget in (("1h", ["seconds", 3600]), ("1prompts", ["prompts", 1])):  # which takes nothing back
        assert command(*SEARCH_ONLY, "--budget", flag)[0] == 0
        assert cut not in (tmp_path / "out" / "summary.md").read_text()
        whole, out = (json.loads(found(tmp_path / name).read_text()) for name in ("whole", "out"))
        assert out["origin"]["search"].pop("budget") == budget
        assert out == whole


def test_going_on_after_a_success_keeps_the_best_so_far(command, tmp_path, monkeypatch):
    monkeypatch.setattr(Outcome, "shown", property(lambda self: True))
    flags = [*SMALL, "--held_out_examples", "4", "--guard", "none"]
    assert command(*flags, "--budget", "60prompts")[0] == 0
    success = factors_file.load(found(tmp_path / "out")).digest()

    stopped_at(monkeypatch, 1)
    assert command(*flags)[0] == 130
    assert factors_file.load(tmp_path / "out" / "best_effort.json").digest() == success
