"""The list of experiments, their sizes, and where their factors come from.

An experiment equals a command of the product, which is kept with its result. Names are paths: what stands before the
last slash says which table it belongs to.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from lpes_eval import methods
from search.parser import PRESETS

Source = tuple[Any, ...]
"""Where an experiment's factors come from; it ends in what they are taken from:

==================================  ===================================================================================
``("shipped", TASK)``               the factors file beside the model's weights
``("found", SEARCH)``               what a search ended with
``("chosen", CHOICE)``              the uniform factor that was best on the search examples
``("mean", SOURCE)``                Position Interpolation at the mean of other factors (section 4.1)
``("half", "first", SOURCE)``       other factors in the first half of the layers alone, or in the ``"last"``
``("moved", POINT, BY, SEARCH)``    a found curve with one of its control points, or with None all of them, moved in y
==================================  ===================================================================================
"""

KV, MDQA = "kv_retrieval", "mdqa_pos"
SHORT = {KV: "kv", MDQA: "mdqa"}
POSITIONS = {KV: (0, 20, 40, 60, 80, 100), MDQA: (0, 25, 50, 75, 100)}
SIZE_OF = {KV: "num_keys", MDQA: "num_documents"}
"""What the metadata of a task calls its size."""
SEEDS = (1, 2, 3, 4, 5)
SEARCHES = {task: {seed: f"searches/{short}-{seed}" for seed in SEEDS} for task, short in SHORT.items()}
"""Five searches a task, by seed."""
CONTROLS: dict[str, tuple[str, dict[str, Any]]] = {
    "start-1.5": ("genetic algorithm from 1.5", {"start": 1.5}),  # as published (Eq. 8)
    "start-wide": ("genetic algorithm, diverse start", {"start": "diverse"}),
    "cma-es": ("CMA-ES from 1", {"optimizer": "cma-es"}),
    "random": ("random search", {"optimizer": "random"}),
    "gradient": ("gradient descent from 1.5", {"optimizer": "gradient"}),
    "gradient-1": ("gradient descent from 1", {"optimizer": "gradient", "start": 1}),
    "bands": ("scan of bands of layers", {"optimizer": "bands"}),
}
"""How else is searched: what the pages call it, and the flags."""
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"curves/{curve}": {"curve": curve} for curve in ("bezier", "linear", "step")},
    **{f"points/{count}": {"curve": "bezier", "control_points": count} for count in (2, 3, 5)},
    **{f"controls/{name}": flags for name, (_, flags) in CONTROLS.items()},
    "lambda/equal": {"lambdas": [1 / 3] * 3},
    "lambda/end": {"lambdas": [0.1, 0.3, 0.6]},
}
"""Searches on key-value retrieval, each of which differs from ``searches/kv-SEED`` in one thing alone. The four control
points of the default curve are ``curves/bezier``; the weights are Table 15's beside the default ones."""
SEEDED = {"curves/bezier": 5, "controls/cma-es": 3, "controls/random": 3, "controls/gradient-1": 3, "controls/bands": 3}
"""Searches that are made with several seeds, because one says little about an optimiser."""
LENGTHS = {KV: (25, 40, 44, 60, 75), MDQA: (5, 8, 12)}
SHORT_LENGTHS = {KV: (5, 10, 15, 20, 25), MDQA: (2, 3, 4, 5)}
"""What fits half of the longest context that the reference model was trained on: up to 25 records, up to 5 articles."""
UNIFORM = (1.0, 1.02, 1.05, 1.08, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0)
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in methods.names() if name not in ("lpes", "pi")},
    "ms_poe-skip-1": ("ms_poe", {"skip": 1}),
}
"""lm-eval model types and their arguments. PI is ``lpes`` with one number, exactly. Ms-PoE leaves its first two layers
alone, which are the two that matter most in the reference model; so it is shown with one left alone, too."""
SLOW = ("attention_buckets", "moice")
PPL_LENGTHS = (512, 1024, 1536, 1792, 2048, 4096)
"""Context lengths in tokens."""

