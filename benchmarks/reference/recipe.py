"""The recipes of the reference models: what decides their weights, and the models that they start from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from benchmarks.reference import tokenizer as vocabulary
from lpes_eval.data import fiction
from lpes_eval.errors import UserError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

WINDOW = 8192


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a stage's weights, apart from where it begins, the processor and library versions."""

    seed: int = 0
    layers: int = 4
    width: int = 128
    heads: int = 4
    feed_forward: int = 256
    vocabulary: int = vocabulary.RECORDS_SIZE
    """Entries of the tokenizer that the model knows: those of key-value prompts, or all."""
    grow_to: int = 40
    """Contexts grow by four records at a time up to this many."""
    pairs: int = 40
    """Most records in a context of the last level; may be more than the growth goes to."""
    length_power: float = 1.0
    """At the last level a context has 4 + (pairs - 4) * u**power records, u uniform: above 1, as in the corpora that
    large models see, long contexts are rarer than short ones. Before it all lengths are equally frequent."""
    articles: float = 0.0
    """Share of batches, once the model copies, that are generated articles with questions (``mdqa_pos``)."""
    documents: int = 8
    """Most articles in a context: one until the answers are right, then any number up to this one."""
    subjects: int = 0
    """1: an article's subject is a target, too, where its sentences begin with it."""
    remarks: int = 0
    """Sentences of an article that nobody asks about; the articles of the task have four."""
    queries: int = 24
    """Most queries on one context."""
    tokens: int = 6000
    """Tokens in a batch."""
    copy_steps: int = 2000
    """Most steps of the copying phase; it ends early once the model copies."""
    steps: int = 4000
    """Step, counted over all stages, at which this one ends."""
    rate: float = 2e-3
    decay_share: float = 0.25
    """Share of the steps, at the end, over which the learning rate falls to zero."""
    weight_decay: float = 0.02
    advance_at: float = 0.95
    """Share of answer tokens right, in the longest contexts of a level, at which the next level begins."""
    threads: int = 1
    """Processor threads: sums may be grouped by thread, so they are part of the recipe (that one and two gave other
    weights was not seen)."""


RECORDS = (
    Recipe(steps=1300, decay_share=0.0),
    Recipe(steps=2300, grow_to=32, pairs=32),
    Recipe(steps=3000, grow_to=44, pairs=44),
)
"""The smaller shipped model, which knows records alone: contexts of up to 28 records, then 32, then 44."""

_ARTICLES = Recipe(
    layers=6,
    vocabulary=vocabulary.VOCAB_SIZE,
    grow_to=32,
    pairs=32,
    articles=0.7,
    documents=5,
    subjects=1,
    rate=1.5e-3,
    decay_share=0.0,
)
_REMARKS = replace(_ARTICLES, grow_to=48, pairs=48, documents=6, remarks=5)
REFERENCE = (
    RECORDS[0],
    replace(_ARTICLES, steps=3000),
    replace(_REMARKS, steps=4400),
    replace(_REMARKS, steps=5400, grow_to=53, pairs=53, rate=1e-3, decay_share=0.12),
)
"""The shipped model: the first stage of ``RECORDS``, then two layers more, and articles in 7 of 10 batches: one until
it is read, then up to five, and from step 3,000 on up to six with remarks, one more than those of the task make."""

_SMOKE = Recipe(layers=2, width=32, heads=2, feed_forward=64, pairs=8, tokens=400, copy_steps=4, steps=8, queries=4)
_SMOKE_ARTICLES = replace(_SMOKE, layers=3, vocabulary=vocabulary.VOCAB_SIZE, articles=0.5, documents=2)
SMOKE = (
    _SMOKE,
    replace(_SMOKE, steps=12, pairs=10),
    replace(_SMOKE_ARTICLES, steps=18),
    replace(_SMOKE_ARTICLES, steps=24, remarks=fiction.REMARKS, subjects=1),
)
"""A run of seconds that goes through every phase."""


_LIMITS = {
    **dict.fromkeys(("seed", "copy_steps", "rate", "length_power", "weight_decay"), (0, sys.maxsize)),
    **dict.fromkeys(("articles", "decay_share", "advance_at", "subjects"), (0, 1)),
    **dict.fromkeys(("pairs", "grow_to"), (4, sys.maxsize)),
    "remarks": (0, min(len(kind.remarks) for kind in fiction.KINDS)),
    "tokens": (18, sys.maxsize),
    "vocabulary": (vocabulary.RECORDS_SIZE, vocabulary.VOCAB_SIZE),
}
"""The least and the most that a number of a recipe can be; 1 and more where nothing is said. What is copied is at least
eight tokens long, twice, and a context has four records or more."""


def check(recipe: Recipe) -> None:
    """Whether a model can be trained so.

    Raises:
        UserError: the flag with which it cannot, what it was, and what it can be.
    """
    for name, value in asdict(recipe).items():
        least, most = _LIMITS.get(name, (1, sys.maxsize))
        if not least <= value <= most:
            allowed = f"{least} or more" if most == sys.maxsize else f"{least} to {most}"
            raise UserError(f"{flag(name)} {value}: expected {allowed}")
    if recipe.width % (2 * recipe.heads):
        raise UserError(
            f"--width {recipe.width}: expected a multiple of {2 * recipe.heads}, as each of {recipe.heads} heads turns "
            "its numbers in pairs"
        )
    if recipe.articles and recipe.vocabulary < vocabulary.VOCAB_SIZE:
        raise UserError(
            f"--vocabulary {recipe.vocabulary}: expected all {vocabulary.VOCAB_SIZE} entries, as articles need them"
        )


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def levels(recipe: Recipe) -> list[tuple[int, int]]:
    """(bytes of keys and values, most records) of each level of the second phase."""
    first = min(8, recipe.pairs)
    longer = [(16, pairs) for pairs in range(first + 4, recipe.grow_to + 1, 4) if pairs < recipe.pairs]
    return list(dict.fromkeys([(2, first), (4, first), (8, first), (16, first), *longer, (16, recipe.pairs)]))


def build(recipe: Recipe) -> LlamaForCausalLM:
    """The untrained model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.width,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
        pad_token_id=vocabulary.PAD_ID,
        eos_token_id=vocabulary.END_ID,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def grow(model: LlamaForCausalLM, recipe: Recipe) -> LlamaForCausalLM:
    """A model of ``recipe``'s depth and vocabulary that computes what ``model`` does: its new layers add nothing yet.

    They come last, and start with zeros in the two projections that write to the residual stream, so that both get
    gradients from the first step on. What the new entries of the vocabulary start with is drawn.
    """
    deeper = build(recipe)
    before, after = model.state_dict(), deeper.state_dict()
    for name, weight in before.items():
        after[name][: len(weight)] = weight
    for name, weight in after.items():
        if name not in before and name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    return deeper


def stage_of(step: int, stages: Sequence[Recipe]) -> int:
    """Which stage makes step number ``step``, counted from 0."""
    return next((index for index, stage in enumerate(stages) if step < stage.steps), len(stages) - 1)


def grows(index: int, stages: Sequence[Recipe]) -> bool:
    """Whether a stage's model is larger than the one before it."""
    sizes = [(stage.layers, stage.vocabulary) for stage in stages]
    return index > 0 and sizes[index] != sizes[index - 1]
