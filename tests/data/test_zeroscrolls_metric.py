"""ZeroSCROLLS' metrics, against the figures its authors print and second implementations."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpes_eval.data import zeroscrolls
from lpes_eval.errors import DataError

PREDICTIONS = ["exact match example", "hello there", "general kenobi"]
REFERENCES = [["exact match example"], ["hello", "hi there"], ["commander kenobi"]]
"""The example in the documentation of the benchmark's metric, with the scores that are printed there."""

ADVERSARIAL = [
    "", " ", "\n\nsecond line", "the a an", "!?.,", "The U.S. agency's report", "naïve café", "naive cafe",
    "“quoted”", '"quoted"', "x" * 300, "one one one two", "ONE", "40%", "日本", "½ a mile", "a\u00a0b", "I'm", "I’m",
]  # fmt: skip


def test_published_rouge_scores():
    rows = [
        tuple(zeroscrolls.rouge(prediction, references).values())
        for prediction, references in zip(PREDICTIONS, REFERENCES, strict=True)
    ]
    means = [100 * sum(column) / 3 for column in zip(*rows, strict=True)]
    assert [round(mean, 4) for mean in means] == [72.2222, 33.3333, 72.2222]
    assert round(100 * zeroscrolls.geometric_mean(rows), 4) == 55.8136


def test_published_f1_score():
    scores = [zeroscrolls.f1(p, r) for p, r in zip(PREDICTIONS, REFERENCES, strict=True)]
    assert round(100 * sum(scores) / 3, 4) == 72.2222


def rouge_by_hand(prediction: str, reference: str) -> dict[str, float]:
    def words(text):
        return re.findall("[a-z0-9]+", text.lower())

    def f(hits, predicted, wanted):
        if not predicted or not wanted or not hits:
            return 0.0
        p, r = hits / predicted, hits / wanted
        return 2 * p * r / (p + r)

    x, y, out = words(prediction), words(reference), {}
    for n in (1, 2):
        xs, ys = ([tuple(w[i : i + n]) for i in range(len(w) - n + 1)] for w in (x, y))
        hits = sum(min(xs.count(gram), ys.count(gram)) for gram in set(ys))
        out[f"rouge{n}"] = f(hits, len(xs), len(ys))
    row = [0] * (len(y) + 1)
    for a in x:
        previous, row = row, [0]
        for j, b in enumerate(y):
            row.append(previous[j] + 1 if a == b else max(row[j], previous[j + 1]))
    out["rougeL"] = f(row[-1], len(x), len(y))
    return out


@pytest.mark.parametrize("prediction", ADVERSARIAL)
def test_rouge_equals_counting_by_hand_without_stemming(prediction):
    for reference in [*ADVERSARIAL, "the agencies reported one example, hello"]:
        expected = rouge_by_hand(prediction, reference)
        assert zeroscrolls.rouge(prediction, [reference]) == pytest.approx(expected)


def test_words_are_not_stemmed():
    assert zeroscrolls.rouge("reports", ["report"])["rouge1"] == 0


def test_each_rouge_takes_its_own_best_reference():
    scores = zeroscrolls.rouge("a b c d", ["a b x y z w", "d c b a"])
    assert scores["rouge1"] == 1.0  # from the second
    assert scores["rouge2"] == pytest.approx(rouge_by_hand("a b c d", "a b x y z w")["rouge2"])  # from the first


def test_geometric_mean_is_taken_of_the_averages():
    items = [(0.5, 0.0, 0.5), (1.0, 1.0, 1.0)]
    assert zeroscrolls.geometric_mean(items) == pytest.approx((0.75 * 0.5 * 0.75) ** (1 / 3))
    assert zeroscrolls.geometric_mean(items) != pytest.approx((0.0 + 1.0) / 2)


