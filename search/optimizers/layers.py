"""The default search: a map of what layers and bands of layers bear, then combinations of what helps."""

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median, stdev

from lpes_eval.flags import at_least
from search.optimizers.base import Config, Generation, Optimizer, Steps, setting
from search.space import Individual, Points

Band = tuple[int, int]
"""Layers (first, last + 1)."""
Change = Mapping[Band, float]
"""What the factors of bands are multiplied by; a layer obeys the narrowest band that it is in."""

LOW, HIGH = 0.5, 2.0  # factors
STEPS = (0.5, 0.8, 1.25)
MAP = ((None, 2), (16, 4), (8, 12))
"""Of the map, how many entries are measured (None: all), and on how many questions that are new to it."""
ROUNDS, QUESTIONS = 8, 12
"""Times that a combination may be changed, and questions on which the changes are compared."""
TUNING = (1.2, 1.1, 1.05)
LEVEL = 0.05
"""Family-wise error rate of the map; of a round of combinations it is half as much for each."""


@dataclass(frozen=True)
class LayerConfig(Config):
    """How much is tried."""

    finest: int = setting(4, at_least(1), "bands that the layers are divided into at most, besides single layers")
    judged: int = setting(4, at_least(1), "combinations that are judged by the score on all search examples")
    tuned: int = setting(3, at_least(0), "bands that are tuned by small steps, by the score")


