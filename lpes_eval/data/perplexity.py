"""Perplexity at a context length: long texts, the windows of them that are scored, and lm-eval's task.

At length n it is that of the last ``STRIDE`` tokens of windows of n tokens, as in Position Interpolation (arXiv
2306.15595) and YaRN (arXiv 2309.00071), which both score the last 256. The scored tokens are the same at every length;
so a text must be as long as the longest window compared.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from math import exp
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance

from lpes_eval import files
from lpes_eval.data import splits
from lpes_eval.data.source import Asked, Files, Source, asked
from lpes_eval.errors import DataError, PromptTooLong, first_line
from lpes_eval.harness.plugin import current_lm
from lpes_eval.harness.task import SPLIT, BenchmarkTask

logger = logging.getLogger(__name__)

STRIDE, WINDOWS = 256, 4
"""Tokens that are scored of a window, and windows of a text."""
LONGEST = 16384
"""Four times the trained window of a 4k model."""
PG19 = Files(  # its test split (Rae et al. 2020, arXiv 1911.05507), as YaRN's authors published it
    "lpes_ppl",
    "test-00000-of-00001-29a571947c0b5ccc.parquet",
    "https://huggingface.co/datasets/emozilla/pg19-test/resolve/c5e39bf32e33f9111323aa68d7d9000d22722035/data",
)


class Text(NamedTuple):
    """One text and what it is called."""

    name: str
    text: str


def read(path: str | Path) -> list[Text]:
    """The texts of a file (``.txt``: one; ``.jsonl``: ``text`` of each line; PG-19's) or of a folder of ``.txt``."""
    from pyarrow import ArrowException, parquet

    path = Path(str(path)).expanduser()
    try:
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            lines = files.read_jsonl(path, {"text": "TEXT"})
            texts = [Text(f"{path.name}:{n}", line["text"]) for n, line in enumerate(lines, 1)]
        elif path.suffix == ".parquet":
            books = parquet.read_table(path, columns=["short_book_title", "text"]).to_pydict()
            texts = list(map(Text, books["short_book_title"], books["text"]))
        else:
            found = [path] if path.is_file() else sorted(path.glob("*.txt"))
            texts = [Text(file.name, file.read_text(encoding="utf-8")) for file in found]
    except DataError:
        raise
    except (OSError, ValueError, ArrowException) as error:  # also not UTF-8
        raise DataError(f"{path}: cannot be read as UTF-8 text or PG-19's parquet file ({first_line(error)})") from None
    if not texts:
        raise DataError(f"{path}: no text there; expected a text file, a .jsonl file or a folder of .txt files")
    return texts


def text_numbers(total: int, split: str, search_seed: int = 0) -> list[int]:
    """The texts of a split, in order; of fewer than five texts all are held out, and none is there to search on."""
    if total < 5 and split == "search":
        raise DataError(f"{total} texts are too few to search on some and report others; give 5 or more")
    everything = total < 5 and split == "held_out"
    return sorted(splits.indices(total, "all" if everything else split, search_seed))


class Window(NamedTuple):
    """One request: the log-likelihood of ``target`` behind ``context``; sizes in tokens, as the model counts them."""

    context: str
    target: str
    target_tokens: int
    tokens: int


def target_ends(total: int, longest: int) -> list[int]:
    """Where in a text of ``total`` tokens the scored spans end: from ``longest`` to ``total``, none overlapping."""
    count = min(WINDOWS, 1 + (total - longest) // STRIDE)
    return [longest + i * (total - longest) // max(count - 1, 1) for i in range(count)]


def _fit(cut: Callable[[int], Window], start: int, before: int, length: int) -> Window:
    """The window nearest to ``length`` tokens, with no more: cut out, a text may have others, so the start moves."""
    tried: dict[int, Window] = {}
    while start not in tried and 0 <= start < before:
        tried[start] = cut(start)
        start += tried[start].tokens - length
    while not (fitting := [window for window in tried.values() if window.tokens <= length]) and max(tried) + 1 < before:
        start = max(tried) + 1
        tried[start] = cut(start)
    size = attrgetter("tokens")
    return max(fitting, key=size) if fitting else min(tried.values(), key=size)


def windows(
    text: str, length: int, longest: int, offsets: Sequence[tuple[int, int]], encode_pair: Callable[[str, str], Any]
) -> list[Window]:
    """At most ``WINDOWS`` windows of ``length`` tokens of a text, special tokens included, the last ``STRIDE`` scored.

    There is none in a text of fewer than ``longest`` tokens, the greatest length, which decides what is scored.
    ``offsets`` are those of its tokens in characters; ``encode_pair`` tokenizes a context and what follows it, by which
    sizes are counted. ``DataError``: no more tokens than are scored.
    """
    if not STRIDE < length <= longest:
        raise DataError(f"length={length}: expected more than {STRIDE} and at most longest={longest} tokens")
    found = []
    for end in target_ends(len(offsets), longest):
        middle, last = offsets[end - STRIDE][0], offsets[end - 1][1]

        def cut(start: int, middle: int = middle, target: str = text[middle:last]) -> Window:
            context = text[offsets[start][0] : middle]
            context_ids, target_ids = encode_pair(context, target)
            return Window(context, target, len(target_ids), len(context_ids) + len(target_ids))

        found.append(_fit(cut, max(end - length, 0), end - STRIDE, length))
    return found


def perplexity(items: Sequence[tuple[float, int]]) -> float:
    """Token perplexity from ``(log-likelihood, number of tokens)`` of every text."""
    return exp(-sum(loglikelihood for loglikelihood, _ in items) / sum(tokens for _, tokens in items))


class Task(BenchmarkTask):
    """The log-likelihood of the same tokens of each text behind a context; ``dataset_kwargs`` name the longest one."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._windows: dict[int, list[Window]] = {}
        metrics = {"token_perplexity": perplexity, "nll": "mean"}
        super().__init__(config, metrics, output_type="loglikelihood", num_fewshot=0)

    def load(
        self, *, split: str = "held_out", search_seed: int = 0, text_file: Any = None, **settings: Any
    ) -> tuple[list[dict[str, Any]], Source]:
        """One row a text, without the text itself."""
        request = asked(settings) if text_file is None else Asked("folder", Path(str(text_file)).expanduser())
        kind, path = request.kind, request.folder or PG19.path(request)
        self.texts: list[Text] = read(path)
        chosen = text_numbers(len(self.texts), split, search_seed)
        rows = [{"question_id": n, "name": self.texts[n].name, "characters": len(self.texts[n].text)} for n in chosen]
        digest = hashlib.sha256("\0".join(text.text for text in self.texts).encode()).hexdigest()
        seed = splits.seed(split, search_seed)
        name = "pg19-test" if kind == "official" else path.name
        return rows, Source(kind, name, str(path), digest, split, seed, len(self.texts), len(rows))

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load the rows."""
        self.config.metadata = {"longest": LONGEST, **(dataset_kwargs or {}), **self.config.metadata}
        super().download(dataset_kwargs, **kwargs)
        self._longest = max(self.config.metadata["longest"], self.config.metadata["length"])
        self._all = self.dataset[SPLIT]

    def doc_to_text(self, doc: dict[str, Any], doc_to_text: Any = None) -> str:
        """The text's name: contexts depend on the model's tokenizer."""
        return doc["name"]

    def doc_to_target(self, doc: dict[str, Any], doc_to_target: Any = None) -> str:
        """How many tokens are scored, once the model is known."""
        return str(self._scored(doc))

    def build_all_requests(self, *, limit: int | None = None, **kwargs: Any) -> None:
        """Leave out the texts that are shorter than the longest window, and build the requests for the others."""
        self.refuse_without_model()
        kept: list[int] = []
        short = 0
        for row, doc in enumerate(self._all):
            if len(kept) == limit:
                break
            self._windows[doc["question_id"]] = found = self._cut(self.texts[doc["question_id"]].text)
            kept += [row] if found else []
            short += not found
        if short:
            message = f"{self.config.task}: {short} texts have fewer than longest={self._longest} tokens"
            if not kept:
                raise PromptTooLong(f"{message}, and none has more; give longer ones, or --metadata longest=N")
            logger.warning(f"{message} and are left out")
        self.dataset = {SPLIT: self._all.select(kept)}
        super().build_all_requests(limit=limit, **kwargs)

    def fewshot_context(self, doc: dict[str, Any], num_fewshot: int, **kwargs: Any) -> str:
        """Nothing stands around a text, no chat template either: each window is its own context."""
        return ""

    def construct_requests(self, doc: dict[str, Any], ctx: Any, **kwargs: Any) -> list[Instance]:
        """One request a window."""
        kwargs = {key: value for key, value in kwargs.items() if "chat_template" not in key}
        return [
            Instance("loglikelihood", doc, (window.context, window.target), number, **kwargs)
            for number, window in enumerate(self._windows[doc["question_id"]])
        ]

    def scores(self, doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, Any]:
        """The text's log-likelihood with its number of tokens, and nats a token."""
        tokens, loglikelihood = self._scored(doc), sum(value for value, _ in results)
        return {"token_perplexity": (loglikelihood, tokens), "nll": -loglikelihood / tokens}

    def _scored(self, doc: dict[str, Any]) -> int:
        return sum(window.target_tokens for window in self._windows.get(doc["question_id"], ()))

    def _cut(self, text: str) -> list[Window]:
        lm, length = current_lm(), self.config.metadata["length"]
        tokenizer: Any = getattr(lm, "tokenizer", None)
        if not getattr(tokenizer, "is_fast", False) or not hasattr(lm, "_encode_pair"):
            raise DataError(
                f"{self.config.task}: {type(lm).__name__} has no fast tokenizer; take a model that has one and that "
                "lm_eval runs itself (hf, lpes, vllm)"
            )
        if lm.max_length < length:
            raise PromptTooLong(
                f"{self.config.task}: windows of {length} tokens, but max_length is {lm.max_length} "
                f"and lm_eval would cut them; add max_length={self._longest} to --model_args"
            )
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return windows(text, length, self._longest, offsets, lm._encode_pair)
