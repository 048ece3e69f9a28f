"""Carries one experiment out.

A function a kind of experiments: it takes the beginning of the result's row (settings, factors, model) and lm-eval's
model arguments, and returns what the row holds beyond them and the circumstances. Answers are those of the command that
is kept beside them: by the search's evaluator, which tests hold against lm-eval example by example, or by lm-eval.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.experiments import store, text
from benchmarks.experiments.plan import lm_eval_command
from benchmarks.experiments.store import ROOT, Row
from lpes_eval import files, reference
from lpes_eval.errors import UserError

WRITTEN = Path("runs/experiments")
"""Where the texts of the perplexity are written, which its commands read."""
ENVIRONMENT = {
    **dict.fromkeys(("TQDM_DISABLE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    **{"LMEVAL_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"},
}
"""No progress bars, no network, one thread."""


def in_its_own_process(kind: str, row: Row, model_args: Row) -> Row:
    """Measure in a process of its own, and return the whole row; ``UserError`` with the reason if it fails."""
    job = json.dumps([kind, row, model_args])
    return dict(json.loads(_output([sys.executable, "-m", __name__], input=job, env={**os.environ, **ENVIRONMENT})))


def _output(command: list[str], **options: Any) -> str:
    """The last line that a process prints; where it fails, the last one of its error is the reason."""
    ran = subprocess.run(command, capture_output=True, text=True, **options)
    if ran.returncode:  # negative: killed, for want of memory perhaps
        said = ran.stderr.strip().splitlines()[-1:]
        raise UserError(": ".join([f"its process ended with status {ran.returncode}", *said]))
    return ran.stdout.splitlines()[-1] if ran.stdout else ""


def carry_out(kind: str, row: Row, model_args: Row) -> Row:
    """Measure in this process; the same."""
    import torch

    torch.set_num_threads(1)
    start, cpu_start = time.perf_counter(), sum(os.times()[:4])
    found = KINDS[kind](row, model_args)
    return {
        **row,
        **found,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(sum(os.times()[:4]) - cpu_start, 1),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": store.versions(),
        "hardware": store.hardware(1),
    }


def folder(model: str) -> Path:
    """Where a model lies that a result names."""
    return reference.path() if model == "reference" else ROOT / model


def evaluate(row: Row, model_args: Row) -> Row:
    """A task's held-out questions at every position it has."""
    name, settings = row["model"]["name"], row["settings"]
    task, n, model = settings["task"], settings["questions"], settings["model"]
    metadata, model_args = settings["metadata"], model_args | settings["model_args"]
    if model == "moice":
        model_args["router"] = store.spelled(folder(name) / "router")
    if model == "lpes":
        evaluator = _evaluator(name, task, metadata, n, "held_out")
        examples = evaluator(row["factors"] or [1.0] * row["model"]["layers"]).examples
        (objective,) = evaluator.objectives
        questions, metric = objective.questions, objective.metric
        scores = {f"{column.position:g}": examples[column.name] for column in objective.columns}
    else:
        samples, metric = _samples(model, model_args, task, {**model_args, **metadata}, batch_size=8, limit=n)
        questions = [sample["doc"]["question_id"] for sample in samples]
        at = sorted((key.partition("@")[2] for key in samples[0] if key.startswith(f"{metric}@")), key=float)
        scores = {position: [float(sample[f"{metric}@{position}"]) for sample in samples] for position in at}
    command = lm_eval_command(model, model_args, task, metadata, n)
    return {"command": command, "task": task, "metric": metric, **store.pack(questions, scores)}


def choose(row: Row, model_args: Row) -> Row:
    """The fitness of uniform factors on search examples, and the best of them; of equals, the smallest."""
    from search.tasks import POSITIONS

    task, n, grid = (row["settings"][name] for name in ("task", "examples", "grid"))
    evaluator = _evaluator(row["model"]["name"], task, {}, n, "search")
    fitness = {factor: round(evaluator([factor] * row["model"]["layers"]).fitness, 6) for factor in sorted(grid)}
    metadata = {"split": "search", "positions": list(POSITIONS)}
    command = lm_eval_command("lpes", {**model_args, "factors": "FACTOR"}, task, metadata, n)
    return {"command": command, "fitness": list(fitness.items()), "chosen": max(fitness, key=fitness.__getitem__)}


