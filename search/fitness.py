"""The harness as fitness: tasks, requests and scores are lm-eval's own; only the answers come faster.

lm-eval builds the requests once, from the examples set aside for searches. For every individual the model gets its
factors in place, answers the requests (``search.answering``, or lm-eval itself where that cannot be exact), and the
task's own filters, ``process_results`` and aggregation turn the answers into a score.

    >>> fitness = Fitness(lm, load_parts(lm, ["kv_retrieval"]))
    >>> fitness([1.0, 1.2, 1.4, 1.3]).fitness
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import glob
import hashlib
import json
import logging
import math
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from lm_eval.api.metrics import mean
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from lpes_eval import plugin, rope
from lpes_eval.data import draw
from lpes_eval.errors import PromptTooLong, UserError
from lpes_eval.factors import Factors, write_atomically
from search import identity
from search.answering import Answerer, Count, Tokens, is_cut, reason_against
from search.identity import fingerprint, packages
from search.stopping import Race

logger = logging.getLogger(__name__)

POSITIONS = (0.0, 50.0, 100.0)
LAMBDAS = (0.2, 0.3, 0.5)
"""Weights of the accuracy at the beginning, in the middle and at the end (section 4.1, Table 15)."""


BOUNDED = {"acc", "acc_norm", "best_subspan_em", "em", "exact_match", "f1"}
"""Metrics whose values lie between 0 and 1."""
CHECKS = 20
"""How often, at most, an individual is held against the floor while it is being measured."""
Examples = Mapping[str, Sequence[Any]]
"""Each part's metric for every example, by the part's name."""


@dataclass(frozen=True)
class Prompting:
    """How lm-eval puts an example to the model: each field is ``simple_evaluate``'s argument of that name.

    Attributes:
        num_fewshot: examples before the question; None for what the task says.
        fewshot_random_seed: draws them.
        apply_chat_template: True, or a template's name.
        fewshot_as_multiturn: with a chat template, examples are turns of their own.
        system_instruction: put before everything else.
        gen_kwargs: laid over the task's own generation settings.
        confirm_run_unsafe_code: allow tasks that run what the model writes.
    """

    num_fewshot: int | None = None
    fewshot_random_seed: int | None = DEFAULT_OTHER_SEED
    apply_chat_template: bool | str = False
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None
    gen_kwargs: Mapping[str, Any] | None = None
    confirm_run_unsafe_code: bool = False


@dataclass
class Part:
    """One lm-eval task's share in the fitness.

    Attributes:
        name: the task's name.
        task: lm-eval's task, with its requests built.
        docs: the examples, as lm-eval hands them to ``process_results``.
        numbers: their numbers among all that the task has.
        metric: name of the metric.
        filter: the filter whose responses are scored.
        weight: share in the fitness.
        sign: 1 where a higher score is better, -1 where a lower one is.
        position: where the gold item stands, in percent; None for tasks without positions.
        divided: whether the examples are part of a split of the task's own, picked by number.
    """

    name: str
    task: Any
    docs: list[dict]
    numbers: list[int]
    metric: str
    filter: str
    weight: float
    sign: int
    position: float | None = None
    divided: bool = False

    @property
    def stem(self) -> str:
        """The name that a task has in common with itself at other positions."""
        by_position = self.position is not None and "_pos_" in self.name
        return self.name.rpartition("_pos_")[0] if by_position else self.name

    @property
    def questions(self) -> list[Any]:
        """What tells an example's question: the same at every position."""
        named = (doc.get("question_id") for doc in self.docs)
        return [number if question is None else question for number, question in zip(self.numbers, named, strict=True)]


@dataclass(frozen=True)
class Measured:
    """An individual's fitness and what it is made of.

    Attributes:
        fitness: the weighted sum, higher is better.
        scores: each part's score, by the part's name.
        examples: each part's metric for every example, in the order of ``Part.docs``.
        seconds: time it took; 0 if it was known.
        stopped_after: prompts after which it was given up, 0 if it was not. ``fitness`` and ``scores`` are then what it
            could have reached at best, or, where it was given up as improbable, those of the examples until then; there
            are no ``examples``.
    """

    fitness: float
    scores: dict[str, float]
    examples: dict[str, list[Any]]
    seconds: float = 0.0
    stopped_after: int = 0


