"""The list of experiments, and their sizes.

An experiment equals a command of the product, which is kept with its result. Names are paths: what stands before the
last slash says which table it belongs to.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.experiments.sources import Chosen, Found, HalfOf, MeanOf, Moved, Shipped, Source
from lpes_eval import methods
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
    "start-wide": {"start": "diverse"},
    "cma-es": {"optimizer": "cma-es"},
    "random": {"optimizer": "random"},
    "gradient": {"optimizer": "gradient"},
    "gradient-1": {"optimizer": "gradient", "start": 1},
    "bands": {"optimizer": "bands"},
}
"""How else is searched: from the published start (Eq. 8) or a diverse population, by other optimisers, by gradient
descent from 1.5 and 1."""
SEEDED = {
    "curves/bezier": SEEDS,
    "controls/cma-es": SEEDS[:3],
    "controls/random": SEEDS[:3],
    "controls/gradient-1": SEEDS[:3],
    "controls/bands": SEEDS[:3],
}
"""Searches that are made with several seeds, because one says little about an optimiser; those of other optimisers than
the genetic algorithm with three, for want of time."""
LAMBDAS = {"equal": (1 / 3, 1 / 3, 1 / 3), "end": (0.1, 0.3, 0.6)}
"""Table 15's weightings beside the default one."""
LENGTHS = {KV: (25, 40, 44, 60, 75), MDQA: (5, 8, 12)}
SHORT_LENGTHS = {KV: (5, 10, 15, 20, 25), MDQA: (2, 3, 4, 5)}
"""What fits half of the longest context that the reference model was trained on: up to 25 records, up to 5 articles."""
UNIFORM = (1.0, 1.02, 1.05, 1.08, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"ms_poe-skip-1": ("ms_poe", {"skip": 1})}
"""Methods with other arguments. Ms-PoE leaves its first two layers alone, which are the two that matter most in the
reference model; so it is shown with one left alone, too."""
METHODS = {name: (name, {}) for name in methods.names() if name not in ("lpes", "pi")} | VARIANTS
"""lm-eval model types and their arguments. PI is ``lpes`` with one number, exactly."""
SLOW = ("attention_buckets", "moice")
ROPE_KINDS = ("plain", "linear", "dynamic", "yarn")
PPL_LENGTHS = (512, 1024, 1536, 1792, 2048, 4096)
"""Context lengths in tokens."""
MOVE = 0.3

SIZES: dict[str, Any] = {
    "questions": 100,  # held-out questions of an evaluation, each asked at all positions
    "all_questions": 500,  # of plain and LPES once more: all that there are
    "peer_questions": 50,  # of a method that lm-eval's own loop has to answer: the first of these questions
    "slow_questions": 16,  # of methods that cost several times the plain model
    "other_questions": 50,  # of ablations, and at other lengths and positions
    "choice_examples": 40,  # search examples on which the uniform factor is chosen
    "texts": 40,  # of the perplexity
    "search.curve": "free",
    "search.start": 1,
    "search.population": 12,
    "search.parents": 5,
    "search.generations": 4,
    "search.mutations": 5,
    "search.crossovers": 1,
    "search.examples": 20,
    "gradient.generations": 8,
    "gradient.epoch_samples": 40,
    "gradient.gradient_batch": 8,
    "gradient.learning_rate": 0.02,
    "gradient.examples": 20,
}
"""How much is measured; ``search.`` and ``gradient.`` are flags of ``python -m search.ga``. The reference model's
second layer needs another factor than its neighbours, which a Bézier curve over six layers cannot give it, and its
score at 1.5 (Eq. 8) is 0: so searches set one factor a layer and set out from 1."""


