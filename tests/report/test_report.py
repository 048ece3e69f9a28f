"""``lpes-eval report``: from files to a page whose data, text and figures are those of the runs."""

import base64
import json
import shutil
from xml.etree import ElementTree

import pytest

from lpes_eval.compare.statistics import interval
from lpes_eval.data import kv
from lpes_eval.errors import UserError
from lpes_eval.factors import Factors
from lpes_eval.report import page, plot, sources
from runs import write_run, write_tasks

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> 🦊 مرحبا $x$ {{ 7*7 }}'
BEFORE = {0: [0.0, 0.0, 1.0, 1.0], 100: [1.0, 1.0, 1.0, 0.0]}
AFTER = {0: [1.0, 1.0, 0.0, 1.0], 100: [1.0, 1.0, 1.0, 0.0]}


def log(path, requests, answers, **fields):
    """Give the only sample of a run these requests (prompt and, of a choice, ending), answers and other fields."""
    [samples] = path.parent.glob("samples_*")
    fields["arguments"] = {
        f"gen_args_{i}": {f"arg_{j}": x for j, x in enumerate(one)} for i, one in enumerate(requests)
    }
    samples.write_text(json.dumps(json.loads(samples.read_text()) | fields | {"filtered_resps": answers}))


# --- samples ---


def test_the_samples_that_flipped_are_those_whose_score_changed(tmp_path, report, monkeypatch):
    paths = [write_run(tmp_path / name, scores).parent for name, scores in (("a", BEFORE), ("b", AFTER))]
    page = report(*paths)
    flips = [(one["position"], one["question"], one["better"], one["scores"]) for one in page.data["samples"]]
    assert flips == [
        ("0 %", "question 0", True, [0.0, 1.0]),
        ("0 %", "question 1", True, [0.0, 1.0]),
        ("0 %", "question 2", False, [1.0, 0.0]),
    ]
    assert "▲ 2 / ▼ 1" in page.text
    monkeypatch.setattr("lpes_eval.report.page.ROOM", 25)
    page = report(*paths)
    assert [bool(one["prompt"]) for one in page.data["samples"]] == [True, True, False]
    assert "1 prompts were left out" in page.text


def test_a_prompt_is_shown_in_its_segments_to_the_byte(tmp_path, report):
    """A key-value question in a chat template: the gold record of each position, and all the text of the prompt."""
    question = kv.generate(7, 5)
    paths = [write_run(tmp_path / name, {0: [value], 100: [value]}) for name, value in (("a", 0.0), ("b", 1.0))]
    prompts = {p: f"<|user|>{question.prompt(p)}<|end|>" for p in (0, 100)}
    for path in paths:
        answers = [f"to {path.parent.name} at {p}" for p in (0, 100)]
        doc = {"question_id": 7, "records": question.records, "gold": question.gold}
        log(path, [(prompt,) for prompt in prompts.values()], answers, doc=doc)
    data = report(*paths).data
    for sample, position in zip(data["samples"], (0, 100), strict=True):
        pieces = [(data["kinds"][kind], "".join(data["texts"][at : at + n])) for kind, at, n in sample["prompt"]]
        assert "".join(text for _, text in pieces) == prompts[position]
        [gold] = [text for kind, text in pieces if kind == "gold"]
        assert question.target(position) in gold
        assert sample["expected"] == question.target(position)
        assert sample["answers"] == [f"to {name} at {position}" for name in "ab"]
        kinds = [kind for kind, _ in pieces if kind != "context"]
        assert kinds == ["prompt", "instruction", "gold", "question", "prompt"]
    for path in paths:
        log(path, [("as another version has it",)], ["scored at both"], doc=doc)
    data = report(*paths).data
    assert data["texts"] == ["as another version has it"]
    assert [one["answers"] for one in data["samples"]] == [["scored at both"] * 2] * 2


