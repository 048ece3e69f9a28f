"""How the plain ``lm_eval`` command finds this package's models and tasks.

lm-eval 0.4.13 looks for neither in other packages. So an install puts a small hook into Python's start-up
(``_lpes_eval_hook``) that calls ``extend`` after each of two modules of ``lm_eval`` is imported.
``LPES_EVAL_PLUGIN=0`` turns it off. ``follow_evaluations`` and ``separate_caches`` are patched in by our own modules.
Where another version of lm-eval breaks a part of ours, a line says so, and lm-eval goes on without it.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from lpes_eval import methods
from lpes_eval.errors import UserError

logger = logging.getLogger(__name__)

ALIASED = ("lpes_leval", "lpes_zeroscrolls")
"""Benchmarks whose groups, tags and tasks also go by their names without ``lpes_``, while nobody else has these."""

_lm: ContextVar[Any] = ContextVar("lm", default=None)


def current_lm() -> Any:
    """The lm-eval model that is being evaluated now, or None outside an evaluation."""
    return _lm.get()


@contextmanager
def evaluating(lm: Any) -> Iterator[None]:
    """Make ``lm`` the ``current_lm()``."""
    token = _lm.set(lm)
    try:
        yield
    finally:
        _lm.reset(token)


def tasks_folder() -> Path:
    """Where the task YAML is: inside the installed package, or beside it in a clone."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "tasks"
    return installed if installed.is_dir() else package.parent / "tasks"


def own_tasks(metadata: Mapping[str, Any]) -> Any:
    """lm-eval's manager of our tasks alone, which are told ``metadata``."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(tasks_folder()), include_defaults=False, metadata=dict(metadata))


def add_parser(subparsers: Any) -> None:
    """``lpes-eval tasks-path``."""
    parser = subparsers.add_parser("tasks-path", help="print the folder of the tasks, for lm_eval --include_path")
    parser.set_defaults(run=lambda arguments: print(tasks_folder()) or 0)


@contextmanager
def _ours(part: str) -> Iterator[None]:
    """A part of ours in a call of lm-eval's: if it breaks, say so and go on."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        logger.warning("lpes-eval could not %s (%r); LPES_EVAL_PLUGIN=0 turns its extensions off", part, error)


