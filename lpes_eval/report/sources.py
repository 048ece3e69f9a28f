"""What a page is made of: runs of lm-eval, which of them can be paired, and searches, their folders read as data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lpes_eval import factors
from lpes_eval.compare import results
from lpes_eval.compare.comparison import Comparison, compare
from lpes_eval.compare.results import Metric, Results, mismatch, well_formed
from lpes_eval.errors import UserError
from lpes_eval.files import unseal
from lpes_eval.report import published

ATTENTION = "lpes-eval attention"
"""The format of ``attention.json``."""
NO_ATTENTION = ("not what lpes-eval attention writes", "measure it again")


@dataclass(frozen=True, eq=False)
class Run:
    """A run of lm-eval under the name that it has on the page, and its place among the runs, which is its colour."""

    name: str
    results: Results
    place: int

    @property
    def is_published(self) -> bool:
        """Whether it is a curve of other people's, of other questions than one's own."""
        return self.results.model.kind == published.KIND

    @property
    def facts(self) -> dict[str, Any]:
        """Where its scores came from, and what they cost."""
        known = {"packages": {}, "model": {}, **self.results.provenance}
        seconds = self.results.seconds
        return {
            "model": str(self.results.model),
            "factors": self.results.factors,
            "results": self.results.path,
            "date": known.get("date"),
            "time": seconds and f"{seconds:,.0f} s",
            "questions": ", ".join(f"{name} {task.examples}" for name, task in self.results.tasks.items()),
            "dtype": known["model"].get("dtype"),
            "packages": ", ".join(f"{name} {version}" for name, version in known["packages"].items() if version),
        }


class Measured(NamedTuple):
    """What a search measured on held-out examples: by its name, and its place, which is its colour."""

    name: str
    place: int
    is_published: bool = False


@dataclass(frozen=True)
class Panel:
    """One metric of one task, on the same examples, in all the runs (or searches' held-out scores) that have it."""

    title: str
    runs: Mapping[Run | Measured, Metric]

    @property
    def by_position(self) -> bool:
        """Whether it has a score at each position."""
        return "all" not in next(iter(self.runs.values())).values


@dataclass(frozen=True)
class Pair:
    """Two runs on the same examples of these tasks, and what `compare` says of them."""

    a: Run
    b: Run
    report: Comparison

    @property
    def title(self) -> str:
        """Both runs' names."""
        return f"{self.a.name} → {self.b.name}"


@dataclass(frozen=True)
class Search:
    """A search, finished or not: its settings, the journal's entries in their order, and the factors found.

    ``lower`` is whether lower is better for one of its tasks.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]
    entries: Sequence[Mapping[str, Any]]
    found: factors.Factors | None
    finished: bool
    lower: bool = False

    @property
    def individuals(self) -> list[Mapping[str, Any]]:
        """The entries that an optimiser asked for."""
        return [entry for entry in self.entries if entry.get("generation") is not None]

    @property
    def full(self) -> list[Mapping[str, Any]]:
        """Those of them that were not given up early."""
        return [entry for entry in self.individuals if "stopped_after" not in entry]

    @property
    def baselines(self) -> list[Mapping[str, Any]]:
        """The plain model's entry, the first one, which an optimiser may have asked for too."""
        return list(self.entries[:1])

    @property
    def facts(self) -> dict[str, Any]:
        """What it is, what it cost so far, and the fittest of the individuals that were asked most."""
        individuals, full, found = self.individuals, self.full, self.found
        most = max((entry["prompts"] for entry in full), default=0)
        best = max((entry["fitness"] for entry in full if entry["prompts"] == most), default=0.0)
        prompts, seconds = (sum(entry[what] for entry in individuals) for what in ("prompts", "seconds"))
        return {
            "folder": self.folder,
            "optimiser": self.settings.get("optimizer"),
            "curve": self.settings.get("curve"),
            "individuals": f"{len(individuals)}, of which {len(individuals) - len(full)} given up early",
            "cost": f"{prompts:,} prompts, {seconds:,.0f} s",
            "fittest": full and f"{best:.4f} on {most} prompts",
            "factors": found and " ".join(f"{s:.3g}" for s in found.per_layer()),
        }


@dataclass(frozen=True)
class Attention:
    """What `lpes-eval attention` measured, as its JSON has it."""

    name: str
    path: Path
    data: Mapping[str, Any]


def read(paths: Sequence[str | Path]) -> tuple[list[Run], list[Search], list[Attention]]:
    """Read each path: the folder of a search, or of `attention`; published answers (CSV); results of lm-eval.

    Raises:
        DataError: none of these.
    """
    runs: list[Run] = []
    searches: list[Search] = []
    attentions: list[Attention] = []
    given = [Path(path) for path in paths]
    for name, path in zip(numbered([name_of(path) for path in given]), given, strict=True):
        if (path / "journal.jsonl").is_file():
            searches.append(search(name, path))
        elif (file := path / "attention.json" if path.is_dir() else path).name == "attention.json" and file.is_file():
            attentions.append(_attention(name, file))
        else:
            read_one = published.read if path.suffix == ".csv" else results.read
            runs.append(Run(name, read_one(path), len(runs)))
    return runs, searches, attentions


def name_of(path: Path) -> str:
    """What a run or search is called: as its folder."""
    name = path.resolve().name if path.is_dir() else results.DATE.sub("", path.stem)
    # as lm-eval names its file and README.md the folder of folders
    return path.resolve().parent.name if name == "results" else name


def numbered(names: Sequence[str], number: str = " ({})") -> list[str]:
    """The names, each with its number where it occurs again."""
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name + number.format(n) if n > 1 else name for name, n in zip(names, counts, strict=True)]