def test_text_stays_text_and_a_page_asks_for_nothing_outside_itself(tmp_path, report):
    """Also the control characters in a metric's name, which are replaced."""
    hostile = {"text": HOSTILE, "group": "<i>toy", "metric": "a\x1b[31mc\x00"}
    paths = [write_run(tmp_path / f"<b>{name}", s, **hostile) for name, s in (("a", BEFORE), ("b", AFTER))]
    page = report(*(path.parent for path in paths))
    assert page.data["samples"][0]["question"].startswith(HOSTILE)
    assert not {"b", "i"} & {name for name, _ in page.elements}
    images = [attributes["src"] for name, attributes in page.elements if name == "img"]
    assert len(images) == 2
    for image in images:
        assert image.startswith("data:image/svg")
        ElementTree.fromstring(base64.b64decode(image.partition(",")[2]))
    assert [attributes.get("id") for name, attributes in page.elements if name == "script"] == ["data", None]
    for text in ("<b>a", "<i>toy", "a\ufffd[31mc\ufffd"):
        assert text in page.text
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    links = [a.get(k) for _, a in page.elements for k in ("src", "href", "xlink:href") if a.get(k)]
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)


# --- runs ---


def test_of_several_runs_each_is_paired_with_the_first_one_on_the_same_examples(tmp_path):
    lengths = [("short a", "x"), ("long a", "y"), ("short b", "x"), ("long b", "y"), ("alone", "z")]
    runs, _, _ = sources.read([write_run(tmp_path / name, BEFORE, text=text).parent for name, text in lengths])
    pairs, notes = sources.pairs(runs)
    assert [(pair.a.name, pair.b.name) for pair in pairs] == [("short a", "short b"), ("long a", "long b")]
    assert any(note.startswith("short a and alone, toy: another set of examples") for note in notes)
    panels = [[run.name for run in panel.runs] for panel in sources.panels(runs)]
    assert panels == [["short a", "short b"], ["long a", "long b"], ["alone"]]
    drawn = page._pictures(runs, sources.panels(runs), pairs, [], {})
    assert len({picture.name for pictures in drawn.values() for picture in pictures}) == 5  # each a file of its own
    groups = {"one": "x", "other": "y", "both": "xy"}
    paths = [write_tasks(tmp_path / name, **{one: {"scores": BEFORE} for one in of}) for name, of in groups.items()]
    pairs, notes = sources.pairs(sources.read(paths)[0])
    found = [(pair.a.name, [one.task for one in pair.report.sections]) for pair in pairs]
    assert (found, notes) == ([("one", ["x"]), ("other", ["y"])], [])


def test_a_run_without_samples_or_positions_has_a_page_too(tmp_path, report):
    alone = report(write_run(tmp_path / "a", {None: [0.5, 1.0]}), write_run(tmp_path / "z", {None: [0.5]}, group="y"))
    assert alone.data["samples"] == []
    assert "0.750" in alone.text
    assert "by position" not in alone.text.lower()
    both = report(write_run(tmp_path / "x", {None: [0.5, 1.0, 0.0, 0.0]}), write_run(tmp_path / "y", BEFORE))
    assert "Scores without positions" in both.text
    assert "by position" in both.text.lower()
    unlogged = report(*(write_run(tmp_path / n, BEFORE, samples=False) for n in "bc"))
    assert "no samples were logged (lm_eval --log_samples)" in unlogged.text


def test_tables_have_the_positions_in_their_order_and_wilsons_intervals(tmp_path, report):
    few = write_run(tmp_path / "few", {0: [0.0, 1.0], 50: [0.0, 0.0]}, samples=False)
    all_five = write_run(tmp_path / "all", {p: [1.0, 0.0] for p in (0, 25, 50, 75, 100)}, samples=False)
    [panel] = sources.panels(sources.read([few, all_five])[0])
    assert panel.labels == ["0 %", "25 %", "50 %", "75 %", "100 %"]
    values = [[panel.cell(run, label)[0] for label in [*panel.labels, "mean"]] for run in panel.runs]
    assert values == [["0.500", "", "0.000", "", "", ""], ["0.500"] * 6]  # a mean over other positions is none
    assert interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    paths = [write_run(tmp_path / name, {50: scores}) for name, scores in (("a", [0.0, 1.0]), ("b", [1.0, 1.0]))]
    assert "50 %0.50001.0000+0.5000" in report(*paths).text  # one position alone has a row of what changed


CHOICES, LONG, SEVERAL = [("Q", "cat"), ("Q", "dog")], [("Q", " a"), ("Q", " long one")], [("first",), ("second",)]
WINDOW = ["-9.5", "False"]


