"""The generated question set: answers can be read and only read, and every machine draws the same."""

import hashlib
from functools import partial

from lpes_eval.data import fiction
from lpes_eval.data.documents import best_subspan_em

example = partial(fiction.generate, num_documents=10)
EXAMPLES = range(0, fiction.POOL, 18)


def test_there_are_as_many_examples_as_the_benchmark_has():
    assert fiction.POOL >= 2655
    assert len({fiction.generate(i, 1).question for i in range(fiction.POOL)}) == fiction.POOL


def test_the_gold_article_alone_states_the_answer_and_no_two_have_one_title():
    for i in EXAMPLES:
        gold, *others = example(i).documents(0)
        assert gold.title in example(i).question
        stated = [best_subspan_em(f"{one.title} {one.text}", example(i).answers) for one in (gold, *others)]
        assert stated == [1.0] + [0.0] * 9
        assert len({one.title for one in (gold, *others)}) == 10


def test_larger_sets_only_add_distractors_and_another_seed_shares_no_question():
    for i in EXAMPLES[::15]:
        assert fiction.generate(i, 30).distractors[:19] == fiction.generate(i, 20).distractors
        assert fiction.generate(i, 20).distractors[:9] == example(i).distractors
    ours = {example(i).question for i in EXAMPLES}
    assert ours.isdisjoint(fiction.generate(i, 1, seed=3).question for i in range(1000))


def test_the_examples_are_those_of_version_2_in_every_process():
    """A change here is a change of the benchmark: give the tasks another version, and baselines another set."""
    examples = [fiction.generate(i, 10) for i in range(100)]
    texts = [example.prompt(50) + "".join(example.answers) for example in examples]
    digest = "1eeb81c93318507086f6451035795ae744c41b8596779667362887ae37a656c0"
    assert hashlib.sha256("".join(texts).encode()).hexdigest() == digest
