"""The tokenizer's promises, against plain string arithmetic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from benchmarks.reference import tokenizer as vocabulary


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary.save(folder, vocabulary.VOCAB_SIZE)
    return AutoTokenizer.from_pretrained(folder)


AWKWARD = ["<|end|>", "<|pad|>", "ab", "-ab", "abc", " ", " .", " n't", "\r\n", "\x00", "é", "\u0301", "🎉"]
awkward = st.sampled_from([*AWKWARD, *vocabulary.PROMPT_PIECES])
texts = st.one_of(st.text(), st.lists(st.one_of(awkward, st.text(max_size=3)), max_size=12).map("".join))


@settings(max_examples=40, deadline=None)
@given(text=texts)
def test_any_text_survives_the_round_trip(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text


def test_ragged_batches_pad_left_with_a_mask_and_nothing_else_is_added(tokenizer):
    assert tokenizer("ab").input_ids == [vocabulary.PAIR_ID + 0xAB]
    batch = tokenizer(["ab", "abab"], padding=True)
    assert batch.input_ids[0][0] == vocabulary.PAD_ID
    assert batch.attention_mask == [[0, 1], [1, 1]]
