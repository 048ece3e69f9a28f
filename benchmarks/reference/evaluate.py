"""Measure a reference model quickly: ``python -m benchmarks.reference.evaluate FOLDER``.

An answer counts as right if greedy decoding would give all of it, the closing quote and the end token included. Greedy
decoding gives a text exactly if each of its tokens is the likeliest after the ones before it, so one forward pass over
context, queries and their answers decides it for all positions of a context at once, with no decoding at all. This is
stricter than ``kv_retrieval``, which asks for the value and not for the quote after it; ``--values`` asks for no
more than that.

With ``--search N`` the command also looks for factors on search examples of its own: the best uniform one, and one a
layer by the search's scan of bands with N evaluations. What it prints for all of them is then measured on other
examples. This is the yardstick of training recipes; ``python -m search.ga`` is the search itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

import lpes_eval
from benchmarks.reference import tokenizer as vocabulary
from benchmarks.reference.queries import Asked, draw, draw_documents, hidden
from lpes_eval import checkpoint, rng
from lpes_eval.errors import UserError
from lpes_eval.flags import at_least, positive
from search.optimizers.bands import BandConfig, BandScan
from search.space import Space

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

POSITIONS = (0, 20, 40, 60, 80, 100)
DOCUMENT_POSITIONS = (0, 25, 50, 75, 100)
SEARCH_STREAM, HELD_OUT_STREAM = 0x5EA4, 0x4E1D
"""First words of the seeds of search and held-out examples; training has a third."""
ENDING = 2
"""Tokens of an answer behind the value: the closing quote, and the end of the text."""
UNIFORM = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0)


@torch.no_grad()
def _answered(model: LlamaForCausalLM, asked: Asked, factors: Sequence[float] | None, values: bool) -> np.ndarray:
    """(B, Q) booleans: is each query's answer right?"""
    context, queries = (torch.tensor(ids, device=model.device) for ids in (asked.context, asked.queries))
    if factors is not None:
        lpes_eval.apply(model, factors)
    states = hidden(model, context, queries)[:, context.shape[1] :].unflatten(1, queries.shape[1:])
    lpes_eval.remove(model)
    answers = asked.answers.copy()
    if values:
        answers[..., -ENDING:] = False
    right: np.ndarray = ((model.lm_head(states).argmax(-1).cpu().numpy() == asked.targets) | ~answers).all(-1)
    return right


