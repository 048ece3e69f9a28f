"""ZeroSCROLLS (Shaham et al. 2023, arXiv 2305.14196): files, prompts, cutting, scores, and lm-eval's task.

Each set is an archive ``NAME.zip`` with ``NAME/validation.jsonl`` and ``NAME/test.jsonl``, prompts and all. Validation
files (about 20 examples each) have references and are held out. Scores (section 3.3; ``metrics/``) are in [0, 1].
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from lpes_eval import files
from lpes_eval.data.documents import bare
from lpes_eval.data.source import Asked, Files, Source, asked, read_examples
from lpes_eval.errors import DataError
from lpes_eval.harness.budget import Budget
from lpes_eval.harness.segments import Segment, join
from lpes_eval.harness.task import ExamTask

SUMMARIES = ("gov_report", "summ_screen_fd", "qmsum", "squality")
ANSWERS = ("qasper", "narrative_qa")
NAMES: tuple[str, ...] = (*SUMMARIES, *ANSWERS, "space_digest")
FILES = {"held_out": "validation", "test": "test"}
"""Split -> file of the benchmark."""

_POSITIONS = ("document_start_index", "document_end_index", "query_start_index", "query_end_index")
LINE = {"id": "ID", "input": "PROMPT", "truncation_seperator": "...", **dict.fromkeys(_POSITIONS, 0)}  # sic
"""What a line of a file has, besides its ``output``: a text, or null in an unlabelled file."""


@dataclass(frozen=True)
class Example:
    """One example: its prompt in parts, of which ``separator`` stands for ``gap`` where the document is cut."""

    id: str
    instruction: str
    document: str
    gap: str
    question: str
    separator: str
    references: tuple[str, ...]

    def segments(self, document: str | None = None) -> tuple[Segment, ...]:
        """The prompt, whole, or with ``document``, a beginning of the document, in its place."""
        body, gap = (self.document, self.gap) if document is None else (document, self.separator)
        parts = {"instruction": self.instruction, "document": body, "separator": gap, "question": self.question}
        return tuple(Segment(*part) for part in parts.items())


def locate(request: Asked, name: str, split: str) -> Path:
    """The archive of subset ``name``; ``DataError`` where it cannot be had, or has no such split."""
    if split not in FILES:
        few = "ZeroSCROLLS has no examples to search on, its few labelled ones are all held out"
        raise DataError(f"split={split!r}: expected {' or '.join(FILES)} ({few})")
    url = "https://huggingface.co/datasets/tau/zero_scrolls/resolve/main"
    return Files("ZeroSCROLLS", f"{name}.zip", url, places=("zero_scrolls",)).path(request)


def read(path: Path, name: str, split: str) -> list[Example]:
    """The examples of a subset, in the file's order; lines with the same id are one example with several references."""
    examples: dict[str, Example] = {}
    for example in read_examples(path, LINE, _parse, f"{name}/{FILES[split]}.jsonl"):
        if before := examples.get(example.id):
            example = replace(before, references=before.references + example.references)
        examples[example.id] = example
    if not examples:
        raise DataError(f"{path}: the file holds no example")
    return list(examples.values())


def _parse(number: int, line: dict[str, Any]) -> Example:
    text, (start, end, query, query_end) = line["input"], (line[field] for field in _POSITIONS)
    if not 0 <= start <= end <= query <= query_end <= len(text):
        places = f"document {start}..{end} and query {query}..{query_end}"
        raise ValueError(f"{places} do not follow each other in an input of {len(text)} characters")
    output = line.get("output")
    if output is not None and not isinstance(output, str):
        raise ValueError(f"'output' is {type(output).__name__}, expected a text, or null where there is none")
    parts = text[:start], text[start:end], text[end:query], text[query:]
    return Example(line["id"], *parts, line["truncation_seperator"], (output,) if output else ())


def fitted(example: Example, budget: Budget, render: Callable[[str], str]) -> str:
    """The prompt as ``render`` makes it, whole if it fits; else with its document cut as the benchmark cuts it."""

    def compose(beginning: str | None = None) -> str:
        return render(join(example.segments(beginning)))

    if budget.fits(whole := compose()):
        return whole
    return compose(budget.longest_beginning(example.document, compose, f"ZeroSCROLLS, {example.id}"))


ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
"""Newlines mean nothing to these three, so no sentence splitter is needed (``rougeLsum`` is no part of the score)."""

_PERCENTAGE = re.compile(r"(\d+\.?\d*)%")