def _around(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Call ``function`` in place of a function of lm-eval's, with that one before its arguments."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(lambda *args, **options: function(original, *args, **options)))


def extend_models(registry: ModuleType) -> None:
    """``lm_eval.api.registry``: add our model types, imported when they are used; a built-in of the same name wins."""
    if hasattr(registry, "import_plugins"):  # it reads our entry points itself
        return
    import lm_eval.models  # noqa: F401  (the built-in names, so that they come first)

    for name in methods.names():
        if name not in registry.model_registry:
            registry.model_registry.register(name, target=f"{methods.__name__}.{name}:Method")


def extend_tasks(manager: ModuleType) -> None:
    """``lm_eval.tasks.manager``: every ``TaskManager`` with the default tasks knows ours too; others' names win."""
    build, defaults = manager.TaskIndex.build, Path(str(manager.__file__)).parent

    def build_with_ours(paths: Sequence[Path], **options: Any) -> dict[str, Any]:
        ours = [tasks_folder()] if defaults in paths and tasks_folder() not in paths else []
        return build([*ours, *paths], **options)

    def init(original: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        with _ours("add its tasks to the task manager"):
            _add_members(self)
            for name in [name for name in self.task_index if name.startswith(ALIASED)]:
                self.task_index.setdefault(name.removeprefix("lpes_"), self.task_index[name])
            self._all_tasks = sorted(self.task_index)

    def load(original: Callable[..., Any], self: Any, task_list: Any) -> Any:
        for name in map(str, task_list if isinstance(task_list, list) else [task_list]):
            full = name if name.startswith(ALIASED) else f"lpes_{name}"
            if (named := self.task_index.get(name)) is None or (ours := self.task_index.get(full)) is None:
                continue
            if ours.yaml_path is not None and tasks_folder() not in ours.yaml_path.parents:
                logger.warning("%s is not lpes-eval's, but of %s", name, named.yaml_path)
            elif named is not ours:
                logger.warning("%s is not lpes-eval's, which is called %s, but another task", name, full)
            elif name != full:
                logging.getLogger("lm_eval").info("%s: this is %s of lpes-eval", name, full)
        return original(self, task_list)

    manager.TaskIndex.build = staticmethod(build_with_ours)
    _around(manager.TaskManager, "__init__", init)
    _around(manager.TaskManager, "load", load)
    with _ours("check commands early"):
        _extend_command()
    separate_caches()


def _add_members(manager: Any) -> None:
    """Let ``--tasks`` take names and tags of tasks that a group defines in place (``task``, ``class``); others win."""
    from lm_eval.tasks.manager import TaskIndex, load_yaml

    def in_place(group: Mapping[str, Any]) -> list[dict[str, Any]]:
        members = group.get("task")
        members = members if isinstance(members, list) else []
        return [member for member in members if isinstance(member, dict) and {"task", "class"} <= set(member)]

    index = manager.task_index
    for group in manager.all_groups:
        for member in in_place(load_yaml(index[group].yaml_path)) if in_place(index[group].cfg or {}) else ():
            if member["task"] not in index:
                TaskIndex.process_cfg(member, None, index)


@functools.cache
def follow_evaluations() -> None:
    """Let tasks see the model that ``lm_eval.evaluate`` evaluates (``current_lm``), and its results afterwards."""
    from lm_eval import evaluator

    def evaluate(original: Callable[..., Any], lm: Any, task_dict: Any, *args: Any, **options: Any) -> Any:
        with evaluating(lm):
            results = original(lm, task_dict, *args, **options)
        with _ours("look at the results"):
            for name, task in task_dict.get("tasks", {}).items() if results else ():
                if hasattr(task, "after_evaluation"):
                    task.after_evaluation(results["results"][name])
        return results

    _around(evaluator, "evaluate", evaluate)


@functools.cache
def separate_caches() -> None:
    """``--use_cache`` knows answers by the request alone: give each set of factors a file of its own."""
    from lm_eval.api.model import CachingLM

    def init(original: Callable[..., None], self: Any, lm: Any, cache_db: str, *args: Any, **options: Any) -> None:
        # Only our models have a key. One that fails is an error: without it, answers under other factors would be used.
        key: Any = getattr(lm, "cache_key", None)
        module: Any = getattr(lm, "model", None)
        if key is None and hasattr(module, "modules"):  # such as hf, around a model with factors or a method
            from lpes_eval import rope, weights

            if (factors := rope.applied(module)) is not None:
                key = weights.cache_key(lm, "lpes", {"factors": factors})
            elif (name := rope.method_in(module)) is not None:
                found = f"--use_cache: {name} was put into this model, and its settings are not known here"
                raise UserError(f"{found}; use lm_eval's model type of that name")
        if key:
            stem, suffix = os.path.splitext(cache_db)
            cache_db = f"{stem}_{key}{suffix}"
        original(self, lm, cache_db, *args, **options)

    _around(CachingLM, "__init__", init)


@functools.cache
def _extend_command() -> None:
    """Check what ``lm_eval`` was asked before anything is loaded, and end with one line where the user can help it."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    def process_tasks(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
        sys.excepthook = functools.partial(_one_line, sys.excepthook)
        with _ours("check the command early"):
            _check_early(self)
        return original(self, *args, **options)

    _around(EvaluatorConfig, "process_tasks", process_tasks)  # which the command does first


def _one_line(before: Callable[..., Any], kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """Python's hook for an error that nobody caught: of the user's errors print the message, and exit with 2."""
    if not issubclass(kind, UserError):
        return before(kind, error, traceback)
    sys.stderr.write(f"lm_eval: error: {error}\n")
    raise SystemExit(2)


def _check_early(config: Any) -> None:
    """Refuse what no model is needed to refuse: factors that cannot be read, and examples that cannot be had."""
    arguments = config.model_args or {}
    if config.model == "lpes" and arguments.get("factors") is not None:
        from lpes_eval import factors

        factors.parse(arguments["factors"])
    if config.apply_chat_template and config.model in ("hf", *methods.names()):
        from lpes_eval.harness.budget import require_named_chat_template

        require_named_chat_template(arguments)
    if config.tasks and not config.include_path:
        named = [config.tasks] if isinstance(config.tasks, str) else config.tasks
        typed = {key: value for key, value in (config.metadata or {}).items() if key not in arguments}
        check_examples([name for text in named for name in text.split(",")], arguments, typed)


def check_examples(tasks: Sequence[str], arguments: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Load the examples of those of ``tasks`` that are ours; refuse what they refuse, and settings that none takes."""
    from lpes_eval.harness.settings import refuse_unknown

    manager = own_tasks({**arguments, **metadata})
    if all(manager.match_tasks([name]) for name in tasks):
        refuse_unknown(metadata)
    manager.load(manager.match_tasks(list(tasks)))


EXTENSIONS = {"lm_eval.api.registry": extend_models, "lm_eval.tasks.manager": extend_tasks}  # as the hook's MODULES


def extend(module: ModuleType) -> None:
    """Extend a module of lm-eval that has just been imported; what the hook calls."""
    EXTENSIONS[module.__name__](module)
