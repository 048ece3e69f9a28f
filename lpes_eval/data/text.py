"""Perplexity at a context length: long texts, and the windows of them that are scored.

What is measured at length n is the perplexity of the last ``stride`` tokens of a window of n tokens, as in the sliding
windows of Position Interpolation (arXiv 2306.15595) and YaRN (arXiv 2309.00071), which both score the last 256: these
tokens have between n - 256 and n - 1 tokens before them. Averages over a whole window (and lm-eval's rolling windows)
would mix in tokens that have next to no context, and those would dominate the figure.

The scored tokens are the same at every length. Only the amount of text before them differs, so that a difference
between two lengths can come from nothing else. A text must therefore be as long as the longest window compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lpes_eval.data import splits
from lpes_eval.errors import DataError

STRIDE = 256
LONGEST = 16384
"""Four times the trained window of a 4k model."""

WINDOWS = 4
"""Windows for each text."""

PG19_URL = (  # PG-19's test split (Rae et al. 2020, arXiv 1911.05507), 100 books, as YaRN's authors published it
    "https://huggingface.co/datasets/emozilla/pg19-test/resolve/c5e39bf32e33f9111323aa68d7d9000d22722035/"
    "data/test-00000-of-00001-29a571947c0b5ccc.parquet"
)
SUBFOLDERS = ("test", "pg19/test", "pg19")
SMALLEST_TO_SPLIT = 5


@dataclass(frozen=True)
class Text:
    """One text and what it is called."""

    name: str
    text: str


@dataclass(frozen=True)
class Window:
    """One request: the log-likelihood of ``target`` behind ``context``; sizes in tokens, as the model counts them."""

    context: str
    target: str
    target_tokens: int
    tokens: int


def read(path: str | Path) -> list[Text]:
    """The texts of a file (``.txt``: one; ``.jsonl``, ``.jsonl.gz``: ``text`` of each line) or of a folder of ``.txt``.

    Raises:
        DataError: nothing is there, or it is not UTF-8 text.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        files = next((found for sub in ("", *SUBFOLDERS) if (found := sorted((path / sub).glob("*.txt")))), [])
        if not files:
            raise DataError(f"{path}: no .txt file is there; expected texts such as PG-19's test folder")
        return [text for file in files for text in read(file)]
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        texts = [Text(f"{path.name}:{n}", line["text"]) for n, line in enumerate(files.read_jsonl(path, ("text",)), 1)]
        if bad := [text.name for text in texts if not isinstance(text.text, str)]:
            raise DataError(f"{path}: 'text' of {bad[0]} is no text")
        return texts
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        return [Text(path.name, path.read_text(encoding="utf-8"))]
    except OSError:
        raise DataError(
            f"{path}: no such file; expected a text file, a .jsonl file or a folder of .txt files"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def _read_parquet(path: Path) -> list[Text]:
    from pyarrow import ArrowException, parquet

    try:
        columns = parquet.read_table(path, columns=["short_book_title", "text"]).to_pydict()
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: cannot be read as PG-19's parquet file ({str(error).splitlines()[0]})") from None
    return [Text(name, text) for name, text in zip(columns["short_book_title"], columns["text"], strict=True)]


def text_numbers(total: int, split: str, search_seed: int = 0) -> list[int]:
    """The texts of a split, in order. Of fewer than five texts all are held out, and there is nothing to search on.

    Raises:
        DataError: an unknown split, or a search split of too few texts.
    """
    if split == "all" or (split == "held_out" and total < SMALLEST_TO_SPLIT):
        return list(range(total))
    if split == "search" and total < SMALLEST_TO_SPLIT:
        raise DataError(
            f"{total} texts are too few to search on some and report others; give {SMALLEST_TO_SPLIT} or more"
        )
    if split not in splits.SPLITS:
        raise DataError(f"split={split!r} is not a split of texts; expected one of {', '.join(splits.SPLITS)}, all")
    return sorted(splits.split(total, search_seed).indices(split))


def target_ends(total: int, longest: int, stride: int, count: int) -> list[int]:
    """Where in a text of ``total`` tokens the scored spans end: up to ``count``, evenly spread, none overlapping.

    The first ends at ``longest``, so that a window of any length up to that lies in the text; the last at ``total``.
    Empty if the text is too short for even one.
    """
    if total < longest:
        return []
    count = min(count, 1 + (total - longest) // stride)
    if count == 1:
        return [longest]
    return [longest + i * (total - longest) // (count - 1) for i in range(count)]


def _fit(cut: Callable[[int], Window], start: int, before: int, length: int) -> Window:
    """The window that comes nearest to ``length`` tokens and has no more, its start below token ``before``.

    A text cut out of its surroundings can tokenize into a few more or fewer tokens than it had there, and a special
    token may be added in front: the start moves by what is too much until the size is right or a start comes back.
    """
    tried: dict[int, Window] = {}
    while start not in tried and 0 <= start < before:
        tried[start] = cut(start)
        start += tried[start].tokens - length
    while min(window.tokens for window in tried.values()) > length and max(tried) < before:
        start = max(tried) + 1
        tried[start] = cut(start)
    shortest = min(window.tokens for window in tried.values())
    return max(
        (window for window in tried.values() if window.tokens <= max(length, shortest)),
        key=lambda window: window.tokens,
    )


def windows(
    text: str,
    length: int,
    *,
    longest: int,
    stride: int,
    count: int,
    offsets: Sequence[tuple[int, int]],
    encode_pair: Callable[[str, str], tuple[Sequence[int], Sequence[int]]],
) -> list[Window]:
    """The windows of ``length`` tokens of a text; none if the text is shorter than ``longest`` tokens.

    Args:
        text: the whole text.
        length: tokens of a window, special tokens included.
        longest: the longest window that will be compared; the scored tokens depend on it, and on nothing else.
        stride: how many tokens at a window's end are scored.
        count: how many windows to take.
        offsets: ``(start, end)`` of the text's tokens, in characters.
        encode_pair: the model's own tokenization of a context and what follows it, by which sizes are counted.

    Raises:
        DataError: a window that is not longer than what is scored of it.
    """
    if not stride < length <= longest:
        raise DataError(f"length={length}: expected more than stride={stride} and at most longest={longest} tokens")
    found = []
    for end in target_ends(len(offsets), longest, stride, count):
        middle, last = offsets[end - stride][0], offsets[end - 1][1]

        def cut(start: int, middle: int = middle, target: str = text[middle:last]) -> Window:
            context = text[offsets[start][0] : middle]
            context_ids, target_ids = encode_pair(context, target)
            return Window(context, target, len(target_ids), len(context_ids) + len(target_ids))

        found.append(_fit(cut, max(end - length, 0), end - stride, length))
    return found


def perplexity(items: Sequence[tuple[float, int]]) -> float:
    """Token perplexity from ``(log-likelihood, number of tokens)`` of every text."""
    from math import exp

    return exp(-sum(loglikelihood for loglikelihood, _ in items) / sum(tokens for _, tokens in items))
