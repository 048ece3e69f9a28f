"""The plain lm_eval command finds models and tasks, and a Python that never imports lm_eval is left alone."""

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from lpes_eval import methods
from lpes_eval.harness import plugin

ROOT = Path(__file__).resolve().parents[1]
HOOK = ROOT / "build_backend" / "_lpes_eval_hook.py"


def python(code, cwd, **environment):
    env = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
    ended = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_the_hook_that_is_installed_here_waits_for_exactly_what_the_plugin_extends():
    assert any(type(finder).__module__ == "_lpes_eval_hook" for finder in sys.meta_path), "pip install -e ."
    assert set(plugin.EXTENSIONS) == set(sys.modules["_lpes_eval_hook"].MODULES)


def test_a_python_that_never_imports_lm_eval_imports_nothing_of_it(tmp_path):
    loaded = python("import sys; print(*sorted(m for m in sys.modules if 'lm_eval' in m or 'lpes' in m))", tmp_path)
    assert set(loaded.split()) == {"_lpes_eval_hook"}
    tree = ast.parse(HOOK.read_text())
    top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert top == {"os", "sys"}


def test_one_environment_variable_turns_it_off(tmp_path):
    code = "from lm_eval.api.registry import model_registry as r; print('lpes' in r)"
    assert python(code, tmp_path) == "True"
    assert python(code, tmp_path, LPES_EVAL_PLUGIN="0") == "False"


def test_from_any_folder_a_task_manager_knows_the_tasks_and_keeps_other_peoples(tmp_path):
    for name in ("kv_retrieval", "leval_tpo"):  # the second one is defined in place in ours
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\ndataset_path: mine\n")
    code = f"""
from lm_eval.tasks import TaskManager
manager = TaskManager(include_path={str(tmp_path)!r})
assert 'kv_retrieval_300' in manager.all_subtasks and 'leval' in manager.all_groups
assert 'hellaswag' in manager.all_subtasks and 'mmlu' in manager.all_groups
assert 'leval_sci_fi' in manager.all_tasks
print(*(manager.task_index[name].yaml_path for name in ('kv_retrieval', 'leval_tpo')), sep='\\n')
print(len(TaskManager(include_defaults=False).all_tasks))
"""
    mine = [str(tmp_path / f"{name}.yaml") for name in ("kv_retrieval", "leval_tpo")]
    assert python(code, tmp_path).splitlines() == [*mine, "0"]


def test_no_name_of_ours_is_a_built_in_one():
    from lm_eval.models import MODEL_MAPPING
    from lm_eval.tasks._index import TaskIndex

    assert not set(methods.names()) & set(MODEL_MAPPING)
    ours = set(TaskIndex.build([plugin.tasks_folder()]))
    assert "kv_retrieval" in ours
    built_in = Path(sys.modules["lm_eval"].__file__).parent / "tasks"
    folders = {path.name for path in built_in.iterdir()}
    assert not ours & folders  # a built-in task's folder carries its name; the index itself takes seconds to build


def test_what_our_part_cannot_do_is_said_and_what_lm_eval_cannot_do_is_its_own_error(caplog):
    def refuse(*args, **kwargs):
        raise AttributeError("lm-eval's own")

    module = SimpleNamespace(
        evaluate=lambda lm, task_dict: plugin.current_lm(),
        TaskIndex=SimpleNamespace(build=refuse),
        TaskManager=type("TaskManager", (), {"__init__": lambda self: None}),
        __file__=__file__,
    )
    plugin.extend_evaluate(module)
    plugin.extend_tasks(module)
    assert [module.evaluate("m", {}), module.evaluate(lm="m", task_dict={}), plugin.current_lm()] == ["m", "m", None]
    for call in (lambda: module.evaluate("m", nonsense=1), lambda: module.TaskIndex.build([])):
        with pytest.raises((TypeError, AttributeError), match=r"nonsense|lm-eval's own"):
            call()
    assert not caplog.records
    module.TaskManager()  # it has no index
    assert "could not add its tasks" in caplog.text
    assert "LPES_EVAL_PLUGIN=0" in caplog.text


@pytest.fixture
def command(capsys):
    """Begins ``lm_eval`` with these arguments: what it says where it ends at once, nothing where it goes on."""
    from lm_eval._cli.harness import HarnessCLI

    def begun(**given) -> str:
        given = {"model": "hf", "model_args": {}, "metadata": {}, "func": (went_on := []).append, **given}
        try:
            HarnessCLI.execute(None, SimpleNamespace(**given))
        except SystemExit as ended:
            assert ended.code == 2
        said = capsys.readouterr().err
        assert bool(went_on) != said.startswith("lm_eval: error: ")
        return "" if went_on else said.removeprefix("lm_eval: error: ")

    return begun