def load_parts(
    lm: Any,
    tasks: Sequence[str],
    *,
    split: str = "search",
    metadata: Mapping[str, Any] | None = None,
    positions: Sequence[float] | None = POSITIONS,
    lambdas: Sequence[float] = LAMBDAS,
    weights: Sequence[float] | None = None,
    metrics: Sequence[str] | None = None,
    examples: int | None = None,
    prompting: Prompting | None = None,
    include_path: str | None = None,
) -> list[Part]:
    """Load tasks and let lm-eval build their requests.

    Args:
        lm: the lm-eval model that will answer.
        tasks: what ``lm_eval --tasks`` takes: names of tasks, groups or tags, patterns, YAML files, folders of these.
        split: ``search`` or ``held_out``. This project's tasks have both; any other task's examples are divided in two
            by the same rule (``lpes_eval.data.draw.split``).
        metadata: as lm-eval's ``--metadata``.
        positions: of a task that comes by position, the ones to ask at; None for all that its group has.
        lambdas: their weights (App. G), scaled to a sum of 1; with ``positions=None`` all weigh the same.
        weights: one for each of ``tasks``, scaled to a sum of 1; equal by default.
        metrics: one for each of ``tasks``, ``METRIC`` or ``METRIC,FILTER``; by default a task's first.
        examples: use only so many of the split's examples.
        prompting: how the examples are put to the model; by default as ``simple_evaluate`` does.
        include_path: as lm-eval's.

    Raises:
        UserError: names that do not exist, or counts that do not fit each other.
    """
    if not tasks:
        raise UserError("no task was named")
    if examples is not None and examples < 1:
        raise UserError(f"{examples} examples: expected 1 or more")
    if positions is not None and len(positions) != len(lambdas):
        raise UserError(f"{len(positions)} positions, but {len(lambdas)} lambdas; give one lambda a position")
    for name, values in (("weights", weights), ("metrics", metrics)):
        if values is not None and len(values) != len(tasks):
            raise UserError(f"{len(values)} {name} for {len(tasks)} task(s); give one a task")
    search_seed = (metadata or {}).get("search_seed", 0)
    if type(search_seed) is not int:
        raise UserError(f"search_seed={search_seed!r}: expected a whole number, such as 0 or 1")
    shares = _normalised(weights or [1.0] * len(tasks), "weights")
    manager = _manager(tasks, {**(metadata or {}), "split": split}, include_path)
    prompting = prompting or Prompting()
    parts: list[Part] = []
    with plugin.evaluating(lm):  # a benchmark measures its prompts with the model's tokenizer
        for number, (name, share) in enumerate(zip(tasks, shares, strict=True)):
            metric = metrics[number] if metrics is not None else None
            chosen = _choose(manager, name, positions, lambdas)
            built = [_build(lm, task, metric, split, search_seed, examples, prompting) for task, _ in chosen]
            # Where positions do not decide, examples count the same, as in lm-eval's groups.
            own = [len(part.docs) if w is None else w for part, (_, w) in zip(built, chosen, strict=True)]
            for part, weight in zip(built, _normalised(own, "lambdas"), strict=True):
                part.weight = share * weight
            parts.extend(built)
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise UserError(f"task {max(names, key=names.count)} is asked for twice")
    return parts


def _manager(tasks: Sequence[str], metadata: dict[str, Any], include_path: str | None) -> TaskManager:
    """A task manager that knows the tasks: this project's alone where that is enough, as all others take seconds."""
    folders = [str(plugin.tasks_folder()), *([include_path] if include_path else [])]
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    if all(name in manager.all_tasks for name in tasks):
        return manager
    return TaskManager(include_path=folders, metadata=metadata)


