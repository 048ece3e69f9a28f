"""Best-subspan exact match against a second implementation without regular expressions, and worked corner cases."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpes_eval.data import mdqa as qa

PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def reference_normalize(text: str) -> str:
    """SQuAD's four steps, character by character."""
    kept = "".join(c for c in text.lower() if c not in PUNCTUATION)
    runs: list[tuple[bool, str]] = []
    for c in kept:
        is_word = unicodedata.category(c)[0] in "LM" or unicodedata.category(c) in ("Nd", "Nl", "Pc")
        if runs and runs[-1][0] == is_word:
            runs[-1] = (is_word, runs[-1][1] + c)
        else:
            runs.append((is_word, c))
    return " ".join("".join(" " if run in ("a", "an", "the") else run for _, run in runs).split())


def reference_score(prediction: str, answers: list[str]) -> float:
    line = prediction[: prediction.index("\n")] if "\n" in prediction else prediction
    score = 0.0
    for answer in answers:
        if reference_normalize(line).find(reference_normalize(answer)) >= 0:
            score = 1.0
    return score


ADVERSARIAL = st.text(
    alphabet=st.sampled_from([*"aAtThHeEnN .,'-_*()\n\t19Éßİ\u0301\u00a0\u2019\u4e2dσΣ"]), max_size=20
) | st.sampled_from(
    ["the", "a", "An", "The The", "***", "", "\nParis", "Paris\nLondon", "the U.S.", "U. S.", "Röntgen"]
)


@given(ADVERSARIAL)
def test_normalisation_equals_a_second_implementation(text):
    assert qa.normalize(text) == reference_normalize(text)


@given(ADVERSARIAL, st.lists(ADVERSARIAL, min_size=1, max_size=4))
def test_score_equals_a_second_implementation(prediction, answers):
    assert qa.best_subspan_em(prediction, answers) == reference_score(prediction, answers)


WORKED = [  # prediction, accepted answers, score
    ("Wilhelm Conrad Röntgen", ["Wilhelm Conrad Röntgen"], 1.0),
    ("It was WILHELM CONRAD RÖNTGEN, in 1901.", ["Wilhelm Conrad Röntgen"], 1.0),
    ("Rontgen", ["Röntgen"], 0.0),  # accents count
    ("Ro\u0308ntgen", ["R\u00f6ntgen"], 0.0),  # and are not composed
    ("March 14 1712", ["14 March 1712", "March 14, 1712"], 1.0),
    ("the answer is the beatles", ["Beatles"], 1.0),
    ("theatre", ["the"], 1.0),  # an article alone normalises to nothing and is in everything
    ("", ["*"], 1.0),  # so is punctuation alone
    ("", ["Paris"], 0.0),
    ("\nParis", ["Paris"], 0.0),  # newline first: nothing is left to score
    ("London\r\nParis", ["Paris"], 0.0),
    ("parish", ["Paris"], 1.0),  # contained is enough
    ("U.S.", ["US"], 1.0),
    ("41,200 people", ["41200"], 1.0),
    ("1 41 200", ["41,200"], 0.0),
    ("b", ["a\u0301 b"], 0.0),  # an accent is part of the word before it: this is no article
    ("Paris", [], 0.0),
]


@pytest.mark.parametrize(("prediction", "answers", "score"), WORKED)
def test_worked_cases(prediction, answers, score):
    assert qa.best_subspan_em(prediction, answers) == score
