"""The generated question set: answers can be read and only read, and every machine draws the same."""

import hashlib
import re
from functools import cache, partial

from lpes_eval import rng
from lpes_eval.data import fiction, mdqa
from lpes_eval.data.documents import best_subspan_em

example = partial(fiction.generate, num_documents=10)
EXAMPLES = range(0, fiction.POOL, 18)


def values_of(document: mdqa.Document) -> dict[fiction.Fact, str]:
    """The facts that a document states, read back from its text with the patterns of its kind."""
    kinds = [k for k in fiction.KINDS if all(any(p.search(document.text) for p in patterns(f)) for f in k.facts)]
    assert len(kinds) == 1, document
    return {fact: next(m.group(1) for p in patterns(fact) if (m := p.search(document.text))) for fact in kinds[0].facts}


@cache
def patterns(fact: fiction.Fact) -> list[re.Pattern[str]]:
    value = r"(The \w+ of \w+|(?:[A-Z0-9][\w,]*)(?: \(?[A-Z0-9][\w,]*\)?| \(now \w+\))*)"
    return [re.compile(" " + re.escape(s).replace(r"\{value\}", value) + r"(?= and |\.)") for s in fact.statements]


@cache
def asked(question: str) -> tuple[fiction.Fact, str]:
    """The fact that a question asks, and the title it names."""
    wordings = [(fact, wording) for kind in fiction.KINDS for fact in kind.facts for wording in fact.questions]
    matches = [(f, re.fullmatch(re.escape(w).replace(r"\{title\}", "(.+)"), question)) for f, w in wordings]
    ((fact, match),) = [(fact, match) for fact, match in matches if match]
    return fact, match[1]


def test_there_are_as_many_examples_as_the_benchmark_has():
    assert fiction.POOL >= 2655
    assert len({fiction.generate(i, 1).question for i in range(fiction.POOL)}) == fiction.POOL


def test_the_gold_article_alone_states_the_answer_and_the_others_the_same_facts_of_other_subjects():
    for i in EXAMPLES:
        fact, title = asked(example(i).question)
        gold, answers = values_of(example(i).gold), example(i).answers
        assert title == example(i).gold.title
        assert answers[0] == gold[fact].split(" (now ")[0]
        assert best_subspan_em(gold[fact], answers) == 1.0
        others = " ; ".join(value for other, value in gold.items() if other is not fact)
        assert best_subspan_em(f"{title} ; {others}", answers) == 0.0
        for distractor in example(i).distractors:
            values = values_of(distractor)
            assert values.keys() == gold.keys()
            assert values[fact] != gold[fact]
            assert best_subspan_em(f"{distractor.title} {distractor.text}", answers) == 0.0
        titles = [document.title for document in example(i).documents(0)]
        assert len(set(titles)) == 10
        if "person" in {kind.name for kind in fiction.KINDS if fact in kind.facts}:
            assert len({title.split()[-1] for title in titles}) == 10  # no family name twice


def test_an_article_makes_four_different_remarks_that_name_nobody_and_nothing_that_can_be_asked_for():
    orders = set()
    for i in EXAMPLES:
        for document in example(i).documents(0):
            stated = [pattern for fact in values_of(document) for pattern in patterns(fact)]
            sentences = re.split(r"(?<=\.) ", document.text)[1:]
            remarks = [sentence for sentence in sentences if not any(p.search(sentence) for p in stated)]
            assert len(set(remarks)) == fiction.REMARKS == 4
            subject = re.escape(document.title.split()[-1])
            assert all(re.fullmatch(f".*{subject} [a-z ,]+[.]", remark) for remark in remarks)
            orders.add(tuple(sentence in remarks for sentence in sentences))
    assert len(orders) == 35  # of seven sentences, any four


def test_larger_sets_only_add_distractors_and_another_seed_shares_no_question():
    for i in EXAMPLES[::15]:
        assert fiction.generate(i, 30).distractors[:19] == fiction.generate(i, 20).distractors
        assert fiction.generate(i, 20).distractors[:9] == example(i).distractors
    ours = {example(i).question for i in EXAMPLES}
    assert ours.isdisjoint(fiction.generate(i, 1, seed=3).question for i in range(1000))


def test_the_examples_are_those_of_version_2_in_every_process():
    """A change here is a change of the benchmark: give the tasks another version, and baselines another set."""
    examples = [fiction.generate(i, 10) for i in range(100)]
    shelves = [fiction.shelf(5, rng.stream("reference", 0, step), remarks=0)[1] for step in range(20)]
    for texts, digest in (
        ((example.prompt(50) + "".join(example.answers) for example in examples),
         "1eeb81c93318507086f6451035795ae744c41b8596779667362887ae37a656c0"),
        ((f"{article.document()}" for shelf in shelves for article in shelf),  # as training begins
         "324a3dd552134527977d6b84efa3e35d27b9b610902024d1de82223c71718a5a"),
    ):  # fmt: skip
        assert hashlib.sha256("".join(texts).encode()).hexdigest() == digest


def test_the_vocabulary_spells_every_prompt_and_answer():
    pieces = "|".join(re.escape(piece) for piece in sorted(fiction.vocabulary(), key=len, reverse=True))
    for i in range(40):
        e = fiction.generate(i, 10)
        text = e.prompt(50) + f" {e.answers[0]}\n"
        assert re.fullmatch(f"(?:{pieces})+", text), text
