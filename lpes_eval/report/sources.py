"""What a page is made of: runs of lm-eval, which of them can be paired, searches, and measured attention."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import SEEK_CUR
from pathlib import Path
from typing import Any, BinaryIO

from lpes_eval import entries
from lpes_eval.compare import results
from lpes_eval.compare.compare import compare
from lpes_eval.compare.results import Metric, Results, mismatch, well_formed
from lpes_eval.compare.tables import Report
from lpes_eval.entries import Entry, typed
from lpes_eval.errors import UserError
from lpes_eval.files import parse

ATTENTION = "lpes-eval attention by region"
"""The format of ``attention.json``."""
NO_SEARCH = ("not what a search writes", "give the folder of a search (its --output)")


@dataclass(frozen=True, eq=False)
class Run:
    """A run of lm-eval under the name that it has on the page, and its place among the runs, which is its colour."""

    name: str
    results: Results
    place: int

    @property
    def facts(self) -> dict[str, Any]:
        """Where its scores came from, and what they cost."""
        known = {"packages": {}, "model": {}, **self.results.provenance}
        seconds = self.results.raw.get("total_evaluation_time_seconds")
        return {
            "model": str(self.results.model),
            "factors": self.results.factors,
            "results": self.results.path,
            "date": known.get("date"),
            "time": seconds and f"{float(seconds):,.0f} s",
            "questions": ", ".join(f"{name} {task.examples}" for name, task in self.results.tasks.items()),
            "dtype": known["model"].get("dtype"),
            "packages": ", ".join(f"{name} {version}" for name, version in known["packages"].items() if version),
            "command": known.get("command"),
        }


@dataclass(frozen=True)
class Panel:
    """One metric of one task, on the same examples, in all the runs that have it."""

    title: str
    runs: Mapping[Run, Metric]

    @property
    def by_position(self) -> bool:
        """Whether it has a score at each position."""
        return "all" not in next(iter(self.runs.values())).values

    @property
    def lines(self) -> list[tuple[str, int, Metric]]:
        """Each run's name, place and metric."""
        return [(run.name, run.place, metric) for run, metric in self.runs.items()]


@dataclass(frozen=True)
class Pair:
    """Two runs on the same examples of these tasks, and what `compare` says of them."""

    a: Run
    b: Run
    report: Report

    @property
    def title(self) -> str:
        """Both runs' names."""
        return f"{self.a.name} → {self.b.name}"


@dataclass(frozen=True)
class Search:
    """A search, finished or not.

    Attributes:
        settings: its flags.
        plain: the journal's first entry, the plain model's.
        individuals: the entries that an optimiser asked for, in their order; without those whose workers died.
        factors: the file with the best so far, if there is one.
        lower: whether lower is better for one of its tasks.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]
    plain: Entry | None
    individuals: Sequence[Entry]
    factors: Path | None
    finished: bool
    lower: bool = False

    @property
    def full(self) -> list[Entry]:
        """The individuals whose score was measured and that were not given up early."""
        return [entry for entry in self.individuals if entry.measure == "score" and not entry.stopped_after]

    @property
    def facts(self) -> dict[str, Any]:
        """What it is, what it cost so far, and the fittest of the individuals that were asked most."""
        individuals, full = self.individuals, self.full
        most = max((entry.prompts for entry in full), default=0)
        best = max((entry.fitness for entry in full if entry.prompts == most), default=0.0)
        prompts, seconds = sum(entry.prompts for entry in individuals), sum(entry.seconds for entry in individuals)
        return {
            "folder": self.folder,
            "optimiser": self.settings.get("optimizer"),
            "curve": self.settings.get("curve"),
            "individuals": f"{len(individuals)}, of which {len(individuals) - len(full)} given up early",
            "cost": f"{prompts:,} prompts, {seconds:,.0f} s",
            "fittest": full and f"{best:.4f} on {most} prompts",
            "factors": self.factors,
        }


@dataclass(frozen=True)
class Attention:
    """What `lpes-eval attention` measured, as its JSON has it."""

    name: str
    data: Mapping[str, Any]


def read(paths: Sequence[str | Path]) -> tuple[list[Run], list[Search], list[Attention]]:
    """Read each path: the folder of a search, or of `attention`; results of lm-eval.

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
            runs.append(Run(name, results.read(path), len(runs)))
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
    """Group the runs' scores on the same examples, which may stand in one picture."""
    groups: list[tuple[str, list[Run]]] = []
    for run in runs:
        for name, task in run.results.tasks.items():
            for known, members in groups:
                others = [one.results.tasks[known] for one in members]
                if name == known and all(mismatch(one, task, prompts_may_differ=True) is None for one in others):
                    members.append(run)
                    break
            else:
                groups.append((name, [run]))
    made = []
    for name, members in groups:
        tasks = {run: run.results.tasks[name] for run in members}
        data = tasks[members[0]].data
        size = [f"{data[key]} {key.removeprefix('num_')}" for key in sorted(data) if key.startswith("num_")]
        for key in dict.fromkeys(key for task in tasks.values() for key in task.metrics):
            title = ", ".join([name, *size, key.removesuffix(",none")])
            having = {run: task.metrics[key] for run, task in tasks.items() if key in task.metrics}
            for whole in (False, True):  # with a score at each position, and with one alone
                of_form = {run: metric for run, metric in having.items() if ("all" in metric.values) == whole}
                made += [Panel(title, of_form)] if of_form else []
    return made


