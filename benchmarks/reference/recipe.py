"""The recipes of the reference models: what decides their weights, and the models that they start from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.reference import tokenizer as vocabulary
from lpes_eval.data import fiction

WINDOW = 8192


@dataclass(frozen=True)
class Recipe:
    """What decides a stage's weights, beside where it begins, the processor and library versions."""

    seed: int = 0
    layers: int = 4
    width: int = 128
    heads: int = 4
    feed_forward: int = 256
    vocabulary: int = vocabulary.RECORDS_SIZE  # entries of the tokenizer: those of records, or all, for articles
    pairs: int = 40  # most records in a context: 8 at first, then four more a level
    articles: float = 0.0  # share of batches, once the model copies, that are generated articles with questions
    documents: int = 8  # most articles in a context: one until the answers are right, then any number up to this one
    remarks: int = 0  # sentences of an article that nobody asks about; the articles of the task have four
    queries: int = 24  # most queries on one context
    tokens: int = 6000  # in a batch
    copy_steps: int = 2000  # most steps of the copying phase; it ends early once the model copies
    steps: int = 4000  # step, counted over all stages, at which this one ends
    rate: float = 2e-3
    decay_share: float = 0.25  # share of the steps, at the end, over which the learning rate falls to zero
    weight_decay: float = 0.02
    advance_at: float = 0.95  # share of answer tokens right, in a level's longest contexts, at which the next begins


RECORDS = (
    Recipe(steps=1300, decay_share=0.0),
    Recipe(steps=2300, pairs=32),
    Recipe(steps=3000, pairs=44),
)
"""The smaller shipped model, which knows records alone: contexts of up to 28 records, then 32, then 44."""

_ARTICLES = Recipe(
    layers=6, vocabulary=vocabulary.VOCAB_SIZE, pairs=32, articles=0.7, documents=5, rate=1.5e-3, decay_share=0.0
)
_REMARKS = replace(_ARTICLES, pairs=48, documents=6, remarks=5)
REFERENCE = (
    RECORDS[0],
    replace(_ARTICLES, steps=3000),
    replace(_REMARKS, steps=4400),
    replace(_REMARKS, steps=5400, pairs=53, rate=1e-3, decay_share=0.12),
)
"""The shipped model: two layers more from step 1,300 on, and articles in 7 of 10 batches."""

_SMOKE = Recipe(layers=2, width=32, heads=2, feed_forward=64, pairs=8, tokens=400, copy_steps=4, steps=8, queries=4)
_SMOKE_ARTICLES = replace(_SMOKE, layers=3, vocabulary=vocabulary.VOCAB_SIZE, articles=0.5, documents=2)
SMOKE = (
    _SMOKE,
    replace(_SMOKE, steps=12, pairs=10),
    replace(_SMOKE_ARTICLES, steps=18),
    replace(_SMOKE_ARTICLES, steps=24, remarks=fiction.REMARKS),
)
"""A run of seconds that goes through every phase."""


def levels(recipe: Recipe) -> list[tuple[int, int]]:
    """(bytes of keys and values, most records) of each level of the second phase."""
    return [(2, 8), (4, 8), (8, 8), *((16, pairs) for pairs in range(8, recipe.pairs, 4)), (16, recipe.pairs)]


def build(recipe: Recipe) -> LlamaForCausalLM:
    """The untrained model."""
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
    """A model of ``recipe``'s depth and vocabulary that computes what ``model`` does.

    New layers come last and add nothing yet: the two projections that write to the residual stream start with zeros.
    """
    deeper = build(recipe)
    before, after = model.state_dict(), deeper.state_dict()
    for name, weight in before.items():
        after[name][: len(weight)] = weight
    for name, weight in after.items():
        if name not in before and name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    return deeper


def stage_of(step: int, stages: Sequence[Recipe]) -> tuple[Recipe, int]:
    """The stage that makes step number ``step``, counted from 0, and the step from which its model has this size."""
    now = next((stage for stage in stages if step < stage.steps), stages[-1])
    other = [stage for stage in stages if (stage.layers, stage.vocabulary) != (now.layers, now.vocabulary)]
    return now, max((stage.steps for stage in other if stage.steps < now.steps), default=0)
