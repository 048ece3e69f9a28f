"""Settings are checked at one door, whatever lm-eval makes of ``--metadata``."""

import pytest

from lpes_eval.errors import DataError
from lpes_eval.harness.settings import checked


def test_whole_numbers_are_read_however_lm_eval_hands_them_over():
    for name, given, number in (("search_seed", "01", 1), ("search_seed", -1.0, -1), ("longest", "256", 256)):
        assert checked({name: given}) == {name: number}
    assert checked({"dtype": "float16", "max_length": None}) == {"dtype": "float16", "max_length": None}


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("search_seed", ("one", 1.5, None, True, "", float("nan")), "a whole number"),
        ("longest", (0, 2.5, "1e3"), "(at least 1|a whole number)"),
        ("num_keys", (1, None), "(at least 2|a whole number)"),
        ("data_dir", ("", " "), "a name"),
        ("positions", ([], [101], [0, 0], [0, 0.0], ["a"], "50", [True], None, [float("nan")]), "a list of different"),
        ("source", ("internet",), "generated or official or synthwiki"),
    ],
)
def test_a_setting_that_cannot_be_met_is_one_line_with_what_was_expected(name, values, expected):
    for value in values:
        with pytest.raises(DataError, match=f"^{name}=.*: expected {expected}"):
            checked({name: value})
