"""The engine's answers against those of ``hf``, one by one."""

import gc
import random
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

from lpes_eval import reference, rope
from lpes_eval.engine import engine_for, exact, vllm
from lpes_eval.engine.exact import ExactEngine
from lpes_eval.engine.harness import HarnessEngine
from lpes_eval.engine.limits import reason_against
from lpes_eval.errors import UserError
from lpes_eval.methods.lpes import LPES
from lpes_eval.methods.ms_poe import Method as MsPoE
from lpes_eval.methods.pi import PI
from tiny_models import tiny_config, tiny_model

WORDS = ("red", "blue", "green", "black", "white", "brown", "pink", "grey")


def questions(beginnings=(60, 61, 48, 20), asked_of_each=4, seed=0, tokens=14):
    """Requests of different lengths, several about each of a few texts, and two short ones."""
    rng = random.Random(seed)
    texts = ["red is:", "blue"]
    for words in beginnings:
        beginning = " ".join(f"{rng.choice(WORDS)}{rng.randrange(10)}" for _ in range(words))
        texts += [f"{beginning} and {' '.join(rng.choices(WORDS, k=1 + n))} is:" for n in range(asked_of_each)]
    rng.shuffle(texts)
    return [
        Instance("generate_until", {}, (text, {"until": ["7"], "max_gen_toks": tokens - n % 5, "do_sample": False}), n)
        for n, text in enumerate(texts)
    ]


def alone(lm, requests):
    """What ``hf`` answers to each request, by itself."""
    return [HFLM.generate_until(lm, [request], disable_tqdm=True)[0] for request in requests]


def texts(engine, **options):
    answers = {i: responses[0] for batch in engine.answer(**options) for i, responses in batch.items()}
    return [answers[i] for i in sorted(answers)]


@pytest.fixture
def forwards(monkeypatch):
    """Rows and tokens of every forward pass that an engine asks for."""
    shapes, forward = [], ExactEngine._forward

    def watched(self, cache, rows, held, tokens, kept):
        shapes.append((len(tokens), max(map(len, tokens))))
        return forward(self, cache, rows, held, tokens, kept)

    monkeypatch.setattr(ExactEngine, "_forward", watched)
    return shapes


TOKENIZER = AutoTokenizer.from_pretrained(reference.path())
SPECIAL = {"eos_token_id": TOKENIZER.eos_token_id, "pad_token_id": TOKENIZER.pad_token_id}
FAMILIES = {  # what differs in how keys, positions and masks reach attention
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt_neox": {},
    "deepseek_v3": {},
    "mistral": {},  # a window of 16 tokens in all layers
    "gemma3_text": {"attention": "eager"},  # in some of them
}


def tiny_lm(family, attention="sdpa", **settings):
    """A model of this family, with factors."""
    config = tiny_config(family, vocab_size=len(TOKENIZER), initializer_range=0.2, **settings)
    config._attn_implementation = attention
    lm = LPES(pretrained=tiny_model(config), tokenizer=TOKENIZER, batch_size=1, device="cpu")
    rope.apply(lm.model, [1.0 + 0.3 * h for h in range(len(rope.find_decoder(lm.model).layers))])
    return lm


@pytest.fixture(scope="module")
def toy_lm():
    lm = tiny_lm("llama", num_hidden_layers=3, **SPECIAL)
    rope.apply(lm.model, [1.0, 1.3, 1.2])
    return lm


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_a_batch_are_answered_as_each_alone(family, forwards):
    lm, requests = tiny_lm(family, **SPECIAL, **FAMILIES[family]), questions()
    assert reason_against(lm, requests) is None
    expected = alone(lm, requests)
    assert len(set(expected)) > len(requests) / 3
    for tokens in (10_000, 700):
        forwards.clear()
        assert texts(ExactEngine(lm, requests, tokens_per_batch=tokens)) == expected
        rows = [rows for rows, _ in forwards]
        assert max(rows) > 2
        assert len(set(rows)) > 3  # answers that are complete leave


