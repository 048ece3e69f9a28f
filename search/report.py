"""What a person sees of a search: the plan, its progress, and at the end a summary, a table and pictures."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lpes_eval.compare.compare import FEW_QUESTIONS
from lpes_eval.factors import Factors
from lpes_eval.files import write_atomically
from search.arguments import metadata_of
from search.held_out import FOUND, HeldOut, groups, reproduce_command
from search.optimizer import Y_START, Individual

if TYPE_CHECKING:
    from search.journal import Journal
    from search.setup import Search

Entry = Mapping[str, Any]
Watch = Callable[[Individual, dict[str, Any], bool], None]


def seconds(value: float) -> str:
    """A duration as a person would say it."""
    if value < 90:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 90 * 60 else f"{value / 3600:.1f} h"


def label(part: Any) -> str:
    """A part's name, short where its position says it all."""
    return part.name if part.position is None else f"{part.name.rpartition('_pos_')[0]} {part.position:g} %"


def titled(part: Any) -> str:
    """The name that a part shares with other positions of its task, and its data's where these have one."""
    source = (part.task.config.metadata or {}).get("source")
    data = source["name"] if isinstance(source, Mapping) and source["name"] != source["kind"] else ""
    return f"{part.stem} ({data})" if data else part.stem


def plan(search: Search) -> str:
    """What will be done, before anything is."""
    args, fitness, optimizer = search.args, search.fitness, search.optimizer
    points = "one factor a layer" if args.curve == "free" else f"{args.curve}, {args.control_points} control points"
    tokens = fitness.prompt_tokens
    how = "drafted and checked, shared prefixes prefilled once"
    off = {"drafts": args.no_drafts, "lookup": args.no_lookup, "shared prefixes": args.no_shared_prefixes}
    if any(off.values()):
        how = "without " + " or ".join(name for name, is_off in off.items() if is_off)
    if fitness.slow_because is not None:
        how = f"by lm-eval's own loop, because {fitness.slow_because}"
        if args.batch_size == "auto" and search.lm.batch_size == 1:
            how += "; one prompt at a time (--batch_size N for more)"
    start = args.start
    if isinstance(start, float):
        start = f"from {start:g} in every layer"
    elif start != "wide":
        start = "from " + ", ".join(f"{y:.4g}" for _, y in search.start)
    lines = [
        f"Model        {args.model_args.get('pretrained', 'the reference model')}, {search.num_layers} layers"
        + (f", the first {args.skip} left alone" if args.skip else ""),
        f"Curve        {points}, {'continuous' if args.continuous else 'on the grid of Table 9'}",
        f"Optimizer    {args.optimizer}, seed {args.seed}, {optimizer.last_generation} generations after the first, "
        f"at most {optimizer.max_evaluations} individuals"
        + ("" if args.optimizer == "random" else ", a start of wide origin" if start == "wide" else f", {start}"),
        f"Fitness      {fitness.prompts} prompts an individual"
        + (f", {tokens:,} tokens" if tokens is not None else ""),
    ]
    for part in fitness.parts:
        sign = "" if part.sign > 0 else ", lower is better"
        lines.append(
            f"             {part.weight:.3f} x {part.metric} of {label(part)} ({len(part.docs)} examples{sign})"
        )
    for named in dict.fromkeys(titled(part) for part in fitness.parts if titled(part) != part.stem):
        lines.append(f"Data         {named}")
    if args.early_stopping:
        chance = "cannot" if not search.by_chance else f"hardly can (error {args.early_stopping_error:g})"
        lines.append(f"Given up     what {chance} become a parent, while it is measured")
    total = most_prompts(search)
    lines += [
        f"Answers      {how}",
        f"In all       at most {total:,} prompts"
        + (f", {total // fitness.prompts * tokens:,} tokens" if tokens is not None else "")
        + "; equal factors are measured once",
    ]
    if args.early_stopping_check:
        lines[-1] += f"; {args.early_stopping_check * fitness.prompts:,} of these to check what was given up"
    if args.optimizer == "gradient":
        samples = optimizer.epoch_samples  # type: ignore[attr-defined]
        lines.append(
            f"             and {args.epochs} x {samples:,} examples forwards and backwards: an epoch is "
            f"{samples // args.gradient_batch} whole batches of {args.gradient_batch}"
        )
    if search.held_out:
        asked = sum(len(part.task.instances) for part in search.held_out)
        lines.append(f"             and {3 * asked:,} held-out prompts at the end: {asked:,}, under three factors")
    lines.append(f"Output       {args.output}")
    return "\n".join(lines) + "\n"


