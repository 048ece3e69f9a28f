"""Multi-document question answering (Liu et al. 2024, arXiv 2307.03172): one document of n answers the question.

The gold document moves; the distractors and their order stay as they are. Where the other documents come from is said
in a set's name: the benchmark's own files hold passages that a retriever found (``nq-open-10_total_documents_...``);
from a folder that has the gold passages only, distractors are drawn among other questions' gold passages
(``nq-open-oracle+drawn``); the generated set is ``lpes_eval.data.fiction``.

The metric is best-subspan exact match: an answer counts when one of the accepted answers is contained in it, both after
SQuAD's normalisation (Rajpurkar et al. 2016, arXiv 1606.05250). Only the text up to the first newline counts: a model
that copies its whole context would otherwise always be right. A word boundary is that of the ``regex`` module (accents
are parts of words), not of ``re``, as in the benchmark's own code.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import regex

from lpes_eval import files
from lpes_eval.data import splits
from lpes_eval.data.source import Asked, Source, asked, download, find, missing, other_sizes
from lpes_eval.errors import DataError
from lpes_eval.harness.segments import Segment, join
from lpes_eval.harness.task import PositionTask, gold_index
from lpes_eval.rng import shuffled, stream

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
"""The benchmark's prompt (Fig. 6)."""

_ARTICLE = regex.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """SQuAD's normalisation: lower case, ASCII punctuation removed, articles removed, white space made single."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def first_line(text: str) -> str:
    """What of a generation is scored: the text up to the first newline."""
    return text.split("\n", 1)[0].strip()


def best_subspan_em(prediction: str, answers: Iterable[str]) -> float:
    """1.0 if any of ``answers`` is contained in the prediction's first line, else 0.0."""
    normalized = normalize(first_line(prediction))
    return float(any(normalize(answer) in normalized for answer in answers))


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

    def segments(self, position: float) -> list[Segment]:
        """The prompt, in labelled pieces: one document a line, numbered from 1."""
        documents, gold = self.documents(position), self.gold_index(position)
        instruction, question = TEMPLATE.split("{search_results}")
        found = [Segment("instruction", instruction)]
        for i, document in enumerate(documents):
            line = format_document(i + 1, document) + "\n" * (i < len(documents) - 1)
            found.append(Segment("gold" if i == gold else f"document {i + 1}", line))
        return [*found, Segment("question", question.format(question=self.question))]

    def prompt(self, position: float) -> str:
        """The prompt as text."""
        return join(self.segments(position))


def format_document(number: int, document: Document) -> str:
    """A document as it stands in the prompt."""
    return f"Document [{number}](Title: {document.title}) {document.text}"


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
        if not all(answer.strip() for answer in answers):
            raise DataError(f"{where}: 'answers' holds an empty text, so every answer would be right")
        yield question, tuple(answers), documents, golds, where


def _is_document(context: Any) -> bool:
    return isinstance(context, dict) and all(isinstance(context.get(field), str) for field in ("title", "text"))


def load(**metadata: Any) -> tuple[list[dict[str, Any]], Source]:
    """The questions of one split."""
    from lpes_eval.data import fiction  # builds on this module

    num_documents, split = metadata["num_documents"], metadata.get("split", "held_out")
    if not isinstance(num_documents, int) or num_documents < 2:
        raise DataError(f"num_documents={num_documents!r}: expected a whole number of documents, at least 2")
    request, search_seed = asked(metadata), metadata.get("search_seed", 0)
    if request.kind == "generated":
        drawn = splits.split(fiction.POOL, search_seed)
        examples = [fiction.generate(i, num_documents) for i in drawn.indices(split)]
        name, location = "generated", f"lpes_eval.data.fiction, seed {fiction.SEED}"
        digest = sha256(json.dumps([[e.prompt(0), e.answers] for e in examples]).encode()).hexdigest()
    else:
        path, name = _file(request, num_documents)
        if name == DRAWN:
            read = read_oracle(path)
            example = drawn_distractors(read, num_documents)
        else:
            read = read_official(path, num_documents)
            example = read.__getitem__
        drawn = splits.split(len(read), search_seed)
        examples = [example(i) for i in drawn.indices(split)]
        location, digest = str(path), files.sha256(path)
    source = Source(request.kind, name, location, digest, split, drawn.seed(split), drawn.total, len(examples))
    return [asdict(example) for example in examples], source


class Task(PositionTask):
    """The lm-eval task: ``best_subspan_em`` at every position."""

    METRIC = "best_subspan_em"
    SIZE = "num_documents"

    load = staticmethod(load)

    def segments(self, doc: dict[str, Any], position: float) -> list[Segment]:
        """The prompt, in labelled pieces."""
        return _example(doc).segments(position)

    def target(self, doc: dict[str, Any], position: float) -> list[str]:
        """The accepted answers."""
        return list(doc["answers"])

    def score(self, doc: dict[str, Any], position: float, answer: str) -> float:
        """Best-subspan exact match."""
        return best_subspan_em(answer, doc["answers"])


def _example(doc: dict[str, Any]) -> Example:
    gold, distractors = Document(**doc["gold"]), tuple(Document(**document) for document in doc["distractors"])
    return Example(doc["question_id"], doc["question"], tuple(doc["answers"]), gold, distractors)


def _file(request: Asked, num_documents: int) -> tuple[Path, str]:
    """The file to read, and what to call the set that is made from it."""
    official = official_name(num_documents)
    if request.folder is None:
        return download(official_url(num_documents)), official.removesuffix(".jsonl.gz")
    if path := find(request.folder, official, subfolders(num_documents)):
        return path, official.removesuffix(".jsonl.gz")
    if path := find(request.folder, ORACLE, ("qa_data",)):
        return path, DRAWN
    others = other_sizes(request.folder, OFFICIAL_NAMES, "num_documents", SUBFOLDERS)
    raise missing(request.folder, f"{official} (or {ORACLE})", official_url(num_documents), others)
