"""``docs/results.md`` and its pictures, from the results that are kept: ``python -m benchmarks.experiments.page``.

Every number is computed here from single questions' outcomes. An experiment without a result of this model is a row
that says so.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.experiments import plan, store
from benchmarks.experiments.plan import KV, MDQA, SEEDS, SHORT
from lpes_eval.compare import statistics
from lpes_eval.compare.tables import markdown_table
from lpes_eval.data import kv, mdqa
from lpes_eval.errors import UserError
from lpes_eval.files import write_atomically

if TYPE_CHECKING:
    from benchmarks.experiments.bench import Bench

Result = dict[str, Any]
Z = 1.959964
BARS = {KV: 11.2, MDQA: 3.7}
"""Points above the plain model that the paper reports for Vicuna-7B (Table 1)."""
SHORT_BAR = 95
POSITIONS = {KV: kv.POSITIONS, MDQA: mdqa.POSITIONS, f"{MDQA}_steps": mdqa.STEPS}
TITLES = {KV: "kv_retrieval", MDQA: "mdqa_pos"}
METHODS = {
    "plain": "plain",
    "pi": "PI, mean of LPES's factors",
    "uniform": "best uniform factor on search examples",
    "attention_buckets": "Attention Buckets",
    "ms_poe": "Ms-PoE",
    "ms_poe-skip-1": "Ms-PoE, first layer left alone",
    "moice": "MoICE",
    "lpes": "LPES",
}
OTHERS = {
    "pi": "PI at the mean factor",
    "uniform": "the best uniform factor",
    "attention_buckets": "Attention Buckets",
    "ms_poe": "Ms-PoE",
    "ms_poe-skip-1": "Ms-PoE with only the first layer left alone",
    "moice": "MoICE",
}
GA = "genetic algorithm from 1"
BEZIER_GA = "genetic algorithm from 1, Bézier curve"
NONE = "–"
GUESSED = 256
"""Perplexity of an even guess at a token of two hexadecimal digits."""


@dataclass(frozen=True)
class Gain:
    """What one result has over another on the same questions, in points: the mean over positions, and the worst.

    Attributes:
        mean: difference of the means over positions.
        low: lower end of its 95 % interval.
        high: upper end.
        error: its standard error, clustered by question.
        worst: difference of the worst positions.
        worst_low: lower end of its 95 % interval.
        worst_high: upper end.
    """

    mean: float
    low: float
    high: float
    error: float
    worst: float
    worst_low: float
    worst_high: float

    @property
    def clear(self) -> bool:
        """Whether it is more than twice its standard error."""
        return self.mean > 2 * self.error


def gain(over: Result, of: Result) -> Gain:
    """What ``of`` has over ``over``."""
    a, b = store.paired(over, of)
    compared = statistics.compare_paired(a, b)
    error = statistics.mean_over_positions(b - a).stderr
    mean, worst = compared.mean, compared.worst
    return Gain(*(100 * x for x in (mean.difference, mean.low, mean.high, error)),
        *(100 * x for x in (worst.difference, worst.low, worst.high)))  # fmt: skip


# -- the page ----------------------------------------------------------------------------------------------------------


class Page:
    """Writes the page from what a bench holds."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.used: list[Result] = []  # by the section that is being written

    def get(self, name: str) -> Result | None:
        """A result, or none."""
        return self.bench.shown(name)[0]

    def text(self) -> str:
        """The whole page."""
        sections = [
            self.head(),
            self.short(),
            self.by_position(),
            self.short_contexts(),
            self.searches(),
            self.curves(),
            self.points(),
            self.controls(),
            self.lambdas(),
            self.transfer(),
            self.perplexity(),
            self.ablations(),
        ]
        return "\n\n".join(sections) + "\n"

    def head(self) -> str:
        """What this is, and of which model."""
        model = self.bench.reference
        results = {name: self.get(name) for name in self.bench.listed}
        shown = [result for result in results.values() if result]
        missing = [name for name, result in results.items() if not result]
        minutes = sum(result["cpu_seconds"] for result in shown) / 60
        lines = [
            "# Results",
            "",
            "<!-- Written by `python -m benchmarks.experiments.page` from the results that are kept; do not edit. -->",
            "",
            f"Measured on the reference model ({model.layers} layers; `sha256sum model.safetensors`: "
            f"`{model.sha256[:16]}…`; the hash in its `run.json` is another, of the weights' names and values alone). "
            "All of it: `python -m benchmarks.experiments --jobs 2`; "
            "the first table alone, compared with the numbers "
            "here: `python -m benchmarks.experiments --preset headline --jobs 2`; this page: "
            "`python -m benchmarks.experiments.page`.",
            "",
            "Accuracies are in percent, on held-out questions that no search saw. ± and [brackets] are 95 % intervals; "
            "a question at all its positions counts as one observation, and differences are paired by question "
            "([how](statistics.md)). Answers are greedy, so an evaluation has no seed; questions are the first of the "
            "fixed held-out split; *n* is their number, each asked at every position. Tables named are the paper's.",
            "",
            f"{len(shown)} of {len(results)} experiments have a result ({minutes:.0f} minutes of one thread).",
        ]
        if any(result.get("cache", True) for name, result in results.items() if result and "found" in result):
            lines[-1] += (
                " The searches shared a cache of answers: a search that met factors which an earlier one had measured "
                "on the same examples took less time than it takes alone."
            )
        if missing:
            lines += ["", f"<details><summary>{len(missing)} have none</summary>", ""]
            lines += [f"- `{name}`: {self.bench.shown(name)[1]}" for name in missing]
            lines += ["", "</details>"]
        return "\n".join(lines)

    def short(self) -> str:
        """Whether the bars are met."""
        lines = [
            "## In short",
            "",
            f"The bars of {BARS[KV]} and {BARS[MDQA]} points are the paper's gains on Vicuna-7B (Table 1: KV retrieval "
            "and MDQA), a far larger model on other data.",
            "",
        ]
        for task in (KV, MDQA):
            lines += [f"**{TITLES[task]}**", "", *(f"- {line}" for line in self.verdicts(task)), ""]
        return "\n".join(lines).rstrip()

    def verdicts(self, task: str) -> list[str]:
        """One sentence a bar: met, or by how much not."""
        return [*self.against_others(task), self.every_search(task)]

    def against_others(self, task: str) -> list[str]:
        """The bars that the shipped factors have to clear."""
        at = f"main/{SHORT[task]}"
        plain, lpes = self.get(f"{at}/plain"), self.get(f"{at}/lpes")
        if plain is None or lpes is None:
            return ["LPES above plain: not measured."]
        compared = self.largest(task)
        over = gain(*compared)
        questions = f"{len(scores_of(compared[1]))} questions"
        bar = BARS[task]
        outcome = "**met**" if over.mean >= bar else f"**not met**, {bar - over.mean:.1f} points short"
        if over.mean >= bar > over.low:
            outcome += ", though the interval reaches below it"
        return [
            f"At least {bar} points above plain in the mean over positions: {outcome} ({_signed(over)}; {questions}).",
            f"A better worst position than plain: {'**met**' if over.worst > 0 else '**not met**'} "
            f"({over.worst:+.1f} [{over.worst_low:+.1f}, {over.worst_high:+.1f}]; {questions}).",
            *(self.beats(f"{at}/{method}", lpes, named) for method, named in OTHERS.items()),
        ]

    def largest(self, task: str) -> tuple[Result, Result]:
        """Plain and LPES on all held-out questions where that was measured, else on those of the table."""
        short = SHORT[task]
        pairs = ((self.get(f"{at}/{short}/plain"), self.get(f"{at}/{short}/lpes")) for at in ("all", "main"))
        return next((plain, lpes) for plain, lpes in pairs if plain is not None and lpes is not None)

    def every_search(self, task: str) -> str:
        """Whether five searches hold up."""
        bar = "Each of five searches beats plain and PI by more than two standard errors"
        known = [one for seed in SEEDS if (one := self.beats_both(task, seed)) is not None]
        if not known:
            return f"{bar}: not measured."
        met = len(known) == len(SEEDS) and all(known)
        return f"{bar}: {'**met**' if met else '**not met**'} ({sum(known)} of {len(known)} that were measured)."

    def beats(self, other: str, lpes: Result, named: str) -> str:
        """Whether LPES is better than another method by more than two standard errors."""
        base = self.get(other)
        if base is None:
            return f"Better than {named} by more than two standard errors: not measured."
        over = gain(base, lpes)
        outcome = "**met**" if over.clear else f"**not met**, {2 * over.error - over.mean:.1f} points short"
        if over.mean < -2 * over.error:
            outcome = "**not met**, LPES is worse by more than two"
        return (
            f"Better than {named} by more than two standard errors: {outcome} ({_signed(over)}, SE {over.error:.1f})."
        )

    def beats_both(self, task: str, seed: int) -> bool | None:
        """Whether a search's factors beat plain and PI at their mean; None where that was not measured."""
        name = f"searches/{SHORT[task]}-{seed}"
        found, pi, plain = self.get(f"{name}-held-out"), self.get(f"{name}-pi"), self.get(f"main/{SHORT[task]}/plain")
        if found is None or pi is None or plain is None:
            return None
        return gain(plain, found).clear and gain(pi, found).clear

    # -- Table 1 -------------------------------------------------------------------------------------------------------

    def by_position(self) -> str:
        """Table 1."""
        lines = ["## Accuracy by position (Table 1)"]
        lines += self.picture("positions", "accuracy by position", "main/*/*")
        for task in (KV, MDQA):
            at = f"main/{SHORT[task]}"
            lines += ["", f"### {TITLES[task]}", "", self.main_table(task)]
            if any(self.get(f"all/{SHORT[task]}/{method}") for method in ("plain", "lpes")):
                rows = [(METHODS[method], f"all/{SHORT[task]}/{method}") for method in ("plain", "lpes")]
                lines += ["", "All held-out questions:", "", self.accuracies(rows, rows[0][1])]
            used = [(METHODS[m], r["factors"]) for m in METHODS if (r := self.get(f"{at}/{m}")) and r["factors"]]
            if used:
                lines += ["", "Factors: " + "; ".join(f"{label}: {_listed(f)}" for label, f in used) + "."]
            if choice := self.use(f"{at}/uniform-choice"):
                tried = ", ".join(f"{factor:g}: {100 * value:.1f}" for factor, value in choice["fitness"])
                n = choice["settings"]["examples"]
                lines += ["", f"The uniform factor was chosen by its fitness on {n} search examples ({tried})."]
            lines += ["", self.circumstances()]
        costs = [r for name in plan.HEADLINE if not name.endswith("/pi") and (r := self.get(name))]
        if len(costs) == 4:
            seconds, n = sum(r["cpu_seconds"] for r in costs), costs[0]["settings"]["questions"]
            lines += [
                "",
                f"Both tasks, plain and with factors, {n} questions: {seconds / 60:.1f} minutes of one thread.",
            ]
        return "\n".join(lines)

    def main_table(self, task: str) -> str:
        """All methods on one task."""
        at = f"main/{SHORT[task]}"
        return self.accuracies([(label, f"{at}/{method}") for method, label in METHODS.items()], f"{at}/plain")

    # -- Table 8 -------------------------------------------------------------------------------------------------------

    def searches(self) -> str:
        """Table 8."""
        lines = [
            "## Five searches (Table 8)",
            "",
            "Each with a seed and search examples of its own; PI is at the mean of that search's factors.",
            *self.picture("factors", "factors by layer", "searches/*"),
        ]
        for task in (KV, MDQA):
            plain = f"main/{SHORT[task]}/plain"
            rows = [("plain", plain)]
            for seed in SEEDS:
                name = f"searches/{SHORT[task]}-{seed}"
                rows += [(f"search {seed}", f"{name}-held-out"), (f"its PI{self.uniform(f'{name}-pi')}", f"{name}-pi")]
            lines += ["", f"### {TITLES[task]}", "", self.accuracies(rows, plain), ""]
            lines.append(self.spread(task))
            for seed in SEEDS:
                name = f"searches/{SHORT[task]}-{seed}"
                found, pi, base = self.get(f"{name}-held-out"), self.get(f"{name}-pi"), self.get(plain)
                if found is None or pi is None or base is None:
                    lines.append(f"- Search {seed}: not measured in full.")
                    continue
                over_plain, over_pi = gain(base, found), gain(pi, found)
                both = over_plain.clear and over_pi.clear
                lines.append(
                    f"- Search {seed} {'beats' if both else 'does **not** beat'} both by more than two standard "
                    f"errors: plain {over_plain.mean:+.1f} (SE {over_plain.error:.1f}), PI {over_pi.mean:+.1f} "
                    f"(SE {over_pi.error:.1f}). Factors: {_listed(found['factors'])}."
                )
            for seed in SEEDS:
                self.use(f"searches/{SHORT[task]}-{seed}")
            lines += ["", self.circumstances()]
        return "\n".join(lines)

    def uniform(self, name: str) -> str:
        """A uniform result's factor."""
        result = self.get(name)
        return f", {result['factors'][0]:g}" if result else ""

    def spread(self, task: str) -> str:
        """Mean and variance over the searches."""
        means = [
            100 * float(scores_of(result).mean())
            for seed in SEEDS
            if (result := self.get(f"searches/{SHORT[task]}-{seed}-held-out"))
        ]
        if len(means) < 2:
            return "Mean and variance over searches: not measured.\n"
        return (
            f"Over {len(means)} searches: mean {np.mean(means):.2f}, variance {np.var(means, ddof=1):.3f} "
            f"(standard deviation {np.std(means, ddof=1):.2f}); the paper, on MDQA with Vicuna-7B: 63.68 and 0.027.\n"
        )

    # -- Tables 6, 7, 15, 16 -------------------------------------------------------------------------------------------

    FIRST = f"searches/{SHORT[KV]}-{SEEDS[0]}"
    BEZIER = "curves/bezier"

    def curves(self) -> str:
        """Tables 6 and 16."""
        plain = f"main/{SHORT[KV]}/plain"
        rows = [("plain", plain, None), ("one factor a layer", f"{self.FIRST}-held-out", self.FIRST)]
        rows += [(_curve(curve), f"curves/{curve}-held-out", f"curves/{curve}") for curve in plan.CURVES]
        lines = ["## Kinds of curves (Tables 6 and 16)", "", "The other searches set one factor a layer. Here others:"]
        lines += ["", self.searched(rows, plain), "", self.circumstances()]
        steps = [("plain", "steps/plain-held-out"), ("one factor a layer", "steps/free-held-out")]
        steps += [(_curve(curve), f"steps/{curve}-held-out") for curve in ("linear", "bezier")]
        lines += ["", "At every tenth of the context, factors searched on `mdqa_pos` (Table 16):", ""]
        lines += [self.accuracies(steps, "steps/plain-held-out")]
        if len(best := self.significant("steps/linear-held-out", "steps/bezier-held-out")):
            lines += ["", f"Bézier minus linear: {best}."]
        for search in (f"searches/{SHORT[MDQA]}-{SEEDS[0]}", "steps/linear", "steps/bezier"):
            self.use(search)
        return "\n".join([*lines, "", self.circumstances()])

    def significant(self, over: str, of: str) -> str:
        """The difference of two results, if both are there."""
        a, b = self.get(over), self.get(of)
        return _signed(gain(a, b)) if a and b else ""

    def points(self) -> str:
        """Table 7."""
        plain = f"main/{SHORT[KV]}/plain"
        rows = [("plain", plain, None), ("one factor a layer", f"{self.FIRST}-held-out", self.FIRST)]
        for count in sorted([*plan.POINTS, 4]):
            search = self.BEZIER if count == 4 else f"points/{count}"
            rows.append((f"{count} control points", f"{search}-held-out", search))
        lines = ["## Control points of a Bézier curve (Table 7)", "", self.searched(rows, plain)]
        lines += ["", self.circumstances()]
        return "\n".join(lines)

    def controls(self) -> str:
        """The genetic algorithm beside other optimisers."""
        plain = f"main/{SHORT[KV]}/plain"
        rows = [("plain", plain, None), (GA, f"{self.FIRST}-held-out", self.FIRST)]
        for control in plan.CONTROLS:
            rows.append((optimizer(control), f"controls/{control}-held-out", f"controls/{control}"))
        lines = [
            "## Controls: other optimisers (App. C)",
            "",
            "All set one factor a layer. The genetic algorithm and CMA-ES begin at 1 in every layer, the plain model; "
            "from 1.5 the genetic algorithm begins as published. Random search has no start. CMA-ES and random "
            "search ask for as many individuals a generation. Gradient descent ends with its last epoch's factors. "
            'Each row is one search: whether an optimiser is better is said below, under "Other seeds".',
            *self.picture("convergence", "fitness by generation", "controls/*"),
            "",
            self.searched(rows, plain),
            "",
            self.circumstances(),
            "",
            *self.seeds(),
        ]
        return "\n".join(lines)

    def seeds(self) -> list[str]:
        """Optimisers by what several searches each found, compared seed by seed."""
        searches = {GA: {seed: f"searches/{SHORT[KV]}-{seed}" for seed in SEEDS}}
        for name, seeds in plan.SEEDED.items():
            label = BEZIER_GA if name == self.BEZIER else optimizer(name.partition("/")[2])
            searches[label] = {seed: plan.seeded(name, seed) for seed in seeds}
        means: dict[str, dict[int, float]] = {}
        for label, names in searches.items():
            held_out = {seed: self.use(f"{name}-held-out") for seed, name in names.items() if self.use(name)}
            means[label] = {seed: 100 * float(scores_of(r).mean()) for seed, r in held_out.items() if r}
        rows = []
        for label, found in means.items():
            values = list(found.values())
            over = _over_seeds(means[GA], found) if label != GA else ""
            rows.append(
                [
                    label,
                    *(f"{found[seed]:.1f}" if seed in found else NONE for seed in SEEDS),
                    f"{np.mean(values):.1f}" if values else NONE,
                    f"{np.std(values, ddof=1):.1f}" if len(values) > 1 else NONE,
                    str(over) if over is not None else NONE,
                ]
            )
        header = ["", *(f"seed {seed}" for seed in SEEDS), "mean", "SD", f"− {GA}"]
        return [
            "### Other seeds",
            "",
            "The mean over positions on the same held-out questions. A seed has search examples of its own, so "
            "differences are taken seed by seed; brackets are the 95 % t interval of their mean.",
            "",
            markdown_table(header, rows),
            "",
            *self.against_controls(means),
            self.circumstances(),
        ]

    def against_controls(self, means: Mapping[str, Mapping[int, float]]) -> list[str]:
        """A line for every control: whether it finds better factors than the genetic algorithm, or worse ones.

        Where there are several seeds, their spread decides; else the one search is no more than told.
        """
        lines, single = [], False
        other = self.get(f"{self.FIRST}-held-out")
        compared = {BEZIER_GA: self.BEZIER} | {optimizer(name): f"controls/{name}" for name in plan.CONTROLS}
        for label, search in compared.items():
            found = self.get(f"{search}-held-out")
            if found is None or other is None:
                continue
            if over := _over_seeds(means[GA], means.get(label, {})):
                lines.append(f"- {label}, {over.seeds} seeds: {over.verdict} than the {GA} ({over}).")
            else:
                one, single = gain(other, found), True
                clear = abs(one.mean) > 2 * one.error
                scored = ("higher" if one.mean > 0 else "lower") if clear else "neither clearly higher nor lower"
                errors = f"{_signed(one)}, SE {one.error:.1f}"
                lines.append(f"- {label}, one seed: scored {scored} than the {GA} ({errors}).")
        if single:
            lines += [
                "",
                "The errors of one seed are those of the questions. As the table shows, another seed changes more, so "
                "one search does not say which optimiser is better.",
            ]
        return [*lines, ""] if lines else []

    def lambdas(self) -> str:
        """Table 15."""
        plain = f"main/{SHORT[KV]}/plain"
        rows = [("plain", plain, None), ("0.2, 0.3, 0.5", f"{self.FIRST}-held-out", self.FIRST)]
        for name, weights in plan.LAMBDAS.items():
            label = ", ".join(f"{weight:.3g}" for weight in weights)
            rows.append((label, f"lambda/{name}-held-out", f"lambda/{name}"))
        lines = [
            "## Weights λ of beginning, middle and end (Table 15)",
            "",
            self.searched(rows, plain),
            "",
            self.circumstances(),
        ]
        return "\n".join(lines)

    def searched(self, rows: Sequence[tuple[str, str, str | None]], base: str) -> str:
        """Held-out accuracy of found factors, with what their search took; rows are label, evaluation, search."""
        extra = {}
        for label, _, search in rows:
            if search is not None and (result := self.use(search)):
                generations = [generation for generation, _, _ in result["evaluations"]]
                extra[label] = [
                    f"{_converged(result['fittest_by_generation'])} of {max(generations)}",
                    f"{result['individuals']}",
                    f"{result['prompts']:,}",
                    f"{100 * result['fitness']:.1f}",
                ]
            elif search is not None:
                extra[label] = [NONE] * 4
            else:
                extra[label] = [""] * 4
        header = ["converged in generation", "individuals", "prompts", "search fitness"]
        return self.accuracies([(label, name) for label, name, _ in rows], base, deviation=True, extra=(header, extra))

    # -- transfer ------------------------------------------------------------------------------------------------------

    def transfer(self) -> str:
        """Factors on what they were not found for."""
        lines = ["## Transfer", "", "Factors of search 1 of one task on the other:"]
        for task, other in ((KV, MDQA), (MDQA, KV)):
            plain = f"main/{SHORT[task]}/plain"
            rows = [
                ("plain", plain),
                (f"found on {TITLES[other]}", f"transfer/{SHORT[other]}-on-{SHORT[task]}"),
                (f"found on {TITLES[task]}", f"searches/{SHORT[task]}-{SEEDS[0]}-held-out"),
            ]
            lines += ["", f"On `{TITLES[task]}`:", "", self.accuracies(rows, plain)]
        lines += [
            "",
            self.circumstances(),
            "",
            "At other lengths, with the factors of search 1 of the same task and with the shipped ones, found on both "
            "tasks:",
        ]
        for task, lengths in plan.LENGTHS.items():
            unit = "pairs" if task == KV else "documents"
            lines += ["", f"`{TITLES[task]}`:", ""]
            tables = []
            for length in lengths:
                at = f"transfer/{SHORT[task]}-{length}"
                rows = [(f"{length} {unit}, plain", f"{at}-plain"), (f"{length} {unit}, search 1", f"{at}-lpes")]
                rows.append((f"{length} {unit}, shipped", f"{at}-shipped"))
                tables.append(self.accuracies(rows, f"{at}-plain").splitlines())
            lines += [*tables[0][:2], *(line for table in tables for line in table[2:])]
        lines += ["", self.circumstances(), "", self.on_second_model()]
        return "\n".join(lines)

    def short_contexts(self) -> str:
        """The plain model on what fits half of its window, where it is meant to be right."""
        lines = [
            "## Short contexts",
            "",
            "The plain model where a prompt takes at most half of the tokens of the longest one that it was trained on "
            f"(53 records). A bar of {SHORT_BAR} % stands for being right there.",
        ]
        right, answers, complete = 0.0, 0, True
        for task, lengths in plan.SHORT_LENGTHS.items():
            unit = "records" if task == KV else "articles"
            names = {length: f"short/{SHORT[task]}-{length}" for length in lengths}
            tables = [self.accuracies([(f"{n} {unit}", name)], name).splitlines() for n, name in names.items()]
            lines += ["", f"`{TITLES[task]}`:", "", *tables[0][:2], *(line for table in tables for line in table[2:])]
            scores = {n: scores_of(r) for n, name in names.items() if (r := self.get(name))}
            right += sum(float(table.sum()) for table in scores.values())
            answers += sum(table.size for table in scores.values())
            means = {n: 100 * float(table.mean()) for n, table in scores.items()}
            if len(means) < len(names):
                complete = False
            else:
                below = [f"{n} ({mean:.1f})" for n, mean in means.items() if mean < SHORT_BAR]
                at_each = f"missed at {', '.join(below)} {unit}" if below else "met at every length"
                over_all = sum(means.values()) / len(means)
                verdict = "met" if over_all >= SHORT_BAR else "missed"
                lines += ["", f"The bar is **{verdict}** in the mean over these lengths ({over_all:.1f}), {at_each}."]
        if complete:
            lines += [
                "",
                f"Of all {answers:,} answers of both tasks together, {100 * right / answers:.1f} % are right.",
            ]
        return "\n".join([*lines, "", self.circumstances()])

    def on_second_model(self) -> str:
        """Factors that were found on this model, on another one."""
        second = self.bench.second
        if second is None:
            return "On a second model: there is none."
        rows = [
            ("plain", "second/plain"),
            ("its own factors", "second/own"),
            ("those of the reference model's first layers", "second/transferred"),
        ]
        return "\n".join(
            [
                f"On a second model ({second.layers} layers, weights `{second.sha256[:16]}…`), `{TITLES[KV]}`:",
                "",
                self.accuracies(rows, "second/plain"),
                "",
                self.circumstances(),
            ]
        )

    # -- perplexity ----------------------------------------------------------------------------------------------------

    def perplexity(self) -> str:
        """Perplexity by length."""
        kinds = {"plain": "plain", "linear": "PI", "dynamic": "dynamic NTK", "yarn": "YaRN"}
        lengths = next((list(r["scores"]) for k in kinds if (r := self.get(f"perplexity/{k}"))), None)
        lines = [
            "## Perplexity by length",
            "",
            "Of the answer's tokens behind the last so many tokens of a key-value prompt: `lpes_ppl` on texts that "
            "`benchmarks/experiments/text.py` writes (the rest of such a text is random and cannot be predicted). The "
            "gold record stands within the shortest length, so that a longer one adds nothing but distractors. "
            f"Lower is better; who guesses two hexadecimal digits evenly has {GUESSED}.",
            "",
        ]
        if lengths is None:
            return "\n".join([*lines, "Not measured."])
        rows, notes = [], []
        for kind, label in kinds.items():
            alone, scaled = self.use(f"perplexity/{kind}"), self.use(f"perplexity/{kind}-lpes")
            for result, suffix in ((alone, ""), (scaled, " with layer factors")):
                name = f"perplexity/{kind}{'-lpes' if suffix else ''}"
                if result is None:
                    rows.append([f"{label}{suffix}", *[NONE] * len(lengths), self.bench.shown(name)[1]])
                    continue
                scores = scores_of(result)
                cells = []
                for column in scores.T:
                    half = Z * float(column.std(ddof=1)) / math.sqrt(len(column)) if len(column) > 1 else math.nan
                    middle = float(column.mean())
                    cells.append(f"{_exp(middle)} [{_exp(middle - half)}, {_exp(middle + half)}]")
                rows.append([f"{label}{suffix}", *cells, str(len(scores))])
            if alone and scaled:
                a, b = store.paired(alone, scaled)
                compared = statistics.compare_paired(a, b, higher_is_better=False)
                better, worse, lost = [], [], []
                for n, d, before, after in zip(lengths, compared.positions, a.mean(0), b.mean(0), strict=True):
                    if min(before, after) > math.log(GUESSED):
                        lost.append(n)
                    elif d.high < 0 or d.low > 0:
                        (better if d.high < 0 else worse).append(n)
                said = f"layer factors help at {_and(better) or 'no length'} and hurt at {_and(worse) or 'none'}"
                if lost:
                    said += f"; at {_and(lost)} both are worse than a guess, and which is less so says nothing"
                notes.append(f"- {label}: {said}.")
        header = ["", *(f"{length} tokens" for length in lengths), "texts"]
        window = next(r["trained_window"] for k in kinds if (r := self.get(f"perplexity/{k}")))
        lines += [f"The longest context in training had about {window} tokens; PI, dynamic NTK and YaRN stretch it to "
            f"the longest length here.", ""]  # fmt: skip
        lines += [
            markdown_table(header, rows),
            "",
            "Help and hurt: the paired 95 % interval, in nats, leaves out 0.",
            "",
            *notes,
        ]
        lines += ["", "The commands read a text that `python -m benchmarks.experiments --only 'perplexity/*'` writes."]
        return "\n".join([*lines, "", self.circumstances()])

    # -- ablations -----------------------------------------------------------------------------------------------------

    def ablations(self) -> str:
        """Halves of the layers, and moved control points."""
        lines = ["## Ablations", "", "LPES's factors in one half of the layers alone, the other half unscaled:"]
        for task in (KV, MDQA):
            plain = f"main/{SHORT[task]}/plain"
            rows = [("plain", plain), ("first half", f"ablation/{SHORT[task]}-first-half")]
            rows += [("last half", f"ablation/{SHORT[task]}-last-half"), ("all layers", f"main/{SHORT[task]}/lpes")]
            lines += ["", f"`{TITLES[task]}`:", "", self.accuracies(rows, plain)]
        base = "ablation/as-found"
        rows = [("as found", base)]
        for point in ("all", *(f"point-{k}" for k in range(4))):
            named = "all points" if point == "all" else f"point {int(point[-1]) + 1}"
            rows += [
                (f"{named} −{plan.MOVE}", f"ablation/{point}-down"),
                (f"{named} +{plan.MOVE}", f"ablation/{point}-up"),
            ]
        found = f"Control points of the Bézier curve that was found on `{TITLES[MDQA]}`, moved in y:"
        lines += ["", self.circumstances(), "", found, ""]
        lines += [self.accuracies(rows, base, against="as found"), "", self.circumstances()]
        return "\n".join(lines)

    def picture(self, name: str, title: str, pattern: str) -> list[str]:
        """The lines that show a picture, if there is anything on it."""
        drawn = any(self.get(one) for one in self.bench.listed if fnmatch.fnmatch(one, pattern))
        return ["", f"![{title}](results/{name}.png)"] if drawn else []

    # -- parts of tables -----------------------------------------------------------------------------------------------

    def use(self, name: str) -> Result | None:
        """A result whose circumstances belong under the table that is being made."""
        result = self.get(name)
        if result is not None and result not in self.used:
            self.used.append(result)
        return result

    def accuracies(
        self,
        rows: Sequence[tuple[str, str]],
        base: str,
        *,
        against: str = "plain",
        deviation: bool = False,
        extra: tuple[list[str], dict[str, list[str]]] | None = None,
    ) -> str:
        """A table of accuracy by position; rows are label and experiment, differences are to ``base``."""
        labels = POSITIONS[str(self.bench.listed[rows[0][1]].settings["task"])]
        header = ["", "n", *(f"{p} %" for p in labels), "mean", *(["std over positions"] if deviation else [])]
        header += ["worst", f"mean − {against}", f"worst − {against}", *(extra[0] if extra else [])]
        compared_to = self.get(base)
        body = []
        for label, name in rows:
            result = self.use(name)
            more = extra[1][label] if extra else []
            if result is None:
                reason = self.bench.shown(name)[1]
                body.append([label, NONE, *[NONE] * (len(header) - 3 - len(more)), f"no result: {reason}", *more])
                continue
            scores = 100 * scores_of(result)
            estimate = statistics.mean_over_positions(scores)
            by_position = statistics.position_means(scores)
            cells = [label, str(len(scores)), *(f"{value:.1f}" for value in by_position)]
            cells += [f"{estimate.value:.1f} ± {Z * estimate.stderr:.1f}"]
            cells += [f"{by_position.std():.1f}"] if deviation else []
            cells += [f"{by_position.min():.1f}"]
            if compared_to is None or name == base:
                cells += ["", ""]
            else:
                over = gain(compared_to, result)
                cells += [_signed(over), f"{over.worst:+.1f} [{over.worst_low:+.1f}, {over.worst_high:+.1f}]"]
            body.append([*cells, *more])
        return markdown_table(header, body)

    def circumstances(self) -> str:
        """Commands, sizes, seeds, hardware and versions of the results used since the last time."""
        used, self.used = self.used, []
        if not used:
            return "Nothing of this has been measured."
        machines = _distinct(
            f"{h['processor']}, {h['threads']} of {h['cores']} cores" for h in (r["hardware"] for r in used)
        )
        packages = _distinct(", ".join(f"{k} {v}" for k, v in r["versions"].items()) for r in used)
        dates = sorted({r["date"] for r in used})
        minutes = sum(r["cpu_seconds"] for r in used) / 60
        commands = _distinct(r["command"] for r in used)
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        return "\n".join(
            [
                f"<details><summary>{len(commands)} commands; {minutes:.1f} minutes of one thread</summary>",
                "",
                "```sh",
                *commands,
                "```",
                "",
                f"{' / '.join(machines)}; {' / '.join(packages)}; {when}.",
                "",
                "</details>",
            ]
        )


