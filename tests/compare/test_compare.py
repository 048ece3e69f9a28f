"""Reading lm-eval's files, and ``lpes-eval compare`` from files to table."""

import json
import shlex

import numpy as np
import pytest

from lpes_eval import cli
from lpes_eval.compare import results
from lpes_eval.compare.compare import compare
from lpes_eval.compare.statistics import compare_paired
from lpes_eval.errors import UserError
from runs import write_run


def right_or_wrong(seed, accuracies, questions=60):
    rng = np.random.default_rng(seed)
    return {p: [float(x) for x in rng.random(questions) < a] for p, a in accuracies.items()}


@pytest.fixture
def two_runs(tmp_path):
    a = right_or_wrong(1, {0: 0.9, 50: 0.4, 100: 0.7})
    b = right_or_wrong(2, {0: 0.9, 50: 0.7, 100: 0.7})
    return write_run(tmp_path / "a", a), write_run(tmp_path / "b", b), a, b


def comparison(*paths, **options):
    return compare(*(results.read(path) for path in paths), **options)


# --- reading ---


def test_files_of_lm_eval_itself_are_read(tmp_path):
    """lm-eval writes the files: its evaluator on its dummy model, its tracker on disk."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    (tmp_path / "kv.yaml").write_text(
        "task: toy\nclass: !function lpes_eval.data.kv.Task\ntest_split: test\noutput_type: generate_until\n"
        "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
        "generation_kwargs: {until: [], max_gen_toks: 8}\n"
        "metadata: {version: 1.0, num_keys: 3, positions: [0, 100]}\n"
    )
    tracker = EvaluationTracker(output_path=str(tmp_path / "out"))
    evaluated = lm_eval.simple_evaluate(
        model="lpes",
        tasks=["toy"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        limit=4,
        evaluation_tracker=tracker,
        bootstrap_iters=0,
    )
    samples = evaluated.pop("samples")
    tracker.save_results_aggregated(results=evaluated, samples=samples)
    for name, lines in samples.items():
        tracker.save_results_samples(task_name=name, samples=lines)

    read = results.read(tmp_path / "out")
    [(name, task)] = read.tasks.items()
    [(key, metric)] = task.metrics.items()
    assert (name, key, task.examples) == ("toy", "acc,none", 4)
    lines = sorted(samples["toy"], key=lambda line: line["doc"]["question_id"])
    assert metric.by_question == {f"{p} %": tuple(line[f"acc@{p}"] for line in lines) for p in (0, 100)}
    assert str(read.model).startswith("lpes reference")


def test_the_newest_results_in_a_folder_are_read(tmp_path):
    write_run(tmp_path / "x" / "model", {0: [1.0, 0.0]}, date="2026-11-20T13-39-27.906502")
    newest = write_run(tmp_path / "x" / "model", {0: [1.0, 1.0]}, date="2026-11-21T09-00-00.000001")
    write_run(tmp_path / "x" / "other", {0: [0.0, 0.0]}, date="2026-11-19T13-39-27.906502")
    assert results.read(tmp_path / "x").path == newest


def test_renamed_results_find_the_samples_beside_them(tmp_path):
    path = write_run(tmp_path, {0: [1.0, 0.0], 50: [0.0, 1.0]})
    metric = results.read(path.rename(tmp_path / "A.json")).tasks["toy"].metrics["acc,none"]
    assert metric.by_question == {"0 %": (1.0, 0.0), "50 %": (0.0, 1.0)}


def test_renamed_results_beside_two_sets_of_samples_are_ambiguous(tmp_path):
    write_run(tmp_path, {0: [1.0, 0.0]}, date="2026-11-20T13-39-27.906502")
    renamed = write_run(tmp_path, {0: [1.0, 0.0]}).rename(tmp_path / "A.json")
    with pytest.raises(UserError, match="2 sample files"):
        results.read(renamed)


def test_positions_of_a_task_are_in_the_order_of_their_numbers(tmp_path):
    metric = results.read(write_run(tmp_path, {100: [1.0], 20: [1.0], 0: [0.0]})).tasks["toy"].metrics["acc,none"]
    assert metric.values == {"0 %": 0.0, "20 %": 1.0, "100 %": 1.0}


def test_a_result_of_one_position_a_task_is_refused(tmp_path):
    path = write_run(tmp_path, {None: [1.0, 0.0]}, metadata={"position": 0})
    with pytest.raises(UserError, match="evaluate again"):
        results.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "not JSON"), ("[1]", "has no 'results'"), ('{"results": {}, "configs": {}}', "no scores")],
)
def test_other_files_are_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as error:
        results.read(path)
    assert "\n" not in str(error.value)


def test_a_question_that_is_there_twice_is_refused(tmp_path):
    path = write_run(tmp_path, {0: [1.0, 0.0]})
    [samples] = tmp_path.glob("samples_*")
    samples.write_text(samples.read_text() * 2)
    with pytest.raises(UserError, match="question 0 is there twice"):
        results.read(path)


def test_command_says_how_to_make_such_a_run_again(tmp_path):
    arguments = {"pretrained": "/home/ci/models/tiny", "factors": "f.json"}
    path = write_run(tmp_path, {0: [1.0], 50: [1.0]}, model=("lpes", arguments, 5))
    command = results.read(path).provenance["command"]
    assert command == "lm_eval --model lpes --model_args pretrained=tiny,factors=f.json --tasks toy --log_samples"


def test_command_spells_what_lm_eval_would_take_apart_as_json(tmp_path):
    path = write_run(tmp_path, {0: [1.0]}, model=("lpes", {"factors": [1.0, 1.5], "trust": True}, 5))
    data = json.loads(path.read_text())
    data["config"]["gen_kwargs"] = {"max_gen_toks": 7}
    data["system_instruction"] = "Be brief."
    path.write_text(json.dumps(data))
    words = shlex.split(results.read(path).provenance["command"])
    assert json.loads(words[words.index("--model_args") + 1]) == {"factors": [1.0, 1.5], "trust": True}
    assert words[words.index("--gen_kwargs") + 1] == "max_gen_toks=7"
    assert words[words.index("--system_instruction") + 1] == "Be brief."


def test_runs_of_one_model_are_told_apart_by_their_factors(tmp_path):
    path = write_run(tmp_path, {0: [1.0]}, model=("lpes", {"factors": "f.json"}, 5))
    data = json.loads(path.read_text())
    data["config"]["factors"] = {"given": "f.json", "origin": {}}
    path.write_text(json.dumps(data))
    assert results.read(path).side == ("lpes reference, 5 parameters, factors f.json", str(path))


# --- comparing ---


def test_differences_are_those_of_the_paired_answers(two_runs):
    path_a, path_b, a, b = two_runs
    for samples in path_b.parent.glob("samples_*"):  # whose order does not matter
        samples.write_text("".join(reversed(samples.read_text().splitlines(keepends=True))))
    [section] = comparison(path_a, path_b).sections
    expected = compare_paired(*(np.column_stack(list(run.values())) for run in (a, b)))
    quantities = (*expected.positions, expected.mean, expected.worst, expected.spread)
    assert [row.facts["row"] for row in section.rows] == ["0 %", "50 %", "100 %", "mean", "worst", "spread"]
    assert section.questions == 60
    for row, found in zip(section.rows, quantities, strict=True):
        assert (row.facts["difference"], row.facts["p"]) == pytest.approx((found.difference, found.p))
        assert row.facts["interval"] == pytest.approx([found.low, found.high])


def test_holm_runs_over_all_rows(two_runs):
    path_a, path_b, *_ = two_runs
    rows = [row.facts for row in comparison(path_a, path_b).rows]
    smallest = min(rows, key=lambda row: row["p"])
    assert smallest["p_holm"] == pytest.approx(min(1.0, len(rows) * smallest["p"]))


def test_task_without_positions_is_one_row(tmp_path):
    paths = [write_run(tmp_path / n, {None: s}) for n, s in (("a", [0.2, 0.9, 0.4]), ("b", [0.3, 1.0, 0.5]))]
    [row] = comparison(*paths).rows
    assert (row.facts["row"], row.facts["method"]) == ("all", "exchange")
    assert row.facts["difference"] == pytest.approx(0.1)


def test_metric_that_is_no_average_of_samples_is_named_and_left_out(tmp_path):
    paths = [write_run(tmp_path / n, {None: [0.2, 0.9]}) for n in "ab"]
    for path in paths:
        data = json.loads(path.read_text())
        data["results"]["toy"]["perplexity,none"] = 7.5
        path.write_text(json.dumps(data))
    found = comparison(*paths)
    assert [section.metric for section in found.sections] == ["acc"]
    assert any("perplexity" in note for note in found.notes)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"scores": {0: [1.0]}}, "2 and 1 examples"),
        ({"samples": False}, "no samples of toy .* --log_samples"),
        ({"version": 2.0}, "task version 1.0 and 2.0"),
        ({"text": "riddle"}, "documents or the expected answers differ"),
        ({"text": "riddle", "metadata": {"split": "search"}}, "split None and search"),
        ({"first_question": 1}, "another set of examples"),
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


def test_other_prompts_are_compared_on_request(tmp_path):
    a = write_run(tmp_path / "a", {0: [1.0, 0.0]})
    b = write_run(tmp_path / "b", {0: [1.0, 1.0]}, chat="User: ")
    assert comparison(a, b, prompts_may_differ=True).rows[0].facts["difference"] == 0.5


def test_same_documents_from_another_source_are_the_same_examples(tmp_path):
    a = write_run(tmp_path / "a", {0: [1.0, 0.0]}, metadata={"source": {"kind": "official"}})
    b = write_run(tmp_path / "b", {0: [1.0, 0.0]}, metadata={"source": {"kind": "folder"}})
    assert comparison(a, b).sections


@pytest.mark.parametrize(("questions", "noted"), [(49, 1), (50, 0)])
def test_of_few_questions_one_note_says_what_they_do_not_carry(tmp_path, questions, noted):
    a, b = (right_or_wrong(seed, {0: 0.4, 50: 0.6}, questions) for seed in (1, 2))
    found = comparison(write_run(tmp_path / "a", a), write_run(tmp_path / "b", b))
    for text in (found.to_text(), found.to_markdown(), found.to_json()):
        assert text.count("Fewer than 50 questions (49)") == noted


# --- the command ---


def test_command_prints_a_table(two_runs, capsys):
    path_a, path_b, *_ = two_runs
    assert cli.main(["compare", str(path_a), str(path_b)]) == 0
    printed = capsys.readouterr().out
    assert "toy, acc, 60 questions" in printed
    assert {line.split("  ")[0] for line in printed.splitlines()} >= {"0 %", "50 %", "100 %", "mean", "worst", "spread"}


def test_json_holds_every_number_and_no_nan(two_runs, tmp_path):
    path_a, path_b, *_ = two_runs
    target = tmp_path / "out" / "c.json"
    assert cli.main(["compare", str(path_a), str(path_b), "--json", str(target)]) == 0
    data = json.loads(target.read_text(), parse_constant=pytest.fail)
    [section] = data["comparisons"]
    assert section["rows"] == [row.facts for row in comparison(path_a, path_b).rows]
    assert (section["task"], section["metric"], section["questions"]) == ("toy", "acc", 60)
    assert (data["b"]["results"], data["b"]["model"]) == (str(path_b), "hf tiny, 1,000 parameters")


def test_markdown_goes_to_standard_output_alone(two_runs, capsys):
    path_a, path_b, *_ = two_runs
    assert cli.main(["compare", str(path_a), str(path_b), "--markdown"]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(rows) == 8
    assert {row.count("|") for row in rows} == {8}
    assert "------  ------" not in printed


def test_positions_of_one_run_alone_are_named_and_the_others_compared(tmp_path):
    a = write_run(tmp_path / "a", {0: [1.0, 0.0], 100: [0.0, 0.0]})
    b = write_run(tmp_path / "b", {0: [1.0, 1.0], 50: [0.0, 1.0], 100: [1.0, 0.0]})
    found = comparison(a, b)
    assert [row.facts["difference"] for row in found.rows[:3]] == [0.5, 0.5, 0.5]
    assert "Only in B, not compared: toy at 50 %." in found.notes
