"""One run of lm-eval, reduced to what is compared, and how it is read from what lm-eval wrote.

lm-eval writes ``results_DATE.json`` and, with ``--log_samples``, ``samples_TASK_DATE.jsonl`` into a folder named after
the model. A task that reports a metric ``M`` and ``M@P`` is one by position: P is the position of the gold item in
percent.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_eval import files, reference
from lpes_eval.compare import provenance
from lpes_eval.errors import DataError, UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DATE = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d[.\d]*)$")
"""The end of the stem of every file of one run."""

NOT_THE_DATA = frozenset({"version", "config_source", "data_dir", "text_file", "location"})
"""Entries of a task's metadata that may differ between two runs on the same examples."""


SAMPLE_FIELDS = ("doc_id", "doc", "doc_hash", "prompt_hash", "target_hash")


@dataclass(frozen=True)
class Model:
    """What was evaluated: lm-eval's model type, the name on the Hub or the last part of the local path (empty where the
    type decides), and the number of parameters where lm-eval counted them.
    """

    kind: str
    name: str
    parameters: int | None

    def __str__(self) -> str:
        """Name it as a message does."""
        size = "" if self.parameters is None else f", {self.parameters:,} parameters"
        return f"{self.kind} {self.name or '(its default model)'}{size}"

    def is_same(self, other: Model) -> bool:
        """Whether both are one model, a shipped one under any of its names."""
        a, b = (replace(model, name=reference.NAMES.get(model.name, model.name)) for model in (self, other))
        return a == b


@dataclass(frozen=True)
class Metric:
    """One metric of a task under one of its filters, labelled by position (``"50 %"``), or ``"all"`` without positions.

    ``values`` has the score at each label as reported; ``by_question`` one score a question, at every label in the same
    order. It is None where no samples were logged, or where the score is not their average (perplexity, a geometric
    mean of means).
    """

    higher_is_better: bool
    values: Mapping[str, float]
    by_question: Mapping[str, tuple[float, ...]] | None

    @property
    def questions(self) -> int:
        """How many were asked; 0 where their scores are not known."""
        return max(map(len, (self.by_question or {}).values()), default=0)

    def scores(self, label: str) -> tuple[float, ...]:
        """The questions' scores at a label; none where they are not known."""
        return (self.by_question or {}).get(label, ())

    def matrix(self, labels: Iterable[str]) -> NDArray[np.float64]:
        """The questions' scores, shape (questions, labels)."""
        import numpy as np

        assert self.by_question is not None
        return np.column_stack([self.by_question[label] for label in labels])


@dataclass(frozen=True)
class Task:
    """One task of a run: what was asked, and what it scored.

    ``data`` is what the metadata says of the data, such as source and split. ``documents`` is a digest of lm-eval's
    hashes of all documents and expected answers, ``prompts`` one of all prompts, chat template included; both are None
    where no samples were logged. ``metrics`` are keyed as in lm-eval's results, ``METRIC,FILTER``.
    """

    version: str
    data: Mapping[str, Any]
    examples: int | None
    documents: str | None
    prompts: str | None
    metrics: Mapping[str, Metric]


@dataclass(frozen=True)
class Results:
    """One run of lm-eval: its file, the model, the factors as given (None where that is not known), where the scores
    came from (date, command, packages, dtype, hashes), the tasks by name, one factor a layer (none where the model has
    none, or does not say), and the results JSON itself, if it is one.

    A group of tasks whose score is the mean over all their samples (mmlu) is one task, in place of its ``members``.
    """

    path: Path
    model: Model
    factors: str | None
    provenance: Mapping[str, Any]
    tasks: Mapping[str, Task]
    per_layer: tuple[float, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    members: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)

    def samples(self, task: str, filter_name: str) -> list[dict[str, Any]]:
        """The samples of a task under a filter, in the order of its questions."""
        names = self.members.get(task, (task,))
        return [line for name in names for line in read_samples(self.path, name)[filter_name]]

    @property
    def side(self) -> tuple[str, str]:
        """The model with its factors, and the file: what a report says of the run."""
        return f"{self.model}, factors {self.factors}" if self.factors else str(self.model), str(self.path)


def mismatch(a: Task, b: Task, *, prompts_may_differ: bool = False) -> str | None:
    """Say why the scores of two runs of a task may not be held against each other; None where they may.

    Where both runs logged samples, the hashes of what was asked decide; where one did not, what the metadata says of
    the data and the number of examples.
    """
    if a.version != b.version:
        return f"task version {a.version} and {b.version}"
    data = [f"{key} {in_a} and {in_b}" for key, in_a, in_b in differing(a.data, b.data)]
    told = "; ".join(data[:3]) + ("; ..." if len(data) > 3 else "")
    because = f" ({told})" if data else ""
    if None not in (a.examples, b.examples) and a.examples != b.examples:
        return f"{a.examples} and {b.examples} examples{because or ' (another --limit?)'}"
    if a.documents is None or b.documents is None:
        return told or None
    if a.documents != b.documents:
        return f"another set of examples: the documents or the expected answers differ{because}"
    if a.prompts != b.prompts and not prompts_may_differ:
        return (
            f"the same examples in other prompts{because or ' (a chat template, or text cut to another length)'}; "
            "--other-prompts compares them all the same"
        )
    return None


