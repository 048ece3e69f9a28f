"""Searches compared on simulated models, whose true accuracy under any factors is known.

    python -m benchmarks.landscapes                 # 50 seeds of the default, 5 of the others
    python -m benchmarks.landscapes --seeds 10      # a look

A landscape gives the probability of a right answer at the beginning, in the middle and at the end of the context, for
factors of 32 or 80 layers. An example has a difficulty at each position, drawn once a seed, which all factors meet; so
searches see noise as on real examples, paired as there. Each search asks its own examples, with the settings of its
command. What is reported is the true accuracy of the factors that it ends with, minus the plain model's.

The results go to ``benchmarks/results/landscapes.jsonl`` and the table to ``docs/landscapes.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from tqdm import tqdm

from lpes_eval.compare.statistics import compare_paired
from lpes_eval.curves import layer_factors
from lpes_eval.files import write_atomically
from lpes_eval.rng import shuffled, stream
from search import optimizers
from search.early_stopping import Race
from search.space import Individual, Points, Space
from search.tasks import LAMBDAS

REPOSITORY = Path(__file__).resolve().parents[1]
PLAIN = np.array([0.3, 0.65, 0.6])
"""Accuracy of the plain model by position, which the landscapes raise or lower together on the logit scale."""
JITTER = 0.15
"""How much a question's difficulty differs under other factors, beside what the landscape says; in probits."""


@dataclass(frozen=True)
class Landscape:
    """A simulated model of so many ``layers``; ``gain`` is by how much factors change the logit of a right answer."""

    name: str
    layers: int
    gain: Callable[[np.ndarray], float]

    def accuracy(self, factors: Sequence[float]) -> np.ndarray:
        """The probability of a right answer at the three positions."""
        logits = np.log(PLAIN / (1 - PLAIN)) + self.gain(np.asarray(factors))
        return 1 / (1 + np.exp(-logits))

    def value(self, factors: Sequence[float]) -> float:
        """The true accuracy in percent, averaged over positions."""
        return 100 * float(self.accuracy(factors).mean())


def landscapes(layers: int) -> list[Landscape]:
    """Five kinds of models of so many layers."""
    depth = np.arange(layers) / (layers - 1)
    band = (depth >= 0.25) & (depth < 0.4)
    other = (depth >= 0.6) & (depth < 0.7)
    target = 1 + 0.5 * np.sin(np.pi * depth) ** 2

    def smooth(f: np.ndarray) -> float:  # each layer has its own best factor, between 1 and 1.5
        return 1.5 * (1 - float(((f - target) ** 2).sum() / ((1 - target) ** 2).sum()))

    def sparse(f: np.ndarray) -> float:  # one band gains up to 1.4; any other layer loses
        return float(1.5 * (1 - ((f[band] - 1.4) / 0.4) ** 2).mean() - 40 * ((f[~band] - 1) ** 2).mean())

    def mixed(f: np.ndarray) -> float:  # one band gains, one loses steeply, the rest hardly matters
        gain = 1.5 * (1 - ((f[band] - 1.3) / 0.3) ** 2).mean() - 60 * ((f[other] - 1) ** 2).mean()
        return float(gain - 2 * ((f[~band & ~other] - 1) ** 2).mean())

    def hurts(f: np.ndarray) -> float:
        return -8 * float(((f - 1) ** 2).mean()) - 2 * float(np.abs(f - 1).mean())

    kinds = {"smooth": smooth, "sparse": sparse, "mixed": mixed, "only hurts": hurts, "nothing": lambda f: 0.0}
    return [Landscape(name, layers, gain) for name, gain in kinds.items()]


class Kind(NamedTuple):
    """A search, with the settings of its command."""

    title: str
    optimizer: str
    curve: str
    start: float | None
    """The factor that it sets out from; None for an optimiser without a start."""
    examples: int
    early: bool
    """Whether individuals are given up early (``--early_stopping probable``)."""


SEARCHES = (
    Kind("the default: a scan of bands", "bands", "free", 1.0, 96, True),
    Kind("the default with `--examples 200`", "bands", "free", 1.0, 200, True),
    Kind("`--preset paper`", "ga", "bezier", 1.5, 200, False),
    Kind("genetic algorithm, free curve, from 1", "ga", "free", 1.0, 24, True),
    Kind("CMA-ES, free curve, from 1", "cma-es", "free", 1.0, 24, False),
    Kind("random search, free curve", "random", "free", None, 24, True),
)


class Simulation:
    """The answers of a simulated model to some examples, and how many were asked for."""

    def __init__(self, landscape: Landscape, examples: int, *key: Any) -> None:
        self.landscape, self.key = landscape, key
        self._difficulty = _generator("difficulty", *key).standard_normal((examples, 3))
        self.prompts = 0

    def answers(self, factors: Sequence[float]) -> np.ndarray:
        """Right (1) or wrong (0), (examples, 3); the same factors are always answered alike."""
        jitter = _generator("jitter", *self.key, *factors).standard_normal(self._difficulty.shape)
        z = (self._difficulty + JITTER * jitter) / math.sqrt(1 + JITTER**2)
        least = np.array([statistics.NormalDist().inv_cdf(p) for p in self.landscape.accuracy(factors)])
        return (z < least).astype(float)


