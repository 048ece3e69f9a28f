"""Once a search stops decoding an answer, nothing that the model might have written changes its score."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpes_eval.data import kv

QUESTION = kv.generate(17, 3)
RECORDS, GOLD = QUESTION.at(50)
KEY, VALUE = RECORDS[GOLD]
WORDS = [
    KEY,
    VALUE,
    VALUE.upper(),
    RECORDS[0][0],
    RECORDS[2][1],
    VALUE[:9],
    KEY[:13],
    '"',
    ":",
    " ",
    ",\n",
    "the",
    "a1",
]
NAMES = ["Vitamin", "T", "t", "he", " ", "-", "a", "an", "\n", "Dr. No", "no", "o", "'s", ",", "é"]
DOC = {"question_id": 3, "question": "Who?", "answers": ["vitamin T", "Dr No"], "gold": {"title": "x", "text": "y"}}


@cache
def asked(task_manager, name, **size):
    """The task, an example of it and whether ``score`` is among its metrics."""
    return task_manager(**size).load([name])["tasks"][name]


def pieces(words):
    """Texts made of these pieces."""
    return st.lists(st.sampled_from(words), max_size=7).map("".join)


@pytest.mark.parametrize("metric", ["acc", "first_value_acc"])
def test_key_value_retrieval(task_manager, metric):
    task = asked(task_manager, "kv_retrieval", num_keys=3)
    doc = {"question_id": 17, "records": QUESTION.records}
    seen = set()

    @settings(max_examples=1500, deadline=None, derandomize=True)
    @given(pieces(WORDS), pieces(WORDS))
    def check(answer, rest):
        if not task.settled(metric, doc, 50, answer):
            return
        score = {
            "acc": lambda text: kv.accuracy(text, VALUE),
            "first_value_acc": lambda t: task.strict_score(doc, 50, t),
        }
        seen.add(score[metric](answer))
        assert score[metric](answer + rest) == score[metric](answer)

    check()
    assert seen == ({1.0} if metric == "acc" else {0.0, 1.0})
    assert not task.settled("unended", doc, 50, f'"{VALUE}",')


def test_articles(task_manager):
    task = asked(task_manager, "mdqa_pos", num_documents=2)
    doc, seen = {**task.eval_docs[0], "answers": DOC["answers"]}, set()

    @settings(max_examples=1500, deadline=None, derandomize=True)
    @given(pieces(NAMES), pieces(NAMES))
    def check(answer, rest):
        if task.settled("best_subspan_em", doc, 50, answer):
            score = task.metric(answer, doc["answers"])
            seen.add(score)
            assert task.metric(answer + rest, doc["answers"]) == score

    check()
    assert seen == {0.0, 1.0}
    assert not task.settled("best_subspan_em", doc, 50, "Vitamin T")  # Vitamin The ... has no T