def right(
    model: LlamaForCausalLM,
    pairs: int,
    contexts: int,
    factors: Sequence[float] | None = None,
    positions: Sequence[int] = POSITIONS,
    stream: int = HELD_OUT_STREAM,
    values: bool = False,
) -> np.ndarray:
    """(contexts, positions) booleans: is the answer right, with the gold record at each position of each context?

    A position p means record floor(p * (pairs - 1) / 100). Context i is the same whatever else is asked. An answer is
    the value, its closing quote and the end of the text; with ``values``, what follows the value does not count, as in
    the task.
    """
    golds = np.array([position * (pairs - 1) // 100 for position in positions])[None]
    drawn = (draw(np.random.default_rng([stream, pairs, index]), 1, pairs, golds) for index in range(contexts))
    return np.concatenate([_answered(model, asked, factors, values) for asked in drawn])


def right_documents(
    model: LlamaForCausalLM,
    documents: int,
    contexts: int,
    factors: Sequence[float] | None = None,
    positions: Sequence[int] = DOCUMENT_POSITIONS,
    stream: int = HELD_OUT_STREAM,
) -> np.ndarray:
    """As ``right`` for generated articles: each context is asked about the article at each position."""
    golds = [position * (documents - 1) // 100 for position in positions]
    streams = (rng.stream("reference", stream, documents, index) for index in range(contexts))
    return np.concatenate([_answered(model, draw_documents(one, documents, golds), factors, False) for one in streams])


Score = Callable[[Sequence[float]], float]
"""What factors, one a layer, are worth on search examples."""


def search(score: Score, layers: int, evaluations: int) -> tuple[list[float], float]:
    """The best factors found by a scan of bands of layers, one a layer, and their score."""
    space = Space.free(layers, grid=False)
    scan = BandScan(space, BandConfig(individuals=evaluations), start=space.line(1.0, 1.0))
    while not scan.done:
        scan.tell([score([y for _, y in individual.points]) for individual in scan.ask()])
    best, value = scan.best
    return [round(y, 3) for _, y in best.points], value


def best_uniform(score: Score, layers: int) -> tuple[float, dict[float, float]]:
    """The factor above 1 that is best in all layers alike, and what each one is worth."""
    scores = {factor: score([factor] * layers) for factor in UNIFORM[1:]}
    return max(scores, key=lambda factor: scores[factor]), scores


@contextmanager
def without(model: LlamaForCausalLM, layer: int) -> Iterator[None]:
    """Within it the model lacks one layer: what that layer adds to the residual stream is missing."""
    whole = model.model.layers
    model.model.layers = torch.nn.ModuleList(one for index, one in enumerate(whole) if index != layer)
    try:
        yield
    finally:
        model.model.layers = whole


def load(folder: Path) -> LlamaForCausalLM:
    """The model in ``folder``: a finished one, or the last checkpoint of a run that goes on."""
    from transformers import LlamaForCausalLM

    from benchmarks.reference.recipe import Recipe, build, stage_of
    from benchmarks.reference.train import CHECKPOINT

    file = folder / CHECKPOINT
    if not file.exists() and not (folder / "config.json").exists():
        raise UserError(f"{folder}: neither a model (config.json) nor a run ({CHECKPOINT}); name a folder of one")
    if (folder / "config.json").exists():
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    state, stages = checkpoint.notes(file, "state", "stages")
    recipes = [Recipe(**stage) for stage in stages]
    model = build(recipes[stage_of(state["step"] - 1, recipes)])
    checkpoint.restore(file, model)
    print(f"{file}: {state}")
    return model.eval()


def _row(name: str, answers: np.ndarray) -> str:
    shares = "  ".join(f"{100 * share:5.1f}" for share in answers.mean(0))
    error = 100 * answers.mean(1).std(ddof=1) / len(answers) ** 0.5
    return f"{name:<48} {shares}   mean {100 * answers.mean():5.1f} ± {error:.1f}"


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reference.evaluate",
        description="Accuracy by size and gold position, plain and with factors, by teacher forcing.",
    )
    parser.add_argument("folder", type=Path, help="a trained model, or a run with a checkpoint")
    flag, one_or_more, two_or_more = parser.add_argument, at_least(1), at_least(2)
    flag("--sizes", type=one_or_more, nargs="*", default=[8, 16, 24, 32, 40, 50, 75], help="numbers of pairs")
    flag("--documents", type=one_or_more, nargs="*", default=None, help="numbers of articles (2 5 8 10 12)")
    flag("--contexts", type=two_or_more, default=100, help="held-out contexts a size (100)")
    flag("--factors", type=positive, nargs="+", default=None, help="also measure these: one, or one a layer")
    flag("--search", type=at_least(0), default=0, metavar="N", help="also look for factors with N evaluations")
    flag("--search-size", type=one_or_more, default=50, help="pairs in the search examples (50)")
    flag("--search-contexts", type=two_or_more, default=48, help="search examples (48), six positions each")
    flag("--leave-out", action="store_true", help="also measure the model without each of its layers")
    flag("--values", action="store_true", help="records: what follows the value need not be right, as in the task")
    flag("--threads", type=one_or_more, default=2)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    try:
        _measure(given, load(given.folder))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(given: argparse.Namespace, model: LlamaForCausalLM) -> None:
    reads_articles = model.config.vocab_size >= vocabulary.VOCAB_SIZE
    if given.documents and not reads_articles:
        raise UserError(f"--documents: {given.folder} has no words for articles, it reads records alone; leave it out")
    documents = given.documents if given.documents is not None else [2, 5, 8, 10, 12] if reads_articles else []
    layers = model.config.num_hidden_layers
    methods: dict[str, list[float] | None] = {"plain": None}
    if given.factors:
        if len(given.factors) not in (1, layers):
            raise UserError(
                f"--factors: {len(given.factors)} numbers; expected one, or one for each of {layers} layers"
            )
        methods["given"] = given.factors * layers if len(given.factors) == 1 else given.factors
    of_records = partial(right, values=given.values)
    if given.search:
        where = f"{given.search_contexts} search contexts of {given.search_size} pairs"

        def score(factors: Sequence[float]) -> float:
            answers = of_records(model, given.search_size, given.search_contexts, factors, stream=SEARCH_STREAM)
            return float(answers.mean())

        uniform, scores = best_uniform(score, layers)
        print(f"uniform, on {where}: " + "  ".join(f"{key} {100 * value:.1f}" for key, value in scores.items()))
        best, fitness = search(score, layers, given.search)
        print(f"a factor a layer, {given.search} evaluations on {where}: {100 * fitness:.1f}", flush=True)
        methods |= {f"uniform {uniform}": [uniform] * layers, f"{best}": best}
    for what, sizes, positions, measure in (
        ("documents", documents, DOCUMENT_POSITIONS, right_documents),
        ("pairs", given.sizes, POSITIONS, of_records),
    ):
        if sizes:
            print(f"{what + ', method':<48} " + "  ".join(f"{position:4d}%" for position in positions))
        for size in sizes:
            for name, factors in methods.items():
                print(_row(f"{size:3d} {name}", measure(model, size, given.contexts, factors)), flush=True)
            for layer in range(layers) if given.leave_out else ():
                with without(model, layer):
                    answers = measure(model, size, given.contexts)
                print(_row(f"{size:3d} without layer {layer}", answers), flush=True)


if __name__ == "__main__":
    sys.exit(main())
