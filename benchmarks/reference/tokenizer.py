"""The reference model's tokenizer: a UUID is sixteen tokens, and any text at all survives the round trip.

A text's UTF-8 bytes are covered by the fewest pieces of a fixed vocabulary (the Viterbi search of a unigram model,
Kudo, arXiv 1804.10959, whose pieces all score the same): single bytes; ``00`` ... ``ff`` and ``-00`` ... ``-ff``, which
are a byte of a UUID each; the fixed parts of the key-value prompt; and the words of generated articles. Sixteen pieces
cover a UUID in one way only. Nothing is put before a prompt; ``<|end|>`` ends an answer, ``<|pad|>`` pads.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lpes_eval.data import fiction
from lpes_eval.files import write_atomically

PAD, END = "<|pad|>", "<|end|>"
PAD_ID, END_ID = 0, 1

HEAD = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
OPEN, COLON, NEXT, CLOSE = '{"', '": "', '",\n "', '"}'
KEY, ASK = '\n\nKey: "', '"\nCorresponding value:'
ANSWER, QUOTE = ' "', '"'
PROMPT_PIECES = (HEAD, OPEN, COLON, NEXT, CLOSE, KEY, ASK, ANSWER)
"""The key-value prompt is HEAD OPEN (key COLON value) NEXT ... CLOSE KEY key ASK; its answer is ANSWER value QUOTE."""

DASHED = (4, 6, 8, 10)
"""Which of a UUID's sixteen bytes are written with a dash before them."""


def pieces() -> list[str]:
    """Vocabulary entries behind the single bytes: hex pairs, dashed ones, the prompts' parts, words."""
    pairs = [f"{byte:02x}" for byte in range(256)]
    known = [*pairs, *(f"-{pair}" for pair in pairs), *PROMPT_PIECES]
    return known + [piece for piece in fiction.vocabulary() if len(piece.encode()) > 1 and piece not in known]


PAIR_ID = 2 + 256
"""Id of ``00``; ``xx`` follows in order, and ``-xx`` 256 later."""
DASH_PAIR_ID = PAIR_ID + 256
PIECE_ID = {piece: DASH_PAIR_ID + 256 + i for i, piece in enumerate(PROMPT_PIECES)}
"""Id of each fixed part of the prompt."""

QUOTE_ID = 2 + ord(QUOTE)
RECORDS_SIZE = DASH_PAIR_ID + 256 + len(PROMPT_PIECES)
"""Entries that key-value prompts need; those of multi-document prompts stand behind them."""
VOCAB_SIZE = 2 + 256 + len(pieces())


def build(size: int = VOCAB_SIZE) -> Tokenizer:
    """The tokenizer as an object of the ``tokenizers`` library, with the first ``size`` entries of the vocabulary."""
    symbols = bytes_to_unicode()  # one printable character for each byte
    texts = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in pieces()]
    # Whole numbers add without rounding, so equal counts score equal. Text that spells PAD or END costs less as bytes.
    special = [(PAD, -1000.0), (END, -1000.0)]
    vocabulary = special + [("".join(symbols[byte] for byte in text), -1.0) for text in texts]
    tokenizer = Tokenizer(models.Unigram(vocabulary[:size], unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (PAD, END)])
    return tokenizer


def save(folder: Path, model_max_length: int, size: int = VOCAB_SIZE) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; ``AutoTokenizer`` loads them without code of ours."""
    write_atomically(folder / "tokenizer.json", build(size).to_str(pretty=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
