"""Multi-document question answering (Liu et al. 2024, arXiv 2307.03172): one document of n answers the question.

The gold document moves; the distractors keep their order. For SynthWiki (Peysakhovich & Lerer 2023, arXiv 2310.01427)
they are drawn among other questions' gold passages. The generated set is ``lpes_eval.data.fiction``.
"""

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pandas

from lpes_eval.data import fiction, splits
from lpes_eval.data.documents import Document, Example, best_subspan_em, normalize
from lpes_eval.data.source import Files, Source, asked, draw, read_examples
from lpes_eval.errors import DataError, first_line
from lpes_eval.harness.task import PositionTask
from lpes_eval.rng import shuffled, stream

OFFICIAL = Files(
    "mdqa_pos",
    "nq-open-{0}_total_documents_gold_at_0.jsonl.gz",
    "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/qa_data/{0}_total_documents",
    places=("{0}_total_documents", "qa_data/{0}_total_documents", "qa_data"),
    generated=True,
)
DRAWN_SEED = 1
"""Changing it changes the distractors that are drawn for SynthWiki."""
SYNTHWIKI = ("context", "question", "answer")
"""The columns of SynthWiki's files."""

_GOLD, _OTHER = {"title": "TITLE", "text": "TEXT WITH THE ANSWER", "isgold": True}, {"title": "TITLE", "text": "TEXT"}
LINE = {"question": "QUESTION", "answers": ["ANSWER"], "ctxs": [_GOLD, _OTHER]}


def read(path: Path, num_documents: int) -> list[Example]:
    """The examples of a file; raises ``DataError`` for a line that is not in the benchmark's form."""

    def parse(number: int, line: dict[str, Any]) -> Example:
        question, answers, contexts = line["question"], line["answers"], line["ctxs"]
        if not question.strip() or not answers or not all(answer.strip() for answer in answers):
            raise ValueError("'question' or 'answers' is empty, or holds an empty text")
        if len(contexts) != num_documents:
            raise ValueError(f"{len(contexts)} documents in 'ctxs', expected {num_documents}")
        golds = [context for context in contexts if context.get("isgold") is True]
        if len(golds) != 1:
            raise ValueError(f"{len(golds)} documents in 'ctxs' have 'isgold': true, expected one")
        others = [context for context in contexts if context is not golds[0]]
        gold, *distractors = (Document(context["title"], context["text"]) for context in golds + others)
        return Example(number, question, tuple(answers), gold, tuple(distractors))

    return read_examples(path, LINE, parse, divided=True)


def read_synthwiki(path: Path) -> list[Example]:
    """The questions of a SynthWiki file (``.csv`` or ``.csv.gz``); raises ``DataError`` for a row that is none."""
    try:
        rows = pandas.read_csv(path, dtype=str, keep_default_na=False)[list(SYNTHWIKI)].fillna("").values.tolist()
    except (OSError, EOFError, ValueError, KeyError, zlib.error) as error:  # also not UTF-8
        message = f"cannot be read as SynthWiki's {','.join(SYNTHWIKI)}, .csv or .csv.gz"
        raise DataError(f"text_file={path}: {message} ({first_line(error)})") from None
    examples = []
    for number, (context, question, answer) in enumerate(map(str.strip, row) for row in rows):
        if not normalize(answer) or not context or not question:
            raise DataError(f"{path}: row {number + 1} has no {', '.join(SYNTHWIKI)}")
        examples.append(Example(number, question, (answer,), Document(None, context)))
    return examples


def synthwiki_numbers(examples: Sequence[Example], split: str, search_seed: int) -> tuple[list[int], set[int]]:
    """The questions of a split, the first of each passage first, and those whose passages may stand beside them."""
    by_passage: dict[str, list[int]] = {}
    for number, example in enumerate(examples):
        by_passage.setdefault(example.gold.text, []).append(number)
    passages = list(by_passage.values())
    everything, held_out = {*range(len(passages))}, {*splits.indices(len(passages), "held_out")}
    chosen = splits.indices(len(passages), split, search_seed)
    allowed = {"all": everything, "held_out": held_out}.get(split, everything - held_out)
    rounds = zip_longest(*(passages[number] for number in chosen))
    most = {"held_out": splits.HELD_OUT, "search": splits.SEARCH}.get(split)
    numbers = [number for of_each in rounds for number in of_each if number is not None][:most]
    return numbers, {number for passage in allowed for number in passages[passage]}


def drawn_distractors(
    examples: Sequence[Example], num_documents: int, pool: Collection[int]
) -> Callable[[int], Example]:
    """A function that gives example ``question_id`` its distractors, the passages of other examples in ``pool``.

    The draw depends on the question alone. None contains the answer, and no two documents have the same text.
    ``DataError`` where there are too few of these.
    """
    texts, numbers = [normalize(example.gold.text) for example in examples], sorted(pool)

    def draw_for(question_id: int) -> Example:
        answer = normalize(examples[question_id].answers[0])
        chosen = {texts[question_id]: question_id}
        for other in shuffled(numbers, stream("mdqa_pos drawn", DRAWN_SEED, question_id)):
            if len(chosen) == num_documents:
                break
            if answer not in texts[other]:
                chosen.setdefault(texts[other], other)
        _, *distractors = (examples[other].gold for other in chosen.values())
        if len(chosen) < num_documents:
            raise DataError(
                f"example {question_id + 1}: {len(distractors)} distractors without its answer can be drawn among "
                f"{len(numbers)} documents, expected {num_documents - 1}; use a larger file"
            )
        return replace(examples[question_id], distractors=tuple(distractors))

    return draw_for


def load(
    *, num_documents: int = 10, split: str = "held_out", search_seed: int = 0, **settings: Any
) -> tuple[list[dict[str, Any]], Source]:
    """The questions of one split."""
    request = asked(settings)
    if request.kind == "generated":
        made = ("generated", "generated", f"lpes_eval.data.fiction, seed {fiction.SEED}", fiction.POOL)
        generate = partial(fiction.generate, num_documents=num_documents)
        return draw(split, search_seed, *made, generate, lambda one: [one.prompt(0), one.answers])
    if request.kind == "synthwiki":
        if settings.get("text_file") is None:
            raise DataError("source=synthwiki names no file; add text_file=FILE.csv (or .csv.gz) to --metadata")
        path = Path(str(settings["text_file"])).expanduser()
        examples = read_synthwiki(path)
        numbers, pool = synthwiki_numbers(examples, split, search_seed)
        example = drawn_distractors(examples, num_documents, pool)
        name = f"{path.name.partition('.csv')[0]}+drawn"
        return draw(split, search_seed, "synthwiki", name, path, len(examples), example, numbers=numbers)
    path = OFFICIAL.path(request, num_documents)
    examples = read(path, num_documents)
    name = path.name.partition(".jsonl")[0]
    return draw(split, search_seed, request.kind, name, path, len(examples), examples.__getitem__)


class Task(PositionTask):
    """The lm-eval task: ``best_subspan_em`` at every position."""

    METRIC = "best_subspan_em"
    SIZE = "num_documents"

    load = staticmethod(load)
    example = Example.of
    metric = staticmethod(best_subspan_em)

    def settled(self, metric: str, doc: dict[str, Any], position: float, answer: str) -> bool:
        """Where the first line is complete, or its complete words have a reference answer."""
        words, _, _ = answer.rpartition(" ")
        return metric == self.METRIC and ("\n" in answer or best_subspan_em(words, self.target(doc, position)) == 1)
