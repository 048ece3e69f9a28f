"""The picture of a training: what is drawn is what the log says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pyplot = pytest.importorskip("matplotlib.pyplot")

from benchmarks.reference import curve  # noqa: E402
from lpes_eval.reference import path as shipped  # noqa: E402


def test_the_shipped_log_is_drawn_from_its_first_step_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Path(shipped()) / "training.jsonl"
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    assert curve.main([str(log), str(tmp_path / "new" / "training.png")]) == 0
    assert (tmp_path / "new" / "training.png").read_bytes().startswith(b"\x89PNG")
    names, above, below = drawn[0].axes
    assert names.get_xlim() == above.get_xlim() == below.get_xlim() == (steps[0], steps[-1])
    assert {"loss"} <= set(above.get_legend_handles_labels()[1])
    assert "whole answers about articles right" in below.get_legend_handles_labels()[1]
    written = [text.get_text() for text in names.texts]
    assert written[0] == "copying"
    assert {"up to 32 pairs, 1 article", "up to 44 pairs, 6 articles"} < set(written)
    assert written[-1] == "up to 53 pairs, 6 articles"


@pytest.mark.parametrize(
    ("log", "out", "words"),
    [
        (None, "a.png", "log.jsonl: no such file"),
        ("", "a.png", "log.jsonl: the file is empty"),
        ("no JSON", "a.png", "log.jsonl, line 1: not JSON"),
        ('{"step": 1}', "a.png", "line 1: the field 'level' is missing"),
        ('{"step": 1, "level": "copy", "loss": 1}', "a.xyz", "a.xyz: expected a name that ends in .png or .svg"),
        ('{"step": 1, "level": "copy", "loss": 1}', "log.jsonl/a.png", "File exists"),
    ],
)
def test_what_cannot_be_drawn_is_named_in_one_line(
    log: str | None, out: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if log is not None:
        (tmp_path / "log.jsonl").write_text(log)
    assert curve.main([str(tmp_path / "log.jsonl"), str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
