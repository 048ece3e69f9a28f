"""What a search measures: lm-eval's tasks, their requests built from the examples set aside for it."""

import difflib
import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval.api.metrics import mean
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.manager import Kind
from yaml import YAMLError

from lpes_eval import flags
from lpes_eval.data import splits
from lpes_eval.errors import UserError, first_line
from lpes_eval.harness import budget, plugin
from lpes_eval.harness.task import PositionTask

POSITIONS = (0.0, 50.0, 100.0)
"""Where the gold item stands in a search: at the beginning, in the middle and at the end (section 4.1)."""


@dataclass(frozen=True)
class Column:
    """A score that counts in the fitness by its weight: a task's metric, or its metric at one position, in percent."""

    name: str
    metric: str
    """Its name among what ``process_results`` gives."""
    weight: float
    position: float | None = None


@dataclass
class Objective:
    """One lm-eval task's share in the fitness, with its requests built.

    ``docs`` are the examples, as lm-eval hands them to ``process_results``, and ``numbers`` theirs among all that the
    task has; ``divided`` says whether we picked them out of a split of the task's own. ``sign`` is -1 where a lower
    score is better. ``left_out`` are positions whose item is that of another one, with that one: each counts once.
    """

    name: str
    task: Any
    docs: list[dict]
    numbers: list[int]
    metric: str
    filter: str
    columns: list[Column]
    sign: int
    divided: bool = False
    left_out: dict[float, float] = field(default_factory=dict)

    @property
    def by_position(self) -> bool:
        """Whether its gold item stands at several positions."""
        return self.columns[0].position is not None

    @property
    def size(self) -> tuple[str, int]:
        """The setting that says how long its prompts are, and its value; 0 where there is none."""
        setting = getattr(self.task, "SIZE", "")
        return setting, (self.task.config.metadata or {}).get(setting) or 0

    @property
    def questions(self) -> list[Any]:
        """What tells an example's question: examples of one question share it."""
        return [_question(doc, number) for doc, number in zip(self.docs, self.numbers, strict=True)]

    @property
    def title(self) -> str:
        """The task's name, and its data's where these have one."""
        source = (self.task.config.metadata or {}).get("source")
        data = source["name"] if isinstance(source, Mapping) and source["name"] != source["kind"] else ""
        return f"{self.name} ({data})" if data else self.name

    @property
    def note(self) -> str:
        """What a person should know of its positions; empty where each is another place."""
        same = ", ".join(f"{p:g} % is the place of {first:g} %" for p, first in self.left_out.items())
        return f"{self.name}: {same}, so it is not asked or counted again" if same else ""

    def aggregation(self, column: Column) -> Any:
        """What makes the column's score of its examples' metrics."""
        return self.task.aggregation().get(column.metric, mean)


def load_tasks(
    lm: Any,
    tasks: Sequence[str],
    *,
    split: str = "search",
    metadata: Mapping[str, Any] | None = None,
    positions: Sequence[float] | None = POSITIONS,
    lambdas: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    metrics: Sequence[str] | None = None,
    examples: int | None = None,
    include_path: str | None = None,
    **prompting: Any,
) -> list[Objective]:
    """Load tasks and let lm-eval build their requests.

    Args:
        lm: the lm-eval model that will answer.
        tasks: what ``lm_eval --tasks`` takes: names of tasks, groups or tags, patterns, YAML files, folders of these.
        split: ``search`` or ``held_out``; other projects' tasks are divided by the rule of ``lpes_eval.data.splits``.
        metadata: as lm-eval's ``--metadata``; so is ``include_path``.
        positions: of a task by position, the ones to ask at; None for all that it has.
        lambdas: their weights (App. G), scaled to a sum of 1; equal by default, and with ``positions=None``.
        weights: one for each of ``tasks``, scaled to a sum of 1; equal by default.
        metrics: ``METRIC`` or ``METRIC,FILTER`` for each of ``tasks``; by default ``PositionTask.STRICT``, else the
            task's first.
        examples: use only so many of the split's examples.
        **prompting: ``simple_evaluate``'s arguments that say how an example is put to the model.

    Raises:
        UserError: names that do not exist, or counts that do not fit each other.
    """
    if not tasks:
        raise UserError("no task was named")
    for name, values in (("weights", weights), ("metrics", metrics)):
        if values is not None and len(values) != len(tasks):
            raise UserError(f"{len(values)} {name} for {len(tasks)} task(s); give one a task")
    settings = {**(metadata or {}), "split": split}
    search_seed = flags.of(flags.whole, "search_seed", settings.get("search_seed", 0))
    if positions is not None:
        settings["positions"] = list(positions)
    manager = _manager(tasks, settings, include_path)
    shares = _normalised(weights or [1.0] * len(tasks), "weights")
    weight_of: dict[float, float] = {}
    if lambdas is not None and positions is not None:
        _normalised(lambdas, "lambdas")
        weight_of = dict(zip(positions, lambdas, strict=True))
    objectives: list[Objective] = []
    prompting |= {"split": split, "search_seed": search_seed, "examples": examples}
    with plugin.evaluating(lm):  # whose tokenizer measures the prompts
        for name, share, metric in zip(tasks, shares, metrics or [""] * len(tasks), strict=True):
            try:
                loaded = manager.load(_resolve(manager, name))["tasks"]
            except KeyError as unknown:
                way = "give its folder as --include_path"
                raise UserError(f"{name}: names a task that is not known ({unknown.args[0]}); {way}") from None
            except OSError as error:  # of the Hub too
                raise UserError(f"{name}: its data cannot be loaded ({first_line(error)})") from error
            found = [_build(lm, task, metric, **prompting) for task in loaded.values()]
            total = sum(len(objective.docs) for objective in found)  # examples count the same, as in lm-eval's groups
            for objective in found:
                objective.columns = _columns(objective, share * len(objective.docs) / total, weight_of)
            objectives.extend(found)
    names = [objective.name for objective in objectives]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"task {twice[0]} is asked for twice")
    return objectives


