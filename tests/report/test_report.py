"""``lpes-eval report``: from files to a page whose tables, text and figures are those of the runs."""

import base64
from xml.etree import ElementTree

import pytest

from lpes_eval.compare import results
from lpes_eval.compare.command import page_of
from lpes_eval.compare.comparison import compare
from lpes_eval.compare.statistics import interval
from lpes_eval.report import figures, page, sources
from runs import write_run

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> 🦊 مرحبا $x$ {{ 7*7 }}'
BEFORE = {0: [0.0, 0.0, 1.0, 1.0], 100: [1.0, 1.0, 1.0, 0.0]}
AFTER = {0: [1.0, 1.0, 0.0, 1.0], 100: [1.0, 1.0, 1.0, 0.0]}


def test_the_page_has_the_flips_that_compare_prints(tmp_path, report):
    paths = [write_run(tmp_path / name, scores) for name, scores in (("a", BEFORE), ("b", AFTER))]
    page = report(*(path.parent for path in paths))
    [table] = page_of(compare(*map(results.read, paths)), with_flips=True).flips
    assert table.title in page.text
    assert "▲ 2 / ▼ 1" in page.text
    shown = [row for row in page.rows if row[0][:1] in ("▲", "▼")]
    assert shown == [[f"{'▲' if row[0] == 'better' else '▼'} {row[0]}", *row[1:]] for row in table.rows]
    assert [row[1:3] for row in shown] == [["0 %", f"question {n}"] for n in (2, 0, 1)]


def test_text_stays_text_and_a_page_runs_nothing_and_asks_for_nothing_outside_itself(tmp_path, report):
    hostile = {"text": HOSTILE, "group": "<i>toy", "metric": "a\x1b[31mc"}
    paths = [write_run(tmp_path / f"<b>{name}", s, **hostile) for name, s in (("a", BEFORE), ("b", AFTER))]
    page = report(*(path.parent for path in paths))
    assert f"{HOSTILE} 0"[-60:] in page.text
    assert not {"b", "i", "script"} & {name for name, _ in page.elements}
    [image] = [attributes["src"] for name, attributes in page.elements if name == "img"]
    assert image.startswith("data:image/svg")
    ElementTree.fromstring(base64.b64decode(image.partition(",")[2]))
    for text in ("<b>a", "<i>toy"):
        assert text in page.text
    links = [a.get(k) for _, a in page.elements for k in ("src", "href", "xlink:href") if a.get(k)]
    assert [link for link in links if not link.startswith(("#", "data:"))] == []


def test_of_several_runs_each_is_paired_with_the_first_one_on_the_same_examples(tmp_path):
    lengths = [("short a", "x"), ("long a", "y"), ("short b", "x"), ("long b", "y"), ("alone", "z")]
    read = sources.read([write_run(tmp_path / name, BEFORE, text=text).parent for name, text in lengths])
    assert [(pair.a.name, pair.b.name) for pair in read.pairs] == [("short a", "short b"), ("long a", "long b")]
    assert any(note.startswith("short a and alone, toy: another set of examples") for note in read.notes)
    panels = [[run.name for run in panel.runs] for panel in read.panels]
    assert panels == [["short a", "short b"], ["long a", "long b"], ["alone"]]
    drawn = page.pictures(read)
    assert len({picture.name for pictures in drawn.values() for picture in pictures}) == 3  # each a file of its own


def test_a_run_without_samples_or_positions_has_a_page_too(tmp_path, report):
    alone = report(write_run(tmp_path / "a", {None: [0.5, 1.0]}), write_run(tmp_path / "z", {None: [0.5]}, group="y"))
    assert "flipped" not in alone.text
    assert "0.750" in alone.text
    assert "by position" not in alone.text.lower()
    both = report(write_run(tmp_path / "x", {None: [0.5, 1.0, 0.0, 0.0]}), write_run(tmp_path / "y", BEFORE))
    assert "Scores without positions" in both.text
    assert "by position" in both.text.lower()
    unlogged = report(*(write_run(tmp_path / n, BEFORE, samples=False) for n in "bc"))
    assert "run lm_eval with --log_samples" in unlogged.text


def test_tables_have_the_positions_in_their_order_and_wilsons_intervals(tmp_path, report):
    few = write_run(tmp_path / "few", {0: [0.0, 1.0], 50: [0.0, 0.0]}, samples=False)
    all_five = write_run(tmp_path / "all", {p: [1.0, 0.0] for p in (0, 25, 50, 75, 100)}, samples=False)
    [panel] = sources.read([few, all_five]).panels
    assert panel.labels == ["0 %", "25 %", "50 %", "75 %", "100 %"]
    values = [[panel.cell(run, label)[0] for label in panel.labels] for run in panel.runs]
    assert values == [["0.500", "", "0.000", "", ""], ["0.500"] * 5]
    assert interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    paths = [write_run(tmp_path / name, {50: scores}) for name, scores in (("a", [0.0, 1.0]), ("b", [1.0, 1.0]))]
    assert "50 %0.50001.0000+0.5000" in report(*paths).text  # one position alone has a row of what changed


def test_a_run_is_named_as_its_folder_in_figures(tmp_path):
    write_run(tmp_path / "c/model", AFTER)  # as lm_eval --output_path c does
    a = write_run(tmp_path / "a", BEFORE)
    read = sources.read([a.parent, tmp_path / "c", a.parent])
    [picture] = page.pictures(read)["positions"]
    assert [line.get_label() for line in picture.figure.axes[0].get_lines()] == ["a", "c", "a (2)"]
    [curve] = figures.factors([("found", 1, [1.0, 1.35])]).figure.axes[0].get_lines()[:1]
    assert list(curve.get_ydata()) == [1.0, 1.35]
