"""The faults of ``mutants.py`` can be planted: their text is where they say, and the tests that must notice exist."""

import pytest

import mutants


@pytest.mark.parametrize("claim", mutants.MUTANTS)
def test_every_fault_can_be_planted_and_names_tests_that_exist(claim):
    mutant = mutants.MUTANTS[claim]
    assert (mutants.REPOSITORY / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    for test in mutant.tests:
        file, _, name = test.partition("::")
        text = (mutants.REPOSITORY / file).read_text(encoding="utf-8")
        assert (f"def {name}(" if name else "def test_") in text
