"""Measure the tables of ``docs/results.md``, and write them and the numbers of ``README.md``.

    python -m benchmarks.results                            measure what is missing, and write the pages
    python -m benchmarks.results --check                    say whether the pages hold what was measured

A row of a table is one ``lm_eval`` command. Its scores, question by question, are a line of
``benchmarks/results/results.jsonl``; a command whose line is there is not run again unless the weights changed.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from benchmarks.machine import hardware, versions
from benchmarks.pages import filled
from lpes_eval import files, reference
from lpes_eval.compare import statistics
from lpes_eval.compare.tables import markdown_table
from lpes_eval.errors import UserError, program

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / "benchmarks/results/results.jsonl"
PAGES = ("README.md", "docs/results.md")
METRICS = {"kv_retrieval": "acc", "mdqa_pos": "best_subspan_em"}
PAPER = {"kv_retrieval": 11.2, "mdqa_pos": 3.7}
"""What the paper gains over the plain model in the mean over positions (Vicuna-7B, Table 1), in points."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """An evaluation: its label in the table, and lm_eval's task, limit, model arguments, model type and metadata."""

    label: str
    task: str
    n: int
    args: str = ""
    model: str = "lpes"
    metadata: str = ""

    @property
    def command(self) -> str:
        words = ["lm_eval", "--model", self.model]
        words += ["--model_args", self.args] if self.args else []
        words += ["--tasks", self.task]
        words += ["--metadata", self.metadata] if self.metadata else []
        return shlex.join([*words, "--limit", str(self.n)])

    @property
    def weights(self) -> str:
        """SHA-256 of the weights of the shipped model that answers."""
        return files.sha256(reference.path("kv" if "reference-kv" in self.args else "base") / "model.safetensors")


def methods(task: str, uniform: float) -> list[Row]:
    return [
        Row("plain", task, 500),
        Row("layer factors", task, 500, "factors=reference"),
        Row("PI, mean of the layer factors (1.09)", task, 100, "factors=1.0883"),
        Row(f"PI, best factor ({uniform:g}{', no change' if uniform == 1 else ''})", task, 100, f"factors={uniform}"),
        Row("Attention Buckets", task, 16, model="attention_buckets"),
        Row("MoICE", task, 16, "router=lpes_eval/reference/base/router", "moice"),
        Row("Ms-PoE", task, 50, model="ms_poe"),
        Row("Ms-PoE, layer 0 alone unscaled", task, 50, "skip=1", "ms_poe"),
        Row("positional channel", task, 50, model="positional_channel"),
        Row("STRING", task, 50, model="string"),
        Row("attention sorting", task, 16, model="attention_sorting"),
        Row("calibrated attention", task, 16 if task == "mdqa_pos" else 8, model="calibrated_attention"),
    ]


def lengths(task: str, size: str, unit: str, sizes: Sequence[int]) -> list[list[Row]]:
    args = {"plain": "", "layer factors": "factors=reference"}
    return [
        [Row(f"{n} {unit}, {kind}", task, 50, args[kind], metadata=f'{{"{size}":{n}}}') for kind in args] for n in sizes
    ]


SMALLER = "pretrained=reference-kv"
TABLES: dict[str, list[list[Row]]] = {
    "kv_retrieval": [methods("kv_retrieval", 1.0)],
    "mdqa_pos": [methods("mdqa_pos", 1.15)],
    "smaller": [
        [
            Row("plain", "kv_retrieval", 100, SMALLER),
            Row("layer factors", "kv_retrieval", 100, f"{SMALLER},factors=lpes_eval/reference/kv/factors.json"),
            Row("PI, best factor (1.05)", "kv_retrieval", 100, f"{SMALLER},factors=1.05"),
        ]
    ],
    "lengths_kv": lengths("kv_retrieval", "num_keys", "records", (25, 60, 75)),
    "lengths_mdqa": lengths("mdqa_pos", "num_documents", "articles", (5, 12)),
}
"""Groups of rows a table; the rows of a group are compared with its first one."""


