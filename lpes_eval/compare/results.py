"""Reading what lm-eval wrote: a results JSON, and the samples that ``--log_samples`` put beside it.

lm-eval names the two ``results_DATE.json`` and ``samples_TASK_DATE.jsonl``, in a folder named after the model. A task
that reports a metric ``M`` and ``M@P`` is one by position: P is the position of the gold item in percent.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from lpes_eval import files
from lpes_eval.errors import DataError, UserError

DATE = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d[.\d]*)$")
"""The end of the stem of every file of one run."""

NOT_THE_DATA = frozenset({"version", "config_source", "data_dir", "text_file", "location"})
"""Entries of a task's metadata that may differ between two runs on the same examples."""

QuestionId = int | str
_PERCENT = re.compile(r"\d+(\.\d+)?$")


def _at(name: str, position: float) -> str:
    return f"{name}@{position:g}"


@dataclass(frozen=True)
class Sample:
    """One answered question.

    Attributes:
        question: the ``question_id`` of the document, or lm-eval's ``doc_id`` where the document has none.
        document: lm-eval's hashes of the document and of the expected answer.
        prompt: lm-eval's hash of the prompt as the model saw it, chat template included.
        scores: metric -> score, for the metrics that are one number a sample.
    """

    question: QuestionId
    document: str
    prompt: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Measure:
    """A metric of a task under one of its filters; lm-eval writes it ``METRIC,FILTER``."""

    metric: str
    filter: str

    @property
    def key(self) -> str:
        """The key of lm-eval's results."""
        return f"{self.metric},{self.filter}"

    def __str__(self) -> str:
        """Name it as a table does."""
        return self.metric if self.filter == "none" else self.key


@dataclass(frozen=True)
class Model:
    """What was evaluated.

    Attributes:
        kind: lm-eval's model type, such as ``lpes``.
        name: the model's name on the Hub, or the last part of its local path; empty where the type decides.
        parameters: the number of its parameters, where lm-eval counted them.
    """

    kind: str
    name: str
    parameters: int | None

    def __str__(self) -> str:
        """Name it as a message does."""
        size = "" if self.parameters is None else f", {self.parameters:,} parameters"
        return f"{self.kind} {self.name or '(its default model)'}{size}"


@dataclass(frozen=True)
class Identity:
    """What a task asked, as far as the results and the samples tell.

    Attributes:
        version: the task's version.
        data: what its metadata says of the data, such as source and split.
        examples: the number of examples scored.
        questions: their ids, in order; like the digests, None where no samples were logged.
        documents: digest of lm-eval's hashes of all documents and expected answers.
        prompts: digest of lm-eval's hashes of all prompts.
    """

    version: str
    data: Mapping[str, Any]
    examples: int | None
    questions: tuple[QuestionId, ...] | None = None
    documents: str | None = None
    prompts: str | None = None


@dataclass(frozen=True)
class Task:
    """One task of a run: what it was, what it scored, and its samples where they were logged.

    With a ``position`` it is the task at that position alone.
    """

    name: str
    version: str
    position: float | None
    data: Mapping[str, Any]
    examples: int | None
    reported: Mapping[Measure, tuple[float, float]]
    higher_is_better: Mapping[str, bool]
    samples_path: Path | None

    @cached_property
    def identity(self) -> Identity:
        """What was asked."""
        if not self.samples:
            return Identity(self.version, self.data, self.examples)
        samples = next(iter(self.samples.values()))  # every filter reads the same answers to the same prompts
        questions = tuple(sorted(samples, key=lambda question: (isinstance(question, str), question)))
        return Identity(
            version=self.version,
            data=self.data,
            examples=self.examples,
            questions=questions,
            documents=_digest(samples[question].document for question in questions),
            prompts=_digest(samples[question].prompt for question in questions),
        )

    @cached_property
    def samples(self) -> dict[str, dict[QuestionId, Sample]]:
        """Filter -> question -> sample; empty where no samples were logged. Read when it is first asked for."""
        if self.samples_path is None:
            return {}
        with _well_formed(self.samples_path):
            return _read_samples(self.samples_path)

    @property
    def positions(self) -> list[float]:
        """The positions at which it was asked, in order; none where it is no task by position."""
        found = {measure.metric.rpartition("@") for measure in self.reported}
        named = {measure.metric for measure in self.reported}
        return sorted(float(p) for metric, at, p in found if at and metric in named and _PERCENT.match(p))

    def at(self, position: float) -> Task:
        """The task at one position alone."""
        reported = {
            Measure(measure.metric, measure.filter): self.reported[there]
            for measure in self.reported
            if (there := Measure(_at(measure.metric, position), measure.filter)) in self.reported
        }
        return replace(self, name=_at(self.name, position), position=position, reported=reported)

    def scores(self, measure: Measure) -> dict[QuestionId, float] | None:
        """Question -> score, or None where the samples are missing or do not average to the reported score.

        Some metrics have no score for a single sample (perplexity), and some are not averages (a geometric mean of
        means); those can be compared as reported, but not in pairs.
        """
        samples = self.samples.get(measure.filter)
        if not samples:
            return None
        name = measure.metric if self.position is None else _at(measure.metric, self.position)
        scores = {question: sample.scores.get(name, math.nan) for question, sample in samples.items()}
        average = math.fsum(scores.values()) / len(scores)
        return scores if math.isclose(average, self.reported[measure][0], rel_tol=1e-6, abs_tol=1e-9) else None


