"""What the pages say, computed from single questions' outcomes. Templates ask for it by experiments' names.

An experiment without a result of this model is a row that says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiments import plan, store
from benchmarks.experiments.bench import Bench
from benchmarks.experiments.plan import KV, MDQA, SEEDS
from lpes_eval import files, reference
from lpes_eval.compare import statistics
from lpes_eval.compare.tables import markdown_table

Result = dict[str, Any]
Z = 1.959964
METHODS = {
    "plain": "plain",
    "pi": "PI, mean of LPES's factors",
    "uniform": "best uniform factor on search examples",
    **{name: name for name in plan.METHODS},
    "attention_buckets": "Attention Buckets",
    "ms_poe": "Ms-PoE",
    "ms_poe-skip-1": "Ms-PoE, first layer left alone",
    "moice": "MoICE",
    "lpes": "LPES",
}
"""What the rows of the first tables are called; a method that has no name of its own here, by its model type."""
GA = "genetic algorithm from 1"
OPTIMIZERS = {
    "start-1.5": "genetic algorithm from 1.5",
    "start-wide": "genetic algorithm, diverse start",
    "cma-es": "CMA-ES from 1",
    "random": "random search",
    "gradient": "gradient descent from 1.5",
    "gradient-1": "gradient descent from 1",
    "bands": "scan of bands of layers",
}
BEZIER_GA = f"{GA}, Bézier curve"
FIRST = "searches/kv-1"
NONE = "–"
GUESSED = 256
"""Perplexity of an even guess at a token of two hexadecimal digits."""


@dataclass(frozen=True)
class Difference:
    """A difference in points, and its 95 % interval; printed as both."""

    value: float
    low: float
    high: float
    error: float = math.nan

    def __str__(self) -> str:
        return f"{self.value:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"

    @property
    def words(self) -> str:
        """As prose has it."""
        value, low, high = (number if abs(number) >= 0.05 else 0.0 for number in (self.value, self.low, self.high))
        return f"{value:+.1f} ({low:.1f} to {high:.1f})"

    @property
    def clear(self) -> bool:
        """Whether it is more than twice its standard error."""
        return self.value > 2 * self.error

    @property
    def verdict(self) -> str:
        """Better or worse, if the interval leaves out 0 as it is printed."""
        if round(self.low, 1) > 0 or round(self.high, 1) < 0:
            return "better" if self.value > 0 else "worse"
        return "not shown to be better or worse"


@dataclass(frozen=True)
class Gain:
    """What one result has over another on the same questions: in the mean over positions, and in the worst one."""

    mean: Difference
    worst: Difference


def scores_of(result: Result) -> NDArray[np.float64]:
    """A result's scores in percent, of shape (questions, positions)."""
    return 100 * store.unpack(result)[2]


def gain_of(over: Result, of: Result) -> Gain:
    """What ``of`` has over ``over``."""
    a, b = store.paired(over, of)
    compared = statistics.compare_paired(a, b)
    error = 100 * statistics.mean_over_positions(b - a).stderr
    mean, worst = ((100 * x.difference, 100 * x.low, 100 * x.high) for x in (compared.mean, compared.worst))
    return Gain(Difference(*mean, error), Difference(*worst))


def over_seeds(base: Mapping[int, float], found: Mapping[int, float]) -> Difference | None:
    """The mean of what ``found`` has over ``base`` with the same seed, and its 95 % t interval.

    None where fewer than two seeds are in both.
    """
    from scipy import stats

    differences = [found[seed] - base[seed] for seed in found if seed in base]
    if len(differences) < 2:
        return None
    middle, error = float(np.mean(differences)), float(stats.sem(differences))
    half = float(stats.t.ppf(0.975, len(differences) - 1)) * error
    return Difference(middle, middle - half, middle + half, error)


def listed(factors: Sequence[float]) -> str:
    """Factors layer by layer; a uniform one once."""
    return ", ".join(f"{factor:.3g}" for factor in (factors[:1] if len(set(factors)) == 1 else factors))