def _columns(objective: Objective, share: float, weight_of: Mapping[float, float]) -> list[Column]:
    """The scores that count of a task: its metric at every position, where the metric has positions."""
    at = getattr(objective.task, "positions", None)
    if not at or f"{objective.metric}@{at[0]:g}" not in objective.task.aggregation():
        return [Column(objective.name, objective.metric, share)]
    weights = _normalised([weight_of.get(p, 1.0) for p in at], "lambdas")
    return [
        Column(f"{objective.name}@{p:g}", f"{objective.metric}@{p:g}", share * weight, float(p))
        for p, weight in zip(at, weights, strict=True)
    ]


def check_names(tasks: Sequence[str], include_path: str | None = None) -> None:
    """Refuse names that stand for no task, before a model is loaded; raises ``UserError``."""
    manager = _manager(tasks, None, include_path)
    for name in tasks:
        _resolve(manager, name)


def _manager(tasks: Sequence[str], metadata: dict[str, Any] | None, include_path: str | None) -> TaskManager:
    """A task manager that knows the tasks: this project's alone where that is enough, as all others take seconds."""
    if include_path and not Path(include_path).is_dir():
        raise UserError(f"--include_path {include_path}: no such folder; give the one that has the tasks")
    folders = [str(plugin.tasks_folder()), *([include_path] if include_path else [])]
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    if all(name in manager.all_tasks or _is_path(name) for name in tasks):
        return manager
    return TaskManager(include_path=folders, metadata=metadata) if metadata else _listed(*folders)


@cache
def _listed(*folders: str) -> TaskManager:
    return TaskManager(include_path=list(folders))


def _resolve(manager: TaskManager, name: str) -> list[Any]:
    """What ``name`` stands for, read as ``lm_eval --tasks`` reads it: names, or the configurations in YAML files.

    A pattern stands for the tasks that it fits, and for groups and tags only where it fits no task; lm-eval refuses one
    that fits both.
    """
    if name in manager.all_tasks:
        return [name]
    if _is_path(name):
        return [part for config in _configs(name) for part in (config["task"] if "group" in config else [config])]
    matching = manager.match_tasks([name])
    if tasks := [match for match in matching if manager.task_index[match].kind in (Kind.TASK, Kind.PY_TASK)]:
        return tasks
    if not matching:
        near = difflib.get_close_matches(name, manager.all_tasks, n=5)
        near += [known for known in manager.all_tasks if name.strip("*") and name.strip("*") in known][: 5 - len(near)]
        hint = f"the closest names are {', '.join(dict.fromkeys(near))}; " if near else ""
        raise UserError(f"no task, group or tag is called {name!r}; {hint}`lm_eval ls tasks` prints all there are")
    return list(matching)


def _is_path(name: str) -> bool:
    return name.endswith(".yaml") or Path(name).expanduser().is_dir()


def _configs(name: str) -> list[dict[str, Any]]:
    """The tasks and groups in a YAML file, or in those of a folder."""
    path = Path(name).expanduser()
    try:
        files = sorted(glob.glob(str(path / "*.yaml") if path.is_dir() else str(path)))
        read = [load_yaml(file, resolve_func=True) for file in files]
    except (YAMLError, ImportError, TypeError, ValueError, OSError) as error:
        raise UserError(f"{name}: cannot be read as tasks of lm-eval ({first_line(error)})") from error
    if not (configs := [config for config in read if "task" in config]):  # a template names no task
        raise UserError(f"{name}: no YAML file with a task or group; expected lm-eval's, with `task:` or `group:`")
    return configs


