"""Where a search, and each of its workers, measures: the model, its tasks and guards, and a whole measurement."""

import argparse
import logging
import math
import os
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from lpes_eval.errors import UserError
from lpes_eval.methods.lpes import LPES
from search import guards
from search.config import WHOLE, task_options
from search.evaluator import Evaluator
from search.guards import Guard
from search.space import Job
from search.tasks import Objective, load_tasks


class Bench:
    """The model of a command line, with its tasks and guards on both splits, each built when it is first used.

    ``lm`` is the lm-eval model, if it is loaded already; not ``whole``, it is loaded without weights.
    """

    def __init__(self, args: argparse.Namespace, lm: Any = None, whole: bool = True) -> None:
        self.args, self.lm = args, lm or load_model(args, whole)
        self.objectives = cache(self._objectives)  # by split
        self.evaluator = cache(lambda split: self._measured_by(self.objectives(split)))
        self.guards = cache(self._guards)

    def _objectives(self, split: str) -> list[Objective]:
        options = task_options(self.args) | ({"positions": None} if split == "held_out" else {})
        examples = self.args.examples if split == "search" else self.args.held_out_examples
        return load_tasks(self.lm, self.args.tasks, split=split, examples=examples, **options)

    def _measured_by(self, objectives: Sequence[Objective]) -> Evaluator:
        args = self.args
        size = None if args.batch_size == "auto" else args.batch_size
        vllm = args.engine_args if args.engine == "vllm" else None
        return Evaluator(self.lm, objectives, prompts_per_batch=size, vllm=vllm)

    def _guards(self, split: str) -> list[Guard]:
        examples = self.args.guard_examples if split == "search" else self.args.held_out_examples
        return guards.load(self.args, self.evaluator(split), split, examples, self._measured_by)

    def measure(self, job: Job) -> dict[str, Any]:
        """What the journal keeps of one measurement; ``UserError`` if its fitness is no number."""
        evaluator, watched = self.evaluator(job.split), self.guards(job.split)
        part = evaluator.part(job.part)
        if job.measure == "likelihood":
            measured = evaluator.likelihood(job.factors, part)
        else:
            measured = evaluator(job.factors, job.cutoff, part, settle=job.settle)
        per_layer = job.factors.per_layer(evaluator.num_layers)
        if job.split == "search" and not math.isfinite(measured.fitness):
            factors = ", ".join(f"{s:g}" for s in per_layer)
            bad = ", ".join(name for name, value in measured.scores.items() if not math.isfinite(value))
            way = "take another metric (--metrics) or, if the model overflows, --model_args dtype=float32"
            raise UserError(f"the fitness of factors {factors} is {measured.fitness}, by {bad or 'its weights'}; {way}")
        scaled = set(per_layer[self.args.skip :])
        data: dict[str, Any] = {
            **vars(measured),
            "measure": job.measure,
            "prompts": measured.stopped_after or evaluator.asked(part),
            "factor": scaled.pop() if len(scaled) == 1 and job.split == "search" else None,
        }
        if watched and not measured.stopped_after and measured.fitness > job.guarded_above:
            began = time.perf_counter()
            rows = {guard.name: guard.rows(job.factors, measured, job.settle) for guard in watched}
            data["seconds"] += time.perf_counter() - began
            if job.plain_rows is None:
                data["guard_rows"] = rows
            else:
                data["guards"] = {g.name: g.check(job.plain_rows[g.name], rows[g.name]) for g in watched}
            data["guard_prompts"] = sum(guard.evaluator.prompts for guard in watched if not guard.ends)
        return data | {"seconds": round(data["seconds"], 3)}

    def time_two_batches(self) -> tuple[int, float]:
        """As ``Evaluator.time_two_batches``."""
        return self.evaluator("search").time_two_batches()


class WithoutWeights(LPES):
    """What the driver needs of a model whose weights its workers have: configuration, modules and tokenizer."""

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        import torch

        self._device = torch.device("meta")
        super()._create_model(*args, **kwargs | {"parallelize": False})


def load_model(args: argparse.Namespace, whole: bool = True) -> Any:
    """The ``lpes`` model, as lm-eval would load it; not ``whole``, without weights, which its workers have."""
    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        way = "start it with python -m search.ga (one model on several GPUs: --model_args parallelize=True)"
        raise UserError(f"a search is one process, and this is one of {processes}; {way}")
    if "factors" in args.model_args:
        raise UserError("--model_args factors=...: a search makes its own factors; leave them out")
    for name in args.model_args.keys() & {"batch_size", "device"}:
        raise UserError(f"--model_args {name}=...: is a flag of its own; give it as --{name}")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    kind, device = LPES, args.device
    if args.engine == "vllm":
        device = "cpu"
    if not whole and not WHOLE & args.model_args.keys():
        kind, device = WithoutWeights, "cpu"
    lm = kind.create_from_arg_obj(args.model_args, {"batch_size": args.batch_size, "device": device})
    lm.note_carried_factors()
    return lm
