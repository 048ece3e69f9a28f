"""Reading lm-eval's files, and ``lpes-eval compare`` from files to table."""

import math
import re

import numpy as np
import pytest

from lpes_eval import cli
from lpes_eval.compare import flips, results, tables
from lpes_eval.compare.command import page_of
from lpes_eval.compare.comparison import compare
from lpes_eval.compare.statistics import compare_paired
from lpes_eval.errors import UserError
from runs import DATE, put, write_run, write_tasks


def right_or_wrong(seed, accuracies, questions=60):
    rng = np.random.default_rng(seed)
    return {p: [float(x) for x in rng.random(questions) < a] for p, a in accuracies.items()}


def comparison(*paths, **options):
    return compare(*(results.read(path) for path in paths), **options)


def test_files_of_lm_eval_itself_are_read(tmp_path, evaluate):
    from lm_eval.loggers import EvaluationTracker

    tracker = EvaluationTracker(output_path=str(tmp_path / "out"))
    options = {"evaluation_tracker": tracker}
    evaluated = evaluate("lpes", ["kv_retrieval"], 4, options, num_keys=3, positions=[0, 100])
    samples = evaluated.pop("samples")
    tracker.save_results_aggregated(results=evaluated, samples=samples)
    tracker.save_results_samples(task_name="kv_retrieval", samples=samples["kv_retrieval"])
    read = results.read(tmp_path / "out")
    [(name, task)] = read.tasks.items()
    assert (name, task.examples) == ("kv_retrieval", 4)
    lines = sorted(samples["kv_retrieval"], key=lambda line: line["doc"]["question_id"])
    assert task.metrics["acc,none"].by_question == {f"{p} %": [line[f"acc@{p}"] for line in lines] for p in (0, 100)}
    assert read.model.startswith("lpes lpes-eval/reference")


def test_only_the_samples_of_a_runs_own_task_and_date_are_its_samples(tmp_path):
    path = write_run(tmp_path, {100: [1.0, 0.0], 20: [0.0, 1.0], 0: [1.0, 1.0]})
    write_run(tmp_path, {0: [0.0, 0.0], 100: [0.0, 0.0]}, date="2026-11-20T13-39-27.906502")
    (tmp_path / f"samples_toy_20_{DATE}.jsonl").touch()  # another task's
    metric = results.read(path).tasks["toy"].metrics["acc,none"]
    assert list(metric.by_question.items()) == [("0 %", [1.0, 1.0]), ("20 %", [0.0, 1.0]), ("100 %", [1.0, 0.0])]


def test_each_filter_of_a_task_has_scores_of_its_own_and_an_at_alone_makes_no_position(tmp_path):
    """As gsm8k has two filters, and code is scored by ``pass@1``."""
    path = write_run(tmp_path, {None: [1.0, 0.0]}, metric="pass@1")
    [samples] = tmp_path.glob("samples_*")
    lines = samples.read_text()
    samples.write_text(lines + lines.replace('"none"', '"loose"').replace('"pass@1": 0.0', '"pass@1": 1.0'))
    put(path, ("results", "toy", "pass@1,loose"), 1.0)
    found = {key: metric.by_question for key, metric in results.read(path).tasks["toy"].metrics.items()}
    assert found == {"pass@1,none": {"all": [1.0, 0.0]}, "pass@1,loose": {"all": [1.0, 1.0]}}


@pytest.mark.parametrize("value", [7.5, math.nan, math.inf])
def test_a_metric_that_is_no_average_or_overflowed_leaves_the_others_to_be_compared(tmp_path, value):
    paths = [write_run(tmp_path / n, {None: [0.2, 0.9]}) for n in "ab"]
    for path in paths:
        [samples] = path.parent.glob("samples_*")
        samples.write_text(samples.read_text().replace('"target": "yes"', '"target": "yes", "nll": NaN'))
        put(path, ("results", "toy", "nll,none"), value)
    found = comparison(*paths)
    assert [section.metric for section in found.sections] == ["acc"]
    assert any("nll: not an average" in note for note in found.notes)
    put(paths[1], ("results", "toy", "acc,none"), math.nan)
    for two in (paths, paths[::-1]):
        with pytest.raises(UserError, match="no score in common that is an average"):
            comparison(*two)


