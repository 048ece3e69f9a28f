"""Texts on which perplexity says something about the reference model: key-value prompts, each with its answer.

Identifiers are random, so most of such a text cannot be predicted at all. The answer can, from the context alone; it is
what is scored. The gold record stands near the end, inside the shortest window that is compared, so that every window
holds what is needed and a longer one only has more before it.
"""

from pathlib import Path
from typing import Any

from benchmarks.experiments import store
from lpes_eval.data import kv
from lpes_eval.errors import UserError
from lpes_eval.rng import below, stream

TASK = "lpes_ppl_001k"
"""The task that measures one length; its metadata say which."""
SEED = 77
"""Neither the benchmark's examples (``kv.SEED``) nor the training's stream."""


def write(path: Path, tokenizer: Any, count: int, longest: int, nearest: int) -> int:
    """Write ``count`` texts of exactly ``longest`` tokens, and return how many tokens the answer has that ends each.

    Raises:
        UserError: the tokenizer does not give all answers the same number of tokens, or a text cannot be cut to size.
    """

    def size(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    texts, sizes, pairs = [], set(), longest // 10
    for number in range(count):
        example = kv.generate(number, pairs, SEED)
        record = size("".join(kv.lines(example.records[-2:]))) // 2
        near = max(1, (nearest - size(kv.TEMPLATE) - 2 * record) // record)
        gold = pairs - 1 - below(near, stream("perplexity", SEED, number))
        position = min(100.0, 100 * (gold + 0.5) / (pairs - 1))
        answer = f' "{example.target(position)}"'
        text = example.prompt(position) + answer
        while (excess := size(text) - longest) > 0:  # what is left may be split otherwise at the cut
            offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            text = text[offsets[excess][0] :]
        texts.append(text)
        sizes.add((size(text), longest - size(text[: -len(answer)])))
    if len(sizes) > 1 or {whole for whole, _ in sizes} != {longest}:
        raise UserError(f"expected texts of {longest} tokens with answers of one size; their sizes are {sorted(sizes)}")
    store.write(path, [{"text": text} for text in texts])
    return sizes.pop()[1]
