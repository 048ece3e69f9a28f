"""What ``lpes-eval report`` and ``watch`` show of a search."""

import json
import random
import re

import pytest

from lpes_eval import cli
from lpes_eval.entries import entry_of
from lpes_eval.report import figures, sources, watch
from runs import write_run
from test_report import AFTER, BEFORE

SETTINGS = {"search": {"optimizer": "ga", "curve": "bezier"}}


def write_search(folder, lines, settings=SETTINGS):
    folder.mkdir(exist_ok=True)
    whole = "".join(json.dumps(line) + "\n" for line in [{"settings": settings}, *lines])
    (folder / "journal.jsonl").write_text(whole + '{"key": "torn')
    return folder


def individual(number, at, **more):
    scores = {"toy@0": at - 0.1, "toy@100": at + 0.1}
    entry = {"key": f"k{number}", "generation": number, "points": [[0, 1.0], [3, 1.5]], "origin": "mutant"}
    return entry | {"fitness": at, "scores": scores, "seconds": 2.0, "prompts": 40} | more


def over(share):
    return {"ends": {"plain": 0.9, "found": 0.9 - share, "interval": [-0.5, -0.1], "over": share}}


def test_a_search_that_runs_is_shown_as_far_as_it_went(tmp_path, report):
    lines = [
        individual(0, 0.5, key="plain", generation=None, origin="baseline"),
        individual(0, 0.6),
        individual(1, 0.4, stopped_after=12, prompts=12),
        individual(2, 0.7, guards=over(0.1)),
        individual(3, -1e6, failed="its workers died", scores={}, prompts=0),
    ]
    folder = write_search(tmp_path / "run-0", lines)
    page = report(folder)
    assert "3, of which 1 given up early" in page.text
    assert "92 prompts, 6 s" in page.text
    assert "0.7000 on 40 prompts" in page.text
    search = sources.search("s", folder)
    early, full, *_ = figures.progress(search).figure.axes[0].get_lines()
    assert (early.get_label(), list(early.get_xdata()), list(early.get_ydata())) == ("given up early", [52], [0.4])
    assert (full.get_label(), list(full.get_xdata())) == ("measured on 40 prompts", [40, 92])
    lengths = [one.get_segments()[0][:, 0] for one in figures.progress(search).figure.axes[0].collections]
    assert [list(ends) for ends in lengths] == [[40, 52], [0, 40]]  # as long as what it took
    marks = {line.get_label(): list(line.get_xdata()) for line in figures.tradeoff(search).figure.axes[0].get_lines()}
    assert marks["worsens a guard"] == pytest.approx([0.7])
    assert marks["not beaten by any other"] == pytest.approx([0.6])


def test_the_tradeoff_joins_what_no_other_individual_beats_and_knows_the_plain_model(tmp_path):
    draw = random.Random(1)
    points = [(draw.randrange(64) / 8, draw.randrange(64) / 8) for _ in range(100)]
    plain = individual(999, 0.5, key="plain", origin="finalist")  # an optimiser measured it, too
    lines = [plain, *(individual(n, 0.5, scores={"low": y, "high": 100.0 + x}) for n, (x, y) in enumerate(points))]
    search = sources.search("s", write_search(tmp_path / "s", lines))
    first, *_, line = figures.tradeoff(search).figure.axes[0].get_lines()
    assert (first.get_label(), list(first.get_xdata())) == ("plain model", [0.5])
    both = {((y + 100 + x) / 2, y) for x, y in points}
    front = [p for p in both if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in both)]
    assert sorted(zip(line.get_xdata(), line.get_ydata(), strict=True)) == sorted(front)
    assert len(front) > 2
    settings = SETTINGS | {"fitness": {"tasks": [{"task": "toy"}, {"task": "nll", "lower_is_better": True}]}}
    assert figures.tradeoff(sources.search("s", write_search(tmp_path / "lower", lines, settings))) is None