def test_a_question_that_is_there_twice_is_refused_and_a_question_id_for_all_is_none(tmp_path):
    """As lm-eval's score tasks have one for several documents."""
    path = write_run(tmp_path, {0: [1.0, 0.0, 1.0]})
    [samples] = tmp_path.glob("samples_*")
    whole = samples.read_text()
    samples.write_text(whole * 2)
    with pytest.raises(UserError, match="is there twice"):
        results.read(path)
    samples.write_text(re.sub(r'"question_id": \d', '"question_id": "one"', whole))
    assert results.read(path).tasks["toy"].metrics["acc,none"].scores("0 %") == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_differences_are_those_of_the_paired_answers(tmp_path, higher_is_better):
    a = right_or_wrong(1, {0: 0.9, 50: 0.4, 100: 0.7})
    b = right_or_wrong(2, {0: 0.9, 50: 0.7, 100: 0.7})
    path_a, path_b = write_run(tmp_path / "a", a), write_run(tmp_path / "b", b)
    for path in (path_a, path_b):
        put(path, ("higher_is_better", "toy", "acc"), higher_is_better)
    for samples in path_b.parent.glob("samples_*"):  # whose order does not matter
        samples.write_text("".join(reversed(samples.read_text().splitlines(keepends=True))))
    [section] = comparison(path_a, path_b).sections
    smallest = min(section.rows, key=lambda row: row.difference.p)
    assert smallest.p_holm == pytest.approx(min(1.0, 6 * smallest.difference.p))
    answers = (np.column_stack(list(run.values())) for run in (a, b))
    expected = compare_paired(*answers, higher_is_better=higher_is_better)
    quantities = (*expected.positions, expected.mean, expected.worst, expected.spread)
    assert [row.label for row in section.rows] == ["0 %", "50 %", "100 %", "mean", "worst", "spread"]
    assert section.questions == 60
    [table] = page_of(comparison(path_a, path_b)).tables
    for row, expected, cells in zip(section.rows, quantities, table.rows, strict=True):
        assert row.difference == expected
        assert cells[-2:] == (tables.p_value(expected.p), tables.p_value(row.p_holm))


def write_group(folder, scores, row=None, **other):
    """A run of two tasks in nested groups, as mmlu has 57 in four.

    ``row`` is what lm-eval says of the outer group, by default the mean of all samples; ``other``: a task's options.
    """
    tasks = {name: {"scores": {None: of}, "text": name} | other.get(name, {}) for name, of in scores.items()}
    path = write_tasks(folder, **tasks)
    pooled = [score for of in scores.values() for score in of]
    put(path, ("results", "outer"), {"acc,none": sum(pooled) / len(pooled)} if row is None else row)
    put(path, ("results", "inner"), {"acc,none": sum(scores["one"]) / 2})
    put(path, ("group_subtasks",), {"inner": ["one"], "outer": ["inner", "two"]})
    return path


GROUP = {"one": [0.0, 1.0], "two": [1.0] * 6}


def test_a_group_is_compared_in_place_of_its_tasks_where_its_score_is_the_mean_of_all_samples(tmp_path):
    paths = [write_group(tmp_path / "a", GROUP), write_group(tmp_path / "b", {"one": [1.0, 1.0], "two": [0.0] * 6})]
    report = comparison(*paths)
    assert [section.task for section in report.sections] == ["outer"]
    [row] = report.sections[0].rows
    assert (row.label, row.difference.difference, report.sections[0].questions) == ("all", -5 / 8, 8)
    runs = [results.read(path) for path in paths]
    for options, message in (({"text": "riddle"}, "another set of examples"), ({"chat": "User: "}, "other prompts")):
        with pytest.raises(UserError, match=f"outer in .*{message}"):
            comparison(paths[0], write_group(tmp_path / "c", GROUP, two=options))
    changed = flips.flipped(*runs, "outer", "acc")
    questions = ["one 0", *(f"two {k}" for k in range(6))]
    assert [flip[1:3] for flip in changed] == [("", question) for question in questions]
    assert [*runs[0].leaves] == ["one", "two"]


