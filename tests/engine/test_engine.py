"""Answers to prompts that share rows and finish at different times, against ``HFLM.generate_until``."""

import gc
import random
import sys
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import AutoTokenizer

from benchmarks.families import tiny_config, tiny_model
from benchmarks.reference import tokenizer
from lpes_eval import rope
from lpes_eval.engine import exact, layer_outputs, vllm
from lpes_eval.engine.exact import ExactEngine
from lpes_eval.engine.kv_buffer import Buffer
from lpes_eval.engine.limits import reason_against
from lpes_eval.errors import UserError
from lpes_eval.methods.lpes import LPES

WORDS = ("red", "blue", "green", "black", "white", "brown", "pink", "grey")


def questions(beginnings=(60, 61, 48, 20), asked_of_each=4, seed=0, tokens=14):
    """Requests about a few texts of different lengths, several about each, of different lengths, and two short ones."""
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


@pytest.fixture
def watched(monkeypatch):
    """The buffers that are made: how many rows and lanes each has, and how many rows are dropped while others go on."""
    seen = []

    class Watched(Buffer):
        def __init__(self, config, rows, prefix, behind, lanes):
            super().__init__(config, rows, prefix, behind, lanes)
            self.made, self.dropped_early = (rows, prefix, behind, lanes), 0
            seen.append(self)

        def drop(self, row):
            super().drop(row)
            self.dropped_early += self.rows > 0

    monkeypatch.setattr(exact, "Buffer", Watched)
    return seen


def texts(engine):
    """The first response to every request, in their order."""
    found = {i: responses[0] for batch in engine.answer() for i, responses in batch.items()}
    return [found[i] for i in sorted(found)]


FAMILIES = {  # what differs in how keys, positions and masks reach attention
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt_neox": {},
    "falcon": {},
    "qwen2_moe": {},
    "deepseek_v3": {},
}


def tiny_lm(folder, family, dtype="float32", attention="sdpa", **settings):
    """A model of this family, with factors."""
    tokenizer.save(folder, 1024)
    config = tiny_config(family, vocab_size=tokenizer.VOCAB_SIZE, initializer_range=0.2, **settings)
    config._attn_implementation = attention
    model, reads = tiny_model(config).to(getattr(torch, dtype)), AutoTokenizer.from_pretrained(folder)
    lm = LPES(pretrained=model, tokenizer=reads, batch_size=1, device="cpu")
    rope.apply(lm.model, [1.0 + 0.3 * h for h in range(len(rope.find_decoder(lm.model).layers))])
    return lm


@pytest.mark.parametrize(("family", "attention"), [*((family, "sdpa") for family in FAMILIES), ("llama", "eager")])
def test_prompts_that_share_a_row_are_answered_as_each_alone(family, attention, tmp_path, watched):
    special = {"eos_token_id": tokenizer.END_ID, "pad_token_id": tokenizer.PAD_ID, **FAMILIES[family]}
    lm, requests = tiny_lm(tmp_path, family, attention=attention, **special), questions()
    assert reason_against(lm, requests) is None
    expected = lm.generate_until(requests, disable_tqdm=True)
    assert len(set(expected)) > len(requests) / 3
    for budget in (10_000, 400):
        answerer = ExactEngine(lm, requests, tokens_per_batch=budget)
        assert texts(answerer) == expected
    assert max(buffer.lanes for buffer in watched) > 1
    assert any(buffer.dropped_early for buffer in watched)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_so_they_are_in_half_precision(dtype, tmp_path):
    lm, requests = tiny_lm(tmp_path, "llama", dtype, eos_token_id=[1]), questions()
    same = [
        ours == theirs
        for ours, theirs in zip(texts(ExactEngine(lm, requests)), lm.generate_until(requests, True), strict=True)
    ]
    assert sum(same) >= 0.8 * len(same)  # but for ties, which rounding decides


@pytest.mark.parametrize("longer", [(), (90,)])
def test_prompts_that_begin_with_one_another_are_answered_as_each_alone(toy_lm, longer):
    """By themselves, and in a batch with a longer row, behind whose columns the shorter one's are padding."""
    requests = questions(beginnings=(60,), asked_of_each=1)[:1] + questions(beginnings=longer, asked_of_each=3)
    text = max((request.args[0] for request in questions(beginnings=(60,), asked_of_each=1)), key=len)
    requests += [Instance("generate_until", {}, (text + end, requests[0].args[1]), 9) for end in ("", " red", " red 1")]
    rope.apply(toy_lm.model, [1.0, 1.3, 1.2])
    expected = toy_lm.generate_until(requests, disable_tqdm=True)
    assert texts(ExactEngine(toy_lm, requests)) == expected
    assert texts(ExactEngine(toy_lm, requests[-3:])) == expected[-3:]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_step_answers_as_the_model_itself(family, tmp_path, monkeypatch, watched):
    """A GPU replays it; here it runs again on the tensor that it was recorded with, and recording fails at last."""
    lm, requests, tables = tiny_lm(tmp_path, family, eos_token_id=tokenizer.END_ID), questions(), []

    def record(step, table):
        tables.append(table := table.clone())
        return None if len(tables) > 3 else lambda new: step(table.copy_(new))

    monkeypatch.setattr(exact, "record", record)
    expected = texts(ExactEngine(lm, requests))
    assert not tables
    for budget in (10_000, 400):
        tables.clear()
        engine = ExactEngine(lm, requests, tokens_per_batch=budget)
        engine._records = True
        assert texts(engine) == expected
        assert len(tables) > 1
        assert engine._records == (len(tables) < 4)
    assert any(buffer.dropped_early for buffer in watched)
    assert any(len(table) > 1 and table.shape[1] > 1 for table in tables)