def enumerated(words: Sequence[Any]) -> str:
    """With commas and an "and"."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last


class Figures:
    """What a bench's results come to.

    Attributes:
        used: results of the tables since the last ``circumstances``.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.used: list[Result] = []

    def get(self, name: str) -> Result | None:
        """A result, or none."""
        return self.bench.shown(name)[0]

    def use(self, name: str) -> Result | None:
        """A result whose circumstances belong under the table that is being made."""
        if (result := self.get(name)) is not None and result not in self.used:
            self.used.append(result)
        return result

    def all_results(self) -> dict[str, Result | None]:
        """Every experiment's."""
        return {name: self.get(name) for name in self.bench.listed}

    # -- numbers -------------------------------------------------------------------------------------------------------

    def mean(self, name: str) -> float | None:
        """Percent right, over questions and positions."""
        return float(scores_of(result).mean()) if (result := self.get(name)) else None

    def at(self, name: str) -> list[float]:
        """Percent right at each position."""
        return [float(value) for value in scores_of(self.bench.found(name)).mean(0)]

    @cache  # noqa: B019  (as long as the page is being written)
    def gain(self, over: str, of: str) -> Gain | None:
        """What the second of two results has over the first, if both are there."""
        a, b = self.get(over), self.get(of)
        return gain_of(a, b) if a and b else None

    def largest(self, short: str) -> tuple[str, str]:
        """Plain and LPES on all held-out questions where that was measured, else on those of the table."""
        pairs = [(f"{at}/{short}/plain", f"{at}/{short}/lpes") for at in ("all", "main")]
        return next((pair for pair in pairs if all(map(self.get, pair))), pairs[-1])

    def beats_both(self, short: str) -> list[bool]:
        """Of each search that was measured, whether its factors beat plain and PI at their mean."""
        names = [f"searches/{short}-{seed}" for seed in SEEDS]
        gains = [[self.gain(f"main/{short}/plain", f"{name}-held-out"), self.gain(f"{name}-pi", f"{name}-held-out")]
                 for name in names]  # fmt: skip
        return [all(one.mean.clear for one in both if one) for both in gains if all(both)]

    def optimizers(self) -> dict[str, dict[int, str]]:
        """The searches on key-value retrieval that differ in their optimiser, or curve, by seed."""
        named = {BEZIER_GA: "curves/bezier"} | {OPTIMIZERS[name]: f"controls/{name}" for name in plan.CONTROLS}
        return {GA: {seed: f"searches/kv-{seed}" for seed in SEEDS}} | {k: plan.seeded(v) for k, v in named.items()}

    def by_seed(self, names: Mapping[int, str]) -> dict[int, float]:
        """The held-out means that searches ended with, by seed."""
        return {seed: mean for seed, name in names.items() if (mean := self.mean(f"{name}-held-out")) is not None}

    def over_ga(self, label: str) -> Difference | None:
        """What an optimiser has over the genetic algorithm, seed by seed."""
        of = self.optimizers()
        return over_seeds(self.by_seed(of[GA]), self.by_seed(of[label]))

    # -- tables --------------------------------------------------------------------------------------------------------

    def accuracies(
        self, rows: Sequence[Sequence[str]], base: str, against: str = "plain", searches: bool = False, **_: Any
    ) -> str:
        """A table of accuracy by position.

        Args:
            rows: label and experiment; with ``searches`` also the search, if there is one, that found the factors.
            base: the experiment that differences are to.
            against: what that is called.
            searches: add what the searches took, and the standard deviation over positions.
        """
        settings = self.bench.listed[rows[0][1]].settings
        labels = settings["metadata"].get("positions") or positions_of(settings["task"])
        header = ["", "n", *(f"{p:g} %" for p in labels), "mean", *(["std over positions"] if searches else [])]
        header += ["worst", f"mean − {against}", f"worst − {against}"]
        cost = ["converged in generation", "individuals", "prompts", "search fitness"] if searches else []
        body = []
        for label, name, *search in rows:
            result = self.use(name)
            took = self.cost(search[0]) if search else [""] * len(cost)
            if result is None:
                dashes = [NONE] * (len(header) - 2)
                body.append([label, *dashes, f"no result: {self.bench.shown(name)[1]}", *took])
                continue
            scores = scores_of(result)
            estimate, at = statistics.mean_over_positions(scores), statistics.position_means(scores)
            cells = [label, str(len(scores)), *(f"{value:.1f}" for value in at)]
            cells += [f"{estimate.value:.1f} ± {Z * estimate.stderr:.1f}"]
            cells += [f"{at.std():.1f}"] if searches else []
            over = self.gain(base, name) if name != base else None
            cells += [f"{at.min():.1f}", str(over.mean) if over else "", str(over.worst) if over else ""]
            body.append([*cells, *took])
        return markdown_table([*header, *cost], body)

    def cost(self, search: str) -> list[str]:
        """What a search took: cells of a table."""
        if (result := self.use(search)) is None:
            return [NONE] * 4
        best = max(result["fittest_by_generation"], key=lambda pair: (pair[1], -pair[0]))[0]
        last = max(generation for generation, _, _ in result["evaluations"])
        prompts, fitness = f"{result['prompts']:,}", f"{100 * result['fitness']:.1f}"
        return [f"{best} of {last}", f"{result['individuals']}", prompts, fitness]

    def joined(self, tables: Sequence[str]) -> str:
        """Tables of the same columns as one."""
        first, *others = (table.splitlines() for table in tables)
        return "\n".join([*first, *(line for lines in others for line in lines[2:])])

    def seeds_table(self) -> str:
        """Optimisers by what several searches each found, compared seed by seed."""
        rows = []
        for label, names in self.optimizers().items():
            for name in names.values():
                self.use(name)
                self.use(f"{name}-held-out")
            found = self.by_seed(names)
            values, over = list(found.values()), None if label == GA else self.over_ga(label)
            rows.append(
                [
                    label,
                    *(f"{found[seed]:.1f}" if seed in found else NONE for seed in SEEDS),
                    f"{np.mean(values):.1f}" if values else NONE,
                    f"{np.std(values, ddof=1):.1f}" if len(values) > 1 else NONE,
                    "" if label == GA else str(over or NONE),
                ]
            )
        return markdown_table(["", *(f"seed {seed}" for seed in SEEDS), "mean", "SD", f"− {GA}"], rows)

    def perplexities(self, kinds: Mapping[str, str]) -> tuple[str, dict[str, tuple[list[str], list[str], list[str]]]]:
        """The table; and of each kind, the lengths at which layer factors help, hurt, and both are worse than a guess.

        Help and hurt: the paired interval, in nats, leaves out 0.
        """
        rows, notes, lengths = [], {}, [f"{length}" for length in plan.PPL_LENGTHS]
        for kind, label in kinds.items():
            alone, scaled = self.use(f"perplexity/{kind}"), self.use(f"perplexity/{kind}-lpes")
            for result, suffix in ((alone, ""), (scaled, " with layer factors")):
                if result is None:
                    why = self.bench.shown(f"perplexity/{kind}{'-lpes' if suffix else ''}")[1]
                    rows.append([f"{label}{suffix}", *[NONE] * len(lengths), why])
                    continue
                nats = store.unpack(result)[2]
                cells = []
                for column in nats.T:
                    half = Z * float(column.std(ddof=1)) / math.sqrt(len(column)) if len(column) > 1 else math.nan
                    middle = float(column.mean())
                    cells.append(f"{_exp(middle)} [{_exp(middle - half)}, {_exp(middle + half)}]")
                lengths = list(result["scores"])
                rows.append([f"{label}{suffix}", *cells, str(len(nats))])
            if alone and scaled:
                a, b = store.paired(alone, scaled)
                compared = statistics.compare_paired(a, b, higher_is_better=False)
                better, worse, lost = notes[label] = ([], [], [])
                for n, d, before, after in zip(lengths, compared.positions, a.mean(0), b.mean(0), strict=True):
                    if min(before, after) > math.log(GUESSED):
                        lost.append(n)
                    elif d.high < 0 or d.low > 0:
                        (better if d.high < 0 else worse).append(n)
        return markdown_table(["", *(f"{length} tokens" for length in lengths), "texts"], rows), notes

    def circumstances(self) -> dict[str, Any]:
        """Commands, machines, versions and dates of the results used since the last time."""
        used, self.used = self.used, []
        machines = [f"{h['processor']}, {h['threads']} of {h['cores']} cores" for h in (r["hardware"] for r in used)]
        packages = [", ".join(f"{name} {version}" for name, version in r["versions"].items()) for r in used]
        dates = sorted({r["date"] for r in used})
        return {
            "commands": list(dict.fromkeys(r["command"] for r in used)),
            "minutes": sum(r["cpu_seconds"] for r in used) / 60,
            "machines": " / ".join(dict.fromkeys(machines)),
            "packages": " / ".join(dict.fromkeys(packages)),
            "dates": " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "",
        }

    def inside(self, name: str, kept: store.Results) -> str:
        """A fresh result held against the interval of the one that is kept."""
        fresh, before = self.get(name), kept.load(name)
        if fresh is None or before is None:
            return "no result" if fresh is None else "none is kept to compare with"
        if before["model"]["sha256"] != fresh["model"]["sha256"] or before["factors"] != fresh["factors"]:
            return "the result that is kept is another model's or of other factors"
        estimate, value = statistics.mean_over_positions(scores_of(before)), float(scores_of(fresh).mean())
        low, high = estimate.value - Z * estimate.stderr, estimate.value + Z * estimate.stderr
        inside = "within" if low - 1e-9 <= value <= high + 1e-9 else "OUTSIDE"
        return f"{value:.1f} is {inside} the kept result's interval, {low:.1f} to {high:.1f}"

    # -- other tables --------------------------------------------------------------------------------------------------

    def rows(self, file: str) -> list[Result]:
        """The rows of a table that another program writes."""
        path = self.bench.results.folder / file
        return list(files.read_jsonl(path)) if path.exists() else []

    def speed(self, run: str) -> dict[str, Any] | None:
        """A run of ``benchmarks/search_speed.py``, if there is one."""
        rows = [row for row in self.rows("search_speed.jsonl") if row["run"] == run]
        return speed_of(rows) if rows else None

    def card(self, model: str) -> dict[str, Any]:
        """What a card says of its model's files."""
        folder = reference.path(model)
        run = json.loads((folder / "run.json").read_text())
        return {"file": files.sha256(folder / "model.safetensors"), "weights": run["weights_sha256"]}