def most_prompts(search: Search) -> int:
    """How many prompts the search may ask, those of its last evaluation apart."""
    return (search.optimizer.max_evaluations + 2 + search.args.early_stopping_check) * search.fitness.prompts


def duration(search: Search) -> str:
    """How long the search may take, by one batch that is answered now."""
    timed = search.fitness.time_a_batch()
    if timed is None:
        return "Time         not known: lm-eval's own loop answers"
    prompts, taken = timed
    asked = 3 * sum(len(part.task.instances) for part in search.held_out)
    each = taken / prompts
    return (
        f"Time         {prompts} prompts took {seconds(taken)} under the plain model, so at most about "
        f"{seconds(each * most_prompts(search))} to search and {seconds(each * asked)} to evaluate"
        + (", not counting the descent" if search.args.optimizer == "gradient" else "")
    )


def scores(search: Search, entry: Entry) -> str:
    """An entry's scores, position by position; with the task's name where there are several."""
    parts = search.fitness.parts
    several = len(groups(parts)) > 1
    return "  ".join(
        f"{label(part) if several or part.position is None else f'{part.position:g}%'}: "
        f"{entry['scores'][part.name]:.3f}"
        for part in parts
    )


def _shown(search: Search, name: str) -> str:
    """What there is to beat, under the name that a person reads: of PI also its factor."""
    return search.pi(Y_START) if name == "PI" else name


def to_beat(search: Search, entries: Mapping[str, Entry], journal: Journal) -> str:
    """The fitness of the plain model and of PI, and how long the search may take at their pace."""
    lines = ["To beat:"]
    for name, entry in entries.items():
        lines.append(f"  {_shown(search, name):9} fitness {entry['fitness']:.4f}   {scores(search, entry)}")
    optimizer, known = search.optimizer, len(journal.individuals)
    if known > 0:
        lines.append(f"  {known} individuals are already in the journal and will not be evaluated again")
    paces = [entry["seconds"] for entry in entries.values() if entry["seconds"] > 0]
    left = optimizer.max_evaluations - max(known, optimizer.told_so_far)
    if optimizer.done:
        lines.append("The search itself is at its end.")
    elif paces and left > 0:
        also = "drafts make later individuals faster, and equal factors are measured once"
        if search.args.optimizer == "gradient":
            also = "the passes for the gradient come on top"
        lines.append(f"About {seconds(statistics.fmean(paces) * left)} to go at this pace; {also}.")
    return "\n".join(lines) + "\n"


class _Tally:
    """How far a search is."""

    def __init__(self, search: Search, to_beat: Mapping[str, Entry], before: Sequence[Entry] = ()) -> None:
        self.search, self.to_beat = search, to_beat
        self.before = [entry for entry in before if entry.get("generation") is not None]  # an interrupted run's
        self.asked, self.measured, self.spent = 0, 0, 0.0
        self.first: list[float] = []  # the fitness of the initial population
        self.note = ""
        self.best: Entry | None = max(self.before, key=lambda entry: entry["fitness"], default=None)

    def add(self, entry: Entry, new: bool) -> None:
        if self.asked == 0:  # generations that were completed are not asked for again
            generation = self.search.optimizer.generation
            earlier = sum(entry["generation"] < generation for entry in self.before)
            self.asked = self.search.optimizer.told_so_far or earlier
        self.asked += 1
        if new and entry["seconds"] > 0:  # a cache knows others, which says nothing about those to come
            self.measured += 1
            self.spent += entry["seconds"]
        if self.best is None or entry["fitness"] > self.best["fitness"]:
            self.best = entry
        self.note = ""
        if self.search.optimizer.generation == 0:
            self.first.append(entry["fitness"])
        elif len(self.first) > 1:
            if len(set(self.first)) == 1 and self.search.args.optimizer == "ga":
                self.note = (
                    f"note: all {len(self.first)} individuals of the first generation have fitness {self.first[0]:.4f}"
                    ", so parents are drawn by lot; --start or --skip may find better ground (docs/search.md)"
                )
            self.first = []

    @property
    def eta(self) -> str:
        if self.measured == 0:
            return "-"
        left = self.search.optimizer.max_evaluations - self.asked
        return "about " + seconds(left * self.spent / self.measured)

    @property
    def pace(self) -> str:
        if self.spent == 0:
            return "-"
        return f"{self.measured * self.search.fitness.prompts / self.spent:.1f} prompts/s"

    @property
    def place(self) -> str:
        optimizer = self.search.optimizer
        return f"generation {optimizer.generation}/{optimizer.last_generation}"


