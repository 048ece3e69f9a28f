"""Many queries on one context, each of which sees exactly what its own single-query prompt would hold.

A prompt is a context (instruction and records or documents) and a query. Training asks the same context several times:
the queries lie behind the context, each one's positions start where the context ends, and each attends to the context
and to itself alone. B contexts, C context tokens, Q queries a context, W tokens a query, so T = C + Q*W.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface, LlamaForCausalLM

from benchmarks.reference import tokenizer as vocabulary
from lpes_eval.data import fiction
from lpes_eval.data.documents import TEMPLATE, format_document
from lpes_eval.rng import below, choice, shuffled

IGNORE = -100
ATTENTION = "lpes_queries"


@dataclass
class Asked:
    """Contexts with their queries, as token ids."""

    context: np.ndarray  # (B, C) instruction and records
    queries: np.ndarray  # (B, Q, W) KEY, the key, ASK, ANSWER, the value, QUOTE
    targets: np.ndarray  # (B, Q, W) the id that follows each, IGNORE where the context does not determine it
    answers: np.ndarray  # (B, Q, W) whether the target belongs to the answer, the end token included
    context_targets: np.ndarray  # (B, C) the same as targets, within the context


def _uuid_ids(rng: np.random.Generator, shape: tuple[int, ...], size: int) -> np.ndarray:
    """(*shape, size) ids of the first ``size`` bytes of random version-4 UUIDs (RFC 9562)."""
    raw = rng.integers(0, 256, (*shape, 16))
    raw[..., 6] = raw[..., 6] & 0x0F | 0x40
    raw[..., 8] = raw[..., 8] & 0x3F | 0x80
    base = np.full(16, vocabulary.PAIR_ID)
    base[list(vocabulary.DASHED)] = vocabulary.DASH_PAIR_ID
    return (raw + base)[..., :size]


def draw(rng: np.random.Generator, contexts: int, pairs: int, golds: np.ndarray | int, size: int = 16) -> Asked:
    """Contexts of random records (``size`` bytes of UUIDs), with queries at ``golds``: (B, Q), or how many to draw."""
    piece = vocabulary.PIECE_ID
    keys, values = (_uuid_ids(rng, (contexts, pairs), size) for _ in range(2))
    if isinstance(golds, int):
        golds = rng.permuted(np.tile(np.arange(pairs), (contexts, 1)), axis=1)[:, :golds]
    column = (contexts, pairs, 1)
    ends = np.full(column, piece[vocabulary.NEXT])
    ends[:, -1] = piece[vocabulary.CLOSE]
    records = np.concatenate([keys, np.full(column, piece[vocabulary.COLON]), values, ends], axis=2)
    start = np.tile([piece[vocabulary.HEAD], piece[vocabulary.OPEN]], (contexts, 1))
    context = np.concatenate([start, records.reshape(contexts, -1)], axis=1)

    rows = np.arange(contexts)[:, None]
    gold_keys, gold_values = keys[rows, golds], values[rows, golds]
    fixed = [piece[vocabulary.KEY], piece[vocabulary.ASK], piece[vocabulary.ANSWER]]
    fixed += [vocabulary.QUOTE_ID, vocabulary.END_ID]
    key, ask, answer, quote, end = (np.full((*golds.shape, 1), identifier) for identifier in fixed)
    queries = np.concatenate([key, gold_keys, ask, answer, gold_values, quote], axis=2)
    targets = np.concatenate([queries[:, :, 1:], end], axis=2)
    # A key's byte follows from the bytes before it only once they name one record.
    same = (keys[:, None, :, :] == gold_keys[:, :, None, :]).cumprod(axis=3).sum(axis=2)  # (B, Q, size)
    targets[:, :, 0] = IGNORE
    targets[:, :, 1:size][same[:, :, :-1] > 1] = IGNORE
    answers = np.zeros_like(targets, dtype=bool)
    answers[:, :, size + 1 :] = True
    return Asked(context, queries, targets, answers, np.full_like(context, IGNORE))


_TOKENIZER = vocabulary.build()


def _encode(texts: Iterable[str]) -> list[list[int]]:
    return [encoded.ids for encoded in _TOKENIZER.encode_batch(list(texts), add_special_tokens=False)]


def draw_documents(rng: Random, documents: int, golds: Sequence[int] | int, remarks: int = fiction.REMARKS) -> Asked:
    """One context of generated articles in the prompt of ``mdqa_pos``, with questions about facts in it.

    ``golds`` are the numbers of the articles that are asked about, from 0, or how many of all facts to draw. Queries
    are padded behind their ends. Of a question, a title's tokens have targets once those before them name one article;
    of the context, the subjects that begin a sentence.
    """
    kind, articles = fiction.shelf(documents, rng, remarks)
    if isinstance(golds, int):
        facts = [(i, fact) for i in range(documents) for fact in range(len(kind.facts))]
        drawn = shuffled(facts, rng)[:golds]
    else:
        drawn = [(i, below(len(kind.facts), rng)) for i in golds]
    head, between = TEMPLATE.split("{search_results}")
    before, between = between.split("{question}")
    wordings = [choice(kind.facts[fact].questions, rng).split("{title}") for _, fact in drawn]

    (context,) = _encode([head + "\n".join(format_document(i, one.document()) for i, one in enumerate(articles, 1))])
    titles = _encode(" " + article.title for article in articles)
    opened = _encode(before + lead.rstrip(" ") for lead, _ in wordings)
    closed = _encode(tail + between for _, tail in wordings)
    values = _encode(" " + articles[i].values[fact].answers[0] for i, fact in drawn)

    asked = [a + titles[i] + b + value for (i, _), a, b, value in zip(drawn, opened, closed, values, strict=True)]
    shape = (1, len(drawn), max(map(len, asked)))
    queries, targets = np.full(shape, vocabulary.PAD_ID), np.full(shape, IGNORE)
    answers = np.zeros(shape, dtype=bool)
    for row, ((i, _), a, value, ids) in enumerate(zip(drawn, opened, values, asked, strict=True)):
        title, answer = titles[i], slice(len(ids) - len(value) - 1, len(ids))
        queries[0, row, : len(ids)] = ids
        for n in range(1, len(title)):
            if sum(other[:n] == title[:n] for other in titles) == 1:
                targets[0, row, len(a) + n - 1] = title[n]
        targets[0, row, answer] = [*value, vocabulary.END_ID]
        answers[0, row, answer] = True

    context_targets = np.full((1, len(context)), IGNORE)
    subjects, ends = _encode(" " + article.subject for article in articles), {2 + ord(end) for end in ")."}
    for at in range(1, len(context)):
        for subject in subjects if context[at - 1] in ends else ():  # it follows a title or a sentence
            if context[at : at + len(subject)] == subject:
                context_targets[0, at - 1 : at - 1 + len(subject)] = subject
    return Asked(np.array([context]), queries, targets, answers, context_targets)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, scaling: float,
    context: int = 0, width: int = 0, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal attention over the context; from each query of ``width`` tokens over the context and itself."""
    attention = functional.scaled_dot_product_attention
    first = attention(query[:, :, :context], key[:, :, :context], value[:, :, :context], is_causal=True, scale=scaling)
    asked = query.shape[2] - context
    if not asked:
        return first.transpose(1, 2).contiguous(), None
    own = torch.ones(width, width, dtype=torch.bool).tril()
    own = torch.block_diag(*[own] * (asked // width)).bool()
    mask = torch.cat([own.new_ones(asked, context), own], dim=1)
    second = attention(query[:, :, context:], key, value, attn_mask=mask, scale=scaling)
    return torch.cat([first, second], dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)


def hidden(model: LlamaForCausalLM, context: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """(B, T, width of the model) last hidden states for ``context`` (B, C) and ``queries`` (B, Q, W), Q may be 0."""
    model.config._attn_implementation = ATTENTION
    inner = model.model
    (_, size), (_, asked, width) = context.shape, queries.shape
    positions = torch.cat([torch.arange(size), size + torch.arange(width).repeat(asked)])[None]
    states = inner.embed_tokens(torch.cat([context, queries.flatten(1)], dim=1))
    tables = inner.rotary_emb(states, positions)
    for layer in inner.layers:
        states = layer(
            states, attention_mask=None, position_embeddings=tables, context=size, width=width, use_cache=False
        )
    return inner.norm(states)
