"""One rule for writing: a command replaces only what it wrote itself."""

import pytest

from lpes_eval import cli, files
from lpes_eval.compare import baseline, results
from runs import write_run

A, B, BASE = "{folder}/a", "{folder}/b", "{folder}/base.json"
OPTIONS = {
    "compare --markdown": ["compare", A, B, "--markdown"],
    "regress --markdown": ["regress", A, "--baseline", BASE, "--markdown"],
    "regress --junit": ["regress", A, "--baseline", BASE, "--junit"],
    "regress --update": ["regress", A, "--update", "--baseline"],
    "report -o": ["report", A, "-o"],
}
OTHERS = {
    "results.json": b'{"results": {}, "configs": {}}',
    "samples.jsonl": b'{"doc_id": 0}\n',
    "factors.json": b'{"format": "lpes-eval factors", "factors": [1.0, 1.25]}',
    "journal.jsonl": b'{"settings": {}}\n',
    "weights.safetensors": (2).to_bytes(8, "little") + b"{}\x00\xff",
    "texts.zip": b"PK\x03\x04",
    "notes.md": b"# Notes\n",
    "page.html": b"<!doctype html><title>mine</title>",
    "table.csv": b"a,b\n1,2\n",
    "tests.xml": b"<testsuites/>",
    "picture.png": b"\x89PNG\r\n",
    "of another command": f"<!-- {files.marker('lpes-eval toy')} -->".encode(),
    "a mark further down": b"x" * files.HEAD + files.marker("lpes-eval compare").encode(),
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
    for name, content in OTHERS.items():
        (tmp_path / name).write_bytes(content)
        assert cli.main([*command, str(tmp_path / name)]) == 2
        assert f"lpes-eval: error: {tmp_path / name}: " in capsys.readouterr().err
        assert (tmp_path / name).read_bytes() == content
    (tmp_path / "link").symlink_to(tmp_path / "factors.json")
    assert cli.main([*command, str(tmp_path / "link")]) == 2
    assert (tmp_path / "link").read_bytes() == OTHERS["factors.json"]
    (tmp_path / "new").touch()
    for _ in ("filled", "replaced"):
        assert cli.main([*command, str(tmp_path / "new")]) == 0


def test_pictures_replace_only_pictures_of_this_package(runs, tmp_path, capsys):
    command = ["report", str(runs / "a"), "-o", str(tmp_path / "report.html"), "--figures", str(tmp_path / "figures")]
    assert cli.main(command) == cli.main(command) == 0
    for picture in (tmp_path / "figures").iterdir():
        picture.write_bytes(OTHERS["picture.png"])
        assert cli.main(command) == 2
        assert f"{picture}: is there and was not written by this command" in capsys.readouterr().err
        assert picture.read_bytes() == OTHERS["picture.png"]
        picture.unlink()


def test_a_jobs_summary_on_github_is_added_to(runs, tmp_path, monkeypatch):
    summary = tmp_path / "summary"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    for name, kind in (("compare --markdown", "symlink_to"), ("regress --markdown", "hardlink_to")):
        getattr(link := tmp_path / kind, kind)(summary)
        assert cli.main([*(word.format(folder=runs) for word in OPTIONS[name]), str(link)]) == 0
    text = summary.read_text()
    assert text.startswith("before\n")
    assert text.index("## lpes-eval compare") < text.index("## lpes-eval regress")
