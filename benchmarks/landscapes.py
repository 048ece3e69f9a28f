"""Searches compared on models whose accuracy under any factors is known: formulas, and recordings of real models.

    python -m benchmarks.landscapes                      # 50 seeds of every search
    python -m benchmarks.landscapes --seeds 5 --out DIR  # a look

A landscape gives the probability of a right answer at the beginning, in the middle and at the end of the context. The
simulated ones are formulas for factors of 32 or 80 layers; the recorded ones are Gaussian processes through what the
shipped models answered under hundreds of factors (``benchmarks.recorded``). An example has a difficulty at each
position, drawn once a seed, which all factors meet; so searches see noise as on real examples, paired as there. Each
search asks its own examples, with the settings of its command. What is reported is the true accuracy of the factors
that it ends with, minus the plain model's.

The results go to ``benchmarks/results/landscapes.jsonl``, tables and pictures to ``docs/landscapes.md``.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # matrices are small, and each seed has a process

import argparse
import functools
import math
import multiprocessing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cmaes  # noqa: F401  (one of the searches needs it: better to fail now)
import numpy as np
from scipy.special import expit, logit, ndtri
from tqdm import tqdm

from benchmarks import landscapes_page, recorded
from benchmarks.experiments import store
from lpes_eval.compare.statistics import compare_paired
from lpes_eval.curves import de_casteljau
from lpes_eval.files import write_atomically
from lpes_eval.flags import at_least
from lpes_eval.rng import shuffled, stream
from search import optimizers
from search.early_stopping import ERROR, Race
from search.optimizers.bands import BandScan
from search.parser import PRESETS
from search.space import Individual, Points, Space

PUBLISHED = PRESETS["paper"]["lambdas"]
"""Weights of the positions in the paper's fitness (App. G)."""
PLAIN = np.array([0.3, 0.65, 0.6])
"""Accuracy of the plain model by position, which the landscapes raise or lower together on the logit scale."""
JITTER = 0.15
"""How much a question's difficulty differs under other factors, beside what the landscape says; in probits."""


@dataclass(frozen=True)
class Landscape:
    """A model of so many ``layers``.

    Attributes:
        accuracy: the probability of a right answer at the three positions under factors, one a layer.
        loss: of the reference answers under factors, which gradient descent lowers.
        seconds: model time of one prompt under factors; NaN where nobody knows.
        error: of a recorded one, the root mean square error of its mean accuracy in ten-fold cross-validation, in
            points: of the surrogate, and of the nearest vector alone.
    """

    name: str
    layers: int
    accuracy: Callable[[Sequence[float]], np.ndarray]
    loss: Callable[[Sequence[float]], float]
    seconds: Callable[[Sequence[float]], float] = lambda factors: math.nan
    error: tuple[float, float] | None = None

    def value(self, factors: Sequence[float]) -> float:
        """The true accuracy in percent, averaged over positions."""
        return 100 * float(self.accuracy(factors).mean())


def landscapes(layers: int) -> list[Landscape]:
    """Five kinds of simulated models of so many layers."""
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

    def simulated(name: str, gain: Callable[[np.ndarray], float]) -> Landscape:
        def accuracy(factors: Sequence[float]) -> np.ndarray:
            return expit(logit(PLAIN) + gain(np.asarray(factors)))

        return Landscape(name, layers, accuracy, lambda factors: -float(np.log(accuracy(factors)).mean()))

    kinds = {"smooth": smooth, "sparse": sparse, "mixed": mixed, "only hurts": hurts, "nothing": lambda f: 0.0}
    return [simulated(name, gain) for name, gain in kinds.items()]


