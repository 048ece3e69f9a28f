"""Carries one experiment out, in a process that may have done others before: the model stays loaded.

Every function takes a ``Job`` and gives what its result holds beyond the circumstances. Answers are those of the
command that is kept beside them: by ``search.fitness``, which the tests hold against lm-eval example by example, or by
lm-eval itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.experiments import store
from benchmarks.experiments.plan import lm_eval_command
from lpes_eval.errors import UserError

ROUTER = "router.safetensors"
RUNS = Path("runs/experiments")
"""Where searches keep their folders, from which an interrupted one goes on."""


@dataclass(frozen=True)
class Job:
    """An experiment with all that it needs from others filled in.

    Attributes:
        name: the experiment's name.
        kind: the experiment's kind.
        settings: the experiment's settings.
        pretrained: the model, as lm-eval is given it.
        sha256: of its weights.
        layers: its depth.
        factors: one a layer, or none.
        factors_argument: the same as a user would give them.
        threads: of torch.
    """

    name: str
    kind: str
    settings: Mapping[str, Any]
    pretrained: str
    sha256: str
    layers: int
    factors: list[float] | None
    factors_argument: str | float | None
    threads: int

    def identity(self) -> dict[str, Any]:
        """What a result must agree with to be this job's."""
        return {
            "settings": json.loads(json.dumps(self.settings)),
            "factors": self.factors,
            "model": {"name": self.pretrained, "sha256": self.sha256, "layers": self.layers},
        }


def carry_out(job: Job) -> dict[str, Any]:
    """Measure, and return the result; or ``{"error": ...}`` with the reason in one line."""
    import torch

    torch.set_num_threads(job.threads)
    start, cpu_start = time.perf_counter(), time.process_time()
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
        "cpu_seconds": round(time.process_time() - cpu_start, 1),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": store.versions(),
        "hardware": store.hardware(job.threads),
    }


# -- by position -------------------------------------------------------------------------------------------------------


def evaluate(job: Job) -> dict[str, Any]:
    """A task's held-out questions at every position it has."""
    task, n = job.settings["task"], job.settings["questions"]
    metadata = {**job.settings["metadata"], **_source_of_examples(job)}
    model_args = {**_pretrained(job), **job.settings["model_args"]}
    if job.settings["model"] == "moice":
        model_args["router"] = _router(job)
    if job.factors_argument is not None:
        model_args["factors"] = job.factors_argument
    command = lm_eval_command(job.settings["model"], model_args, task, metadata, n)
    if job.settings["model"] == "lpes":
        fitness = _fitness(job.pretrained, task, json.dumps(metadata), n, "held_out")
        measured = fitness(job.factors or [1.0] * job.layers)
        scores = {part.position: measured.examples[part.name] for part in fitness.parts}
        questions, metric = fitness.parts[0].questions, fitness.parts[0].metric
    else:
        questions, metric, scores = _by_lm_eval(job.settings["model"], model_args, task, metadata, n)
    return {"command": command, "task": task, "metric": metric, **store.pack(questions, _labelled(scores))}


def _by_lm_eval(
    model: str, model_args: Mapping[str, Any], task: str, metadata: dict[str, Any], n: int
) -> tuple[list[Any], str, dict[float, list[float]]]:
    import lm_eval
    from lpes_eval.scoring.positions import position_of

    from lpes_eval import methods

    if model not in methods.names():
        raise UserError(f"there is no model type {model}")
    metadata = {**model_args, **metadata}
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=dict(model_args),
        tasks=[task],
        limit=n,
        batch_size=8,
        metadata=metadata,
        task_manager=_tasks(metadata),
        bootstrap_iters=0,
        log_samples=True,
    )
    scores: dict[float, list[float]] = {}
    asked: list[Any] = []
    metric = ""
    for name, samples in results["samples"].items():
        metric = results["configs"][name]["metric_list"][0]["metric"]
        by_question = {sample["doc"]["question_id"]: float(sample[metric]) for sample in samples}
        asked = asked or list(by_question)
        position = position_of(results["configs"][name])
        assert position is not None  # tasks here come by position
        scores[position] = [by_question[question] for question in asked]
    return asked, metric, scores