def likelihoods(*values):
    return [[str(value), "False"] for value in values]


@pytest.mark.parametrize(
    ("metric", "requests", "answers", "target", "question", "shown", "expected"),
    [
        ("acc", CHOICES, [likelihoods(-1, -2), likelihoods(-2, -1)], "1", "Q", ["cat", "dog"], "dog"),
        ("acc", CHOICES, [likelihoods(-1, -2), likelihoods(-2, -1)], "7", "Q", ["cat", "dog"], "7"),
        ("acc_norm", LONG, [likelihoods(-1, -6), likelihoods(-1, -9)], "0", "Q", [" long one", " a"], " a"),
        ("acc", SEVERAL, [["yes", "no"], ["yes", "yes"]], "1", "first second", ["yes | no", "yes | yes"], "1"),
        ("nll", SEVERAL, [[WINDOW] * 2] * 2, "1", "first second", [f"{WINDOW} | {WINDOW}"] * 2, "1"),
        ("acc", [(["[chat]"],)], [["no"], ["yes"]], "yes", "[chat]", ["no", "yes"], "yes"),
    ],
    ids=["multiple choice", "no number of a choice", "by length", "sci_fi of L-Eval", "lpes_ppl", "an API of chats"],
)
def test_a_sample_is_shown_with_all_its_prompts_and_answers(
    tmp_path, report, metric, requests, answers, target, question, shown, expected
):
    paths = [write_run(tmp_path / n, {None: [s]}, metric=metric) for n, s in (("a", 0.0), ("b", 1.0))]
    for path, given in zip(paths, answers, strict=True):
        log(path, requests, given, target=target)
    [sample] = report(*paths).data["samples"]
    assert (sample["question"], sample["answers"], sample["expected"]) == (question, shown, expected)


# --- figures ---


def test_a_notebook_has_the_figures_of_the_page(tmp_path):
    a, b = (write_run(tmp_path / n, s) for n, s in (("a", BEFORE), ("b", AFTER)))
    figure = plot(a, b, task="toy")
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["a", "b"]
    write_run(tmp_path / "c/model", AFTER)  # as lm_eval --output_path c does
    figure = plot(a, tmp_path / "c", a)
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["a", "c", "a (2)"]
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="no scores by position of other"):
        plot(a, task="other")
    curve = Factors.from_curve("bezier", [(0, 1.0), (3, 1.6)], num_layers=4).plot()
    assert next(list(line.get_ydata()) for line in curve.axes[0].get_lines()) == [1.0, 1.6]


# --- in a browser ---


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium and playwright")
def test_in_a_browser_samples_are_found_filtered_and_opened_and_nothing_runs(tmp_path, report):
    """20,000 flips: painted within 2 s, under 15 MB; hostile text is shown; nothing overflows at 360 px."""
    playwright = pytest.importorskip("playwright.sync_api")
    n, needle = 20_000, "$x$ {{ 7*7 }} 19999"
    folders = [tmp_path / f"vendor__model-7b-v1.5-{name}-searched-with-bands-seed-0" for name in ("plain", "factors")]
    for value, folder in enumerate(folders):
        write_run(folder, {None: [float(value)] * n}, text=HOSTILE)
    report(*folders)
    target = tmp_path / "report.html"
    assert target.stat().st_size < 15e6
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page, seen = browser.new_page(viewport={"width": 360, "height": 800}), []
        for event in ("console", "pageerror", "dialog"):
            page.on(event, lambda what: seen.append(str(what)))
        page.on("request", lambda request: seen.append(request.url))
        page.goto(target.as_uri())
        page.wait_for_selector("#list details")
        assert page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") < 2000
        assert page.evaluate("[...document.images].every(image => image.naturalWidth > 100)")
        page.fill("input[name=text]", needle.upper())
        assert page.text_content("#count") == "1 of 20000: 1 better, 0 worse"
        page.focus("#list summary")
        page.keyboard.press("Enter")
        assert HOSTILE in page.inner_text("#list")
        page.select_option("select[name=flip]", "worse")
        assert page.text_content("#count") == "0 of 20000: 0 better, 0 worse"
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        browser.close()
    assert [one for one in seen if not one.startswith(("file:", "data:"))] == []