def real(name: str) -> Landscape:
    """A recorded model: a Gaussian process through accuracies, loss and seconds over the logarithms of factors."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
    from sklearn.model_selection import KFold, cross_val_predict
    from sklearn.neighbors import KNeighborsRegressor

    rows = recorded.load(name)
    factors = np.log([row["factors"] for row in rows])
    accuracy = np.array([[part.count("1") / len(part) for part in row["right"]] for row in rows])
    prompts = sum(map(len, rows[0]["right"]))
    others = np.array([[np.mean(row["loss"]), row["seconds"] / prompts] for row in rows])

    def fit(kernel: Any, values: np.ndarray) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a layer that does not matter has no length scale
            return GaussianProcessRegressor(kernel, normalize_y=True).fit(factors, values)

    start = ConstantKernel() * Matern([0.2] * factors.shape[1], (0.02, 20), nu=1.5) + WhiteKernel(0.01)
    model, other = fit(start, accuracy), fit(start, others)
    folds = KFold(10, shuffle=True, random_state=0)
    fixed = GaussianProcessRegressor(model.kernel_, normalize_y=True, optimizer=None)
    wrong = [
        cross_val_predict(guess, factors, accuracy, cv=folds).clip(0, 1).mean(1) - accuracy.mean(1)
        for guess in (fixed, KNeighborsRegressor(1))
    ]
    error = tuple(100 * float(np.sqrt((each**2).mean())) for each in wrong)

    @functools.lru_cache(maxsize=100_000)
    def at(which: int, *values: float) -> np.ndarray:
        return (model, other)[which].predict(np.log([values]))[0]

    return Landscape(
        name,
        factors.shape[1],
        lambda f: at(0, *f).clip(0.002, 0.998),
        lambda f: float(at(1, *f)[0]),
        lambda f: max(0.0, float(at(1, *f)[1])),
        error,
    )


class Slope:
    """The expected loss and its gradient, in place of ``search.answer_loss``; without the noise of examples."""

    def __init__(self, landscape: Landscape) -> None:
        self.landscape, self.num_layers, self.prompts = landscape, landscape.layers, 0

    def choose(self, uniform: float, other: float) -> tuple[int, int]:
        """Which example: they are all alike."""
        return 0, 0

    def __call__(self, factors: Sequence[float], numbers: Sequence[tuple[int, int]]) -> tuple[float, list[float]]:
        """The loss, and its gradient by differences."""
        self.prompts += len(numbers)
        return _slope(self.landscape, tuple(factors))


@functools.lru_cache(maxsize=10_000)  # without noise every seed descends the same way
def _slope(landscape: Landscape, factors: tuple[float, ...]) -> tuple[float, list[float]]:
    loss, gradient = landscape.loss(factors), []
    for h, factor in enumerate(factors):
        moved = [*factors[:h], factor + 1e-4, *factors[h + 1 :]]
        gradient.append((landscape.loss(moved) - loss) / 1e-4)
    return loss, gradient


class ScanAlone(BandScan):
    """The default without finalists and tuning."""

    def _set_up(self, model: object) -> None:
        super()._set_up(model)
        self._todo = [(scan, level) for scan, level in self._todo if scan.share < 1]


class Kind(NamedTuple):
    """A search, with the settings of its command."""

    title: str
    optimizer: str
    curve: str
    start: float | None
    """The factor that it sets out from; None for an optimiser without a start."""
    examples: int
    error: float | None
    """At which individuals are given up early (``--early_stopping_error``); None where all are measured in full."""
    settings: Mapping[str, Any] = {}
    """Of the optimiser, where they are not its defaults."""
    lambdas: Sequence[float] = (1 / 3, 1 / 3, 1 / 3)


SEARCHES = (
    Kind("the default: a scan of bands", "bands", "free", 1.0, 96, ERROR),
    Kind("the default with `--examples 200`", "bands", "free", 1.0, 200, ERROR),
    Kind("the default with `--lambdas 0.2,0.3,0.5`", "bands", "free", 1.0, 96, ERROR, lambdas=PUBLISHED),
    Kind("the default with `--early_stopping_error 0.01`", "bands", "free", 1.0, 96, 0.01),
    Kind("its scan alone", "scan", "free", 1.0, 96, ERROR),
    Kind("`--preset paper`", "ga", "bezier", 1.5, 200, None, lambdas=PUBLISHED),
    Kind("genetic algorithm, free curve, from 1", "ga", "free", 1.0, 24, ERROR),
    Kind("CMA-ES, free curve, from 1", "cma-es", "free", 1.0, 24, None),
    Kind("random search, free curve", "random", "free", None, 24, ERROR),
    Kind("gradient descent from 1", "gradient", "free", 1.0, 24, None, {"learning_rate": 0.002}),
)


def simulation(landscape: Landscape, examples: int, *key: Any) -> Callable[[Sequence[float]], np.ndarray]:
    """How a model answers under factors: right (1) or wrong (0), (examples, 3), and the same factors always alike."""
    difficulty = _generator("difficulty", *key).standard_normal((examples, 3))

    def answers(factors: Sequence[float]) -> np.ndarray:
        jitter = _generator("jitter", *key, *factors).standard_normal(difficulty.shape)
        z = (difficulty + JITTER * jitter) / math.sqrt(1 + JITTER**2)
        return (z < ndtri(landscape.accuracy(factors))).astype(float)

    return answers


def _generator(*key: Any) -> np.random.Generator:
    return np.random.default_rng(stream(*map(str, key)).getrandbits(64))


class Found(NamedTuple):
    """What a search ended with, and what it spent."""

    factors: list[float]
    prompts: int
    seconds: float
    path: list[tuple[int, float | None, float]]
    """Prompts and seconds spent when its best factors changed, and their true gain in points."""


def search(kind: Kind, landscape: Landscape, seed: int) -> Found:
    """Run a search."""
    L = landscape.layers
    space = Space.free(L, grid=kind.optimizer != "gradient") if kind.curve == "free" else Space(L)
    make: Any = ScanAlone if kind.optimizer == "scan" else optimizers.load(kind.optimizer)
    start = None if kind.start is None else space.line(kind.start, kind.start)
    slope = Slope(landscape)
    optimizer = make(space, make.Config(**kind.settings), start=start, seed=seed, model=slope)
    answers = simulation(landscape, kind.examples, landscape.name, L, seed)
    known: dict[tuple[Any, ...], tuple[float, np.ndarray | None]] = {}  # fitness, and its share of every example
    prompts, seconds = 0, 0.0

    def measure(individual: Individual, least: tuple[Points, float] | None) -> float:
        nonlocal prompts, seconds
        factors, n = factors_of(individual.points, kind.curve, L), math.ceil(optimizer.effort * kind.examples)
        if (factors, n) in known:
            return known[factors, n][0]
        values: np.ndarray | None = answers(factors)[:n] @ np.array(kind.lambdas) / n
        asked, fitness = n, float(values.sum())
        parent = known.get((factors_of(least[0], kind.curve, L), n), (0, None))[1] if least else None
        if least is not None and parent is not None:
            race = Race([0.0] * n, [1 / n] * n, list(parent), kind.error, margin=least[1] - float(parent.sum()))
            seen: list[float] = []
            for unit in shuffled(range(n), stream("order", repr(factors))):
                seen.append(float(values[unit]))
                race.take(unit, seen[-1])
                if race.lost:
                    break
            asked = len(seen)
            if race.lost and asked < n:  # its fitness is that of what it was asked
                fitness, values = min(least[1] - 1e-9, n * math.fsum(seen) / asked), None
        prompts += 3 * asked
        seconds += 3 * asked * landscape.seconds(factors)
        known[factors, n] = fitness, values
        return fitness

    best, path, plain = None, [], landscape.value([1.0] * L)
    while not optimizer.done:
        individuals, least = optimizer.ask(), optimizer.cutoff if kind.error else None
        optimizer.tell([measure(individual, least) for individual in individuals])
        if best != (best := factors_of(optimizer.best[0].points, kind.curve, L)):
            gain = round(landscape.value(best) - plain, 3)
            path.append((prompts + slope.prompts, _known(seconds), gain))
    assert best is not None
    return Found(list(best), prompts + slope.prompts, seconds, path)


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else round(seconds, 1)


@functools.lru_cache(maxsize=10_000)
def factors_of(points: Points, curve: str, layers: int) -> tuple[float, ...]:
    """The factors, one a layer, that control points stand for."""
    if curve == "free":
        return tuple(y for _, y in points)
    t = np.linspace(0, 1, 2001)  # the Bezier curve of lpes_eval.curves to 1e-6, in a hundredth of the time
    x, y = (de_casteljau(values, t) for values in zip(*points, strict=True))
    return tuple(np.interp(np.linspace(x[0], x[-1], layers), x, y).round(9).tolist())


def shown(landscape: Landscape, factors: Sequence[float], seed: int) -> bool:
    """Whether held-out questions show the factors to be better than the plain model, as a search's verdict has it."""
    answers = simulation(landscape, 100, "held out", landscape.name, landscape.layers, seed)
    plain = answers([1.0] * landscape.layers)
    return bool(compare_paired(plain, answers(factors), replicates=2000).mean.low > 0)


