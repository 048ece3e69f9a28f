"""A search put together from its command line: the model, the tasks, the optimiser, and the loop between them."""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from lpes_eval.entries import Entry
from lpes_eval.errors import UserError
from lpes_eval.factors import Factors
from lpes_eval.harness import plugin
from search import guards, optimizers
from search.config import SETTINGS
from search.guards import PENALTY, rank
from search.journal import Journal, packages
from search.optimizers.base import Fitness, Generation, Optimizer
from search.space import Cutoff, Individual, Job, Points, Space

if TYPE_CHECKING:
    from search.bench import Bench
    from search.evaluator import Evaluator
    from search.guards import Guard
    from search.tasks import Objective
    from search.workers import Pool


@dataclass
class Search:
    """What a run is made of, once the model and the tasks are there."""

    args: argparse.Namespace
    bench: Bench
    optimizer: Optimizer
    settings: dict[str, Any]
    """What decides the outcome, as plain data."""
    pool: Pool | None = None
    """The workers that measure instead of the bench, if there are any."""
    journal: Journal = None  # type: ignore[assignment]
    """What was measured, once the folder is open; it brings a fresh optimiser to where it was."""
    spent: dict[str, float] = field(default_factory=lambda: {"seconds": 0.0, "prompts": 0.0})
    """By the search so far, guards included."""
    cut: bool = False
    """Whether the budget ended it."""
    generation: int = 0

    @property
    def evaluator(self) -> Evaluator:
        """Of the tasks, on the search examples."""
        return self.bench.evaluator("search")

    @property
    def guards(self) -> list[Guard]:
        """What the factors must not cost, on search examples."""
        return self.bench.guards("search")

    @property
    def held_out(self) -> list[Objective]:
        """The tasks on examples that the search does not see, for the evaluation at its end; none without one."""
        return self.bench.objectives("held_out") if self.args.held_out_examples else []

    @property
    def plain(self) -> Entry:
        """The plain model's entry."""
        return self.journal.entries[self.uniform(1.0).digest()]

    def run(self, watch: Callable[[Individual, Entry, bool], None]) -> Individual:
        """Measure what the optimiser yields, until it is done or the budget spent; return what the search ends with.

        ``watch`` gets every individual, its entry in the journal, and whether it was measured now.
        """
        steps = self.optimizer.search()
        fitness: list[Fitness] = None  # type: ignore[assignment]
        fittest: tuple[Individual, Entry] | None = None
        counted: set[str] = set()
        while True:
            began = time.perf_counter()
            try:
                generation = steps.send(fitness)
            except StopIteration as end:
                return end.value
            thinking = time.perf_counter() - began if self.optimizer.also else 0.0
            fitness = []
            for individual, entry, new in self._measured(generation, thinking):
                if entry.key not in counted:
                    self.spent["seconds"] += entry.seconds / (len(self.pool) if self.pool else 1)
                    self.spent["prompts"] += entry.prompts + entry.guard_prompts
                counted.add(entry.key)
                if fittest is None or (not entry.stopped_after and rank(entry) > rank(fittest[1])):
                    fittest = individual, entry
                watch(individual, entry, new)
                questions: Sequence[float] = ()
                if entry.examples and not guards.over(entry):
                    part = self.evaluator.part(generation.part)
                    questions = self.evaluator.by_question(entry.examples, part, entry.measure)
                fitness.append(Fitness(rank(entry), questions))
            if self.cut:
                best = fittest[0] if fittest is not None else Individual(self.optimizer.start, "start")
                return self.optimizer.so_far or best
            self.generation += 1

    def _measured(self, generation: Generation, thinking: float) -> Iterator[tuple[Individual, Entry, bool]]:
        """Each individual with its entry, and whether it was measured now; ``thinking`` are the optimiser's seconds."""
        entries = self.journal.entries
        unit, most = self.args.budget or ("seconds", math.inf)
        names = [self.key(individual, generation) for individual in generation.individuals]
        jobs: dict[str, Job] = {}
        for name, individual in zip(names, generation.individuals, strict=True):
            if name not in entries:
                jobs.setdefault(name, self._job(individual, generation))
        results = self.measure_all(list(jobs.values()))
        for name, individual in zip(names, generation.individuals, strict=True):
            made = {"generation": self.generation, **vars(individual)}
            if new := jobs.pop(name, None) is not None:
                # What an interrupted search spent before counts too; what it measured is not thrown away.
                if self.spent[unit] >= most:
                    self.cut = True
                    return
                data = next(results)
                if "failed" in data:
                    data |= {"fitness": -PENALTY}
                else:
                    data["seconds"], thinking = round(data["seconds"] + thinking, 3), 0.0
                self.journal.record(name, {**made, **data})
            elif entries[name].generation is None:  # the plain model, an individual from now on
                self.journal.record(name, {**asdict(entries[name]), **made})
            yield individual, entries[name], new

    def measure_all(self, jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
        """What is measured of each, in their order; without workers one after the other, as they are asked for."""
        return self.pool.map(jobs) if self.pool else map(self.bench.measure, jobs)

    def _job(self, individual: Individual, generation: Generation) -> Job:
        factors, part, measure = self.factors(individual), generation.part, generation.measure
        settle = measure == "score" and guards.settles(self.plain.ended)
        job = Job(factors, part=part, measure=measure, cutoff=self._cutoff(generation), settle=settle)
        if measure != "score" or part is not None:
            return job
        above = self.plain.fitness + 1e-9  # sums are rounded
        if generation.cutoff is not None:
            above = max(above, math.nextafter(generation.cutoff[1] - 1e-12, -math.inf))
        return replace(job, guarded_above=above, plain_rows=self.plain.guard_rows)

    def _cutoff(self, generation: Generation) -> Cutoff | None:
        if not self.args.early_stopping or generation.cutoff is None or generation.measure != "score":
            return None
        points, fitness = generation.cutoff
        entry = self.journal.entries[self.key(Individual(points, ""), generation)]
        error = self.args.early_stopping_error
        return Cutoff(fitness, entry.examples, error) if entry.examples else None  # its workers died

    def measure(self, name: str, factors: Factors) -> Entry:
        """Measure factors on all examples, unless the journal knows them."""
        key = factors.digest()
        known = self.journal.entries.get(key)
        if known is None or not known.examples:
            job = Job(factors, guarded_above=-math.inf)
            if key != self.uniform(1.0).digest():
                job = replace(job, guarded_above=self.plain.fitness + 1e-9, plain_rows=self.plain.guard_rows)
            self.journal.record(key, {"origin": name, **self.measured(job)})
        return self.journal.entries[key]

    def measured(self, job: Job) -> dict[str, Any]:
        """What is measured of one job that has to succeed; ``UserError`` where no worker survived it."""
        [data] = self.measure_all([job])
        if "failed" in data:
            raise UserError(f"factors {', '.join(f'{s:g}' for s in job.factors.per_layer())}: {data['failed']}")
        return data

    @property
    def best_uniform(self) -> Factors | None:
        """The uniform factor that gains most over the plain model on the same questions; None where none does."""
        scored = [entry for entry in self.journal.entries.values() if entry.examples and entry.measure == "score"]
        uniform = [entry for entry in scored if entry.factor is not None]
        gains = [entry.fitness - self.plain_on(entry.examples) for entry in uniform]
        gain, best = max(zip(gains, uniform, strict=True), key=lambda pair: pair[0])
        return self.uniform(best.factor) if gain > 1e-9 and best.factor is not None else None

    def plain_on(self, examples: Mapping[str, Sequence[Any]]) -> float:
        """The plain model's fitness on the questions that others were asked."""
        return self.evaluator.score(self.plain.where(examples)).fitness

    def factors(self, individual: Individual) -> Factors:
        """An individual's factors, in the form that a factors file keeps."""
        points: Any = individual.points
        if self.args.curve == "free":
            points = [y for _, y in points]
        return Factors.from_curve(self.args.curve, points, **self._layers)

    def uniform(self, factor: float) -> Factors:
        """Position Interpolation on the layers that are searched."""
        return Factors.from_uniform(factor, **self._layers)

    @property
    def _layers(self) -> dict[str, Any]:
        return {"num_layers": self.evaluator.num_layers, "unscaled_layers": range(self.args.skip)}

    def pi(self, factor: float) -> str:
        """What ``uniform(factor)`` is called: it leaves the same layers alone as the search does, and says so."""
        return f"PI {factor:.3f}" + (f" from layer {self.args.skip}" if self.args.skip else "")

    def key(self, individual: Individual, generation: Generation) -> str:
        """The journal's key: what individuals with the same factors have in common, measured in the same way."""
        part = self.evaluator.part(generation.part)
        key = self.factors(individual).digest()
        if part is not None and generation.part is not None:
            key += f" {generation.part[0]}-{generation.part[1]}"
        return key if generation.measure == "score" else f"{key} {generation.measure}"


def load(args: argparse.Namespace, lm: Any = None, kind: type[Optimizer] | None = None) -> Search:
    """Load the model and the tasks, and put the search together; model and optimiser may be the caller's own."""
    from search.bench import Bench
    from search.tasks import check_names

    check_names(args.tasks, args.include_path)
    for guard in args.guard:
        with guards.named(guard):
            check_names([guard["task"]] if guard["task"] != "none" else [], args.include_path)
    if not args.include_path:
        plugin.check_examples(args.tasks, args.model_args, {**args.metadata, "split": "search"})
    kind = kind or optimizers.load(args.optimizer)
    bench = Bench(args, lm, whole=not args.workers or kind.descends)
    evaluator, pool = bench.evaluator("search"), None
    if args.held_out_examples:
        try:
            bench.objectives("held_out")
        except UserError as error:
            raise UserError(f"held-out examples: {error}; or leave these out (--held_out_examples 0)") from None
    if args.early_stopping and (reason := evaluator.why_unbounded) is not None:
        logging.getLogger(__name__).warning("every individual is measured in full: %s", reason)
        args.early_stopping = None
    watched = [guard.describe() for guard in bench.guards("search")]
    if args.workers:
        from search.workers import Pool

        pool = Pool(args)
    optimizer = make_optimizer(args, evaluator, kind)
    search = {name: getattr(args, name) for name in SETTINGS} | vars(optimizer.config)
    if args.early_stopping:
        search |= {"early_stopping": "probable", "early_stopping_error": args.early_stopping_error}
    model = pool.described["model"] if pool else evaluator.engine.fingerprint()
    settings = {
        "search": search,
        "fitness": {**evaluator.describe(), "guards": watched},
        "model": {**model, **evaluator.engine.identity},
        "packages": packages(),
    }
    return Search(args, bench, optimizer, settings, pool)


def make_optimizer(args: argparse.Namespace, evaluator: Evaluator, kind: type[Optimizer]) -> Optimizer:
    """An optimiser with its flags, over the layers that are searched."""
    L, grid = evaluator.num_layers - args.skip, not args.continuous
    if L < 2:
        left = f"the model has {evaluator.num_layers} layers, and at least 2 must be left to scale"
        raise UserError(f"--skip {args.skip}: {left}")
    free = args.curve == "free"
    space = Space.free(L, grid, kind.lowest) if free else Space(L, args.control_points - 1, grid, low=kind.lowest)
    config = {each.name: getattr(args, each.name) for each in fields(kind.Config) if each.name in args}
    return kind(
        space,
        kind.Config(**config),
        generations=args.generations,
        start=start_points(args, space),
        seed=args.seed,
        model=(evaluator.lm, evaluator.objectives),
        examples=min((len(objective.docs) for objective in evaluator.objectives), default=args.examples),
        measure="likelihood" if evaluator.has_likelihood else "score",
    )


def start_points(args: argparse.Namespace, space: Space) -> Points:
    """The control points that ``--start`` stands for; those of a file come to stand on the grid, if there is one."""
    points = args.start
    if isinstance(points, float | int):
        points = [points] * (space.d + 1)
    if len(points) != space.d + 1:
        raise UserError(f"--start: {len(points)} control points; expected {space.d + 1}")
    if not any(isinstance(point, list) for point in points):
        points = list(zip([x for x, _ in space.start()], points, strict=True))
    points = space.nearest(tuple((float(x), float(y)) for x, y in points))
    if not space.contains(points):
        xs = f"{'whole ' if space.grid else ''}x from 0 to {space.L - 1}"
        expected = f"{space.d + 1} control points with {xs}, and for y {space.heights}"
        raise UserError(f"--start: {[*map(list, points)]} is not searched; expected {expected}")
    return points
