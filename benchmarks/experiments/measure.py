"""Carries one experiment out, in a process that may have done others before: the model stays loaded.

Every function takes a ``Job`` and gives what its result holds beyond the circumstances. Answers are those of the
command that is kept beside them: by the search's evaluator, which tests hold against lm-eval example by example, or by
lm-eval itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.experiments import store, text
from benchmarks.experiments.plan import lm_eval_command
from benchmarks.experiments.sources import Model
from lpes_eval.errors import UserError

RUNS = Path("runs/experiments")
"""Where searches keep their folders, from which an interrupted one goes on."""


@dataclass(frozen=True)
class Job:
    """An experiment with all that it needs from others filled in.

    Attributes:
        name: the experiment's name.
        kind: its kind.
        settings: its settings.
        model: the model that it is about.
        factors: one a layer, or none.
        factors_argument: the same as a user would give them.
        threads: of torch.
    """

    name: str
    kind: str
    settings: Mapping[str, Any]
    model: Model
    factors: list[float] | None
    factors_argument: Any
    threads: int

    def identity(self) -> dict[str, Any]:
        """What a result must agree with to be this job's."""
        return {
            "settings": json.loads(json.dumps(self.settings)),
            "factors": self.factors,
            "model": {"name": self.model.pretrained, "sha256": self.model.sha256, "layers": self.model.layers},
        }

    @property
    def model_args(self) -> dict[str, Any]:
        """Of lm-eval: model and factors, where they are not what goes without saying."""
        pretrained = {} if self.model.pretrained == "reference" else {"pretrained": self.model.pretrained}
        return pretrained | ({} if self.factors_argument is None else {"factors": self.factors_argument})

    @property
    def metadata(self) -> dict[str, Any]:
        """Generated examples for every model here; those that are shipped get them without being told."""
        from lpes_eval.data.source import is_shipped

        return {} if is_shipped(self.model.pretrained) else {"source": "generated"}


def carry_out(job: Job) -> dict[str, Any]:
    """Measure, and return the result; or ``{"error": ...}`` with the reason in one line."""
    import torch

    torch.set_num_threads(job.threads)
    start, cpu_start = time.perf_counter(), sum(os.times()[:4])
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # lm-eval's bars
            found = KINDS[job.kind](job)
    except (Exception, SystemExit) as error:  # whatever it is, the other experiments go on
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    return {
        "name": job.name,
        **job.identity(),
        **found,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(sum(os.times()[:4]) - cpu_start, 1),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": store.versions(),
        "hardware": store.hardware(job.threads),
    }


