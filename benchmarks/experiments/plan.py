"""The list of experiments, and their sizes.

An experiment equals a command of the product, which is kept with its result. Names are paths: what stands before the
last slash says which table it belongs to.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.experiments.sources import Chosen, Found, HalfOf, MeanOf, Moved, Shipped, Source
from lpes_eval.errors import UserError

KV, MDQA = "kv_retrieval", "mdqa_pos"
SHORT = {KV: "kv", MDQA: "mdqa"}
SIZE_OF = {KV: "num_keys", MDQA: "num_documents"}
"""What the metadata of a task calls its size."""

SEEDS = (1, 2, 3, 4, 5)
CURVES = ("bezier", "linear", "step")
POINTS = (2, 3, 5)
"""Control points of a Bézier curve, beside the four of ``curves/bezier``."""
CONTROLS: dict[str, dict[str, Any]] = {
    "start-1.5": {"start": 1.5},
    "start-wide": {"start": "wide"},
    "cma-es": {"optimizer": "cma-es"},
    "random": {"optimizer": "random"},
    "gradient": {"optimizer": "gradient"},
    "gradient-1": {"optimizer": "gradient", "start": 1},
}
"""How else is searched: from the published start (Eq. 8) or a wide one, by other optimisers, by gradient descent from
1.5 and 1."""
SEEDED = {
    "curves/bezier": SEEDS,
    "controls/cma-es": SEEDS[:3],
    "controls/random": SEEDS[:3],
    "controls/gradient-1": SEEDS[:3],
}
"""Searches that are made with several seeds, as the genetic algorithm's are, because one says little about an
optimiser; those of other optimisers with its first three, for want of time."""
LAMBDAS = {"equal": (1 / 3, 1 / 3, 1 / 3), "end": (0.1, 0.3, 0.6)}
"""Table 15's weightings beside the default one."""
LENGTHS = {KV: (25, 40, 44, 60, 75), MDQA: (5, 8, 12)}
SHORT_LENGTHS = {KV: (5, 10, 15, 20, 25), MDQA: (2, 3, 4, 5)}
"""What fits half of the longest context that the reference model was trained on: up to 25 records, up to 5 articles."""
UNIFORM = (1.0, 1.02, 1.05, 1.08, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0)
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention_buckets": ("attention_buckets", {}),
    "ms_poe": ("ms_poe", {}),
    "ms_poe-skip-1": ("ms_poe", {"skip": 1}),
    "moice": ("moice", {}),
}
"""lm-eval model types and their arguments; PI is ``lpes`` with one number, exactly. Ms-PoE leaves its first two layers
alone, which are the two that matter most in the reference model; so it is shown with one left alone, too."""
SLOW = ("attention_buckets", "moice")
ROPE_KINDS = ("plain", "linear", "dynamic", "yarn")
MOVE = 0.3


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        questions: held-out questions of an evaluation, each asked at all positions.
        all_questions: of plain and LPES once more: all that there are.
        peer_questions: of a method that lm-eval's own loop has to answer: the first of these questions.
        slow_questions: of the peers that cost several times the plain model.
        other_questions: of ablations, and at other lengths and positions.
        choice_examples: search examples on which the uniform factor is chosen.
        search: flags of ``python -m search.ga`` that say how large a search is, what it sets out from, and that every
            layer has a factor of its own. The reference model's second layer needs another factor than its neighbours,
            which a Bézier curve over six layers cannot give it, and its score at 1.5 (Eq. 8) is 0.
        gradient: flags of gradient descent instead.
        texts: texts of the perplexity.
        ppl_lengths: context lengths in tokens; the last one is the longest.
    """

    questions: int = 100
    all_questions: int = 500
    peer_questions: int = 50
    slow_questions: int = 16
    other_questions: int = 50
    choice_examples: int = 40
    search: Mapping[str, Any] = field(
        default_factory=lambda: {
            "curve": "free",
            "start": 1,
            "population": 12,
            "parents": 5,
            "epochs": 4,
            "mutations": 5,
            "crossovers": 1,
            "examples": 20,
        }
    )
    gradient: Mapping[str, Any] = field(
        default_factory=lambda: {
            "epochs": 8,
            "epoch_samples": 40,
            "gradient_batch": 8,
            "learning_rate": 0.02,
            "examples": 20,
        }
    )
    texts: int = 40
    ppl_lengths: Sequence[int] = (512, 1024, 1536, 1792, 2048, 4096)

    def changed(self, changes: Mapping[str, Any]) -> Sizes:
        """With other values; those of ``search`` and ``gradient`` are named ``search.epochs`` and so on.

        Raises:
            UserError: a name that there is not, or a value that is no number of the size's kind.
        """
        sizes: Any = self
        for name, value in changes.items():
            outer, _, inner = name.partition(".")
            current = getattr(sizes, outer, None)
            if inner and isinstance(current, Mapping) and inner in current:
                _check_kind(name, value, current[inner])
                sizes = replace(sizes, **{outer: {**current, inner: value}})
            elif not inner and isinstance(current, int):
                _check_kind(name, value, current)
                sizes = replace(sizes, **{outer: value})
            else:
                known = [n for n, v in vars(self).items() if isinstance(v, int)]
                known += [f"{n}.{k}" for n in ("search", "gradient") for k in getattr(self, n)]
                raise UserError(f"--set {name}: no such size; there are {', '.join(known)}")
        return sizes


def _check_kind(name: str, value: Any, current: Any) -> None:
    """Refuse a size of another kind than the one it replaces: a whole number, a number, or a word."""
    if isinstance(current, str) or name == "search.start":
        return
    whole, least = isinstance(current, int), 0 if "." in name else 1
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value < least:
        raise UserError(f"--set {name}={value}: expected a {'whole ' if whole else ''}number, at least {least}")


@dataclass(frozen=True)
class Experiment:
    """Something to be measured.

    Attributes:
        name: its name, which is its result's file.
        kind: ``evaluate``, ``choose``, ``search`` or ``perplexity``: the function of ``measure`` that does it.
        settings: plain data, all that the function needs besides model and factors.
        source: where its factors come from; none for the plain model and for searches.
        second: on the second model instead of the reference model.
    """

    name: str
    kind: str
    settings: Mapping[str, Any]
    source: Source | None = None
    second: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Experiments that come before it."""
        return self.source.needs if self.source is not None else ()