def rouge(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """F-measures of ROUGE-1, -2 and -L, each the best over the references by itself; words are not stemmed."""
    from rouge_score.rouge_scorer import RougeScorer

    best = RougeScorer(list(ROUGE_TYPES), use_stemmer=False).score_multi(references, prediction)
    return {kind: score.fmeasure for kind, score in best.items()}


def geometric_mean(items: Sequence[tuple[float, float, float]]) -> float:
    """The geometric mean of the averages of ROUGE-1, -2 and -L over all examples, as in the code, not in the paper."""
    return prod(sum(scores) / len(scores) for scores in zip(*items, strict=True)) ** (1 / 3)


def f1(prediction: str, references: Iterable[str]) -> float:
    """F1 of the words that prediction and reference share, the best over the references."""
    said, scores = normalize(prediction).split(), [0.0]
    for wanted in (normalize(reference).split() for reference in references):
        if common := (Counter(said) & Counter(wanted)).total():  # two empty answers do not match
            precision, recall = common / len(said), common / len(wanted)
            scores.append(2 * precision * recall / (precision + recall))
    return max(scores)


def exp_similarity(prediction: str, references: Iterable[str]) -> float:
    """Half the score for every 10 points between the first percentage in the prediction and the reference's."""
    if not (predicted := _PERCENTAGE.search(prediction)):
        return 0.0
    wanted = (float(_PERCENTAGE.findall(reference)[0]) for reference in references)
    return max(0.5 ** (abs(percentage - float(predicted[1])) / 10) for percentage in wanted)


def normalize(text: str) -> str:
    """SQuAD's normalisation, and only then, as the benchmark has it, ASCII for accents and typographic marks."""
    return transliterate(bare(text.lower()))


def transliterate(text: str) -> str:
    """Lower-case Latin, Greek and typographic characters as ``unidecode`` writes them; other scripts stay."""
    decomposed = unicodedata.normalize("NFKD", text.translate(_TO_ASCII))
    return "".join(c for c in decomposed if not unicodedata.combining(c)).translate(_TO_ASCII)


_PAIRS = """\
æ=ae ð=d ø=o þ=th ß=ss đ=d ħ=h ı=i ĸ=k ł=l ŋ=ng œ=oe ŧ=t
α=a β=b γ=g δ=d ε=e ζ=z η=e θ=th ι=i κ=k λ=l μ=m ν=n ξ=x ο=o π=p ρ=r ς=s σ=s τ=t υ=u φ=ph χ=kh ψ=ps ω=o µ=u
‐=- ‑=- ‒=- –=- —=-- ―=-- −=- ‘=' ’=' ‛=' ´=' ′=' ″='' “=" ”=" ‟=" «=<< »=>> ‹=< ›=> •=* ·=* ¡=! ¿=? ¬=! ¦=| ⁄=/
¢=C/ £=PS ¥=Y= €=EUR §=SS ¶=P ©=(c) ®=(r) ™=(tm) °=deg ±=+- ×=x ÷=/"""
_TO_ASCII = str.maketrans(
    dict(pair.split("=", 1) for pair in _PAIRS.split())
    | {"\xad": "", "¼": " 1/4", "½": " 1/2", "¾": " 3/4"}  # a soft hyphen is nothing
)


class Task(ExamTask):
    """One of the seven sets; its figure on the leaderboard is ``score``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.subset = config["metadata"]["subset"]
        self._answer = ("f1", f1) if self.subset in ANSWERS else ("exp_similarity", exp_similarity)
        summary = {"score": geometric_mean, **dict.fromkeys(ROUGE_TYPES, "mean")}
        metrics = summary if self.subset in SUMMARIES else {"score": "mean", self._answer[0]: "mean"}
        super().__init__({"doc_to_target": "references", **config}, metrics)

    def load(self, *, split: str = "held_out", **settings: Any) -> tuple[list[dict[str, Any]], Source]:
        """One row an example, without its long input."""
        request = asked(settings)
        path = locate(request, self.subset, split)
        self.examples: list[Example] = read(path, self.subset, split)
        rows = [
            {"question_id": number, "id": example.id, "references": list(example.references)}
            for number, example in enumerate(self.examples)
        ]
        origin = (request.kind, f"{self.subset}, {FILES[split]}", str(path), files.sha256(path))
        return rows, Source(*origin, split, "none", len(rows), len(rows))

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load the examples; of a file without references only the answers are logged."""
        super().download(dataset_kwargs, **kwargs)
        if not self.examples[0].references:
            self.override_metric("bypass")

    def scores(self, doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
        """The scores of one answer."""
        if self.subset in SUMMARIES:
            scores = rouge(results[0], doc["references"])
            return {**scores, "score": tuple(scores.values())}
        name, metric = self._answer
        score = metric(results[0], doc["references"])
        return {name: score, "score": score}

    def doc_to_text(self, doc: dict[str, Any], doc_to_text: Any = None) -> str:
        """The whole input."""
        return join(self.examples[doc["question_id"]].segments())

    def prompts(self, doc: dict[str, Any], render: Callable[..., str], chat: bool) -> str | list[str]:
        """The prompt as the model gets it: whole if it fits, else with its document cut at the end."""
        return fitted(self.examples[doc["question_id"]], self.budget(), render)
