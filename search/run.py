"""A search put together from its command line: the model, the tasks, the optimiser, and the loop between them."""

from __future__ import annotations

import argparse
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lpes_eval.errors import UserError
from lpes_eval.factors import Factors
from lpes_eval.harness import plugin
from search import guards, optimizers
from search.config import DIVERSE, SETTINGS, heights, metadata_of, settings_of, speed_options, task_options
from search.guards import Guard, over, rank
from search.journal import Journal
from search.optimizers.base import Optimizer
from search.space import Individual, Points, Space, to_points
from search.tradeoff import ranked, trades

if TYPE_CHECKING:
    from search.evaluator import Cutoff, Evaluator, Measured
    from search.tasks import Objective

Watch = Callable[[Individual, dict[str, Any], bool], None]
"""Called for every individual: its entry in the journal, and whether it was measured now."""


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
        entries: the journal's, once it is open.
        guards: what the factors must not cost, on search examples.
        spent: seconds of measuring and prompts answered by the search so far.
        part: the questions on which individuals are measured now (``Optimizer.effort``); None for all.
    """

    args: argparse.Namespace
    lm: Any
    evaluator: Evaluator
    optimizer: Optimizer
    settings: dict[str, Any]
    held_out: Sequence[Objective] = ()
    entries: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    guards: Sequence[Guard] = ()
    spent: dict[str, float] = field(default_factory=lambda: {"seconds": 0.0, "prompts": 0.0})
    part: list[int] | None = None

    def run(self, journal: Journal, watch: Watch) -> tuple[Individual, dict[str, Any]]:
        """Ask, measure, tell, until the optimiser is done or the budget spent.

        What the journal knows is not measured again. Individuals that worsen a guard rank behind all others.

        Returns:
            The individual that the search ends with, and the journal's entry for its factors, on all examples.
        """
        optimizer = self.optimizer
        optimizer.history = journal.generations
        fittest: tuple[Individual, dict[str, Any]] | None = None
        while not optimizer.done:
            fitness, part = [], self.evaluator.part(optimizer.effort)
            if part != self.part:  # on other questions, what is fitter may differ
                self.part, fittest = part, None
            asked = optimizer.ask()
            coming = [individual for individual in asked if self.name(individual) not in journal.entries]
            self.evaluator.expect([self.factors(individual) for individual in coming], self.cutoff, self.part)
            for individual in asked:
                if self.budget_spent and (optimizer.told or fittest is not None):
                    best = fittest[0] if fittest is not None else optimizer.best[0]
                    return best, self.measure("best", self.factors(best), journal)
                name = self.name(individual)
                made = {"generation": optimizer.generation, **individual.to_dict()}
                if new := name not in journal.entries:
                    journal.record(name, {**made, **self.evaluate(individual)})
                elif name not in journal.individuals:  # measured as something to beat, and an individual from now on
                    journal.record(name, {**journal.entries[name], **made})
                entry = journal.entries[name]
                for unit in self.spent:
                    self.spent[unit] += entry[unit]
                if fittest is None or rank(entry) > rank(fittest[1]):
                    fittest = individual, entry
                watch(individual, entry, new)
                fitness.append(rank(entry))
            optimizer.tell(fitness)
        best, _ = optimizer.best
        return best, self.measure("best", self.factors(best), journal)

    def chosen(self, journal: Journal) -> tuple[Individual, dict[str, Any]]:
        """The best individual by ``--choose``, of those that were measured in full and worsen no guard."""
        plain = journal.entries[self.uniform(1.0).digest()]
        found = trades([plain, *journal.individuals.values()], self.evaluator)
        for trade in ranked(found, self.args.choose, self.evaluator):
            key, entry = trade.entry["key"], dict(trade.entry)
            if key == plain["key"]:
                break
            individual = Individual(to_points(entry["points"]), entry["origin"])
            if "guards" not in entry and self.guards:  # the search had no use for them
                if (kept := f"guards of {key}") not in journal.entries:
                    factors = self.factors(individual)
                    found = self._compared(plain, self.evaluator(factors), factors)
                    journal.record(kept, {"generation": None, "origin": "--choose", "guards": found})
                entry["guards"] = journal.entries[kept]["guards"]
            if not over(entry):
                return individual, entry
        start = self.optimizer.space.line(1.0, 1.0)
        return Individual(start, "plain"), plain

    @property
    def budget_spent(self) -> bool:
        """Whether ``--budget`` is used up; what an interrupted search spent before counts too."""
        if not getattr(self.args, "budget", None):
            return False
        unit, most = self.args.budget
        return self.spent[unit] >= most

    @property
    def best_uniform(self) -> Factors | None:
        """Of the uniform factors that were measured in full, the fittest; None where there is none but 1."""
        best: tuple[float, Factors] | None = None
        for entry in self.entries.values():
            if "examples" not in entry or "factor" not in entry or entry["factor"] == 1:
                continue
            if best is None or entry["fitness"] > best[0]:
                best = entry["fitness"], self.uniform(entry["factor"])
        return best and best[1]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.evaluator.num_layers

    def factors(self, individual: Individual) -> Factors:
        """An individual's factors, in the form that a factors file keeps."""
        points: Any = individual.points
        if self.args.curve == "free":
            points = [y for _, y in points]
        return Factors.from_curve(
            self.args.curve, points, num_layers=self.num_layers, unscaled_layers=range(self.args.skip)
        )

    def uniform(self, factor: float) -> Factors:
        """Position Interpolation on the layers that are searched."""
        options: dict[str, Any] = {"num_layers": self.num_layers}
        if self.args.skip:
            options["unscaled_layers"] = list(range(self.args.skip))
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
        cutoff, factors = self.cutoff, self.factors(individual)
        known = self.entries.get(factors.digest(), {}).get("examples")
        if known is not None and self.part is not None:
            measured = self.evaluator.only(known, self.part)
        else:
            measured = self.evaluator(factors, cutoff, self.part)
        entry = self.entry_of(measured, factors, self.part)
        entry["seconds"] = round(entry["seconds"] + self.optimizer.asking_seconds, 3)
        return entry | {"cutoff": cutoff.fitness} if cutoff is not None and "stopped_after" in entry else entry

    @property
    def cutoff(self) -> Cutoff | None:
        """What individuals have to reach now."""
        if not self.args.early_stopping or (least := self.optimizer.cutoff) is None:
            return None
        points, fitness = least
        return self._cutoff(fitness, self.entries[self.name(Individual(points, ""))])

    def _cutoff(self, fitness: float, entry: Mapping[str, Any]) -> Cutoff:
        from search.evaluator import Cutoff

        return Cutoff(fitness, entry["examples"], self.args.early_stopping_error if self.by_chance else 0.0)

    @property
    def by_chance(self) -> bool:
        """Whether individuals are given up that could, improbably, have become parents."""
        return bool(self.args.early_stopping == "probable")

    def entry_of(self, measured: Measured, factors: Factors, part: Sequence[int] | None = None) -> dict[str, Any]:
        """What the journal keeps of a measurement on these questions.

        Raises:
            UserError: the fitness is not finite, so nothing can be held against it.
        """
        if not math.isfinite(measured.fitness):
            bad = ", ".join(f"{name} ({value})" for name, value in measured.scores.items() if not math.isfinite(value))
            raise UserError(
                f"the fitness of factors {', '.join(f'{s:g}' for s in factors.per_layer(self.num_layers))} is "
                f"{measured.fitness}, by {bad or 'its weights'}; take a metric that is always finite (--metrics) or, "
                "if the model overflows, a wider dtype (--model_args dtype=float32)"
            )
        entry: dict[str, Any] = {
            "fitness": measured.fitness,
            "scores": measured.scores,
            "seconds": round(measured.seconds, 3),
            "prompts": measured.stopped_after or self.evaluator.asked(part),
        }
        scaled = factors.per_layer(self.num_layers)[self.args.skip :]
        if len(set(scaled)) == 1:
            entry["factor"] = scaled[0]
        if measured.stopped_after:
            entry["stopped_after"] = measured.stopped_after
        else:
            entry["examples"] = measured.examples
            self._guard(entry, measured, factors, part)
        return entry

    def _guard(self, entry: dict[str, Any], measured: Measured, factors: Factors, part: Sequence[int] | None) -> None:
        """Measure the guards of the plain model, and of what is fitter than it and what the optimiser still uses."""
        if not self.guards:
            return
        plain, least = self.entries.get(self.uniform(1.0).digest()), self.optimizer.cutoff
        began = time.perf_counter()
        if plain is None:
            entry["guard_rows"] = {guard.name: guard.rows(factors, measured) for guard in self.guards}
        else:
            beaten = plain["fitness"] if part is None else self.evaluator.only(plain["examples"], part).fitness
            if entry["fitness"] > beaten + 1e-9 and (not least or entry["fitness"] >= least[1] - 1e-9):
                share = 1.0 if part is None else self.optimizer.effort
                entry["guards"] = self._compared(plain, measured, factors, share)
        entry["seconds"] = round(entry["seconds"] + time.perf_counter() - began, 3)

    def _compared(
        self, plain: Mapping[str, Any], measured: Measured, factors: Factors, share: float = 1.0
    ) -> dict[str, Any]:
        return {
            guard.name: guard.check(plain["guard_rows"][guard.name], guard.rows(factors, measured, share))
            for guard in self.guards
        }

    def measure(
        self, name: str, factors: Factors, journal: Journal, to_beat: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Measure factors on all examples, unless the journal knows them; give up what does not beat ``to_beat``."""
        key = factors.digest()
        if key not in journal.entries or (to_beat is None and "examples" not in journal.entries[key]):
            racing = self.args.early_stopping and to_beat is not None
            cutoff = self._cutoff(to_beat["fitness"], to_beat) if racing and to_beat is not None else None
            entry = self.entry_of(self.evaluator(factors, cutoff), factors)
            journal.record(key, {"generation": None, "origin": name, **entry})
        return journal.entries[key]


def load(args: argparse.Namespace, lm: Any = None, kind: type[Optimizer] | None = None) -> Search:
    """Load the model and the tasks, and put the search together.

    Args:
        args: the command line.
        lm: an lm-eval model instead of the one that ``--model_args`` names.
        kind: an optimiser of the caller's instead of the one that ``--optimizer`` names.
    """
    from search.cache import FitnessCache, default_folder
    from search.evaluator import Evaluator
    from search.identity import packages
    from search.tasks import load_tasks

    if not args.include_path:
        plugin.check_examples(args.tasks, args.model_args, args.metadata)
    lm = lm or load_model(args)
    options = {"metadata": metadata_of(args), **task_options(args)}
    objectives = load_tasks(lm, args.tasks, examples=args.examples, **options)
    held_out: Sequence[Objective] = ()
    if args.held_out_examples:  # before the search, as they may be refused
        options["positions"] = None
        try:
            held_out = load_tasks(lm, args.tasks, split="held_out", examples=args.held_out_examples, **options)
        except UserError as error:
            raise UserError(f"held-out examples: {error}; or leave these out (--held_out_examples 0)") from None
    cache = None if args.no_cache else FitnessCache(default_folder())
    evaluator = Evaluator(lm, objectives, cache=cache, **speed_options(args))
    if args.early_stopping and (reason := evaluator.why_unbounded()) is not None:
        logging.getLogger(__name__).warning("every individual is measured in full: %s", reason)
        args.early_stopping = None
    optimizer = make_optimizer(args, evaluator, kind)
    names = [*SETTINGS, *(each.name for each in settings_of(args.optimizer))]
    if args.early_stopping == "probable":  # proof changes nothing about the outcome, so it is no setting
        names += ["early_stopping", "early_stopping_error"]
    settings = {
        "search": {name: getattr(args, name) for name in names},
        "fitness": evaluator.describe(),
        "packages": packages(),
    }
    watched = guards.load(args, evaluator, "search", args.guard_examples, cache)
    settings["fitness"]["guards"] = [
        {"name": guard.name, "max_drop": guard.max_drop, **({} if guard.ends else guard.evaluator.describe())}
        for guard in watched
    ]
    return Search(args, lm, evaluator, optimizer, settings, held_out, guards=watched)


def load_model(args: argparse.Namespace) -> Any:
    """The ``lpes`` model, as lm-eval would make it."""
    from lpes_eval.methods.lpes import LPES

    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(
            f"a search is one process, and this is one of {processes}; start it with python -m search.ga. One model on "
            "several GPUs: --model_args parallelize=True; several searches at once: another --seed on each GPU"
        )
    if "factors" in args.model_args:
        raise UserError("--model_args factors=...: a search makes its own factors; leave them out")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    lm = LPES.create_from_arg_obj(args.model_args, {"batch_size": args.batch_size, "device": args.device})
    if args.batch_size == "auto" and lm.device.type == "cpu":
        # Where lm-eval's own loop answers, it would try out 64 prompts of the model's whole window, and no memory of
        # the machine's is small enough to stop that.
        lm.batch_size_per_gpu = 1
    return lm


def make_optimizer(args: argparse.Namespace, evaluator: Evaluator, kind: type[Optimizer] | None = None) -> Optimizer:
    """The optimiser that was asked for, over the layers that are searched."""
    num_layers = evaluator.num_layers
    if not 0 <= args.skip < num_layers - 1:
        raise UserError(f"--skip {args.skip}: the model has {num_layers} layers, and at least 2 must be left to scale")
    L, grid = num_layers - args.skip, not args.continuous
    space = Space.free(L, grid) if args.curve == "free" else Space(L, args.control_points - 1, grid)
    if kind is not None:
        start = start_points(args, space)
        return kind(space, generations=args.generations, start=start, seed=args.seed)
    optimizer = optimizers.load(args.optimizer)
    config = {each.name: getattr(args, each.name) for each in settings_of(args.optimizer)}
    if args.start == DIVERSE:
        config["diverse"] = True
    return optimizer(
        space,
        optimizer.Config(**config),
        generations=args.generations,
        start=start_points(args, space),
        seed=args.seed,
        model=(evaluator.lm, evaluator.objectives),
    )


def start_points(args: argparse.Namespace, space: Space) -> Points:
    """The control points that ``--start`` stands for; those of a file come to stand on the grid, if there is one."""
    points = args.start
    if points in (None, DIVERSE):
        return space.start()
    if isinstance(points, float | int):
        points = [points] * (space.d + 1)
    if not any(isinstance(point, list) for point in points):
        points = list(zip([x for x, _ in space.start()], points, strict=False))
    points = space.nearest(to_points(points))
    if not space.contains(points):
        xs = f"{'whole ' if space.grid else ''}x from 0 to {space.L - 1}"
        raise UserError(
            f"--start: {[list(point) for point in points]} is not searched; expected {space.d + 1} control points with "
            f"{xs}, and for y {heights(args)}"
        )
    return points