def panels(runs: Sequence[Run]) -> list[Panel]:
    """Group the runs' scores: what may stand in one picture.

    These are scores on the same examples; published ones join those of the same task and length.
    """
    groups: list[list[tuple[Run, str]]] = []
    for run in runs:
        for name in run.results.tasks:
            for members in groups:
                if all(_stand_together(*one, run, name) for one in members):
                    members.append((run, name))
                    break
            else:
                groups.append([(run, name)])
    found = []
    for members in groups:
        tasks = {run: run.results.tasks[name] for run, name in members}
        name = min(members, key=lambda one: one[0].is_published)[1]
        for key in dict.fromkeys(key for task in tasks.values() for key in task.metrics):
            title = ", ".join([name, *_size(tasks[members[0][0]]), key.removesuffix(",none")])
            having = [(run, task.metrics[key]) for run, task in tasks.items() if key in task.metrics]
            for whole in (False, True):  # with a score at each position, and with one alone
                of_form: dict[Run | Measured, Metric] = {r: m for r, m in having if ("all" in m.values) == whole}
                found += [Panel(title, of_form)] if of_form else []
    return found


def _stand_together(a: Run, name_a: str, b: Run, name_b: str) -> bool:
    tasks = a.results.tasks[name_a], b.results.tasks[name_b]
    if a.is_published or b.is_published:  # mdqa_pos_20 is mdqa_pos of 20 documents
        benchmarks = {re.sub(r"_\d+$", "", name) for name in (name_a, name_b)}
        return len(benchmarks) == 1 and _size(tasks[0]) == _size(tasks[1])
    return name_a == name_b and mismatch(*tasks, prompts_may_differ=True) is None


def _size(task: results.Task) -> list[str]:
    """The length of a task's contexts, as a person says it."""
    return [f"{task.data[key]} {key.removeprefix('num_')}" for key in sorted(task.data) if key.startswith("num_")]


def pairs(runs: Sequence[Run], prompts_may_differ: bool = False) -> tuple[list[Pair], list[str]]:
    """Each task of a run beside the first run before it that was asked the same; notes on what cannot be compared."""
    found, notes = [], []
    runs = [run for run in runs if not run.is_published]
    for i, b in enumerate(runs[1:], 1):
        left = dict(b.results.tasks)
        alone = left.keys() - {name for a in runs[:i] for name in a.results.tasks}
        for a in runs[:i]:
            asked = {}
            for name in (name for name in a.results.tasks if name in left):
                tasks = a.results.tasks[name], left[name]
                reason = mismatch(*tasks, prompts_may_differ=prompts_may_differ)
                if None in [task.documents for task in tasks]:
                    reason = "no samples were logged (lm_eval --log_samples)"
                if reason:
                    notes.append(f"{a.name} and {b.name}, {name}: {reason}.")
                else:
                    asked[name] = tasks[0]
            if asked:
                own = replace(a.results, tasks=asked)
                theirs = replace(b.results, tasks={name: left[name] for name in left if name in {*asked, *alone}})
                try:
                    found.append(Pair(a, b, compare(own, theirs, prompts_may_differ=prompts_may_differ)))
                except UserError as error:
                    notes.append(f"{a.name} and {b.name}: {error}.")
                else:
                    left = {name: task for name, task in left.items() if name not in theirs.tasks}
    return found, notes


def search(name: str, folder: Path) -> Search:
    """A search, read from its folder as far as it went; ``DataError`` where it is none."""
    way_out = "take the folder of a search, as python -m search.ga writes it"
    journal = folder / "journal.jsonl"
    with well_formed(folder / "settings.json", "not the settings of a search", way_out):
        read = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        settings = dict(read["search"])
        lower = any("lower_is_better" in task for task in read.get("fitness", {}).get("tasks", ()))
    with well_formed(journal, "not the journal of a search", way_out):
        # While the search runs, the last line may not be whole yet. A key's last line counts.
        lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = (unseal(json.loads(line), f"{journal}: a line is") for line in lines if line.endswith("\n"))
        found = {entry["key"]: entry for entry in whole}
        for entry in found.values():
            if late := found.get(f"guards of {entry['key']}"):  # measured when the search was over
                entry["guards"] = late["guards"]
        entries = [entry for entry in found.values() if "failed" not in entry]  # whose workers died
    files = [folder / file for file in ("factors.json", "best_effort.json") if (folder / file).is_file()]
    report = folder / "report.json"
    if finished := report.is_file():
        with well_formed(report, "not the report of a search", way_out):
            finished = bool(json.loads(report.read_text(encoding="utf-8")).get("finished", True))
    return Search(name, folder, settings, entries, factors.load(files[0]) if files else None, finished, lower)


def _attention(name: str, path: Path) -> Attention:
    with well_formed(path, *NO_ATTENTION):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != ATTENTION:
            raise ValueError(f"expected {ATTENTION!r}")
        return Attention(name, path, data)