def choose(job: Job) -> dict[str, Any]:
    """The fitness of uniform factors on search examples, and the best of them; of equals, the smallest."""
    task, n, grid = (job.settings[name] for name in ("task", "examples", "grid"))
    metadata = _source_of_examples(job)
    fitness = _fitness(job.pretrained, task, json.dumps(metadata), n, "search")
    measured = {factor: fitness([factor] * job.layers).fitness for factor in sorted(grid)}
    tasks = ",".join(part.name for part in fitness.parts)
    model_args = {**_pretrained(job), "factors": "FACTOR"}
    return {
        "command": lm_eval_command("lpes", model_args, tasks, {"split": "search", **metadata}, n),
        "fitness": [[factor, round(value, 6)] for factor, value in measured.items()],
        "chosen": max(measured, key=lambda factor: measured[factor]),
    }


@lru_cache(maxsize=4)
def _model(pretrained: str) -> Any:
    import logging

    from lpes_eval.methods.lpes import LPES

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return LPES(pretrained=pretrained)


@lru_cache(maxsize=8)
def _fitness(pretrained: str, task: str, metadata: str, examples: int, split: str) -> Any:
    """The task's requests, built once; answers to them under other factors serve as drafts, which changes none."""
    from search.fitness import Fitness
    from search.parts import POSITIONS, load_parts

    lm = _model(pretrained)
    positions = POSITIONS if split == "search" else None
    parts = load_parts(lm, [task], split=split, metadata=json.loads(metadata), positions=positions, examples=examples)
    return Fitness(lm, parts)


# -- searches ----------------------------------------------------------------------------------------------------------


