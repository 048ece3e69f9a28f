"""What an attack on this project found, replayed: each finding stays mended, those that no other test has beside it."""

import contextlib
import io
import json
from xml.etree import ElementTree

import pytest

from fuzz import SECONDS, in_time
from lpes_eval import cli
from lpes_eval.errors import UserError
from runs import write_run, write_tasks

ESCAPES = "a\x1b[31m\n# heading ![](http://x) <img> |\x00 b"


def refused(call, *arguments, says="", **options):
    """One line for the user, within three times the second that is promised."""
    with in_time(3 * SECONDS), pytest.raises(UserError) as error:
        call(*arguments, **options)
    message = str(error.value)
    assert says in message
    assert len(message) < 2100
    assert "\n" not in message


def command(*argv, status, main=cli.main):
    """What a command prints; it ends with this status, and without a traceback."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        found = main([str(word) for word in argv])
    assert "Traceback" not in printed.getvalue()
    assert found == status, printed.getvalue()
    return printed.getvalue()


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_regress_fails_where_a_small_task_fell_to_0_beside_a_large_one(tmp_path):
    for name, small in (("old", 1.0), ("new", 0.0)):
        large = {"scores": {0: [1.0] * 24, 50: [1.0] * 24}}
        write_tasks(tmp_path / name, small={"scores": {None: [small] * 8}}, large=large)
    command("regress", tmp_path / "old", "--baseline", tmp_path / "b.json", "--update", status=0)
    printed = command("regress", tmp_path / "new", "--baseline", tmp_path / "b.json", "--strict", status=1)
    [row] = [line for line in printed.splitlines() if line.startswith("all")]
    assert row.endswith(("WORSE", "NOT TESTABLE"))


def test_a_search_neither_overwrites_nor_deletes_what_is_not_its_own(tmp_path):
    from search.journal import Journal

    names = ("factors.json", "summary.md", "report.json", ".movie.mp4.part", ".summary.md.1.part")
    for name in names:
        written(tmp_path / name, "mine")
    refused(Journal(tmp_path, {}).__enter__, says="but no search")
    assert all((tmp_path / name).read_text() == "mine" for name in names)
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    for name in names[:3]:
        (tmp_path / name).unlink()
    with Journal(tmp_path, {}):  # what is hidden may be what a killed search left
        pass


def test_a_factors_file_of_few_kilobytes_is_answered_or_refused_in_time(tmp_path):
    for points, layers in ((600, 32), (12, 1000)):
        curve = {"kind": "bezier", "points": [[x, 1.0 + x % 2 / 2] for x in range(points)]}
        file = {"format": "lpes-factors", "version": 1, "num_layers": layers, "curve": curve}
        path = written(tmp_path / "f.json", json.dumps(file))
        with in_time(3 * SECONDS):
            command("factors", path, status=0 if (points, layers) == (12, 1000) else 2)


def test_data_of_users_are_read_or_refused(tmp_path):
    from lpes_eval.data import leval, perplexity
    from lpes_eval.harness.plugin import check_examples

    written(tmp_path / "tpo.jsonl", json.dumps(leval.LINE))
    check_examples(["kv_retrieval"], {}, {})  # the first call imports lm_eval
    refused(check_examples, ["leval_tpo"], {}, {"data_dir": str(tmp_path)}, says="two documents or more")
    refused(perplexity.read, 5)


def test_names_do_not_break_junit_markdown_and_the_terminal(tmp_path):
    run = write_run(tmp_path / "run", {None: [1.0, 0.0] * 20}, metric=ESCAPES)
    command("regress", run, "--baseline", tmp_path / "b.json", "--update", status=0)
    outputs = ("--junit", tmp_path / "j.xml", "--markdown", tmp_path / "m.md")
    shown = command("regress", run, "--baseline", tmp_path / "b.json", "--no-strict", *outputs, status=0)
    ElementTree.fromstring((tmp_path / "j.xml").read_text())
    assert "\x1b" not in shown
    assert not any(line.startswith("# heading") for line in (tmp_path / "m.md").read_text().splitlines())
    assert not any(markup in (tmp_path / "m.md").read_text() for markup in ("![](", "<img", "\x1b"))
    origin = {"format": "lpes-factors", "version": 1, "factors": [1.5], "origin": {"note": ESCAPES}}
    assert "\x1b" not in command("factors", written(tmp_path / "f.json", json.dumps(origin)), status=0)
    assert "\x1b" not in command("factors", tmp_path / ESCAPES.replace("/", "").replace("\x00", ""), status=2)


def test_underscores_in_numbers_and_long_values_are_refused():
    from lpes_eval import factors, flags
    from lpes_eval.methods import tables

    refused(flags.of, flags.finite, "factor", "1_5")
    refused(tables.parse_bases, "bases", "1_0000:2")
    refused(factors.parse, "x" * 100_000)
    refused(factors.Factors.from_dict, {"x" * 100_000: 1})
