"""ZeroSCROLLS' metrics against the authors' published figures and the formulas of the paper."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpes_eval.data import zeroscrolls

PREDICTIONS = ["exact match example", "hello there", "general kenobi"]
REFERENCES = [["exact match example"], ["hello", "hi there"], ["commander kenobi"]]
"""The example in the documentation of the benchmark's metric."""


def test_published_scores_and_none_needs_the_network(monkeypatch):
    monkeypatch.setattr("socket.socket.connect", None)
    monkeypatch.setattr("socket.getaddrinfo", None)
    pairs = list(zip(PREDICTIONS, REFERENCES, strict=True))
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
        ("Łódź", "Lodz", 1.0),
        ("cafe\u0301", "café", 1.0),  # composed or not
        ("the", "a", 0.0),  # two answers that normalise to nothing do not match
        ("", "", 0.0),
        ("“yes”", "yes", 0.0),  # typographic quotes are not among the punctuation that goes
        ("\nyes", "yes", 1.0),
        ("yes yes", "yes", 2 / 3),  # a word counts as often as it is there
        ("The U.S. agency's report", "us agencys", 0.8),  # 2 words of 3 and of 2
        ("½ a mile", "1/2 mile", 0.5),  # the fraction is written out after punctuation has gone
        ("日本", "日本", 1.0),
    ):
        assert zeroscrolls.f1(prediction, [reference]) == pytest.approx(score), prediction


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=[chr(c) for c in range(0x20, 0x180) if chr(c).isalnum() or chr(c) in " .,'-–“”’"], max_size=20))
def test_transliteration_equals_unidecode(text):
    unidecode = pytest.importorskip("unidecode", reason="the package of the benchmark's own metric").unidecode
    rare = "ŀŉ"
    text = "".join(c for c in text.lower() if c not in rare)
    assert zeroscrolls.transliterate(text) == unidecode(text)


def test_exponential_similarity_is_of_the_first_percentage():
    for prediction, score in (
        ("20.5%", 0.5**1.95),
        ("Of 50 reviews, 20 are positive, so 40% of them; 60% are negative.", 1.0),
        ("60%, that is 40%", 0.25),
        ("40", 0.0),  # no percent sign
        ("40 %", 0.0),
        ("forty percent", 0.0),
        (".5%", 0.5**3.5),  # read as 5%
        ("-40%", 1.0),  # the sign is not seen
        ("140%", 0.5**10),
        ("\n\n40.%", 1.0),
    ):
        assert zeroscrolls.exp_similarity(prediction, ["40%"]) == pytest.approx(score), prediction


@given(st.floats(0, 100), st.integers(0, 100))
def test_exponential_similarity_is_the_formula_of_the_paper(p, gold):
    predicted = float(f"{p:.2f}")
    expected = math.pow(2, -10 * abs(gold - predicted) / 100)  # d = 2, c = 10, percentages as fractions
    assert zeroscrolls.exp_similarity(f"It is {p:.2f}%.", [f"{gold}%"]) == pytest.approx(expected)
