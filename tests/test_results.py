"""``benchmarks/results.py``: the pages say what was measured, computed from each question's scores."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from benchmarks import results as bench
from benchmarks.results import Results, Row
from lpes_eval.errors import UserError

PLAIN, OURS = Row("plain", "kv_retrieval", 40), Row("layer factors", "kv_retrieval", 40, "factors=1.37")


def keep(results, row, scores, questions=None):
    """Keep scores of shape (questions, positions) as a measurement does."""
    columns = {str(50 * i): "".join(map(str, column)) for i, column in enumerate(np.transpose(scores).astype(int))}
    named = " ".join(map(str, questions or range(len(scores))))
    results.keep({"command": row.command, "weights": row.weights, "questions": named, "scores": columns})


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "results.jsonl")


def test_a_row_has_mean_interval_worst_and_a_gain_paired_by_question(results):
    rng = np.random.default_rng(3)
    plain, ours = rng.random((40, 3)) < 0.4, rng.random((40, 3)) < [0.9, 0.6, 0.8]
    keep(results, PLAIN, plain)
    keep(results, OURS, ours)
    line = Results(results.store).table([[PLAIN, OURS]]).splitlines()[-1]
    label, n, *at, mean, worst, gain, command = (cell.strip() for cell in line.strip("|").split("|"))
    assert label == "layer factors"
    assert (n, command) == ("40", f"`{OURS.command}`")
    assert at == [f"{100 * share:.1f}" for share in ours.mean(0)]
    assert worst == f"{100 * ours.mean(0).min():.1f}"
    half = 100 * stats.t.ppf(0.975, 39) * stats.sem(ours.mean(1))
    assert mean == f"{100 * ours.mean():.1f}±{half:.1f}"
    value, low, high = (float(word) for word in gain.replace("[", "").replace("]", "").replace(",", "").split())
    differences = 100 * (ours.mean(1) - plain.mean(1))
    assert value == pytest.approx(differences.mean(), abs=0.06)
    assert high - low == pytest.approx(2 * 1.96 * stats.sem(differences), rel=0.15)  # the table resamples


def test_a_gain_is_over_the_questions_that_both_were_asked(results):
    keep(results, PLAIN, [[1], [0], [0], [0]], [7, 8, 9, 10])
    keep(results, OURS, [[1], [1]], [9, 7])
    assert results.gain(PLAIN, OURS)[0] == 50


def test_what_was_measured_with_other_weights_is_no_number(results):
    keep(results, PLAIN, [[1], [0]])
    keep(results, OURS, [[1], [1]])
    results.by_command[OURS.command]["weights"] = "another"
    with pytest.raises(UserError, match=r"factors=1.37 .*: not measured with these weights; run"):
        results.table([[PLAIN, OURS]])


def test_a_goal_is_met_by_enough_points_beyond_chance(results):
    right = np.arange(100)[:, None]
    for task in ("mdqa_pos", "kv_retrieval"):
        plain, ours, *others = bench.TABLES[task][0]
        shares = (40, 53, *[20] * (len(others) - 2), 50, 60)
        for row, share in zip((plain, ours, *others), shares, strict=True):
            keep(results, row, right < share)
    records = results.goals().splitlines()[0]
    assert f"`kv_retrieval`: {len(others)} of {len(others) + 2} met. Missed: " in records
    assert f"better than {others[-2].label} (+3.0 [+0.0, " in records  # its interval holds 0
    assert f"better than {others[-1].label} (-7.0 [-" in records
    keep(results, ours, right < 51)
    assert "11.2 points over plain (+11.0 [" in results.goals()


def test_the_pages_hold_what_was_measured(capsys):
    assert bench.main(["--check"]) == 0, capsys.readouterr().out
    kept = Results(bench.STORE)
    rows = [row for groups in bench.TABLES.values() for group in groups for row in group]
    assert {row.command for row in rows if kept.has(row)} == set(kept.by_command)


def test_a_rows_scores_are_those_that_its_command_logs(monkeypatch):
    """Of a command that writes two samples, in the order of lm_eval's columns."""
    ran = []

    def run(command, **options):
        if "--output_path" in command:
            ran.append(command)
            samples = [{"doc": {"question_id": n}, "acc@100": 1.0, "acc@0": float(n), "acc": 0.5} for n in (7, 0)]
            folder = Path(command[command.index("--output_path") + 1], "model")
            folder.mkdir()
            (folder / "samples_x.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        return SimpleNamespace(returncode=0, stdout="abc")

    monkeypatch.setattr(bench.subprocess, "run", run)
    found = bench.measure(OURS)
    assert (found["questions"], found["scores"]) == ("7 0", {"0": "70", "100": "11"})
    assert " ".join(ran[0][1:]).startswith(f"-m {OURS.command} --batch_size 16 --log_samples")