def test_out_of_memory_halves_the_batch_and_loses_nothing(toy_lm, monkeypatch):
    requests = questions()
    rope.apply(toy_lm.model, [1.0, 1.3, 1.2])
    expected = texts(ExactEngine(toy_lm, requests))
    answerer = ExactEngine(toy_lm, requests, tokens_per_batch=10_000)
    forward, refused, most = toy_lm.model.forward, [], 2

    def small_memory(*args, **kwargs):
        if len(kwargs["input_ids"]) > most:
            refused.append(len(kwargs["input_ids"]))
            raise torch.OutOfMemoryError("toy")
        return forward(*args, **kwargs)

    monkeypatch.setattr(toy_lm.model, "forward", small_memory)
    assert texts(answerer) == expected
    assert refused
    assert answerer.tokens_per_batch < 10_000
    most = 0
    with pytest.raises(UserError, match="not even one prompt"):
        texts(answerer)


def test_a_prefill_computes_nothing_behind_the_last_layers_keys(toy_lm):
    requests = questions(beginnings=(60, 60), asked_of_each=3)
    answerer = ExactEngine(toy_lm, requests, reuse_layers=False)
    tokens = Counter()
    with ExitStack() as hooks:
        for h, layer in enumerate(toy_lm.model.model.layers):
            hooks.enter_context(
                layer.mlp.register_forward_pre_hook(lambda _, args, h=h: tokens.update({h: args[0].shape[1]}))
            )
        texts(answerer)
    prefixes = {group.prefix for group in answerer._groups}
    assert tokens[0] == tokens[1]
    assert tokens[0] - tokens[2] >= max(map(len, prefixes)) > 100


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_below_the_first_changed_factor_are_not_run_again(family, tmp_path, watched):
    lm, requests = tiny_lm(tmp_path, family, num_hidden_layers=3), questions()
    reusing, running = ExactEngine(lm, requests), ExactEngine(lm, requests, reuse_layers=False)
    prefixes = sum(len(group.prefix) for group in reusing._groups)
    asked = {(1, 1.5, 1.2): 0, (1, 1.5, 1.3): 2, (1, 1.2, 1.3): 1, (1.1, 1.2, 1.3): 0, (1, 1.5, 2): 2}
    for factors, known in asked.items():
        watched.clear()
        before = reusing.count.reused
        reusing.set_factors(factors)
        assert texts(reusing) == texts(running)
        assert reusing.count.reused - before == pytest.approx(prefixes * known / 3)
        once, every = watched
        for pair, expected in zip(once.held.values(), every.held.values(), strict=True):
            assert all(map(torch.equal, pair, expected))


def test_all_layers_are_run_where_one_has_the_keys_of_two(tmp_path, watched):
    lm, requests = tiny_lm(tmp_path, "longcat_flash"), questions()
    reusing, running = ExactEngine(lm, requests), ExactEngine(lm, requests, reuse_layers=False)
    for factors in ([1.0, 1.5], [1.0, 1.2]):
        reusing.set_factors(factors)
        assert texts(reusing) == texts(running)
    assert len(watched[0].held) == 4
    assert reusing.count.reused == 0


def test_outputs_of_layers_take_no_more_memory_than_they_may(toy_lm, monkeypatch):
    requests = questions(seed=1)
    monkeypatch.setattr(layer_outputs, "MOST", most := 400_000)
    kept = layer_outputs.LayerOutputs(rope.find_decoder(toy_lm.model).layers)
    monkeypatch.setitem(layer_outputs._kept, toy_lm.model, kept)
    engine = ExactEngine(toy_lm, requests)
    for factors in ([1.0, 1.3, 1.2], [1.0, 1.3, 1.4], [1.0, 1.1, 1.4]):
        engine.set_factors(factors)
        assert texts(engine) == texts(ExactEngine(toy_lm, requests, reuse_layers=False))
        assert most / 2 < sum(output.nbytes for output in kept._outputs.values()) == most - kept._left <= most


