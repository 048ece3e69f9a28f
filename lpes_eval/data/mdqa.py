"""Multi-document question answering (Liu et al. 2024, arXiv 2307.03172): one document of n answers the question.

The gold document moves; the distractors and their order stay as they are. Where the other documents come from is said
in a set's name: the benchmark's own files hold passages that a retriever found (``nq-open-10_total_documents_...``);
from a folder that has the gold passages only, distractors are drawn among other questions' gold passages
(``nq-open-oracle+drawn``); the generated set is ``lpes_eval.data.fiction``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpes_eval import files
from lpes_eval.data import splits
from lpes_eval.data.kv import gold_index
from lpes_eval.errors import DataError
from lpes_eval.rng import shuffled, stream
from lpes_eval.scoring.qa import normalize

SIZES = (10, 20, 30)
POSITIONS = (0, 25, 50, 75, 100)
STEPS = tuple(range(0, 101, 10))
"""The positions of Table 16."""
ORACLE = "nq-open-oracle.jsonl.gz"
URL = "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/qa_data"
DRAWN = "nq-open-oracle+drawn"
"""What a set is called whose distractors were drawn."""
DRAWN_SEED = 1
"""Changing it changes the distractors that are drawn for ``nq-open-oracle``."""

TEMPLATE = """\
Write a high-quality answer for the given question using only the provided search results \
(some of which might be irrelevant).

{search_results}

Question: {question}
Answer:"""


@dataclass(frozen=True)
class Document:
    """A passage under the title of the page it stands on."""

    title: str
    text: str


@dataclass(frozen=True)
class Example:
    """One question, its accepted answers, the document that answers it, and the distractors in their fixed order."""

    question_id: int
    question: str
    answers: tuple[str, ...]
    gold: Document
    distractors: tuple[Document, ...]

    def gold_index(self, position: float) -> int:
        """Where the gold document stands, from 0, at ``position`` percent."""
        return gold_index(position, 1 + len(self.distractors))

    def documents(self, position: float) -> list[Document]:
        """All documents in the order of the prompt, the gold one at ``position`` percent."""
        index = self.gold_index(position)
        return [*self.distractors[:index], self.gold, *self.distractors[index:]]

    def prompt(self, position: float) -> str:
        """The benchmark's prompt (Fig. 6), to the byte."""
        return TEMPLATE.format(search_results=format_documents(self.documents(position)), question=self.question)


def format_documents(documents: Sequence[Document]) -> str:
    """One document a line, numbered from 1."""
    return "\n".join(f"Document [{i}](Title: {d.title}) {d.text}" for i, d in enumerate(documents, 1))


def contains_answer(document: Document, answers: Sequence[str]) -> bool:
    """Whether copying the document would be scored as an answer, by the metric's own rule.

    Answers that normalise to nothing are passed over: every document contains them.
    """
    text = normalize(f"{document.title} {document.text}")
    return any(answer in text for answer in map(normalize, answers) if answer)


def official_name(num_documents: int) -> str:
    """The file's name in github.com/nelson-liu/lost-in-the-middle."""
    return f"nq-open-{num_documents}_total_documents_gold_at_0.jsonl.gz"


OFFICIAL_NAMES = "nq-open-[0-9]*_total_documents_gold_at_0.jsonl"
"""Files of every size, without ``.gz``."""
SUBFOLDERS = ("*_total_documents", "qa_data/*_total_documents", "qa_data")
"""``subfolders`` of every size."""
LINE = {
    "question": "QUESTION",
    "answers": ["ANSWER"],
    "ctxs": [
        {"title": "TITLE", "text": "TEXT WITH THE ANSWER", "isgold": True},
        {"title": "TITLE", "text": "TEXT", "isgold": False},
    ],
}
"""What a line has."""


def subfolders(num_documents: int) -> tuple[str, ...]:
    """Where in that repository, seen from its root or from ``qa_data``, the file lies."""
    return (f"{num_documents}_total_documents", f"qa_data/{num_documents}_total_documents", "qa_data")


def official_url(num_documents: int) -> str:
    """The file's address."""
    return f"{URL}/{num_documents}_total_documents/{official_name(num_documents)}"