def _find(manager: TaskManager, name: str) -> list[Any]:
    """The tasks that ``name`` stands for, read as ``lm_eval --tasks`` reads it.

    lm-eval refuses a pattern that fits a group and members of it, as ``kv_retrieval*`` does; here such a pattern stands
    for the tasks that it fits, and for groups and tags only where it fits no task.
    """
    if name in manager.all_tasks:
        return list(manager.load([name])["tasks"].values())
    path = Path(name).expanduser()
    if path.is_dir() or name.endswith(".yaml"):
        files = sorted(glob.glob(str(path / "*.yaml") if path.is_dir() else str(path)))
        configs = [load_yaml(file, resolve_func=True) for file in files]
        configs = [config for config in configs if "task" in config]  # a template has none
        if not configs:
            raise UserError(f"{name}: no YAML file with a task or group; expected lm-eval's, with `task:` or `group:`")
        members = [part for config in configs for part in (config["task"] if "group" in config else [config])]
        try:
            return list(manager.load(members)["tasks"].values())
        except KeyError as unknown:
            raise UserError(
                f"{name}: names a task that is not known ({unknown.args[0]}); give its folder as --include_path"
            ) from None
    matching = manager.match_tasks([name])
    matching = [match for match in matching if match in manager.all_subtasks] or matching
    if not matching:
        near = difflib.get_close_matches(name, manager.all_tasks, n=5)
        near += [known for known in manager.all_tasks if name.strip("*") and name.strip("*") in known][: 5 - len(near)]
        hint = f"the closest names are {', '.join(dict.fromkeys(near))}" if near else "no name comes close"
        raise UserError(f"no task, group or tag is called {name!r}; {hint}; `lm_eval ls tasks` prints all there are")
    return list(manager.load(matching)["tasks"].values())


def _choose(
    manager: TaskManager, name: str, positions: Sequence[float] | None, lambdas: Sequence[float]
) -> list[tuple[Any, float | None]]:
    """The tasks that ``name`` stands for, each with its weight; None where it goes by the number of examples."""
    found = _find(manager, name)
    at = {task: _position(task) for task in found}
    if len(found) == 1 or None in at.values():
        return [(task, None) for task in found]
    if positions is None:
        return [(task, 1.0) for task in sorted(found, key=lambda task: at[task] or 0.0)]
    chosen: list[tuple[Any, float | None]] = []
    for position, weight in zip(positions, lambdas, strict=True):
        here = [task for task in found if at[task] == position]
        if not here:
            stem = found[0].task_name.rpartition("_pos_")[0]
            spelled = re.compile(re.escape(stem) + r"_pos_0*" + re.escape(f"{position:g}"))
            # There, but not in the group. Whoever gives a pattern has said which ones are meant.
            siblings = [t for t in manager.all_tasks if name in manager.all_groups and spelled.fullmatch(t)]
            if not siblings:
                outside = (re.fullmatch(re.escape(stem) + r"_pos_(\d+)", t) for t in manager.all_tasks)
                there = {p for p in at.values() if p is not None} | {float(m[1]) for m in outside if m}
                known = ", ".join(f"{p:g}" for p in sorted(there))
                raise UserError(f"{name} has no position {position:g}; it has {known} (--positions)")
            here = list(manager.load(siblings)["tasks"].values())
        chosen.extend((task, weight / len(here)) for task in here)
    return chosen


def _position(task: Any) -> float | None:
    position = (task.config.metadata or {}).get("position")
    return float(position) if isinstance(position, int | float) else None