def f1_by_hand(prediction: str, reference: str) -> float:
    def words(text):
        text = "".join(c for c in text.lower() if c not in r"""!"#$%&'()*+,-./:;<=>?@[\]^_`{|}~""")
        return zeroscrolls.transliterate(" ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())).split()

    x, y = words(prediction), words(reference)
    rest, hits = list(y), 0
    for word in x:
        if word in rest:
            rest.remove(word)
            hits += 1
    return 2 * hits / (len(x) + len(y)) if hits else 0.0


@pytest.mark.parametrize("prediction", ADVERSARIAL)
def test_f1_equals_counting_by_hand(prediction):
    for reference in ADVERSARIAL:
        assert zeroscrolls.f1(prediction, [reference]) == pytest.approx(f1_by_hand(prediction, reference))


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("café", "Cafe", 1.0),  # accents are transliterated
        ("Łódź", "Lodz", 1.0),
        ("cafe\u0301", "café", 1.0),  # composed or not
        ("the", "a", 0.0),  # two answers that normalise to nothing do not match
        ("", "", 0.0),
        ("“yes”", "yes", 0.0),  # typographic quotes are not among the punctuation that goes
        ("\nyes", "yes", 1.0),
        ("yes yes", "yes", 2 / 3),  # a word counts as often as it is there
    ],
)
def test_f1_normalisation(prediction, reference, score):
    assert zeroscrolls.f1(prediction, [reference]) == pytest.approx(score)


def test_f1_takes_the_best_reference():
    assert zeroscrolls.f1("two words", ["none", "two words", "two"]) == 1.0


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=[chr(c) for c in range(0x20, 0x180) if chr(c).isalnum() or chr(c) in " .,'-–“”’"], max_size=20))
def test_transliteration_equals_unidecode(text):
    unidecode = pytest.importorskip("unidecode", reason="the package of the benchmark's own metric").unidecode
    rare = "ŀŉ"
    text = "".join(c for c in text.lower() if c not in rare)
    assert zeroscrolls.transliterate(text) == unidecode(text)


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("40%", 1.0),
        ("50%", 0.5),
        ("30%", 0.5),
        ("20.5%", 0.5**1.95),
        ("Of 50 reviews, 20 are positive, so 40% of them; 60% are negative.", 1.0),  # the first percentage counts
        ("60%, that is 40%", 0.25),
        ("40", 0.0),  # no percent sign
        ("40 %", 0.0),
        ("forty percent", 0.0),
        ("", 0.0),
        ("%", 0.0),
        (".5%", 0.5**3.5),  # read as 5%
        ("-40%", 1.0),  # the sign is not seen
        ("140%", 0.5**10),
        ("\n\n40.%", 1.0),
    ],
)
def test_exponential_similarity_halves_every_ten_points(prediction, score):
    assert zeroscrolls.exp_similarity(prediction, ["40%"]) == pytest.approx(score)


@given(st.floats(0, 100), st.integers(0, 100))
def test_exponential_similarity_is_the_formula_of_the_paper(p, gold):
    predicted = float(f"{p:.2f}")
    expected = math.pow(2, -10 * abs(gold - predicted) / 100)  # d = 2, c = 10, percentages as fractions
    assert zeroscrolls.exp_similarity(f"It is {p:.2f}%.", [f"{gold}%"]) == pytest.approx(expected)


def test_missing_references_are_refused():
    for metric in (zeroscrolls.rouge, zeroscrolls.f1, zeroscrolls.exp_similarity):
        with pytest.raises(DataError, match="no reference"):
            metric("text", [])
    with pytest.raises(DataError, match="no percentage"):
        zeroscrolls.exp_similarity("40%", ["forty"])


def test_scoring_opens_no_connection(monkeypatch):
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError("a scorer touched the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    zeroscrolls._rouge_scorer.cache_clear()
    assert zeroscrolls.rouge("some words", ["some words"])["rougeL"] == 1.0
    assert zeroscrolls.f1("café", ["cafe"]) == 1.0
