"""The shipped models do what their cards say, and their factors help on examples that no training or search saw."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import lpes_eval
from benchmarks.reference.queries import draw, draw_documents, hidden
from benchmarks.reference.recipe import RECORDS, REFERENCE
from benchmarks.reference.train import STREAM, weights_hash
from lpes_eval import reference, rng
from lpes_eval.data import fiction, kv
from lpes_eval.harness.task import gold_index


def load(name):
    return LlamaForCausalLM.from_pretrained(reference.path(name), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model():
    return load("base")


@torch.no_grad()
def right(model, drawn, factors=None):
    """(contexts, positions) booleans: would greedy decoding give the whole answer, closing quote and end included?

    It would if each of its tokens is the likeliest one behind those before it.
    """
    answers = []
    for one in drawn:
        context, queries = torch.tensor(one.context), torch.tensor(one.queries)
        if factors is not None:
            lpes_eval.apply(model, factors)
        states = hidden(model, context, queries)[:, context.shape[1] :].unflatten(1, queries.shape[1:])
        lpes_eval.remove(model)
        likeliest = model.lm_head(states).argmax(-1).numpy()
        answers.append(((likeliest == one.targets) | ~one.answers).all(-1))
    return np.concatenate(answers)


def records(pairs, contexts):
    golds = np.array([[gold_index(position, pairs) for position in (0, 20, 40, 60, 80, 100)]])
    return [draw(np.random.default_rng([STREAM + 1, pairs, i]), 1, pairs, golds) for i in range(contexts)]


def articles(documents, contexts):
    golds = [gold_index(position, documents) for position in (0, 25, 50, 75, 100)]
    return [draw_documents(rng.stream("held out", documents, i), documents, golds) for i in range(contexts)]


@pytest.mark.parametrize(("name", "stages"), [("base", REFERENCE), ("kv", RECORDS)])
def test_its_weights_and_log_are_those_that_card_and_recipe_name(name, stages):
    folder = reference.path(name)
    run = json.loads((folder / "run.json").read_text())
    assert weights_hash(load(name)) == run["weights_sha256"]
    assert run["weights_sha256"] in (folder / "README.md").read_text()
    assert all(asdict(stage).items() <= noted.items() for stage, noted in zip(stages, run["stages"], strict=True))
    lines = (folder / "training.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(10, stages[-1].steps + 1, 10))


RECORDS_ASKED = [kv.generate(question, 8) for question in range(4)]
ARTICLES_ASKED = [fiction.generate(question, 2, seed=77) for question in range(8)]


@pytest.mark.parametrize(
    ("name", "examples", "position", "least"),
    [("base", RECORDS_ASKED, 40, 4), ("kv", RECORDS_ASKED, 40, 4), ("base", ARTICLES_ASKED, 0, 7)],
)
def test_it_answers_by_greedy_decoding_what_a_prompt_of_the_task_asks(name, examples, position, least):
    """Which stops by itself."""
    model, tokenizer = load(name), AutoTokenizer.from_pretrained(reference.path(name))
    right = 0
    for example in examples:
        prompt = tokenizer(example.prompt(position), return_tensors="pt")
        ids = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert len(ids) < 40
        target = example.target(position)
        answer = tokenizer.decode(ids, skip_special_tokens=True).strip().strip('"')
        right += answer in ([target] if isinstance(target, str) else target)
    assert right >= least


@pytest.mark.parametrize(("drawn", "size", "contexts", "gain"), [(records, 50, 6, 0.112), (articles, 10, 10, 0.037)])
def test_what_is_read_with_a_bias_is_read_with_less_under_the_shipped_factors(model, drawn, size, contexts, gain):
    """The gains are the paper's, in its Table 1."""
    plain, scaled = (right(model, drawn(size, contexts), factors) for factors in (None, "reference"))
    by_position = plain.mean(0)
    assert by_position.max() - by_position.min() >= 0.15
    assert scaled.mean() - plain.mean() > gain
    assert scaled.mean(0).min() > by_position.min()
