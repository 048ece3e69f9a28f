"""The plain lm_eval command finds models and tasks, and a Python that never imports lm_eval is left alone."""

import logging
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from lpes_eval import methods, reference
from lpes_eval.errors import UserError
from lpes_eval.harness import budget, plugin

ROOT = Path(__file__).resolve().parents[1]


def python(*arguments, cwd, status=0, **environment):
    env = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
    command = [sys.executable, *map(str, arguments)]
    ended = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)
    assert ended.returncode == status, ended.stderr
    return (ended.stdout if status == 0 else ended.stderr).strip()


def test_the_hook_that_is_installed_here_waits_for_exactly_what_the_plugin_extends():
    assert any(type(finder).__module__ == "_lpes_eval_hook" for finder in sys.meta_path), "pip install -e ."
    hook = sys.modules["_lpes_eval_hook"]
    assert set(plugin.EXTENSIONS) == set(hook.MODULES)
    before = len(sys.meta_path)
    hook.install()  # Python 3.15 may call it twice
    assert len(sys.meta_path) == before


def test_a_python_that_never_imports_lm_eval_imports_nothing_of_it(tmp_path):
    code = "import sys; print(*sorted(m for m in sys.modules if 'lm_eval' in m or 'lpes' in m))"
    assert set(python("-c", code, cwd=tmp_path).split()) == {"_lpes_eval_hook"}


def test_one_environment_variable_turns_it_off(tmp_path):
    code = "import sys; print('_lpes_eval_hook' in [type(finder).__module__ for finder in sys.meta_path])"
    for value in ("0", "OFF", ""):
        assert python("-c", code, cwd=tmp_path, LPES_EVAL_PLUGIN=value) == "False"
    assert python("-c", code, cwd=tmp_path, LPES_EVAL_PLUGIN="1") == "True"


@pytest.mark.parametrize(("broken", "said"), [("SystemExit(3)", "SystemExit: 3"), ("KeyError('x')", "KeyError: 'x'")])
def test_a_plugin_that_breaks_or_exits_says_so_and_does_not_end_lm_eval(tmp_path, broken, said):
    code = f"""
import sys
sys.stderr = sys.stdout
import lpes_eval.harness.plugin as p
def extend(module): raise {broken}
p.extend = extend
import lm_eval.api.registry
print('here')
"""
    printed = python("-W", "error::UserWarning", "-c", code, cwd=tmp_path)
    assert printed.startswith(f"lpes-eval could not extend lm_eval.api.registry: {said}. lm_eval goes on")
    assert printed.endswith("\nhere")


def test_what_our_part_cannot_do_is_said_and_what_lm_eval_cannot_do_is_its_own_error(caplog):
    def refuse(*args, **kwargs):
        raise AttributeError("lm-eval's own")

    module = SimpleNamespace(
        TaskIndex=SimpleNamespace(build=refuse),
        TaskManager=type("TaskManager", (), {"__init__": lambda self: None, "load": lambda self, names: None}),
        __file__="/lm_eval/tasks/manager.py",
    )
    plugin.extend_tasks(module)
    with pytest.raises(AttributeError, match="lm-eval's own"):
        module.TaskIndex.build([])
    assert not caplog.records
    module.TaskManager()  # it has no index
    assert "could not add its tasks" in caplog.text