@functools.cache
def all_landscapes() -> dict[str, Landscape]:
    """Every landscape by its name and depth."""
    found = [real(name) for name in recorded.MODELS if recorded.load(name)]
    return {f"{each.name} {each.layers}": each for each in [*found, *landscapes(32), *landscapes(80)]}


def one(case: tuple[str, int, int]) -> dict[str, Any]:
    """One search on one landscape with one seed."""
    name, number, seed = case
    landscape, kind = all_landscapes()[name], SEARCHES[number]
    found = search(kind, landscape, seed)
    gain = landscape.value(found.factors) - landscape.value([1.0] * landscape.layers)
    plain = set(found.factors) == {1.0}  # of which nothing is shown
    row = {"landscape": landscape.name, "layers": landscape.layers, "search": kind.title, "seed": seed}
    row |= {"gain": round(gain, 3), "prompts": found.prompts, "seconds": _known(found.seconds)}
    return row | {"shown": not plain and shown(landscape, found.factors, seed), "path": found.path}


def run(seeds: int, processes: int) -> list[dict[str, Any]]:
    """Every search on every landscape, with every seed; the default where nothing matters with four times as many."""
    cases = [
        (name, number, seed)
        for number in range(len(SEARCHES))
        for name in all_landscapes()
        for seed in range(4 * seeds if number == 0 and name.startswith("nothing") else seeds)
    ]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return list(tqdm(pool.imap(one, cases), total=len(cases), unit="search"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=at_least(1), default=50, metavar="N", help="of every search on each landscape")
    parser.add_argument("--processes", type=at_least(1), default=os.cpu_count(), metavar="N")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write there, and not what the repository keeps")
    args = parser.parse_args()
    rows = run(args.seeds, args.processes)
    results, docs = args.out or store.KEPT, args.out or store.ROOT / "docs"
    store.write(results / "landscapes.jsonl", rows)
    text = landscapes_page.page(rows, SEARCHES, all_landscapes().values())
    write_atomically(docs / "landscapes.md", text)
    landscapes_page.pictures(rows, SEARCHES, docs)
    print(text)


if __name__ == "__main__":
    main()