def _build(
    lm: Any,
    task: Any,
    metric: str | None,
    split: str,
    search_seed: int,
    examples: int | None,
    prompting: Prompting,
) -> Part:
    """Have lm-eval build a task's requests, as ``simple_evaluate`` and ``evaluate`` do; the weight is set later."""
    if getattr(task, "UNSAFE_CODE", False) and not prompting.confirm_run_unsafe_code:
        raise UserError(f"{task.task_name} runs code that the model writes; allow it with --confirm_run_unsafe_code")
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"{task.task_name} shows pictures or plays sound, which an lpes model does not take")
    if prompting.gen_kwargs and task.OUTPUT_TYPE == "generate_until":
        task.set_config(key="generation_kwargs", value=dict(prompting.gen_kwargs), update=True)
    if prompting.num_fewshot is not None and task.get_config("num_fewshot") != 0:
        task.set_config(key="num_fewshot", value=prompting.num_fewshot)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=prompting.fewshot_random_seed)
    samples = None
    if "split_seed" not in (task.config.metadata or {}).get("source", {}):  # not a benchmark of ours: divide it here
        if (shots := task.get_config("num_fewshot")) and _shows_what_it_asks(task):
            raise UserError(
                f"{task.task_name}: the {shots} examples before a question come from the split that is evaluated, so a "
                "search would see held-out questions and their answers; take --num_fewshot 0, or a copy of the task "
                "with another fewshot_split"
            )
        samples = sorted(_divide(task, split, search_seed)[:examples])  # lm-eval goes through them in this order
    limit = None if samples is not None else examples
    task.build_all_requests(
        limit=limit,
        samples=samples,
        system_instruction=prompting.system_instruction,
        apply_chat_template=bool(prompting.apply_chat_template),
        fewshot_as_multiturn=prompting.fewshot_as_multiturn,
        chat_template=lm.apply_chat_template if prompting.apply_chat_template else None,
        tokenizer_name=lm.tokenizer_name if prompting.apply_chat_template else "",
    )
    if not task.instances:
        raise UserError(f"{task.task_name}: no examples in the {split} split")
    metric = metric or next((str(entry["metric"]) for entry in task.config.metric_list or []), None)
    if metric is None:
        raise UserError(f"{task.task_name} lists no metrics; name the one to use (--metrics)")
    name, _, wanted = metric.partition(",")
    known = list(task.aggregation())
    if known and name not in known:
        raise UserError(f"{task.task_name} has no metric {name!r}; it has {', '.join(known)} (--metrics)")
    filters = [ensemble.name for ensemble in task._filters]
    if wanted and wanted not in filters:
        raise UserError(f"{task.task_name} has no filter {wanted!r}; it has {', '.join(filters)}")
    docs = [doc for _, doc in task.doc_iterator(rank=0, limit=limit, world_size=1, samples=samples)]
    numbers = samples if samples is not None else list(range(len(docs)))
    higher = task.higher_is_better().get(name, True)
    sign = 1 if higher is None or higher else -1
    return Part(
        task.task_name,
        task,
        docs,
        numbers,
        name,
        wanted or filters[0],
        weight=0.0,
        sign=sign,
        position=_position(task),
        divided=samples is not None,
    )


def _divide(task: Any, split: str, search_seed: int) -> list[int]:
    """The numbers of a split's examples, in the order drawn. Examples of one ``question_id`` are never parted."""
    docs = task.eval_docs
    named = docs["question_id"] if "question_id" in getattr(docs, "column_names", ()) else None
    if named is None:
        named = [doc.get("question_id") if isinstance(doc, Mapping) else None for doc in docs]
    of: dict[Any, list[int]] = {}
    for number, question in enumerate(named):
        of.setdefault(number if question is None else question, []).append(number)
    questions = sorted(of, key=lambda question: (type(question).__name__, question))  # for all positions the same
    if len(questions) < 2:
        raise UserError(f"{task.task_name} has no two questions: expected one to search on and another held out")
    drawn = draw.split(len(questions), search_seed).indices(split)
    return [number for question in drawn for number in of[questions[question]]]


def _shows_what_it_asks(task: Any) -> bool:
    """Whether the examples that lm-eval puts before a question come from the split of the questions."""
    config, own = task.config, getattr(task, "fewshot_cfg", None)
    names = [
        getattr(config, f"{kind}_split") or kind if getattr(task, f"has_{kind}_docs")() else None
        for kind in ("training", "validation", "test")
    ]
    training, validation, test = names
    shown = training or validation or test
    if own is not None and own.split is not None:
        shown = own.split
    elif own is not None and own.samples is not None:
        return False
    return bool(shown == (test or validation))


