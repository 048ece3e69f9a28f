"""What a page is made of: runs of lm-eval, which of them can be paired, and searches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpes_eval import entries
from lpes_eval.compare import results
from lpes_eval.compare.comparison import Comparison, compare
from lpes_eval.compare.results import Metric, Results, mismatch, position_of, well_formed
from lpes_eval.entries import Entry
from lpes_eval.errors import UserError
from lpes_eval.files import read_json

NO_SEARCH = ("not what a search writes", "give the folder of a search (its --output)")


@dataclass(frozen=True, eq=False)
class Run:
    """A run of lm-eval under the name that it has on the page, and its place among the runs, which is its colour."""

    name: str
    results: Results
    place: int


@dataclass(frozen=True)
class Panel:
    """One metric of one task, on the same examples, in all the runs that have it."""

    title: str
    runs: dict[Run, Metric]

    @property
    def by_position(self) -> bool:
        """Whether it has a score at each position."""
        return "all" not in next(iter(self.runs.values())).values

    @property
    def labels(self) -> list[str]:
        """The positions that any run has, in order."""
        return sorted({label for metric in self.runs.values() for label in metric.values}, key=position_of)

    @property
    def lines(self) -> list[tuple[str, int, Metric]]:
        """Each run's name, place and metric."""
        return [(run.name, run.place, metric) for run, metric in self.runs.items()]

    def cell(self, run: Run, label: str) -> tuple[str, str]:
        """A run's score at a label and its 95 % interval; empty where there is none."""
        from lpes_eval.compare.statistics import interval

        metric = self.runs.get(run)
        if metric is None or label not in metric.values:
            return "", ""
        value, ends = metric.values[label], interval(metric.scores(label))
        return f"{value:.3f}", f"{ends[0]:.2f} – {ends[1]:.2f}" if ends else ""


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
    """A search: the plain model's entry, its individuals, the file of the best, and if lower is better for a task."""

    name: str
    folder: Path
    plain: Entry | None
    individuals: Sequence[Entry]
    factors: Path | None
    finished: bool
    lower: bool

    @property
    def full(self) -> list[Entry]:
        """The individuals whose score was measured to the end, on the most prompts."""
        scored = [entry for entry in self.individuals if not entry.stopped_after and entry.measure == "score"]
        most = max((entry.prompts for entry in scored), default=0)
        return [entry for entry in scored if entry.prompts == most]


@dataclass(frozen=True)
class Contents:
    """What a page shows; ``notes`` on the runs that cannot be compared."""

    runs: list[Run]
    searches: list[Search]
    panels: list[Panel]
    pairs: list[Pair]
    notes: list[str]


def read(paths: Sequence[str | Path]) -> Contents:
    """Read results of lm-eval and folders of searches; ``DataError`` where a path is none of these."""
    given = [Path(path) for path in paths]
    runs: list[Run] = []
    searches: list[Search] = []
    for name, path in zip(numbered([_name(path) for path in given]), given, strict=True):
        if (path / "journal.jsonl").is_file():
            searches.append(search(name, path))
        else:
            runs.append(Run(name, results.read(path), len(runs)))
    return Contents(runs, searches, _panels(runs), *_pairs(runs))


def _name(path: Path) -> str:
    """What a run or search is called: as its folder."""
    name = path.resolve().name if path.is_dir() else results.DATE.sub("", path.stem)
    # as lm-eval names its file and README.md the folder of folders
    return path.resolve().parent.name if name == "results" else name


def numbered(names: Sequence[str], number: str = " ({})") -> list[str]:
    """The names, each with its number where it occurs again."""
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name + number.format(n) if n > 1 else name for name, n in zip(names, counts, strict=True)]


def _panels(runs: Sequence[Run]) -> list[Panel]:
    """Group the runs' scores on the same examples, which may stand in one picture, whatever positions they have."""
    made: dict[tuple[Any, ...], Panel] = {}
    for run in runs:
        for name, task in run.results.tasks.items():
            size = [f"{of} {key[4:]}" for key, of in sorted(task.data.items()) if key.startswith("num_")]
            for key, metric in task.metrics.items():
                title = ", ".join([name, *size, key.removesuffix(",none")])
                same = (title, task.documents, task.examples, "all" in metric.values)
                made.setdefault(same, Panel(title, {})).runs[run] = metric
    return list(made.values())


def _pairs(runs: Sequence[Run]) -> tuple[list[Pair], list[str]]:
    """Each run beside the first run before it that was asked the same; notes on what cannot be compared."""
    made: list[Pair] = []
    notes: list[str] = []
    for i, b in enumerate(runs):
        for a in runs[:i]:
            common = [name for name in a.results.tasks if name in b.results.tasks]
            reasons = {name: mismatch(a.results.tasks[name], b.results.tasks[name]) for name in common}
            notes += [f"{a.name} and {b.name}, {name}: {reason}." for name, reason in reasons.items() if reason]
            same = [name for name in common if not reasons[name]]
            both = (replace(run.results, tasks={name: run.results.tasks[name] for name in same}) for run in (a, b))
            try:
                if same:
                    made.append(Pair(a, b, compare(*both)))
                    break
            except UserError as error:
                notes.append(f"{a.name} and {b.name}: {error}.")
    return made, notes


def search(name: str, folder: Path) -> Search:
    """A search, read from its folder as far as it went; ``DataError`` where it is none."""
    journal = folder / "journal.jsonl"
    with well_formed(journal, *NO_SEARCH):
        reading = entries.read(journal)
        settings: Any = reading.settings
        lower = any("lower_is_better" in task for task in settings.get("fitness", {}).get("tasks", ()))
    measured = [entry for entry in reading.entries.values() if not entry.failed]
    files = [folder / file for file in ("factors.json", "best_effort.json") if (folder / file).is_file()]
    individuals = [entry for entry in measured if entry.generation is not None]
    plain, best = next(iter(measured), None), next(iter(files), None)
    return Search(name, folder, plain, individuals, best, finished(folder), lower)


def finished(folder: Path) -> bool:
    """Whether a search has written its result."""
    if not (report := folder / "report.json").is_file():
        return False
    with well_formed(report, *NO_SEARCH):
        return bool(read_json(report).get("finished", True))