def _build(
    lm: Any,
    task: Any,
    metric: str,
    *,
    split: str,
    search_seed: int,
    examples: int | None,
    num_fewshot: int | None = None,
    fewshot_random_seed: int = DEFAULT_OTHER_SEED,
    apply_chat_template: bool | str = False,
    fewshot_as_multiturn: bool = True,
    system_instruction: str | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
    confirm_run_unsafe_code: bool = False,
) -> Objective:
    """Have lm-eval build a task's requests, as ``simple_evaluate`` and ``evaluate`` do; the columns are set later."""
    if getattr(task, "UNSAFE_CODE", False) and not confirm_run_unsafe_code:
        raise UserError(f"{task.task_name} runs code that the model writes; allow it with --confirm_run_unsafe_code")
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"{task.task_name} shows pictures or plays sound, which an lpes model does not take")
    if gen_kwargs and task.OUTPUT_TYPE == "generate_until":
        task.set_config(key="generation_kwargs", value={**gen_kwargs}, update=True)
    if (shots := task.get_config("num_fewshot")) != 0 and num_fewshot is not None:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif shots is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=fewshot_random_seed)
    samples = None
    if "split_seed" not in (task.config.metadata or {}).get("source", {}):  # not a benchmark of ours
        if (shots := task.get_config("num_fewshot")) and _shows_what_it_asks(task):
            way = "take --num_fewshot 0, or a copy of the task with another fewshot_split"
            raise UserError(f"{task.task_name}: the {shots} examples before a question may be held-out ones; {way}")
        samples = sorted(_divide(task, split, search_seed)[:examples])  # lm-eval goes through them in this order
    left_out = task.left_out if isinstance(task, PositionTask) else {}
    limit, chat = None if samples is not None else examples, bool(apply_chat_template)
    if chat:
        budget.require_chat_template(lm)
    task.build_all_requests(
        limit=limit,
        samples=samples,
        system_instruction=system_instruction,
        apply_chat_template=chat,
        fewshot_as_multiturn=fewshot_as_multiturn,
        chat_template=lm.apply_chat_template if chat else None,
        tokenizer_name=lm.tokenizer_name if chat else "",
    )
    if not task.instances:
        raise UserError(f"{task.task_name}: no examples in the {split} split")
    metric = metric or getattr(task, "STRICT", "")
    metric = metric or next((str(entry["metric"]) for entry in task.config.metric_list or []), "")
    by = f" by --metrics, or --guard {task.task_name}:METRIC"
    if not metric:
        raise UserError(f"{task.task_name} lists no metrics; name one{by}")
    name, _, wanted = metric.partition(",")
    known = list(task.aggregation())
    if known and name not in known:
        raise UserError(f"{task.task_name} has no metric {name!r}; it has {', '.join(known)}; name one{by}")
    filters = [ensemble.name for ensemble in task._filters]
    if wanted and wanted not in filters:
        raise UserError(f"{task.task_name} has no filter {wanted!r}; it has {', '.join(filters)}")
    docs = [doc for _, doc in task.doc_iterator(rank=0, limit=limit, world_size=1, samples=samples)]
    numbers = samples if samples is not None else list(range(len(docs)))
    sign = -1 if task.higher_is_better().get(name) is False else 1
    scored_by = wanted or filters[0]
    return Objective(task.task_name, task, docs, numbers, name, scored_by, [], sign, samples is not None, left_out)


def _divide(task: Any, split: str, search_seed: int) -> list[int]:
    """The numbers of a split's examples, in the order drawn. Examples of one ``question_id`` are never parted."""
    of: dict[Any, list[int]] = {}
    for number, doc in enumerate(task.eval_docs):
        of.setdefault(_question(doc, number), []).append(number)
    questions = sorted(of, key=lambda question: (type(question).__name__, question))  # for all positions the same
    if len(questions) < 2:
        raise UserError(f"{task.task_name} has no two questions: expected one to search on and another held out")
    drawn = splits.indices(len(questions), split, search_seed)
    return [number for question in drawn for number in of[questions[question]]]


def _question(doc: Any, number: int) -> int | str:
    """An example's ``question_id``, its own number where it has none."""
    question = doc.get("question_id") if isinstance(doc, Mapping) else None
    return number if question is None else question if isinstance(question, int | str) else str(question)


def _shows_what_it_asks(task: Any) -> bool:
    """Whether the examples that lm-eval puts before a question come from the split of the questions."""
    config, own = task.config, getattr(task, "fewshot_cfg", None)
    if own is not None and own.split is None and own.samples is not None:
        return False
    training, validation, test = (
        getattr(config, f"{kind}_split") or kind if getattr(task, f"has_{kind}_docs")() else None
        for kind in ("training", "validation", "test")
    )
    shown = (own.split if own is not None else None) or training or validation or test
    return bool(shown == (test or validation))


def _normalised(values: Sequence[float], name: str) -> list[float]:
    if any(not value >= 0 for value in values) or not 0 < sum(values) < math.inf:
        raise UserError(f"{name} {list(values)}: expected numbers of 0 or more, with a sum above 0 and below infinity")
    return [value / sum(values) for value in values]
