"""What the plugin costs: Python's start-up with and without the hook, and the time to refuse a bad factors file.

python benchmarks/startup.py [FILE]    prints a row; FILE such as benchmarks/results/startup.jsonl keeps it
"""

import compileall
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.extend(map(str, (ROOT, ROOT / "build_backend")))

import backend  # noqa: E402

from benchmarks.experiments.store import hardware, versions  # noqa: E402
from lpes_eval.files import write_atomically  # noqa: E402

RUNS = 100


def seconds(*command: str, status: int = 0) -> float:
    """How long a command takes that ends with this status."""
    start = time.perf_counter()
    assert subprocess.run(command, capture_output=True).returncode == status, command
    return time.perf_counter() - start


with tempfile.TemporaryDirectory() as folder:
    times: dict[str, list[float]] = {"without": [], "with": []}
    for name in times:
        venv.create(Path(folder, name), with_pip=False)
    (packages,) = Path(folder, "with", "lib").glob("python*/site-packages")
    (packages / "lpes_eval.pth").write_text(backend.PTH)
    shutil.copy(ROOT / "build_backend" / "_lpes_eval_hook.py", packages)
    compileall.compile_dir(packages, quiet=1)  # as pip does when it installs
    for _ in range(RUNS):  # in turn, so that both see the same machine
        for name, taken in times.items():
            taken.append(seconds(str(Path(folder, name, "bin", "python")), "-c", "pass"))
    bad = Path(folder, "bad.json")
    bad.write_text('{"format": "lpes-factors", "version": 1, "uniform": 0}')
    command = [sys.executable, "-m", "lm_eval", "--model", "lpes", "--model_args", f"factors={bad}"]
    refusals = [seconds(*command, "--tasks", "kv_retrieval", status=2) for _ in range(5)]

start_up = {name: round(1000 * statistics.median(taken), 2) for name, taken in times.items()}
refusal = {"median": round(statistics.median(refusals), 2), "slowest": round(max(refusals), 2)}
row = {"runs": RUNS, "start_up_ms": start_up, "refusal_s": refusal, "versions": versions(), "hardware": hardware(1)}
print(text := json.dumps(row))
if sys.argv[1:]:
    write_atomically(sys.argv[1], text + "\n")
