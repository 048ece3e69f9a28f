"""The samples that flipped between two runs: which they are, and what is shown of them."""

import json

import pytest

from lpes_eval.compare import flips, results
from lpes_eval.data import kv
from lpes_eval.data.documents import Document, Example
from runs import write_run

KV = kv.generate(7, 5)
DISTRACTORS = tuple(Document(f"title {n}", f"text {n}") for n in range(3))
MDQA = Example(7, "who?", ("he", "him"), Document("gold", "he did"), DISTRACTORS)


def log(path, requests, answers, **fields):
    """Give the only sample of a run these requests (prompt and, of a choice, ending), answers and other fields."""
    [samples] = path.parent.glob("samples_*")
    fields["arguments"] = {
        f"gen_args_{i}": {f"arg_{j}": x for j, x in enumerate(one)} for i, one in enumerate(requests)
    }
    samples.write_text(json.dumps(json.loads(samples.read_text()) | fields | {"filtered_resps": answers}))


def flipped(*paths, metric="acc"):
    return flips.flipped(*map(results.read, paths), "toy", metric)


@pytest.mark.parametrize(("example", "question"), [(KV, 'Key: "{}" Corresponding value:'), (MDQA, "who?")])
def test_question_and_expected_answer_are_those_of_the_position_also_in_a_chat_template(tmp_path, example, question):
    paths = [write_run(tmp_path / n, {p: [value] for p in (0, 100)}) for n, value in (("a", 0.0), ("b", 1.0))]
    doc = json.loads(json.dumps(example, default=vars))
    for path in paths:
        prompts = [(f"<|user|>{example.prompt(p)}<|end|>",) for p in (0, 100)]
        log(path, prompts, [f"to {path.parent.name} at {p}" for p in (0, 100)], doc=doc, target="another")
    for flip, position in zip(flipped(*paths), (0, 100), strict=True):
        key = example.at(position)[0][example.at(position)[1]][0] if example is KV else ""
        assert question.format(key) in flip[2]
        target = example.target(position)
        assert flip[3] == (target if isinstance(target, str) else " | ".join(target))
        assert flip[4:] == tuple(f"to {name} at {position}" for name in "ab")
    for path in paths:
        log(path, [("one for all",)], ["scored at both"], doc={"records": 5})
    assert [flip[2:] for flip in flipped(*paths)] == [("one for all", "another", *["scored at both"] * 2)] * 2


CHOICES, LONG, SEVERAL = [("Q", "cat"), ("Q", "dog")], [("Q", " a"), ("Q", " long one")], [("first",), ("second",)]
WINDOW = ["-9.5", "False"]


def likelihoods(*values):
    return [[str(value), "False"] for value in values]


@pytest.mark.parametrize(
    ("metric", "requests", "answers", "target", "question", "shown", "expected"),
    [
        ("acc", CHOICES, [likelihoods(-1, -2), likelihoods(-2, -1)], "1", "Q", ["cat", "dog"], "dog"),
        ("acc", CHOICES, [likelihoods(-1, -2), likelihoods(-2, -1)], "7", "Q", ["cat", "dog"], "7"),
        ("acc_norm", LONG, [likelihoods(-1, -6), likelihoods(-1, -9)], "0", "Q", ["long one", "a"], "a"),
        ("acc", SEVERAL, [["yes", "no"], ["yes", "yes"]], "1", "first second", ["yes | no", "yes | yes"], "1"),
        ("nll", SEVERAL, [[WINDOW] * 2] * 2, "1", "first second", [f"{WINDOW} | {WINDOW}"] * 2, "1"),
        ("acc", [(["[chat]"],)], [["no"], ["yes"]], "yes", "[chat]", ["no", "yes"], "yes"),
    ],
    ids=["multiple choice", "no number of a choice", "by length", "sci_fi of L-Eval", "lpes_ppl", "an API of chats"],
)
def test_a_sample_is_shown_with_all_its_prompts_and_answers(
    tmp_path, metric, requests, answers, target, question, shown, expected
):
    paths = [write_run(tmp_path / n, {None: [s]}, metric=metric) for n, s in (("a", 0.0), ("b", 1.0))]
    for path, given in zip(paths, answers, strict=True):
        log(path, requests, given, target=target)
    [flip] = flipped(*paths, metric=metric)
    assert flip[2:] == (question, expected, *shown)


def test_the_table_has_the_worse_ones_first_and_twenty_at_most(tmp_path):
    before, after = {0: [0.0] * 25 + [1.0] * 3, 50: [0.5] * 28}, {0: [1.0] * 25 + [0.0] * 3, 50: [0.5] * 28}
    found = flipped(*(write_run(tmp_path / n, scores) for n, scores in (("a", before), ("b", after))))
    table = flips.table(found, "toy", "acc")
    assert table.title == "toy, acc: 25 flipped to better, 3 to worse, the first 20 of them"
    worse = [("worse", "0 %", f"question {n}", "yes", "yes", "yes") for n in (25, 26, 27)]
    assert table.rows[:3] == worse
    assert [row[0] for row in table.rows] == ["worse"] * 3 + ["better"] * 17
    [long] = flips.table([(*found[0][:2], "q" * 99, "yes", "a" * 99, "b")], "toy", "acc").rows
    assert long[2:] == ("q" * 60, "yes", "a" * 60 + "…", "b")