def pairs(runs: Sequence[Run], prompts_may_differ: bool = False) -> tuple[list[Pair], list[str]]:
    """Each task of a run beside the first run before it that was asked the same; notes on what cannot be compared."""
    made: list[Pair] = []
    notes: list[str] = []
    for i, b in enumerate(runs[1:], 1):
        left = dict(b.results.tasks)
        alone = left.keys() - {name for a in runs[:i] for name in a.results.tasks}
        for a in runs[:i]:
            same = {}
            for name in (name for name in a.results.tasks if name in left):
                tasks = a.results.tasks[name], left[name]
                reason = mismatch(*tasks, prompts_may_differ=prompts_may_differ)
                if None in [task.documents for task in tasks]:
                    reason = "no samples were logged (lm_eval --log_samples)"
                if reason:
                    notes.append(f"{a.name} and {b.name}, {name}: {reason}.")
                else:
                    same[name] = tasks[0]
            if same:
                own = replace(a.results, tasks=same)
                theirs = replace(b.results, tasks={name: left[name] for name in left if name in {*same, *alone}})
                try:
                    made.append(Pair(a, b, compare(own, theirs, prompts_may_differ=prompts_may_differ)))
                except UserError as error:
                    notes.append(f"{a.name} and {b.name}: {error}.")
                else:
                    left = {name: task for name, task in left.items() if name not in theirs.tasks}
    return made, notes


def search(name: str, folder: Path) -> Search:
    """A search, read from its folder as far as it went; ``DataError`` where it is none."""
    flags, lower = settings(folder)
    measured = [entry for entry in entries.read(folder / "journal.jsonl").entries.values() if not entry.failed]
    files = [folder / file for file in ("factors.json", "best_effort.json") if (folder / file).is_file()]
    return Search(
        name,
        folder,
        flags,
        measured[0] if measured else None,
        [entry for entry in measured if entry.generation is not None],
        files[0] if files else None,
        finished(folder),
        lower,
    )


def settings(folder: Path) -> tuple[dict[str, Any], bool]:
    """A search's flags, and whether lower is better for one of its tasks."""
    journal = folder / "journal.jsonl"
    with well_formed(journal, *NO_SEARCH), journal.open("rb") as file:
        data = parse(file.readline(), "the first line")["settings"]
        lower = any("lower_is_better" in task for task in data.get("fitness", {}).get("tasks", ()))
        return dict(data["search"]), lower


def finished(folder: Path) -> bool:
    """Whether a search has written its result."""
    report = folder / "report.json"
    if not report.is_file():
        return False
    with well_formed(report, *NO_SEARCH):
        return bool(json.loads(report.read_text(encoding="utf-8")).get("finished", True))


def new_entries(file: BinaryIO) -> Iterator[Entry]:
    """The entries of a journal that were not read yet; a line that is not whole yet stays for the next time.

    Raises:
        ValueError: a line that no search wrote.
    """
    if file.tell() == 0:
        file.readline()  # the settings
    while (line := file.readline()).endswith(b"\n"):
        yield typed(parse(line, "a line"), Entry, "an entry")
    file.seek(-len(line), SEEK_CUR)


def _attention(name: str, path: Path) -> Attention:
    with well_formed(path, "not what lpes-eval attention writes", "measure it again"):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != ATTENTION:
            raise ValueError(f"format {data['format']!r}, expected {ATTENTION!r}")
        for one in data["sets"].values():
            shares = [[float(share) for share in row] for row in one["shares"]]
            if {len(row) for row in shares} != {len(data["regions"])} or len(shares) != len(one["layers"]):
                raise ValueError(f"expected {len(data['regions'])} shares a layer")
        return Attention(name, data)
