"""The experiments with the models they run on and the results so far: what is missing, and how to get it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.experiments import measure, plan, store
from benchmarks.experiments.measure import Job
from benchmarks.experiments.plan import Experiment
from benchmarks.experiments.sources import Model, Shipped
from lpes_eval.errors import UserError
from lpes_eval.factors import Factors

KEPT = Path("benchmarks/results")


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
        reference: Model,
        second: Model | None,
        threads: int = 1,
    ) -> None:
        self.listed = {experiment.name: experiment for experiment in listed}
        self.results, self.reference, self.second, self.threads = results, reference, second, threads

    def model(self, experiment: Experiment) -> Model:
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
        if (result := self.results.load(name)) is None:
            raise UserError(f"{name} has no result yet")
        if result["model"]["sha256"] != self.model(self.listed[name]).sha256:
            raise UserError(f"the result of {name} is another model's")
        return result

    def factors(self, experiment: Experiment) -> Factors | None:
        """The factors that an experiment is to be measured with."""
        return experiment.source.factors(self.model(experiment), self.found) if experiment.source is not None else None

    def job(self, experiment: Experiment) -> Job:
        """An experiment with everything filled in."""
        model, factors = self.model(experiment), self.factors(experiment)
        values = factors.per_layer(model.layers) if factors is not None else None
        argument: Any = values
        if factors is not None and factors.uniform is not None:
            argument = factors.uniform
        elif isinstance(experiment.source, Shipped):
            path = model.shipped_factors(experiment.source.of)
            own = model.pretrained != "reference" or path.name != "factors.json"
            argument = store.spelled(path) if own else "reference"
        return Job(experiment.name, experiment.kind, experiment.settings, model, values, argument, self.threads)

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
        if (result := self.results.load(name)) is None:
            return None, self.results.failure(name) or "not run"
        try:
            wanted = self.job(self.listed[name]).identity()
        except UserError as error:
            return None, str(error)
        if result["model"]["sha256"] != wanted["model"]["sha256"]:
            return None, "the result that is there is another model's"
        if result["factors"] != wanted["factors"]:
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
        processes: Callable[[int], Executor] | None = None,
    ) -> int:
        """Measure what is not there yet; returns how many experiments failed.

        Args:
            chosen: the experiments, those that others need before them.
            jobs: how many at a time.
            say: told of each one that is over.
            minutes: after so many nothing new is begun, and what was begun is measured to its end.
            processes: makes a pool of so many.
        """
        processes = processes or _pool
        waiting, failed = list(chosen), set[str]()
        running: dict[Future[dict[str, Any]], Experiment] = {}
        measure.prepare()
        pool = processes(jobs)
        start = time.perf_counter()

        def end(experiment: Experiment, result: Mapping[str, Any] | None) -> None:
            outcome = "there already"
            if result is not None and "error" in result:
                failed.add(experiment.name)
                self.results.keep_failure(experiment.name, result["error"])
                outcome = f"failed: {result['error']}"
            elif result is not None:
                self.results.keep(experiment.kind, result)
                outcome = f"{result['seconds']:.0f} s"
            over, passed = len(chosen) - len(waiting) - len(running), (time.perf_counter() - start) / 60
            say(f"[{over}/{len(chosen)}, {passed:.1f} min] {experiment.name}: {outcome}")

        def begin(experiment: Experiment) -> None:
            waiting.remove(experiment)
            if broken := [need for need in experiment.needs if need in failed]:
                return end(experiment, {"error": f"it needs {broken[0]}, which failed"})
            if self.state(experiment) == "done":
                return end(experiment, None)
            try:
                running[pool.submit(measure.carry_out, self.job(experiment))] = experiment
            except (UserError, ValueError) as error:
                end(experiment, {"error": str(error)})

        try:
            while waiting or running:
                late = time.perf_counter() - start > 60 * minutes
                if late and not running:
                    say(f"{len(waiting)} experiments were not begun: the {minutes:g} minutes are over")
                    break
                for experiment in list(waiting):
                    busy = {one.name for one in (*running.values(), *waiting)}
                    if not late and len(running) < jobs and not busy.intersection(experiment.needs):
                        begin(experiment)
                for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                    experiment = running.pop(future)
                    try:
                        end(experiment, future.result())
                    except BrokenProcessPool:
                        end(experiment, {"error": "its process was killed, for want of memory perhaps"})
                        pool = processes(jobs)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return len(failed)

    def estimate(self, experiment: Experiment) -> float:
        """Seconds that an experiment may take: those it took with other settings, or a rough guess."""
        settings, result = experiment.settings, self.results.load(experiment.name)
        if result is not None:
            before = result["settings"].get("questions") or 1
            return result["cpu_seconds"] * (settings.get("questions") or before) / before
        if experiment.kind == "evaluate":
            slow = 25 if settings["model"] in plan.SLOW else 3 if settings["model"] != "lpes" else 1
            return 0.7 * settings["questions"] * slow
        return {"choose": 120.0, "search": 180.0, "perplexity": 60.0}[experiment.kind]

    def listing(self, chosen: Sequence[Experiment], jobs: int) -> str:
        """What is there, what is missing and why, and how long that would take."""
        lines, left = [], 0.0
        for experiment in chosen:
            state, seconds = self.state(experiment), self.estimate(experiment)
            left += seconds if state != "done" else 0.0
            why = f"  ({self.results.failure(experiment.name)})" if state == "failed" else ""
            lines.append(f"{state:8} {seconds:6.0f} s  {experiment.name}{why}")
        return "\n".join([*lines, f"To be measured: about {left / 60 / jobs:.0f} min with --jobs {jobs}"])


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))


def second_model(reference: Model, pretrained: str | None) -> Model | None:
    """The model that was named, or another one that is shipped, if there is one."""
    if pretrained is not None:
        return store.model_at(pretrained)
    from lpes_eval import reference as shipped

    home = Path(shipped.__file__).resolve().parent
    others = (path.parent for path in sorted(home.glob("*/model.safetensors")))
    other = next((folder for folder in others if folder != reference.folder.resolve()), None)
    return store.model_at(store.spelled(other)) if other is not None else None


def open_bench(results: Path, model: str, second: str | None, sizes: Mapping[str, Any] = plan.SIZES) -> Bench:
    """All experiments on a model, with the results in a folder."""
    if results.exists() and not results.is_dir():
        raise UserError(f"--results {results}: is a file; expected a folder, or a name that is free")
    reference = store.model_at(model)
    return Bench(plan.experiments(sizes), store.Results(results), reference, second_model(reference, second))
