"""Once a search stops decoding an answer, nothing that the model might have written changes its score."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpes_eval.data import kv

QUESTION = kv.generate(17, 3)
RECORDS, GOLD = QUESTION.at(50)
KEY, VALUE = RECORDS[GOLD]
PARTS = [VALUE.upper(), RECORDS[0][0], RECORDS[2][1], VALUE[:9], KEY[:13]]
WORDS = [KEY, VALUE, *PARTS, '"', ":", " ", ",\n", "the", "a1"]
NAMES = ["Vitamin", "T", "t", "he", " ", "-", "a", "an", "\n", "Dr. No", "no", "o", "'s", ",", "é"]
ANSWERS = ["vitamin T", "Dr No"]


def settled_scores(task, metric, doc, score, words):
    """The scores of the answers, made of these words, that are settled: none of them changes with what follows."""
    seen, texts = set(), st.lists(st.sampled_from(words), max_size=7).map("".join)

    @settings(max_examples=1500, deadline=None, derandomize=True)
    @given(texts, texts)
    def check(answer, rest):
        if task.settled(metric, doc, 50, answer):
            seen.add(score(answer))
            assert score(answer + rest) == score(answer)

    check()
    return seen


@pytest.mark.parametrize(("metric", "scores"), [("acc", {1.0}), ("first_value_acc", {0.0, 1.0})])
def test_key_value_retrieval(task_manager, metric, scores):
    task = task_manager(num_keys=3).load(["kv_retrieval"])["tasks"]["kv_retrieval"]
    doc = {"question_id": 17, "records": QUESTION.records}
    score = {"acc": lambda text: kv.accuracy(text, VALUE)}.get(metric, lambda text: task.strict_score(doc, 50, text))
    assert settled_scores(task, metric, doc, score, WORDS) == scores
    assert not task.settled("unended", doc, 50, f'"{VALUE}",')


def test_articles(task_manager):
    task = task_manager(num_documents=2).load(["mdqa_pos"])["tasks"]["mdqa_pos"]
    doc = {**task.eval_docs[0], "answers": ANSWERS}
    assert settled_scores(task, "best_subspan_em", doc, lambda text: task.metric(text, ANSWERS), NAMES) == {0.0, 1.0}
    assert not task.settled("best_subspan_em", doc, 50, "Vitamin T")  # Vitamin The ... has no T