def experiments(sizes: Sizes) -> list[Experiment]:
    """All of them, in an order in which nothing waits for what comes later."""
    return list(_all(sizes))


HEADLINE = tuple(f"main/{short}/{method}" for short in SHORT.values() for method in ("plain", "pi", "lpes"))


def _all(sizes: Sizes) -> Iterator[Experiment]:
    for task in (KV, MDQA):
        yield from _main(task, sizes)
    for task in (KV, MDQA):
        yield from _searches(task, sizes)
    for task in (KV, MDQA):
        yield _evaluate(f"all/{SHORT[task]}/plain", task, sizes.all_questions)
        yield _evaluate(f"all/{SHORT[task]}/lpes", task, sizes.all_questions, Shipped(task))
    yield from _perplexity(sizes)
    yield from _curves_and_controls(sizes)
    for task in (KV, MDQA):
        yield from _peers(task, sizes)
    yield from _transfer(sizes)
    yield from _short(sizes)
    yield from _steps(sizes)
    yield from _ablations(sizes)


def _main(task: str, sizes: Sizes) -> Iterator[Experiment]:
    at, n = f"main/{SHORT[task]}", sizes.questions
    shipped = Shipped(task)
    yield _evaluate(f"{at}/plain", task, n)
    yield _evaluate(f"{at}/pi", task, n, MeanOf(shipped))
    yield _evaluate(f"{at}/lpes", task, n, shipped)
    choice = {"task": task, "examples": sizes.choice_examples, "grid": list(UNIFORM)}
    yield Experiment(f"{at}/uniform-choice", "choose", choice)
    yield _evaluate(f"{at}/uniform", task, n, Chosen(f"{at}/uniform-choice"))


def _peers(task: str, sizes: Sizes) -> Iterator[Experiment]:
    for name, (peer, arguments) in PEERS.items():
        n = sizes.slow_questions if peer in SLOW else sizes.peer_questions
        yield _evaluate(f"main/{SHORT[task]}/{name}", task, n, model=peer, model_args=arguments)


def _searches(task: str, sizes: Sizes) -> Iterator[Experiment]:
    for seed in SEEDS:
        name = f"searches/{SHORT[task]}-{seed}"
        yield _search(name, task, sizes, seed)
        yield _evaluate(f"{name}-held-out", task, sizes.questions, Found(name))
        yield _evaluate(f"{name}-pi", task, sizes.questions, MeanOf(Found(name)))


def _curves_and_controls(sizes: Sizes) -> Iterator[Experiment]:
    """Each differs from the search on key-value retrieval with the same seed in one thing alone."""
    variants: dict[str, dict[str, Any]] = {f"curves/{curve}": {"curve": curve} for curve in CURVES}
    variants |= {f"points/{count}": {"curve": "bezier", "control_points": count} for count in POINTS}
    variants |= {f"controls/{name}": changed for name, changed in CONTROLS.items()}
    variants |= {f"lambda/{name}": {"lambdas": list(weights)} for name, weights in LAMBDAS.items()}
    for name, changed in variants.items():
        for seed in SEEDED.get(name, SEEDS[:1]):
            yield _search(seeded(name, seed), KV, sizes, seed, **changed)
            yield _evaluate(f"{seeded(name, seed)}-held-out", KV, sizes.questions, Found(seeded(name, seed)))


def seeded(name: str, seed: int) -> str:
    """What the search ``name`` is called with another seed than the first."""
    return name if seed == SEEDS[0] else f"{name}-seed-{seed}"