def search(job: Job) -> dict[str, Any]:
    """``python -m search.ga`` in this process."""
    from search import arguments, ga

    flags = shlex.split(job.settings["flags"])
    if pretrained := _pretrained(job):
        flags += ["--model_args", f"pretrained={pretrained['pretrained']}"]
    if metadata := _source_of_examples(job):
        flags += ["--metadata", json.dumps(metadata)]
    code = [file.read_text() for file in sorted(Path(ga.__file__).parent.glob("*.py"))]
    told = json.dumps([job.identity(), store.versions(), code], sort_keys=True)
    folder = RUNS / f"{job.name.replace('/', '-')}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a") as log, contextlib.redirect_stdout(log):
        ga.run(args := arguments.parse([*flags, "--output", str(folder), "--no_cache"]))  # what it costs by itself
    report = json.loads((folder / "report.json").read_text())
    entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    examples = sum(part["examples"] for part in report["settings"]["fitness"]["parts"])
    evaluations = evaluated(entries, examples)
    fittest: dict[int, float] = {}  # of those that a generation measured to the end
    for generation, _, fitness in evaluations:
        if fitness is not None:
            fittest[generation] = max(fitness, fittest.get(generation, 0.0))
    found = json.loads((folder / "factors.json").read_text())
    return {
        "command": shlex.join(["python", "-m", "search.ga", *flags]),
        "found": {key: value for key, value in found.items() if key not in ("format", "version")},
        "fitness": report["best"]["fitness"],
        "to_beat": {name: entry["fitness"] for name, entry in report["to_beat"].items()},
        "fittest_by_generation": sorted(fittest.items()),
        "evaluations": evaluations,
        "gradients": args.epoch_samples // args.gradient_batch * args.gradient_batch * (args.optimizer == "gradient"),
        "individuals": report["evaluated"],
        "stopped_early": report["stopped_early"],
        "prompts": report["prompts"],
        "examples": examples,
        "cache": not args.no_cache,
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
    import lm_eval

    from benchmarks.experiments import text
    from lpes_eval.methods.lpes import LPES

    lengths, kind = job.settings["lengths"], job.settings["rope"]
    longest = max(lengths)
    window = _trained_window(job)
    model_args = {**_pretrained(job), "max_length": longest, **_rope_arguments(job, kind, window, longest)}
    if job.factors_argument is not None:
        model_args["factors"] = job.factors_argument
    lm = LPES(**model_args)
    file = RUNS / f"answers-{job.settings['texts']}x{longest}-{job.sha256[:8]}.jsonl"
    answer_tokens = text.write(file, lm.tokenizer, job.settings["texts"], longest, nearest=min(lengths))
    scores: dict[str, list[float]] = {}
    asked: list[Any] = []
    for length in lengths:
        metadata = {"text_file": str(file), "split": "all", "windows": 1, "stride": answer_tokens}
        metadata |= {"length": length, "longest": longest}
        results = lm_eval.simple_evaluate(
            model=lm,
            tasks=[text.TASK],
            metadata=metadata,
            task_manager=_tasks(metadata),
            bootstrap_iters=0,
            log_samples=True,
        )
        samples = results["samples"][text.TASK]
        asked = [sample["doc"]["question_id"] for sample in samples]
        scores[str(length)] = [float(sample["nll"]) for sample in samples]
    command = lm_eval_command("lpes", model_args, text.TASK, {**metadata, "length": "LENGTH"}, len(asked))
    return {
        "command": command,
        "metric": "nll",
        "answer_tokens": answer_tokens,
        "trained_window": window,
        "text_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        **store.pack(asked, scores),
    }


def _trained_window(job: Job) -> int:
    """Tokens of the longest context that the model was trained on, by the pairs of its last stage."""
    from transformers import AutoTokenizer

    from lpes_eval.data import kv

    folder = store.model_at(job.pretrained).folder
    try:
        pairs = int(json.loads((folder / "run.json").read_text())["stages"][-1]["pairs"])
    except (OSError, KeyError):
        raise UserError(f"{folder / 'run.json'} does not say how long contexts were in training") from None
    prompt = kv.generate(0, pairs).prompt(100)
    return len(AutoTokenizer.from_pretrained(folder)(prompt, add_special_tokens=False)["input_ids"])


def _rope_arguments(job: Job, kind: str, window: int, longest: int) -> dict[str, Any]:
    """What sets a RoPE kind in transformers 5, which replaces the parameters as a whole."""
    if kind == "plain":
        return {}
    config = json.loads((store.model_at(job.pretrained).folder / "config.json").read_text())
    factor = round(longest / window, 3)
    parameters = {"rope_type": kind, "rope_theta": config["rope_parameters"]["rope_theta"], "factor": factor}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = window
    if kind == "dynamic":  # its trained window is the configuration's own
        return {"rope_parameters": parameters, "max_position_embeddings": window}
    return {"rope_parameters": parameters}


# -- shared ------------------------------------------------------------------------------------------------------------


def _pretrained(job: Job) -> dict[str, str]:
    return {} if job.pretrained == "reference" else {"pretrained": job.pretrained}


def _source_of_examples(job: Job) -> dict[str, str]:
    """Generated examples for every model here; those that are shipped get them without being told."""
    from lpes_eval.data.source import is_shipped

    return {} if is_shipped(job.pretrained) else {"source": "generated"}


def _router(job: Job) -> str:
    """MoICE's router, which lies beside the weights that it was trained for."""
    model = store.model_at(job.pretrained)
    path = model.folder / ROUTER
    if not path.exists():
        raise UserError(f"no router was trained for the model ({ROUTER} is not beside its weights)")
    return store.spelled(path)


def _tasks(metadata: dict[str, Any]) -> Any:
    from lm_eval.tasks import TaskManager

    from lpes_eval.harness.plugin import tasks_folder

    return TaskManager(include_path=str(tasks_folder()), include_defaults=False, metadata=metadata)


def _labelled(scores: Mapping[Any, list[float]]) -> dict[str, list[float]]:
    return {f"{position:g}": scores[position] for position in sorted(scores)}


KINDS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "evaluate": evaluate,
    "choose": choose,
    "search": search,
    "perplexity": perplexity,
}


def prepare() -> None:
    """For the processes to be started: no progress bars, no network, no threads beyond the job's own."""
    os.environ.update(TQDM_DISABLE="1", LMEVAL_LOG_LEVEL="ERROR", TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
