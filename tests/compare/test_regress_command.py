"""``lpes-eval regress`` from files to exit status: baselines, refusals, reports."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from lpes_eval import cli
from lpes_eval.compare import baseline, results
from runs import put, write_run, write_tasks

POSITIONS = (0, 25, 50, 75, 100)


@pytest.fixture(autouse=True)
def outside_of_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)


def answers(accuracy=0.8, questions=60):
    drawn = np.random.default_rng(0).random((questions, len(POSITIONS))) < accuracy
    return {p: list(line) for p, line in zip(POSITIONS, drawn.T.astype(float), strict=True)}


def write_answers(folder, accuracy=0.8, questions=60, **options):
    return write_run(folder, answers(accuracy, questions), **options)


def call(*arguments):
    return cli.main(["regress", *map(str, arguments)])


@pytest.fixture
def committed(tmp_path):
    path = tmp_path / "baseline.json"
    assert call(write_answers(tmp_path / "first"), "--baseline", path, "--update") == 0
    return path


def test_a_baseline_written_and_read_is_the_run_and_takes_little_room(tmp_path, committed):
    assert baseline.load(committed) == replace(results.read(tmp_path / "first"), path=committed)
    assert committed.stat().st_size < 3000
    run = results.read(write_run(tmp_path / "run", {0: [0.1, 1 / 3, 0.7], 50: [2.0, 1e-9, 0.3]}))
    baseline.save(run, tmp_path / "b.json")
    assert baseline.load(tmp_path / "b.json").tasks == run.tasks
    assert run.tasks["toy"].metrics["acc,none"].by_question["50 %"] == [2.0, 1e-9, 0.3]


def test_provenance_names_versions_model_date_and_command_but_no_folder_of_the_machine(tmp_path):
    model = ("hf", {"pretrained": str(tmp_path / "models" / "tiny")}, 7)
    run, path = write_answers(tmp_path / "run", model=model), tmp_path / "b.json"
    put(run, ("config", "factors"), {"given": "f.json", "sha256": "5c1e"})
    call(run, "--baseline", path, "--update")
    data = json.loads(path.read_text())
    assert data["model"] == "hf tiny, 7 parameters"
    evaluated_by = {"lpes_eval": "0.0.9", "lm_eval": "0.4.13", "transformers": "5.23.0", "torch": "2.13.0+cpu"}
    assert data["provenance"]["packages"] == evaluated_by
    loaded = {"dtype": "torch.float32", "revision": None, "sha": None, "factors": "5c1e"}
    assert data["provenance"]["model"] == loaded
    assert data["provenance"]["date"] == "2026-11-21T13:39:22+00:00"
    assert results.read(run).side == ("hf tiny, 7 parameters, factors f.json", str(run))
    assert str(tmp_path) not in path.read_text()


@pytest.mark.parametrize(
    ("kind", "arguments", "factors", "name"),
    [
        ("lpes", {}, None, "lpes-eval/reference"),
        ("lpes", {"factors": "f.json"}, {"origin": {"model": {"name": "org/large"}}}, "org/large"),
        ("local-completions", "model=org/large,base_url=http://localhost/?a=b", None, "org/large"),
    ],
)
def test_a_models_name_is_that_of_its_arguments_or_of_its_factors_origin(tmp_path, kind, arguments, factors, name):
    path = write_run(tmp_path / "run", {0: [1.0]}, model=(kind, {}, 9))
    put(path, ("config", "model_args"), arguments)
    put(path, ("config", "factors"), factors)
    assert results.read(path).model == f"{kind} {name}, 9 parameters"


def test_of_several_results_below_a_folder_the_newest_is_taken_and_named(tmp_path, committed, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_answers(tmp_path / "runs" / "tiny", date="2026-11-21T13-00-00.000001")
    write_answers(tmp_path / "runs" / "large", date="2026-11-22T08-00-00.000001", model=("hf", {"pretrained": "x"}, 9))
    taken = str(Path("runs", "large", "results_2026-11-22T08-00-00.000001.json"))
    assert call("runs", "--baseline", "baseline.json", "--markdown", "summary.md") == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[:2] == [
        "baseline  hf tiny, 1,000 parameters: baseline.json",
        f"now       hf x, 9 parameters: {taken}",
    ]
    assert "Model: hf tiny, 1,000 parameters in the baseline, hf x, 9 parameters now." in printed
    assert f"* now: hf x, 9 parameters: {taken}\n" in Path("summary.md").read_text().replace("\\_", "_")


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path, committed, capsys):
    run = write_answers(tmp_path / "run", samples=False, metadata={"source": {"kind": "official"}})
    assert call(run, "--baseline", committed) == 2
    printed = capsys.readouterr()
    assert "source kind None and official" in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")


def test_other_packages_are_named(tmp_path, committed, capsys):
    path = write_answers(tmp_path / "more")
    path.write_text(path.read_text().replace('"5.23.0"', '"5.24.0"'))
    assert call(path, "--baseline", committed) == 0
    assert "packages transformers: 5.23.0 in the baseline, 5.24.0 now." in capsys.readouterr().out


TASK = ("tasks", "toy")
METRIC = (*TASK, "metrics", "acc,none")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *(((*METRIC, "by_question", "0 %"), value) for value in ("1", "2" * 60, [None] * 60)),
        *(((*METRIC, key), value) for key, value in (("by_question", {}), ("values", {}), ("higher_is_better", "up"))),
        ((*TASK, "examples"), [1]),
        *(((key,), value) for key, value in (("format", 5), ("format_version", 2), ("tasks", {}), ("model", 7))),
    ],
)
def test_a_damaged_baseline_is_an_error_of_use_and_replaced_on_request(tmp_path, committed, capsys, place, value):
    run, whole = write_answers(tmp_path / "run"), committed.read_text()
    put(committed, place, value)
    assert call(run, "--baseline", committed) == 2
    assert re.search(rf"{committed}: damaged baseline .* --update", capsys.readouterr().err)
    assert call(run, "--baseline", committed, "--update") == (2 if place == ("format",) else 0)
    assert committed.read_text() == whole or place == ("format",)


def test_what_is_not_testable_fails_in_ci_unless_told_otherwise(tmp_path, monkeypatch, capsys):
    path, unlogged = tmp_path / "b.json", {"scores": answers(), "samples": False}
    run = write_tasks(tmp_path / "a", toy={"scores": answers()}, unlogged=unlogged)
    call(run, "--baseline", path, "--update")
    assert [call(run, "--baseline", path, *flags) for flags in ([], ["--strict"])] == [0, 1]
    monkeypatch.setenv("CI", "true")
    assert [call(run, "--baseline", path, *flags) for flags in ([], ["--no-strict"])] == [1, 0]


def test_a_gate_that_could_test_nothing_writes_no_baseline(tmp_path, capsys):
    unlogged, worse = (write_answers(tmp_path / str(x), x, samples=False) for x in (0.8, 0.6))
    path, by_size = tmp_path / "by_size.json", ("--max-drop", "0.1", "--strict")
    assert call(unlogged, "--baseline", path, "--update", *by_size) == 0
    assert [call(run, "--baseline", path, *by_size) for run in (unlogged, worse)] == [0, 1]
    few, new = write_answers(tmp_path / "few", questions=5), (tmp_path / "b.json", "--update")
    for run, message in ((unlogged, "--log_samples"), (few, "5 questions are too few")):
        assert call(run, "--baseline", *new) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b.json").exists()
    assert call(unlogged, "--baseline", tmp_path / "b.json") == 2
    assert "--update" in capsys.readouterr().err


def test_a_worse_run_fails_with_1_and_every_report_has_its_table(tmp_path, committed, capsys):
    target, junit = tmp_path / "summary.md", tmp_path / "junit.xml"
    bad = write_answers(tmp_path / "bad", accuracy=0.3)
    assert call(bad, "--baseline", committed, "--markdown", target, "--junit", junit) == 1
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if line.endswith(("WORSE", "ok"))]
    lines = [line for line in target.read_text().splitlines() if line.endswith(("WORSE |", "ok |"))]
    written = [line.replace("|", " ").split() for line in lines]
    assert len(printed) == 8
    assert written == printed
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    failed = [line for line in printed if line[-1] == "WORSE"]
    assert "mean" in [line[0] for line in failed]
    assert (suite.get("tests"), suite.get("failures")) == ("8", str(len(failed)))
    assert [case.get("name").split()[0] for case in suite if len(case)] == [line[0] for line in failed]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *itertools.product([("results",), ("configs",), ("n-samples",), ("config",)], [5, {"toy": 5}]),
        (("results", "toy"), [1]),
        (("configs", "toy", "metadata"), [1]),
        (("config", "model_args"), 5),
        (("config", "limit"), "x"),
        (("config", "factors"), {"per_layer": [1, "x"]}),
        (("higher_is_better", "toy"), "up"),
        (("group_subtasks",), {"g": 5}),
        (("arguments",), 5),
    ],
)
def test_files_in_another_form_are_an_error_of_use_that_names_them(tmp_path, committed, place, value, capsys):
    path = write_answers(tmp_path / "run", questions=1)
    [samples] = path.parent.glob("samples_*")
    put(path if place[0] in path.read_text() else samples, place, value)
    assert call(path, "--baseline", committed) == 2
    assert re.fullmatch(rf"lpes-eval: error: .*{path.parent}.*\n", capsys.readouterr().err)


def test_names_do_not_break_junit_markdown_and_the_terminal(tmp_path, capsys):
    escapes, files = "a\x1b[31m\n# heading ![](http://x) <img> |\x00 b", (tmp_path / "j.xml", tmp_path / "m.md")
    run = write_run(tmp_path / "run", {None: [1.0, 0.0] * 20}, metric=escapes)
    assert call(run, "--baseline", tmp_path / "b.json", "--update") == 0
    assert call(run, "--baseline", tmp_path / "b.json", "--junit", files[0], "--markdown", files[1]) == 0
    ElementTree.fromstring(files[0].read_text())
    page = files[1].read_text()
    assert not any(line.startswith("# heading") for line in page.splitlines())
    assert not any(markup in page for markup in ("![](", "<img", "\x1b"))
    assert "\x1b" not in capsys.readouterr().out