def resized(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes with other values.

    Raises:
        UserError: a name that there is not, or a value that is no number of the size's kind.
    """
    for name, value in changes.items():
        if name not in SIZES:
            raise UserError(f"--set {name}: no such size; there are {', '.join(SIZES)}")
        whole, least = isinstance(SIZES[name], int), 0 if "." in name else 1
        if name in ("search.curve", "search.start"):
            continue  # words, which the search itself checks
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value < least:
            raise UserError(f"--set {name}={value}: expected a {'whole ' if whole else ''}number, at least {least}")
    return SIZES | dict(changes)


@dataclass(frozen=True)
class Experiment:
    """Something to be measured.

    Attributes:
        name: its name, which is its result's.
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


HEADLINE = tuple(f"main/{short}/{method}" for short in SHORT.values() for method in ("plain", "pi", "lpes"))


def experiments(sizes: Mapping[str, Any] = SIZES) -> list[Experiment]:
    """All of them, in an order in which nothing waits for what comes later."""
    return [
        *(one for task in SHORT for one in _main(task, sizes)),
        *(one for task in SHORT for one in _searches(task, sizes)),
        *(one for task in SHORT for one in _all_questions(task, sizes)),
        *_perplexity(sizes),
        *_variants(sizes),
        *(one for task in SHORT for one in _methods(task, sizes)),
        *_transfer(sizes),
        *_short(sizes),
        *_steps(sizes),
        *_ablations(sizes),
    ]


def _main(task: str, sizes: Mapping[str, Any]) -> Iterator[Experiment]:
    at, n, shipped = f"main/{SHORT[task]}", sizes["questions"], Shipped(task)
    yield _evaluate(f"{at}/plain", task, n)
    yield _evaluate(f"{at}/pi", task, n, MeanOf(shipped))
    yield _evaluate(f"{at}/lpes", task, n, shipped)
    choice = {"task": task, "examples": sizes["choice_examples"], "grid": list(UNIFORM)}
    yield Experiment(f"{at}/uniform-choice", "choose", choice)
    yield _evaluate(f"{at}/uniform", task, n, Chosen(f"{at}/uniform-choice"))


def _all_questions(task: str, sizes: Mapping[str, Any]) -> Iterator[Experiment]:
    yield _evaluate(f"all/{SHORT[task]}/plain", task, sizes["all_questions"])
    yield _evaluate(f"all/{SHORT[task]}/lpes", task, sizes["all_questions"], Shipped(task))


def _methods(task: str, sizes: Mapping[str, Any]) -> Iterator[Experiment]:
    for name, (model, arguments) in METHODS.items():
        n = sizes["slow_questions" if model in SLOW else "peer_questions"]
        yield _evaluate(f"main/{SHORT[task]}/{name}", task, n, model=model, model_args=arguments)


def _searches(task: str, sizes: Mapping[str, Any]) -> Iterator[Experiment]:
    for seed in SEEDS:
        name = f"searches/{SHORT[task]}-{seed}"
        yield _search(name, task, sizes, seed)
        yield _evaluate(f"{name}-held-out", task, sizes["questions"], Found(name))
        yield _evaluate(f"{name}-pi", task, sizes["questions"], MeanOf(Found(name)))


def _variants(sizes: Mapping[str, Any]) -> Iterator[Experiment]:
    """Each differs from the search on key-value retrieval with the same seed in one thing alone."""
    variants: dict[str, dict[str, Any]] = {f"curves/{curve}": {"curve": curve} for curve in CURVES}
    variants |= {f"points/{count}": {"curve": "bezier", "control_points": count} for count in POINTS}
    variants |= {f"controls/{name}": changed for name, changed in CONTROLS.items()}
    variants |= {f"lambda/{name}": {"lambdas": list(weights)} for name, weights in LAMBDAS.items()}
    for variant, changed in variants.items():
        for seed, name in seeded(variant).items():
            yield _search(name, KV, sizes, seed, **changed)
            yield _evaluate(f"{name}-held-out", KV, sizes["questions"], Found(name))


def seeded(name: str) -> dict[int, str]:
    """The searches that one is made of, by seed; the first seed's has the bare name."""
    return {seed: name if seed == SEEDS[0] else f"{name}-seed-{seed}" for seed in SEEDED.get(name, SEEDS[:1])}


def _steps(sizes: Mapping[str, Any]) -> Iterator[Experiment]:
    """Table 16: at every tenth of the context."""
    sources: dict[str, Source | None] = {"plain": None, "free": Found(f"searches/{SHORT[MDQA]}-{SEEDS[0]}")}
    for curve in ("linear", "bezier"):
        yield _search(f"steps/{curve}", MDQA, sizes, SEEDS[0], curve=curve)
        sources[curve] = Found(f"steps/{curve}")
    tenths = {"positions": list(range(0, 101, 10))}
    for name, source in sources.items():
        yield _evaluate(f"steps/{name}-held-out", MDQA, sizes["other_questions"], source, metadata=tenths)


def _transfer(sizes: Mapping[str, Any]) -> Iterator[Experiment]:
    found = {task: Found(f"searches/{SHORT[task]}-{SEEDS[0]}") for task in SHORT}
    for task, other in ((KV, MDQA), (MDQA, KV)):
        yield _evaluate(f"transfer/{SHORT[other]}-on-{SHORT[task]}", task, sizes["questions"], found[other])
    for task, lengths in LENGTHS.items():
        for length in lengths:
            compared: dict[str, Source | None] = {"plain": None, "lpes": found[task], "shipped": Shipped(task)}
            for name, source in compared.items():
                size, n = {SIZE_OF[task]: length}, sizes["other_questions"]
                yield _evaluate(f"transfer/{SHORT[task]}-{length}-{name}", task, n, source, metadata=size)
    for name, source in {"plain": None, "own": Shipped(KV), "transferred": found[KV]}.items():
        yield replace(_evaluate(f"second/{name}", KV, sizes["questions"], source), second=True)


def _short(sizes: Mapping[str, Any]) -> Iterator[Experiment]:
    """The plain model where nothing should be wrong with it."""
    for task, lengths in SHORT_LENGTHS.items():
        for length in lengths:
            size = {SIZE_OF[task]: length}
            yield _evaluate(f"short/{SHORT[task]}-{length}", task, sizes["questions"], metadata=size)


def _ablations(sizes: Mapping[str, Any]) -> Iterator[Experiment]:
    n, found = sizes["other_questions"], Found("steps/bezier")
    for task in SHORT:
        for half in ("first", "last"):
            yield _evaluate(f"ablation/{SHORT[task]}-{half}-half", task, n, HalfOf(Shipped(task), half == "first"))
    yield _evaluate("ablation/as-found", MDQA, n, found)
    for point in (None, 0, 1, 2, 3):
        for way, by in (("down", -MOVE), ("up", MOVE)):
            name = f"ablation/{'all' if point is None else f'point-{point}'}-{way}"
            yield _evaluate(name, MDQA, n, Moved(found, point, by))


def _perplexity(sizes: Mapping[str, Any]) -> Iterator[Experiment]:
    for kind in ROPE_KINDS:
        settings = {"rope": kind, "texts": sizes["texts"], "lengths": list(PPL_LENGTHS)}
        yield Experiment(f"perplexity/{kind}", "perplexity", settings)
        yield Experiment(f"perplexity/{kind}-lpes", "perplexity", settings, Shipped(KV))


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
    settings = {"task": task, "questions": questions, "metadata": dict(metadata or {})}
    return Experiment(name, "evaluate", settings | {"model": model, "model_args": dict(model_args or {})}, source)


def _search(name: str, task: str, sizes: Mapping[str, Any], seed: int, **changed: Any) -> Experiment:
    optimizer = changed.pop("optimizer", "ga")
    group = "gradient." if optimizer == "gradient" else "search."
    size = {key.removeprefix(group): value for key, value in sizes.items() if key.startswith(group)}
    if optimizer == "bands":  # sets out from the plain model, tries band after band of layers, and ends by itself
        size = {"examples": size["examples"]}
    if optimizer == "random" or (optimizer == "cma-es" and size.get("start") == "diverse"):
        size.pop("start", None)  # which there is none for
    flags = {"tasks": task, "seed": seed, "search_seed": seed, "optimizer": optimizer, **size, **changed}
    flags["held_out_examples"] = 0
    if optimizer in ("ga", "random"):
        flags["early_stopping"] = "bound"
    words = []
    for flag, value in flags.items():
        words += [f"--{flag}", ",".join(f"{v:.4g}" for v in value) if isinstance(value, list) else str(value)]
    return Experiment(name, "search", {"flags": shlex.join(words)})


def lm_eval_command(model: str, model_args: Mapping[str, Any], tasks: str, metadata: Mapping[str, Any], n: int) -> str:
    """The ``lm_eval`` command of an evaluation."""
    command = ["lm_eval", "--model", model]
    if model_args:
        plain = not any(isinstance(value, dict) for value in model_args.values())
        values = {k: json.dumps(v, separators=(",", ":")) if isinstance(v, list) else v for k, v in model_args.items()}
        text = ",".join(f"{k}={v}" for k, v in values.items()) if plain else json.dumps(dict(model_args))
        command += ["--model_args", text]
    command += ["--tasks", tasks]
    if metadata:
        command += ["--metadata", json.dumps(dict(metadata))]
    return shlex.join([*command, "--limit", str(n)])