QUESTIONS, ALL_QUESTIONS = 100, 500
"""Held-out questions of an evaluation, each asked at all positions; and all that there are, for plain and LPES."""
PEER_QUESTIONS, SLOW_QUESTIONS, OTHER_QUESTIONS = 50, 16, 50
"""Of a method that lm-eval's own loop has to answer, and of one that costs several times the plain model; and of
ablations and other lengths and positions."""
CHOICE_EXAMPLES, TEXTS = 40, 40
"""Search examples on which the uniform factor is chosen, and texts of the perplexity."""
SEARCH = {
    **{"curve": "free", "start": "1", "population": 12, "parents": 5, "generations": 4},
    **{"mutations": 5, "crossovers": 1, "examples": 20, "lambdas": PRESETS["paper"]["lambdas"]},
}
"""Flags of ``python -m search.ga``. The reference model's second layer needs another factor than its neighbours, which
a Bézier curve over six layers cannot give it, and its score at 1.5 (Eq. 8) is 0: so searches set one factor a layer
and set out from 1."""
DESCENT = {
    **{"generations": 8, "epoch_samples": 40, "gradient_batch": 8, "learning_rate": 0.02},
    **{name: SEARCH[name] for name in ("examples", "lambdas")},
}
"""The same, of gradient descent."""


class Experiment(NamedTuple):
    """What the function of ``measure`` named ``kind`` measures: on the second model where its name begins so."""

    kind: str
    settings: dict[str, Any]
    source: Source | None


def experiments() -> dict[str, Experiment]:
    """All of them by name, in an order in which nothing waits for what comes later."""
    listed: dict[str, Experiment] = {}

    def add(name: str, kind: str, source: Source | None = None, **settings: Any) -> None:
        listed[name] = Experiment(kind, settings, source)

    def evaluate(name: str, task: str, source: Source | None = None, **changed: Any) -> None:
        settings = {"task": task, "questions": QUESTIONS, "metadata": {}, "model": "lpes", "model_args": {}}
        add(name, "evaluate", source, **settings | changed)

    def search(name: str, task: str, seed: int, **changed: Any) -> None:
        add(name, "search", flags=search_flags(task, seed, **changed))

    for task, short in SHORT.items():
        at, shipped = f"main/{short}", ("shipped", task)
        evaluate(f"{at}/plain", task)
        evaluate(f"{at}/pi", task, ("mean", shipped))
        evaluate(f"{at}/lpes", task, shipped)
        add(f"{at}/uniform-choice", "choose", task=task, examples=CHOICE_EXAMPLES, grid=list(UNIFORM))
        evaluate(f"{at}/uniform", task, ("chosen", f"{at}/uniform-choice"))
        evaluate(f"all/{short}/plain", task, questions=ALL_QUESTIONS)
        evaluate(f"all/{short}/lpes", task, shipped, questions=ALL_QUESTIONS)
        for name, (model, arguments) in METHODS.items():
            n = SLOW_QUESTIONS if model in SLOW else PEER_QUESTIONS
            evaluate(f"{at}/{name}", task, questions=n, model=model, model_args=arguments)
        for seed, name in SEARCHES[task].items():
            found = ("found", name)
            search(name, task, seed)
            evaluate(f"{name}-held-out", task, found)
            evaluate(f"{name}-pi", task, ("mean", found))
    for rope in ("plain", "linear", "dynamic", "yarn"):
        settings = {"rope": rope, "texts": TEXTS, "lengths": list(PPL_LENGTHS)}
        add(f"perplexity/{rope}", "perplexity", **settings)
        add(f"perplexity/{rope}-lpes", "perplexity", ("shipped", KV), **settings)
    for variant, changed in VARIANTS.items():
        for seed, name in seeded(variant).items():
            search(name, KV, seed, **changed)
            evaluate(f"{name}-held-out", KV, ("found", name))

    first = {task: ("found", SEARCHES[task][1]) for task in SHORT}
    other = {"questions": OTHER_QUESTIONS}
    for task, trained in ((KV, MDQA), (MDQA, KV)):
        evaluate(f"transfer/{SHORT[trained]}-on-{SHORT[task]}", task, first[trained])
        for length in LENGTHS[task]:
            for name, source in {"plain": None, "lpes": first[task], "shipped": ("shipped", task)}.items():
                at = f"transfer/{SHORT[task]}-{length}-{name}"
                evaluate(at, task, source, metadata={SIZE_OF[task]: length}, **other)
        for length in SHORT_LENGTHS[task]:
            evaluate(f"short/{SHORT[task]}-{length}", task, metadata={SIZE_OF[task]: length})
        for half in ("first", "last"):
            evaluate(f"ablation/{SHORT[task]}-{half}-half", task, ("half", half, ("shipped", task)), **other)
    for name, source in {"plain": None, "own": ("shipped", KV), "transferred": first[KV]}.items():
        evaluate(f"second/{name}", KV, source)

    tenths = {"positions": list(range(0, 101, 10))}  # Table 16
    curves: dict[str, Source] = {curve: ("found", f"steps/{curve}") for curve in ("linear", "bezier")}
    for curve in curves:
        search(f"steps/{curve}", MDQA, 1, curve=curve)
    for name, source in {"plain": None, "free": first[MDQA], **curves}.items():
        evaluate(f"steps/{name}-held-out", MDQA, source, metadata=tenths, **other)

    evaluate("ablation/as-found", MDQA, curves["bezier"], **other)
    for point in (None, 0, 1, 2, 3):
        for way, by in (("down", -0.3), ("up", 0.3)):
            name = f"ablation/{'all' if point is None else f'point-{point}'}-{way}"
            evaluate(name, MDQA, ("moved", point, by, "steps/bezier"), **other)
    return listed


