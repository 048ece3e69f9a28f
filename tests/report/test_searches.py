"""What ``lpes-eval report`` and ``watch`` show of a search."""

import json
from xml.etree import ElementTree

import pytest

from lpes_eval import cli
from lpes_eval.files import seal
from lpes_eval.report import figures, sources
from runs import write_run
from test_report import AFTER, BEFORE


def write_search(folder, lines, settings=None):
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps(settings or {"search": {"optimizer": "ga", "curve": "bezier"}}))
    write_journal(folder, lines)
    return folder


def write_journal(folder, lines):
    whole = "".join(json.dumps(seal(line)) + "\n" for line in lines)
    (folder / "journal.jsonl").write_text(whole + '{"key": "torn')


def individual(number, fitness, **more):
    scores = {"toy@0": fitness - 0.1, "toy@100": fitness + 0.1}
    entry = {"key": f"k{number}", "generation": number, "points": [[0, 1.0], [3, 1.5]], "origin": "mutant"}
    return entry | {"fitness": fitness, "scores": scores, "seconds": 2.0, "prompts": 40} | more


def test_the_plain_model_that_an_optimiser_asked_for_too_stays_the_baseline(tmp_path):
    folder = write_search(tmp_path / "s", [individual(3, 0.5, key="plain", origin="finalist"), individual(1, 0.6)])
    assert [entry["key"] for entry in sources.search("s", folder).baselines] == ["plain"]


def test_a_search_that_runs_is_shown_as_far_as_it_went(tmp_path, report):
    lines = [
        individual(0, 0.5, key="plain", generation=None, origin="baseline"),
        individual(0, 0.6),
        individual(1, 0.4, stopped_after=12, prompts=12),
        individual(2, 0.7, guards={"ends": {"over": 0.1}}),
    ]
    page = report(write_search(tmp_path / "run-0", lines))
    assert "3, of which 1 given up early" in page.text
    assert "92 prompts, 6 s" in page.text
    assert "0.7000 on 40 prompts" in page.text
    assert "individual 2, generation 1, mutant: fitness 0.4000 on 12 prompts, given up early" in page.text
    assert "worsens a guard" in page.text


def test_watch_shows_a_search_until_it_ends_and_its_page_can_be_written_meanwhile(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lpes_eval.report.watch.PAUSE", 0.01)
    folder, looks = write_search(tmp_path / "run-0", [individual(0, 0.6)]), []

    def meanwhile(seconds):
        looks.append(seconds)
        page = tmp_path / "report.html"
        assert cli.main(["report", str(folder), "-o", str(page)]) == 0
        assert f"{len(looks)}, of which 0 given up early" in page.read_text()
        assert "not finished" in page.read_text()
        lines = [individual(number, 0.6 + 0.1 * number, origin="a\x1bb") for number in range(len(looks) + 1)]
        write_journal(folder, lines)
        ended = {"finished": len(looks) == 2}  # not before its held-out examples
        (folder / "report.json").write_text(json.dumps(ended))

    monkeypatch.setattr("time.sleep", meanwhile)
    assert cli.main(["watch", str(folder)]) == 0
    shown = [line.split("  ")[:5] for line in capsys.readouterr().out.splitlines() if "generation" in line]
    told = (("mutant", "0.6000"), ("a\ufffdb", "0.7000"), ("a\ufffdb", "0.8000"))
    assert shown == [
        [str(n + 1), f"generation {n}", origin, f"fitness {fitness}", f"best {fitness} on 40 prompts"]
        for n, (origin, fitness) in enumerate(told)
    ]
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert str(tmp_path / "settings.json") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [("settings.json", "[]"), ("journal.jsonl", "[]"), ("journal.jsonl", json.dumps(individual(0, 1)))],
)
def test_a_damaged_search_is_an_error_that_names_the_file(tmp_path, name, text, capsys):
    folder = write_search(tmp_path / "run-0", [individual(0, 0.6)])
    (folder / name).write_text(f"{text}\n")
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "r.html")]) == 2
    assert str(folder / name) in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_no_tradeoff_is_drawn_where_lower_is_better_for_a_task(tmp_path):
    for lower in (False, True):
        fitness = {"tasks": [{"task": "toy"}, {"task": "nll", "lower_is_better": True}][: 1 + lower]}
        settings = {"search": {"optimizer": "ga", "curve": "bezier"}, "fitness": fitness}
        folder = write_search(tmp_path / str(lower), [individual(0, 0.6), individual(1, 0.7)], settings)
        assert (figures.tradeoff(sources.search("s", folder)) is None) is lower


def test_the_figures_are_written_for_papers_as_well(tmp_path, report):
    search = write_search(tmp_path / "s", [individual(0, 0.6), individual(1, 0.7)])
    runs = [write_run(tmp_path / n, s, group="toy $x$").parent for n, s in (("a", BEFORE), ("b", AFTER))]
    report(*runs, search, options=["--figures", tmp_path / "figures"])
    names = ["differences-a-b", "positions-toy-x-acc", "search-s", "search-s-seconds", "tradeoff-s"]
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("png", "svg")
    }
    for path in (tmp_path / "figures").glob("*.svg"):
        ElementTree.parse(path)
    for path in (tmp_path / "figures").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("cost", "ends"), [("prompts", [40, 80]), ("seconds", [2.0, 5.0])])
def test_the_search_is_drawn_by_prompts_or_seconds_each_individual_as_long_as_it_took(tmp_path, cost, ends):
    folder = write_search(tmp_path / "s", [individual(0, 0.6), individual(1, 0.7, seconds=3.0)])
    axes = figures.progress(sources.search("s", folder), cost).figure.axes[0]
    assert [list(one.get_segments()[0][:, 0]) for one in axes.collections] == [[0, ends[0]], ends]
