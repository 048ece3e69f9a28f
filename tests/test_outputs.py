"""One rule for writing: a command replaces only what it wrote itself."""

import os
import socket

import pytest

from lpes_eval import cli, files
from lpes_eval.compare import baseline, results
from lpes_eval.errors import UserError
from runs import write_run

MARK = files.marker("lpes-eval toy")
CONTENT = f"<!-- {MARK} -->\nnew\n"


def test_a_mark_counts_at_the_beginning_alone(tmp_path):
    other = tmp_path / "other.md"
    for content in ("x" * files.HEAD + MARK, CONTENT.replace("toy", "other")):
        other.write_text(content)
        with pytest.raises(UserError, match=f"{other}: is there and was not written by this command"):
            files.write_output(other, CONTENT, MARK)
        assert other.read_text() == content


def test_what_is_no_file_is_written_to_or_refused_in_a_sentence(tmp_path):
    files.write_output("/dev/null", CONTENT, MARK)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with pytest.raises(UserError, match="cannot be written"):
            files.write_output(tmp_path / "socket", CONTENT, MARK)


def test_the_summary_of_a_job_is_appended_to_whatever_its_path_is_called(tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.chdir(tmp_path)
    files.write_output(summary, CONTENT, MARK)
    for path in (os.path.join(".", "..", tmp_path.name, "summary.md"), "summary.md"):
        summary.write_text("from another step\n")
        files.write_output(path, CONTENT, MARK)
        assert summary.read_text() == "from another step\n" + CONTENT


A, B, BASE = "{folder}/a", "{folder}/b", "{folder}/base.json"
OPTIONS = {
    **{f"compare {flag}": ["compare", A, B, flag] for flag in ("--json", "--markdown", "--html")},
    **{f"regress {flag}": ["regress", A, "--baseline", BASE, flag] for flag in ("--json", "--markdown", "--junit")},
    "regress --update": ["regress", A, "--update", "--baseline"],
    "report -o": ["report", A, "-o"],
}
OTHERS = {
    "text": b"notes\n",
    "nothing in it": b"",
    "results": b'{"results": {}, "configs": {}}',
    "weights": (2).to_bytes(8, "little") + b"{}\x00\xff",
    "what names the command": b"run lpes-eval compare a b --json out.json\n",
    "what another command wrote": f"<!-- {MARK} -->\n".encode(),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in "ab":
        path = write_run(folder / name, {0: [1.0, 0.0] * 10, 100: [1.0] * 20})
    baseline.save(results.read(path), folder / "base.json")
    return folder


@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_changes_a_file_that_its_command_did_not_write(runs, tmp_path, option, capsys, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    command = [word.format(folder=runs) for word in OPTIONS[option]]
    targets = {name: tmp_path / name for name in (*OTHERS, "link", "link to a link", "another name", "folder")}
    for name, content in OTHERS.items():
        targets[name].write_bytes(content)
    targets["link"].symlink_to(targets["results"])
    targets["link to a link"].symlink_to(targets["link"])
    os.link(targets["weights"], targets["another name"])
    targets["folder"].mkdir()
    for target in (*targets.values(), targets["text"] / "out"):
        assert cli.main([*command, str(target)]) == 2
        assert f"lpes-eval: error: {target}: " in capsys.readouterr().err
    assert {name: targets[name].read_bytes() for name in OTHERS} == OTHERS
    assert targets["link"].is_symlink()
    assert not [*targets["folder"].iterdir()]
    (tmp_path / "to its own").symlink_to(tmp_path / "new")
    for name in ("new", "new", "to its own"):  # made, replaced, and replaced through a link
        assert cli.main([*command, str(tmp_path / name)]) == 0
        assert (tmp_path / "to its own").is_symlink()