def test_prompts_that_begin_with_one_another_are_answered_as_each_alone(toy_lm):
    """By themselves, and in a batch with a longer row; one stands twice."""
    requests = questions(beginnings=(90,), asked_of_each=3)
    text, options = max((request.args for request in questions(beginnings=(60,), asked_of_each=1)), key=str)
    ends = ("", " red", " red 1", " red", " red" * 90)
    requests += [Instance("generate_until", {}, (text + end, options), 9) for end in ends]
    expected = alone(toy_lm, requests)
    assert texts(ExactEngine(toy_lm, requests)) == expected
    assert texts(ExactEngine(toy_lm, requests[-5:])) == expected[-5:]


def test_a_shared_beginning_is_run_once(toy_lm, forwards):
    engine = ExactEngine(toy_lm, questions(beginnings=(60, 60), asked_of_each=3), tokens_per_batch=10_000)
    texts(engine)
    prefills = [tokens for rows, tokens in forwards if rows == 1 and tokens > exact.END]
    lengths = sorted(len(prompt.tokens) for prompt in engine._prompts)
    assert sorted(prefills) == pytest.approx([lengths[2], lengths[-3]], rel=0.1)  # of each text one


@pytest.mark.parametrize("right", [True, False])
def test_drafts_save_steps_where_they_are_right_and_change_no_answer(right, toy_lm, forwards, monkeypatch):
    requests = questions()
    engine = ExactEngine(toy_lm, requests)
    answered, responses = {}, engine._responses
    monkeypatch.setattr(engine, "_responses", lambda i, tokens: answered.update({i: tokens}) or responses(i, tokens))
    monkeypatch.setattr(exact.Row, "draft", lambda row, most: [])
    expected, without = texts(engine), len(forwards)

    def draft(row, most):
        following = answered[row.number][len(row.answer) :][:most]
        return following if right else [*following[:1], *(token + 1 for token in following[1:])]

    monkeypatch.setattr(exact.Row, "draft", draft)
    monkeypatch.setattr(engine, "_draft_length", lambda drafts, pending: max(drafts))
    forwards.clear()
    assert texts(engine) == expected == alone(toy_lm, requests)
    assert without - len(forwards) >= max(map(len, answered.values())) * (0.7 if right else 0.3)


def test_a_draft_is_what_followed_the_last_tokens_where_they_stood_last():
    row = exact.Row(0, Mock(tokens=[]), [1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 1, 2, 3])
    assert row.draft(2) == [5, 6]
    row.tokens += [5, 6, 7]
    assert row.draft(8) == [1, 2, 3, 5, 6, 7]
    row.tokens += [8]
    assert row.draft(8) == []


def test_out_of_memory_halves_the_batch_and_loses_nothing(toy_lm, monkeypatch):
    requests = questions()
    expected = texts(ExactEngine(toy_lm, requests))
    engine = ExactEngine(toy_lm, requests, tokens_per_batch=10_000)
    forward, refused, most = toy_lm.model.forward, [], 2

    def small_memory(*args, **kwargs):
        if len(kwargs["input_ids"]) > most:
            refused.append(len(kwargs["input_ids"]))
            raise torch.OutOfMemoryError("toy")
        return forward(*args, **kwargs)

    monkeypatch.setattr(toy_lm.model, "forward", small_memory)
    assert texts(engine) == expected
    assert refused
    assert engine.tokens_per_batch < 10_000
    most = 0
    with pytest.raises(UserError, match="not even one prompt"):
        texts(engine)


def test_a_batch_has_no_more_tokens_and_prompts_than_it_may(toy_lm, monkeypatch):
    requests = questions(beginnings=(60, 20, 33, 70))
    expected = texts(ExactEngine(toy_lm, requests))
    sizes, answer = [], ExactEngine._answer
    monkeypatch.setattr(ExactEngine, "_answer", lambda self, some: sizes.append(some) or answer(self, some))
    for most in ({"tokens_per_batch": 1500}, {"prompts_per_batch": 5}):
        sizes.clear()
        engine = ExactEngine(toy_lm, requests, **most)
        assert texts(engine) == expected
        assert 1 < max(map(len, sizes)) <= most.get("prompts_per_batch", len(requests))
        assert all(engine._tokens(some) <= most.get("tokens_per_batch", 1e9) for some in sizes)