def test_watch_shows_a_search_until_it_ends_and_its_page_can_be_written_meanwhile(tmp_path, capsys, monkeypatch):
    folder, looks = write_search(tmp_path / "run-0", [individual(0, 0.6)]), []

    def meanwhile(seconds):
        looks.append(seconds)
        page = tmp_path / "report.html"
        assert cli.main(["report", str(folder), "-o", str(page)]) == 0
        assert f"{len(looks)}, of which 0 given up early" in page.read_text()
        write_search(folder, [individual(n, 0.6 + 0.1 * n, origin="a\x1bb") for n in range(len(looks) + 1)])
        ended = {"finished": len(looks) == 2}  # not before its held-out examples
        (folder / "report.json").write_text(json.dumps(ended))

    write_search(folder, [individual(0, 0.6, origin="a\x1bb")])
    monkeypatch.setattr("time.sleep", meanwhile)
    assert cli.main(["watch", str(folder)]) == 0
    shown = [re.split(" {2,}", line)[:4] for line in capsys.readouterr().out.splitlines() if "generation" in line]
    assert shown == [
        [f"individual {n + 1}", f"generation {n}", "a\ufffdb", f"fitness {0.6 + 0.1 * n:.4f}"] for n in range(3)
    ]
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert str(tmp_path / "journal.jsonl") in capsys.readouterr().err


def lines_of(capsys, *entries, **expected):
    progress = watch.Progress(**expected)
    for entry, new in entries:
        progress.show(entry_of(entry), new)
    return capsys.readouterr().out.splitlines()


def test_the_best_so_far_was_measured_to_the_end_and_is_of_those_asked_as_much(capsys):
    """The time left is that of what was measured now."""
    entries = [individual(1, 0.5), individual(2, 0.505, stopped_after=9), individual(3, 0.6, guards=over(0.2))]
    lines = lines_of(capsys, *((entry, True) for entry in entries))
    assert [line.count("best 0.5000") for line in lines] == [1, 1, 1]
    assert "given up early" in lines[1]
    assert "worsens a guard" in lines[2]
    entries = [(individual(1, 0.9, prompts=10), False), (individual(2, 0.4, prompts=40), True)]
    lines = lines_of(capsys, *entries, individuals=6, prompts=130)
    assert "best 0.9000  known" in lines[0]
    assert "individual 2 of about 6" in lines[1]
    assert "best 0.4000  2.0 s  about 4 s left" in lines[1]  # 80 prompts to come, at 20 a second


@pytest.mark.parametrize("lines", [[individual(0, 0.5)], [{"settings": SETTINGS}, individual(0, 0.5, fitness=None)]])
def test_a_damaged_search_is_an_error_that_names_the_file(tmp_path, lines, capsys):
    folder = write_search(tmp_path / "run-0", [individual(0, 0.6)])
    lines = map(json.dumps, [*lines, individual(1, 0.5)])
    (folder / "journal.jsonl").write_text("\n".join([*lines, ""]))
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "r.html")]) == 2
    assert str(folder / "journal.jsonl") in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_the_figures_are_written_for_papers_as_well(tmp_path, report):
    search = write_search(tmp_path / "s", [individual(n, n % 7 / 10) for n in range(9)])
    runs = [write_run(tmp_path / n, s, group="toy $x$").parent for n, s in (("a", BEFORE), ("b", AFTER))]
    page = report(*runs, search, options=["--figures", tmp_path / "figures"])
    names = ["positions-toy-x-acc", "search-s", "tradeoff-s"]
    files = sorted((tmp_path / "figures").iterdir())
    assert [path.name for path in files] == sorted(f"{name}.{kind}" for name in names for kind in ("pdf", "png"))
    assert {path.read_bytes()[:4] for path in files} == {b"\x89PNG", b"%PDF"}
    assert sum(name == "img" for name, _ in page.elements) == len(names)
