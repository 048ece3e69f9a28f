"""What the plugin costs: Python's start-up with and without the hook, and the time to refuse a bad factors file.

    python benchmarks/startup.py [--runs 40] [--out benchmarks/results/startup.jsonl]

Two bare virtual environments, one with the two files that an install puts beside the packages, are started in turn, so
that both see the same machine. The refusal is the whole command, from the shell and back.
"""

from __future__ import annotations

import argparse
import compileall
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from lpes_eval.files import write_atomically
from lpes_eval.flags import at_least

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "build_backend"))


def seconds(command: list[str], status: int = 0) -> float:
    start = time.perf_counter()
    ended = subprocess.run(command, capture_output=True)
    took = time.perf_counter() - start
    assert ended.returncode == status, ended.stderr
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=at_least(2), default=40)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    from backend import _hook

    with tempfile.TemporaryDirectory() as folder:
        pythons = {}
        for name in ("without", "with"):
            venv.create(Path(folder, name), with_pip=False)
            pythons[name] = str(Path(folder, name, "bin", "python"))
        packages = next(Path(folder, "with", "lib").glob("python*/site-packages"))
        for name, content in _hook().items():
            (packages / name).write_bytes(content)
        compileall.compile_dir(packages, quiet=1)  # as pip does when it installs
        times: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(arguments.runs):
            for name, python in pythons.items():
                times[name].append(seconds([python, "-c", "pass"]))
        bad = Path(folder, "bad.json")
        bad.write_text('{"format": "lpes-factors", "version": 1, "uniform": 0}')
        command = [sys.executable, "-m", "lm_eval", "--model", "lpes", "--model_args", f"factors={bad}"]
        refusals = [seconds([*command, "--tasks", "kv_retrieval"], status=2) for _ in range(5)]

    medians = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "runs": arguments.runs,
        "start_up_ms": {name: round(1000 * value, 2) for name, value in medians.items()},
        "start_up_ratio": round(medians["with"] / medians["without"], 3),
        "start_up_quartiles_ms": {
            name: [round(1000 * q, 2) for q in statistics.quantiles(values, n=4)] for name, values in times.items()
        },
        "refusal_s": {"median": round(statistics.median(refusals), 2), "slowest": round(max(refusals), 2)},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.system()}",
    }
    text = json.dumps(result)
    print(text)
    if arguments.out:
        write_atomically(arguments.out, text + "\n")


if __name__ == "__main__":
    main()
