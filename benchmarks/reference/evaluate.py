"""Measure a reference model quickly: ``python -m benchmarks.reference.evaluate FOLDER``.

An answer counts as right if greedy decoding would give all of it, the closing quote and the end token included. Greedy
decoding gives a text exactly if each of its tokens is the likeliest after the ones before it, so one forward pass over
context, queries and their answers decides it for all positions of a context at once, with no decoding at all. This is
stricter than ``kv_retrieval``, which asks for the value and not for the quote after it; ``--values`` asks for no
more than that.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

import lpes_eval
from benchmarks.reference import tokenizer as vocabulary
from benchmarks.reference.queries import Asked, draw, draw_documents, hidden
from benchmarks.reference.recipe import Recipe, build, stage_of
from benchmarks.reference.train import CHECKPOINT
from lpes_eval import checkpoint, rng
from lpes_eval.errors import UserError, program
from lpes_eval.flags import at_least, positive
from lpes_eval.harness.task import gold_index

POSITIONS = (0, 20, 40, 60, 80, 100)
DOCUMENT_POSITIONS = (0, 25, 50, 75, 100)
HELD_OUT_STREAM = 0x4E1D
"""First word of the seeds of held-out examples; training has another."""
ENDING = 2
"""Tokens of an answer behind the value: the closing quote, and the end of the text."""


@torch.no_grad()
def _answered(model: LlamaForCausalLM, asked: Asked, factors: Sequence[float] | float | None) -> np.ndarray:
    """(B, Q) booleans: is each query's answer right?"""
    context, queries = (torch.tensor(ids, device=model.device) for ids in (asked.context, asked.queries))
    if factors is not None:
        lpes_eval.apply(model, factors)
    states = hidden(model, context, queries)[:, context.shape[1] :].unflatten(1, queries.shape[1:])
    lpes_eval.remove(model)
    right: np.ndarray = model.lm_head(states).argmax(-1).cpu().numpy() == asked.targets
    return (right | ~asked.answers).all(-1)


def right(
    model: LlamaForCausalLM,
    pairs: int,
    contexts: int,
    factors: Sequence[float] | float | None = None,
    values: bool = False,
) -> np.ndarray:
    """(contexts, positions) booleans: is the answer right, with the gold record at each position of each context?

    Context i is the same whatever else is asked. With ``values``, what follows the value in an answer does not count.
    """
    golds, answered = np.array([[gold_index(position, pairs) for position in POSITIONS]]), []
    for index in range(contexts):
        asked = draw(np.random.default_rng([HELD_OUT_STREAM, pairs, index]), 1, pairs, golds)
        if values:
            asked.answers[..., -ENDING:] = False
        answered.append(_answered(model, asked, factors))
    return np.concatenate(answered)


def right_documents(
    model: LlamaForCausalLM, documents: int, contexts: int, factors: Sequence[float] | float | None = None
) -> np.ndarray:
    """As ``right`` for generated articles: each context is asked about the article at each position."""
    golds = [gold_index(position, documents) for position in DOCUMENT_POSITIONS]
    streams = (rng.stream("reference", HELD_OUT_STREAM, documents, index) for index in range(contexts))
    return np.concatenate([_answered(model, draw_documents(one, documents, golds), factors) for one in streams])


def load(folder: Path) -> LlamaForCausalLM:
    """The model in ``folder``: a finished one, or the last checkpoint of a run that goes on."""
    if (folder / "config.json").exists():
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    file = folder / CHECKPOINT
    if not file.exists():
        raise UserError(f"{folder}: neither a model (config.json) nor a run ({CHECKPOINT}); name a folder of one")
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


@program("evaluate")
def main(arguments: list[str] | None = None) -> None:
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
    flag("--leave-out", action="store_true", help="also measure the model without each of its layers")
    flag("--values", action="store_true", help="records: what follows the value need not be right, as in the task")
    given = parser.parse_args(arguments)
    model = load(given.folder)
    reads_articles = model.config.vocab_size >= vocabulary.VOCAB_SIZE
    if given.documents and not reads_articles:
        raise UserError(f"--documents: {given.folder} has no words for articles, it reads records alone; leave it out")
    documents = given.documents if given.documents is not None else [2, 5, 8, 10, 12] if reads_articles else []
    layers = list(model.model.layers)
    methods: dict[str, list[float] | float | None] = {"plain": None}
    if given.factors:
        if len(given.factors) not in (1, len(layers)):
            expected = f"expected one, or one for each of {len(layers)} layers"
            raise UserError(f"--factors: {len(given.factors)} numbers; {expected}")
        methods["given"] = given.factors[0] if len(given.factors) == 1 else given.factors
    for what, sizes, positions, measure in (
        ("documents", documents, DOCUMENT_POSITIONS, right_documents),
        ("pairs", given.sizes, POSITIONS, partial(right, values=given.values)),
    ):
        if sizes:
            print(f"{what + ', method':<48} " + "  ".join(f"{position:4d}%" for position in positions))
        for size in sizes:
            for name, factors in methods.items():
                print(_row(f"{size:3d} {name}", measure(model, size, given.contexts, factors)), flush=True)
            for left_out in range(len(layers)) if given.leave_out else ():
                model.model.layers = torch.nn.ModuleList(layers[:left_out] + layers[left_out + 1 :])
                print(_row(f"{size:3d} without layer {left_out}", measure(model, size, given.contexts)), flush=True)
            model.model.layers = torch.nn.ModuleList(layers)


if __name__ == "__main__":
    sys.exit(main())
