"""What the pages say, computed from single questions' outcomes. Templates ask for it by experiments' names.

An experiment without a result of this model is a row that says so.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from benchmarks.experiments import plan, store
from benchmarks.experiments.bench import Bench
from benchmarks.experiments.store import Row
from lpes_eval import files, reference
from lpes_eval.compare import statistics
from lpes_eval.compare.tables import markdown_table

Z = 1.959964
METHOD_LABELS = {
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
BEZIER_GA = f"{GA}, Bézier curve"
BY_SEED = {
    GA: plan.SEARCHES[plan.KV],
    BEZIER_GA: plan.seeded("curves/bezier"),
    **{label: plan.seeded(f"controls/{name}") for name, (label, _) in plan.CONTROLS.items()},
}
"""The searches on key-value retrieval that differ in their optimiser, or curve, by seed."""
OPTIMISERS = [(label, names[1]) for label, names in BY_SEED.items() if label != BEZIER_GA]
"""Those with one factor a layer, each with its first search."""
GUESSED = 256
"""Perplexity of an even guess at a token of two hexadecimal digits."""


class Difference(NamedTuple):
    """A difference in points, its 95 % interval, and its standard error; printed as difference and interval."""

    value: float
    low: float
    high: float
    error: float = math.nan

    def __str__(self) -> str:
        return f"{self.value:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"

    @property
    def words(self) -> str:
        """As prose has it."""
        return f"{self.value:+z.1f} ({self.low:z.1f} to {self.high:z.1f})"

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


class Gain(NamedTuple):
    """What one result has over another on the same questions: in the mean over positions, and in the worst one."""

    mean: Difference
    worst: Difference


class Score(NamedTuple):
    """A result in percent: of so many questions, at each position, in the mean over positions and its 95 % ±."""

    n: int
    at: NDArray[np.float64]
    mean: float
    half: float


def percent(row: Row) -> NDArray[np.float64]:
    """A result's scores in percent, of shape (questions, positions)."""
    return 100 * store.scores(row).to_numpy()


def score(row: Row) -> Score:
    """What a result comes to."""
    scores = percent(row)
    mean = statistics.mean_over_positions(scores)
    half = stats.t.ppf(0.975, len(scores) - 1) * mean.stderr
    return Score(len(scores), scores.mean(axis=0), mean.value, half)


def evaluations(row: Row) -> pd.DataFrame:
    """Of each individual that a search measured to the end: generation, prompts, fitness, and ``spent``.

    That is what the search had asked by then: prompts, those of gradients included.
    """
    asked = pd.DataFrame(row["evaluations"], columns=["generation", "prompts", "fitness"])
    return asked.assign(spent=asked.prompts.cumsum() + asked.generation * row["gradients"]).dropna()


def fittest(row: Row) -> pd.Series:
    """A search's best fitness by generation."""
    return evaluations(row).groupby("generation").fitness.max()


