"""ZeroSCROLLS: files, prompts and cutting, metrics, and the tasks."""

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unidecode import unidecode

from lpes_eval.data import zeroscrolls
from lpes_eval.data.source import Asked
from lpes_eval.errors import DataError
from lpes_eval.harness import budget

SEPARATOR = "... [The rest of the article is omitted]\n\n"

QASPER = (  # the published prompt (arXiv 2305.14196, Table 6)
    "You are given a scientific article and a question. Answer the question as concisely as you can, using a single "
    "phrase or sentence if possible. If the question cannot be answered based on the information in the article, write "
    '"unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable".'
    "\n\nArticle:\n{document}\n\nQuestion:\nWho is it?{header}"
)
GOV_REPORT = (
    "You are given a report by a government agency. Write a one-page summary of the report."
    "\n\nReport:\n{document}{header}"
)


def row(name: str, number: int, document: str, output: str | None) -> dict:
    template, header = (GOV_REPORT, "\n\nSummary:\n") if name == "gov_report" else (QASPER, "\n\nAnswer:\n")
    text = template.format(document=document, header=header)
    start = text.index(":\n") + 2
    asked = text.index("Question:\n") if name != "gov_report" else start + len(document)
    return {
        "id": f"{name}_{number}",
        "input": text,
        "output": output,
        "document_start_index": start,
        "document_end_index": start + len(document),
        "query_start_index": asked,
        "query_end_index": len(text) - len(header),
        "truncation_seperator": SEPARATOR,
    }


def archive(folder: Path, name: str, validation: list[dict], test: list[dict]) -> Path:
    """``NAME.zip`` as the Hub has it."""
    path = folder / f"{name}.zip"
    with zipfile.ZipFile(path, "w") as file:
        for split, lines in (("validation", validation), ("test", test)):
            file.writestr(f"{name}/{split}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return path


def examples(name: str, output: str | None) -> list[dict]:
    return [row(name, n, f"Document {n}. " + "the story goes on " * (4 if n else 200), output) for n in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("zero_scrolls")
    for name in zeroscrolls.NAMES:
        output = "40%" if name == "space_digest" else "the story goes"
        archive(home, name, examples(name, output), examples(name, None))
    return home


def read(folder: Path, name: str, split: str = "held_out") -> list[zeroscrolls.Example]:
    return zeroscrolls.read(zeroscrolls.locate(Asked("folder", folder), name, split), name, split)


def test_lines_with_one_id_are_one_example_with_several_references(tmp_path):
    lines = [row("squality", n, "text", f"reference {i}") for i in range(4) for n in range(2)]
    archive(tmp_path, "squality", lines, lines)
    found = read(tmp_path, "squality")
    assert [example.id for example in found] == ["squality_0", "squality_1"]
    assert found[1].references == tuple(f"reference {i}" for i in range(4))


def test_archives_without_examples_and_other_splits_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"split='search': expected held_out or test .* no examples to search on"):
        zeroscrolls.locate(Asked("folder", tmp_path), "qasper", "search")
    archive(tmp_path, "qasper", [], [])
    with pytest.raises(DataError, match="holds no example"):
        read(tmp_path, "qasper")


def cut_by_their_tokens(tokenizer, text, query, max_tokens):
    """The benchmark's own cutting: tokens before the query, as many as leave room for separator and query."""
    suffix = SEPARATOR + text[query:]
    room = max_tokens - len(tokenizer(suffix)["input_ids"])
    kept = tokenizer(text[:query])["input_ids"][:room]
    return tokenizer.decode(kept, skip_special_tokens=True), suffix


@pytest.mark.parametrize("name", ["qasper", "gov_report"])
@pytest.mark.parametrize("window", [420, 500, 611])
def test_a_long_document_is_cut_as_the_benchmark_cuts_it(tokenizer, tmp_path, name, window):
    line = row(name, 1, "the story of the döcument goes on; " * 60, "x")
    archive(tmp_path, name, [line], [])
    limits = budget.for_model(SimpleNamespace(tokenizer=tokenizer, max_length=window), 8)
    text, fitted = line["input"], zeroscrolls.fitted(read(tmp_path, name)[0], limits, str)
    query = text.index("Question:\n") if name == "qasper" else text.index("\n\nSummary:")
    beginning, suffix = cut_by_their_tokens(tokenizer, text, query, window - 8)
    assert fitted.endswith(suffix)
    assert text.startswith(ours := fitted.removesuffix(suffix))
    assert ours.startswith(beginning.rstrip("\ufffd"))
    # Theirs spends one token on a second beginning-of-text token, in front of the separator.
    assert len(tokenizer(ours)["input_ids"]) - len(tokenizer(beginning)["input_ids"]) <= 1
    assert len(tokenizer(fitted)["input_ids"]) <= window - 8


def test_published_scores_and_none_needs_the_network(monkeypatch):
    monkeypatch.setattr("socket.socket.connect", None)
    monkeypatch.setattr("socket.getaddrinfo", None)
    pairs = [  # the example in the documentation of the benchmark's metric
        ("exact match example", ["exact match example"]),
        ("hello there", ["hello", "hi there"]),
        ("general kenobi", ["commander kenobi"]),
    ]
    rows = [tuple(zeroscrolls.rouge(*pair).values()) for pair in pairs]
    means = [100 * sum(column) / 3 for column in zip(*rows, strict=True)]
    assert [round(mean, 4) for mean in means] == [72.2222, 33.3333, 72.2222]
    assert round(100 * zeroscrolls.geometric_mean(rows), 4) == 55.8136  # of the averages
    assert round(100 * sum(zeroscrolls.f1(*pair) for pair in pairs) / 3, 4) == 72.2222


def test_each_score_takes_its_own_best_reference_and_words_are_not_stemmed():
    scores = zeroscrolls.rouge("a b c d", ["a b x y z w", "d c b a"])
    # of the second: all words; of the first: "a b", one of 3 and of 5 pairs; of the first: "a b", 2 of 4 and of 6 words
    assert scores == pytest.approx({"rouge1": 1.0, "rouge2": 2 / (3 + 5), "rougeL": 4 / (4 + 6)})
    assert zeroscrolls.f1("two words", ["none", "two words", "two"]) == 1.0
    assert zeroscrolls.rouge("reports", ["report"])["rouge1"] == 0


def test_f1_normalisation():
    for prediction, reference, score in (
        ("café", "Cafe", 1.0),  # accents are transliterated
        ("cafe\u0301", "café", 1.0),  # composed or not
        ("the", "a", 0.0),  # two answers that normalise to nothing do not match
        ("“yes”", "yes", 0.0),  # typographic quotes are not among the punctuation that goes
        ("yes yes", "yes", 2 / 3),  # a word counts as often as it is there
        ("The U.S. agency's report", "us agencys", 0.8),  # 2 words of 3 and of 2
        ("½ a mile", "1/2 mile", 0.5),  # the fraction is written out after punctuation has gone
    ):
        assert zeroscrolls.f1(prediction, [reference]) == pytest.approx(score), prediction


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=[chr(c) for c in range(0x20, 0x180) if chr(c).isalnum() or chr(c) in " .,'-–“”’"], max_size=20))
def test_transliteration_equals_unidecode(text):
    """The package of the benchmark's own metric."""
    rare = "ŀŉ"
    text = "".join(c for c in text.lower() if c not in rare)
    assert zeroscrolls.transliterate(text) == unidecode(text)


