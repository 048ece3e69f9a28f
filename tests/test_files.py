"""One rule for writing: a command replaces only what it wrote itself."""

import os
import socket

import pytest

from lpes_eval import files
from lpes_eval.errors import UserError

MARK = files.marker("lpes-eval toy")
CONTENT = f"<!-- {MARK} -->\nnew\n"


def test_a_file_is_written_where_there_is_none_and_replaced_where_this_command_wrote_it(tmp_path):
    path = tmp_path / "new folder" / "out.md"
    for content in (CONTENT, CONTENT * 2):
        files.write_output(path, content, MARK)
        assert path.read_text() == content
    (tmp_path / "link").symlink_to(path)
    files.write_output(tmp_path / "link", CONTENT, MARK)
    assert path.read_text() == CONTENT
    assert (tmp_path / "link").is_symlink()


def test_a_file_of_somebody_elses_stays_as_it_is(tmp_path):
    other = tmp_path / "other.md"
    (tmp_path / "link").symlink_to(other)
    late = "x" * files.HEAD + MARK
    for content in ("", "text", CONTENT.replace("toy", "other"), late):
        other.write_text(content)
        for path in (other, tmp_path / "link"):
            with pytest.raises(UserError, match=f"{path}: is there and was not written by this command"):
                files.write_output(path, CONTENT, MARK)
        assert other.read_text() == content


def test_what_is_no_file_is_written_to_or_refused_in_a_sentence(tmp_path):
    files.write_output("/dev/null", CONTENT, MARK)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        (tmp_path / "file").touch()
        for name, reason in (("", "is a folder"), ("socket", "cannot be written"), ("file/x", "cannot be written")):
            with pytest.raises(UserError, match=reason):
                files.write_output(tmp_path / name, CONTENT, MARK)


def test_the_summary_of_a_job_is_appended_to_whatever_its_path_is_called(tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.chdir(tmp_path)
    files.write_output(summary, CONTENT, MARK)
    for path in (os.path.join(".", "..", tmp_path.name, "summary.md"), "summary.md"):
        summary.write_text("from another step\n")
        files.write_output(path, CONTENT, MARK)
        assert summary.read_text() == "from another step\n" + CONTENT
