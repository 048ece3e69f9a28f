"""The reference models' tokenizer, which ships with them: a UUID is sixteen tokens, and any text comes back whole.

A text's UTF-8 bytes are covered by the fewest pieces of a fixed vocabulary (the Viterbi search of a unigram model,
Kudo, arXiv 1804.10959, whose pieces all score the same): single bytes; ``00`` ... ``ff`` and ``-00`` ... ``-ff``, which
are a byte of a UUID each; the fixed parts of the key-value prompt; and the words of generated articles. Sixteen pieces
cover a UUID in one way only. Nothing is put before a prompt; ``<|end|>`` ends an answer, ``<|pad|>`` pads.
"""

import shutil
from pathlib import Path

from tokenizers import Tokenizer

from lpes_eval import reference

PAD_ID, END_ID = 0, 1

HEAD = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
OPEN, COLON, NEXT, CLOSE = '{"', '": "', '",\n "', '"}'
KEY, ASK = '\n\nKey: "', '"\nCorresponding value:'
ANSWER, QUOTE = ' "', '"'
PROMPT_PIECES = (HEAD, OPEN, COLON, NEXT, CLOSE, KEY, ASK, ANSWER)
"""The key-value prompt is HEAD OPEN (key COLON value) NEXT ... CLOSE KEY key ASK; its answer is ANSWER value QUOTE."""

DASHED = (4, 6, 8, 10)
"""Which of a UUID's sixteen bytes are written with a dash before them."""


PAIR_ID = 2 + 256
"""Id of ``00``; ``xx`` follows in order, and ``-xx`` 256 later."""
DASH_PAIR_ID = PAIR_ID + 256
PIECE_ID = {piece: DASH_PAIR_ID + 256 + i for i, piece in enumerate(PROMPT_PIECES)}
"""Id of each fixed part of the prompt."""

QUOTE_ID = 2 + ord(QUOTE)
RECORDS_SIZE = DASH_PAIR_ID + 256 + len(PROMPT_PIECES)
"""Entries that key-value prompts need; those of multi-document prompts stand behind them."""


def build() -> Tokenizer:
    """The tokenizer as an object of the ``tokenizers`` library."""
    return Tokenizer.from_file(str(reference.path() / "tokenizer.json"))


VOCAB_SIZE = build().get_vocab_size()


def save(folder: Path, size: int) -> None:
    """Copy the files of the tokenizer with ``size`` entries to a folder, where ``AutoTokenizer`` loads them."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(reference.path("kv" if size == RECORDS_SIZE else "base") / name, folder)
