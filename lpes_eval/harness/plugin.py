"""How the plain ``lm_eval`` command finds this package's models and tasks.

lm-eval 0.4.13 looks for neither in other packages. So an ordinary or editable install puts a small hook into Python's
start-up (``_lpes_eval_hook``, standard library only) that waits for ``lm_eval`` to be imported and then lets the
functions below extend it. Nothing of lm-eval is imported, and nothing happens, in a Python that does not import it;
``LPES_EVAL_PLUGIN=0`` turns it off.

Each ``extend_*`` takes the module of lm-eval that has just been imported.

Whatever another version of lm-eval has changed, lm-eval itself still runs: where a part of ours fails, a line says so,
and lm-eval goes on without it. Benchmarks whose prompts may not be cut then refuse to run (``lpes_eval.harness.task``).
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from lpes_eval import methods
from lpes_eval.errors import FactorsError, UserError

logger = logging.getLogger(__name__)

_lm: ContextVar[Any] = ContextVar("lm", default=None)


def current_lm() -> Any:
    """The lm-eval model that is being evaluated now, or None outside an evaluation."""
    return _lm.get()


@contextmanager
def evaluating(lm: Any) -> Iterator[None]:
    """Make ``lm`` the ``current_lm()``, for whoever builds requests without ``lm_eval.evaluate``."""
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
    """lm-eval's manager of our tasks alone, which are told ``metadata``; an index of all tasks takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(tasks_folder()), include_defaults=False, metadata=dict(metadata))


