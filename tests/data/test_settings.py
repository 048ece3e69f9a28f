"""Settings are checked at one door, whatever lm-eval makes of ``--metadata``."""

import pytest

from lpes_eval.errors import DataError
from lpes_eval.harness.settings import SETTINGS, checked


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_setting_is_an_error(name, empty):
    with pytest.raises(DataError, match=f"^{name}= is empty"):
        checked({name: empty})


def test_whole_numbers_are_read_however_lm_eval_hands_them_over():
    for name, given, number in (("search_seed", "01", 1), ("search_seed", -1.0, -1), ("stride", "256", 256)):
        assert checked({name: given}) == {name: number}
    assert checked({"dtype": "float16", "max_length": None}) == {"dtype": "float16", "max_length": None}


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("search_seed", ("one", 1.5, None, True, "--5", "1\n", "\u0663", float("nan")), "a whole number"),
        ("stride", ("x", 0, -1, 2.5, "1e3", "9" * 5000), "(at least 1|a whole number)"),
        ("num_keys", (1, 0, None), "(at least 2|a whole number)"),
        ("num_documents", (1, "ten", None), "(at least 2|a whole number)"),
        ("longest", ("x",), "(at least 1|a whole number)"),
        ("windows", (2.5,), "(at least 1|a whole number)"),
        ("prompt_tokens", ("x",), "(at least 1|a whole number)"),
        ("positions", ([], [101], [0, 0], [0, 0.0], ["a"], "50", [True], None, [float("nan")]), "a list of different"),
        ("source", ("internet",), "generated or official or folder"),
        ("chat_prompt", ("no", "False", 2), "True or False"),
        ("cutting", ("words",), "prompt or authors"),
        ("prompt_style", ("alpaca",), "vicuna or llama2 or chat"),
    ],
)
def test_a_setting_that_cannot_be_met_is_one_line_with_what_was_expected(name, values, expected):
    for value in values:
        with pytest.raises(DataError, match=f"^{name}=.*: expected {expected}"):
            checked({name: value})
