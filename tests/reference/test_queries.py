"""Many queries on one context, against one plain forward pass of transformers for each prompt."""

import re
import uuid
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lpes_eval
from benchmarks.reference import tokenizer as vocabulary
from benchmarks.reference.queries import draw, draw_documents, hidden
from benchmarks.reference.recipe import SMOKE, build
from lpes_eval import rng
from lpes_eval.data import fiction, kv
from lpes_eval.data.documents import TEMPLATE

TOKENIZER = vocabulary.build()


@torch.no_grad()
@pytest.mark.parametrize("stage", [0, -1], ids=["records", "articles"])
@pytest.mark.parametrize("factors", [[1.0, 1.0, 1.0], [1.3, 1.7, 1.1]], ids=["plain", "with factors"])
def test_each_query_gives_what_its_own_prompt_gives(stage, factors):
    """Questions about articles differ in length, and shorter ones are padded."""
    model = build(SMOKE[stage]).eval()
    lpes_eval.apply(model, factors[: len(model.model.layers)])
    asked = draw_documents(Random(1), 3, 6) if stage else draw(np.random.default_rng(0), 2, 5, 3)
    size, questions = asked.context.shape[1], asked.queries.shape[1:]
    states = hidden(model, torch.tensor(asked.context), torch.tensor(asked.queries))
    together = model.lm_head(states[:, size:].unflatten(1, questions))
    lengths = (asked.queries != vocabulary.PAD_ID).sum(-1)
    assert len(np.unique(lengths)) > 1 or not stage
    model.config._attn_implementation = "eager"
    for (b, q), length in np.ndenumerate(lengths):
        prompt = torch.tensor(np.concatenate([asked.context[b], asked.queries[b, q, :length]]))[None]
        alone = model(prompt).logits[0, size:]
        torch.testing.assert_close(together[b, q, :length], alone, atol=1e-5, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), pairs=st.integers(1, 12))
def test_drawn_ids_are_the_tokenizer_s_own(seed, pairs):
    asked = draw(np.random.default_rng(seed), 1, pairs, min(pairs, 2))
    for query in asked.queries[0]:
        ids = [*asked.context[0], *query]
        text = TOKENIZER.decode(ids, skip_special_tokens=False)
        assert TOKENIZER.encode(text).ids == ids
        records = re.findall(r'"([^"]+)": "([^"]+)"', text)
        assert all(uuid.UUID(text).version == 4 for pair in records for text in pair)
        key = re.search(r'Key: "(.+)"', text)[1]
        prompt = kv.TEMPLATE.format(records="".join(kv.lines(records)), key=key)
        assert text == f'{prompt} "{dict(records)[key]}"'
        assert TOKENIZER.encode(prompt).ids == ids[:-18]  # an answer's tokens do not reach into the prompt
        assert len(ids) == 2 + 34 * pairs + 36


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), documents=st.integers(1, 6), data=st.data())
def test_drawn_documents_are_prompts_of_the_task_with_the_answers_they_state(seed, documents, data):
    golds = data.draw(st.lists(st.integers(0, documents - 1), min_size=1, max_size=3))
    asked = draw_documents(Random(seed), documents, golds)
    context = TOKENIZER.decode(asked.context[0].tolist(), skip_special_tokens=False)
    shelf = context.split("\n\n")[1].split("\n")
    assert len(shelf) == documents
    for gold, query, targets, answers in zip(golds, asked.queries[0], asked.targets[0], asked.answers[0], strict=True):
        ids = [int(token) for token in query if token != vocabulary.PAD_ID]
        question, answer = TOKENIZER.decode(ids).split("\nAnswer: ")
        prompt = TEMPLATE.format(search_results="\n".join(shelf), question=question.split("Question: ")[1])
        assert TOKENIZER.encode(prompt).ids + TOKENIZER.encode(" " + answer).ids == [*asked.context[0], *ids]
        title = shelf[gold].split("(Title: ")[1].split(") ")[0]
        assert title in question
        assert answer in shelf[gold] or re.fullmatch(r"\d+ \w+ \d{4}", answer)
        assert [int(token) for token in targets[answers]] == [*ids[-answers.sum() + 1 :], vocabulary.END_ID]


def test_training_articles_are_not_those_of_the_task():
    shelves = [fiction.shelf(10, rng.stream("reference", 0, step))[1] for step in range(100)]
    trained = {article.document() for shelf in shelves for article in shelf}
    asked = {document for i in range(100) for document in fiction.generate(i, 10).documents(0)}
    assert len(trained) == len(asked) == 1000
    assert not trained & asked