@contextmanager
def _ours(part: str) -> Iterator[None]:
    """What we add to a call of lm-eval's: if it breaks, say so and go on. lm-eval's own part never stands here."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        logger.warning("lpes-eval could not %s (%r); LPES_EVAL_PLUGIN=0 turns its extensions off", part, error)


# -- called by the import hook ---------------------------------------------------------------------------------------


def extend_models(registry: ModuleType) -> None:
    """``lm_eval.api.registry``: add our model types, imported when they are used; a built-in of the same name wins."""
    import lm_eval.models  # noqa: F401  (the built-in names, so that they come first)

    for name in methods.names():
        if name not in registry.model_registry:
            registry.model_registry.register(name, target=f"{methods.__name__}.{name}:Method")


def extend_tasks(manager: ModuleType) -> None:
    """``lm_eval.tasks.manager``: every ``TaskManager`` with the default tasks knows ours too.

    Built-in tasks and those of ``--include_path`` win over ours.
    """
    build, init = manager.TaskIndex.build, manager.TaskManager.__init__
    defaults = Path(str(manager.__file__)).parent

    def build_with_ours(paths: Sequence[Path], **options: Any) -> dict[str, Any]:
        return (build([tasks_folder()], **options) if defaults in paths else {}) | build(paths, **options)

    @functools.wraps(init)
    def init_with_members(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        with _ours("add its tasks to the task manager"):
            _add_members(self)

    manager.TaskIndex.build = staticmethod(build_with_ours)
    manager.TaskManager.__init__ = init_with_members


def _add_members(manager: Any) -> None:
    """Let ``--tasks`` take the names and tags of the tasks that a group's YAML defines in place.

    lm-eval knows one name a file, and a benchmark of many parts would need a file for each part and size. A member
    defined in place has ``task`` and ``class``; names that the manager has already win. ``lm_eval ls`` lists groups.
    """
    from lm_eval.tasks.manager import TaskIndex, load_yaml

    def in_place(group: Mapping[str, Any]) -> list[dict[str, Any]]:
        members = group.get("task") if isinstance(group.get("task"), list) else []
        return [member for member in members or () if isinstance(member, dict) and {"task", "class"} <= set(member)]

    index = manager.task_index
    for group in manager.all_groups:
        if in_place(index[group].cfg or {}):
            for member in in_place(load_yaml(index[group].yaml_path)):
                if member["task"] not in index:
                    TaskIndex.process_cfg(member, None, index)
    manager._all_tasks = sorted(index)


def extend_evaluate(evaluator: ModuleType) -> None:
    """``lm_eval.evaluator``: let the tasks see the model that is being evaluated."""
    original = evaluator.evaluate

    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        with evaluating(args[0] if args else kwargs.get("lm")):
            return original(*args, **kwargs)

    setattr(evaluator, "evaluate", evaluate)  # noqa: B010  (a module, to the type checker)


def extend_cache(model: ModuleType) -> None:
    """``lm_eval.api.model``: ``--use_cache`` knows answers by the request alone, so each set of factors has a file."""
    original = model.CachingLM.__init__

    @functools.wraps(original)
    def init(self: Any, lm: Any, cache_db: str, *args: Any, **kwargs: Any) -> None:
        # Only our models have a key. One that fails is an error: without it, answers under other factors would be used.
        key, module = getattr(lm, "cache_key", None), getattr(lm, "model", None)
        if key is None and module is not None and hasattr(module, "modules"):
            from lpes_eval import rope, weights

            # Another model type, as hf, around a model that has factors in it.
            if (factors := rope.applied(module)) is not None:
                key = weights.cache_key(module, "lpes", {"factors": factors})
        if key:
            stem, suffix = os.path.splitext(cache_db)
            cache_db = f"{stem}_{key}{suffix}"
        original(self, lm, cache_db, *args, **kwargs)

    model.CachingLM.__init__ = init


def extend_command(harness: ModuleType) -> None:
    """``lm_eval._cli.harness``: check factors before anything is loaded, and end with one line where the user can."""
    original = harness.HarnessCLI.execute

    @functools.wraps(original)
    def execute(self: Any, args: Any) -> None:
        try:
            with _ours("check the factors early"):
                _check_early(args)
            original(self, args)
        except UserError as error:
            sys.stderr.write(f"lm_eval: error: {error}\n")
            raise SystemExit(2) from None

    harness.HarnessCLI.execute = execute


EXTENSIONS: dict[str, Callable[[ModuleType], None]] = {
    "lm_eval.api.registry": extend_models,
    "lm_eval.tasks.manager": extend_tasks,
    "lm_eval.evaluator": extend_evaluate,
    "lm_eval.api.model": extend_cache,
    "lm_eval._cli.harness": extend_command,
}
"""Module of lm-eval -> what to do once it is imported. The hook keeps the same names."""


def extend(module: ModuleType) -> None:
    """Extend a module of lm-eval that has just been imported; what the hook calls."""
    EXTENSIONS[module.__name__](module)


def _check_early(args: Any) -> None:
    """Refuse what no model is needed to refuse: factors that cannot be read, and examples that cannot be had."""
    if typed := re.search(r"\b(factors?|bases)=[\d.]*\d_\d[\d_.]*(?![^,\s])", " ".join(sys.argv)):
        raise FactorsError(f"{typed[0]}: lm_eval reads this without the _; expected a number such as 1.5")
    arguments = getattr(args, "model_args", None)
    arguments = arguments if isinstance(arguments, dict) else {}
    if getattr(args, "model", None) == "lpes" and arguments.get("factors") is not None:
        from lpes_eval import factors

        factors.parse(arguments["factors"])
    if getattr(args, "tasks", None) and not getattr(args, "include_path", None):
        named = [args.tasks] if isinstance(args.tasks, str) else args.tasks
        check_examples([name for text in named for name in text.split(",")], arguments, args.metadata or {})


def check_examples(tasks: Sequence[str], arguments: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Load the examples of our own tasks once, which takes a second or two and no model.

    Args:
        tasks: names as for ``lm_eval --tasks``; those of other tasks are passed over.
        arguments: the model's, which may decide where examples come from.
        metadata: what ``--metadata`` says.

    Raises:
        DataError: as the tasks do, or a setting that none of them takes where all tasks are ours.
    """
    from lpes_eval.harness.settings import refuse_misspelt

    manager = own_tasks({**arguments, **metadata})
    found = {name: manager.match_tasks([name]) for name in tasks}
    if all(found.values()):
        refuse_misspelt(metadata, complete=True)
    manager.load(sorted({task for names in found.values() for task in names}))