class Fitness:
    """Measures factors by tasks.

    Args:
        lm: an lm-eval model over a transformers model; its weights and settings stay as they are.
        parts: what is measured (``load_parts``).
        fast: answer with ``search.answering`` where that is exact.
        share_prefixes: of it, prefill common beginnings once.
        draft: of it, check answers of the past before decoding.
        look_up: of it, check what followed the same tokens before, in the prompt or in the answer.
        few_logits: of it, compute logits only where they decide.
        tokens_per_batch: of it, the batch's size; with ``None`` its own.
        prompts_per_batch: of it, the batch's size in prompts instead.
        cache: where to look up and keep what was measured, across runs.

    Attributes:
        num_layers: layers of the model.
        slow_because: why lm-eval's own loop answers; None where it need not.
        cut: how many prompts lose their beginning because they do not fit the model, by the part's name.
        units: the examples, as parts and numbers in ``Part.docs``, those together that ask one question.

    Raises:
        PromptTooLong: a prompt of a task that comes by position would be cut.
    """

    def __init__(
        self,
        lm: Any,
        parts: Sequence[Part],
        *,
        fast: bool = True,
        share_prefixes: bool = True,
        draft: bool = True,
        look_up: bool = True,
        few_logits: bool = True,
        tokens_per_batch: int | None = None,
        prompts_per_batch: int | None = None,
        cache: FitnessCache | None = None,
    ) -> None:
        self.lm, self.parts = lm, list(parts)
        self.num_layers = len(rope.find_decoder(lm.model).layers)
        self._requests = [request for part in parts for request in part.task.instances]
        self.slow_because = reason_against(lm, self._requests) if fast else "it was asked for"
        self._answerer: Answerer | None = None
        if self.slow_because is None:
            self._answerer = Answerer(
                lm,
                self._requests,
                share_prefixes=share_prefixes,
                draft=draft,
                look_up=look_up,
                few_logits=few_logits,
                tokens_per_batch=tokens_per_batch,
            )
            if prompts_per_batch is not None:
                self._answerer.tokens_per_batch = prompts_per_batch * self._answerer.longest
        self.cut = self._refuse_or_count_cut()
        self.units = self._units()
        self._batch_sizes: dict[int | None, int] = {}
        self._tokens: dict[str, list[Tokens]] = {}
        self.cache = cache
        self._context = self._describe() if cache is not None else ""

    @property
    def prompts(self) -> int:
        """How many prompts one individual is asked."""
        return len(self._requests)

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of these prompts, where they are known."""
        return self._answerer.prompt_tokens if self._answerer is not None else None

    def _refuse_or_count_cut(self) -> dict[str, int]:
        if self._answerer is not None:
            cut = self._answerer.cut
        else:
            cut = [is_cut(self.lm, request) for request in self._requests]
        found = {part.name: 0 for part in self.parts}
        asked = (part for part in self.parts for _ in part.task.instances)
        for part, whether in zip(asked, cut, strict=True):
            found[part.name] += whether
        for part in self.parts:
            if not (number := found[part.name]):
                continue
            said = f"{part.name}: {number} of {len(part.task.instances)} prompts do not fit the model's "
            said += f"{self.lm.max_length} tokens beside their answer"
            if part.position is not None:
                raise PromptTooLong(
                    f"{said}, and cut from the left the gold item would stand elsewhere; take shorter prompts, or a "
                    "model with a longer window (--model_args max_length=N, if it has)"
                )
            logger.warning("%s; lm-eval cuts them from the left", said)
        return {name: number for name, number in found.items() if number}

    def _units(self) -> list[list[tuple[Part, int]]]:
        units: dict[tuple[str, Any], list[tuple[Part, int]]] = {}
        for part in self.parts:
            for order, question in enumerate(part.questions):
                units.setdefault((part.stem, question), []).append((part, order))
        return list(units.values())

    def in_order(self, order: Sequence[int]) -> list[list[int]]:
        """The requests, by number, of each unit in ``order``."""
        of_example: dict[tuple[str, int], list[int]] = {}
        names = (part.name for part in self.parts for _ in part.task.instances)
        for i, (name, request) in enumerate(zip(names, self._requests, strict=True)):
            of_example.setdefault((name, request.doc_id), []).append(i)
        return [[i for part, order in self.units[u] for i in of_example[part.name, order]] for u in order]

    @property
    def count(self) -> Count | None:
        """What answering has cost so far."""
        return self._answerer.count if self._answerer is not None else None

    def __call__(
        self,
        factors: Sequence[float] | Factors,
        parent: Sequence[float] | Factors | None = None,
        floor: float | None = None,
        rival: Examples | None = None,
        error: float = 0.01,
    ) -> Measured:
        """Measure the model with ``factors``, which stay applied.

        Args:
            factors: one a layer, or factors as they are in a file.
            parent: factors whose answers are likely to be similar; measured before, or of no use.
            floor: give up as soon as the fitness cannot reach this any more, were all remaining answers perfect.
            rival: every example's score of an individual whose fitness is ``floor``: give up as soon as it is
                improbable that the fitness reaches it (``search.stopping``), also if the cache would know.
            error: how probable it may be that an individual is given up so which would have reached it.
        """
        values = self._per_layer(factors)
        name = _digest(values)
        floor = floor if self.why_unbounded() is None else None
        race = _Racing(self, name, rival, floor, error) if rival is not None and floor is not None else None
        if self.cache is not None and (known := self.cache.get(self._context, name)) is not None:
            if race is not None and race.lost(known["examples"]):
                return Measured(*race.partial, {}, stopped_after=race.asked)
            return self._score(known["examples"])
        start = time.perf_counter()
        rope.apply(self.lm.model, values)
        drafts = self._tokens.get(_digest(self._per_layer(parent))) if parent is not None else None
        if floor is not None:
            answers, partial = self._answers_while(name, drafts, floor, race)
            if partial is not None:
                if self.cache is not None and all(answers):  # all were under way when it was given up
                    self.cache.put(self._context, name, {"examples": self._examples(answers)})
                asked = race.asked if race is not None else sum(map(bool, answers))
                return Measured(*partial, {}, time.perf_counter() - start, stopped_after=asked)
        else:
            answers = self._answers(name, drafts)
        examples = self._examples(answers)
        measured = self._score(examples, time.perf_counter() - start)
        if self.cache is not None:
            self.cache.put(self._context, name, {"examples": examples})
        return measured

    def _per_layer(self, factors: Sequence[float] | Factors) -> list[float]:
        return factors.per_layer(self.num_layers) if isinstance(factors, Factors) else list(factors)

    def _answers(self, name: str, drafts: Sequence[Tokens] | None) -> list[Any]:
        """A response for every request, ``repeats`` of them where a task asks for several."""
        if self._answerer is not None:
            texts, self._tokens[name] = self._answerer.answer(drafts)
            return [[text] * request.repeats for text, request in zip(texts, self._requests, strict=True)]
        random.seed(DEFAULT_RANDOM_SEED)  # as simple_evaluate, for tasks that sample
        numpy.random.seed(DEFAULT_OTHER_SEED)
        torch.manual_seed(DEFAULT_OTHER_SEED)
        responses: list[list[Any]] = [[] for _ in self._requests]
        by_type: dict[str, list[int]] = {}
        for i, request in enumerate(self._requests):
            by_type.setdefault(request.request_type, []).extend([i] * request.repeats)
        with self._batch_size_found_once():
            for request_type, numbers in by_type.items():
                found = getattr(self.lm, request_type)([self._requests[i] for i in numbers], disable_tqdm=True)
                for i, response in zip(numbers, found, strict=True):
                    responses[i].append(response)
        return responses

    def time_a_batch(self) -> tuple[int, float] | None:
        """Prompts in a batch of prompts drawn evenly, and the seconds that it took under the factors now in force.

        None where lm-eval's own loop answers, which has no batches to be timed one by one.
        """
        if self._answerer is None:
            return None
        order = self.in_order(draw.shuffled(range(len(self.units)), draw.stream("time")))
        start = time.perf_counter()
        batch = next(self._answerer.answer_in_batches(order=order))
        return len(batch), time.perf_counter() - start

    @contextlib.contextmanager
    def _batch_size_found_once(self) -> Iterator[None]:
        """Have ``hf`` with batches of ``auto`` try out a length once, and not for every individual anew."""
        if not isinstance(self.lm, HFLM):
            yield
            return
        detect = self.lm._detect_batch_size

        def once(requests: Sequence[Any] | None = None, pos: int = 0) -> int:
            length = len(requests[pos][1] + requests[pos][2]) if requests else None
            if length not in self._batch_sizes:
                self._batch_sizes[length] = detect(requests, pos)
            return self._batch_sizes[length]

        self.lm._detect_batch_size = once
        try:
            yield
        finally:
            del self.lm._detect_batch_size  # the class's own again

    def why_unbounded(self) -> str | None:
        """Why nothing can be said about the fitness before all answers are there; None if something can."""
        if self._answerer is None:
            return f"lm-eval's own loop answers ({self.slow_because})"
        for part in self.parts:
            if part.metric not in BOUNDED or part.task.aggregation().get(part.metric, mean) is not mean:
                return f"{part.metric} of {part.name} is not known to be a mean of values from 0 to 1"
        return None

    def _answers_while(
        self, name: str, drafts: Sequence[Tokens] | None, floor: float, race: _Racing | None
    ) -> tuple[list[Any], tuple[float, dict[str, float]] | None]:
        """As ``_answers``, or the answers so far and fitness and scores to be reported, once it is given up."""
        assert self._answerer is not None
        tokens: dict[int, Tokens] = {}
        answers: list[Any] = [[] for _ in self._requests]
        checked = 0
        for batch in self._answerer.answer_in_batches(drafts, self.in_order(race.order) if race is not None else None):
            tokens |= batch
            for i in batch:
                answers[i] = [self._answerer.text(i, batch[i])] * self._requests[i].repeats
            complete = len(tokens) == len(answers)
            if len(tokens) - checked < len(answers) / CHECKS and not complete:
                continue
            checked = len(tokens)
            if race is not None:  # it looks at question after question, so at the end too: batches decide nothing
                if race.lost(self._examples(answers)):
                    return answers, race.partial
            elif not complete:
                fitness, scores = self._bound(answers)
                if fitness < floor - 1e-9:  # sums are rounded
                    return answers, (fitness, scores)
        self._tokens[name] = [tokens[i] for i in range(len(answers))]
        return answers, None

    def _bound(self, answers: Sequence[Any]) -> tuple[float, dict[str, float]]:
        """The fitness, and its scores, if every answer that is missing were perfect."""
        examples, scores = self._examples(answers), {}
        for part in self.parts:
            perfect = 1.0 if part.sign > 0 else 0.0
            values = [perfect if value is None else value for value in examples[part.name]]
            _check_bounded(part, values)
            scores[part.name] = float(mean(values))
        return sum(part.weight * part.sign * scores[part.name] for part in self.parts), scores

    def _examples(self, answers: Sequence[Any]) -> dict[str, list[Any]]:
        """Each part's metric for every example, as ``lm_eval.evaluate`` collects it; None where no answer is there."""
        missing = {id(request) for request, responses in zip(self._requests, answers, strict=True) if not responses}
        for request, responses in zip(self._requests, answers, strict=True):
            request.resps, request.filtered_resps = responses or [""], {}
        found: dict[str, list[Any]] = {}
        for part in self.parts:
            part.task.apply_filters()
            of_doc: dict[int, list[Any]] = {}
            for request in part.task.instances:
                of_doc.setdefault(request.doc_id, []).append(request)
            values: list[Any] = []
            for order, doc in enumerate(part.docs):
                requests = sorted(of_doc[order], key=lambda request: request.idx)
                if any(id(request) in missing for request in requests):
                    values.append(None)
                    continue
                filtered = [request.filtered_resps[part.filter] for request in requests]
                metrics = part.task.process_results(copy.deepcopy(doc), filtered)
                if part.metric not in metrics:
                    raise UserError(f"{part.name} has no metric {part.metric!r}; it has {', '.join(metrics)}")
                values.append(metrics[part.metric])
            found[part.name] = values
        return found

    def _score(self, examples: dict[str, list[Any]], seconds: float = 0.0) -> Measured:
        scores = {}
        for part in self.parts:
            aggregate = part.task.aggregation().get(part.metric, mean)
            scores[part.name] = float(aggregate(examples[part.name]))
        fitness = sum(part.weight * part.sign * scores[part.name] for part in self.parts)
        return Measured(fitness, scores, examples, seconds)

    def describe(self) -> dict[str, Any]:
        """What is measured, as plain data: equal where the same individual would get the same fitness."""
        asked = [[request.task_name, request.doc_id, request.args] for request in self._requests]
        parts = [
            {
                "task": part.name,
                "version": str(part.task.VERSION),
                "metric": f"{part.metric},{part.filter}",
                "weight": part.weight,
                "examples": len(part.docs),
                "config_sha256": identity.sha256(vars(part.task.config)),
                "code_sha256": identity.code(*_code_of(part.task)),
            }
            for part in self.parts
        ]
        return {
            "parts": parts,
            "requests_sha256": identity.sha256([asked, [part.docs for part in self.parts]]),
            "reading": identity.reading(self.lm),
            "model": fingerprint(self.lm.model),
            "code_sha256": identity.code(type(self.lm), type(self)),
        }

    def _describe(self) -> str:
        described = self.describe()
        for part in described["parts"]:
            del part["weight"]  # examples are kept, not their weighted sum
        return json.dumps({**described, "packages": packages()}, sort_keys=True)