def prepare() -> None:
    """For the processes to be started: no progress bars, no network, no threads beyond the job's own."""
    os.environ.update(TQDM_DISABLE="1", LMEVAL_LOG_LEVEL="ERROR", TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")


# -- accuracy by position ----------------------------------------------------------------------------------------------


def evaluate(job: Job) -> dict[str, Any]:
    """A task's held-out questions at every position it has."""
    task, n, model = (job.settings[name] for name in ("task", "questions", "model"))
    metadata = {**job.settings["metadata"], **job.metadata}
    model_args = job.model_args | job.settings["model_args"]
    if model == "moice":
        model_args["router"] = _router(job.model)
    command = lm_eval_command(model, model_args, task, metadata, n)
    if model == "lpes":
        evaluator = _evaluator(job.model.pretrained, task, json.dumps(metadata), n, "held_out")
        examples = evaluator(job.factors or [1.0] * job.model.layers).examples
        (objective,) = evaluator.objectives
        questions, metric = objective.questions, objective.metric
        scores = {f"{column.position:g}": examples[column.name] for column in objective.columns}
    else:
        samples, metric = _samples(model, model_args, task, {**model_args, **metadata}, batch_size=8, limit=n)
        questions = [sample["doc"]["question_id"] for sample in samples]
        at = sorted((key for key in samples[0] if key.startswith(f"{metric}@")), key=lambda key: float(_position(key)))
        scores = {_position(key): [float(sample[key]) for sample in samples] for key in at}
    return {"command": command, "task": task, "metric": metric, **store.pack(questions, scores)}


def _position(key: str) -> str:
    return key.partition("@")[2]


def choose(job: Job) -> dict[str, Any]:
    """The fitness of uniform factors on search examples, and the best of them; of equals, the smallest."""
    from search.tasks import POSITIONS

    task, n, grid = (job.settings[name] for name in ("task", "examples", "grid"))
    evaluator = _evaluator(job.model.pretrained, task, json.dumps(job.metadata), n, "search")
    fitness = {factor: evaluator([factor] * job.model.layers).fitness for factor in sorted(grid)}
    metadata = {"split": "search", "positions": list(POSITIONS), **job.metadata}
    return {
        "command": lm_eval_command("lpes", {**job.model_args, "factors": "FACTOR"}, task, metadata, n),
        "fitness": [[factor, round(value, 6)] for factor, value in fitness.items()],
        "chosen": max(fitness, key=lambda factor: fitness[factor]),
    }


@lru_cache(maxsize=4)
def _model(pretrained: str) -> Any:
    import logging

    from lpes_eval.methods.lpes import LPES

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return LPES(pretrained=pretrained)


@lru_cache(maxsize=8)
def _evaluator(pretrained: str, task: str, metadata: str, examples: int, split: str) -> Any:
    """The task's requests, built once."""
    from search.evaluator import Evaluator
    from search.tasks import POSITIONS, load_tasks

    lm, positions = _model(pretrained), POSITIONS if split == "search" else None
    told = json.loads(metadata)
    return Evaluator(lm, load_tasks(lm, [task], split=split, metadata=told, positions=positions, examples=examples))


def _samples(
    model: Any, model_args: Mapping[str, Any], task: str, metadata: dict[str, Any], **options: Any
) -> tuple[list[dict[str, Any]], str]:
    """One row a question, as ``lm_eval --log_samples`` has them, and the task's metric."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from lpes_eval.harness.plugin import tasks_folder

    manager = TaskManager(include_path=str(tasks_folder()), include_defaults=False, metadata=metadata)
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=dict(model_args),
        tasks=[task],
        metadata=metadata,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=True,
        **options,
    )
    return results["samples"][task], results["configs"][task]["metric_list"][0]["metric"]


def _router(model: Model) -> str:
    """MoICE's router, which lies beside the weights that it was trained for."""
    path = model.folder / "router.safetensors"
    if not path.exists():
        raise UserError(f"no router was trained for the model ({path.name} is not beside its weights)")
    return store.spelled(path)


# -- searches ----------------------------------------------------------------------------------------------------------


def search(job: Job) -> dict[str, Any]:
    """``python -m search.ga``, in a process of its own, and without its cache: what it costs by itself."""
    from search import config, identity

    flags = shlex.split(job.settings["flags"])
    for flag, values in (("--model_args", job.model_args), ("--metadata", job.metadata)):
        flags += [flag, json.dumps(values)] if values else []
    args = config.parse(flags)
    code = [file.read_text() for file in sorted(Path(identity.__file__).parent.rglob("*.py"))]
    key = hashlib.sha256(json.dumps([job.identity(), store.versions(), code], sort_keys=True).encode()).hexdigest()
    folder = RUNS / f"{job.name.replace('/', '-')}-{key[:8]}"
    command = ["python", "-m", "search.ga", *flags]
    ran = subprocess.run(
        [sys.executable, *command[1:], "--output", str(folder), "--no_cache"], capture_output=True, text=True
    )
    if ran.returncode:
        raise UserError(ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else f"status {ran.returncode}")
    report = json.loads((folder / "report.json").read_text())
    entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    examples = sum(task["examples"] for task in report["settings"]["fitness"]["tasks"]) * len(args.positions)
    evaluations = evaluated(entries, examples)
    fittest: dict[int, float] = {}  # of those that a generation measured to the end
    for generation, _, fitness in evaluations:
        if fitness is not None:
            fittest[generation] = max(fitness, fittest.get(generation, 0.0))
    file = next(path for name in ("factors", "best_effort") if (path := folder / f"{name}.json").exists())
    found = json.loads(file.read_text())
    samples = args.epoch_samples // args.gradient_batch * args.gradient_batch
    return {
        "command": shlex.join(command),
        "found": {key: value for key, value in found.items() if key not in ("format", "version")},
        "fitness": report["best"]["fitness"],
        "to_beat": {name: entry["fitness"] for name, entry in report["to_beat"].items()},
        "fittest_by_generation": sorted(fittest.items()),
        "evaluations": evaluations,
        "gradients": samples if args.optimizer == "gradient" else 0,
        "individuals": report["evaluated"],
        "stopped_early": report["stopped_early"],
        "prompts": report["prompts"],
        "examples": examples,
        "cache": False,
    }


def evaluated(entries: Sequence[Mapping[str, Any]], examples: int) -> list[tuple[int, int, float | None]]:
    """The individuals of a search's journal, in the order in which they were measured.

    Args:
        entries: the journal's lines.
        examples: prompts that an individual is asked unless it is given up.

    Returns:
        Of each one its generation, the prompts that it was asked, and its fitness; none if it was given up.
    """
    return [
        (
            entry["generation"],
            entry.get("stopped_after", examples),
            None if "stopped_after" in entry else round(entry["fitness"], 6),
        )
        for entry in entries
        if entry["generation"] is not None
    ]


# -- perplexity by length ----------------------------------------------------------------------------------------------


def perplexity(job: Job) -> dict[str, Any]:
    """Nats a token of the answers, text by text, behind contexts of several lengths."""
    from lpes_eval.methods.lpes import LPES

    lengths, texts = job.settings["lengths"], job.settings["texts"]
    longest, window = max(lengths), _trained_window(job.model)
    model_args = {"max_length": longest, **_rope_arguments(job, window, longest), **job.model_args}
    lm = LPES(**model_args)
    file = RUNS / f"answers-{texts}x{longest}-{job.model.sha256[:8]}.jsonl"
    answer_tokens = text.write(file, lm.tokenizer, texts, longest, nearest=min(lengths))
    metadata = {"text_file": str(file), "split": "all", "windows": 1, "stride": answer_tokens, "longest": longest}
    by_length = {n: _samples(lm, {}, text.TASK, {**metadata, "length": n})[0] for n in lengths}
    asked = [sample["doc"]["question_id"] for sample in by_length[longest]]
    return {
        "command": lm_eval_command("lpes", model_args, text.TASK, {**metadata, "length": "LENGTH"}, len(asked)),
        "metric": "nll",
        "answer_tokens": answer_tokens,
        "trained_window": window,
        "text_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        **store.pack(asked, {f"{n}": [float(sample["nll"]) for sample in by_length[n]] for n in lengths}),
    }


def _trained_window(model: Model) -> int:
    """Tokens of the longest context that the model was trained on, by the pairs of its last stage."""
    from transformers import AutoTokenizer

    from lpes_eval.data import kv

    run = model.folder / "run.json"
    try:
        pairs = int(json.loads(run.read_text())["stages"][-1]["pairs"])
    except (OSError, KeyError):
        raise UserError(f"{run} does not say how long contexts were in training") from None
    prompt = kv.generate(0, pairs).prompt(100)
    return len(AutoTokenizer.from_pretrained(model.folder)(prompt, add_special_tokens=False)["input_ids"])


def _rope_arguments(job: Job, window: int, longest: int) -> dict[str, Any]:
    """What sets a RoPE kind in transformers 5, which replaces the parameters as a whole."""
    kind = job.settings["rope"]
    if kind == "plain":
        return {}
    config = json.loads((job.model.folder / "config.json").read_text())
    parameters = {"rope_type": kind, "rope_theta": config["rope_parameters"]["rope_theta"]}
    parameters["factor"] = round(longest / window, 3)
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = window
    if kind == "dynamic":  # its trained window is the configuration's own
        return {"rope_parameters": parameters, "max_position_embeddings": window}
    return {"rope_parameters": parameters}


KINDS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "evaluate": evaluate,
    "choose": choose,
    "search": search,
    "perplexity": perplexity,
}
