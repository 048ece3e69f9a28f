"""A generated set for multi-document question answering: short encyclopaedia articles about what never was.

An article of a kind (people, towns, books, battles) states the same six facts in a drawn order, each in one of two
wordings, among four remarks. A question asks one fact of one article; its distractors are articles of the same kind, so
only the name says which one answers. Names are made of syllables and facts drawn anew: an answer can only be read.

Words stand in ``fiction.json``; their order counts, as they are drawn by number. Example ``i`` depends on the seed and
``i`` alone, on any machine. Training sets must use other seeds than ``SEED``.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

from lpes_eval.data.documents import Document, Example, best_subspan_em, normalize
from lpes_eval.files import read_json
from lpes_eval.rng import below, choice, shuffled, stream

POOL = 2700
"""Examples there are to draw splits from."""
SEED = 2
"""One with which no question is asked twice. Changing it, or anything drawn below, changes the task's version."""
REMARKS = 4
"""How many an article makes, of eight. It has about 114 words then; the published benchmark's passages have 100."""
WORDS = read_json(Path(__file__).with_name("fiction.json"))
"""Sentences begin with a kind's ``subject``, the ``{title}`` or, for people, ``{name}``, its last word. Fields of its
``opening`` and ``remarks`` name lists in ``choices`` or ``shared``.
"""
SYLLABLES = [onset + vowel for onset in "bdgklmnrstv" for vowel in "aeiou"]


@dataclass(frozen=True)
class Value:
    """What a fact says: the words in the article, and the answers that are accepted; the first is the usual one."""

    text: str
    answers: tuple[str, ...]


def _word(words: str, rng: Random) -> str:
    return choice(words.split(), rng)


def _name(kind: str, rng: Random) -> str:
    """Two syllables or three, at least 36,960 names of a kind; towns, which are asked for, always three (60,500)."""
    middle = choice(SYLLABLES, rng) if kind == "town" or rng.random() < 0.5 else ""
    return choice(SYLLABLES, rng).capitalize() + middle + _word(WORDS["endings"][kind], rng)


def _title(kind: str, rng: Random) -> str:
    """The title of an article of a kind: ``person``, ``town``, ``book`` or ``battle``."""
    if kind == "person":
        return f"{_name('given', rng)} {_name('family', rng)}"
    if kind == "town":
        return _name("town", rng)
    thing = _word(WORDS["nouns" if kind == "book" else "battles"], rng)
    return f"{'The ' if kind == 'book' else ''}{thing} of {_name('town', rng)}"


def _value(kind: str, rng: Random) -> Value:
    """A value of a kind of fact. One town in four also has the name it bears today, which is an answer too."""
    if kind == "date":
        day, month, year = 1 + below(28, rng), _word(WORDS["months"], rng), 1100 + below(900, rng)
        return Value(f"{day} {month} {year}", (f"{day} {month} {year}", f"{month} {day}, {year}"))
    if kind == "year":
        text = str(1100 + below(900, rng))
    elif kind == "count":
        text = f"{1000 + below(99_000, rng):,}"
    else:
        text = _name("river", rng) if kind == "river" else _title(kind, rng)
    if kind == "town" and rng.random() >= 0.75:
        today = _title("town", rng)
        return Value(f"{text} (now {today})", (text, today))
    others = {"person": (text.split()[-1],), "river": (f"River {text}",)}.get(kind, ())
    return Value(text, (text, *others))


@dataclass(frozen=True)
class Article:
    """An article, with the values of its kind's facts, and what is ``said`` in it: opening, statements, remarks."""

    document: Document
    subject: str
    values: tuple[Value, ...]
    said: tuple[str, ...]

    def states_elsewhere(self, fact: int) -> bool:
        """Whether an answer to a question about ``fact`` stands anywhere but where the article states it."""
        others = " ; ".join([*self.said[: 1 + fact], *self.said[2 + fact :]])
        return bool(best_subspan_em(f"{self.document.title} {others}", self.values[fact].answers))


def _article(name: str, rng: Random) -> Article:
    kind = WORDS["kinds"][name]
    choices = WORDS["shared"] | kind["choices"]

    def filled(sentence: str) -> str:
        """The sentence with a word drawn for each of its fields."""
        return re.sub(r"\{(\w+)\}", lambda field: _word(choices[field[1]], rng), sentence)

    title = _title(name, rng)
    opening = f"{kind['subject'].format(title=title, name=title)} {filled(kind['opening'])}."
    values = tuple(_value(fact["value"], rng) for fact in kind["facts"])
    stated = zip(kind["facts"], values, strict=True)
    statements = [choice(fact["statements"], rng).format(value=value.text) for fact, value in stated]
    order = shuffled(statements, rng)
    subject = kind["subject"].format(title=title, name=title.split()[-1])
    remarked = [filled(remark) for remark in shuffled(kind["remarks"], rng)[:REMARKS]]
    sentences = shuffled([" and ".join(order[i : i + 2]) for i in range(0, len(order), 2)] + remarked, rng)
    text = " ".join([opening, *(f"{subject} {sentence}." for sentence in sentences)])
    return Article(Document(title, text), subject, values, (opening, *statements, *remarked))


@lru_cache(maxsize=1024)  # a command loads its examples twice
def generate(question_id: int, num_documents: int, seed: int = SEED) -> Example:
    """Example ``question_id`` of the generated set; its first distractors are the same for every ``num_documents``.

    The gold article gives the accepted answers where it states the fact that is asked, and nowhere else. No distractor
    contains an accepted answer, and no two articles of an example are about subjects of the same name.
    """
    rng = stream("mdqa_pos", seed, question_id)
    kind = choice(list(WORDS["kinds"]), rng)
    facts = WORDS["kinds"][kind]["facts"]
    asked = below(len(facts), rng)
    gold = _article(kind, rng)
    while gold.states_elsewhere(asked):
        gold = _article(kind, rng)
    answers = gold.values[asked].answers
    question = choice(facts[asked]["questions"], rng).format(title=gold.document.title)

    documents = {normalize(gold.subject): gold.document}
    while len(documents) < num_documents:
        other = _article(kind, rng)
        if not best_subspan_em(f"{other.document.title} {other.document.text}", answers):
            documents.setdefault(normalize(other.subject), other.document)
    _, *distractors = documents.values()
    return Example(question_id, question, answers, gold.document, tuple(distractors))