@pytest.mark.parametrize(
    ("row", "other"),
    [
        ({"acc,none": 0.75}, {}),  # each task weighs the same
        ({}, {}),  # the group has no score
        ({"acc,none": 0.5}, {"two": {"metric": "f1"}}),  # that of the one task that has this metric
        (None, {"one": {"samples": False}, "two": {"samples": False}}),
    ],
)
def test_any_other_group_is_read_as_its_tasks(tmp_path, row, other):
    assert [*results.read(write_group(tmp_path, GROUP, row, **other)).tasks] == ["one", "two"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"scores": {0: [1.0]}}, "2 and 1 examples"),
        ({"samples": False}, "no samples of toy .* --log_samples"),
        ({"version": 2.0}, "task version 1.0 and 2.0"),
        ({"target": "no"}, "another set of examples: the documents or the expected answers differ"),
        ({"text": "riddle", "metadata": {"split": "search"}}, "another set of examples.*split None and search"),
        ({"chat": "User: "}, "other prompts .* --other-prompts"),
        ({"group": "else"}, "no task in common"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path, other, message):
    a = write_run(tmp_path / "a", {0: [1.0, 0.0], 50: [0.0, 1.0]})
    b = write_run(tmp_path / "b", **{"scores": {0: [1.0, 0.0], 50: [0.0, 1.0]}} | other)
    with pytest.raises(UserError, match=message) as error:
        comparison(a, b)
    assert "\n" not in str(error.value)


def test_the_same_documents_are_compared_at_the_positions_of_both_whatever_their_source(tmp_path):
    official = {"metadata": {"source": {"kind": "official"}}}
    a = write_run(tmp_path / "a", {0: [1.0, 0.0], 100: [0.0, 0.0]})
    b = write_run(tmp_path / "b", {0: [1.0, 1.0], 50: [0.0, 1.0], 100: [1.0, 0.0]}, **official)
    put(b, ("versions", "toy"), "1.0 official")  # as lm-eval's table has it
    assert [row.difference.difference for row in comparison(a, b).sections[0].rows[:3]] == [0.5, 0.5, 0.5]
    changed = flips.flipped(results.read(b), results.read(a), "toy", "acc")
    assert [flip[1] for flip in changed] == ["0 %", "100 %"]


def test_other_prompts_are_compared_by_the_command_where_asked_for(tmp_path, capsys):
    options = {"a": {}, "b": {"chat": "User: "}}
    paths = [str(write_run(tmp_path / n, {None: s}, **options[n])) for n, s in (("a", [0.0, 1.0]), ("b", [1.0, 1.0]))]
    assert cli.main(["compare", *paths]) == 2
    assert "--other-prompts" in capsys.readouterr().err
    assert cli.main(["compare", *paths, "--other-prompts"]) == 0
    assert "+0.5000" in capsys.readouterr().out


def test_a_metric_that_is_0_everywhere_in_both_runs_is_named_and_has_no_table(tmp_path, capsys):
    zeros, some = ([write_run(tmp_path / f"{n}{k}", {0: [n, n], 100: [n, 0.0]}) for k in "ab"] for n in (0.0, 1.0))
    assert cli.main(["compare", *map(str, zeros)]) == 0
    printed = capsys.readouterr().out
    assert "0 everywhere in both runs: toy, acc." in printed
    assert "0 %" not in printed
    assert cli.main(["compare", str(zeros[0]), str(some[0])]) == 0
    printed = capsys.readouterr().out
    assert "0 everywhere" not in printed
    assert "0 %" in printed


def test_text_of_flips_stays_text_in_markdown(tmp_path):
    hostile, target = "a | b <img src=x> [x](y) `c`\n# d", tmp_path / "page.md"
    paths = [write_run(tmp_path / n, {0: s, 100: s}, text=hostile) for n, s in (("a", [0.0]), ("b", [1.0]))]
    assert cli.main(["compare", *map(str, paths), "--flips", "--markdown", str(target)]) == 0
    written = target.read_text()
    *rows, _, _, better, _ = [line for line in written.splitlines() if line.startswith("|")]
    assert [row.count("|") for row in rows] == [8] * 7  # two positions and three numbers over them
    assert "a \\| b &lt;img src=x> \\[x\\](y) \\`c\\` \\# d 0" in better
    assert written.count("Fewer than 50 questions") == 1