def speed_of(table: Sequence[Result]) -> dict[str, Any]:
    """A run of ``benchmarks/search_speed.py``: seconds an individual by all measures, and without each one."""
    head, *rows = table
    new = [row for row in rows if not row["repeats"]]
    few = [row for row in new if row["seconds"].keys() == new[0]["seconds"].keys()]
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in new for name in row["seconds"]):
        of = [row for row in new if name in row["seconds"]]
        spent, with_all = (sum(row["seconds"][one] for row in of) for one in (name, "all measures"))
        steps = sum(
            row["counts"][name].get("steps", row["counts"][name]["tokens"]) for row in few if name in row["counts"]
        )
        found[name] = {"individuals": len(of), "seconds": spent / len(of), "times": spent / with_all}
        found[name]["steps"] = steps
    counts = [row["counts"]["all measures"] for row in few]
    ratios = [row["seconds"]["simple_evaluate"] / row["seconds"]["all measures"] for row in new]
    return {
        "individuals": len(new),
        "few": len(few),
        "prompts": head["prompts_an_individual"],
        "machine": f"{head['machine']['processor']}, {head['machine']['threads']} thread",
        "rows": found,
        "counts": {
            name: sum(count.get(name, count["tokens"]) for count in counts) for name in ("answers", "steps", "tokens")
        },
        "times": found["simple_evaluate"]["times"],
        "least": min(ratios),
        "most": max(ratios),
    }


def positions_of(task: str) -> Sequence[float]:
    """The positions at which a task asks, as its YAML has them."""
    return {KV: (0, 20, 40, 60, 80, 100), MDQA: (0, 25, 50, 75, 100)}[task]


def _exp(nats: float) -> str:
    return f"{math.exp(nats):.4g}" if math.isfinite(nats) and nats < 700 else NONE