@pytest.mark.slow
def test_from_any_folder_a_task_manager_knows_the_tasks_and_keeps_other_peoples(tmp_path):
    for name in ("kv_retrieval", "lpes_leval_tpo", "zeroscrolls"):  # the second one is defined in place in ours
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\ndataset_path: mine\n")
    code = f"""
from lm_eval.tasks import TaskManager
manager = TaskManager(include_path={str(tmp_path)!r})
assert {{'kv_retrieval_300', 'hellaswag'}} <= set(manager.all_subtasks)
assert {{'lpes_leval', 'mmlu'}} <= set(manager.all_groups)
assert {{'lpes_leval_sci_fi', 'leval_sci_fi', 'leval'}} <= set(manager.all_tasks)
for name in ('kv_retrieval', 'lpes_leval_tpo', 'zeroscrolls'):
    print(manager.task_index[name].yaml_path)
print(len(TaskManager(include_defaults=False).all_tasks))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    mine = [str(tmp_path / f"{name}.yaml") for name in ("kv_retrieval", "lpes_leval_tpo", "zeroscrolls")]
    assert ended.stdout.splitlines() == [*mine, "0"], ended.stderr
    assert f"Task 'kv_retrieval' from {mine[0]} overrides existing task from {plugin.tasks_folder()}" in ended.stderr


def test_no_name_of_ours_is_a_built_in_one_and_every_model_type_is_an_entry_point():
    from lm_eval.models import MODEL_MAPPING
    from lm_eval.tasks._index import TaskIndex

    assert not set(methods.names()) & set(MODEL_MAPPING)
    ours = set(TaskIndex.build([plugin.tasks_folder()]))
    assert "kv_retrieval" in ours
    built_in = Path(sys.modules["lm_eval"].__file__).parent / "tasks"
    folders = {path.name for path in built_in.iterdir()}
    assert not ours & folders  # a built-in task's folder carries its name; the index itself takes seconds to build
    declared = {one.name: one.value for one in entry_points(group="lm_eval.models") if "lpes_eval" in one.value}
    assert declared == {name: f"lpes_eval.methods.{name}:Method" for name in methods.names()}


def test_where_lm_eval_reads_entry_points_the_hook_registers_nothing():
    plugin.extend_models(SimpleNamespace(import_plugins=print))  # it has no registry: to touch it would fail


@pytest.fixture
def command(monkeypatch):
    """Begins ``lm_eval`` with these arguments: what it says where it ends at once, nothing where it goes on."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def begun(model_args=None, metadata=None, **given) -> str:
        arguments = model_args or {}
        usual = {"model": "hf", "tasks": "mmlu", "apply_chat_template": False, "include_path": None}
        told = {"model_args": arguments, "metadata": arguments | (metadata or {})}
        try:
            plugin._check_early(SimpleNamespace(**usual | given | told))
        except ValueError as error:
            return str(error)
        return ""

    return begun


@pytest.mark.parametrize(
    ("tasks", "metadata", "message"),
    [
        ("kv_retrieval", {"pairs": 20}, "pairs=20: no setting of this task; expected one of data_dir, length"),
        ("kv_retrieval*", {"data_dir": "/nowhere"}, "data_dir=/nowhere: no such folder"),
        ("mdqa_pos", {"split": "serach"}, "split='serach' is not a split; expected one of held_out, search"),
        ("leval", {}, "L-Eval has no generated set"),
    ],
)
def test_examples_that_cannot_be_had_end_the_command_before_a_model_is_loaded(command, tasks, metadata, message):
    assert command(tasks=tasks, metadata=metadata).startswith(message)


def test_only_what_the_user_can_fix_ends_the_command_and_no_examples_of_other_peoples_tasks(
    command, tmp_path, monkeypatch
):
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", str(tmp_path))
    named = {"tasks": "mdqa_pos", "model_args": {"pretrained": "org/model"}}
    assert "is not in the cache" in command(**named)
    assert not command(**named, include_path="mine")


def test_a_chat_template_that_is_not_there_is_refused_by_the_tokenizer_alone(command, tmp_path):
    base = {"pretrained": str(reference.path())}
    assert "has no chat template; leave it out" in command(model_args=base, apply_chat_template=True)
    assert not command(model_args=base)
    assert not command(model_args={"pretrained": str(tmp_path)}, apply_chat_template=True)  # its loading says why


THINKING = "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"


@pytest.mark.parametrize(
    ("template", "prompt", "given", "said"),
    [
        (THINKING, "Q", {}, "enable_thinking=False, or give it room"),
        ("<｜Assistant｜><think>\n", "Q<think>\n", {}, "think_end_token=</think>"),
        ("[THINK]", "Q", {"think_end_token": "[/THINK]"}, "think_end_token=[/THINK]"),  # but 100 tokens
        (THINKING, "Q<think>\n\n</think>\n\n", {}, ""),
        (THINKING, "Q", {"enable_thinking": False}, ""),
        ("{{ tag }}", "Q<think>\n", {"enable_thinking": False}, "think_end_token=</think>"),  # as it asks all the same
        ("<|channel|>analysis", "Q", {}, "think_end_token=<|end|>"),
        (None, "Q", {}, ""),
    ],
)
def test_a_template_that_lets_the_model_think_is_warned_of_with_what_to_set(template, prompt, given, said, caplog):
    lm = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template), **given)
    budget.warn_of_thoughts(lm, prompt, 100, f"kv {template}{prompt}{given}")
    assert said in caplog.text
    assert bool(said) == bool(caplog.records)


def test_what_other_tasks_are_told_is_their_business():
    plugin.check_examples(["mmlu", "kv_retrieval"], {"max_length": 4096}, {"max_seq_lengths": [4096]})
    plugin.check_examples(["kv_retrieval"], {"dtype": "float16"}, {"num_keys": 4, "search_seed": 1})


