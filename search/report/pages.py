"""A search's texts: the plan before it, the verdict and the summary after it (``templates/`` holds their words)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_eval.compare.results import Metric
from lpes_eval.compare.tables import finite
from lpes_eval.factors import Factors
from lpes_eval.files import write_atomically
from lpes_eval.report import figures, sources
from search import guards, tradeoff
from search.config import metadata_of
from search.held_out import FOUND, PLAIN, HeldOut, reproduce_command
from search.space import Y_START, Individual, to_points

if TYPE_CHECKING:
    from lpes_eval.compare.statistics import Difference
    from search.run import Search
    from search.tasks import Column

Entry = Mapping[str, Any]


@dataclass
class Outcome:
    """What a search came to.

    Attributes:
        to_beat: the journal's entries of the plain model and of PI.
        best: the journal's entry of the best individual.
        found: its factors.
        held_out: their scores on held-out examples; None where these were left out, or are still to come.
        file: the name of the factors file.
        chosen: whether ``--choose`` took it, so that it need not be the fittest.
    """

    to_beat: dict[str, dict[str, Any]]
    best: dict[str, Any]
    found: Factors
    held_out: HeldOut | None = None
    file: str = "factors.json"
    chosen: bool = False

    @property
    def fitter(self) -> bool:
        """Whether the factors are fitter than the plain model on the search examples, and worsen no guard there.

        What ``--choose`` took has only to be other than the plain model.
        """
        plain = self.to_beat[PLAIN]
        if self.chosen:
            return bool(self.best["key"] != plain["key"])
        return self.best["fitness"] > plain["fitness"] + 1e-9 and not guards.over(self.best)  # sums are rounded

    @property
    def shown(self) -> bool:
        """Whether the factors are better than the plain model, beyond chance where held-out examples say so."""
        held_out = self.held_out
        if held_out is None or not self.fitter:
            return self.fitter
        pairs = [(task, held_out.comparisons.get((task.name, PLAIN))) for task in held_out.tasks]
        compared = [direction(paired.mean, task.sign) for task, paired in pairs if paired]
        if not compared:  # corpus metrics: nothing to pair
            return held_out.measured[FOUND].fitness > held_out.measured[PLAIN].fitness and not held_out.worsened
        return 1 in compared and -1 not in compared and not held_out.worsened


def direction(difference: Difference, sign: int) -> int:
    """1 where the interval shows an improvement, -1 where it shows a loss, 0 where it shows neither."""
    return 0 if difference.by_chance else sign * ((difference.low > 0) - (difference.high < 0))


def seconds(value: float) -> str:
    """A duration as a person would say it."""
    if value < 90:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 90 * 60 else f"{value / 3600:.1f} h"


def label(column: Column, several: bool = True) -> str:
    """A column's name in a table; its position alone where there is one task."""
    if column.position is None:
        return column.name
    task = column.name.rpartition("@")[0]
    return f"{task} {column.position:g} %" if several else f"{column.position:g} %"