def search(row: Row, model_args: Row) -> Row:
    """``python -m search.ga``, in a process of its own, and without its cache: what it costs by itself.

    ``evaluations`` holds of each individual, in the order in which they were measured, its generation, the prompts that
    it was asked, and its fitness; none if it was given up, or asked a part of the questions.
    """
    from search import config

    flags = shlex.split(row["settings"]["flags"])
    args, command = config.parse(flags), ["-m", "search.ga", *flags]
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary, "search")
        _output([sys.executable, *command, "--output", str(made), "--no_cache"])
        report = json.loads((made / "report.json").read_text())
        journal = [json.loads(line) for line in (made / "journal.jsonl").read_text().splitlines()]
        file = next(path for name in ("factors", "best_effort") if (path := made / f"{name}.json").exists())
        found = json.loads(file.read_text())
    examples = sum(task["examples"] for task in report["settings"]["fitness"]["tasks"]) * len(args.positions)
    evaluations = [
        (entry["generation"], n := entry["prompts"], round(entry["fitness"], 6) if n == examples else None)
        for entry in journal
        if entry["generation"] is not None
    ]
    samples = args.epoch_samples // args.gradient_batch * args.gradient_batch
    return {
        "command": shlex.join(["python", *command]),
        "found": {key: value for key, value in found.items() if key not in ("format", "version")},
        "fitness": report["best"]["fitness"],
        "to_beat": {name: entry["fitness"] for name, entry in report["to_beat"].items()},
        "evaluations": evaluations,
        "gradients": samples if args.optimizer == "gradient" else 0,
        "individuals": report["evaluated"],
        "stopped_early": report["stopped_early"],
        "prompts": report["prompts"],
        "examples": examples,
    }


def perplexity(row: Row, model_args: Row) -> Row:
    """Nats a token of the answers, text by text, behind contexts of several lengths."""
    from transformers import AutoTokenizer

    from lpes_eval.data import kv
    from lpes_eval.methods.lpes import LPES

    lengths, texts, rope = (row["settings"][name] for name in ("lengths", "texts", "rope"))
    longest, at = max(lengths), folder(row["model"]["name"])
    prompt = kv.generate(0, json.loads((at / "run.json").read_text())["stages"][-1]["pairs"]).prompt(100)
    window = len(AutoTokenizer.from_pretrained(at)(prompt, add_special_tokens=False)["input_ids"])
    theta = json.loads((at / "config.json").read_text())["rope_parameters"]["rope_theta"]
    stretched = {"rope_type": rope, "rope_theta": theta, "factor": round(longest / window, 3)}
    kinds: dict[str, Row] = {  # transformers replaces the parameters as a whole
        "plain": {},
        "linear": {"rope_parameters": stretched},
        "dynamic": {"rope_parameters": stretched, "max_position_embeddings": window},
        "yarn": {"rope_parameters": {**stretched, "original_max_position_embeddings": window}},
    }
    model_args = {"max_length": longest, **kinds[rope], **model_args}
    lm = LPES(**model_args)
    file = WRITTEN / f"answers-{texts}x{longest}-{row['model']['sha256'][:8]}.jsonl"
    answer_tokens = text.write(file, lm.tokenizer, texts, longest, nearest=min(lengths))
    metadata = {"text_file": str(file), "split": "all", "windows": 1, "stride": answer_tokens, "longest": longest}
    samples = {n: _samples(lm, {}, text.TASK, {**metadata, "length": n})[0] for n in lengths}
    asked = [sample["doc"]["question_id"] for sample in samples[longest]]
    return {
        "command": lm_eval_command("lpes", model_args, text.TASK, {**metadata, "length": "LENGTH"}, len(asked)),
        "metric": "nll",
        "answer_tokens": answer_tokens,
        "trained_window": window,
        "text_sha256": files.sha256(file),
        **store.pack(asked, {f"{n}": [float(sample["nll"]) for sample in samples[n]] for n in lengths}),
    }


KINDS: dict[str, Callable[[Row, Row], Row]] = {f.__name__: f for f in (evaluate, choose, search, perplexity)}


def _evaluator(pretrained: str, task: str, metadata: Row, examples: int, split: str) -> Any:
    from lpes_eval.methods.lpes import LPES
    from search.evaluator import Evaluator
    from search.tasks import POSITIONS, load_tasks

    lm, positions = LPES(pretrained=pretrained), POSITIONS if split == "search" else None
    return Evaluator(lm, load_tasks(lm, [task], split=split, metadata=metadata, positions=positions, examples=examples))


def _samples(model: Any, model_args: Row, task: str, metadata: Row, **options: Any) -> tuple[list[Row], str]:
    """One sample a question, as ``lm_eval --log_samples`` has them, and the task's metric."""
    import lm_eval

    from lpes_eval.harness.plugin import own_tasks

    options |= {"model": model, "model_args": model_args, "metadata": metadata, "task_manager": own_tasks(metadata)}
    results = lm_eval.simple_evaluate(tasks=[task], bootstrap_iters=0, log_samples=True, **options)
    return results["samples"][task], results["configs"][task]["metric_list"][0]["metric"]


if __name__ == "__main__":
    print("\n" + json.dumps(carry_out(*json.load(sys.stdin))))
