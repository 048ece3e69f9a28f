"""Answers to prompts that share rows, finish at different times and reject drafts, against ``HFLM.generate_until``."""

import random

import pytest

pytest.importorskip("torch")
import torch
from lm_eval.api.instance import Instance
from transformers import AutoTokenizer

from benchmarks.families import tiny_config, tiny_model
from lpes_eval import rope
from lpes_eval.methods.lpes import LPES
from lpes_eval.reference import tokenizer
from search import answering
from search.answering import AHEAD, Answerer, reason_against

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

    class Watched(answering._Buffer):
        def __init__(self, config, rows, prefix, behind, lanes):
            super().__init__(config, rows, prefix, behind, lanes)
            self.made, self.dropped_early = (rows, prefix, behind, lanes), 0
            seen.append(self)

        def drop(self, row):
            super().drop(row)
            self.dropped_early += self.place.rows > 0

    monkeypatch.setattr(answering, "_Buffer", Watched)
    return seen


FAMILIES = {  # what differs in how keys, positions and masks reach attention
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt_neox": {},
    "falcon": {},
    "qwen2_moe": {},
    "deepseek_v3": {},
}


@pytest.mark.parametrize(("family", "attention"), [*((family, "sdpa") for family in FAMILIES), ("llama", "eager")])
def test_prompts_that_share_a_row_are_answered_as_each_alone(family, attention, tmp_path, watched):
    tokenizer.save(tmp_path, 1024)
    special = {"eos_token_id": tokenizer.END_ID, "pad_token_id": tokenizer.PAD_ID}
    config = tiny_config(family, vocab_size=tokenizer.VOCAB_SIZE, initializer_range=0.2, **special, **FAMILIES[family])
    config._attn_implementation = attention
    lm = LPES(
        pretrained=tiny_model(config), tokenizer=AutoTokenizer.from_pretrained(tmp_path), batch_size=1, device="cpu"
    )
    requests = questions()
    assert reason_against(lm, requests) is None
    rope.apply(lm.model, [1.0 + 0.3 * h for h in range(config.num_hidden_layers)])
    expected = lm.generate_until(requests, disable_tqdm=True)
    assert len(set(expected)) > len(requests) / 3
    for budget in (10_000, 400):
        answerer = Answerer(lm, requests, tokens_per_batch=budget)
        assert answerer.answer()[0] == expected
        assert answerer.answer()[0] == expected  # drafted
    assert max(buffer.lanes for buffer in watched) > 1
    assert any(buffer.dropped_early for buffer in watched)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_so_they_are_in_half_precision(dtype, tmp_path):
    tokenizer.save(tmp_path, 1024)
    config = tiny_config("llama", vocab_size=tokenizer.VOCAB_SIZE, initializer_range=0.2, eos_token_id=[1])
    model = tiny_model(config).to(getattr(torch, dtype))
    lm = LPES(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(tmp_path), batch_size=1, device="cpu")
    requests = questions()
    rope.apply(lm.model, [1.0 + 0.3 * h for h in range(config.num_hidden_layers)])
    same = [
        ours == theirs
        for ours, theirs in zip(Answerer(lm, requests).answer()[0], lm.generate_until(requests, True), strict=True)
    ]
    assert sum(same) >= 0.8 * len(same)  # but for ties, which rounding decides


def test_decoding_goes_on_behind_a_draft_that_was_rejected_anywhere(toy_lm):
    """Each prompt's draft differs from its answer at a place of its own, so the next tokens overwrite what is wrong."""
    requests = questions(tokens=30)
    rope.apply(toy_lm.model, [1.0, 1.3, 1.2])
    expected = toy_lm.generate_until(requests, disable_tqdm=True)
    _, right = Answerer(toy_lm, requests).answer()
    assert sum(len(answer) > 12 for answer in right) > len(right) / 3  # long enough to be cut somewhere
    rng = random.Random(0)
    for look_up in (True, False):
        for _ in range(3):
            drafts = []
            for answer in right:
                cut = rng.randrange(len(answer))
                drafts.append((*answer[:cut], *(rng.randrange(2, 700) for _ in range(rng.randrange(40)))))
            answerer = Answerer(toy_lm, requests, look_up=look_up)
            texts, tokens = answerer.answer(drafts)
            assert texts == expected
            assert tokens == right
            assert answerer.count.steps < answerer.count.tokens  # what was right in the drafts was taken


