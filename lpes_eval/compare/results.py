"""One run of lm-eval as it is compared, read from ``results_DATE.json`` and ``samples_TASK_DATE.jsonl``."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lpes_eval import files
from lpes_eval.errors import DataError, UserError
from lpes_eval.files import entry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DATE = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d[.\d]*)$")
"""The end of the stem of every file of one run."""
NOT_THE_DATA = frozenset({"version", "config_source", "data_dir", "text_file", "location"})
"""Entries of a task's metadata that may differ between two runs on the same examples."""
SAMPLE_FIELDS = ("doc_id", "doc", "doc_hash", "prompt_hash", "target_hash")


@dataclass(frozen=True)
class Sample:
    """The answers to one question, as lm-eval logs them under one filter: ``requests`` are its prompts, each with what
    else was sent, ``document`` hashes the document and the expected answer, ``prompt`` the first prompt.
    """

    doc: Any
    target: Any
    requests: list[tuple[str, Any]]
    answers: list[Any]
    scores: dict[str, float]
    document: str
    prompt: str


@dataclass(frozen=True)
class Metric:
    """One metric of a task under one of its filters, labelled by position (``"50 %"``), or ``"all"`` without positions.

    ``values`` has the score at each label as reported, NaN for none; ``by_question`` one score a question, in the same
    order at every label, or None without samples or where the score is not their average (perplexity).
    ``higher_is_better`` is None where lm-eval does not say.
    """

    higher_is_better: bool | None
    values: dict[str, float]
    by_question: dict[str, list[float]] | None

    @property
    def questions(self) -> int:
        """How many there are; 0 where their scores are not known."""
        return max(map(len, (self.by_question or {}).values()), default=0)

    def scores(self, label: str) -> list[float]:
        """The questions' scores at a label; none where they are not known."""
        return (self.by_question or {}).get(label, [])

    def matrix(self, labels: Iterable[str]) -> NDArray[np.float64]:
        """The questions' scores, shape (questions, labels)."""
        import numpy as np

        return np.column_stack([self.scores(label) for label in labels])


@dataclass(frozen=True)
class Task:
    """One task of a run, or a group of tasks: ``data`` is what the metadata says of the examples.

    ``documents`` is a digest of all documents and expected answers, ``prompts`` one of all prompts, None without
    samples. ``metrics`` are keyed ``METRIC,FILTER``, ``samples`` by filter. ``positions`` are in percent.
    """

    version: str
    data: dict[str, Any]
    examples: int | None
    documents: str | None
    prompts: str | None
    metrics: dict[str, Metric]
    positions: list[float] = field(default_factory=list, compare=False)
    samples: dict[str, list[Sample]] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Results:
    """One run of lm-eval: all its tasks are ``leaves``; in ``tasks`` a group that averages them stands for its own."""

    path: Path
    model: str
    factors: str | None
    provenance: Mapping[str, Any]
    tasks: Mapping[str, Task]
    leaves: Mapping[str, Task]
    per_layer: tuple[float, ...] = ()

    @property
    def side(self) -> tuple[str, str]:
        """The model with its factors, and the file: what a report says of the run."""
        return f"{self.model}, factors {self.factors}" if self.factors else self.model, str(self.path)


def mismatch(a: Task, b: Task, *, prompts_may_differ: bool = False) -> str | None:
    """Why two runs of a task may not be compared, by hashes or, without samples, by metadata; None where they may."""
    if a.version != b.version:
        return f"task version {a.version} and {b.version}"
    data = [f"{key} {in_a} and {in_b}" for key, in_a, in_b in differing(a.data, b.data)]
    listed = "; ".join(data[:3]) + ("; ..." if len(data) > 3 else "")
    because = f" ({listed})" if data else ""
    if None not in (a.examples, b.examples) and a.examples != b.examples:
        return f"{a.examples} and {b.examples} examples{because or ' (another --limit?)'}"
    if a.documents is None or b.documents is None:
        return listed or None
    if a.documents != b.documents:
        return f"another set of examples: the documents or the expected answers differ{because}"
    if a.prompts != b.prompts and not prompts_may_differ:
        why = because or " (a chat template, or text cut to another length)"
        return f"the same examples in other prompts{why}"
    return None


