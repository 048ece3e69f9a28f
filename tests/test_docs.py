"""What the documentation says to type works: its programs run, and its commands have the flags that they name."""

import argparse
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(REPOSITORY.glob("docs/*.md")),
    *sorted(REPOSITORY.glob("tasks/*/README.md")),
    *sorted(REPOSITORY.glob("lpes_eval/reference/*/README.md")),
]
FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)
COMMANDS = ("lm_eval", "lpes-eval", "python")
OURS = re.compile(r"(lpes_eval|search|benchmarks|tests)\b")


def name(page):
    return str(page.relative_to(REPOSITORY))


def programs(page):
    """The Python blocks of a page, each with so many empty lines before it that an error names the page's line."""
    text = page.read_text(encoding="utf-8")
    return [
        "\n" * (text[: block.start()].count("\n") + 1) + block[2]
        for block in FENCED.finditer(text)
        if block[1] == "python"
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=name)
@pytest.mark.usefixtures("threads")
def test_the_programs_of_a_page_run_from_its_top_to_its_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "found").mkdir()  # as a search would have written it
    shutil.copy(REPOSITORY / "lpes_eval/reference/base/factors.json", tmp_path / "found")
    namespace = {"__name__": "__main__"}
    for program in programs(page):
        exec(compile(program, name(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_line_of_text_begins_with_a_comment(page):
    """Markdown takes such a line for HTML, and shows its code as it was typed."""
    assert not re.search(r"^<!--.*-->.*`", page.read_text(encoding="utf-8"), re.M)


def commands(page):
    """The words of every command of ours on a page, and whether it stands alone, not in a sentence."""
    text = page.read_text(encoding="utf-8")
    for block in FENCED.finditer(text):
        if block[1] in ("", "sh", "bash") and any(word in block[2] for word in COMMANDS):
            variables = {}
            for line in re.sub(r"\\\n", " ", block[2]).splitlines():
                try:
                    words = shlex.split(line, comments=True)
                except ValueError:  # a text of several lines
                    continue
                if len(words) == 1 and (assigned := re.fullmatch(r"(\w+)=(.*)", words[0])):
                    variables[f"${assigned[1]}"] = assigned[2]
                for variable, value in variables.items():
                    words = [word.replace(variable, value) for word in words]
                yield from ((one, True) for one in single(words))
    for span in re.findall(r"(?<!`)`([^`\n]+)`", FENCED.sub("", text)):
        if span.split()[0] in COMMANDS and not span.startswith("lpes-eval @"):
            yield from ((one, False) for one in single(shlex.split(span)))


def single(words):
    """The commands that ``&&`` joins, as far as they are for a module of Python or ours."""
    joined = [[]]
    for word in words:
        joined.append([]) if word == "&&" else joined[-1].append(word)
    for command in joined:
        if command and command[0] in COMMANDS:
            yield tuple(command[: command.index(">")] if ">" in command else command)


class Parsed(BaseException):
    """A command has read its flags, and is not to do anything."""


def parse(words, monkeypatch):
    """Begin the command, and stop it as soon as its flags are read; returns them."""
    read = argparse.ArgumentParser.parse_args

    def read_and_stop(self, *arguments, **options):
        raise Parsed(read(self, *arguments, **options))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read_and_stop)
    program, *arguments = words[1:] if words[0] == "python" else words
    if program == "-m":
        program, *arguments = arguments
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    try:
        if program == "lm_eval":
            from lm_eval._cli.harness import HarnessCLI

            HarnessCLI().parse_args()
        elif program == "lpes-eval":
            from lpes_eval import cli

            cli.main(arguments)
        elif program.endswith(".py"):
            runpy.run_path(str(REPOSITORY / program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except Parsed as parsed:
        return parsed.args[0]
    raise AssertionError(f"{shlex.join(words)}: ended without reading its flags")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import:RuntimeWarning")
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_commands_of_a_page_have_the_flags_tasks_and_models_that_they_name(page, task_manager, monkeypatch, capsys):
    import lm_eval

    from lpes_eval import methods
    from lpes_eval.harness.settings import refuse_misspelt

    manager, others = task_manager(), Path(lm_eval.__file__).parent / "tasks"
    for words, alone in dict.fromkeys(commands(page)):
        command = shlex.join(words)
        if words[:2] == ("python", "-m"):
            assert importlib.util.find_spec(words[2]), command
        bare = 3 if words[1:2] == ("-m",) else 1
        if len(words) == bare or words[1] == "-c" or (words[1] == "-m" and not OURS.match(words[2])):
            continue
        with monkeypatch.context() as patch:
            try:
                flags = parse(words, patch)
            except (SystemExit, AssertionError) as error:
                said = f"{capsys.readouterr().err} {error}"
                part_of_one = not alone and "arguments are required" in said
                assert "--help" in words or part_of_one, f"{command}: {said}"
                continue
        if "--tasks" not in words or "train" in command:
            continue
        named = flags.tasks if isinstance(flags.tasks, list) else [flags.tasks]
        for task in ",".join(named).split(","):
            assert manager.match_tasks([task]) or (others / task).exists(), f"{command}: no task {task}"
        refuse_misspelt(getattr(flags, "metadata", None) or {}, complete=True)
        assert (getattr(flags, "model", None) or "lpes") in ("hf", *methods.names()), command


def accuracy(folder):
    (file,) = folder.rglob("results_*.json")
    return json.loads(file.read_text())["results"]["kv_retrieval"]["acc,none"]


@pytest.mark.slow
def test_on_the_way_to_production_what_is_served_is_what_was_found_and_better_than_the_plain_model(tmp_path):
    """docs/from-model-to-production.md, walked from its top to its bottom on the reference model."""
    page = REPOSITORY / "docs" / "from-model-to-production.md"
    blocks = FENCED.findall(page.read_text(encoding="utf-8"))
    assert [kind for kind, _ in blocks] == ["sh", "sh", "sh", "python", "sh"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for kind, program in blocks:
        command = [sys.executable, "-c"] if kind == "python" else ["bash", "-euo", "pipefail", "-c"]
        subprocess.run([*command, program], cwd=tmp_path, env=environment, check=True)
    assert accuracy(tmp_path / "again") == accuracy(tmp_path / "scaled") > accuracy(tmp_path / "plain")
