"""Key-value retrieval: the benchmark's prompt to the byte, positions that differ in nothing else, disjoint splits."""

import gzip
import hashlib
import json
import re

import lm_eval
import pytest
from lm_eval.api.model import LM

from lpes_eval.data import kv, splits
from lpes_eval.data.kv import accuracy
from lpes_eval.errors import DataError
from lpes_eval.harness.segments import join


def prompt_by_protocol(records, key):
    """Figure 6 put together piece by piece, as the benchmark's description says it."""
    text = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
    for i, (k, v) in enumerate(records):
        text += ("{" if i == 0 else " ") + '"' + k + '": "' + v + '"'
        text += "}" if i == len(records) - 1 else ",\n"
    return text + '\n\nKey: "' + key + '"\nCorresponding value:'


@pytest.mark.parametrize("num_keys", [2, 50, 300])
@pytest.mark.parametrize("position", [0, 20, 40, 60, 80, 100])
def test_the_prompt_equals_the_protocols_to_the_byte(num_keys, position):
    question = kv.generate(17, num_keys)
    index = int(position * (num_keys - 1) // 100)
    key, value = question.records[index]
    segments = question.segments(position)
    assert join(segments) == question.prompt(position) == prompt_by_protocol(question.records, key)
    assert question.target(position) == value
    assert [segment.label for segment in segments][:: num_keys + 1] == ["instruction", "question"]
    [gold] = [segment for segment in segments if segment.label == "gold"]
    assert value in gold.text
    assert segments.index(gold) == 1 + index


def test_generated_examples_are_the_same_on_every_machine():
    """The digest was taken once; a change of it is a change of the task, and of its version."""
    text = "".join(kv.generate(i, 50).prompt(40) for i in range(10))
    digest = "f9d5c26df7ac9c9ce2480b9db4e0840027146f4fb83d1866d3f2438604c5db09"
    assert hashlib.sha256(text.encode()).hexdigest() == digest


@pytest.mark.parametrize(
    ("total", "held_out", "search"),
    [(kv.POOL, 500, 200), (500, 300, 200), (100, 60, 40), (7, 4, 3), (2, 1, 1), (833, 499, 200), (834, 500, 200)],
)
def test_no_example_is_in_both_splits_whatever_the_search_seed(total, held_out, search):
    drawn = [{name: splits.indices(total, name, seed) for name in splits.SPLITS} for seed in range(5)]
    assert len({s["held_out"] for s in drawn}) == 1
    assert len(set(drawn[0]["held_out"])) == held_out
    for s in drawn:
        assert len(set(s["search"])) == len(s["search"]) == search
        assert not set(s["search"]) & set(s["held_out"])
        assert {*s["search"], *s["held_out"]} <= set(range(total)) == set(s["all"])
    if total > 700:
        assert len({s["search"] for s in drawn}) == 5
    with pytest.raises(DataError, match="held_out, search"):
        splits.indices(total, "test")


def test_it_is_generated_for_every_model_and_the_source_tells_sets_apart():
    sources = [kv.load(num_keys=size, pretrained="org/model")[1] for size in (3, 4)]
    assert [source.version(3) for source in sources] == ["3 generated: 3 pairs", "3 generated: 4 pairs"]
    assert len({source.sha256 for source in sources}) == 2


def test_examples_before_a_question_are_the_same_at_each_of_its_positions(task_manager):
    task = task_manager(num_keys=6).load(["kv_retrieval"])["tasks"]["kv_retrieval"]
    prompts = task.fewshot_context(task.eval_docs[0], 2)
    assert len(set(prompts)) == len(task.positions)
    [objects] = {tuple(re.findall(r"\{.*?\}", prompt, re.DOTALL)) for prompt in prompts}
    assert len(set(objects)) == 3


def test_in_an_official_file_the_gold_record_moves_and_the_others_keep_their_order(tmp_path, write):
    line = {"ordered_kv_records": [["a", "1"], ["b", "2"], ["c", "3"]], "key": "b", "value": "2"}
    (question,) = kv.read(write(tmp_path / "f.jsonl.gz", line), 3)
    orders = {p: [k for k, _ in question.at(p)[0]] for p in (0, 50, 100)}
    assert orders == {0: ["b", "a", "c"], 50: ["a", "b", "c"], 100: ["a", "c", "b"]}
    assert {question.target(p) for p in (0, 50, 100)} == {"2"}


def test_the_official_sample_of_75_pairs_is_read_whole_and_asked_from_its_folder(shared, task_manager):
    path = shared("kv-retrieval-75_keys.jsonl.gz")
    questions = kv.read(path, 75)
    assert len(questions) == 500
    with gzip.open(path, "rt") as file:
        first = json.loads(file.readline())
    records = [r for r in first["ordered_kv_records"] if r[0] != first["key"]]
    records.insert(44, [first["key"], first["value"]])
    assert questions[0].prompt(60) == prompt_by_protocol(records, first["key"])

    (task,) = task_manager(data_dir=str(path.parent), positions=[40]).load(["kv_retrieval_75"])["tasks"].values()
    task.build_all_requests(limit=1)
    assert [request.args[0] for request in task.instances] == [questions[task.eval_docs[0]["question_id"]].prompt(40)]
    source = task.dump_config()["metadata"]["source"]
    assert (source["total"], source["examples"], len(source["sha256"])) == (500, 300, 64)


def test_an_answer_is_right_where_it_contains_the_value_in_any_case():
    right = (' "2A8D-x"', "the value is 2a8d-X, I think", "\n2a8d-x")
    assert [accuracy(answer, "2a8d-x") for answer in (*right, "2a8d", "", "2a8d -x")] == [1, 1, 1, 0, 0, 0]


RECORDS = kv.generate(3, 4).records
(A, VALUE_A), (B, VALUE_B), *_ = RECORDS


@pytest.mark.parametrize(
    ("answer", "asked", "right"),
    [
        (f' "{VALUE_A}"\n\nThe JSON data is:\n{{"{A}": "{VALUE_A}",\n "{B}": "{VALUE_B}"', 0, True),
        (f" {VALUE_B.upper()}", 1, True),
        (f'The value corresponding to the key "{B}" is "{VALUE_B}".', 1, True),
        (f'{{\n    "{A}": "{VALUE_A}"\n}}\n\nThe value corresponding to the key "{A[:7]}', 0, True),
        (f'The JSON data contains:\n{{"{A}": "{VALUE_A}",\n "{B}": "{VALUE_B}"', 0, False),  # it copies its context
        (f'The JSON data contains:\n{{"{A}": "{VALUE_A}",\n "{B[:3]}', 0, False),  # and was cut
        (f'{{"{A}": "{VALUE_B}"}}', 1, False),  # another key's
        (f' "{VALUE_A[:-9]}"; no, "{VALUE_A}"', 0, False),  # one gone wrong comes first
        ("I do not know", 0, False),
    ],
)
def test_the_first_value_of_an_answer_counts_and_no_copy_of_the_context(answer, asked, right):
    assert kv.first_value_accuracy(answer, RECORDS, *RECORDS[asked]) == float(right)


def test_values_that_are_no_uuids_are_told_by_the_records():
    records = [("alpha", "17"), ("beta", "23")]
    answers = ("beta is 23", "alpha is 17, beta is 23")
    assert [kv.first_value_accuracy(answer, records, *records[1]) for answer in answers] == [1, 0]


class Echo(LM):
    """Says its context again, whatever it is asked, up to so many tokens of one character."""

    max_length, backend = 100_000, "causal"
    tokenizer = staticmethod(lambda text: {"input_ids": list(text)})
    tok_encode = staticmethod(list)

    def generate_until(self, requests, **kwargs):
        return [one.args[0].split("JSON data:\n")[1][: one.args[1]["max_gen_toks"]] for one in requests]

    loglikelihood = loglikelihood_rolling = generate_until


def test_a_model_that_echoes_its_context_has_no_primacy_by_its_first_values(task_manager, caplog):
    manager = task_manager(num_keys=8, positions=[0, 50, 100])
    results = lm_eval.simple_evaluate(Echo(), tasks=["kv_retrieval"], limit=3, task_manager=manager, bootstrap_iters=0)
    scores = results["results"]["kv_retrieval"]
    row = {name: [scores[f"{name}@{p},none"] for p in (0, 50, 100)] for name in ("acc", "first_value_acc", "unended")}
    assert row == {"acc": [1, 0, 0], "first_value_acc": [0, 0, 0], "unended": [1, 1, 1]}
    assert scores["first_value_acc,none"] == 0
    assert "acc@0 is 1.000, but first_value_acc@0 is 0.000" in caplog.text
    assert "acc@50 is" not in caplog.text
    (sample, *_) = results["samples"]["kv_retrieval"]
    records = sample["doc"]["records"]
    assert sample["target"] == [records[i][1] for i in (0, 3, 7)]  # of each position
