"""The tokenizer's promises, against plain string arithmetic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from benchmarks.reference import tokenizer as vocabulary
from lpes_eval.reference import path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary.save(folder, 8192)
    return AutoTokenizer.from_pretrained(folder)


BUILT = vocabulary.build()
BUILT.encode_special_tokens = True

AWKWARD = ["<|end|>", "<|pad|>", "ab", "-ab", "abc", " ", " .", " n't", "\r\n", "\x00", "é", "\u0301", "🎉"]
awkward = st.sampled_from([*AWKWARD, *vocabulary.PROMPT_PIECES])
texts = st.one_of(st.text(), st.lists(st.one_of(awkward, st.text(max_size=3)), max_size=12).map("".join))


@settings(max_examples=40, deadline=None)
@given(text=texts)
def test_any_text_survives_the_round_trip(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@settings(max_examples=40, deadline=None)
@given(text=texts)
def test_text_is_covered_by_the_fewest_pieces(text):
    known = {piece.encode() for piece in vocabulary.pieces()} | {bytes([byte]) for byte in range(256)}
    raw = text.encode()
    fewest = [0] + [0] * len(raw)
    for end in range(1, len(raw) + 1):
        starts = (start for start in range(max(0, end - 100), end) if raw[start:end] in known)
        fewest[end] = 1 + min(fewest[start] for start in starts)
    assert len(BUILT.encode(text).ids) == fewest[-1]


def test_ragged_batches_pad_left_with_a_mask_and_nothing_else_is_added(tokenizer):
    assert tokenizer("ab").input_ids == [vocabulary.PAIR_ID + 0xAB]
    batch = tokenizer(["ab", "abab"], padding=True)
    assert batch.input_ids[0][0] == vocabulary.PAD_ID
    assert batch.attention_mask == [[0, 1], [1, 1]]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_the_shipped_files_are_what_the_code_writes(tmp_path, name):
    for model, size in (("base", vocabulary.VOCAB_SIZE), ("kv", vocabulary.RECORDS_SIZE)):
        vocabulary.save(tmp_path, 8192, size)
        assert (path(model) / name).read_text() == (tmp_path / name).read_text()
