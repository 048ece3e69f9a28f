"""A search's texts: the plan before it, the verdict and the summary after it (``templates/`` holds their words)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from lpes_eval.factors import Factors
from lpes_eval.files import write_atomically
from search import tradeoff
from search.config import DIVERSE, metadata_of
from search.guards import over
from search.held_out import FOUND, PLAIN, HeldOut, reproduce_command
from search.report import pictures
from search.space import Y_START, Individual, to_points

if TYPE_CHECKING:
    from search.journal import Journal
    from search.run import Search
    from search.tasks import Column, Objective

Entry = Mapping[str, Any]
FEW_QUESTIONS = 100
"""Of fewer questions the intervals are too narrow (docs/statistics.md)."""


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
    file: str = field(default="factors.json")
    chosen: bool = False

    @property
    def fitter(self) -> bool:
        """Whether the factors are fitter than the plain model on the search examples, and worsen no guard there.

        What was chosen by something else than the fitness has only to be other than the plain model.
        """
        if self.chosen:
            return self.best["key"] != self.to_beat[PLAIN]["key"]
        least = self.to_beat[PLAIN]["fitness"] + 1e-9  # sums are rounded
        return bool(self.best["fitness"] > least) and not over(self.best)

    @property
    def shown(self) -> bool:
        """Whether the factors are better than the plain model, beyond chance where held-out examples say so."""
        if not self.fitter or self.held_out is None:
            return self.fitter
        if self.held_out.worsened:
            return False
        against = {
            task.name: self.held_out.comparisons[task.name, PLAIN].mean
            for task in self.held_out.tasks
            if (task.name, PLAIN) in self.held_out.comparisons
        }
        if not against:  # corpus metrics: nothing to pair
            plain, found = (self.held_out.measured[name].fitness for name in (PLAIN, FOUND))
            return found > plain
        signs = {task.name: task.sign for task in self.held_out.tasks}
        better = [min(signs[name] * d.low, signs[name] * d.high) > 0 for name, d in against.items()]
        worse = [max(signs[name] * d.low, signs[name] * d.high) < 0 for name, d in against.items()]
        return any(better) and not any(worse)


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("search.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # plain text and Markdown
    )


def _render(template: str, **values: Any) -> str:
    text: str = _templates().get_template(template).render(values)
    return text


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


def shown_name(search: Search, name: str) -> str:
    """What there is to beat, under the name that a person reads: of PI also its factor."""
    return search.pi(Y_START) if name == "PI" else name


def _model(search: Search) -> str:
    return str(search.args.model_args.get("pretrained", "the reference model"))


def plan(search: Search) -> str:
    """What will be done, before anything is."""
    args, evaluator, optimizer = search.args, search.evaluator, search.optimizer
    answers = "shared prefixes prefilled once"
    if evaluator.slow_because is not None:
        answers = f"by lm-eval's own loop, because {evaluator.slow_because}"
        if args.batch_size == "auto" and search.lm.batch_size == 1:
            answers += "; one prompt at a time (--batch_size N for more)"
    start = args.start
    if isinstance(start, float | int):
        start = f"{start:g} in every layer"
    elif isinstance(start, list):
        start = ", ".join(f"{y:.4g}" for _, y in optimizer.start)
    early = ""
    if args.early_stopping:
        early = f"hardly can (error {args.early_stopping_error:g})" if search.by_chance else "cannot"
    return (
        _render(
            "plan.txt.j2",
            model=_model(search),
            layers=search.num_layers,
            skip=args.skip,
            curve="one factor a layer" if args.curve == "free" else f"{args.curve}, {args.control_points} points",
            continuous=args.continuous,
            optimizer=args.optimizer,
            start="" if start == DIVERSE else start,
            seed=args.seed,
            generations=optimizer.generations,
            individuals=optimizer.max_evaluations,
            more=optimizer.plan(),
            prompts=evaluator.prompts,
            tokens=evaluator.prompt_tokens,
            columns=[(column, objective) for objective, column in evaluator.columns.values()],
            early_stopping=early,
            answers=answers,
            total=most_prompts(search),
            held_out=_asked(search.held_out),
            output=args.output,
        )
        + "\n"
    )


def most_prompts(search: Search) -> int:
    """How many prompts the search may ask, those of its last evaluation apart."""
    return (search.optimizer.max_evaluations + 2) * search.evaluator.prompts


def _expected_prompts(search: Search) -> int:
    """About how many, if every individual answers them all."""
    return round((search.optimizer.expected_effort + 2) * search.evaluator.prompts)


def _asked(tasks: Sequence[Objective]) -> int:
    return sum(len(task.task.instances) for task in tasks)


def duration(search: Search) -> str:
    """How long the search may take, by one batch that is answered now."""
    timed = search.evaluator.time_a_batch()
    if timed is None:
        return "Time         not known: there are no prompts to time"
    prompts, taken = timed
    each = taken / prompts
    return (
        f"Time         {prompts} prompts took {seconds(taken)} under the plain model, so about "
        f"{seconds(each * _expected_prompts(search))} to search and {seconds(each * 3 * _asked(search.held_out))} to "
        "evaluate"
        + "".join(f", not counting {line}" for line in search.optimizer.plan() if search.args.curve == "free")
    )


def to_beat(search: Search, entries: Mapping[str, Entry], journal: Journal) -> str:
    """The fitness of the plain model and of PI, and how long the search may take at their pace."""
    lines = ["To beat:"]
    columns = {name: column for name, (_, column) in search.evaluator.columns.items()}
    several = len(search.evaluator.objectives) > 1
    for name, entry in entries.items():
        scores = "  ".join(f"{label(column, several)}: {entry['scores'][key]:.3f}" for key, column in columns.items())
        lines.append(f"  {shown_name(search, name):9} fitness {entry['fitness']:.4f}   {scores}")
    known = len(journal.individuals)
    if known > 0:
        lines.append(f"  {known} individuals are already in the journal and will not be measured again")
    pace = entries[PLAIN]["seconds"]
    left = search.optimizer.expected_effort * (1 - known / search.optimizer.expected_evaluations)
    if pace > 0 and left > 0:
        each = pace / search.evaluator.prompts
        line = f"About {seconds(pace * left)} to search at the plain model's pace"
        if search.held_out:
            line += f", and then {seconds(each * 3 * _asked(search.held_out))} for the held-out evaluation"
        lines.append(line + ".")
    return "\n".join(lines) + "\n"


def verdict(search: Search, outcome: Outcome) -> str:
    """Whether the factors are worth using, by what was measured, in a few sentences."""
    plain, here, held_out = outcome.to_beat[PLAIN]["fitness"], outcome.best["fitness"], outcome.held_out
    if not outcome.fitter:
        guarded = " without making a guard worse" if search.guards else ""
        return (
            f"Verdict: no individual is fitter than the plain model{guarded}, on the search examples ({here:.4f} "
            f"against {plain:.4f}), so these factors are not worth using. Start elsewhere (--start), search longer, or "
            "choose examples that the plain model gets wrong more often."
        )
    parts = [f"fitter than the plain model on the search examples ({here:.4f} against {plain:.4f})"]
    if held_out is None:
        parts.append("not measured on held-out examples, so nobody knows how much of that is luck")
    else:
        for task in held_out.tasks:
            against = [
                _against(name, comparison, task.sign)
                for (of, name), comparison in held_out.comparisons.items()
                if of == task.name
            ]
            if against:
                parts.append(f"on held-out examples of {task.title} {' and '.join(against)}")
    text = "Verdict: the factors are " + "; ".join(parts) + "."
    if held_out is not None and held_out.worsened:
        text += f" But they make {', '.join(held_out.worsened)} worse."
    if held_out is not None and not outcome.shown:
        text += " So it is not shown that they help; do not use them."
    if len(set(outcome.found.per_layer()[search.args.skip :])) == 1:
        text += " They are one number for all layers, so this is Position Interpolation."
    if held_out is not None:
        fewest = min(len(set(task.questions)) for task in held_out.tasks)
        if fewest < FEW_QUESTIONS:
            text += f" Intervals of {fewest} questions are too narrow; ask {FEW_QUESTIONS} (--held_out_examples)."
    return text


def _against(name: str, comparison: Any, sign: int) -> str:
    """How the factors compare with what is called ``name``, on examples that the search has not seen."""
    low, high = sorted((sign * comparison.mean.low, sign * comparison.mean.high))
    better = "better than" if low > 0 else "worse than" if high < 0 else "not clearly better or worse than"
    return f"{better} {'the plain model' if name == PLAIN else name} ({_with_interval(comparison.mean, short=True)})"


def _with_interval(difference: Any, short: bool = False) -> str:
    """A difference and its interval, which one question does not give."""
    if not math.isfinite(difference.low):
        return f"{difference.difference:+.4f}" + ("" if short else ", without an interval, as one question gives none")
    interval = f"[{difference.low:+.4f}, {difference.high:+.4f}]"
    return f"{difference.difference:+.4f}{' ' if short else ', 95 % interval '}{interval}"


def summary(search: Search, journal: Journal, outcome: Outcome) -> str:
    """The summary, in Markdown that also reads well as it is."""
    args, evaluator = search.args, search.evaluator
    entries = {**{shown_name(search, name): entry for name, entry in outcome.to_beat.items()}, FOUND: outcome.best}
    columns = {name: column for name, (_, column) in evaluator.columns.items()}
    individuals = list(journal.individuals.values())
    count = getattr(evaluator.engine, "count", None)
    cost = None
    if count is not None and count.answers:
        percent = round(100 * count.shared / (count.shared + count.prefilled))
        cost = {"tokens": count.tokens, "shared_percent": percent}
    held_out = outcome.held_out
    return _render(
        "summary.md.j2",
        tasks=", ".join(args.tasks),
        model=_model(search),
        optimizer=args.optimizer,
        seed=args.seed,
        search_seed=metadata_of(args)["search_seed"],
        verdict=verdict(search, outcome),
        factors=", ".join(f"{s:.3f}" for s in outcome.found.per_layer()),
        prompts=evaluator.prompts,
        search_table=_markdown(
            ["", "fitness", *(label(column) for column in columns.values())],
            [
                [name, f"{entry['fitness']:.4f}", *(f"{entry['scores'][key]:.3f}" for key in columns)]
                for name, entry in entries.items()
            ],
        ),
        evaluated=len(individuals),
        stopped=sum("stopped_after" in entry for entry in individuals),
        by_chance=search.by_chance,
        error=f"{100 * args.early_stopping_error:g}",
        asked=_prompts_asked(search, individuals),
        cost=cost,
        held_out=[_held_out_section(task, held_out) for task in held_out.tasks] if held_out else [],
        guards=_guards(held_out) if held_out and held_out.guards else "",
        trades=_trades(search, individuals, outcome),
        command=reproduce_command(args, held_out.tasks, outcome.file) if held_out else "",
    )


def _trades(search: Search, individuals: Sequence[Entry], outcome: Outcome) -> str:
    """The individuals that no other one beats in mean, worst position and guards; empty where there is no choice."""
    best = tradeoff.front(tradeoff.trades(individuals, search.evaluator))
    if len(best) < 2 or len(search.evaluator.columns) < 2:
        return ""
    rows = []
    for trade in best:
        factors = search.factors(Individual(to_points(trade.entry["points"]), "")).per_layer()
        guards = "worse" if trade.harm else "ok" if "guards" in trade.entry else ""
        ends = "this search ends with it" if trade.entry["key"] == outcome.best["key"] else ""
        values = ", ".join(f"{s:.4g}" for s in factors)
        rows.append([f"{trade.mean:.3f}", f"{trade.worst:.3f}", guards, values, ends])
    return _markdown(["mean", "worst", "guards", "factors", ""], rows)


def _guards(held_out: HeldOut) -> str:
    rows = []
    for name, guard in held_out.guards.items():
        low, high = guard["interval"]
        verdict = "worse" if guard["over"] else "ok"
        change = f"{guard['found'] - guard['plain']:+.4f}" + (f" [{low:+.4f}, {high:+.4f}]" if low is not None else "")
        rows.append([name, f"{guard['plain']:.4f}", f"{guard['found']:.4f}", change, verdict])
    return _markdown(["guard", PLAIN, FOUND, "difference", ""], rows)


def _held_out_section(task: Objective, held_out: HeldOut) -> dict[str, Any]:
    examples, questions = len(task.docs), len(set(task.questions))
    asked = f"{questions} question" + "s" * (questions != 1)
    rows = []
    for name, measured in held_out.measured.items():
        values = [measured.scores[column.name] for column in task.columns]
        rows.append([name, f"{sum(values) / len(values):.4f}", *(f"{v:.3f}" for v in values if task.by_position)])
    differences = []
    for (of, name), comparison in held_out.comparisons.items():
        if of == task.name:
            text = f"{FOUND} minus {name}, paired by question: {_with_interval(comparison.mean)}"
            if task.by_position:
                text += f"; worst position {_with_interval(comparison.worst, short=True)}"
            differences.append(text)
    if questions < examples:
        differences.append(
            "Examples that share a question are averaged before they are paired, and every question counts the same; "
            "the table counts every example."
        )
    return {
        "title": task.title,
        "asked": f"{examples} examples of {asked}" if questions < examples else asked,
        "table": _markdown(["", "mean", *(label(c, several=False) for c in task.columns if task.by_position)], rows),
        "differences": differences,
    }


def _prompts_asked(search: Search, individuals: Sequence[Entry]) -> int:
    return sum(entry["prompts"] for entry in individuals)


def write(search: Search, journal: Journal, outcome: Outcome) -> None:
    """``summary.md``, ``report.json`` and the pictures."""
    folder, held_out = search.args.output, outcome.held_out
    write_atomically(folder / "summary.md", summary(search, journal, outcome))
    individuals = list(journal.individuals.values())
    stopped = [entry for entry in individuals if "stopped_after" in entry]
    data: dict[str, Any] = {
        "settings": search.settings,
        "factors": outcome.found.per_layer(),
        "best": {name: value for name, value in outcome.best.items() if name != "examples"},
        "to_beat": {
            name: {key: entry[key] for key in ("key", "fitness", "scores", "seconds")}
            for name, entry in outcome.to_beat.items()
        },
        "evaluated": len(individuals),
        "stopped_early": len(stopped),
        "prompts": _prompts_asked(search, individuals),
        "seconds": sum(entry["seconds"] for entry in individuals),
    }
    if search.by_chance:
        data["stopped_early_error"] = search.args.early_stopping_error
    if held_out is not None:
        data["guards"] = held_out.guards
        data["held_out"] = {
            name: {"factors": held_out.factors[name].per_layer(), "scores": measured.scores}
            for name, measured in held_out.measured.items()
        }
        data["differences"] = [
            {
                "task": task,
                "found_minus": name,
                "mean": comparison.mean.difference,
                "interval": [comparison.mean.low, comparison.mean.high],
                "p": comparison.mean.p,
                "questions": comparison.questions,
            }
            for (task, name), comparison in held_out.comparisons.items()
        ]
    write_atomically(folder / "report.json", json.dumps(_plain(data), indent=2, allow_nan=False) + "\n")
    names = {name: shown_name(search, name) for name in outcome.to_beat}
    pictures.convergence(folder, individuals, {names[name]: entry for name, entry in outcome.to_beat.items()})
    pictures.tradeoff(folder, search, individuals, outcome)
    pictures.curve(folder, outcome.found.per_layer())
    if held_out is not None:
        for task in held_out.tasks:
            if task.by_position:
                pictures.positions(folder, task, held_out.measured)


def _plain(data: Any) -> Any:
    """The same data with null for what JSON has no number for."""
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)) + " |"
        for cells in lines
    )