@dataclass
class Gain:
    """What a change adds to the fitness, question by question."""

    change: Change
    differences: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Over the questions."""
        return fmean(self.differences)

    @property
    def p(self) -> float:
        """How probable such gains are where the change does nothing (Wilcoxon's signed-rank test, one-sided).

        A t-test would see little, as a few questions gain far more than others. A single value counts if it gains.
        """
        from scipy.stats import wilcoxon

        if len(self.differences) == 1 or not any(self.differences):
            return float(self.mean <= 0)
        return float(wilcoxon(self.differences, alternative="greater").pvalue)


class LayerSearch(Optimizer):
    """Find the layers whose factors matter, put together what helps, and let the score judge (``docs/search.md``).

    1. A map: every layer, the whole stack, its halves and quarters by each step, measured by the likelihood of the
       reference answers. If no entry is better than the start beyond chance, there is nothing to find.
    2. The best entry is changed, round after round, each on questions of its own: another entry joins in, or a step
       becomes larger or smaller. What gains most is kept, if that is not chance either.
    3. The score judges, on all search examples, and the fittest is tuned by small steps. Nothing is drawn at random.
    """

    Config = LayerConfig
    title = "a map of what layers bear, by the likelihood of the answers; what helps is combined, judged by the score"
    default_start, lowest = 1.0, LOW
    free = True

    @classmethod
    def settle(cls, args: Namespace) -> None:
        """Its factors are on no grid."""
        args.continuous = True

    def _set_up(self, model: object) -> None:
        L = self.space.L
        self._bands = list(dict.fromkeys([*bands_of(L, self.config.finest), *pairwise(range(L + 1))]))
        self._asked = 0
        self._uniform: Change = {}
        self.generations = len(MAP) + ROUNDS + 2 + 2 * len(TUNING)
        entries = len(STEPS) * len(self._bands)
        stages = [(min(most or entries, entries) + 1, questions) for most, questions in MAP]
        self.mapped = sum(number for number, _ in stages)
        stages += [(MAP[-1][0] + 4, QUESTIONS)] * ROUNDS  # about
        tuning = len(TUNING) * (2 * self.config.tuned + 1)
        judged = self.config.judged + 3 + tuning
        self.max_evaluations = sum(number for number, _ in stages) + 6 * ROUNDS + judged
        self.max_effort = sum(number * min(1.0, n / self.examples) for number, n in stages) + judged
        self.expected_effort = 2 / 3 * self.max_effort

    def search(self) -> Steps[Individual]:
        """End with the start where nothing is found, or where the score does not confirm it."""
        start = self.so_far = Individual(self.start, "start")
        entries = yield from self._map()
        if not entries:
            return start
        path = yield from self._combine([entry.change for entry in entries])
        best = yield from self._judge(path)
        return (yield from self._tune(best)) if best else start

    def _map(self) -> Steps[list[Gain]]:
        """The entries that are beyond chance, the best first, one a band, with their gains on the last questions."""
        gains = [Gain({band: step}) for band in self._bands for step in STEPS]
        for most, questions in MAP:
            gains = sorted(gains, key=lambda gain: -gain.mean if gain.differences else 0.0)[:most]
            last = yield from self._compare({}, [gain.change for gain in gains], questions, "map")
            for gain, new in zip(gains, last, strict=True):
                gain.differences += new.differences
            if not self._uniform:  # the best step of the whole stack, for PI
                stack = [gain for gain in gains if gain.change.keys() == {(0, self.space.L)}]
                self._uniform = max(stack, key=lambda gain: gain.mean).change
        self.said = f"{len(STEPS) * len(self._bands)} steps of layers and bands of layers were tried"
        found = [pair for pair in zip(gains, last, strict=True) if pair[1].p * len(last) <= LEVEL]
        if not found:
            least = median(smallest(new.differences, LEVEL / len(last)) for new in last)
            what = "log-likelihood of the answers a token" if self.measure == "likelihood" else "score"
            self.said += f", and none raises the {what} beyond chance"
            self.said += f"; a gain of less than {least:.4f} would not have been seen" if least else ""
        best: dict[Band, Gain] = {}
        for gain, new in sorted(found, key=lambda pair: -pair[0].mean):
            (band,) = gain.change
            best.setdefault(band, new)
        return [*best.values()]

    def _combine(self, entries: Sequence[Change]) -> Steps[list[Change]]:
        path = [entries[0]]
        for _ in range(ROUNDS):
            self.so_far = Individual(self._points(path[-1]), "combination")
            center = path[-1]
            changes = [{**center, **entry} for entry in entries if not entry.keys() & center.keys()]
            changes += [
                {**center, band: round(step**power, 3)} for band, step in center.items() for power in (1.5, 0.667)
            ]
            known = {self._points(change) for change in path}
            changes = [change for change in changes if self._points(change) not in known]
            gains = yield from self._compare(center, changes, QUESTIONS, "combination")
            best = max(gains, key=lambda gain: gain.mean)
            if best.mean <= 0 or best.p > LEVEL / 2:
                break
            path.append(best.change)
        return path

    def _judge(self, path: Sequence[Change]) -> Steps[Change | None]:
        """The fittest by the score on all examples; None where that is the start."""
        nearer = {band: round(step**0.5, 3) for band, step in path[-1].items()}
        last, *others = path[::-1][: self.config.judged]
        changes = [last, self._uniform, *others, nearer]
        (plain,) = yield Generation([Individual(self.start, "start")])
        individuals = [Individual(self._points(change), "judged", (self.start,)) for change in changes]
        first = yield Generation(individuals[:2], cutoff=(self.start, plain))
        best = (individuals[0].points, first[0]) if first[0] > plain else (self.start, plain)
        self._fitness = [*first, *(yield Generation(individuals[2:], cutoff=best))]
        self._kept = max(self._fitness)
        if self._kept <= plain + 1e-9:
            self.said += ", but what raises the likelihood does not raise the score"
            self.so_far = Individual(self.start, "start")
            return None
        return changes[self._fitness.index(self._kept)]

    def _tune(self, center: Change) -> Steps[Individual]:
        """Small steps of the first bands, by the score on all examples; whatever gains is kept."""
        fitness, known = self._kept, {self._points(center)}
        for step in TUNING:
            self.so_far = Individual(self._points(center), "kept")
            moves = [
                {**center, band: center[band] * factor}
                for band in [*center][: self.config.tuned]
                for factor in (step, 1 / step)
            ]
            for _ in range(2):  # each alone, then those together that gain
                moves = [move for move in moves if self._points(move) not in known]
                if not moves:
                    break
                P = self._points(center)
                known |= {self._points(move) for move in moves}
                individuals = [Individual(self._points(move), "tuned", (P,)) for move in moves]
                measured = yield Generation(individuals, cutoff=(P, fitness + 1e-9))
                gainful = sorted(zip(measured, range(len(moves)), strict=True), reverse=True)
                gainful = [pair for pair in gainful if pair[0] > fitness + 1e-9]
                if not gainful:
                    break
                together = dict(center)
                for _, number in reversed(gainful):
                    together |= {band: s for band, s in moves[number].items() if s != center[band]}
                fitness, center, moves = gainful[0][0], moves[gainful[0][1]], [together]
        return Individual(self._points(center), "kept")

    def _compare(self, center: Change, changes: Sequence[Change], questions: int, origin: str) -> Steps[list[Gain]]:
        """What each change gains on the center, on the next questions."""
        first = self._asked if self._asked + questions <= self.examples else 0
        self._asked = end = min(first + questions, self.examples)
        P = self._points(center)
        individuals = [Individual(self._points(change), origin, (P,)) for change in changes]
        generation = Generation([Individual(P, origin), *individuals], part=(first, end), measure=self.measure)
        before, *fitness = yield generation
        return [
            Gain(change, [b - a for a, b in zip(before.questions, after.questions, strict=True)] or [after - before])
            for change, after in zip(changes, fitness, strict=True)
        ]

    def _points(self, change: Change) -> Points:
        """The start, changed; the narrowest band last."""
        points = list(self.start)
        for first, end in sorted(change, key=lambda band: band[0] - band[1]):
            for h in range(first, end):
                x, y = self.start[h]
                points[h] = x, min(max(round(y * change[first, end], 2), LOW), HIGH)
        return tuple(points)


class Map(LayerSearch):
    """The first step of the search alone, for a diagnosis; ``entries`` has what helps, None until that is known."""

    entries: list[Gain] | None = None

    def search(self) -> Steps[Individual]:
        """End with the start."""
        self.entries = yield from self._map()
        return Individual(self.start, "start")


def bands_of(L: int, finest: int) -> list[Band]:
    """The whole stack, its halves and so on; of a stack with fewer layers, single layers at last."""
    counts = [1]
    while counts[-1] < min(finest, L):
        counts.append(min(2 * counts[-1], L))
    levels = [list(pairwise(round(i * L / n) for i in range(n + 1))) for n in counts if n <= finest]
    return list(dict.fromkeys(band for level in levels for band in level))


def smallest(differences: Sequence[float], level: float) -> float:
    """The mean at which differences that vary like these are beyond chance, by Student's t; 0 for a single one."""
    from scipy.stats import t

    n = len(differences)
    return float(t.ppf(1 - level, n - 1)) * stdev(differences) / math.sqrt(n) if n > 1 else 0.0


OPTIMIZER = LayerSearch
