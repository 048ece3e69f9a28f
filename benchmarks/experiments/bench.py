"""The experiments with the models they run on and the results so far: what is missing, and how to get it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.experiments import measure, plan, sources, store
from benchmarks.experiments.sources import Model
from benchmarks.experiments.store import Row
from lpes_eval import reference
from lpes_eval.errors import UserError

KEPT = Path("benchmarks/results")
GUESS = {"evaluate": 60.0, "choose": 120.0, "search": 180.0, "perplexity": 60.0}
"""Seconds that an experiment of each kind may take."""


class Bench:
    """The experiments of these sizes, the models that they run on, and the results so far.

    Without a second model, the experiments on it fail with that reason.
    """

    def __init__(
        self, results: store.Results, model: Model, second: Model | None, sizes: Mapping[str, Any] = plan.SIZES
    ) -> None:
        self.results, self.model, self.second, self.listed = results, model, second, plan.experiments(sizes)

    def needs(self, name: str) -> set[str]:
        """Experiments from whose results an experiment's factors follow."""
        return sources.needs(self.listed[name].source)

    def wanted(self, name: str) -> Row:
        """What the result of an experiment has to say of itself: the beginning of its row.

        Raises:
            UserError: there is no second model, or no result from which the factors follow.
        """
        _, settings, source, second = self.listed[name]
        model = self.second if second else self.model
        if model is None:
            raise UserError("there is no second model; name one with --second FOLDER")
        factors = sources.layer_factors(source, model, self.found) if source else None
        return {"name": name, "settings": json.loads(json.dumps(settings)), "factors": factors, "model": model}

    def shown(self, name: str) -> tuple[Row | None, str]:
        """An experiment's result if it is of this model and these factors, whatever its size; or why there is none."""
        if (row := self.results.load(name)) is None:
            return None, self.results.failure(name) or "not run"
        try:
            wanted = self.wanted(name)
        except UserError as error:
            return None, str(error)
        if row["model"]["sha256"] != wanted["model"]["sha256"]:
            return None, "the result that is there is another model's"
        if row["factors"] != wanted["factors"]:
            return None, "the result that is there was measured with other factors"
        return row, ""

    def found(self, name: str) -> Row:
        """The result of an experiment, or ``UserError`` with the reason why there is none."""
        row, why = self.shown(name)
        if row is None:
            raise UserError(f"{name} has no result: {why}")
        return row

    def state(self, name: str) -> str:
        """``done``, ``failed``, ``stale`` (of another model, settings or factors) or ``missing``."""
        if (row := self.results.load(name)) is None:
            return "failed" if self.results.failure(name) else "missing"
        try:
            return "done" if row | self.wanted(name) == row else "stale"
        except UserError:
            return "stale"

    def with_needs(self, names: Sequence[str]) -> list[str]:
        """These experiments and those that they need, in the order of the list."""
        wanted = set(names)
        for name in reversed(self.listed):
            wanted |= self.needs(name) if name in wanted else set()
        return [name for name in self.listed if name in wanted]

    def run(self, chosen: Sequence[str], jobs: int, minutes: float = math.inf) -> int:
        """Measure what is not there yet; returns how many experiments failed.

        Args:
            chosen: the experiments, with those that they need.
            jobs: how many at a time.
            minutes: after so many nothing new is begun, and what was begun is measured to its end.
        """
        start, over, failed = time.perf_counter(), count(1), set[str]()

        def minutes_passed() -> float:
            return (time.perf_counter() - start) / 60

        def measured(name: str) -> Row | str:
            """A row, or why there is none."""
            if broken := failed & self.needs(name):
                return {"error": f"it needs {broken.pop()}, which failed"}
            if self.state(name) == "done":
                return "there already"
            if minutes_passed() > minutes:
                return f"not begun, the {minutes:g} minutes are over"
            try:
                row = self.wanted(name)
            except UserError as error:
                return {"error": str(error)}
            kind, _, source, _ = self.listed[name]
            return measure.in_its_own_process(kind, row, sources.model_args(source, row))

        def end(name: str, found: Row | str) -> None:
            if isinstance(found, dict):
                self.results.keep(store.TABLES[self.listed[name].kind], {"name": name, **found})
                failed.update({name} if "error" in found else {})
                found = f"failed: {found['error']}" if "error" in found else f"{found['seconds']:.0f} s"
            print(f"[{next(over)}/{len(chosen)}, {minutes_passed():.1f} min] {name}: {found}", flush=True)

        for needing in (False, True):  # what others need comes first, and needs nothing itself
            pool = ThreadPoolExecutor(jobs)
            futures = {pool.submit(measured, name): name for name in chosen if bool(self.needs(name)) == needing}
            try:
                for future in as_completed(futures):
                    end(futures[future], future.result())
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        return len(failed)

    def listing(self, chosen: Sequence[str], jobs: int) -> str:
        """What is there, what is missing and why, and how long that would take: as before, or at a rough guess."""
        lines, left = [], 0.0
        for name in chosen:
            state, row, why = self.state(name), self.results.load(name), self.results.failure(name)
            seconds = row["cpu_seconds"] if row else GUESS[self.listed[name].kind]
            left += seconds if state != "done" else 0.0
            lines.append(f"{state:8} {seconds:6.0f} s  {name}{f'  ({why})' if why else ''}")
        return "\n".join([*lines, f"To be measured: about {left / 60 / jobs:.0f} min with --jobs {jobs}"])


def open_bench(results: Path, model: str, second: str | None, sizes: Mapping[str, Any] = plan.SIZES) -> Bench:
    """All experiments on a model, with the results in a folder; the second model may be another one that is shipped."""
    if results.exists() and not results.is_dir():
        raise UserError(f"--results {results}: is a file; expected a folder, or a name that is free")
    shipped = (store.spelled(path) for path in map(reference.path, dict.fromkeys(reference.NAMES.values())))
    own = store.spelled(sources.folder(model).resolve())
    second = second or next((folder for folder in shipped if folder != own), None)
    return Bench(store.Results(results), sources.model_at(model), second and sources.model_at(second), sizes)
