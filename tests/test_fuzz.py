"""Damaged files are read as they were written or refused in one sentence: a few of the inputs of ``fuzz.py``."""

import pytest

import fuzz


@pytest.mark.parametrize("name", fuzz.PARSERS)
def test_no_damaged_file_ends_in_a_traceback_or_in_waiting(name):
    assert not fuzz.run(name, inputs=200).failed