def test_a_right_draft_is_checked_a_piece_at_a_time(toy_lm):
    requests = questions(tokens=40)
    rope.apply(toy_lm.model, [1.0, 1.3, 1.2])
    answerer = Answerer(toy_lm, requests, look_up=False)
    _, right = answerer.answer()
    assert max(map(len, right)) > 2 * AHEAD
    before = answerer.count.steps
    assert answerer.answer(right)[1] == right
    assert answerer.count.steps - before == sum(-(-len(answer) // AHEAD) for answer in right)


@pytest.mark.parametrize("longer", [(), (90,)])
def test_prompts_that_begin_with_one_another_are_answered_as_each_alone(toy_lm, longer):
    """By themselves, and in a batch with a longer row, behind whose columns the shorter one's are padding."""
    requests = questions(beginnings=(60,), asked_of_each=1)[:1] + questions(beginnings=longer, asked_of_each=3)
    text = max((request.args[0] for request in questions(beginnings=(60,), asked_of_each=1)), key=len)
    requests += [Instance("generate_until", {}, (text + end, requests[0].args[1]), 9) for end in ("", " red", " red 1")]
    rope.apply(toy_lm.model, [1.0, 1.3, 1.2])
    expected = toy_lm.generate_until(requests, disable_tqdm=True)
    assert Answerer(toy_lm, requests).answer()[0] == expected
    assert Answerer(toy_lm, requests[-3:]).answer()[0] == expected[-3:]


def test_an_answer_ends_where_a_past_one_did(toy_lm):
    answerer = Answerer(toy_lm, questions())
    prompt, end = answerer._prompts[0], next(iter(answerer._ends))
    prompt.past.append((40, end))
    assert answerer._extend(prompt, (40,), (end, 41)) == ((40, end), True)


def test_what_one_prompt_of_a_row_answers_is_nothing_to_the_others(toy_lm, watched):
    """The same question thrice in a row, each time with another draft: what one was fed must not reach the next."""
    first = questions(beginnings=(60,), asked_of_each=1)
    text = max((request.args[0] for request in first), key=len)
    requests = [Instance("generate_until", {}, (text + end, first[0].args[1]), n) for n, end in enumerate("abc")]
    rope.apply(toy_lm.model, [1.0, 1.3, 1.2])
    expected = toy_lm.generate_until(requests, disable_tqdm=True)
    for odd in range(3):
        drafts = [tuple(range(20, 30)) if n == odd else () for n in range(3)]
        assert Answerer(toy_lm, requests).answer(drafts)[0] == expected
    assert {buffer.made[0] for buffer in watched} == {1}  # one row
    assert {buffer.lanes for buffer in watched} == {3}


def test_a_prefill_computes_nothing_behind_the_last_layers_keys(toy_lm):
    requests = questions(beginnings=(60, 60), asked_of_each=3)
    answerer = Answerer(toy_lm, requests)
    tokens = dict.fromkeys(range(3), 0)
    hooks = [
        layer.mlp.register_forward_hook(
            lambda module, args, _, h=h: tokens.__setitem__(h, tokens[h] + args[0].shape[1])
        )
        for h, layer in enumerate(toy_lm.model.model.layers)
    ]
    try:
        answerer.answer()
    finally:
        for hook in hooks:
            hook.remove()
    prefixes = {group.prefix for group in answerer._groups}
    assert tokens[0] == tokens[1]
    assert tokens[0] - tokens[2] >= max(map(len, prefixes)) > 100


def test_a_batch_has_room_for_no_more_tokens_than_it_may(toy_lm, watched):
    requests = questions(beginnings=(60, 61, 48, 20, 33, 70), asked_of_each=6)
    for budget in (600, 1500):
        watched.clear()
        Answerer(toy_lm, requests, tokens_per_batch=budget).answer()
        made = [buffer.made for buffer in watched]
        assert any(rows > 1 for rows, *_ in made)
        for rows, prefix, behind, lanes in made:
            assert rows == 1 or rows * (prefix + behind * lanes) <= budget
            assert lanes == 1 or lanes * behind <= prefix
        for buffer in watched:
            (keys, values), (rows, prefix, behind, lanes) = buffer.own[0].held, buffer.made
            assert keys.shape == values.shape == (rows, 1, prefix + behind * lanes + 1, 16)


def test_many_prompts_behind_one_prefix_share_its_prefill_and_not_one_row(toy_lm, watched):
    """As with examples in front of every question: the row would be longer than what they share."""
    requests = questions(beginnings=(40,), asked_of_each=20)
    rope.apply(toy_lm.model, [1.0, 1.3, 1.2])
    answerer = Answerer(toy_lm, requests)
    assert answerer.answer()[0] == toy_lm.generate_until(requests, disable_tqdm=True)
    shared = max(len(group.prefix) for group in answerer._groups)
    assert answerer.count.shared == 19 * shared
    (buffer,) = watched
    assert buffer.made[0] > 5
