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
    "results": b'{"results": {}, "configs": {}}',
    "weights": (2).to_bytes(8, "little") + b"{}\x00\xff",
    "what another command wrote": f"<!-- {files.marker('lpes-eval toy')} -->".encode(),
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
    (tmp_path / "new").touch()
    for _ in ("filled", "replaced"):
        assert cli.main([*command, str(tmp_path / "new")]) == 0
