"""Damaged files are read or refused in one sentence: a few of the inputs of ``fuzz.py``."""

import pytest

import fuzz


@pytest.mark.parametrize("name", fuzz.PARSERS)
def test_no_damaged_file_ends_in_a_traceback(name):
    *_, failed = fuzz.run(name, inputs=200)
    assert not failed