def headline(bench: Bench, kept: store.Results) -> str:
    """The headline table of a fresh run, held against the results that are kept."""
    page = Page(bench)
    lines = []
    for task in (KV, MDQA):
        at = f"main/{SHORT[task]}"
        rows = [(METHODS[method], f"{at}/{method}") for method in ("plain", "pi", "lpes")]
        lines += [f"{TITLES[task]}", "", page.accuracies(rows, f"{at}/plain"), ""]
        for label, name in rows:
            fresh, before = page.get(name), kept.load(name)
            if fresh is None or before is None:
                lines.append(f"{label}: {'no result' if fresh is None else 'none is kept to compare with'}.")
            elif before["model"]["sha256"] != fresh["model"]["sha256"] or before["factors"] != fresh["factors"]:
                lines.append(f"{label}: the result that is kept is another model's or of other factors.")
            else:
                estimate = statistics.mean_over_positions(100 * scores_of(before))
                low, high = estimate.value - Z * estimate.stderr, estimate.value + Z * estimate.stderr
                value = 100 * float(scores_of(fresh).mean())
                inside = "within" if low - 1e-9 <= value <= high + 1e-9 else "OUTSIDE"
                lines.append(f"{label}: {value:.1f} is {inside} the kept result's interval, {low:.1f} to {high:.1f}.")
        lines.append("")
    return "\n".join(lines)