class _Racing:
    """An individual's race against a rival, over the questions in an order drawn for it alone.

    Attributes:
        order: the order, as numbers of ``Fitness.units``.
        asked: prompts that it took to give it up; others may have been answered in the same batch.
        partial: fitness and scores of these.
    """

    def __init__(self, fitness: Fitness, name: str, rival: Examples, floor: float, error: float) -> None:
        self._parts, self._rival, self._floor = fitness.parts, rival, floor
        self._units = fitness.units
        self._prompts = list(map(len, fitness.in_order(range(len(self._units)))))
        # What each unit can add to the fitness: a share of every part's mean for each of its examples.
        share = {part.name: part.weight * part.sign / len(part.docs) for part in self._parts}
        sums = [[share[part.name] for part, _ in unit] for unit in self._units]
        lows = [sum(min(s, 0.0) for s in shares) for shares in sums]
        highs = [sum(max(s, 0.0) for s in shares) for shares in sums]
        self._share = share
        self._race = Race(lows, highs, [self._value(unit, rival) for unit in self._units], error)
        self.order = draw.shuffled(range(len(self._units)), draw.stream("order", name))
        self._next = self.asked = 0
        self._seen: dict[str, list[float]] = {}
        self.partial: tuple[float, dict[str, float]] = (0.0, {})

    def _value(self, unit: Sequence[tuple[Part, int]], examples: Examples) -> float:
        return sum(self._share[part.name] * examples[part.name][order] for part, order in unit)

    def lost(self, examples: Examples) -> bool:
        """Take in the units whose examples are all there (None stands for one that is not), as far as it takes."""
        for number in self.order[self._next :]:
            unit = self._units[number]
            if any(examples[part.name][order] is None for part, order in unit):
                return False
            for part, order in unit:
                _check_bounded(part, [examples[part.name][order]])
                self._seen.setdefault(part.name, []).append(examples[part.name][order])
            self._race.take(number, self._value(unit, examples))
            self._next += 1
            self.asked += self._prompts[number]
            if self._race.lost and len(self._seen) == len(self._parts) and self._next < len(self.order):
                scores = {part.name: float(mean(self._seen[part.name])) for part in self._parts}
                so_far = sum(part.weight * part.sign * scores[part.name] for part in self._parts)
                self.partial = min(so_far, math.nextafter(self._floor, -math.inf)), scores
                return True
        return False