def test_exponential_similarity_is_of_the_first_percentage():
    for prediction, score in (
        ("20.5%", 0.5**1.95),
        ("Of 50 reviews, 20 are positive, so 40% of them; 60% are negative.", 1.0),
        ("40", 0.0),  # no percent sign
        ("40 %", 0.0),
        (".5%", 0.5**3.5),  # read as 5%
        ("-40%", 1.0),  # the sign is not seen
    ):
        assert zeroscrolls.exp_similarity(prediction, ["40%"]) == pytest.approx(score), prediction


@pytest.fixture
def run(toy, folder, evaluate):
    return lambda tasks, **metadata: evaluate(toy(700), tasks, limit=2, data_dir=str(folder), **metadata)


def test_all_seven_run_whole_and_scored(toy, run):
    results = run(["lpes_zeroscrolls"])
    assert set(results["samples"]) == {f"lpes_zeroscrolls_{name}" for name in zeroscrolls.NAMES}
    for task, samples in results["samples"].items():
        cut, whole = (sample["arguments"][0][0] for sample in samples)
        assert SEPARATOR in cut
        assert whole == examples(task.removeprefix("lpes_zeroscrolls_"), None)[1]["input"]
        assert 680 < len(toy(700).tok_encode(cut)) <= 692
        assert not any("input" in sample["doc"] for sample in samples)
    scores = {name: results["results"][f"lpes_zeroscrolls_{name}"] for name in zeroscrolls.NAMES}
    assert {"rouge1,none", "rouge2,none", "rougeL,none", "score,none"} <= set(scores["qmsum"])
    assert "f1,none" in scores["narrative_qa"]
    assert "exp_similarity,none" in scores["space_digest"]
    mean = sum(score["score,none"] for score in scores.values()) / 7
    assert results["results"]["lpes_zeroscrolls"]["score,none"] == pytest.approx(mean)


def test_the_test_split_is_answered_without_references(run):
    samples = run(["lpes_zeroscrolls_qasper"], split="test")["samples"]["lpes_zeroscrolls_qasper"]
    asked = [(sample["doc"]["id"], sample["doc"]["references"]) for sample in samples]
    assert asked == [("qasper_0", []), ("qasper_1", [])]
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples)
