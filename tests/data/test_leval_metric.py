"""L-Eval's answer extraction, against a second implementation that follows the benchmark's rules step by step."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpes_eval.data import leval
from lpes_eval.errors import DataError

ADVERSARIAL = [
    "", " ", "\n", "A", "B", "AB", "AC", "CA", "DCBA", "ABCD", "BCD", "DD", "E", "none of these", "Answer: (B)",
    "\nB", "\n\nC. because", "The Cat sat", "B\nC", "B C D", "B, C and D.", "A. text (C) text", "It is A and B.",
    "A) B) C)", "ACQuestion 3. B. D.", "Question 1 A.", "xCABx", "xCAB. D", "zAzB", "Both B and D are correct",
    "Каждый", "Α", "ＡＢ", "“C”", "É B", "...", "the a an", "...,;", "I. think. E. F.", "a. b. c.", "Dear", "\tD",
    "C\x00", "\x00", "None", "A" * 50, "BA", "B.A.", "BQuestion", "B Question C.",
]  # fmt: skip


def extracted_by_the_rules(text: str, coursera: bool) -> str:
    if text.isspace() or text == "":
        return "None"
    if "ABCD".find(text) >= 0:
        return text
    if not coursera:
        for c in text:
            if c in "ABCD":
                return c
    lead = ""
    while text and text[0] in "ABCD":
        lead, text = lead + text[0], text[1:]
    if len(lead) > 1:
        return "".join(c for c in "ABCD" if c in lead)
    text = text.partition("Question")[0]
    found = lead
    for here, following in pairwise(text):
        if here in "ABCD" and (following.isspace() or following in ".)"):
            found += here
    if found:
        return "".join(c for c in "ABCD" if c in found)
    run = ""
    for c in text:
        if c in "ABCD":
            run += c
        elif run:
            return run
    return run or "A"


@pytest.mark.parametrize("coursera", [False, True])
@pytest.mark.parametrize("text", ADVERSARIAL)
def test_extraction_follows_the_rules_on_adversarial_answers(text, coursera):
    assert leval.predicted_letters(text, several=coursera) == extracted_by_the_rules(text, coursera)


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="ABCDEQuestion abcd.,()\n\téΑ“", max_size=30), st.booleans())
def test_extraction_follows_the_rules_on_any_text(text, coursera):
    assert leval.predicted_letters(text, several=coursera) == extracted_by_the_rules(text, coursera)


@pytest.mark.parametrize(
    ("text", "one", "several"),
    [
        ("", "None", "None"),  # a blank answer is no guess
        ("no letter here", "A", "A"),  # a letterless one is counted as a guess of A
        ("The Cat", "C", "C"),  # letters are found anywhere, even inside a word
        ("BC", "BC", "BC"),  # contained in "ABCD", so returned as it is, even where one letter is asked for
        ("CA", "C", "AC"),
        ("B. D. text", "B", "BD"),
        ("DBQuestion A.", "D", "BD"),  # leading letters are taken before the text is cut at "Question"
        ("xCABx", "C", "CAB"),  # the first run anywhere stays in its order, not sorted
    ],
)
def test_the_odd_corners_that_published_scores_contain(text, one, several):
    assert (leval.predicted_letters(text), leval.predicted_letters(text, several=True)) == (one, several)


@pytest.mark.parametrize(
    ("output", "letters"),
    [("B", "B"), ("ACD", "ACD"), ("(B) It was a planet. A", "B"), ("B, C", "B"), ("none", "A"), (" D ", "D")],
)
def test_the_reference_is_read_from_its_first_word(output, letters):
    assert leval.reference_letters(output) == letters


def test_a_blank_reference_is_refused():
    with pytest.raises(DataError, match="blank"):
        leval.reference_letters(" ")


@pytest.mark.parametrize(
    ("response", "output", "score"),
    [
        ("ABC", "ABC", 1.0),
        ("AC", "ABC", 0.25),  # some of the correct ones
        ("B", "ABC", 0.25),
        ("ABD", "ABC", 0.0),  # one wrong letter
        ("ABCD", "ABC", 0.0),
        ("", "ABC", 0.0),  # "None" is no choice of letters
        ("xCABx", "ABC", 0.25),  # all of them, in another order: not the same string
        ("no idea", "A", 1.0),  # the guess of A
    ],
)
def test_coursera_gives_a_quarter_for_correct_but_not_all_letters(response, output, score):
    assert leval.letters_score(response, output, several=True) == score


def exact_match_by_the_rules(prediction: str, reference: str) -> float:
    def bare(text):
        text = "".join(c for c in text if c not in r"""!"#$%&'()*+,-./:;<=>?@[\]^_`{|}~""")
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())

    if set(bare(reference)) <= set("ABCD"):
        if bare(prediction) == bare(reference):
            return 1.0
        return 0.25 if set(bare(prediction)).issubset(bare(reference)) else 0.0
    try:
        return 1.0 if float(prediction) == float(reference) else 0.0
    except ValueError:
        return 1.0 if reference.lower().replace(" ", "") in prediction.lower().replace(" ", "") else 0.0


@settings(max_examples=500, deadline=None)
@given(
    st.text(alphabet="ABCDE theant.,12é", max_size=8),
    st.sampled_from(["A", "B", "AC", "ABCD", "true", "false", "12", "..", "the", "1e"]),
)
def test_exact_match_follows_the_rules_on_any_text(prediction, reference):
    assert leval.exact_match(prediction, reference) == exact_match_by_the_rules(prediction, reference)


@pytest.mark.parametrize(
    ("loyalty", "fact", "output", "scores"),
    [
        ("True", "False", "True [fact: False]", (1.0, 1.0)),
        ("False", "False", "True [fact: False]", (0.0, 1.0)),
        ("\nThe statement is true.", "FALSE, since", "True [fact: False]", (1.0, 1.0)),
        ("untrue", "no", "True [fact: False]", (1.0, 0.0)),  # "true" is found inside a word; no verdict is an error
        ("true/false", "x", "True [fact: True]", (1.0, 0.0)),  # true is looked for before false in each word
        ("", "", "True [fact: True]", (0.0, 0.0)),
        ("True [fact: True]", "False", "True [fact: False]", (1.0, 0.0)),  # the first mark is the one that is read
        ("Truе (Cyrillic e)", "vérité", "True [fact: True]", (0.0, 0.0)),
        ("the a an", "...", "False [fact: False]", (0.0, 0.0)),
    ],
)
def test_sci_fi_has_two_judgements(loyalty, fact, output, scores):
    assert leval.judgement_scores(loyalty, fact, output) == scores


def test_a_sci_fi_reference_without_its_second_judgement_is_refused():
    with pytest.raises(DataError, match="fact"):
        leval.judgement_scores("True", "True", "True")
