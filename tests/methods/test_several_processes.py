"""Copies of a model in several processes give the scores of one."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
LM_EVAL = """
import sys, torch
gpus = int(sys.argv.pop(1))
torch.cuda.device_count = lambda: gpus  # hf shares the questions among processes only where there are GPUs
from lm_eval.__main__ import cli_evaluate
cli_evaluate()
"""
LAUNCH = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
"""What ``accelerate launch`` calls on GPUs; on a processor alone it starts one process, whatever it is told."""
MODEL_AND_TASKS = [*("--model", "lpes", "--model_args", "factors=reference", "--batch_size", "1", "--log_samples"),
                   *("--tasks", "kv_retrieval,mdqa_pos", "--limit", "5")]  # fmt: skip


def evaluated(folder, processes):
    """How often contexts were built, the scores, and every question's answers."""
    (folder / "program.py").write_text(LM_EVAL)
    gpus = processes if processes > 1 else 0
    command = [sys.executable, *(LAUNCH if processes > 1 else ())]
    command += [str(folder / "program.py"), str(gpus), *MODEL_AND_TASKS, "--output_path", str(folder)]
    done = subprocess.run(command, env={**os.environ, "ACCELERATE_USE_CPU": "true"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (results,) = folder.rglob("results_*.json")
    rows = [json.loads(line) for path in folder.rglob("samples_*.jsonl") for line in path.read_text().splitlines()]
    answers = {(row["doc_hash"], row["doc_id"]): (row["target"], row["filtered_resps"]) for row in rows}
    assert len(answers) == len(rows) == 10
    return done.stderr.count("Building contexts"), json.loads(results.read_text())["results"], answers


def test_two_processes_share_the_questions(tmp_path):
    found = []
    for name, processes in (("alone", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        contexts, scores, answers = evaluated(tmp_path / name, processes)
        assert contexts == processes * 2  # tasks
        found.append((scores, answers))
    (alone, answers), (two, same) = found
    assert same == answers
    assert two.keys() == alone.keys()
    for task, scores in alone.items():
        assert two[task] == pytest.approx(scores)
