"""What the YAML beside this file names."""

import hashlib
import logging
from functools import cache
from pathlib import Path

from lpes_eval.data import published, splits, text
from lpes_eval.data.source import Source
from lpes_eval.errors import DataError, PromptTooLong
from lpes_eval.harness.plugin import current_lm
from lpes_eval.harness.task import SPLIT, BenchmarkTask

logger = logging.getLogger(__name__)


def load(*, split="held_out", search_seed=0, text_file=None, **metadata):
    """One row a text, without the text itself, and where it came from."""
    search_seed = splits.whole_seed(search_seed)
    kind, path = _location(text_file, metadata)
    texts = _texts(path)
    digest = hashlib.sha256("\0".join(t.text for t in texts).encode()).hexdigest()
    chosen = text.text_numbers(len(texts), split, search_seed)
    rows = [{"question_id": n, "name": texts[n].name, "characters": len(texts[n].text)} for n in chosen]
    seed = splits.split(len(texts), search_seed).seed(split)
    name = "pg19-test" if kind == "official" else path.name
    return rows, Source(kind, name, str(path), digest, split, seed, len(texts), len(rows))


def _location(text_file, metadata):
    if text_file is not None:
        if metadata.get("source") not in (None, "folder") or metadata.get("data_dir"):
            raise DataError(f"text_file={text_file} and source or data_dir exclude each other; drop one of the two")
        return "folder", Path(text_file).expanduser()
    wish = published.asked(metadata, "lpes_ppl", ".txt files, or text_file=FILE")
    return wish.kind, wish.folder or published.download(text.PG19_URL)


@cache
def _texts(path: Path) -> list[text.Text]:
    # one reading serves every length
    return text.read(path)


class Task(BenchmarkTask):
    """The log-likelihood of the same tokens of each text, behind a context whose length is the task's."""

    def __init__(self, config):
        self._windows = {}
        # said to the configuration too: for a metric without it lm-eval would look on the Hub
        super().__init__({**config, "process_results": self._score})

    def download(self, dataset_kwargs=None, **kwargs):
        """Load the rows, and the texts beside them."""
        super().download(dataset_kwargs, **kwargs)
        self.texts = _texts(Path(self.config.metadata["source"]["location"]))
        self._all = self.dataset[SPLIT]

    def doc_to_text(self, doc, doc_to_text=None):
        """The text's name: contexts depend on the model's tokenizer."""
        return doc["name"]

    def doc_to_target(self, doc, doc_to_target=None):
        """How many tokens are scored, once the model is known."""
        return str(sum(window.target_tokens for window in self._windows.get(doc["question_id"], ())))

    def build_all_requests(self, *, limit=None, **kwargs):
        """Leave out the texts that are shorter than the longest window, and build the requests for the others."""
        self.refuse_without_model()
        kept, short = [], []
        for row, doc in enumerate(self._all):
            if limit is not None and len(kept) >= limit:
                break
            self._windows[doc["question_id"]] = windows = self._cut(doc)
            (kept if windows else short).append(row)
        if short:
            message = f"{self.config.task}: {len(short)} texts have fewer than longest={self._longest()} tokens"
            if not kept:
                raise PromptTooLong(f"{message}, and none has more; give longer ones, or --metadata longest=N")
            logger.warning(f"{message} and are left out")
        self.dataset = {SPLIT: self._all.select(kept)}
        super().build_all_requests(limit=limit, **kwargs)

    def fewshot_context(self, doc, num_fewshot, **kwargs):
        """Nothing stands around a text, no chat template either: each window is its own context."""
        return ""

    def construct_requests(self, doc, ctx, **kwargs):
        """One request a window."""
        from lm_eval.api.instance import Instance

        kwargs.pop("apply_chat_template", None)
        kwargs.pop("chat_template", None)
        return [
            Instance("loglikelihood", doc, (window.context, window.target), number, **kwargs)
            for number, window in enumerate(self._windows[doc["question_id"]])
        ]

    def _score(self, doc, results):
        """The text's log-likelihood with its number of tokens, and nats a token."""
        tokens = sum(window.target_tokens for window in self._windows[doc["question_id"]])
        loglikelihood = sum(value for value, _ in results)
        return {"token_perplexity": (loglikelihood, tokens), "nll": -loglikelihood / tokens}

    def _longest(self):
        return max(self.config.metadata.get("longest", text.LONGEST), self.config.metadata["length"])

    def _cut(self, doc):
        lm, metadata = current_lm(), self.config.metadata
        length = metadata["length"]
        tokenizer = getattr(lm, "tokenizer", None)
        if not getattr(tokenizer, "is_fast", False) or not hasattr(lm, "_encode_pair"):
            raise DataError(
                f"{self.config.task}: {type(lm).__name__} has no tokenizer that tells where tokens stand in a text; "
                "take a model that lm_eval runs itself (hf, lpes, vllm) and whose tokenizer is a fast one"
            )
        if lm.max_length < length:
            longest = metadata.get("longest", length)
            others = f" (max_length={longest} for every length up to the group's longest)" if longest > length else ""
            raise PromptTooLong(
                f"{self.config.task}: windows of {length} tokens, but max_length is {lm.max_length} and lm_eval would "
                f"cut them from the left; add max_length={length} to --model_args{others} to measure beyond the "
                "trained window"
            )
        content = self.texts[doc["question_id"]].text
        spans = tokenizer(content, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return text.windows(
            content,
            length,
            longest=self._longest(),
            stride=metadata.get("stride", text.STRIDE),
            count=metadata.get("windows", text.WINDOWS),
            offsets=spans,
            encode_pair=lm._encode_pair,
        )


def token_perplexity(items):
    """Over all tokens of all texts."""
    return text.perplexity(items)
