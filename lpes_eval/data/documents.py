"""A question over documents: its prompt and its metric (Liu et al. 2024, arXiv 2307.03172).

Best-subspan exact match: an accepted answer is contained in the first line, after SQuAD's normalisation (Rajpurkar et
al. 2016, arXiv 1606.05250). As in the benchmark's code a word boundary is ``regex``'s: accents are parts of words.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import regex

from lpes_eval.harness.segments import Segment, join
from lpes_eval.harness.task import gold_index

TEMPLATE = """\
Write a high-quality answer for the given question using only the provided search results \
(some of which might be irrelevant).

{search_results}

Question: {question}
Answer:"""
"""The benchmark's prompt (Fig. 6)."""

_ARTICLE = r"\b(a|an|the)\b"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def bare(text: str, article: re.Pattern[str] = re.compile(_ARTICLE)) -> str:
    """``text`` without ASCII punctuation and articles, its white space made single. It is not lower-cased."""
    return " ".join(article.sub(" ", text.translate(_NO_PUNCTUATION)).split())


def normalize(text: str) -> str:
    """SQuAD's normalisation as this benchmark has it."""
    return bare(text.lower(), regex.compile(_ARTICLE))


def best_subspan_em(prediction: str, answers: Iterable[str]) -> float:
    """1.0 if any of ``answers`` is contained in the prediction's first line, else 0.0."""
    normalized = normalize(prediction.split("\n", 1)[0])
    return float(any(normalize(answer) in normalized for answer in answers))


@dataclass(frozen=True)
class Document:
    """A passage under the title of the page it stands on; without a title, none stands in the prompt."""

    title: str | None
    text: str


@dataclass(frozen=True)
class Example:
    """One question, its accepted answers, the document that answers it, and the distractors in their fixed order."""

    question_id: int
    question: str
    answers: tuple[str, ...]
    gold: Document
    distractors: tuple[Document, ...] = ()

    @classmethod
    def of(cls, gold: dict[str, Any], distractors: Iterable[dict[str, Any]], **row: Any) -> Example:
        """The example that a row of the task's data set is."""
        return cls(**row, gold=Document(**gold), distractors=tuple(Document(**one) for one in distractors))

    def documents(self, position: float) -> list[Document]:
        """All documents in the order of the prompt, the gold one at ``position`` percent."""
        index = gold_index(position, 1 + len(self.distractors))
        return [*self.distractors[:index], self.gold, *self.distractors[index:]]

    def segments(self, position: float) -> list[Segment]:
        """The prompt, in labelled pieces: one document a line, numbered from 1."""
        instruction, question = TEMPLATE.split("{search_results}")
        found = [Segment("instruction", instruction)]
        for i, document in enumerate(self.documents(position)):
            label, end = "gold" if document is self.gold else f"document {i + 1}", "\n" * (i < len(self.distractors))
            number = f"Document [{i + 1}]"
            title = f"(Title: {document.title})" if document.title is not None else ""
            found.append(Segment(label, f"{number}{title} {document.text}{end}", len(number), len(end)))
        return [*found, Segment("question", question.format(question=self.question))]

    def prompt(self, position: float) -> str:
        """The prompt as text."""
        return join(self.segments(position))

    def target(self, position: float) -> list[str]:
        """The accepted answers, wherever the gold document stands."""
        return list(self.answers)
