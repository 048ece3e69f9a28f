"""The ``lpes-eval`` command itself; its subcommands are tested with what they do."""

import subprocess
import sys

import pytest

import lpes_eval
from lpes_eval import cli


def test_command_starts_without_the_heavy_packages():
    program = (
        "import sys\nfrom lpes_eval import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print('HEAVY', sorted({'numpy', 'scipy', 'torch', 'transformers', 'lm_eval', 'datasets'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "HEAVY []" in found.stdout


def test_help_names_every_subcommand(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    printed = capsys.readouterr().out
    for command in ("factors", "compare", "regress", "report", "attention", "watch", "search"):
        assert f"\n    {command}" in printed


def test_search_is_the_command_of_that_name(capsys):
    assert cli.main(["search", "--examples", "0"]) == 2
    assert "--examples: expected at least 1, not 0" in capsys.readouterr().err


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"lpes-eval {lpes_eval.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "regress results.json",
        "compare a.json",
        "compare a b --confidence 95",
        "regress a --baseline b --alpha nan",
        "regress a --baseline b --tolerance -1",
    ],
)
def test_wrong_arguments_are_2(arguments):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments.split())


@pytest.mark.parametrize("arguments", [["compare", "a.json", "b.json"], ["regress", "a.json", "--baseline", "b.json"]])
def test_error_of_the_user_is_one_line_and_2(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("lpes-eval: error: a.json: no such file or folder")
    assert printed.err.count("\n") == 1


def test_report_that_cannot_be_written_is_an_error_of_the_user(tmp_path):
    from lpes_eval.compare import tables
    from lpes_eval.errors import UserError

    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        tables.write(str(tmp_path / "file" / "tables.md"), "text")