class FitnessCache:
    """Every example's score under factors that were measured before, in a folder that searches share.

    An entry is a small JSON file, replaced whole, so any number of processes may read and write at once. Its name is a
    hash of what the scores depend on: factors, model, tokenizer, requests with their documents, the tasks' settings and
    source files, package versions, and this package's own source files where they are not an installed version. What a
    task's code reads from elsewhere is not in it.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._warned = False

    def _path(self, context: str, name: str) -> Path:
        key = hashlib.sha256(f"{context}\n{name}".encode()).hexdigest()
        return self._folder / key[:2] / f"{key}.json"

    def get(self, context: str, name: str) -> dict[str, Any] | None:
        """What is known about factors ``name`` (their digest); a file that cannot be read counts as not there."""
        try:
            entry = json.loads(self._path(context, name).read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(entry, dict) or (entry.get("context"), entry.get("factors")) != (context, name):
            return None
        return entry

    def put(self, context: str, name: str, entry: Mapping[str, Any]) -> None:
        """Keep an entry; where the folder cannot be written to, say so once and keep nothing."""
        text = json.dumps({"context": context, "factors": name, **entry}, default=lambda number: number.item())  # numpy
        try:
            write_atomically(self._path(context, name), text + "\n")
        except OSError as error:
            if not self._warned:
                logger.warning("%s: what is measured cannot be kept for other searches (%s)", self._folder, error)
            self._warned = True


def _code_of(task: Any) -> list[Any]:
    """Whatever a task's scores are computed by."""
    metrics = getattr(task, "_metric_fn_list", {})
    return [type(task), vars(task.config), metrics, task.aggregation(), [e.filters for e in task._filters]]


def _digest(per_layer: Sequence[float]) -> str:
    return Factors(factors=tuple(per_layer)).digest()


def _check_bounded(part: Part, values: Sequence[Any]) -> None:
    if not all(0 <= value <= 1 for value in values):
        raise UserError(f"{part.metric} of {part.name} is not from 0 to 1; leave --early_stopping out")


def _normalised(values: Sequence[float], name: str) -> list[float]:
    if any(not value >= 0 for value in values) or not sum(values) > 0:
        raise UserError(f"{name} {list(values)}: expected numbers of 0 or more, not all 0")
    return [value / sum(values) for value in values]
