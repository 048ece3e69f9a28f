"""The picture of a training: what is drawn is what the log says."""

import pytest
from matplotlib import pyplot

from benchmarks.reference import curve
from lpes_eval.reference import path as shipped


def test_the_shipped_picture_is_of_the_shipped_log(tmp_path):
    """An .svg has its words as text."""
    log, out = shipped() / "training.jsonl", tmp_path / "new" / "training.svg"
    with pyplot.rc_context({"svg.fonttype": "none"}):
        assert curve.main([str(log), str(out)]) == 0
    written = out.read_text()
    for words in ("copying", "up to 32 pairs, 1 article", "up to 53 pairs, 6 articles", "training loss, nats a token"):
        assert f">{words}<" in written
    assert written.count(">whole answers about articles right<") == 1


@pytest.mark.parametrize(
    ("log", "out", "words"),
    [
        ("", "a.png", "log.jsonl: the file is empty"),
        ("no JSON", "a.png", "log.jsonl, line 1: not JSON"),
        ('{"step": 1, "level": "copy", "loss": 1}', "a.xyz", "'xyz' is not supported"),
        ('{"step": 1, "level": "copy", "loss": 1}', "log.jsonl/a.png", "File exists"),
    ],
)
def test_what_cannot_be_drawn_is_named_in_one_line(log, out, words, tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text(log)
    assert curve.main([str(tmp_path / "log.jsonl"), str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("curve: error: ")
    assert error.count("\n") == 1