def test_a_new_engine_knows_no_outputs_of_weights_that_may_have_changed_since(tmp_path):
    lm, requests = tiny_lm(tmp_path, "llama"), questions()
    before = texts(ExactEngine(lm, requests))
    with torch.no_grad():
        lm.model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    after = texts(ExactEngine(lm, requests))
    assert before != after == texts(ExactEngine(lm, requests, reuse_layers=False))


def test_a_layers_own_forward_is_put_back(toy_lm, monkeypatch):
    """As ``accelerate`` puts it there, to move a layer's weights."""
    layer, other, _ = toy_lm.model.model.layers
    monkeypatch.setitem(vars(layer), "forward", own := Mock(wraps=layer.forward))
    texts(ExactEngine(toy_lm, questions(seed=2)))
    assert own.called
    assert layer.forward is own
    assert "forward" not in vars(other)


def test_a_batch_has_room_for_no_more_tokens_than_it_may(toy_lm, watched):
    requests = questions(beginnings=(60, 61, 48, 20, 33, 70), asked_of_each=6)
    for budget in (600, 1500):
        watched.clear()
        texts(ExactEngine(toy_lm, requests, tokens_per_batch=budget))
        made = [buffer.made for buffer in watched]
        assert any(rows > 1 for rows, *_ in made)
        for rows, prefix, behind, lanes in made:
            assert rows == 1 or rows * (prefix + behind * lanes) <= budget
            assert lanes == 1 or lanes * behind <= prefix
        for buffer in watched:
            (keys, values), (rows, prefix, behind, lanes) = buffer.held[0], buffer.made
            assert keys.shape == values.shape == (rows, 1, prefix + behind * lanes + 1, 16)


def test_whoever_may_stop_gets_answers_batch_by_batch_and_anybody_else_all_in_one(toy_lm):
    requests = questions(beginnings=range(20, 36), asked_of_each=1)
    answerer = ExactEngine(toy_lm, requests)
    order = [(i,) for i in reversed(range(len(requests)))]
    several = list(answerer.answer(order, may_stop=True))
    (at_once,) = answerer.answer(order)
    assert len(several) > 4
    assert at_once == {i: answer for batch in several for i, answer in batch.items()}


@pytest.mark.parametrize(("common", "together"), [(90, True), (75, False)])
def test_prompts_share_a_prefill_only_where_nearly_all_of_them_is_the_same(common, together):
    prompts = [tuple(range(common)) + tuple(range(1000 * i, 1000 * i + 100 - common)) for i in (1, 2)]
    assert (len(exact.share(prompts)) == 1) == together


def test_many_prompts_behind_one_prefix_share_its_prefill_and_not_one_row(toy_lm, watched):
    """As with examples in front of every question: the row would be longer than what they share."""
    requests = questions(beginnings=(100,), asked_of_each=12)
    rope.apply(toy_lm.model, [1.0, 1.3, 1.2])
    answerer = ExactEngine(toy_lm, requests)
    assert texts(answerer) == toy_lm.generate_until(requests, disable_tqdm=True)
    shared = max(len(group.prefix) for group in answerer._groups)
    assert answerer.count.shared == 11 * shared
    (buffer,) = watched
    assert buffer.made[0] > 3  # the two short ones have a row each


@pytest.fixture
def fake_vllm(monkeypatch):
    """In place of the package, which few machines have."""
    monkeypatch.setitem(sys.modules, "vllm", fake := SimpleNamespace(__version__="1", LLM=Mock()))
    return fake


def test_vllm_loads_a_models_revision_once_and_goes_with_it(fake_vllm, tmp_path):
    """A model that comes later may have the same ``id``, and would be answered for by the one before."""
    lm = tiny_lm(tmp_path, "llama")
    lm.revision = "v2"
    for _ in range(2):
        vllm.VLLMEngine(lm, questions(), {})
    assert fake_vllm.LLM.call_count == len(vllm._running) == 1
    assert fake_vllm.LLM.call_args.kwargs["revision"] == "v2"
    vllm.VLLMEngine(lm, questions(), {"max_num_seqs": 4})
    assert fake_vllm.LLM.call_count == 2
    assert fake_vllm.LLM.call_args.kwargs["max_num_seqs"] == 4
    del lm
    gc.collect()
    assert not vllm._running


def test_an_argument_that_vllm_does_not_know_is_named(fake_vllm, toy_lm):
    fake_vllm.LLM.side_effect = TypeError("EngineArgs.__init__() got an unexpected keyword argument 'tp'")
    with pytest.raises(UserError, match=r"--engine_args: .*unexpected keyword argument 'tp'"):
        vllm.VLLMEngine(toy_lm, questions(), {"tp": 2})