def differing(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each entry in which two nested mappings differ: its keys with spaces between, and both values or None."""
    for key in sorted({*a, *b}):
        in_a, in_b = a.get(key), b.get(key)
        if isinstance(in_a, Mapping) or isinstance(in_b, Mapping):
            in_a, in_b = (side if isinstance(side, Mapping) else {} for side in (in_a, in_b))
            yield from differing(in_a, in_b, f"{prefix}{key} ")
        elif in_a != in_b:
            yield f"{prefix}{key}", in_a, in_b


def position_of(label: str) -> float:
    """A position in percent, from its label."""
    return float(label.removesuffix(" %"))


def label_of(position: float) -> str:
    """The label of a position in percent."""
    return f"{position:g} %"


def read(path: str | Path) -> Results:
    """Read a run from its results JSON, or the newest one below a folder; ``DataError`` where lm-eval wrote none."""
    path = Path(path)
    if path.is_dir():
        dated = [(match[1], file) for file in path.rglob("*.json") if (match := DATE.search(file.stem))]
        if not dated:
            raise DataError(f"{path}: no results_DATE.json in it or below; run lm_eval with --output_path {path}")
        path = max(dated)[1]
    with well_formed(path, "not a results JSON as lm_eval --output_path writes it", "give a run's file or folder"):
        raw = files.parse(path.read_bytes(), str(path), finite=False)
        children = {group: [*map(str, names)] for group, names in entry(raw, "group_subtasks").items() if names}
        names = [name for name in entry(raw, "results") if name not in children]
        tasks = {name: _task(raw, name, _samples(path, name)) for name in names}
        if not any(task.metrics for task in tasks.values()):
            raise ValueError("no scores of any task")
        given = _factors(raw).get("given")
        per_layer = tuple(map(float, _factors(raw).get("per_layer") or ()))
        shown = _with_groups(raw, tasks, children)
        return Results(path, _model(raw), given and str(given), _provenance(raw), shown, tasks, per_layer)


@contextmanager
def well_formed(path: Path, what: str, way_out: str) -> Iterator[None]:
    """Within it, any error in a file that is missing or in another form becomes a ``DataError`` that names the file."""
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder; {way_out}")
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) and not str(error).startswith(f"{path}: "):  # of another file
            raise
        reason = str(error).removeprefix(f"{path}: ")
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise DataError(f"{path}: {what} ({kind}{reason}); {way_out}") from None


def _task(raw: Mapping[str, Any], name: str, samples: dict[str, list[Sample]]) -> Task:
    metadata = entry(raw, "configs", name, "metadata")
    lines = next(iter(samples.values()), [])  # every filter reads the same

    def digest(of: str) -> str | None:
        hashes = "\n".join(getattr(sample, of) for sample in lines)
        return hashlib.sha256(hashes.encode()).hexdigest()[:16] if lines else None

    positions = metadata.get("positions")
    positions = [*map(float, positions)] if isinstance(positions, list) else []
    examples = entry(raw, "n-samples", name).get("effective")
    return Task(
        # lm-eval's own list of versions may carry the data's source, which `mismatch` looks at by itself
        version=str(metadata.get("version", entry(raw, "versions").get(name))),
        data=_data(metadata, NOT_THE_DATA | _model_args(raw).keys()),
        examples=None if examples is None else int(examples),
        documents=digest("document"),
        prompts=digest("prompt"),
        metrics=_metrics(entry(raw, "results", name), entry(raw, "higher_is_better", name), samples, positions),
        positions=positions,
        samples=samples,
    )


def _metrics(
    row: Mapping[str, Any],
    directions: Mapping[str, Any],
    samples: Mapping[str, Sequence[Sample]],
    positions: Sequence[float],
) -> dict[str, Metric]:
    """Every reported score, in one metric each: under its own name, or in that of its metric by position."""
    scores = {key: number(value) for key, value in row.items() if "," in key and "_stderr," not in key}
    metrics = dict[str, Metric]()

    def add(key: str, keys: Mapping[str, str]) -> None:
        name, _, filter_name = key.partition(",")
        columns: dict[str, list[float]] = {}
        for label, of in keys.items():
            column = of.partition(",")[0]
            columns[label] = [sample.scores.get(column, math.nan) for sample in samples.get(filter_name, ())]
        averaged = all(_is_mean(column, scores[keys[label]]) for label, column in columns.items())
        up, values = directions.get(name), {label: scores[of] for label, of in keys.items()}
        metrics[key] = Metric(up if isinstance(up, bool) else None, values, columns if averaged else None)

    left = list(scores)
    for key, mean in scores.items():
        name, _, filter_name = key.partition(",")
        at = {label_of(position): f"{name}@{position:g},{filter_name}" for position in sorted(positions)}
        if not at or not scores.keys() >= {*at.values()}:
            continue
        values = [scores[of] for of in at.values()]
        if not any(map(math.isnan, values)) and not _is_mean(values, mean):
            continue
        add(key, at)
        worst = (max if directions.get(name) is False else min)(values)
        shown = {key, *at.values()}
        for of, value in ((f"{name}_worst", worst), (f"{name}_spread", max(values) - min(values))):
            has_its_own = any(of in sample.scores for sample in samples.get(filter_name, ()))
            if not has_its_own and _is_mean([value], scores.get(f"{of},{filter_name}", math.nan)):
                shown.add(f"{of},{filter_name}")
        left = [key for key in left if key not in shown]
    for key in left:
        add(key, {"all": key})
    return metrics


def _is_mean(values: Sequence[float], value: float) -> bool:
    """Whether a reported score is the average of these; never where one is missing, or there are none."""
    return bool(values) and math.isclose(fmean(values), value, rel_tol=1e-6, abs_tol=1e-9)


def _with_groups(
    raw: Mapping[str, Any], tasks: Mapping[str, Task], children: Mapping[str, Sequence[str]]
) -> dict[str, Task]:
    """The tasks, with the outermost groups that are averages over samples in place of theirs."""
    inner = {child for group in children.values() for child in group}

    def leaves(name: str) -> list[str]:
        return [leaf for child in children[name] for leaf in leaves(child)] if name in children else [name]

    shown = dict(tasks)
    for group in [name for name in children if name not in inner]:
        parts = {name: tasks[name] for name in leaves(group) if name in tasks}
        filters = set.intersection(*({*part.samples} for part in parts.values())) if parts else ()
        samples = {key: [sample for part in parts.values() for sample in part.samples[key]] for key in sorted(filters)}
        data = {name: part.data for name, part in parts.items()}
        examples = sum(part.examples or 0 for part in parts.values())
        task = replace(_task(raw, group, samples), data=data, examples=examples)
        is_whole = parts and all(part.metrics.keys() == task.metrics.keys() for part in parts.values())
        if is_whole and all(metric.by_question for metric in task.metrics.values()):
            shown = {name: part for name, part in shown.items() if name not in parts} | {group: task}
    return shown


def _data(metadata: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """What the metadata says of the examples; lm-eval merges the model's arguments into it."""
    shown = {key: value for key, value in sorted(metadata.items()) if key not in left_out}
    return {key: _data(value, NOT_THE_DATA) if isinstance(value, dict) else value for key, value in shown.items()}


def _samples(results: Path, task: str) -> dict[str, list[Sample]]:
    """The samples of a task that were logged with a results JSON, by filter, in the order of their questions."""
    dated = DATE.search(results.stem)
    path = results.parent / f"samples_{task}{dated[0] if dated else ''}.jsonl"
    if not path.is_file():
        return {}
    by_filter: dict[str, list[dict[str, Any]]] = {}
    with well_formed(path, "not as lm_eval writes it", "evaluate again, or restore the file"):
        for line in files.read_jsonl(path, required=SAMPLE_FIELDS, finite=False):  # a model may overflow
            by_filter.setdefault(str(line.get("filter", "none")), []).append(line)
        return {name: _in_order(path, lines) for name, lines in by_filter.items()}


def _in_order(path: Path, lines: Sequence[dict[str, Any]]) -> list[Sample]:
    """The samples by question, or by document where a task gives several documents the same ``question_id``."""
    for name in ("question_id", "doc_id"):
        keyed = {}
        for line in lines:
            holder = line["doc"] if name == "question_id" and isinstance(line["doc"], dict) else line
            question = holder.get(name)
            question = question if isinstance(question, int) else str(question)
            keyed[isinstance(question, str), question] = line
        if len(keyed) == len(lines):
            return [_sample(keyed[key]) for key in sorted(keyed)]
    raise DataError(f"{path}: question {question} is there twice; the samples of two runs went to one file")


def _sample(line: Mapping[str, Any]) -> Sample:
    requests = [(request.get("arg_0", ""), request.get("arg_1")) for request in entry(line, "arguments").values()]
    answers = line.get("filtered_resps") or [""]
    return Sample(
        doc=line["doc"],
        target=line.get("target"),
        # of an API of chats lm-eval logs a list with the prompt's text
        requests=[("".join(map(str, text)) if isinstance(text, list) else str(text), end) for text, end in requests],
        answers=answers if isinstance(answers, list) else [answers],
        scores={name: score for name, value in line.items() if not math.isnan(score := number(value))},
        document=f"{line['doc_hash']} {line['target_hash']}",
        prompt=str(line["prompt_hash"]),
    )


def number(value: Any) -> float:
    """A score; NaN for what is none, such as lm-eval's ``"N/A"``, or too large to be one."""
    is_score = isinstance(value, int | float) and -1e100 < value < 1e100
    return float(value) if is_score else math.nan


def _model_args(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``--model_args``, which lm-eval may have kept as they were typed."""
    arguments = entry(raw, "config").get("model_args")
    if isinstance(arguments, str):
        return dict(pair.split("=", 1) for pair in arguments.split(",") if "=" in pair)
    return dict(arguments or {})


def _factors(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the model type said of its factors."""
    factors = entry(raw, "config").get("factors")
    return factors if isinstance(factors, dict) else {}


def _model(raw: Mapping[str, Any]) -> str:
    """lm-eval's model type, the name on the Hub or the last part of a path, and the parameters."""
    config = entry(raw, "config")
    arguments, kind = _model_args(raw), str(config.get("model", ""))
    name = arguments.get("pretrained") or arguments.get("model")
    if name is None and kind == "lpes":  # the factors' model, or the shipped one
        origin = entry(_factors(raw), "origin").get("model")
        name = (origin.get("name") if isinstance(origin, dict) else origin) or "lpes-eval/reference"
    path, parameters = Path(str(name or "")), config.get("model_num_parameters")
    name = path.name if path.is_absolute() else str(name or "")  # the folder is the machine's
    size = "" if parameters is None else f", {int(parameters):,} parameters"
    return f"{kind} {name or '(its default model)'}{size}"


def _provenance(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Date, packages, the model's dtype and revision, and the hash of its factors."""
    date, config = raw.get("date"), entry(raw, "config")
    torch = re.search(r"PyTorch version: (\S+)", str(raw.get("pretty_env_info")))
    packages = {name: raw.get(f"{name}_version") for name in ("lm_eval", "transformers")}
    packages = {"lpes_eval": config.get("lpes_eval"), **packages, "torch": torch and torch[1]}
    model = {key: config.get(f"model_{key}") for key in ("dtype", "revision", "sha")}
    model["factors"] = _factors(raw).get("sha256")
    return {
        "date": datetime.fromtimestamp(date, UTC).isoformat(timespec="seconds") if isinstance(date, float) else None,
        "packages": {name: value and str(value) for name, value in packages.items()},
        "model": {name: value and str(value) for name, value in model.items()},
    }
