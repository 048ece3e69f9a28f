"""What the pages say works: their programs run, their commands parse, their links lead somewhere."""

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
    page
    for pattern in ("*.md", "docs/*.md", "tasks/*/README.md", "benchmarks/*/*.md", "lpes_eval/reference/*/README.md")
    for page in sorted(REPOSITORY.glob(pattern))
]
FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
COMMAND = re.compile(r"lm_eval |lpes-eval (?!@)|python (-m )?(lpes_eval|search|benchmarks|tests)\b")


def name(page):
    return str(page.relative_to(REPOSITORY))


def programs(page):
    return [text for kind, text in FENCED.findall(page.read_text(encoding="utf-8")) if kind == "python"]


def anchors(page):
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for target, heading in LINK.findall(text):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not heading or heading in anchors(file), f"{target}#{heading}"


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=name)
@pytest.mark.usefixtures("threads")
def test_the_programs_of_a_page_run_from_its_top_to_its_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "found").mkdir()  # as a search would have written it
    shutil.copy(REPOSITORY / "lpes_eval/reference/base/factors.json", tmp_path / "found")
    namespace = {"__name__": "__main__"}
    for program in programs(page):
        exec(compile(program, name(page), "exec"), namespace)


def commands(page):
    """The words of every command of ours, and whether it stands in a block and not in a sentence."""
    text = page.read_text(encoding="utf-8")
    blocks = [block for kind, block in FENCED.findall(text) if kind in ("", "sh", "bash")]
    lines = [(line, True) for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]
    variables = dict(re.findall(r"^([A-Z]+)='?(.*?)'?$", text, re.M))
    for line, whole in lines + [(span, False) for span in re.findall(r"`([^`\n]+)`", FENCED.sub("", text))]:
        for command in re.split(r" && | > | \| ", line):
            if COMMAND.match(command):
                words = shlex.split(command, comments=True)
                yield tuple(re.sub(r"\$(\w+)", lambda m: variables.get(m[1], m[0]), word) for word in words), whole


class Parsed(BaseException):
    """A command has read its flags, and is not to do anything."""


def parse(words, monkeypatch):
    """Begin the command, and stop it as soon as its flags are read; returns them."""
    read = argparse.ArgumentParser.parse_args

    def read_and_stop(self, *arguments, **options):
        raise Parsed(read(self, *arguments, **options))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read_and_stop)
    program, *arguments = [word for word in words if word not in ("python", "-m")]
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
    from lpes_eval.harness.settings import refuse_unknown

    manager, others = task_manager(), Path(lm_eval.__file__).parent / "tasks"
    for words, whole in dict.fromkeys(commands(page)):
        if words[:2] == ("python", "-m"):
            assert importlib.util.find_spec(words[2]), shlex.join(words)
        if "--help" in words or len(words) < 2 + (words[0] == "python") + (words[1] == "-m"):
            continue
        with monkeypatch.context() as patch:
            try:
                flags = parse(words, patch)
            except SystemExit:
                said = capsys.readouterr().err
                part_of_one = not whole and "arguments are required" in said
                assert part_of_one, f"{shlex.join(words)}: {said}"
                continue
        if "--tasks" in words and "train" not in words:
            for task in ",".join([flags.tasks] if isinstance(flags.tasks, str) else flags.tasks).split(","):
                assert manager.match_tasks([task]) or (others / task).exists(), f"{shlex.join(words)}: no task {task}"
            refuse_unknown(getattr(flags, "metadata", None) or {})
            assert (getattr(flags, "model", None) or "lpes") in ("hf", *methods.names()), shlex.join(words)


def accuracy(folder):
    (file,) = folder.rglob("results_*.json")
    return json.loads(file.read_text())["results"]["kv_retrieval"]["acc,none"]


@pytest.mark.slow
def test_on_the_way_to_production_what_is_served_is_what_was_found_and_better_than_the_plain_model(tmp_path):
    """docs/from-model-to-production.md, walked from its top to its bottom on the reference model."""
    page = REPOSITORY / "docs" / "from-model-to-production.md"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for kind, program in FENCED.findall(page.read_text(encoding="utf-8")):
        command = [sys.executable, "-c"] if kind == "python" else ["bash", "-euo", "pipefail", "-c"]
        subprocess.run([*command, program], cwd=tmp_path, env=environment, check=True)
    assert accuracy(tmp_path / "again") == accuracy(tmp_path / "scaled") > accuracy(tmp_path / "plain")
