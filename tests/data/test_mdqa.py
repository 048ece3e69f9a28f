"""Multi-document QA: prompts to the byte, documents that move and nothing else, files in the benchmark's form."""

import csv
import gzip
import json
from itertools import groupby
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpes_eval.data import fiction, kv, mdqa, splits
from lpes_eval.data.documents import best_subspan_em
from lpes_eval.errors import DataError
from lpes_eval.harness.segments import join
from lpes_eval.harness.task import gold_index

NAME = "nq-open-10_total_documents_gold_at_0.jsonl.gz"
POSITIONS = (0, 25, 50, 75, 100)


def line(number: int, num_documents: int = 10, gold_at: int = 0) -> dict:
    contexts = [
        {"id": str(i), "title": f"Title {number}.{i}", "text": f"Text {i} of\n{number}.", "isgold": False}
        for i in range(1, num_documents)
    ]
    gold = {"title": f"Gold {{{number}}}", "text": f"Röntgen, number {number}.", "isgold": True, "hasanswer": True}
    contexts.insert(gold_at, gold)
    return {"question": f"who is {number}", "answers": ["Röntgen", f"n° {number}"], "ctxs": contexts}


def test_prompts_are_the_benchmarks_to_the_byte_and_the_gold_document_alone_moves():
    documents = [mdqa.Document(f"T{i}", f"text {i}.") for i in range(3)]
    example = mdqa.Example(7, "who wrote {it}", ("x",), documents[0], tuple(documents[1:]))
    for position, order in ((0, (0, 1, 2)), (50, (1, 0, 2)), (100, (1, 2, 0))):
        lines = [f"Document [{k}](Title: T{i}) text {i}." for k, i in enumerate(order, 1)]
        expected = (
            "Write a high-quality answer for the given question using only the provided search results (some of which "
            "might be irrelevant).\n\n" + "\n".join(lines) + "\n\nQuestion: who wrote {it}\nAnswer:"
        )
        segments = example.segments(position)
        assert join(segments) == example.prompt(position) == expected
        labels = [segment.label for segment in segments]
        assert (labels[0], labels.index("gold"), labels[-1]) == ("instruction", 1 + order.index(0), "question")


@pytest.mark.parametrize(
    ("num_documents", "indices"), [(10, [0, 2, 4, 6, 9]), (20, [0, 4, 9, 14, 19]), (30, [0, 7, 14, 21, 29])]
)
def test_positions_are_those_of_the_benchmark(num_documents, indices):
    example = fiction.generate(0, num_documents)
    for position, index in zip(POSITIONS, indices, strict=True):
        documents = example.documents(position)
        assert documents.pop(index) == example.gold
        assert documents == list(example.distractors)
    with pytest.raises(DataError, match="101"):
        example.documents(101)
    assert all(gold_index(100 * i / (n - 1), n) == i for n in range(2, 99) for i in range(n))
    assert gold_index(18.4, 376) == 69  # 18.4 * 375 is 6900, and in binary a little less


@pytest.mark.parametrize("gold_at", [0, 4, 9])
def test_official_file_gives_its_documents_in_their_order_wherever_the_gold_one_stands(tmp_path, gold_at, write):
    examples = mdqa.read(write(tmp_path / NAME, *(line(n, gold_at=gold_at) for n in range(3))), 10)
    assert [e.question_id for e in examples] == [0, 1, 2]
    for number, example in enumerate(examples):
        raw = line(number, gold_at=0)["ctxs"]
        assert example.question == f"who is {number}"
        assert example.answers == ("Röntgen", f"n° {number}")
        assert [(d.title, d.text) for d in example.documents(0)] == [(c["title"], c["text"]) for c in raw]
        assert f"Document [10](Title: Gold {{{number}}}) Röntgen, number {number}.\n\nQuestion" in example.prompt(100)


@pytest.mark.parametrize(("lines", "message"), [([line(0)], "1 example in it"), ([], "no examples in it")])
def test_a_file_that_cannot_be_divided_is_refused(tmp_path, write, lines, message):
    write(tmp_path / NAME, *lines)
    with pytest.raises(DataError, match=message):
        mdqa.load(num_documents=10, data_dir=str(tmp_path))