@dataclass(frozen=True)
class OverPositions:
    """What a task's rows say of all its positions."""

    mean: float
    mean_stderr: float
    spread: float
    spread_stderr: float


@dataclass(frozen=True)
class Family:
    """A task at each of its positions, in their order; or a task without positions alone.

    Attributes:
        name: the task's name.
        tasks: the task at each position.
        reported: mean and spread over the positions, as lm-eval printed them.
    """

    name: str
    tasks: tuple[Task, ...]
    reported: Mapping[Measure, OverPositions] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        """What to call each task in a table."""
        return tuple("all" if task.position is None else f"{task.position:g} %" for task in self.tasks)

    def measures(self) -> list[Measure]:
        """The metrics that all the tasks report."""
        return [m for m in self.tasks[0].reported if all(m in task.reported for task in self.tasks)]

    def higher_is_better(self, measure: Measure) -> bool:
        """The direction of a metric; lm-eval's default, higher, where the task does not say."""
        return self.tasks[0].higher_is_better.get(measure.metric, True)

    def scores(self, measure: Measure) -> dict[str, dict[QuestionId, float]] | None:
        """Task -> question -> score, or None where one of the tasks has no score a sample."""
        by_task = {}
        for task in self.tasks:
            scores = task.scores(measure)
            if scores is None:
                return None
            by_task[task.name] = scores
        return by_task


@dataclass(frozen=True)
class Results:
    """One run of lm-eval."""

    path: Path
    model: Model
    tasks: Mapping[str, Task]
    families: tuple[Family, ...]
    raw: Mapping[str, Any]

    @property
    def subject(self) -> str:
        """What was evaluated, in words: the model, and the factors in force."""
        factors = (self.raw.get("config") or {}).get("factors")
        given = factors.get("given") if isinstance(factors, dict) else None
        return str(self.model) if given is None else f"{self.model}, factors {given}"

    def command(self) -> str:
        """The lm_eval command that makes such a run again, put together from what the results say of it.

        They do not tell ``--metadata`` and ``--num_fewshot`` from a task's own settings, so these are not there.
        """
        config = self.raw.get("config") or {}
        groups = self.raw.get("group_subtasks") or {}
        children = {child for group in groups.values() for child in group}
        asked = [name for name in (*groups, *self.raw["configs"]) if name not in children]
        words = ["lm_eval", "--model", self.model.kind]
        arguments = {key: _without_folder(value) for key, value in _model_arguments(config).items()}
        if arguments:
            words += ["--model_args", _spelled(arguments)]
        words += ["--tasks", ",".join(dict.fromkeys(asked))]
        if config.get("limit") is not None:
            words += ["--limit", f"{config['limit']:g}"]
        if config.get("gen_kwargs"):
            words += ["--gen_kwargs", _spelled(config["gen_kwargs"])]
        if self.raw.get("chat_template"):
            words += ["--apply_chat_template"]
        if self.raw.get("system_instruction"):
            words += ["--system_instruction", self.raw["system_instruction"]]
        return shlex.join([*words, "--log_samples"])