def seeded(name: str) -> dict[int, str]:
    """The searches that one is made of, by seed; the first seed's has the bare name."""
    return {seed: name if seed == 1 else f"{name}-seed-{seed}" for seed in SEEDS[: SEEDED.get(name, 1)]}


def search_flags(task: str, seed: int, optimizer: str = "ga", **changed: Any) -> str:
    """The flags of ``python -m search.ga``."""
    size: dict[str, Any] = dict(DESCENT if optimizer == "gradient" else SEARCH)
    if optimizer == "bands":  # sets out from the plain model, tries band after band of layers, and ends by itself
        size = {name: size[name] for name in ("examples", "lambdas")}
    if optimizer == "random":
        del size["start"]
    flags = {"tasks": task, "seed": seed, "search_seed": seed, "optimizer": optimizer, **size, **changed}
    flags |= {"held_out_examples": 0, "guard": "none"}  # guards are not to decide what the optimisers end with
    if optimizer in ("ga", "random"):
        flags["early_stopping"] = "bound"
    words = []
    for flag, value in flags.items():
        words += [f"--{flag}", ",".join(f"{v:.4g}" for v in value) if isinstance(value, list) else str(value)]
    return shlex.join(words)


def lm_eval_command(model: str, model_args: Mapping[str, Any], tasks: str, metadata: Mapping[str, Any], n: int) -> str:
    """The ``lm_eval`` command of an evaluation."""
    values = {k: json.dumps(v, separators=(",", ":")) if isinstance(v, list) else v for k, v in model_args.items()}
    plain = ",".join(f"{key}={value}" for key, value in values.items())
    nested = any(isinstance(value, dict) for value in values.values())
    arguments = ["--model_args", json.dumps(dict(model_args)) if nested else plain] if model_args else []
    data = ["--metadata", json.dumps(dict(metadata))] if metadata else []
    return shlex.join(["lm_eval", "--model", model, *arguments, "--tasks", tasks, *data, "--limit", str(n)])
