"""A generated set for multi-document question answering: short encyclopaedia articles about what never was.

Four kinds of articles (people, towns, books, battles), six facts in each, every fact in one of two wordings and the
facts in a drawn order, among four remarks that nobody asks about. A question asks one fact of one article. Its
distractors are articles of the same kind, with the same six facts about other names: topic and wording say nothing
about which article answers, only the name does.

Names are put together from syllables and every fact is drawn anew for every example, so there is nothing to know by
heart: an answer can only be read. Words come from a short closed list (``vocabulary``), so a small model can learn to.

Example ``i`` depends on the seed and ``i`` alone, on any machine. Training sets must use other seeds than ``SEED``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from lpes_eval.data.mdqa import TEMPLATE, Document, Example, contains_answer, normalize
from lpes_eval.rng import below, choice, shuffled, stream

POOL = 2700
"""Examples there are to draw splits from; each is made only when it is asked for."""
SEED = 2
"""One with which no question is asked twice. Changing it, or anything drawn below, changes the task's version."""
REMARKS = 4
"""How many an article makes, of eight. It has about 114 words then; the published benchmark's passages have 100."""


def _list(words: str) -> tuple[str, ...]:
    return tuple(words.split())


# -- names and numbers -----------------------------------------------------------------------------------------------

SYLLABLES = tuple(onset + vowel for onset in "bdgklmnrstv" for vowel in "aeiou")
ENDINGS = {
    "given": _list("lan ric nor mir das bel rik len vin ras tor nel wyn dis lis tan"),
    "family": _list("sen ter man ling dal rov nik berg ser lund mak vold rup stein quist roy"),
    "town": _list(
        "burg ford vik mere gard stad ton wick haven holm field bridge dorf mouth port brook well hill marsh cliff"
    ),
    "river": _list("dra ska wen var lin mar dur sel bra nau thal ster"),
}
MONTHS = _list("January February March April May June July August September October November December")
NOUNS = _list(
    "Harbour Garden Mountain Candle Bridge Orchard Mirror Winter Lantern Shepherd Tower River Letter Captain Wolf Moon "
    "Sparrow Island Voyage Kitchen Sister Clock Forest Stranger Window Feast Crown Promise Ladder Village Ocean Meadow "
    "Ghost Widow Thief Bell"
)
BATTLES = _list("Battle Siege Raid Defence")


@dataclass(frozen=True)
class Value:
    """What a fact says: the words in the article, and the answers that are accepted; the first is the usual one."""

    text: str
    answers: tuple[str, ...]


def _name(kind: str, rng: Random) -> str:
    """Two syllables or three, at least 36,960 names of a kind; towns, which are asked for, always three (60,500)."""
    middle = choice(SYLLABLES, rng) if kind == "town" or rng.random() < 0.5 else ""
    return choice(SYLLABLES, rng).capitalize() + middle + choice(ENDINGS[kind], rng)


def _full_name(rng: Random) -> str:
    return f"{_name('given', rng)} {_name('family', rng)}"


def _town_name(rng: Random) -> str:
    return _name("town", rng)


def _book_title(rng: Random) -> str:
    return f"The {choice(NOUNS, rng)} of {_town_name(rng)}"


def _battle(rng: Random) -> str:
    return f"{choice(BATTLES, rng)} of {_town_name(rng)}"


def _person(rng: Random) -> Value:
    name = _full_name(rng)
    return Value(name, (name, name.split()[-1]))


def _town(rng: Random) -> Value:
    """A town, one time in four with the name it bears today, which is an answer too."""
    name = _town_name(rng)
    if rng.random() < 0.75:
        return Value(name, (name,))
    today = _town_name(rng)
    return Value(f"{name} (now {today})", (name, today))


def _river(rng: Random) -> Value:
    name = _name("river", rng)
    return Value(name, (name, f"River {name}"))


def _book(rng: Random) -> Value:
    title = _book_title(rng)
    return Value(title, (title,))


def _year(rng: Random) -> Value:
    year = str(1100 + below(900, rng))
    return Value(year, (year,))


