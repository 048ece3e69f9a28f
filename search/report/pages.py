"""A search's texts: the plan before it, the verdict and the summary after it (``templates/`` holds their words)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from lpes_eval.compare.results import Metric
from lpes_eval.compare.tables import finite, p_value
from lpes_eval.entries import Entry
from lpes_eval.files import write_atomically
from lpes_eval.report import figures, sources
from search.held_out import FOUND, PLAIN, Outcome, direction, reproduce_command, smallest_gain

if TYPE_CHECKING:
    from lpes_eval.compare.statistics import Difference
    from search.run import Search
    from search.tasks import Column


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


def short(difference: Difference) -> str:
    """A paired difference and its 95 % interval, which a single question does not give."""
    interval = f" [{difference.low:+.4f}, {difference.high:+.4f}]" if math.isfinite(difference.low) else ""
    return f"{difference.difference:+.4f}{interval}"


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("search.report"), undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = environment.keep_trailing_newline = True
    environment.filters |= {
        "direction": direction,
        "label": label,
        "p_value": p_value,
        "mean": lambda scores, task: sum(scores[column.name] for column in task.columns) / len(task.columns),
        "short": short,
        "thousands": "{:,}".format,
    }
    environment.globals |= {"PLAIN": PLAIN, "FOUND": FOUND}
    return environment


def render(template: str, **values: Any) -> str:
    """A text of a template."""
    return str(_templates().get_template(template).render(values))


def _of(search: Search) -> dict[str, Any]:
    return {
        "search": search,
        "args": search.args,
        "evaluator": search.evaluator,
        "optimizer": search.optimizer,
        "columns": {name: column for name, (_, column) in search.evaluator.columns.items()},
        "model": search.args.model_args.get("pretrained", "the reference model"),
        "held_out_prompts": _held_out_prompts(search),
    }


def _held_out_prompts(search: Search) -> int:
    return sum(len(task.task.instances) for task in search.held_out)


def plan(search: Search) -> str:
    """What will be done, before anything is."""
    notes = dict.fromkeys(task.note for task in [*search.evaluator.objectives, *search.held_out] if task.note)
    return render("plan.txt.j2", notes=list(notes), **_of(search))


def duration(search: Search) -> str:
    """How long the search may take, by two batches that are answered now."""
    prompts, taken = (search.pool or search.bench).time_two_batches()
    also = f", not counting {search.optimizer.also}" if search.optimizer.also else ""
    effort = search.optimizer.expected_effort + 1
    return f"Time         {prompts} prompts took {seconds(taken)}, so {_time(search, effort, taken / prompts)}{also}\n"


def _time(search: Search, effort: float, pace: float) -> str:
    """How long so many individuals take at so many seconds a prompt, and the held-out examples after them."""
    prompts = effort * search.evaluator.prompts
    unit, most = search.args.budget or ("prompts", math.inf)
    allowed = most / pace if unit == "seconds" else most
    text = f"about {seconds(min(prompts, allowed) * pace)} to search"
    if allowed < prompts:
        text += f", when the budget ends it ({seconds(prompts * pace)} without a budget)"
    held_out = seconds(3 * _held_out_prompts(search) * pace)
    return text + (f", and then {held_out} for the held-out evaluation" if search.held_out else "")


def to_beat(search: Search, plain: Entry) -> str:
    """The fitness of the plain model, and how long the search may take at its pace."""
    optimizer, known = search.optimizer, len(search.journal.individuals)
    left = optimizer.expected_effort * (1 - known / optimizer.max_evaluations)
    pace = plain.seconds / max(1, plain.prompts + plain.guard_prompts) / (len(search.pool) if search.pool else 1)
    idle = [
        guard.name
        for guard in search.guards
        if not any(plain.guard_rows[guard.name]) and all(task.sign > 0 for task in guard.evaluator.objectives)
    ]
    time = f"At the plain model's pace {_time(search, left, pace)}." if pace > 0 and left > 0 else ""
    several = len(search.evaluator.objectives) > 1
    values = {"plain": plain, "known": known, "time": time, "idle": idle, "several": several}
    return render("to_beat.txt.j2", **values, **_of(search))


def verdict(search: Search, outcome: Outcome) -> str:
    """What ended the search and what can be concluded, in a few sentences."""
    held_out = outcome.held_out
    questions = [len({*task.questions}) for task in held_out.tasks] if held_out else [math.inf]
    text = render(
        "verdict.txt.j2",
        **_of(search),
        outcome=outcome,
        held_out=held_out,
        number=len(search.journal.individuals),
        gains=_smallest_gains(search, outcome),
        is_uniform=len(set(outcome.found.per_layer()[search.args.skip :])) == 1,
        fewest=min(questions),
    )
    return " ".join(text.splitlines())


def _smallest_gains(search: Search, outcome: Outcome) -> list[str]:
    """What gain would have been seen, by task: on held-out examples, otherwise on those of the search."""
    if held_out := outcome.held_out:
        tasks, where = held_out.tasks, "held-out examples"
        plain, other = held_out.measured[PLAIN], held_out.measured.get(FOUND)
    else:
        tasks, where, plain = search.evaluator.objectives, "search examples", outcome.plain
        individuals = (one for one in search.journal.individuals if one.examples and one.measure == "score")
        others = [entry for entry in individuals if entry.factor != 1.0]
        if not others and search.optimizer.said:
            return []
        other = max(others, key=lambda entry: (entry.prompts, entry.fitness), default=None)
    gains = {task.title: smallest_gain(task, plain, other) for task in tasks}
    text = "{}: a gain of less than {:.4f} may have gone unseen on these {}."
    return [text.format(title, gain, where) for title, gain in gains.items() if gain is not None]


def summary(search: Search, outcome: Outcome) -> str:
    """The summary, in Markdown that also reads well as it is."""
    args, held_out = search.args, outcome.held_out
    return render(
        "summary.md.j2",
        **_of(search),
        outcome=outcome,
        held_out=held_out,
        search_sample=args.metadata.get("search_seed", args.search_seed),
        verdict=verdict(search, outcome),
        entries={PLAIN: outcome.plain} | ({} if outcome.nothing else {FOUND: outcome.best}),
        command=reproduce_command(args, held_out.tasks, outcome.file) if held_out else "",
        **_totals(search),
    )


def _totals(search: Search) -> dict[str, Any]:
    individuals = search.journal.individuals
    return {
        "evaluated": len(individuals),
        "stopped_early": sum(entry.stopped_after > 0 for entry in individuals),
        "prompts": sum(entry.prompts for entry in individuals),
        "guard_prompts": sum(entry.guard_prompts for entry in individuals),
        "seconds": sum(entry.seconds for entry in individuals),
    }


def write(search: Search, outcome: Outcome, finished: bool = True) -> None:
    """``summary.md``, ``report.json`` and the pictures; not ``finished`` before held-out examples that are to come."""
    args, held_out, folder = search.args, outcome.held_out, search.args.output
    write_atomically(folder / "summary.md", summary(search, outcome))
    shown = ("key", "fitness", "scores", "seconds", "stopped_after")
    data: dict[str, Any] = {
        "settings": search.settings,
        "factors": outcome.found.per_layer(),
        "best": {key: value for key, value in to_builtins(outcome.best).items() if key not in ("examples", "ended")},
        "plain": {key: value for key, value in to_builtins(outcome.plain).items() if key in shown},
        **_totals(search),
        "finished": finished,
    }
    if args.early_stopping:
        data["stopped_early_error"] = args.early_stopping_error
    if held_out is not None:
        data |= held_out.proof()
        data["held_out"] = {
            name: {"factors": held_out.factors[name].per_layer(), "scores": measured.scores}
            for name, measured in held_out.measured.items()
        }
    write_atomically(folder / "report.json", json.dumps(finite(data), indent=2, allow_nan=False) + "\n")
    draw(folder, outcome)


def draw(folder: Path, outcome: Outcome) -> None:
    """The pictures, which are those of `lpes-eval report`."""
    search, factors, held_out = sources.search(folder.name, folder), outcome.found, outcome.held_out
    drawn = {"convergence": figures.progress(search), "tradeoff": figures.tradeoff(search)}
    if not outcome.nothing:
        drawn["curve"] = figures.factors([(folder.name, 0, factors.per_layer())])
    for task in [task for task in held_out.tasks if task.by_position] if held_out else ():
        lines = []
        for place, (name, measured) in enumerate(held_out.measured.items()):  # type: ignore[union-attr]
            at = {f"{column.position:g} %": column.name for column in task.columns}
            values = {label: measured.scores[column] for label, column in at.items()}
            scores = {label: list(measured.examples[column]) for label, column in at.items()}
            lines.append((name, place, Metric(True, values, scores)))
        drawn[f"positions-{task.name}"] = figures.positions(f"{task.name}, {task.metric}", lines)
    for name, picture in drawn.items():
        if picture is not None:
            replace(picture, name=name).save(folder, ("png",))