def read(path: str | Path) -> Results:
    """Read a run from its results JSON, or the newest run below a folder.

    Raises:
        DataError: no such file, no results in the folder, or a file that lm-eval did not write.
    """
    path = Path(path)
    if path.is_dir():
        path = _newest(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder; expected a results JSON of lm_eval --output_path")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); expected a results JSON of lm_eval --output_path") from None
    if not isinstance(raw, dict) or not all(isinstance(raw.get(key), dict) for key in ("results", "configs")):
        raise DataError(f"{path}: has no 'results' and 'configs'; expected a results JSON of lm_eval --output_path")
    with _well_formed(path):
        model_keys = frozenset(_model_arguments(raw.get("config") or {}))
        tasks = {name: _task(path, raw, name, model_keys) for name in raw["configs"] if name in raw["results"]}
        if not tasks:
            raise DataError(f"{path}: holds no scores of any task")
        families = tuple(map(_family, tasks.values()))
        by_name = {task.name: task for family in families for task in family.tasks}
        found = Results(path, _model(raw), by_name, families, raw)
        found.command(), found.subject  # what is asked for later fails here, too, if it must
        return found


@contextmanager
def _well_formed(path: Path) -> Iterator[None]:
    """Within it, what Python says of data in another form becomes an error that names the file."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DataError(
            f"{path}: not as lm_eval writes it ({type(error).__name__}: {error}); evaluate again, or restore the file"
        ) from None


def mismatch(a: Identity, b: Identity, *, prompts_may_differ: bool = False) -> str | None:
    """Say why the scores of two runs of a task may not be held against each other; None where they may.

    Where both runs logged samples, the hashes of what was asked decide; where one did not, what the metadata says of
    the data and the number of examples.
    """
    if a.version != b.version:
        return f"task version {a.version} and {b.version}"
    data_a, data_b = flatten(a.data), flatten(b.data)
    data = [
        f"{key} {data_a.get(key)} and {data_b.get(key)}"
        for key in sorted({*data_a, *data_b})
        if data_a.get(key) != data_b.get(key)
    ]
    told = "; ".join(data[:3]) + ("; ..." if len(data) > 3 else "")
    because = f" ({told})" if data else ""
    if a.examples is not None and b.examples is not None and a.examples != b.examples:
        return f"{a.examples} and {b.examples} examples{because or ' (another --limit?)'}"
    if a.questions is None or b.questions is None:
        return told or None
    if a.questions != b.questions:
        in_both = len(set(a.questions) & set(b.questions))
        return f"another set of examples: {in_both} of {len(a.questions)} questions in common{because}"
    if a.documents != b.documents:
        return f"another set of examples: the documents or the expected answers differ{because}"
    if a.prompts != b.prompts and not prompts_may_differ:
        return "the same examples in other prompts (a chat template, or text cut to another length)"
    return None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Spread nested mappings out, ``{"a": {"b": 1}}`` to ``{"a b": 1}``: the form in which differences are named."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key} ") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat


def _newest(folder: Path) -> Path:
    dated = [(match[1], path) for path in folder.rglob("*.json") if (match := DATE.search(path.stem))]
    if not dated:
        raise DataError(f"{folder}: no results_DATE.json in it or below; run lm_eval with --output_path {folder}")
    return max(dated)[1]


def _task(path: Path, raw: Mapping[str, Any], name: str, model_keys: frozenset[str]) -> Task:
    metadata = raw["configs"][name].get("metadata") or {}
    if "position" in metadata:
        raise DataError(
            f"{path}: {name} is one position of a task, as version 0.1 had them; a task now holds all its "
            "positions, so evaluate again to compare"
        )
    row = raw["results"][name]
    reported = {}
    for key, value in row.items():
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr") and _is_number(value):
            stderr = row.get(f"{metric}_stderr,{filter_name}")
            reported[Measure(metric, filter_name)] = (float(value), float(stderr) if _is_number(stderr) else math.nan)
    directions = (raw.get("higher_is_better") or {}).get(name) or {}
    return Task(
        name=name,
        # lm-eval's own list of versions may carry the data's source, which `mismatch` looks at by itself
        version=str(metadata.get("version", (raw.get("versions") or {}).get(name))),
        position=None,
        data=_data(metadata, model_keys),
        examples=((raw.get("n-samples") or {}).get(name) or {}).get("effective"),
        reported=reported,
        higher_is_better={metric: bool(up) for metric, up in directions.items() if up is not None},
        samples_path=_samples_path(path, name),
    )


def _data(metadata: Mapping[str, Any], model_keys: frozenset[str]) -> dict[str, Any]:
    """What the metadata says of the examples; lm-eval merges the model's arguments into it."""
    return {
        key: _data(value, frozenset()) if isinstance(value, dict) else value
        for key, value in sorted(metadata.items())
        if key not in NOT_THE_DATA and key not in model_keys
    }


