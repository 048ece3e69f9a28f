"""A search put together from its command line: the model, the tasks, the optimiser, and the loop between them."""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lpes_eval.errors import UserError
from lpes_eval.factors import Factors
from lpes_eval.harness import plugin
from search import guards, optimizers
from search.config import SETTINGS, heights, task_options
from search.guards import LATE, PENALTY, Guard, over, rank
from search.journal import Journal
from search.optimizers.base import Generation, Optimizer
from search.parser import settings_of
from search.space import Individual, Points, Space, to_points
from search.tradeoff import ranked, trades

if TYPE_CHECKING:
    from search.evaluator import Cutoff, Evaluator, Measured
    from search.tasks import Objective

Watch = Callable[[Individual, dict[str, Any], bool], None]
"""Called for every individual: its entry in the journal, and whether it was measured now."""
Curve = Callable[[Points, int], Sequence[float]]


@dataclass
class Search:
    """What a run is made of, once the model and the tasks are there.

    Attributes:
        args: the command line.
        lm: the lm-eval model.
        evaluator: measures factors on the search examples.
        optimizer: fresh; the journal brings it to where it was.
        settings: what decides the outcome, as plain data.
        held_out: the tasks on examples that the search does not see, for the evaluation at its end; none without one.
        guards: what the factors must not cost, on search examples.
        journal: what was measured, once the folder is open.
        spent: seconds of measuring and prompts answered by the search so far, guards included.
        cut: whether the budget ended it.
        part: the questions on which individuals are measured now (``Generation.share``); None for all.
        step: the generation that is measured now, the last one if the search is over, and its number.
        curve: a function of the caller's from control points and a number of layers to one factor a layer.
    """

    args: argparse.Namespace
    lm: Any
    evaluator: Evaluator
    optimizer: Optimizer
    settings: dict[str, Any]
    held_out: Sequence[Objective] = ()
    guards: Sequence[Guard] = ()
    journal: Journal = None  # type: ignore[assignment]
    spent: dict[str, float] = field(default_factory=lambda: {"seconds": 0.0, "prompts": 0.0})
    cut: bool = False
    part: list[int] | None = None
    step: Generation = field(default_factory=lambda: Generation([]))
    number: int = -1
    curve: Curve | None = None

    def run(self, watch: Watch) -> tuple[Individual, dict[str, Any]]:
        """Ask, measure, tell, until the optimiser is done or the budget spent.

        What the journal knows is not measured again. Individuals that worsen a guard rank behind all others.

        Returns:
            The individual that the search ends with, and the journal's entry for its factors, on all examples.
        """
        optimizer, journal = self.optimizer, self.journal
        fittest: tuple[Individual, dict[str, Any]] | None = None
        counted: set[str] = set()  # factors that are asked for again cost nothing again
        unit, most = self.args.budget or ("seconds", math.inf)
        steps, fitness = optimizer.search(), None
        while not self.cut:
            began = time.perf_counter()
            try:
                self.step = steps.send(fitness)  # type: ignore[arg-type]
            except StopIteration as end:
                best: Individual = end.value
                break
            asking = time.perf_counter() - began if optimizer.also else 0.0
            self.number += 1
            fitness, part, generation = [], self.evaluator.part(self.step.share), self.step.individuals
            if part != self.part:  # on other questions, what is fitter may differ
                self.part, fittest = part, None
            least = self.step.cutoff[1] if self.step.cutoff else -math.inf
            coming = [individual for individual in generation if self.name(individual) not in journal.entries]
            self.evaluator.expect([self.factors(individual) for individual in coming], self.cutoff, self.part)
            for individual in generation:
                name = self.name(individual)
                made = {"generation": self.number, **individual.to_dict()}
                known = journal.entries.get(name)
                own = name in journal.individuals  # else it was measured as something to beat, perhaps not in full
                new = known is None or (not own and "stopped_after" in known)
                # What an interrupted search spent before counts too; what it measured is not thrown away.
                if new and self.spent[unit] >= most:
                    self.cut = True
                    break
                if new:
                    entry = self.evaluate(individual)
                    entry["seconds"], asking = round(entry["seconds"] + asking, 3), 0.0
                    journal.record(name, {**made, **entry})
                elif known and not own:  # an individual from now on
                    journal.record(name, {**known, **made})
                entry = journal.entries[name]
                if name not in counted:
                    self.spent["seconds"] += entry["seconds"]
                    self.spent["prompts"] += entry["prompts"] + entry.get("guard_prompts", 0)
                counted.add(name)
                kept = "stopped_after" not in entry and rank(entry) >= least  # by the optimiser too
                if fittest is None or (kept and rank(entry) > rank(fittest[1])):
                    fittest = individual, entry
                watch(individual, entry, new)
                fitness.append(rank(entry))
        self.evaluator.expect([], None, None)
        if self.cut and fittest is not None:
            best = fittest[0]
        return best, self.measure("best", self.factors(best))

    def chosen(self, fittest: Individual, best: Mapping[str, Any]) -> tuple[Factors, dict[str, Any]]:
        """The best factors by ``--choose``, of those that were measured in full and worsen no guard, and their entry.

        Where a budget ends the search before it asks all questions, that is ``fittest`` alone, with its entry ``best``.
        """
        entries = self.journal.entries
        plain = entries[self.uniform(1.0).digest()]
        individuals = [*self.journal.individuals.values(), {**best, **fittest.to_dict()}]
        found = trades([plain, *individuals], self.evaluator)
        for trade in ranked(found, self.args.choose, self.evaluator):
            if trade.entry["key"] == plain["key"]:
                break
            factors = self.factors(Individual(to_points(trade.entry["points"]), trade.entry["origin"]))
            if not over(entry := self._with_guards(factors)):
                return factors, entry
        return self.uniform(1.0), plain

    def _with_guards(self, factors: Factors) -> dict[str, Any]:
        """The entry of factors that were measured in full, with their guards, which the search may have left out."""
        entries, key = self.journal.entries, factors.digest()
        entry, plain = dict(entries[key]), entries[self.uniform(1.0).digest()]
        if self.guards and key != plain["key"] and "guards" not in entry:
            if (kept := LATE.format(key)) not in entries:
                measured = self.evaluator.score(entry["examples"], ended=entry["ended"])
                compared = self._compared(plain, measured, factors)
                self.journal.record(kept, {"generation": None, "origin": "guards", "guards": compared})
            entry["guards"] = entries[kept]["guards"]
        return entry

    @property
    def best_uniform(self) -> Factors | None:
        """The uniform factor that gains most over the plain model on the same questions; None where none does."""
        entries = self.journal.entries.values()
        gain = lambda entry: entry["fitness"] - self.plain_on(entry["examples"])  # noqa: E731
        best = max((entry for entry in entries if "examples" in entry and "factor" in entry), key=gain)
        return self.uniform(best["factor"]) if gain(best) > 1e-9 else None

    def plain_on(self, examples: Mapping[str, Sequence[Any]]) -> float:
        """The plain model's fitness on the questions that others were asked."""
        plain = self.journal.entries[self.uniform(1.0).digest()]["examples"]
        same = {
            name: [one if value is not None else None for one, value in zip(plain[name], values, strict=True)]
            for name, values in examples.items()
        }
        return self.evaluator.score(same).fitness

    def factors(self, individual: Individual) -> Factors:
        """An individual's factors, in the form that a factors file keeps."""
        if self.curve is not None:
            return Factors.from_list([1.0] * self.args.skip + [*self.curve(individual.points, self.optimizer.space.L)])
        points: Any = individual.points
        if self.args.curve == "free":
            points = [y for _, y in points]
        options = {"num_layers": self.evaluator.num_layers, "unscaled_layers": range(self.args.skip)}
        return Factors.from_curve(self.args.curve, points, **options)

    def uniform(self, factor: float) -> Factors:
        """Position Interpolation on the layers that are searched."""
        options = {"num_layers": self.evaluator.num_layers, "unscaled_layers": range(self.args.skip)}
        return Factors.from_uniform(factor, **options)

    def pi(self, factor: float) -> str:
        """What ``uniform(factor)`` is called: it leaves the same layers alone as the search does, and says so."""
        return f"PI {factor:.3f}" + (f" from layer {self.args.skip}" if self.args.skip else "")

    def name(self, individual: Individual) -> str:
        """What individuals with the same factors have in common, as long as the same questions are asked."""
        digest = self.factors(individual).digest()
        return digest if self.part is None else f"{digest} {len(self.part)}"

    def evaluate(self, individual: Individual) -> dict[str, Any]:
        """An individual's entry in the journal."""
        from search.engines.cluster import WorkerKilled

        cutoff, factors = self.cutoff, self.factors(individual)
        known = self.journal.entries.get(factors.digest(), {})
        if self.part is not None and "ended" in known:  # on all questions, these among them
            measured = self.evaluator.only(known["examples"], self.part, known["ended"])
        else:
            try:
                measured = self.evaluator(factors, cutoff, self.part)
            except WorkerKilled as error:
                return {"fitness": -PENALTY, "scores": {}, "seconds": 0.0, "prompts": 0, "failed": str(error)}
        return self._entry(measured, factors, self.part)

    def measure(self, name: str, factors: Factors, to_beat: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Measure factors on all examples, unless the journal knows them; give up what does not beat ``to_beat``."""
        key, entries = factors.digest(), self.journal.entries
        if key not in entries or (to_beat is None and "examples" not in entries[key]):
            cutoff = self._cutoff(to_beat["fitness"], to_beat) if to_beat and self.args.early_stopping else None
            entry = self._entry(self.evaluator(factors, cutoff), factors)
            self.journal.record(key, {"generation": None, "origin": name, **entry})
        return entries[key]

    @property
    def cutoff(self) -> Cutoff | None:
        """What individuals have to reach now."""
        if not self.args.early_stopping or (least := self.step.cutoff) is None:
            return None
        points, fitness = least
        entry = self.journal.entries[self.name(Individual(points, ""))]
        return self._cutoff(fitness, entry) if "examples" in entry else None  # its workers died

    def _cutoff(self, fitness: float, entry: Mapping[str, Any]) -> Cutoff:
        from search.evaluator import Cutoff

        error = self.args.early_stopping_error if self.args.early_stopping == "probable" else 0.0
        return Cutoff(fitness, entry["examples"], error)

    def _entry(self, measured: Measured, factors: Factors, part: Sequence[int] | None = None) -> dict[str, Any]:
        """What the journal keeps of a measurement on these questions.

        Raises:
            UserError: the fitness is not finite, so nothing can be held against it.
        """
        per_layer = factors.per_layer(self.evaluator.num_layers)
        if not math.isfinite(measured.fitness):
            bad = ", ".join(f"{name} ({value})" for name, value in measured.scores.items() if not math.isfinite(value))
            raise UserError(
                f"the fitness of factors {', '.join(f'{s:g}' for s in per_layer)} is {measured.fitness}, by "
                f"{bad or 'its weights'}; take a metric that is always finite (--metrics) or, if the model overflows, "
                "a wider dtype (--model_args dtype=float32)"
            )
        entry: dict[str, Any] = {
            "fitness": measured.fitness,
            "scores": measured.scores,
            "seconds": round(measured.seconds, 3),
            "prompts": measured.stopped_after or self.evaluator.asked(part),
        }
        if len(scaled := set(per_layer[self.args.skip :])) == 1:
            entry["factor"] = scaled.pop()
        if measured.stopped_after:
            return entry | {"stopped_after": measured.stopped_after}
        entry |= {"examples": measured.examples, "ended": measured.ended}
        before = sum(guard.seconds for guard in self.guards)
        entry |= self._guarded(measured, factors, part)
        entry["seconds"] = round(entry["seconds"] + sum(guard.seconds for guard in self.guards) - before, 3)
        return entry

    def _guarded(self, measured: Measured, factors: Factors, part: Sequence[int] | None) -> dict[str, Any]:
        """The guards of the plain model, and of what is fitter than it and what the optimiser still uses."""
        if not self.guards:
            return {}
        plain = self.journal.entries.get(self.uniform(1.0).digest())
        least = self.step.cutoff if part == self.part else None  # it is of the questions that are asked now
        share = 1.0 if part is None else self.step.share
        asked = {"guard_prompts": sum(guard.prompts(share) for guard in self.guards)}
        if plain is None:
            return asked | {"guard_rows": {guard.name: guard.rows(factors, measured) for guard in self.guards}}
        if measured.fitness <= self.plain_on(measured.examples) + 1e-9 or (
            least and measured.fitness < least[1] - 1e-12
        ):
            return {}
        return asked | {"guards": self._compared(plain, measured, factors, share)}

    def _compared(
        self, plain: Mapping[str, Any], measured: Measured, factors: Factors, share: float = 1.0
    ) -> dict[str, Any]:
        return {
            guard.name: guard.check(plain["guard_rows"][guard.name], guard.rows(factors, measured, share))
            for guard in self.guards
        }


def load(
    args: argparse.Namespace, lm: Any = None, kind: type[Optimizer] | None = None, curve: Curve | None = None
) -> Search:
    """Load the model and the tasks, and put the search together; model, optimiser and curve may be the caller's own."""
    from search.cache import FitnessCache
    from search.engines import speed_options
    from search.evaluator import Evaluator
    from search.identity import code, packages
    from search.model import load_model
    from search.tasks import check_names, load_tasks

    check_names(args.tasks, args.include_path)
    guards.check_names(args)
    if not args.include_path:
        plugin.check_examples(args.tasks, args.model_args, {**args.metadata, "split": "search"})
    own = [each for each in (kind, curve) if each is not None]
    kind = kind or optimizers.load(args.optimizer)
    lm = lm or load_model(args, whole=not args.workers or kind.descends)
    options = task_options(args)
    objectives = load_tasks(lm, args.tasks, examples=args.examples, **options)
    if isinstance(args.choose, list) and not any(objective.by_position for objective in objectives):
        raise UserError("--choose: weights are for tasks by position; take mean or worst")
    held_out: Sequence[Objective] = ()
    if args.held_out_examples:  # before the search, as they may be refused
        options["positions"] = None
        try:
            held_out = load_tasks(lm, args.tasks, split="held_out", examples=args.held_out_examples, **options)
        except UserError as error:
            raise UserError(f"held-out examples: {error}; or leave these out (--held_out_examples 0)") from None
    cache = None if args.no_cache else FitnessCache()
    evaluator = Evaluator(lm, objectives, cache=cache, **speed_options(args))
    if args.early_stopping and (reason := evaluator.why_unbounded) is not None:
        logging.getLogger(__name__).warning("every individual is measured in full: %s", reason)
        args.early_stopping = None
    least_effort = evaluator.asked(evaluator.part(0.0)) / max(1, evaluator.prompts)
    optimizer = make_optimizer(args, evaluator, kind, least_effort)
    search = {name: getattr(args, name) for name in SETTINGS}
    search |= {each.name: getattr(optimizer.config, each.name) for each in settings_of(kind)}
    if args.early_stopping == "probable":
        search |= {"early_stopping": "probable", "early_stopping_error": args.early_stopping_error}
    elif args.early_stopping and optimizer.uses_given_up_fitness:  # else proof changes nothing, so it is no setting
        search["early_stopping"] = args.early_stopping
    if own:
        search["own_code_sha256"] = code(*own)
    watched = guards.load(args, evaluator, "search", args.guard_examples)
    guarded = [
        {"name": guard.name, "max_drop": guard.max_drop, **({} if guard.ends else guard.evaluator.described)}
        for guard in watched
    ]
    settings = {"search": search, "fitness": {**evaluator.described, "guards": guarded}, "packages": packages()}
    return Search(args, lm, evaluator, optimizer, settings, held_out, watched, curve=curve)


def make_optimizer(
    args: argparse.Namespace, evaluator: Evaluator, kind: type[Optimizer] | None = None, least_effort: float = 0.0
) -> Optimizer:
    """The optimiser that was asked for, over the layers that are searched."""
    L, grid = evaluator.num_layers - args.skip, not args.continuous
    if L < 2:
        raise UserError(
            f"--skip {args.skip}: the model has {evaluator.num_layers} layers, and at least 2 must be left to scale"
        )
    space = Space.free(L, grid) if args.curve == "free" else Space(L, args.control_points - 1, grid)
    kind = kind or optimizers.load(args.optimizer)
    config = {each.name: getattr(args, each.name) for each in settings_of(kind) if each.name in args}
    return kind(
        space,
        kind.Config(**config),
        generations=args.generations,
        start=start_points(args, space),
        seed=args.seed,
        model=(evaluator.lm, evaluator.objectives),
        least_effort=least_effort,
    )


def start_points(args: argparse.Namespace, space: Space) -> Points:
    """The control points that ``--start`` stands for; those of a file come to stand on the grid, if there is one."""
    points = args.start
    if points is None:
        return space.start()
    if isinstance(points, float | int):
        points = [points] * (space.d + 1)
    if len(points) != space.d + 1:
        raise UserError(f"--start: {len(points)} control points; expected {space.d + 1}")
    if not any(isinstance(point, list) for point in points):
        points = list(zip([x for x, _ in space.start()], points, strict=True))
    points = space.nearest(to_points(points))
    if not space.contains(points):
        xs = f"{'whole ' if space.grid else ''}x from 0 to {space.L - 1}"
        raise UserError(
            f"--start: {[list(point) for point in points]} is not searched; expected {space.d + 1} control points with "
            f"{xs}, and for y {heights(args)}"
        )
    return points
