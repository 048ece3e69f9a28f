"""The experiments with the models they run on and the results so far: what is missing, and how to get it."""

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from benchmarks.experiments import measure, plan, store
from benchmarks.experiments.plan import Source
from benchmarks.experiments.store import KEPT, Row
from lpes_eval import factors as factors_file
from lpes_eval import files, reference
from lpes_eval.errors import UserError
from lpes_eval.factors import Factors


def shipped_model(name: str) -> Row:
    """``name`` (``reference``, or a folder from the repository's root), ``sha256`` of the weights, and ``layers``."""
    folder = measure.folder(name)
    layers = int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])
    return {"name": name, "sha256": files.sha256(folder / "model.safetensors"), "layers": layers}


def needs(source: Source | None) -> str | None:
    """The experiment whose result a source takes."""
    while source is not None and isinstance(source[-1], tuple):
        source = source[-1]
    return None if source is None or source[0] == "shipped" else source[-1]


def layer_factors(source: Source, model: Row, result: Callable[[str], Row]) -> list[float]:
    """The factors that a source gives a model, one a layer; ``result`` gives an experiment's result by its name."""
    kind, *how, of = source
    depth = model["layers"]
    if kind == "shipped":
        return factors_file.load(measure.folder(model["name"]) / "factors.json").per_layer(depth)
    if kind == "chosen":
        return [result(of)["chosen"]] * depth
    if kind == "mean":
        return [round(math.fsum(layer_factors(of, model, result)) / depth, 4)] * depth
    if kind == "half":
        values, first = layer_factors(of, model, result), how == ["first"]
        return [value if (h < depth // 2) == first else 1.0 for h, value in enumerate(values)]
    found = Factors.from_dict({key: value for key, value in result(of)["found"].items() if key != "origin"})
    if found.curve is None or found.curve[0] == "free":
        return (found.per_layer() + [1.0] * depth)[:depth]  # they stay with their layers, counted from the first
    curve, points = found.curve
    if kind == "moved":
        point, by = how
        points = tuple((x, round(y + by, 4) if point in (None, k) else y) for k, (x, y) in enumerate(points))
    return replace(found, curve=(curve, points), num_layers=depth).per_layer()


def model_args(source: Source | None, row: Row) -> Row:
    """lm-eval's model arguments, as a user would give them: model and factors, where they are not the default."""
    name, factors = row["model"]["name"], row["factors"]
    named = {} if name == "reference" else {"pretrained": name}
    if source is None:
        return named
    if len(set(factors)) == 1:
        factors = factors[0]
    elif source[0] == "shipped":
        factors = "reference" if name == "reference" else f"{name}/factors.json"
    return named | {"factors": factors}


class Bench:
    """The experiments, the models that they run on, and the results so far."""

    def __init__(self, folder: Path, model: Row, second: Row) -> None:
        self.folder, self.model, self.second = folder, model, second
        self.listed, self.results = plan.experiments(), store.tables(folder)

    def wanted(self, name: str) -> Row:
        """What the result of an experiment has to say of itself: the beginning of its row.

        Raises:
            UserError: there is no result from which the factors follow.
        """
        _, settings, source = self.listed[name]
        model = self.second if name.startswith("second/") else self.model
        factors = layer_factors(source, model, self.found) if source else None
        return {"name": name, "settings": json.loads(json.dumps(settings)), "factors": factors, "model": model}

    def shown(self, name: str) -> tuple[Row | None, str]:
        """An experiment's result, if it is of today's plan, models and factors; or why there is none."""
        if (row := self.results[self.listed[name].kind].get(name)) is None:
            return None, "not run"
        try:
            current = row | self.wanted(name) == row
        except UserError as error:
            return None, str(error)
        return (row, "") if current else (None, "the result that is there is of another model, factors or settings")

    def found(self, name: str) -> Row:
        """The result of an experiment, or ``UserError`` with the reason why there is none."""
        row, why = self.shown(name)
        if row is None:
            raise UserError(f"{name} has no result: {why}")
        return row

    def keep(self, row: Row) -> None:
        """Write a result in place of an earlier one of its name."""
        kind = self.listed[row["name"]].kind
        self.results[kind][row["name"]] = json.loads(json.dumps(row))
        store.write(self.folder / store.TABLES[kind], self.results[kind].values())

    def with_needs(self, names: Sequence[str]) -> list[str]:
        """These experiments and those from whose results their factors follow, which come before them."""
        wanted = {*names, *(needs(self.listed[name].source) for name in names)}
        return [name for name in self.listed if name in wanted]

    def run(self, chosen: Sequence[str], jobs: int) -> int:
        """Measure what is not there yet, ``jobs`` at a time; returns how many experiments failed."""
        start, failed = time.perf_counter(), 0

        def measured(name: str) -> Row | None:
            """The whole row, or none where it is there already."""
            if self.shown(name)[0]:
                return None
            row, (kind, _, source) = self.wanted(name), self.listed[name]
            return measure.in_its_own_process(kind, row, model_args(source, row))

        needing = [name for name in chosen if needs(self.listed[name].source)]
        for names in ([name for name in chosen if name not in needing], needing):
            pool = ThreadPoolExecutor(jobs)
            futures = {pool.submit(measured, name): name for name in names}
            try:
                for future in as_completed(futures):
                    name, said = futures[future], "there already"
                    try:
                        if row := future.result():
                            self.keep(row)
                            said = f"{row['seconds']:.0f} s"
                    except UserError as error:
                        failed, said = failed + 1, f"failed: {error}"
                    print(f"[{(time.perf_counter() - start) / 60:.1f} min] {name}: {said}", flush=True)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        return failed

    def listing(self, chosen: Sequence[str]) -> str:
        """What is there, and of the others why not."""
        return "\n".join(f"{name}: {self.shown(name)[1] or 'done'}" for name in chosen)


def open_bench(results: Path = KEPT) -> Bench:
    """The experiments on the shipped models, with the results in a folder."""
    if results.exists() and not results.is_dir():
        raise UserError(f"--results {results}: is a file; expected a folder, or a name that is free")
    smaller = store.spelled(reference.path("kv"))
    return Bench(results, shipped_model("reference"), shipped_model(smaller))