def measure(row: Row) -> Result:
    """Run the command, in batches, which changes the time alone."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *shlex.split(row.command), "--batch_size", "16"]
        command += ["--log_samples", "--output_path", folder]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise UserError(f"{row.command} ended with status {ended.returncode}: {ended.stderr.strip()[-300:]}")
        (file,) = Path(folder).rglob("samples_*.jsonl")
        samples = list(files.read_jsonl(file, required=("doc",)))
    metric = METRICS[row.task]
    at = {key.partition("@")[2]: key for key in samples[0] if key.startswith(f"{metric}@")}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "command": row.command,
        "weights": row.weights,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit.stdout.strip(),
        "machine": hardware(1) | versions(),
        "questions": " ".join(str(sample["doc"]["question_id"]) for sample in samples),
        "scores": {name: "".join(str(int(s[at[name]])) for s in samples) for name in sorted(at, key=float)},
    }


class Results:
    """What was measured, by command, and what it comes to."""

    def __init__(self, store: Path) -> None:
        self.store = store
        lines = files.read_jsonl(store, required=("command", "weights", "scores")) if store.exists() else ()
        self.by_command: dict[str, Result] = {line["command"]: line for line in lines}

    def has(self, row: Row) -> bool:
        return self.by_command.get(row.command, {}).get("weights") == row.weights

    def keep(self, result: Result) -> None:
        self.by_command[result["command"]] = result
        lines = (json.dumps(line) for line in self.by_command.values())
        files.write_atomically(self.store, "".join(f"{line}\n" for line in lines))

    def scores(self, row: Row) -> pd.DataFrame:
        """0 or 100 for each answer: a line a question, a column a position."""
        if not self.has(row):
            raise UserError(f"{row.command}: not measured with these weights; run python -m benchmarks.results")
        result = self.by_command[row.command]
        columns = {position: list(scores) for position, scores in result["scores"].items()}
        return 100 * pd.DataFrame(columns, index=result["questions"].split()).astype(float)

    def gain(self, first: Row, second: Row, quantity: str = "mean") -> tuple[float, float, float]:
        """The second minus the first, in points, on the questions that both were asked, and its 95 % interval."""
        a, b = self.scores(first), self.scores(second)
        common = a.index.intersection(b.index)
        compared = statistics.compare_paired(a.loc[common] / 100, b.loc[common] / 100)
        difference = getattr(compared, quantity)
        return 100 * difference.difference, 100 * difference.low, 100 * difference.high

    def table(self, groups: Sequence[Sequence[Row]]) -> str:
        """Accuracy by position, mean and worst, and what a row gains over the first of its group."""
        rows: list[list[str]] = []
        for row, first in ((row, group[0]) for group in groups for row in group):
            scores = self.scores(row)
            at, mean = scores.mean(), statistics.mean_over_positions(scores)
            half = stats.t.ppf(0.975, len(scores) - 1) * mean.stderr
            gain = points(self.gain(first, row)) if row != first else ""
            cells = [*(f"{share:.1f}" for share in at), f"{mean.value:.1f}±{half:.1f}", f"{at.min():.1f}", gain]
            rows.append([row.label, str(len(scores)), *cells, f"`{row.command}`"])
        header = ["", "n", *(f"{position} %" for position in scores), "mean", "worst", "gain", "command"]
        return markdown_table(header, rows)

    def goals(self) -> str:
        """How many goals the layer factors reach on each task, and which not."""
        lines = []
        for task, bar in PAPER.items():
            plain, ours, *others = TABLES[task][0]
            goals = [(f"{bar} points over plain", bar, self.gain(plain, ours))]
            goals += [("a better worst position than plain", 0.0, self.gain(plain, ours, "worst"))]
            goals += [(f"better than {other.label}", 0.0, self.gain(other, ours)) for other in others]
            missed = [f"{words} ({points(gain)})" for words, least, gain in goals if gain[0] < least or gain[1] <= 0]
            lines.append(f"- `{task}`: {len(goals) - len(missed)} of {len(goals)} met. Missed: {', '.join(missed)}.")
        return "\n".join(lines)

    def headline(self) -> str:
        """The table of README.md: each task plain, with the best uniform factor, and with layer factors."""
        header, rows = ["accuracy, %", "first position", "last", "mean", "gain in the mean"], []
        for task in METRICS:
            plain, ours, _, uniform, *_ = TABLES[task][0]
            for row in (plain, uniform, ours):
                at = self.scores(row).mean()
                cells = [f"{share:.1f}" for share in (at.iloc[0], at.iloc[-1], at.mean())]
                rows.append([f"{task}, {row.label}", *cells, points(self.gain(plain, row)) if row != plain else ""])
        return markdown_table(header, rows)


def points(difference: tuple[float, float, float]) -> str:
    return "{:+z.1f} [{:+z.1f}, {:+z.1f}]".format(*difference)


@program("results")
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="measure and write nothing; 1 if a page differs")
    args = parser.parse_args(argv)
    results = Results(STORE)
    rows = [row for groups in TABLES.values() for group in groups for row in group]
    for row in [] if args.check else rows:
        if not results.has(row):
            began = time.perf_counter()
            results.keep(measure(row))
            print(f"{time.perf_counter() - began:5.0f} s  {row.command}", flush=True)
    texts, changed = {name: results.table(groups) for name, groups in TABLES.items()}, 0
    texts |= {"goals": results.goals(), "headline": results.headline()}
    for name in PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        if (new := filled(page, texts)) != page:
            changed += 1
            print(f"{name}: {'does not hold the results' if args.check else 'written'}")
            if not args.check:
                files.write_atomically(ROOT / name, new)
    return int(args.check and changed > 0)


if __name__ == "__main__":
    sys.exit(main())
