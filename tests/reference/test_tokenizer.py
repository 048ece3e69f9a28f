"""The tokenizer's promises, against plain string arithmetic."""

import uuid

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
uuids = st.uuids().map(str)


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


@settings(max_examples=60, deadline=None)
@given(value=uuids, around=st.sampled_from([("", ""), ('"', '"'), (' "', '"'), ("", "\n"), ("", ",\n")]))
def test_a_uuid_is_sixteen_tokens_in_one_alignment(value, around):
    raw = uuid.UUID(value).bytes
    expected = [
        byte + (vocabulary.DASH_PAIR_ID if i in (4, 6, 8, 10) else vocabulary.PAIR_ID) for i, byte in enumerate(raw)
    ]
    before, after = around
    ids = BUILT.encode(before + value + after).ids
    start = len(BUILT.encode(before).ids)
    assert ids[start : start + 16] == expected
    assert len(ids) == start + 16 + len(BUILT.encode(after).ids)


@pytest.mark.parametrize("number", [1, 9, 10, 28, 99])
def test_a_number_begins_with_a_token_of_its_own(number):
    """Not with a space that all numbers begin with: what follows it would not be known from the question alone."""
    assert len(BUILT.encode(f" {number}").ids) == 1
    assert len(BUILT.encode(f" {number} March 1174").ids) == 4
    assert BUILT.encode(f" {number},405").ids[0] == BUILT.encode(f" {number}").ids[0]


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