def _steps(sizes: Sizes) -> Iterator[Experiment]:
    """Table 16: at every tenth of the context."""
    sources: dict[str, Source | None] = {"plain": None, "free": Found(f"searches/{SHORT[MDQA]}-{SEEDS[0]}")}
    for curve in ("linear", "bezier"):
        yield _search(f"steps/{curve}", MDQA, sizes, SEEDS[0], curve=curve)
        sources[curve] = Found(f"steps/{curve}")
    for name, source in sources.items():
        yield _evaluate(f"steps/{name}-held-out", f"{MDQA}_steps", sizes.other_questions, source)


def _transfer(sizes: Sizes) -> Iterator[Experiment]:
    found = {task: Found(f"searches/{SHORT[task]}-{SEEDS[0]}") for task in (KV, MDQA)}
    for task, other in ((KV, MDQA), (MDQA, KV)):
        yield _evaluate(f"transfer/{SHORT[other]}-on-{SHORT[task]}", task, sizes.questions, found[other])
    for task, lengths in LENGTHS.items():
        for length in lengths:
            compared: dict[str, Source | None] = {"plain": None, "lpes": found[task], "shipped": Shipped(task)}
            for name, source in compared.items():
                yield _evaluate(
                    f"transfer/{SHORT[task]}-{length}-{name}",
                    task,
                    sizes.other_questions,
                    source,
                    metadata={SIZE_OF[task]: length},
                )
    compared = {"plain": None, "own": Shipped(KV), "transferred": found[KV]}
    for name, source in compared.items():
        yield replace(_evaluate(f"second/{name}", KV, sizes.questions, source), second=True)


def _short(sizes: Sizes) -> Iterator[Experiment]:
    """The plain model where nothing should be wrong with it."""
    for task, lengths in SHORT_LENGTHS.items():
        for length in lengths:
            name = f"short/{SHORT[task]}-{length}"
            yield _evaluate(name, task, sizes.questions, metadata={SIZE_OF[task]: length})


def _ablations(sizes: Sizes) -> Iterator[Experiment]:
    for task in (KV, MDQA):
        for first in (True, False):
            name = f"ablation/{SHORT[task]}-{'first' if first else 'last'}-half"
            yield _evaluate(name, task, sizes.other_questions, HalfOf(Shipped(task), first))
    found = Found("steps/bezier")
    yield _evaluate("ablation/as-found", MDQA, sizes.other_questions, found)
    for point in (None, 0, 1, 2, 3):
        for by in (-MOVE, MOVE):
            name = f"ablation/{'all' if point is None else f'point-{point}'}-{'up' if by > 0 else 'down'}"
            yield _evaluate(name, MDQA, sizes.other_questions, Moved(found, point, by))


def _perplexity(sizes: Sizes) -> Iterator[Experiment]:
    for kind in ROPE_KINDS:
        for with_factors in (False, True):
            settings = {"rope": kind, "texts": sizes.texts, "lengths": list(sizes.ppl_lengths)}
            name = f"perplexity/{kind}{'-lpes' if with_factors else ''}"
            yield Experiment(name, "perplexity", settings, Shipped(KV) if with_factors else None)


def _evaluate(
    name: str,
    task: str,
    questions: int,
    source: Source | None = None,
    *,
    metadata: Mapping[str, Any] | None = None,
    model: str = "lpes",
    model_args: Mapping[str, Any] | None = None,
) -> Experiment:
    settings = {
        "task": task,
        "questions": questions,
        "metadata": dict(metadata or {}),
        "model": model,
        "model_args": dict(model_args or {}),
    }
    return Experiment(name, "evaluate", settings, source)


def _search(name: str, task: str, sizes: Sizes, seed: int, **changed: Any) -> Experiment:
    return Experiment(name, "search", {"flags": search_flags(task, sizes, seed, **changed)})


def search_flags(task: str, sizes: Sizes, seed: int, **changed: Any) -> str:
    """The flags of ``python -m search.ga`` for one search; the only place where they are written."""
    optimizer = changed.get("optimizer", "ga")
    size = dict(sizes.gradient if optimizer == "gradient" else sizes.search)
    if optimizer == "random" or (optimizer == "cma-es" and size.get("start") == "wide"):
        size.pop("start", None)  # which there is none for
    flags = {"tasks": task, "seed": seed, "search_seed": seed, **size, **changed, "held_out_examples": 0}
    words = []
    for name, value in flags.items():
        text = ",".join(f"{part:.4g}" for part in value) if isinstance(value, list) else str(value)
        words += [f"--{name}", text]
    return shlex.join([*words, "--early_stopping"] if optimizer in ("ga", "random") else words)


# -- the commands that experiments equal -------------------------------------------------------------------------------


def lm_eval_command(model: str, model_args: Mapping[str, Any], tasks: str, metadata: Mapping[str, Any], n: int) -> str:
    """The ``lm_eval`` command of an evaluation."""
    command = ["lm_eval", "--model", model]
    if model_args:
        plain = all(isinstance(value, str | int | float) for value in model_args.values())
        text = ",".join(f"{k}={v}" for k, v in model_args.items()) if plain else json.dumps(dict(model_args))
        command += ["--model_args", text]
    command += ["--tasks", tasks]
    if metadata:
        command += ["--metadata", json.dumps(dict(metadata))]
    return shlex.join([*command, "--limit", str(n)])
