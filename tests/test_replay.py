"""What an attack once found stays mended: the findings of ``replay.py`` that need no model."""

import pytest

import replay


@pytest.mark.parametrize("claim", [claim for claim, (_, model) in replay.FINDINGS.items() if not model])
def test_what_was_found_is_mended(claim, tmp_path):
    replay.FINDINGS[claim][0](tmp_path)