@pytest.mark.parametrize(
    ("tasks", "metadata", "message"),
    [
        ("kv_retrieval", {"num_keyz": 20}, "num_keyz=20: no setting of this task; expected num_keys=20"),
        ("mmlu,kv_retrieval", {"num_keyz": 20}, "num_keyz=20: no setting of this task; expected num_keys=20"),
        ("kv_retrieval", {"pairs": 20}, "pairs=20: no setting of this task; expected one of chat_prompt, cutting"),
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
    assert "nowhere.json" in command(model="lpes", model_args={"factors": "nowhere.json"})
    assert not command(model=["no", "name"])  # not hashable
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", str(tmp_path))
    named = {"tasks": "mdqa_pos", "model_args": {"pretrained": "org/model"}, "metadata": None}
    assert "is not in the cache" in command(**named)
    assert not command(**named, include_path="mine")


@pytest.mark.parametrize(
    ("typed", "number"), [("factors=1_5", True), ("factor=.1_5", True), ("factors=26_1.json", False)]
)
def test_a_number_that_lm_eval_would_read_as_another_one_is_refused(typed, number, monkeypatch, command):
    monkeypatch.setattr("sys.argv", ["lm_eval", "--model_args", f"pretrained=x,{typed},dtype=float16"])
    said = command()
    assert said.startswith(f"{typed}: lm_eval reads this without the _") if number else not said


def test_what_other_tasks_are_told_is_their_business():
    plugin.check_examples(["mmlu", "kv_retrieval"], {"max_length": 4096}, {"max_seq_lengths": [4096]})
    plugin.check_examples(["kv_retrieval"], {"dtype": "float16"}, {"num_keys": 4, "search_seed": 1})


def test_without_the_extension_a_benchmark_refuses_to_send_what_it_cannot_measure(tmp_path):
    code = """
import lm_eval
from lpes_eval.harness.plugin import own_tasks
manager = own_tasks({})
task = manager.load(['kv_retrieval'])['tasks']['kv_retrieval']
task.build_all_requests(limit=1)
print(len(task.instances))
try:
    lm_eval.simple_evaluate('dummy', tasks=['kv_retrieval'], task_manager=manager, limit=1)
except ValueError as error:
    print(type(error).__name__, error)
"""
    looked_at, refused = python(code, tmp_path, LPES_EVAL_PLUGIN="0").splitlines()[-2:]
    assert looked_at == "6"  # nothing is sent
    assert refused.startswith("UserError kv_retrieval: lm_eval runs without lpes-eval's extension")
    assert "unset LPES_EVAL_PLUGIN" in refused


def test_answers_under_other_factors_are_cached_apart(tmp_path):
    from lm_eval.api.model import CachingLM

    class Model:
        def __init__(self, key):
            self.cache_key = key

        def set_cache_hook(self, hook):
            pass

    paths = [CachingLM(Model(key), str(tmp_path / "cache.db")).cache_db for key in ("aaa", "bbb", None)]
    assert [Path(path).name for path in paths] == ["cache_aaa.db", "cache_bbb.db", "cache.db"]


def test_a_wheel_holds_the_tasks_the_search_the_model_and_the_hook(tmp_path):
    command = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", ".", "-w"]
    subprocess.run([sys.executable, *command, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
        (record,) = (name for name in names if name.endswith("RECORD"))
        recorded = {line.split(",")[0] for line in archive.read(record).decode().splitlines()}
    assert recorded == set(names)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for path in tracked:
        if path.startswith("tasks/") and not path.endswith(".py"):
            assert f"lpes_eval/{path}" in names
        elif path.startswith(("lpes_eval/", "search/")):
            assert path in names
    assert {"lpes_eval.pth", "_lpes_eval_hook.py", "lpes_eval/tasks/kv_retrieval/kv_retrieval.yaml"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "tasks/", "benchmarks/"))]


def test_answers_alone_are_scored_by_nothing(task_manager):
    task = task_manager(num_keys=4).load(["kv_retrieval"])["tasks"]["kv_retrieval"]
    task.override_metric("bypass")
    doc = next(iter(task.test_docs()))
    assert task.process_results(doc, [""] * len(task.positions)) == {"bypass": None}
    assert list(task.aggregation()) == ["bypass"]


def test_every_task_folder_says_what_it_is_and_every_yaml_gives_the_name_it_is_called_by():
    from lm_eval.tasks._index import TaskIndex

    found = list(plugin.tasks_folder().glob("*/*.yaml"))  # lm-eval passes over what it cannot read
    assert {path.stem for path in found} <= set(TaskIndex.build([plugin.tasks_folder()]))
    assert all(path.with_name("README.md").is_file() for path in found)


def test_members_are_selected_by_name_tag_and_pattern_and_listed_as_groups_alone(task_manager):
    manager = task_manager()
    assert manager.match_tasks(["leval_16k_t*"]) == ["leval_16k_tpo", "leval_16k_true_false"]
    assert {"zeroscrolls_gov_report", "zeroscrolls_16k_qa", "lpes_ppl_128k"} <= set(manager.all_tasks)
    listed = [line.split("|")[1].strip() for line in manager.list_all_tasks().splitlines() if line.count("|") > 2]
    assert [name for name in listed if name.startswith("leval")] == ["leval", "leval_16k"]