def differing(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each entry in which two nested mappings differ: its keys with spaces between, and both values or None."""
    for key in sorted({*a, *b}):
        one, other = a.get(key), b.get(key)
        if isinstance(one, Mapping) or isinstance(other, Mapping):
            one, other = (side if isinstance(side, Mapping) else {} for side in (one, other))
            yield from differing(one, other, f"{prefix}{key} ")
        elif one != other:
            yield f"{prefix}{key}", one, other


def read(path: str | Path) -> Results:
    """Read a run from its results JSON, or the newest run below a folder; samples from the files beside it.

    Raises:
        DataError: no such file, no results in the folder, or a file that lm-eval did not write.
    """
    path = Path(path)
    if path.is_dir():
        dated = [(match[1], found) for found in path.rglob("*.json") if (match := DATE.search(found.stem))]
        if not dated:
            raise DataError(f"{path}: no results_DATE.json in it or below; run lm_eval with --output_path {path}")
        path = max(dated)[1]
    with well_formed(path, "not a results JSON as lm_eval --output_path writes it", "give a run's file or folder"):
        raw = json.loads(path.read_text(encoding="utf-8"))
        tasks = {name: _task(path, raw, name) for name in raw["configs"] if name in raw["results"]}
        if not tasks:
            raise ValueError("no scores of any task")
        tasks, members = _with_groups(raw, tasks)
        found = provenance.factors(raw)
        named, per_layer = found.get("given"), tuple(map(float, found.get("per_layer") or ()))
        factors = None if named is None else str(named)
        return Results(path, _model(raw), factors, provenance.of(raw), tasks, per_layer, raw, members)


@contextmanager
def well_formed(path: Path, what: str, way_out: str) -> Iterator[None]:
    """Within it, what Python says of a file that is missing or of data in another form names the file and the way out.

    Raises:
        DataError: in place of Python's own errors.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder; {way_out}")
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # also csv.Error, which is no ValueError
        raise DataError(f"{path}: {what} ({type(error).__name__}: {error}); {way_out}") from None


def _task(path: Path, raw: Mapping[str, Any], name: str) -> Task:
    metadata = raw["configs"][name].get("metadata") or {}
    if "position" in metadata:
        raise DataError(f"{path}: {name} is one position of a task, as version 0.1 had them; evaluate again")
    samples = read_samples(path, name)
    asked = next(iter(samples.values()), None)  # every filter reads the same answers to the same prompts
    directions = (raw.get("higher_is_better") or {}).get(name) or {}
    return Task(
        # lm-eval's own list of versions may carry the data's source, which `mismatch` looks at by itself
        version=str(metadata.get("version", (raw.get("versions") or {}).get(name))),
        data=_data(metadata, NOT_THE_DATA | provenance.model_arguments(raw).keys()),
        examples=((raw.get("n-samples") or {}).get(name) or {}).get("effective"),
        documents=_digest(f"{sample['doc_hash']} {sample['target_hash']}" for sample in asked) if asked else None,
        prompts=_digest(sample["prompt_hash"] for sample in asked) if asked else None,
        metrics=_metrics(raw["results"][name], directions, samples),
    )


def _with_groups(raw: Mapping[str, Any], tasks: dict[str, Task]) -> tuple[dict[str, Task], dict[str, Sequence[str]]]:
    """The tasks, with the outermost groups that can be pooled in place of their tasks; and these groups' tasks."""
    children: Mapping[str, Sequence[str]] = raw.get("group_subtasks") or {}
    inner = {child for group in children.values() for child in group}

    def leaves(name: str) -> list[str]:
        return [leaf for child in children[name] for leaf in leaves(child)] if name in children else [name]

    members: dict[str, Sequence[str]] = {}
    for group in children:
        names = leaves(group)
        if group not in inner and names and tasks.keys() >= {*names}:
            parts = {name: tasks[name] for name in names}
            if pooled := _pooled(raw["results"].get(group) or {}, [*parts.values()]):
                members[group] = names
                own = Task(
                    version=str((raw.get("versions") or {}).get(group)),
                    data={name: part.data for name, part in parts.items()},
                    examples=sum(part.examples or 0 for part in parts.values()) or None,
                    documents=_digest(str(part.documents) for part in parts.values()),
                    prompts=_digest(str(part.prompts) for part in parts.values()),
                    metrics=pooled,
                )
                tasks = {name: task for name, task in tasks.items() if name not in parts} | {group: own}
    return tasks, members


def _pooled(row: Mapping[str, Any], tasks: Sequence[Task]) -> dict[str, Metric]:
    """The metrics of a group's tasks over all their samples; none where lm-eval's score of one is not their mean."""
    metrics: dict[str, Metric] = {}
    for key, metric in tasks[0].metrics.items():
        columns = [task.metrics[key].scores("all") for task in tasks if key in task.metrics]
        pooled = tuple(score for column in columns for score in column)
        if len(columns) < len(tasks) or not all(columns) or key not in row:
            return {}
        mean = math.fsum(pooled) / len(pooled)
        if not math.isclose(mean, _number(row[key]), rel_tol=1e-6, abs_tol=1e-9):
            return {}
        metrics[key] = replace(metric, values={"all": mean}, by_question={"all": pooled})
    return metrics


def _metrics(
    row: Mapping[str, Any], directions: Mapping[str, Any], samples: Mapping[str, list[dict[str, Any]]]
) -> dict[str, Metric]:
    reported: dict[str, dict[str, float]] = {}  # filter -> metric -> score
    for key, value in row.items():
        name, comma, filter_name = key.partition(",")
        if comma and not name.endswith("_stderr") and not math.isnan(number := _number(value)):
            reported.setdefault(filter_name, {})[name] = number
    metrics = {}
    for filter_name, values in reported.items():
        lines = samples.get(filter_name, [])
        for metric, names in _labels(values).items():
            columns = {label: tuple(_number(line.get(name)) for line in lines) for label, name in names.items()}
            averaged = lines and all(
                math.isclose(math.fsum(column) / len(lines), values[names[label]], rel_tol=1e-6, abs_tol=1e-9)
                for label, column in columns.items()
            )
            metrics[f"{metric},{filter_name}"] = Metric(
                higher_is_better=directions.get(metric) is not False,
                values={label: values[name] for label, name in names.items()},
                by_question=columns if averaged else None,
            )
    return metrics


def _labels(names: Collection[str]) -> dict[str, dict[str, str]]:
    """Metric -> label -> the metric's name there; of a task by position only metrics that it has at positions."""
    labels: dict[str, dict[str, str]] = {}
    found = [(float(at[2]), at[1], name) for name in names if (at := re.fullmatch(r"(.+)@(\d+(?:\.\d+)?)", name))]
    for position, metric, name in sorted(found):
        if metric in names:
            labels.setdefault(metric, {})[f"{position:g} %"] = name
    return labels or {name: {"all": name} for name in names}


def position_of(label: str) -> float:
    """A position in percent, from its label."""
    return float(label.removesuffix(" %"))


def _data(metadata: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """What the metadata says of the examples; lm-eval merges the model's arguments into it."""
    kept = {key: value for key, value in sorted(metadata.items()) if key not in left_out}
    return {key: _data(value, NOT_THE_DATA) if isinstance(value, dict) else value for key, value in kept.items()}


def read_samples(results: Path, task: str) -> dict[str, list[dict[str, Any]]]:
    """The samples of a task that were logged with a results JSON.

    Returns:
        Filter -> the samples in the order of their questions, all fields of them; empty where none were logged.

    Raises:
        DataError: samples in another form; a question twice; renamed results in a folder with samples of several runs.
    """
    dated = DATE.search(results.stem)
    logged = [path for path in results.parent.glob("samples_*.jsonl") if DATE.sub("", path.stem) == f"samples_{task}"]
    found = [path for path in logged if not dated or path.stem.endswith(dated[0])]
    if len(found) > 1:
        raise DataError(
            f"{results}: {len(found)} sample files of {task} beside it, and its name has no date to tell which is its "
            "own; keep the name that lm_eval gave it"
        )
    by_filter: dict[str, list[dict[str, Any]]] = {}
    for path in found:
        with well_formed(path, "not as lm_eval writes it", "evaluate again, or restore the file"):
            for line in files.read_jsonl(path, required=SAMPLE_FIELDS, finite=False):  # a model may overflow
                by_filter.setdefault(str(line.get("filter", "none")), []).append(line)
            by_filter = {name: _in_order(path, lines) for name, lines in by_filter.items()}
    return by_filter


def _in_order(path: Path, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples by question, or by document where a task gives several documents the same ``question_id``."""
    for name in ("question_id", "doc_id"):
        keyed = {}
        for line in lines:
            named = line["doc"] if name == "question_id" and isinstance(line["doc"], dict) else line
            question = named.get(name)
            keyed[not isinstance(question, int), question if isinstance(question, int) else str(question)] = line
        if len(keyed) == len(lines):
            return [keyed[key] for key in sorted(keyed)]
    raise DataError(f"{path}: question {question} is there twice; the samples of two runs went to one file")


def _digest(hashes: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()[:16]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _model(raw: Mapping[str, Any]) -> Model:
    config = raw.get("config") or {}
    arguments, kind = provenance.model_arguments(raw), str(config.get("model", ""))
    name = arguments.get("pretrained") or arguments.get("model")
    if name is None and kind == "lpes":  # takes the model that its factors name, or the shipped one
        origin = (provenance.factors(raw).get("origin") or {}).get("model")
        name = (origin.get("name") if isinstance(origin, dict) else origin) or "lpes-eval/reference"
    parameters = config.get("model_num_parameters")
    return Model(kind, str(provenance.without_folder(name or "")), None if parameters is None else int(parameters))