class Figures:
    """What a bench's results come to; ``used`` are those of the tables since the template last emptied it."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.used = bench, list[Row]()

    def get(self, name: str) -> Row | None:
        """A result, or none."""
        return self.bench.shown(name)[0]

    def use(self, name: str) -> Row | None:
        """A result whose circumstances belong under the table that is being made."""
        row = self.get(name)
        self.used += [row] if row and row not in self.used else []
        return row

    def score(self, name: str) -> Score:
        """What a result that must be there comes to."""
        return score(self.bench.found(name))

    @cache  # noqa: B019  (as long as the page is being written)
    def gain(self, over: str, of: str) -> Gain | None:
        """What the second of two results has over the first, if both are there."""
        before, after = self.get(over), self.get(of)
        if before is None or after is None:
            return None
        a, b = store.paired(before, after)
        compared, error = statistics.compare_paired(a, b), statistics.mean_over_positions(b - a).stderr
        mean, worst = ([100 * x.difference, 100 * x.low, 100 * x.high] for x in (compared.mean, compared.worst))
        return Gain(Difference(*mean, 100 * error), Difference(*worst))

    def by_seed(self, searches: Mapping[int, str]) -> dict[int, float]:
        """The held-out means that searches ended with, by seed."""
        names = {seed: f"{name}-held-out" for seed, name in searches.items()}
        return {seed: self.score(name).mean for seed, name in names.items() if self.get(name)}

    def beat_both(self, task: str) -> list[bool]:
        """Of each search that was measured, whether its factors beat plain and PI at their mean."""
        others = {name: (f"main/{plan.SHORT[task]}/plain", f"{name}-pi") for name in plan.SEARCHES[task].values()}
        gains = [[self.gain(other, f"{name}-held-out") for other in both] for name, both in others.items()]
        return [all(gain.mean.clear for gain in both) for both in gains if all(both)]

    def over_ga(self, label: str) -> Difference | None:
        """The mean of what an optimiser has over the genetic algorithm with the same seed, and its 95 % t interval.

        None where fewer than two seeds are in both.
        """
        difference = (pd.Series(self.by_seed(BY_SEED[label])) - pd.Series(self.by_seed(BY_SEED[GA]))).dropna()
        if len(difference) < 2:
            return None
        mean, error = difference.mean(), difference.sem()
        low, high = stats.t.interval(0.95, len(difference) - 1, mean, error)
        return Difference(mean, low, high, error)

    def accuracies(
        self, *groups: Sequence[tuple[str, str]], against: str = "plain", searches: Sequence[tuple[str, str]] = ()
    ) -> str:
        """A table of accuracy by position.

        Args:
            groups: rows of label and experiment; differences are to the first row of a group.
            against: what the first row is called.
            searches: further rows of label and search. The table then says what the searches took, and the standard
                deviation over positions.
        """
        settings = self.bench.listed[groups[0][0][1]].settings
        positions = settings["metadata"].get("positions") or plan.POSITIONS[settings["task"]]
        rows = [(label, name, group[0][1], "") for group in groups for label, name in group]
        rows += [(label, f"{search}-held-out", groups[0][0][1], search) for label, search in searches]
        spread = ["std over positions"] if searches else []
        header = ["", "n", *(f"{p:g} %" for p in positions), "mean", *spread, "worst"]
        header += [f"mean − {against}", f"worst − {against}"]
        cost = ["converged in generation", "individuals", "prompts", "search fitness"] if searches else []
        body = []
        for label, name, base, search in rows:
            if row := self.use(name):
                found, over = score(row), self.gain(base, name) if name != base else None
                cells = [str(found.n), *(f"{value:.1f}" for value in found.at), f"{found.mean:.1f} ± {found.half:.1f}"]
                cells += [f"{found.at.std():.1f}" for _ in spread]
                cells += [f"{found.at.min():.1f}", *(map(str, over) if over else ["", ""])]
            else:
                cells = [*["–"] * (len(header) - 2), f"no result: {self.bench.shown(name)[1]}"]
            body.append([label, *cells, *(self.cost(search) if searches else [])])
        return markdown_table([*header, *cost], body)

    def cost(self, search: str) -> list[str]:
        """What a search took, if there is one: cells of a table."""
        if not search or (row := self.use(search)) is None:
            return ["–" if search else ""] * 4
        best, last = fittest(row).idxmax(), max(generation for generation, _, _ in row["evaluations"])
        return [f"{best} of {last}", f"{row['individuals']}", f"{row['prompts']:,}", f"{100 * row['fitness']:.1f}"]

    def perplexities(self, name: str) -> list[str] | None:
        """A perplexity and its 95 % interval at each context length, and the number of texts."""
        if (row := self.use(name)) is None:
            return None
        nats = store.scores(row).reindex(columns=map(str, plan.PPL_LENGTHS))
        mean, half = nats.mean(), Z * nats.sem()
        spans = np.exp([mean, mean - half, mean + half]).T
        cells = ["{} [{}, {}]".format(*(f"{x:.4g}" if x < 1e300 else "–" for x in span)) for span in spans]
        return [*cells, str(len(nats))]

    def helped(self, kind: str) -> tuple[list[str], list[str], list[str]] | None:
        """Context lengths at which layer factors help, hurt, and both are worse than a guess.

        Help and hurt: the paired interval, in nats, leaves out 0.
        """
        alone, scaled = self.get(f"perplexity/{kind}"), self.get(f"perplexity/{kind}-lpes")
        if alone is None or scaled is None:
            return None
        better, worse, lost = list[str](), list[str](), list[str]()
        a, b = store.paired(alone, scaled)
        compared = statistics.compare_paired(a, b, higher_is_better=False).positions
        for length, d, nats in zip(alone["scores"], compared, np.minimum(a.mean(0), b.mean(0)), strict=True):
            if nats > math.log(GUESSED):
                lost.append(length)
            elif d.high < 0 or d.low > 0:
                (better if d.high < 0 else worse).append(length)
        return better, worse, lost

    def speeds(self) -> list[Row]:
        """The runs of ``benchmarks/search_speed.py``."""
        rows = store.rows(self.bench.folder / "search_speed.jsonl")
        return [speed_of(row for row in rows if row["run"] == run) for run in dict.fromkeys(row["run"] for row in rows)]


def checksums(model: str) -> Row:
    """Of a shipped model's ``file``, and of its ``weights``' names and values, as its card has them."""
    folder = reference.path(model)
    weights = json.loads((folder / "run.json").read_text())["weights_sha256"]
    return {"file": files.sha256(folder / "model.safetensors"), "weights": weights}


ALL_LAYERS = "all layers run"
WITHOUT_REUSE = ("no shared prefixes", "batches of a fixed number")


def speed_of(table: Iterable[Row]) -> Row:
    """A run of ``benchmarks/search_speed.py``: seconds an individual by all measures, and without each one.

    Of runs that had no warm-up the first row is left out. Shared prefixes and batches are switched off in a search that
    runs all layers; where that was timed too, it is what they are held against.
    """
    head, *rows = (row for row in table if "warm_up" not in row)
    machine, asked = head["machine"], head["arguments"]
    seconds = pd.DataFrame([row["seconds"] for row in rows])  # a line an individual, a column a measure
    every, ratios = seconds["all measures"], seconds["simple_evaluate"] / seconds["all measures"]
    without_reuse = seconds.get(ALL_LAYERS, every)
    base = dict.fromkeys(seconds, every) | {name: without_reuse for name in seconds if name in WITHOUT_REUSE}
    return {
        "name": f"{asked['pretrained']}, {machine.get('gpu') or machine['processor']}",
        "individuals": len(rows),
        "prompts": sorted({row.get("prompts", head["prompts_an_individual"]) for row in rows}),
        "every": asked.get("every"),
        "batch": asked["batch_size"],
        "compared": sum(row["scores_compared"] for row in rows),
        "seconds": {name: column.mean() for name, column in seconds.items()},
        "slower": {name: column.sum() / base[name][column.notna()].sum() for name, column in seconds.items()},
        "few": {name: column.count() for name, column in seconds.items()},
        "median": ratios.median(),
        "least": ratios.min(),
        "most": ratios.max(),
    }
