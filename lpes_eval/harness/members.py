"""Tasks that a group's YAML defines in place are selected by their own names.

lm-eval knows one name a file. A benchmark of many parts would need a file for each part and size. Here the group's YAML
defines its parts, as lm-eval's inline tasks, and ``--tasks`` takes each part's name and tags too. ``lm_eval ls`` lists
the groups alone.
"""

from __future__ import annotations

from typing import Any


def add_members(manager: Any) -> None:
    """Add the members' names and tags to a ``TaskManager``; names that it has already win.

    A member is a dict with ``task`` and ``class`` in the list ``task`` of a group. Without ``class``, lm-eval's own
    rules hold: it is another task with changes, or an inline task that belongs to its group alone.
    """
    from lm_eval.tasks.manager import TaskIndex, load_yaml

    index = manager.task_index
    for group in manager.all_groups:
        members = (index[group].cfg or {}).get("task")
        if not isinstance(members, list) or not any(map(_is_defined_here, members)):
            continue
        for member in load_yaml(index[group].yaml_path)["task"]:
            if _is_defined_here(member) and member["task"] not in index:
                TaskIndex.process_cfg(member, None, index)
    manager._all_tasks = sorted(index)


def _is_defined_here(member: Any) -> bool:
    return isinstance(member, dict) and {"task", "class"} <= set(member)
