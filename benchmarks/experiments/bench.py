"""The experiments with the models they run on and the results so far: what is missing, and how to get it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.experiments import measure, plan, sources, store
from benchmarks.experiments.measure import Job
from benchmarks.experiments.plan import Experiment, Sizes
from lpes_eval.errors import UserError
from lpes_eval.factors import Factors

KEPT = Path("benchmarks/results/reference")


class Bench:
    """The experiments, the models they run on, and the results so far.

    Args:
        listed: the experiments.
        results: where results are kept.
        reference: the model.
        second: the second model; without one its experiments fail with that reason.
        threads: of each process.
    """

    def __init__(
        self,
        listed: Sequence[Experiment],
        results: store.Results,
        reference: sources.Model,
        second: sources.Model | None,
        threads: int = 1,
    ) -> None:
        self.listed = {experiment.name: experiment for experiment in listed}
        self.results, self.reference, self.second, self.threads = results, reference, second, threads

    def model(self, experiment: Experiment) -> sources.Model:
        """The model that an experiment is about."""
        if not experiment.second:
            return self.reference
        if self.second is None:
            raise UserError("there is no second model; name one with --second FOLDER")
        return self.second

    def found(self, name: str) -> dict[str, Any]:
        """The result of an experiment.

        Raises:
            UserError: it is not there, or of another model.
        """
        result = self.results.load(name)
        if result is None:
            raise UserError(f"{name} has no result yet")
        if result["model"]["sha256"] != self.model(self.listed[name]).sha256:
            raise UserError(f"the result of {name} is another model's")
        return result

    def factors(self, experiment: Experiment) -> Factors | None:
        """The factors that an experiment is to be measured with."""
        if experiment.source is None:
            return None
        return experiment.source.factors(self.model(experiment), self.found)

    def job(self, experiment: Experiment) -> Job:
        """An experiment with everything filled in."""
        model, factors = self.model(experiment), self.factors(experiment)
        return Job(
            experiment.name,
            experiment.kind,
            experiment.settings,
            model.pretrained,
            model.sha256,
            model.layers,
            factors.per_layer(model.layers) if factors is not None else None,
            self._argument(experiment, model, factors),
            self.threads,
        )

    def _argument(self, experiment: Experiment, model: sources.Model, factors: Factors | None) -> str | float | None:
        """Factors as they are given to ``lm_eval``."""
        if factors is None:
            return None
        if factors.uniform is not None:
            return factors.uniform
        if isinstance(experiment.source, sources.Shipped):
            path = model.shipped_factors(experiment.source.task)
            if model.pretrained == "reference" and path.name == "factors.json":
                return "reference"
            return store.spelled(path)
        return str(self.results.factors_path(experiment.name))

    def state(self, experiment: Experiment) -> str:
        """``done``, ``failed``, ``stale`` (of another model, settings or factors) or ``missing``."""
        result = self.results.load(experiment.name)
        if result is None:
            return "failed" if self.results.failure(experiment.name) else "missing"
        try:
            wanted = self.job(experiment).identity()
        except UserError:
            return "stale"
        return "done" if all(result[key] == value for key, value in wanted.items()) else "stale"

    def shown(self, name: str) -> tuple[dict[str, Any] | None, str]:
        """An experiment's result if it is of this model and these factors, whatever its size; or why there is none."""
        experiment = self.listed[name]
        result = self.results.load(name)
        if result is None:
            return None, self.results.failure(name) or "not run"
        try:
            model, factors = self.model(experiment), self.factors(experiment)
        except UserError as error:
            return None, str(error)
        if result["model"]["sha256"] != model.sha256:
            return None, "the result that is there is another model's"
        if result["factors"] != (factors.per_layer(model.layers) if factors is not None else None):
            return None, "the result that is there was measured with other factors"
        return result, ""

    def with_needs(self, names: Sequence[str]) -> list[Experiment]:
        """These experiments and those that they need, in the order of the list."""
        wanted = set(names)
        while more := {need for name in wanted for need in self.listed[name].needs} - wanted:
            wanted |= more
        return [experiment for experiment in self.listed.values() if experiment.name in wanted]

    def run(
        self,
        chosen: Sequence[Experiment],
        jobs: int,
        say: Callable[[str], None] = print,
        minutes: float = math.inf,
    ) -> int:
        """Measure what is not there yet, ``jobs`` at a time; returns how many experiments failed.

        After so many ``minutes`` nothing new is begun, and what was begun is measured to its end.
        """
        names = {experiment.name for experiment in chosen}
        waiting = list(chosen)
        finished = 0
        failed: set[str] = set()
        running: dict[Future[dict[str, Any]], tuple[Experiment, Factors | None]] = {}
        measure.prepare()
        pool = _pool(jobs)
        start = time.perf_counter()

        def over(experiment: Experiment, outcome: str) -> None:
            nonlocal finished
            finished += 1
            minutes = (time.perf_counter() - start) / 60
            say(f"[{finished}/{len(chosen)}, {minutes:.1f} min] {experiment.name}: {outcome}")

        def fail(experiment: Experiment, reason: str) -> None:
            failed.add(experiment.name)
            self.results.keep_failure(experiment.name, reason)
            over(experiment, f"failed: {reason}")

        try:
            while waiting or running:
                busy = {experiment.name for experiment, _ in running.values()} | {one.name for one in waiting}
                for experiment in [one for one in waiting if not busy.intersection(one.needs)]:
                    if len(running) >= jobs or time.perf_counter() - start > 60 * minutes:
                        break
                    waiting.remove(experiment)
                    if broken := [need for need in experiment.needs if need in failed]:
                        fail(experiment, f"it needs {broken[0]}, which failed")
                        continue
                    if self.state(experiment) == "done":
                        over(experiment, "there already")
                        continue
                    try:
                        job, factors = self.job(experiment), self.factors(experiment)
                    except (UserError, ValueError) as error:
                        fail(experiment, str(error))
                        continue
                    if isinstance(job.factors_argument, str) and not isinstance(experiment.source, sources.Shipped):
                        assert factors is not None
                        factors.save(self.results.factors_path(experiment.name))
                    running[pool.submit(measure.carry_out, job)] = experiment, factors
                if not running and time.perf_counter() - start > 60 * minutes:
                    say(f"{len(waiting)} experiments were not begun: the {minutes:g} minutes are over")
                    break
                if not running:
                    continue
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    experiment, _ = running.pop(future)
                    try:
                        result = future.result()
                    except BrokenProcessPool:
                        result = {"error": "its process was killed, for want of memory perhaps"}
                        pool = _pool(jobs)
                    if "error" in result:
                        fail(experiment, result["error"])
                    else:
                        self.results.keep(experiment.name, result)
                        over(experiment, f"{result['seconds']:.0f} s")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return len(failed & names)

    def estimate(self, experiment: Experiment) -> float:
        """Seconds that an experiment may take: those it took with other settings, or a rough guess."""
        result = self.results.load(experiment.name)
        settings = experiment.settings
        if result is not None:
            before = result["settings"].get("questions") or 1
            return result["cpu_seconds"] * (settings.get("questions") or before) / before
        if experiment.kind == "evaluate":
            slow = {"attention_buckets": 30, "moice": 20, "ms_poe": 3}.get(settings["model"], 1)
            return 0.7 * settings["questions"] * slow
        return {"choose": 120.0, "search": 180.0, "perplexity": 60.0}[experiment.kind]

    def listing(self, chosen: Sequence[Experiment], jobs: int) -> str:
        """What is there, what is missing and why, and how long that would take."""
        lines, left = [], 0.0
        for experiment in chosen:
            state, seconds = self.state(experiment), self.estimate(experiment)
            if state != "done":
                left += seconds
            why = self.results.failure(experiment.name) if state == "failed" else None
            lines.append(f"{state:8} {seconds:6.0f} s  {experiment.name}" + (f"  ({why})" if why else ""))
        lines.append(f"To be measured: about {left / 60 / jobs:.0f} min with --jobs {jobs}")
        return "\n".join(lines)


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))


def second_model(reference: sources.Model, pretrained: str | None) -> sources.Model | None:
    """The model that was named, or another one that is shipped, if there is one."""
    if pretrained is not None:
        return store.model_at(pretrained)
    from lpes_eval import reference as shipped

    home = Path(shipped.__file__).resolve().parent
    for folder in sorted(path.parent for path in home.glob("*/model.safetensors")):
        if folder != reference.folder.resolve():
            return store.model_at(store.spelled(folder))
    return None


def open_bench(results: Path, model: str, second: str | None, sizes: Sizes | None = None) -> Bench:
    """All experiments on a model, with the results in a folder."""
    if results.exists() and not results.is_dir():
        raise UserError(f"--results {results}: is a file; expected a folder, or a name that is free")
    reference = store.model_at(model)
    listed = plan.experiments(sizes or Sizes())
    return Bench(listed, store.Results(results), reference, second_model(reference, second))