def test_synthwiki_gets_distractors_about_others_and_its_splits_share_no_passage(tmp_path):
    path, drawn = tmp_path / "madlibs.csv.gz", {}
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["context", "question", "answer"])
        for n in range(20):
            context = f'Person {n} is a "painter",\nborn in Town-{n:02} with Friend-{n:02}.'
            table.writerow([context, f"Where was Person {n} born?", f"Town-{n:02}"])
            table.writerow([context, f"Who is Person {n}'s friend?", f'"Friend-{n:02}"'])
    for split, questions in (("held_out", 24), ("search", 16), ("all", 40)):
        rows, source = mdqa.load(num_documents=5, source="synthwiki", text_file=str(path), split=split)
        assert (source.version(3), len(rows), source.total) == ("3 synthwiki: madlibs+drawn", questions, 40)
        examples = [mdqa.Example.of(**row) for row in rows]
        drawn[split] = {document.text for example in examples for document in example.documents(0)}
        for example in examples:
            texts = [document.text for document in example.documents(50)]
            assert len(set(texts)) == 5
            (answer,) = example.answers
            assert [best_subspan_em(text.replace("\n", " "), [answer]) for text in texts] == [0, 0, 1, 0, 0]
    assert not drawn["held_out"] & drawn["search"]
    assert len(drawn["all"]) == 20
    assert {row["question"].split()[0] for row in rows[:20]} == {"Where"}  # of all passages, then the second questions
    prompt = mdqa.Example.of(**rows[0]).prompt(0)
    assert "\n\nDocument [1] Person " in prompt
    with pytest.raises(DataError, match=r"11 distractors .* can be drawn among 24 documents, expected 24"):
        mdqa.load(num_documents=25, source="synthwiki", text_file=str(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.csv", "context,question\nx,y\n", "cannot be read as SynthWiki's .*answer"),
        ("no.csv", "context,question,answer\nx,y\n", "row 1 has no context, question, answer"),
        ("no.csv.gz", "context,question,answer\n", "cannot be read as SynthWiki's"),
        ("nowhere.csv", "", "nowhere.csv: cannot be read"),
        (None, "", r"names no file; add text_file=FILE\.csv"),
    ],
)
def test_a_file_that_is_not_synthwikis_is_refused(tmp_path, name, content, message):
    if content:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        mdqa.load(source="synthwiki", text_file=name and str(tmp_path / name))
    with pytest.raises(DataError, match="kv_retrieval has no synthwiki set"):
        kv.load(source="synthwiki")