def scores_of(result: Result) -> Any:
    """A result's scores, of shape (questions, positions)."""
    return store.unpack(result)[2]


def _signed(over: Gain) -> str:
    return f"{over.mean:+.1f} [{over.low:+.1f}, {over.high:+.1f}]"


def _converged(fittest: Sequence[Sequence[float]]) -> int:
    """The generation in which the search's best individual was found."""
    return int(max(fittest, key=lambda pair: (pair[1], -pair[0]))[0])


@dataclass(frozen=True)
class OverSeeds:
    """The mean difference between searches with the same seeds, and its 95 % t interval, in points."""

    seeds: int
    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0, as it is printed."""
        return round(self.low, 1) > 0 or round(self.high, 1) < 0

    @property
    def verdict(self) -> str:
        """Which of the two is better."""
        return ("better" if self.mean > 0 else "worse") if self.clear else "not shown to be better or worse"

    def __str__(self) -> str:
        """As the tables show it."""
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def _over_seeds(base: Mapping[int, float], found: Mapping[int, float]) -> OverSeeds | None:
    """What ``found`` has over ``base``, seed by seed; none where fewer than two seeds are in both."""
    from scipy import stats

    differences = [found[seed] - base[seed] for seed in found if seed in base]
    if len(differences) < 2:
        return None
    middle = float(np.mean(differences))
    half = float(stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences))
    return OverSeeds(len(differences), middle, middle - half, middle + half)


def _exp(nats: float) -> str:
    return f"{math.exp(nats):.4g}" if math.isfinite(nats) and nats < 700 else NONE


def _listed(factors: Sequence[float]) -> str:
    """Factors layer by layer; a uniform one once."""
    factors = factors[:1] if len(set(factors)) == 1 else factors
    return ", ".join(f"{factor:.3g}" for factor in factors)


def _and(words: Sequence[str]) -> str:
    return " and ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])} and {words[-1]}"


def _curve(kind: str) -> str:
    return {"bezier": "Bézier", "linear": "linear", "step": "step"}[kind]


def optimizer(name: str) -> str:
    """An optimiser as prose calls it."""
    return {
        "start-1.5": "genetic algorithm from 1.5",
        "start-wide": "genetic algorithm, wide start",
        "cma-es": "CMA-ES from 1",
        "random": "random search",
        "gradient": "gradient descent from 1.5",
        "gradient-1": "gradient descent from 1",
    }[name]


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and its pictures."""
    from benchmarks.experiments import pictures
    from benchmarks.experiments.bench import KEPT, open_bench

    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments.page", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=KEPT, metavar="DIR", help="where results are kept")
    parser.add_argument("--model", default="reference", metavar="FOLDER", help="the model they are of")
    parser.add_argument("--second", metavar="FOLDER", help="the second model")
    parser.add_argument("--out", type=Path, default=Path("docs/results.md"), metavar="FILE", help="the page")
    args = parser.parse_args(argv)
    try:
        if not args.out.suffix:
            raise UserError(f"--out {args.out}: expected a name such as {args.out}.md; its pictures go to {args.out}")
        bench = open_bench(args.results, args.model, args.second)
        write_atomically(args.out, Page(bench).text())
        drawn = pictures.draw(bench, args.out.with_suffix(""))
    except UserError as error:
        print(f"page: error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}, and {len(drawn)} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