@contextmanager
def progress(search: Search, journal: Journal, to_beat: Mapping[str, Entry]) -> Iterator[Watch]:
    """Show each individual: a live display in a terminal, a line each elsewhere."""
    tally = _Tally(search, to_beat, list(journal.entries.values()))
    if not sys.stdout.isatty():

        def line(individual: Individual, entry: dict[str, Any], new: bool) -> None:
            tally.add(entry, new)
            if tally.note:
                print(tally.note, flush=True)
            best = tally.best["fitness"] if tally.best else 0.0
            took = seconds(entry["seconds"]) if new and entry["seconds"] > 0 else "known"
            print(
                f"{tally.place}  individual {tally.asked}  {individual.origin:9}  fitness {entry['fitness']:.4f}  "
                f"best {best:.4f}  {took}  left {tally.eta}",
                flush=True,
            )

        yield line
        return

    from rich.live import Live

    with Live(_table(tally, None), refresh_per_second=4) as live:

        def show(individual: Individual, entry: dict[str, Any], new: bool) -> None:
            tally.add(entry, new)
            if tally.note:
                live.console.print(tally.note)
            live.update(_table(tally, entry))

        yield show


def _table(tally: _Tally, last: Entry | None) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    search = tally.search
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("fitness", justify="right")
    for part in search.fitness.parts:
        table.add_column(label(part), justify="right")
    rows = [
        *((_shown(search, name), entry) for name, entry in tally.to_beat.items()),
        ("best so far", tally.best),
        ("this one", last),
    ]
    for name, entry in rows:
        if entry is not None:
            values = [f"{entry['scores'][part.name]:.3f}" for part in search.fitness.parts]
            table.add_row(name, f"{entry['fitness']:.4f}", *values)
    total = search.optimizer.max_evaluations
    bar = ProgressBar(total=total, completed=tally.asked, width=50)
    head = f"{tally.place}   individual {tally.asked} of at most {total}   {tally.pace}   left {tally.eta}"
    return Group(head, bar, table)


# -- at the end --------------------------------------------------------------------------------------------------------


def summary(
    search: Search,
    journal: Journal,
    to_beat: Mapping[str, Entry],
    best: Entry,
    found: Factors,
    held_out: HeldOut | None,
) -> str:
    """The summary, in Markdown that also reads well as it is."""
    args, fitness = search.args, search.fitness
    lines = [
        f"# Search on {', '.join(args.tasks)}",
        "",
        f"Model: {args.model_args.get('pretrained', 'the reference model')}. Optimizer: {args.optimizer}, seed "
        f"{args.seed}, search sample {metadata_of(args)['search_seed']}.",
        "",
        verdict(search, to_beat, best, found, held_out),
        "",
        "Factors, layer by layer: " + ", ".join(f"{s:.3f}" for s in found.per_layer()),
        "",
        f"## On the search examples ({fitness.prompts} prompts)",
        "",
    ]
    rows = {**{_shown(search, name): entry for name, entry in to_beat.items()}, FOUND: best}
    header = ["", "fitness", *(label(part) for part in fitness.parts)]
    table = [
        [name, f"{entry['fitness']:.4f}", *(f"{entry['scores'][part.name]:.3f}" for part in fitness.parts)]
        for name, entry in rows.items()
    ]
    lines += _markdown(header, table)
    count = fitness.count
    individuals = list(journal.individuals.values())
    stopped = sum("stopped_after" in entry for entry in individuals)
    lines += ["", f"{len(individuals)} individuals with different factors; {stopped} of them were given up early."]
    if stopped and search.by_chance:
        asked = sum(entry.get("stopped_after", fitness.prompts) for entry in individuals)
        lines[-1] += (
            f" That was improbable to be wrong, not impossible: of individuals that would have become parents, at most "
            f"{100 * args.early_stopping_error:g} % are lost so, wherever one looks. {asked:,} prompts were asked "
            f"instead of {len(individuals) * fitness.prompts:,}."
        )
    if search.lost:
        lines[-1] += (
            f" Of {len(search.lost)} that were measured in full afterwards, {sum(search.lost)} would have reached the "
            "least fit parent."
        )
    if count is not None and count.answers:
        shared = 100 * count.shared / (count.shared + count.prefilled)
        lines += [
            "",
            f"Answers needed {count.steps:,} decode steps for {count.tokens:,} tokens "
            f"({100 * (1 - count.steps / max(1, count.tokens)):.0f} % saved by drafts); "
            f"{shared:.0f} % of the prompt tokens were there already.",
        ]
    if held_out is None:
        return "\n".join(lines) + "\n"
    for task, members in groups(held_out.parts).items():
        examples, questions = len(members[0].docs), len(set(members[0].questions))
        asked = f"{questions} question" + "s" * (questions != 1)
        if questions < examples:
            asked = f"{examples} examples of {asked}"
        lines += ["", f"## {titled(members[0])}: held-out examples, {asked}", ""]
        header = ["", "mean", *(f"{part.position:g} %" for part in members if part.position is not None)]
        table = []
        for name, measured in held_out.measured.items():
            values = [measured.scores[part.name] for part in members]
            table.append([name, f"{sum(values) / len(values):.4f}", *(f"{v:.3f}" for v in values if len(header) > 2)])
        lines += [*_markdown(header, table), ""]
        for (other_task, name), comparison in held_out.comparisons.items():
            if other_task == task:
                text = f"- {FOUND} minus {name}, paired by question: {_with_interval(comparison.mean)}"
                if len(members) > 1:
                    text += f"; worst position {_with_interval(comparison.worst, short=True)}"
                lines.append(text)
        if questions < examples:
            lines.append(
                "- Examples that share a question are averaged before they are paired, and every question counts the "
                "same; the table counts every example."
            )
    lines += ["", "The same scores from lm_eval itself:", "", "    " + reproduce_command(args, held_out.parts)]
    return "\n".join(lines) + "\n"