def reference_normalize(text: str) -> str:
    """SQuAD's four steps, character by character."""
    kept = "".join(c for c in text.lower() if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    runs = ["".join(run) for _, run in groupby(kept, lambda c: category(c)[0] in "LM" or category(c) in "Nd Nl Pc")]
    return " ".join("".join(" " if run in ("a", "an", "the") else run for run in runs).split())


@given(st.text(alphabet=st.sampled_from([*"aAtThHeEnN .,'-_*()\n\t19Éßİ\u0301\u00a0\u2019\u4e2dσΣ"]), max_size=20))
def test_normalisation_equals_a_second_implementation(text):
    assert mdqa.normalize(text) == reference_normalize(text)


def test_worked_cases():
    for prediction, answers, score in (
        ("It was WILHELM CONRAD RÖNTGEN, in 1901.", ["Wilhelm Conrad Röntgen"], 1.0),
        ("Rontgen", ["Röntgen"], 0.0),  # accents count
        ("Ro\u0308ntgen", ["R\u00f6ntgen"], 0.0),  # and are not composed
        ("March 14 1712", ["14 March 1712", "March 14, 1712"], 1.0),
        ("the answer is the beatles", ["Beatles"], 1.0),
        ("big\xa0 cat", ["The big,\t an a cat"], 1.0),  # all articles go, and all white space is a space
        ("pris", ["Paris"], 0.0),  # an article is a word
        ("don't, co-op", ["dont coop"], 1.0),
        ("don\u2019t", ["dont"], 0.0),  # ASCII's punctuation alone goes
        ("theatre", ["the"], 1.0),  # an article alone normalises to nothing and is in everything
        ("", ["*"], 1.0),  # so is punctuation alone
        ("\nParis", ["Paris"], 0.0),  # newline first: nothing is left to score
        ("parish", ["Paris"], 1.0),  # contained is enough
        ("1 41 200", ["41,200"], 0.0),
        ("\u0301 b", ["a\u0301 b"], 0.0),  # an accent is part of the word before it: this is no article
        ("Paris", [], 0.0),
    ):
        assert mdqa.best_subspan_em(prediction, answers) == score, prediction


@pytest.mark.parametrize("place", ["", "10_total_documents", "qa_data"])
def test_a_folder_may_be_laid_out_as_the_repository_and_hold_either_form(tmp_path, write, place):
    for first, ending in ((0, ".gz"), (100, "")):
        path = tmp_path / place / (NAME.removesuffix(".gz") + ending)
        write(path, *(line(first + n) for n in range(50)))
        rows, source = mdqa.load(num_documents=10, data_dir=str(tmp_path))
        path.unlink()
        held_out = splits.indices(50, "held_out")
        assert [row["question"] for row in rows] == [f"who is {first + i}" for i in held_out]
        assert source.version(3) == "3 folder: nq-open-10_total_documents_gold_at_0"
        assert (source.location, source.total, source.examples) == (str(path), 50, 30)


@pytest.fixture(scope="module")
def task(task_manager):
    return task_manager().load(["mdqa_pos"])["tasks"]["mdqa_pos"]


@pytest.mark.parametrize(("name", "documents"), [("mdqa_pos", 10), ("mdqa_pos_20", 20)])
def test_a_question_is_an_example_and_its_positions_are_its_requests(task_manager, name, documents):
    task = task_manager(positions=[100, 0, 50]).load([name])["tasks"][name]
    task.build_all_requests(limit=2)
    asked = [(instance.doc_id, instance.idx, instance.args[0]) for instance in task.instances]
    assert asked == [
        (number, k, fiction.generate(doc["question_id"], documents).prompt(p))
        for number, doc in enumerate(list(task.eval_docs)[:2])
        for k, p in enumerate((0, 50, 100))
    ]


def test_results_are_the_score_at_each_position_their_mean_and_what_worst_and_spread_are_made_of(task):
    doc = {**task.eval_docs[0], "answers": ["14 March 1712", "March 14, 1712"]}
    right, wrong = " It was March 14 1712.", "1712\nMarch 14, 1712"
    metrics = task.process_results(doc, [right, wrong, wrong, right, right])
    other = task.process_results(doc, [right, right, wrong, wrong, wrong])
    assert [metrics[f"best_subspan_em@{p}"] for p in POSITIONS] == [1, 0, 0, 1, 1]
    assert metrics["best_subspan_em"] == pytest.approx(0.6)
    aggregate = task.aggregation()
    unended = {"unended", *(f"unended@{p}" for p in POSITIONS)}  # not known without a model
    assert set(aggregate) == {*metrics, *unended}
    rows = [metrics["best_subspan_em_worst"], other["best_subspan_em_worst"]]  # means 1, 0.5, 0, 0.5, 0.5
    assert [aggregate[f"best_subspan_em_{name}"](rows) for name in ("worst", "spread")] == [0.0, 1.0]
    assert aggregate["best_subspan_em_worst_stderr"](rows) >= 0
    lower = {name for name, up in task.higher_is_better().items() if not up}
    assert lower == {"best_subspan_em_spread", "best_subspan_em_spread_stderr", *unended}


def test_the_task_is_greedy_up_to_a_newline_and_names_its_source(task):
    assert task.config.generation_kwargs == {"until": ["\n"], "do_sample": False, "max_gen_toks": 100}
    source = json.loads(json.dumps(task.dump_config()["metadata"]))["source"]
    assert task.VERSION == "3 generated"
    assert (source["kind"], source["split"], source["split_seed"]) == ("generated", "held_out", str(splits.SPLIT_SEED))
    assert (len(source["sha256"]), source["total"], source["examples"]) == (64, fiction.POOL, 500)
