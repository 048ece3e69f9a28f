"""The ``lpes-eval`` command itself; its subcommands are tested with what they do."""

import os
import subprocess
import sys

import pytest

from lpes_eval import cli

COMMANDS = ("factors", "compare", "regress", "report", "attention", "watch", "push", "diagnose", "search")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", [f"\n    {name}" for name in COMMANDS]),
        ("search", ["default: all the same)", "(default: 96)"]),
    ],
)
def test_help_names_every_subcommand_and_default_and_needs_no_heavy_package(words, named):
    program = (
        "import atexit, sys\nfrom lpes_eval import cli\n"
        "heavy = {'numpy', 'scipy', 'torch', 'transformers', 'lm_eval', 'datasets', 'tqdm'}\n"
        "atexit.register(lambda: print('HEAVY', heavy & set(sys.modules)))\ncli.main()"
    )
    command, env = [sys.executable, "-c", program, *words.split(), "--help"], os.environ | {"COLUMNS": "1000"}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    assert "HEAVY set()" in shown
    assert all(text in shown for text in named)


def test_ctrl_c_ends_a_command_in_one_line(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("lpes_eval.show.run", interrupted)
    assert cli.main(["factors", "1.5"]) == 130
    assert capsys.readouterr().err == "\nlpes-eval: stopped\n"