LM_EVAL = ("-m", "lm_eval", "--tasks", "kv_retrieval", "--limit", "1", "--metadata", "num_keys=4", "--device", "cpu")


PLUGINS = """
def import_plugins():
    from importlib.metadata import entry_points
    for one in entry_points(group="lm_eval.models"):
        model_registry.register(one.name, target=one.value)
def get_model(name, get_model=get_model):
    import lm_eval.models
    import_plugins()
    return get_model(name)
"""  # as lm-eval's main branch reads entry points


@pytest.mark.slow
def test_with_the_hook_and_without_it_the_same_table(tmp_path):
    def table(*arguments, **environment):
        lines = python(*LM_EVAL, *arguments, cwd=tmp_path, **environment).splitlines()
        return [line for line in lines if line.startswith("|")]

    hooked = table("--model", "lpes")
    assert any("first_value_acc@0" in line for line in hooked)
    by_path = ("--include_path", python("-m", "lpes_eval.cli", "tasks-path", cwd=tmp_path))
    plain = ("--model", "hf", "--model_args", f"pretrained={reference.path()}")
    assert table(*plain, *by_path, LPES_EVAL_PLUGIN="off") == hooked
    import lm_eval

    shutil.copytree(Path(lm_eval.__file__).parent, tmp_path / "next/lm_eval")
    with (tmp_path / "next/lm_eval/api/registry.py").open("a") as registry:
        registry.write(PLUGINS)
    later = {"PYTHONPATH": str(tmp_path / "next")}
    assert table("--model", "lpes", **later) == hooked
    assert table("--model", "lpes", *by_path, LPES_EVAL_PLUGIN="0", **later) == hooked


def test_a_users_error_ends_the_command_with_one_line_and_status_2(capsys):
    others = []
    with pytest.raises(SystemExit) as ended:
        plugin._one_line(others.append, UserError, UserError("no such factors"), None)
    assert (ended.value.code, capsys.readouterr().err) == (2, "lm_eval: error: no such factors\n")
    plugin._one_line(lambda *error: others.append(error), KeyError, KeyError("x"), None)
    assert others[0][0] is KeyError


def test_a_benchmark_refuses_to_send_what_it_cannot_measure(task_manager):
    task = task_manager().load(["kv_retrieval"])["tasks"]["kv_retrieval"]
    task.build_all_requests(limit=1)
    assert len(task.instances) == 6  # nothing is sent
    with pytest.raises(ValueError, match=r"kv_retrieval: lm_eval.evaluate was imported before this task"):
        task.build_all_requests(limit=1, rank=0)


def test_a_wheel_holds_the_tasks_the_search_the_model_and_the_hook(tmp_path):
    python("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", ".", "-w", tmp_path, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (record,) = (name for name in names if name.endswith("RECORD"))
        recorded = {line.split(",")[0] for line in archive.read(record).decode().splitlines()}
        assert archive.read("lpes_eval.start").decode().strip() == "_lpes_eval_hook:install"  # PEP 829
    assert recorded == set(names)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ours = {path for path in tracked if path.startswith(("lpes_eval/", "search/"))}
    ours |= {f"lpes_eval/{path}" for path in tracked if path.startswith("tasks/")}
    assert ours | {"lpes_eval.pth", "_lpes_eval_hook.py"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "tasks/", "benchmarks/"))]


def test_members_are_selected_by_name_tag_and_pattern_and_listed_as_groups_alone(task_manager, caplog):
    manager = task_manager()
    assert manager.match_tasks(["lpes_leval_t*"]) == ["lpes_leval_tpo", "lpes_leval_true_false"]
    assert {"lpes_zeroscrolls_gov_report", "zeroscrolls_qa", "lpes_ppl_128k"} <= set(manager.all_tasks)
    listed = [line.split("|")[1].strip() for line in manager.list_all_tasks().splitlines() if line.count("|") > 2]
    assert [name for name in listed if "leval" in name] == ["lpes_leval"]
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="no generated set"):
        manager.load("leval")
    assert "leval: this is lpes_leval of lpes-eval" in caplog.text
    manager.task_index["leval"] = manager.task_index["kv_retrieval"]  # somebody else's
    manager.load("leval")
    assert "leval is not lpes-eval's, which is called lpes_leval, but another task" in caplog.text
    other = manager.task_index["lpes_leval_tpo"] = replace(manager.task_index["kv_retrieval"], yaml_path=Path("a.yaml"))
    manager.task_index["leval_tpo"] = other
    with pytest.raises(FileNotFoundError):
        manager.load("leval_tpo")
    assert "leval_tpo is not lpes-eval's, but of a.yaml" in caplog.text