def named(search: Search, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries of what there is to beat, under the names that a person reads: of PI also its factor."""
    return {search.pi(Y_START) if name == "PI" else name: entry for name, entry in entries.items()}


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("search.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # plain text and Markdown
    )
    environment.filters |= {
        "finite": math.isfinite,
        "label": label,
        "mean": lambda scores, task: sum(scores[column.name] for column in task.columns) / len(task.columns),
        "seconds": seconds,
        "thousands": "{:,}".format,
    }
    environment.globals |= {"direction": direction, "PLAIN": PLAIN, "FOUND": FOUND}
    return environment


def _render(template: str, search: Search, **values: Any) -> str:
    values |= {
        "search": search,
        "args": search.args,
        "evaluator": search.evaluator,
        "optimizer": search.optimizer,
        "columns": {name: column for name, (_, column) in search.evaluator.columns.items()},
        "model": search.args.model_args.get("pretrained", "the reference model"),
        "held_out_prompts": sum(len(task.task.instances) for task in search.held_out),
    }
    text: str = _templates().get_template(template).render(values)
    return text


def plan(search: Search) -> str:
    """What will be done, before anything is."""
    return _render("plan.txt.j2", search)


def duration(search: Search) -> str:
    """How long the search may take, by one batch that is answered now."""
    prompts, taken = search.evaluator.time_two_batches()
    return _render("duration.txt.j2", search, prompts=prompts, taken=taken)


def to_beat(search: Search, entries: Mapping[str, Entry]) -> str:
    """The fitness of the plain model and of PI, and how long the search may take at their pace."""
    values = {
        "entries": named(search, entries),
        "known": len(search.journal.individuals),
        "pace": entries[PLAIN]["seconds"],
    }
    return _render("to_beat.txt.j2", search, several=len(search.evaluator.objectives) > 1, **values)


def verdict(search: Search, outcome: Outcome) -> str:
    """Whether the factors are worth using, by what was measured, in a few sentences."""
    held_out = outcome.held_out
    text = _render(
        "verdict.txt.j2",
        search,
        outcome=outcome,
        held_out=held_out,
        uniform=len(set(outcome.found.per_layer()[search.args.skip :])) == 1,
        fewest=min(len(set(task.questions)) for task in held_out.tasks) if held_out else 0,
    )
    return " ".join(text.split())


def summary(search: Search, outcome: Outcome) -> str:
    """The summary, in Markdown that also reads well as it is."""
    args, held_out = search.args, outcome.held_out
    individuals = [entry for entry in search.journal.individuals.values() if "failed" not in entry]
    return _render(
        "summary.md.j2",
        search,
        outcome=outcome,
        held_out=held_out,
        search_sample=metadata_of(args)["search_seed"],
        verdict=verdict(search, outcome),
        entries={**named(search, outcome.to_beat), FOUND: outcome.best},
        count=getattr(search.evaluator.engine, "count", None),
        front=[
            (trade, search.factors(Individual(to_points(trade.entry["points"]), "")).per_layer())
            for trade in tradeoff.front(tradeoff.trades(individuals, search.evaluator))
        ],
        command=reproduce_command(args, held_out.tasks, outcome.file) if held_out else "",
        **_totals(search),
    )


def _totals(search: Search) -> dict[str, Any]:
    """What the individuals of a search came to together."""
    individuals = search.journal.individuals.values()
    return {
        "evaluated": len(individuals),
        "stopped_early": sum("stopped_after" in entry for entry in individuals),
        "prompts": sum(entry["prompts"] for entry in individuals),
        "guard_prompts": sum(entry.get("guard_prompts", 0) for entry in individuals),
        "seconds": sum(entry["seconds"] for entry in individuals),
    }


def differences(held_out: HeldOut) -> list[dict[str, Any]]:
    """What the found factors gain over the others, as plain data."""
    signs = {task.name: task.sign for task in held_out.tasks}
    return [
        {
            "task": task,
            "found_minus": name,
            "mean": comparison.mean.difference,
            "interval": [comparison.mean.low, comparison.mean.high],
            "p": comparison.mean.p,
            "questions": comparison.questions,
            **({"lower_is_better": True} if signs[task] < 0 else {}),
        }
        for (task, name), comparison in held_out.comparisons.items()
    ]


def write(search: Search, outcome: Outcome) -> None:
    """``summary.md``, ``report.json`` and the pictures."""
    args, held_out, folder = search.args, outcome.held_out, search.args.output
    write_atomically(folder / "summary.md", summary(search, outcome))
    data: dict[str, Any] = {
        "settings": search.settings,
        "factors": outcome.found.per_layer(),
        "best": {name: value for name, value in outcome.best.items() if name not in ("examples", "ended")},
        "to_beat": {
            name: {key: entry[key] for key in ("key", "fitness", "scores", "seconds", "stopped_after") if key in entry}
            for name, entry in outcome.to_beat.items()
        },
        **_totals(search),
        "finished": held_out is not None or not search.held_out,
    }
    if args.early_stopping == "probable":
        data["stopped_early_error"] = args.early_stopping_error
    if held_out is not None:
        data["guards"] = held_out.guards
        data["held_out"] = {
            name: {"factors": held_out.factors[name].per_layer(), "scores": measured.scores}
            for name, measured in held_out.measured.items()
        }
        data["differences"] = differences(held_out)
    write_atomically(folder / "report.json", json.dumps(finite(data), indent=2, allow_nan=False) + "\n")
    draw(folder, outcome)


def draw(folder: Path, outcome: Outcome) -> None:
    """The pictures, which are those of `lpes-eval report`."""
    search, at, factors = sources.search(folder.name, folder), "{:g} %".format, outcome.found
    drawn = {
        "convergence": figures.progress(search),
        "tradeoff": figures.tradeoff(search),
        "curve": figures.factors([(folder.name, 0, factors.per_layer(), factors.control_points())]),
    }
    held_out = outcome.held_out
    for task in held_out.tasks if held_out else ():
        if task.by_position:
            lines = []
            for place, (name, measured) in enumerate(held_out.measured.items()):  # type: ignore[union-attr]
                values = {at(column.position): measured.scores[column.name] for column in task.columns}
                scores = {at(column.position): tuple(measured.examples[column.name]) for column in task.columns}
                lines.append((name, place, Metric(True, values, scores)))
            drawn[f"positions-{task.name}"] = figures.positions(f"{task.name}, {task.metric}", lines)
    for name, picture in drawn.items():
        if picture is not None:
            replace(picture, name=name).save(folder, ("png",))