def test_whoever_may_stop_gets_answers_batch_by_batch_and_anybody_else_all_in_one(toy_lm):
    engine = ExactEngine(toy_lm, questions(beginnings=range(4, 20), asked_of_each=1))
    order = [(i,) for i in reversed(range(18))]
    several, (at_once,) = list(engine.answer(order, may_stop=True)), engine.answer(order)
    assert len(several) > 4
    assert at_once == {i: answer for batch in several for i, answer in batch.items()}


def test_an_answer_that_is_settled_is_not_written_on(toy_lm, forwards):
    requests = questions()
    engine = ExactEngine(toy_lm, requests)
    whole, asked = texts(engine), forwards.copy()
    forwards.clear()
    cut = texts(engine, settled=lambda i, text: i % 3 == 0 and len(text) > 4)
    assert len(forwards) <= len(asked)
    assert sum(rows for rows, _ in forwards) < sum(rows for rows, _ in asked)
    assert all(answer == full for i, (answer, full) in enumerate(zip(cut, whole, strict=True)) if i % 3)
    shorter = [(answer, full) for answer, full in zip(cut[::3], whole[::3], strict=True) if answer != full]
    assert len(shorter) > 3
    assert all(full.startswith(answer) and len(answer) > 4 for answer, full in shorter)


def test_lm_evals_call_is_answered_by_the_engine_as_hf_answers_it(forwards):
    lm, slow = (PI(factor=1.3, batch_size=size, fast=size > 1) for size in (3, 1))
    requests, partial = questions(), []
    lm.cache_hook = SimpleNamespace(add_partial=lambda *entry: partial.append(entry))
    answers = lm.generate_until(requests, disable_tqdm=True)
    assert max(rows for rows, _ in forwards) == 3
    forwards.clear()
    assert answers == slow.generate_until(requests, disable_tqdm=True)
    assert not forwards
    expected = [("generate_until", request.args, text) for request, text in zip(requests, answers, strict=True)]
    assert sorted(partial, key=repr) == sorted(expected, key=repr)


def test_the_default_batch_size_of_lm_eval_and_auto_leave_it_to_memory(forwards):
    for size in (1, "auto"):
        forwards.clear()
        LPES(batch_size=size).generate_until(questions(), disable_tqdm=True)
        assert max(rows for rows, _ in forwards) > 10


def test_what_the_engine_cannot_answer_as_hf_is_left_to_hf_and_a_line_says_why(forwards, caplog):
    caplog.set_level("INFO", logger="lm_eval")
    lm = LPES()
    (request, *_) = questions()
    request.arguments[1]["num_beams"] = 2
    assert len(lm.generate_until([request], disable_tqdm=True)) == 1
    assert "hf's own loop answers, because generation is not plainly greedy (num_beams)" in caplog.text
    lm.model.generation_config.repetition_penalty = 1.05
    assert "repetition_penalty" in reason_against(lm, questions())
    lm.model.generation_config.repetition_penalty = None
    lm.model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    assert "dynamic positions" in reason_against(lm, questions())
    MsPoE().generate_until(questions()[:2], disable_tqdm=True)
    assert not forwards


@pytest.mark.parametrize("family", ["llama4_text", "qwen3_next"])
def test_layers_with_chunks_shared_keys_or_states_are_left_to_hf(family):
    engine, reason = engine_for(tiny_lm(family), questions()[:2])
    assert type(engine) is HarnessEngine
    assert reason == "not all of its layers attend to the text or to a window of it"


def test_vllm_loads_a_models_revision_once_and_goes_with_it(monkeypatch, tmp_path):
    """A model that comes later may have the same ``id``, and would be answered for by the one before."""
    monkeypatch.setitem(sys.modules, "vllm", fake := SimpleNamespace(__version__="1", LLM=Mock()))
    lm = tiny_lm("llama")
    lm.revision = "v2"
    for _ in range(2):
        vllm.VLLMEngine(lm, questions(), {})
    assert fake.LLM.call_count == len(vllm._running) == 1
    assert fake.LLM.call_args.kwargs["revision"] == "v2"
    del lm
    gc.collect()
    assert not vllm._running