def verdict(search: Search, to_beat: Mapping[str, Entry], best: Entry, found: Factors, held_out: HeldOut | None) -> str:
    """Whether the factors are worth using, by what was measured, in a few sentences."""
    plain, here = to_beat["baseline"]["fitness"], best["fitness"]
    if here <= plain + 1e-9:  # sums are rounded
        curve = "" if search.args.curve == "free" else "give every layer a factor of its own (--curve free), "
        return (
            f"Verdict: no individual is fitter than the plain model on the search examples ({here:.4f} against "
            f"{plain:.4f}), so these factors are not worth using. Start elsewhere (--start wide, or --start 1), {curve}"
            "search longer, or choose examples that the plain model gets wrong more often."
        )
    said = [f"fitter than the plain model on the search examples ({here:.4f} against {plain:.4f})"]
    if held_out is None:
        said.append("not measured on held-out examples, so nobody knows how much of that is luck")
    else:
        for task, members in groups(held_out.parts).items():
            against = [
                _against(name, comparison, members[0].sign)
                for (of, name), comparison in held_out.comparisons.items()
                if of == task
            ]
            if against:
                said.append(f"on held-out examples of {titled(members[0])} {' and '.join(against)}")
    text = "Verdict: the factors are " + "; ".join(said) + "."
    if len(set(found.per_layer()[search.args.skip :])) == 1:
        text += " They are one number for all layers, so this is Position Interpolation."
    if held_out is not None:
        fewest = min(len(set(part.questions)) for part in held_out.parts)
        if fewest < FEW_QUESTIONS:
            text += f" Intervals of {fewest} questions are too narrow; ask {FEW_QUESTIONS} (--held_out_examples)."
    return text


def _against(name: str, comparison: Any, sign: int) -> str:
    """How the factors compare with what is called ``name``, on examples that the search has not seen."""
    low, high = sorted((sign * comparison.mean.low, sign * comparison.mean.high))
    better = "better than" if low > 0 else "worse than" if high < 0 else "not clearly better or worse than"
    return (
        f"{better} {'the plain model' if name == 'baseline' else name} ({_with_interval(comparison.mean, short=True)})"
    )


def _with_interval(difference: Any, short: bool = False) -> str:
    """A difference and its interval, which one question does not give."""
    if not math.isfinite(difference.low):
        return f"{difference.difference:+.4f}" + ("" if short else ", without an interval, as one question gives none")
    interval = f"[{difference.low:+.4f}, {difference.high:+.4f}]"
    return f"{difference.difference:+.4f}{' ' if short else ', 95 % interval '}{interval}"