def _generator(*key: Any) -> np.random.Generator:
    return np.random.default_rng(stream(*map(str, key)).getrandbits(64))


def search(kind: Kind, landscape: Landscape, seed: int) -> tuple[list[float], int]:
    """The factors that a search ends with, and the prompts that it asked."""
    L = landscape.layers
    space = Space.free(L) if kind.curve == "free" else Space(L)
    make = optimizers.load(kind.optimizer)
    start = None if kind.start is None else space.line(kind.start, kind.start)
    optimizer = make(space, make.Config(), start=start, seed=seed)
    simulation = Simulation(landscape, kind.examples, landscape.name, L, seed)
    known: dict[tuple[Any, ...], tuple[float, np.ndarray | None]] = {}  # fitness, and its share of every example

    def measure(individual: Individual) -> float:
        factors, n = factors_of(individual.points, kind, L), math.ceil(optimizer.effort * kind.examples)
        if (factors, n) in known:
            return known[factors, n][0]
        values: np.ndarray | None = simulation.answers(factors)[:n] @ np.array(LAMBDAS) / n
        asked, fitness = n, float(values.sum())
        least = optimizer.cutoff if kind.early else None
        parent = known.get((factors_of(least[0], kind, L), n), (0, None))[1] if least else None
        if parent is not None:
            race = Race([0.0] * n, [1 / n] * n, list(parent), 0.01, margin=least[1] - float(parent.sum()))
            for asked, unit in enumerate(shuffled(range(n), stream("order", repr(factors))), 1):  # noqa: B007
                race.take(unit, float(values[unit]))
                if race.lost:
                    break
            if race.lost and asked < n:
                fitness, values = min(least[1] - 1e-9, fitness), None
        simulation.prompts += 3 * asked
        known[factors, n] = fitness, values
        return fitness

    while not optimizer.done:
        optimizer.tell([measure(individual) for individual in optimizer.ask()])
    return list(factors_of(optimizer.best[0].points, kind, L)), simulation.prompts


def factors_of(points: Points, kind: Kind, layers: int) -> tuple[float, ...]:
    """The factors, one a layer, that control points stand for."""
    if kind.curve == "free":
        return tuple(y for _, y in points)
    return tuple(layer_factors(kind.curve, points, layers))


def shown(landscape: Landscape, factors: Sequence[float], seed: int, questions: int = 100) -> bool:
    """Whether held-out questions show the factors to be better than the plain model, as a search's verdict has it."""
    held_out = Simulation(landscape, questions, "held out", landscape.name, landscape.layers, seed)
    plain = held_out.answers([1.0] * landscape.layers)
    return bool(compare_paired(plain, held_out.answers(factors), replicates=2000).mean.low > 0)


def run(seeds: int) -> list[dict[str, Any]]:
    """Every search on every landscape, with every seed."""
    rows = []
    cases = [(l, k) for layers in (32, 80) for l in landscapes(layers) for k in SEARCHES]  # noqa: E741
    for landscape, kind in tqdm(cases, unit="case"):
        some = seeds if kind.optimizer == "bands" else math.ceil(seeds / 10)  # the others ask many times the prompts
        for seed in range(4 * seeds if landscape.name == "nothing" and kind is SEARCHES[0] else some):
            factors, prompts = search(kind, landscape, seed)
            gain = landscape.value(factors) - landscape.value([1.0] * landscape.layers)
            row = {"landscape": landscape.name, "layers": landscape.layers, "search": kind.title, "seed": seed}
            plain = len(set(factors)) == 1 and factors[0] == 1  # of which nothing is shown
            row |= {"gain": round(gain, 3), "prompts": prompts, "shown": not plain and shown(landscape, factors, seed)}
            rows.append(row)
    return rows


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    lines = [(REPOSITORY / "benchmarks" / "landscapes.md").read_text(encoding="utf-8")]
    for (layers,), of_depth in pd.DataFrame(rows).groupby(["layers"]):
        names = list(dict.fromkeys(of_depth.landscape))
        lines += ["", f"## {layers} layers", "", "| search | " + " | ".join(names) + " | prompts |"]
        lines.append("| --- |" + " --: |" * (len(names) + 1))
        for kind in SEARCHES:
            of_search, cells = of_depth[of_depth.search == kind.title], []
            for name in names:
                found = of_search[of_search.landscape == name]
                cells.append(
                    f"{found.gain.mean():+.1f} ± {1.96 * found.gain.sem():.1f}; {found.shown.sum()}/{len(found)}"
                )
            lines.append(f"| {kind.title} | " + " | ".join(cells) + f" | {of_search.prompts.mean():,.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run, and write the results and the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--seeds", type=int, default=50, metavar="N", help="of the default on each landscape; a tenth of others"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write there, and not what the repository keeps")
    args = parser.parse_args()
    rows = run(args.seeds)
    results = args.out or REPOSITORY / "benchmarks" / "results"
    results.mkdir(parents=True, exist_ok=True)
    write_atomically(results / "landscapes.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    text = page(rows)
    write_atomically((args.out or REPOSITORY / "docs") / "landscapes.md", text)
    print(text)


if __name__ == "__main__":
    main()