def read_official(path: Path, num_documents: int) -> list[Example]:
    """The examples of an official ``N_total_documents`` file, wherever its gold documents stand.

    Raises:
        DataError: a line that is not in the benchmark's form, or with another number of documents.
    """
    examples = []
    for question_id, (question, answers, documents, golds, where) in enumerate(_read(path)):
        if len(documents) != num_documents:
            raise DataError(f"{where}: {len(documents)} documents in 'ctxs', expected {num_documents}")
        if len(golds) != 1:
            raise DataError(f"{where}: {len(golds)} documents in 'ctxs' have 'isgold': true, expected one")
        distractors = tuple(document for i, document in enumerate(documents) if i != golds[0])
        examples.append(Example(question_id, question, answers, documents[golds[0]], distractors))
    splits.check_enough(len(examples), path)
    return examples


def read_oracle(path: Path) -> list[Example]:
    """The examples of ``nq-open-oracle.jsonl.gz``: no distractors yet, see ``drawn_distractors``."""
    examples = []
    for question_id, (question, answers, documents, golds, where) in enumerate(_read(path)):
        if len(documents) != 1 or golds != [0]:
            raise DataError(f"{where}: {len(documents)} documents in 'ctxs', expected the gold one alone")
        examples.append(Example(question_id, question, answers, documents[0], ()))
    splits.check_enough(len(examples), path)
    return examples


def drawn_distractors(examples: Sequence[Example], num_documents: int) -> Callable[[int], Example]:
    """A function that gives example ``question_id`` its distractors, drawn among other questions' gold documents.

    The draw depends on the question alone, so a question's first 9 distractors of 20 documents are those of 10. None
    contains an accepted answer, and no two documents of an example have the same text. An answer of one character is
    looked for as a word (every text contains the letter s, which is an answer once).

    Raises (when called):
        DataError: too few documents without the answer.
    """
    texts = [normalize(f"{example.gold.title} {example.gold.text}") for example in examples]

    def draw_for(question_id: int) -> Example:
        example = examples[question_id]
        answers = [answer for answer in map(normalize, example.answers) if answer]
        rng = stream("mdqa_pos drawn", DRAWN_SEED, question_id)
        taken = {texts[question_id]}
        distractors: list[Document] = []
        for other in shuffled(range(len(examples)), rng):
            if len(distractors) == num_documents - 1:
                break
            if texts[other] not in taken and not any(_contains(texts[other], answer) for answer in answers):
                taken.add(texts[other])
                distractors.append(examples[other].gold)
        if len(distractors) < num_documents - 1:
            raise DataError(
                f"example {question_id + 1}: {len(distractors)} distractors without its answer can be drawn among "
                f"{len(examples)} documents, expected {num_documents - 1}; use a larger file"
            )
        return Example(question_id, example.question, example.answers, example.gold, tuple(distractors))

    return draw_for


def _contains(text: str, answer: str) -> bool:
    return answer in text if len(answer) > 1 else answer in text.split()


def _read(path: Path) -> Iterator[tuple[str, tuple[str, ...], list[Document], list[int], str]]:
    """Question, answers, documents, the numbers of the gold ones, and the place for errors, one line at a time."""
    for number, line in enumerate(files.read_jsonl(path, required=LINE), 1):
        where = f"{path}, example {number}"
        question, answers, contexts = line["question"], line["answers"], line["ctxs"]
        if not isinstance(question, str) or not question.strip():
            raise DataError(f"{where}: 'question' is not a text")
        if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
            raise DataError(f"{where}: 'answers' is not a list of texts with at least one")
        if not isinstance(contexts, list) or not all(_is_document(context) for context in contexts):
            raise DataError(f"{where}: 'ctxs' is not a list of documents, each with a 'title' and a 'text'")
        documents = [Document(context["title"], context["text"]) for context in contexts]
        golds = [i for i, context in enumerate(contexts) if context.get("isgold") is True]
        yield question, tuple(answers), documents, golds, where


def _is_document(context: Any) -> bool:
    return isinstance(context, dict) and all(isinstance(context.get(field), str) for field in ("title", "text"))