def write(
    search: Search,
    journal: Journal,
    to_beat: Mapping[str, Entry],
    best: Entry,
    found: Factors,
    held_out: HeldOut | None,
) -> None:
    """``summary.md``, ``report.json`` and the pictures."""
    folder = search.args.output
    write_atomically(folder / "summary.md", summary(search, journal, to_beat, best, found, held_out))
    individuals = list(journal.individuals.values())
    stopped = [entry for entry in individuals if "stopped_after" in entry]
    data: dict[str, Any] = {
        "settings": search.settings,
        "factors": found.per_layer(),
        "best": without_examples(best),
        "to_beat": {
            name: {field: entry[field] for field in ("key", "fitness", "scores", "seconds")}
            for name, entry in to_beat.items()
        },
        "evaluated": len(individuals),
        "stopped_early": len(stopped),
        "prompts": len(individuals) * search.fitness.prompts
        - sum(search.fitness.prompts - entry["stopped_after"] for entry in stopped),
        "seconds": sum(entry["seconds"] for entry in individuals),
    }
    if search.by_chance:
        data["stopped_early_error"] = search.args.early_stopping_error
    if search.lost:
        data["stopped_early_check"] = {"measured": len(search.lost), "lost": sum(search.lost)}
    if held_out is not None:
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
    _draw(search, [entry for entry in individuals if entry not in stopped], to_beat, found, held_out)


def without_examples(entry: Entry) -> dict[str, Any]:
    """An entry of the journal without the scores of single examples."""
    return {name: value for name, value in entry.items() if name != "examples"}


def _plain(data: Any) -> Any:
    """The same data with null for what JSON has no number for."""
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(header), line(["-" * width for width in widths]), *(line(row) for row in rows)]


def _draw(
    search: Search,
    individuals: Sequence[Entry],
    to_beat: Mapping[str, Entry],
    found: Factors,
    held_out: HeldOut | None,
) -> None:
    """Convergence, the curve over the layers, and scores by position."""
    folder = search.args.output
    generations = sorted({entry["generation"] for entry in individuals})
    bests: list[float] = []
    for generation in generations:
        fittest = max(entry["fitness"] for entry in individuals if entry["generation"] == generation)
        bests.append(max([fittest, *bests[-1:]]))

    with _figure(folder / "convergence.png", "generation", "fitness on the search examples") as axes:
        axes.scatter(
            [entry["generation"] for entry in individuals],
            [entry["fitness"] for entry in individuals],
            s=8,
            color="0.7",
            label="individuals",
        )
        axes.plot(generations, bests, drawstyle="steps-post", color=_style(FOUND)[0], label="fittest so far")
        for name, entry in to_beat.items():
            color, line, _ = _style(name)
            axes.axhline(entry["fitness"], color=color, linestyle=line, linewidth=1.5, label=_shown(search, name))

    per_layer = found.per_layer()
    with _figure(folder / "curve.png", "layer", "factor") as axes:
        color, line, marker = _style(FOUND)
        axes.plot(range(len(per_layer)), per_layer, line, color=color, marker=marker, markersize=4, label=FOUND)
        axes.axhline(sum(per_layer) / len(per_layer), color=_style("PI")[0], linestyle=":", label="their mean")

    if held_out is None:
        return
    for task, members in groups(held_out.parts).items():
        if len(members) > 1:
            with _figure(folder / f"positions-{task}.png", "gold position (%)", "held-out score") as axes:
                positions = [part.position for part in members]
                for number, (name, measured) in enumerate(held_out.measured.items()):
                    values = [measured.scores[part.name] for part in members]
                    errors = [_standard_error(measured.examples[part.name]) for part in members]
                    color, line, marker = _style(name)
                    beside = [position + number - 1 for position in positions]  # equal scores do not hide each other
                    axes.errorbar(
                        beside, values, errors, color=color, linestyle=line, marker=marker, markersize=4, capsize=2,
                        label=name,
                    )  # fmt: skip
                axes.set_xticks(positions)


def _standard_error(values: Sequence[Any]) -> float:
    """The mean's standard error; 0, which draws no bar, where the examples' scores are not plain numbers."""
    if len(values) < 2 or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        return 0.0
    return statistics.stdev(values) / math.sqrt(len(values))


def _style(name: str) -> tuple[str, str, str]:
    """Colour, line and marker of what is called ``name``: the same in every picture, and told apart without colour."""
    if name == FOUND:
        return "#0072B2", "-", "o"
    return ("0.4", "--", "s") if name == "baseline" else ("#E69F00", ":", "^")


@contextmanager
def _figure(path: Any, x: str, y: str) -> Iterator[Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