def _samples_path(results: Path, task: str) -> Path | None:
    if dated := DATE.search(results.stem):
        path = results.parent / f"samples_{task}_{dated[1]}.jsonl"
        return path if path.is_file() else None
    # The results were renamed. The samples are theirs if the folder holds one set only.
    found = [path for path in results.parent.glob("samples_*.jsonl") if DATE.sub("", path.stem) == f"samples_{task}"]
    if len(found) > 1:
        raise DataError(
            f"{results}: {len(found)} sample files of {task} beside it, and its name has no date to tell which is its "
            "own; keep the name that lm_eval gave it"
        )
    return found[0] if found else None


def _read_samples(path: Path) -> dict[str, dict[QuestionId, Sample]]:
    by_filter: dict[str, dict[QuestionId, Sample]] = {}
    for line in files.read_jsonl(path, required=("doc_id", "doc", "doc_hash", "prompt_hash", "target_hash", "metrics")):
        document = line["doc"]
        question = document.get("question_id", line["doc_id"]) if isinstance(document, dict) else line["doc_id"]
        if not isinstance(question, int):
            question = str(question)
        samples = by_filter.setdefault(str(line.get("filter", "none")), {})
        if question in samples:
            raise DataError(
                f"{path}: question {question} is there twice; the samples of two runs went to one file, "
                "or the task gives two documents the same question_id"
            )
        scores = {metric: float(line[metric]) for metric in line["metrics"] if _is_number(line.get(metric))}
        document_hash = f"{line['doc_hash']} {line['target_hash']}"
        samples[question] = Sample(question, document_hash, line["prompt_hash"], scores)
    return by_filter


def _digest(hashes: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()[:16]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _model(raw: Mapping[str, Any]) -> Model:
    config = raw.get("config") or {}
    arguments, kind = _model_arguments(config), str(config.get("model", ""))
    name = arguments.get("pretrained") or arguments.get("model")
    if name is None and kind == "lpes":  # takes the model that its factors name, or the shipped one
        factors = config.get("factors")
        origin = (factors.get("origin") or {}).get("model") if isinstance(factors, dict) else None
        name = (origin.get("name") if isinstance(origin, dict) else origin) or "reference"
    return Model(kind, _without_folder(str(name or "")), config.get("model_num_parameters"))


def _model_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    arguments = config.get("model_args") or {}
    if isinstance(arguments, str):
        arguments = dict(pair.split("=", 1) for pair in arguments.split(",") if "=" in pair)
    return dict(arguments)


def _spelled(arguments: Mapping[str, Any]) -> str:
    """Arguments as lm_eval reads them from a command: ``a=1,b=2``, or JSON where that would be taken apart wrongly."""
    plain = all(isinstance(value, str | int | float) and "," not in str(value) for value in arguments.values())
    return ",".join(f"{key}={value}" for key, value in arguments.items()) if plain else json.dumps(dict(arguments))


def _without_folder(value: Any) -> Any:
    """Cut an absolute path to its last part: the folder is the machine's, and says nothing of what was evaluated."""
    text = str(value)
    for kind in (PurePosixPath(text), PureWindowsPath(text)):
        if kind.is_absolute():
            return kind.name
    return value


def _family(task: Task) -> Family:
    if not task.positions:
        return Family(task.name, (task,))
    of_each = tuple(task.at(position) for position in task.positions)
    return Family(task.name, of_each, dict(_over_positions(task, of_each[0])))


def _over_positions(task: Task, at_one: Task) -> Iterator[tuple[Measure, OverPositions]]:
    for measure in at_one.reported:
        spread = Measure(f"{measure.metric}_spread", measure.filter)
        if spread in task.reported and not any(map(math.isnan, (*task.reported[measure], *task.reported[spread]))):
            yield measure, OverPositions(*task.reported[measure], *task.reported[spread])