def _date(rng: Random) -> Value:
    day, month, year = 1 + below(28, rng), choice(MONTHS, rng), _year(rng).text
    return Value(f"{day} {month} {year}", (f"{day} {month} {year}", f"{month} {day}, {year}"))


def _count(rng: Random) -> Value:
    count = f"{1000 + below(99_000, rng):,}"
    return Value(count, (count,))


# -- articles --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """One kind of fact: how its value is drawn, how an article states it, how a question asks for it.

    ``{value}`` in a statement is the fact's value; ``{title}`` in a question the article's title.
    """

    value: Callable[[Random], Value]
    statements: tuple[str, str]
    questions: tuple[str, str]


@dataclass(frozen=True)
class Kind:
    """One kind of article.

    Attributes:
        title: draws the title.
        subject: how its sentences begin, with ``{title}`` or, for people, ``{name}``, the title's last word.
        opening: how the first sentence goes on; its fields name the lists in ``choices``.
        choices: closed word lists for the opening and the remarks.
        facts: what every article of this kind states.
        remarks: sentences that make it longer and are never asked about; they hold no name and no number in digits, so
            no answer.
    """

    title: Callable[[Random], str]
    subject: str
    opening: str
    choices: dict[str, tuple[str, ...]]
    facts: tuple[Fact, ...]
    remarks: tuple[str, ...]


SHARED = {
    "number": _list("two three four five six seven eight nine"),
    "season": _list("spring summer autumn winter"),
    "colour": _list("red green blue grey white yellow"),
}
"""Word lists that every kind of article draws from."""

PERSON = Kind(
    title=_full_name,
    subject="{name}",
    opening="was a {quality} {trade}",
    choices={
        "quality": _list("famous gifted noted patient restless wealthy modest stubborn popular learned"),
        "trade": _list(
            "painter poet lawyer doctor sailor teacher merchant botanist chemist surgeon weaver printer bishop general "
            "judge composer sculptor historian philosopher gardener"
        ),
        **SHARED,
        "pet": _list("cats dogs goats geese rabbits doves"),
        "matter": _list("money health music food travel gossip"),
        "walk": _list("canal shore wall ridge lane quay"),
        "skill": _list("swim ride dance cook sing sew"),
        "dish": _list("bread soup cheese porridge fish cabbage"),
        "friend": _list("students cousins actors strangers soldiers farmers"),
    },
    facts=(
        Fact(
            _town,
            ("was born in {value}", "came from {value}"),
            ("Where was {title} born?", "Where did {title} come from?"),
        ),
        Fact(
            _person,
            ("studied under {value}", "was taught by {value}"),
            ("Under whom did {title} study?", "Who taught {title}?"),
        ),
        Fact(
            _book,
            ("became known for {value}", "is remembered for {value}"),
            ("For what did {title} become known?", "For what is {title} remembered?"),
        ),
        Fact(
            _person,
            ("married {value}", "was the spouse of {value}"),
            ("Whom did {title} marry?", "Whose spouse was {title}?"),
        ),
        Fact(
            _date,
            ("died on {value}", "lived until {value}"),
            ("When did {title} die?", "Until when did {title} live?"),
        ),
        Fact(
            _town,
            ("is buried in {value}", "was laid to rest in {value}"),
            ("Where is {title} buried?", "Where was {title} laid to rest?"),
        ),
    ),
    remarks=(
        "kept {number} {pet} in the house and fed them before every meal",
        "wrote long letters to old friends, mostly about {matter} and the {season} weather",
        "walked along the {walk} each morning and spoke to nobody on the way",
        "could speak {number} languages but made mistakes in all of them when tired",
        "owned a {colour} coat that can be seen in every portrait",
        "never learned to {skill} and was laughed at for it by the neighbours",
        "slept little, ate mostly {dish} and complained about the noise in the street",
        "lent money to {friend} and did not always ask for it back",
    ),
)

TOWN = Kind(
    title=_town_name,
    subject="{title}",
    opening="is a {quality} {sort} in the {side} of the {land}",
    choices={
        "quality": _list("small busy quiet walled rich lively pretty modern"),
        "sort": _list("town port city village market"),
        "side": _list("north south east west centre"),
        "land": _list("province island valley kingdom county plain"),
        **SHARED,
        "goods": _list("pots baskets carpets candles knives ribbons"),
        "material": _list("brick stone timber slate clay iron"),
        "pest": _list("rats crows pigeons moles wasps foxes"),
        "runner": _list("bakers millers porters pupils brewers tailors"),
    },
    facts=(
        Fact(
            _person,
            ("was founded by {value}", "was built by {value}"),
            ("Who founded {title}?", "Who built {title}?"),
        ),
        Fact(
            _year,
            ("received its charter in {value}", "was given its charter in {value}"),
            ("When did {title} receive its charter?", "When was {title} given its charter?"),
        ),
        Fact(
            _river,
            ("lies on the river {value}", "stands on the river {value}"),
            ("On which river does {title} lie?", "On which river does {title} stand?"),
        ),
        Fact(
            _count,
            ("has {value} inhabitants", "counts {value} inhabitants"),
            ("How many inhabitants does {title} have?", "How many inhabitants does {title} count?"),
        ),
        Fact(
            _person,
            ("is governed by {value}", "has {value} as its mayor"),
            ("Who governs {title}?", "Who is the mayor of {title}?"),
        ),
        Fact(
            _town,
            ("is twinned with {value}", "has its twin town in {value}"),
            ("With which town is {title} twinned?", "Which is the twin town of {title}?"),
        ),
    ),
    remarks=(
        "has {number} gates, one of which is opened only when the {season} fair begins",
        "is known for its {goods}, which are sold from {colour} carts in the main square",
        "burned down more than once and was rebuilt in {material} on the same ground",
        "has a {colour} bell above the mill that can be heard from far away",
        "was for a long time too poor to pave the streets, which the {season} rain turned to mud",
        "sends {number} members to the assembly, chosen by those that own a house",
        "has had trouble with {pest} since the granary was moved to the edge of the park",
        "holds a race every {season} in which the {runner} carry sacks up to the chapel",
    ),
)

BOOK = Kind(
    title=_book_title,
    subject="{title}",
    opening="is a {quality} {genre} in {number} parts",
    choices={
        "quality": _list("long short tragic comic famous moral satirical popular"),
        "genre": _list("novel play poem ballad saga memoir romance fable"),
        **SHARED,
        "critic": _list("priests students actors nurses nobles clerks"),
        "scene": _list("flood storm wedding funeral harvest fever"),
        "shop": _list("bakery stable tavern brewery laundry smithy"),
        "thing": _list("fence goat hat debt recipe chair"),
    },
    facts=(
        Fact(
            _person,
            ("was written by {value}", "is the work of {value}"),
            ("Who wrote {title}?", "Whose work is {title}?"),
        ),
        Fact(
            _year,
            ("was first printed in {value}", "first appeared in {value}"),
            ("When was {title} first printed?", "When did {title} first appear?"),
        ),
        Fact(
            _person,
            ("tells the life of {value}", "has {value} as its hero"),
            ("Whose life does {title} tell?", "Who is the hero of {title}?"),
        ),
        Fact(
            _town,
            ("is set in {value}", "takes place in {value}"),
            ("Where is {title} set?", "Where does {title} take place?"),
        ),
        Fact(
            _person,
            ("was translated by {value}", "is read in the translation by {value}"),
            ("Who translated {title}?", "In whose translation is {title} read?"),
        ),
        Fact(
            _town,
            ("survives in a manuscript from {value}", "is kept as a manuscript in {value}"),
            ("Where is the manuscript of {title} from?", "Where is {title} kept as a manuscript?"),
        ),
    ),
    remarks=(
        "was at first praised by {critic} and ignored by everybody else",
        "opens with a {scene} that many readers have found hard to finish",
        "has often been read aloud on {season} evenings, with a pause after every chapter",
        "was once sold in a {colour} cover, which has not lasted well",
        "contains {number} songs whose tunes are lost, so that they are now only spoken",
        "was imitated so often that the style came to seem ordinary",
        "was finished in {number} weeks in a room above a {shop}",
        "spends {number} chapters on a quarrel about a {thing} before anything happens",
    ),
)

BATTLE = Kind(
    title=_battle,
    subject="The {title}",
    opening="was a {quality} {part} of the {age} war",
    choices={
        "quality": _list("costly bloody decisive brief famous bitter sudden stubborn"),
        "part": _list("clash contest episode encounter"),
        "age": _list("great long second old civil last"),
        **SHARED,
        "weather": _list("fog smoke rain snow dust mist"),
        "supply": _list("boots drums tents horses ladders shovels"),
        "witness": _list("farmers monks children peddlers nuns thieves"),
        "messenger": _list("boy monk widow servant juggler cook"),
        "ground": _list("marsh ditch stream bog ravine hedge"),
    },
    facts=(
        Fact(
            _date,
            ("began on {value}", "opened on {value}"),
            ("When did the {title} begin?", "When did the {title} open?"),
        ),
        Fact(
            _person,
            ("was won by {value}", "brought fame to {value}"),
            ("Who won the {title}?", "To whom did the {title} bring fame?"),
        ),
        Fact(
            _person,
            ("was lost by {value}", "brought ruin to {value}"),
            ("Who lost the {title}?", "To whom did the {title} bring ruin?"),
        ),
        Fact(
            _count,
            ("cost {value} lives", "left {value} dead"),
            ("How many lives did the {title} cost?", "How many dead did the {title} leave?"),
        ),
        Fact(
            _town,
            ("ended with a peace signed in {value}", "was followed by a treaty in {value}"),
            ("Where was the peace signed that ended the {title}?", "Where was the treaty that followed the {title}?"),
        ),
        Fact(
            _town,
            ("is remembered each year in {value}", "has a monument in {value}"),
            ("Where is the {title} remembered each year?", "Where does the {title} have a monument?"),
        ),
    ),
    remarks=(
        "was fought in {weather} so thick that few could tell friend from enemy",
        "was delayed for {number} hours because the {supply} had not arrived",
        "was seen by {witness} who had climbed a hill to watch in safety",
        "has been painted many times, mostly by people who were not there",
        "ruined the {season} crop of the nearest farms, for which nobody was paid",
        "could have been avoided if a letter carried by a {messenger} had come in time",
        "is taught in schools as an example of how not to cross a {ground}",
        "was over so soon that {number} regiments came only to dig",
    ),
)

KINDS = (PERSON, TOWN, BOOK, BATTLE)


@dataclass(frozen=True)
class Article:
    """An article before it is put together.

    Attributes:
        title: its title.
        subject: what its sentences begin with, after the first.
        opening: its first sentence.
        values: the value of every fact, in the order of the kind's facts.
        statements: the statement of every fact, in the same order.
        order: the facts in the order of the text; each sentence states two of them.
        remarks: its other sentences.
        places: the sentences after the first in the order of the text, those of facts being numbered first.
    """

    title: str
    subject: str
    opening: str
    values: tuple[Value, ...]
    statements: tuple[str, ...]
    order: tuple[int, ...]
    remarks: tuple[str, ...]
    places: tuple[int, ...]

    def document(self) -> Document:
        """The article as a document of a prompt."""
        first, second = self.order[::2], self.order[1::2]
        said = [f"{self.statements[i]} and {self.statements[j]}" for i, j in zip(first, second, strict=True)]
        said += self.remarks
        return Document(self.title, " ".join([self.opening, *(f"{self.subject} {said[i]}." for i in self.places)]))

    def all_but(self, fact: int) -> Document:
        """What the article says apart from one fact, to check that the fact is stated nowhere else."""
        others = [statement for i, statement in enumerate(self.statements) if i != fact]
        return Document(self.title, " ; ".join([self.opening, *others, *self.remarks]))


def _filled(sentence: str, kind: Kind, rng: Random) -> str:
    """The sentence with a word drawn for each of its fields."""
    return re.sub(r"\{(\w+)\}", lambda field: choice(kind.choices[field[1]], rng), sentence)


def _article(kind: Kind, rng: Random, remarks: int = REMARKS) -> Article:
    title = kind.title(rng)
    begin = kind.subject.format(title=title, name=title) + " "
    opening = begin + _filled(kind.opening, kind, rng)
    values = tuple(fact.value(rng) for fact in kind.facts)
    statements = tuple(
        choice(fact.statements, rng).format(value=value.text) for fact, value in zip(kind.facts, values, strict=True)
    )
    order = tuple(shuffled(range(len(kind.facts)), rng))
    subject = kind.subject.format(title=title, name=title.split()[-1])
    remarked = shuffled(kind.remarks, rng)[:remarks] if remarks else []
    said = tuple(_filled(remark, kind, rng) for remark in remarked)
    sentences = range(len(order) // 2 + len(said))
    places = shuffled(sentences, rng) if said else sentences
    return Article(title, subject, opening + ".", values, statements, order, said, tuple(places))


@lru_cache(maxsize=1024)  # a question is asked at several positions
def generate(question_id: int, num_documents: int, seed: int = SEED) -> Example:
    """Example ``question_id`` of the generated set; its first distractors are the same for every ``num_documents``.

    The gold article gives the accepted answers where it states the fact that is asked, and nowhere else. No distractor
    contains an accepted answer, and no two articles of an example are about subjects of the same name.
    """
    rng = stream("mdqa_pos", seed, question_id)
    kind = choice(KINDS, rng)
    asked = below(len(kind.facts), rng)
    gold = _article(kind, rng)
    while contains_answer(gold.all_but(asked), gold.values[asked].answers):
        gold = _article(kind, rng)
    answers = gold.values[asked].answers
    question = choice(kind.facts[asked].questions, rng).format(title=gold.title)

    subjects = {normalize(gold.subject)}
    distractors: list[Document] = []
    while len(distractors) < num_documents - 1:
        other = _article(kind, rng)
        document = other.document()
        if normalize(other.subject) not in subjects and not contains_answer(document, answers):
            subjects.add(normalize(other.subject))
            distractors.append(document)
    return Example(question_id, question, answers, gold.document(), tuple(distractors))


def shelf(num_documents: int, rng: Random, remarks: int = REMARKS) -> tuple[Kind, list[Article]]:
    """Articles of one kind, no two of which are about subjects of the same name; what a training context is made of."""
    kind = choice(KINDS, rng)
    articles: dict[str, Article] = {}
    while len(articles) < num_documents:
        article = _article(kind, rng, remarks)
        articles.setdefault(normalize(article.subject), article)
    return kind, list(articles.values())


# -- the language ----------------------------------------------------------------------------------------------------


def _words(kind: Kind, sentences: Sequence[str]) -> set[str]:
    fields = {field for sentence in sentences for field in re.findall(r"\{(\w+)\}", sentence)}
    drawn = {word for field in fields & kind.choices.keys() for word in kind.choices[field]}
    return drawn.union(*(re.findall("[A-Za-z]+", re.sub(r"\{\w+\}", "", sentence)) for sentence in sentences))


def words() -> list[str]:
    """Every word that is not a name, as it is written: those of facts and questions, then those that only remarks have.

    Both parts are in alphabetical order.
    """
    told = {*MONTHS, *NOUNS, *BATTLES, "The", "of", "River", "and"}
    for kind in KINDS:
        wordings = [wording for fact in kind.facts for wording in (*fact.statements, *fact.questions)]
        told |= _words(kind, [kind.opening, *wordings])
    remarked = set().union(*(_words(kind, kind.remarks) for kind in KINDS))
    return [*sorted(told), *sorted(remarked - told)]


def vocabulary() -> list[str]:
    """Pieces of which every prompt of this set and every answer can be put together; for building a tokenizer.

    A word, a number's first two digits and a name's first syllable carry the space before them. The longest pieces are
    the fixed parts of the prompt; other digits stand alone.
    """
    head, between, tail = re.split(r"\{\w+\}", TEMPLATE)
    prompt = [f"{head}Document [", "\nDocument [", "](Title:", ")", between.rstrip(" "), tail]
    names = [f" {syllable.capitalize()}" for syllable in SYLLABLES] + list(SYLLABLES)
    names += [ending for endings in ENDINGS.values() for ending in endings]
    marks = [".", ",", "?", " (now", "\n", *"0123456789", *(f" {number}" for number in range(100))]
    return list(dict.fromkeys([*prompt, *marks, *names, *(f" {word}" for word in words())]))
