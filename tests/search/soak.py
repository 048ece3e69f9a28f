"""Searches that are killed at random moments end with the same bytes. Takes some minutes.

    python tests/search/soak.py                  # 200 kills over all optimisers
    python tests/search/soak.py --workers 2      # 200 of a search with two Ray workers: of a worker, or of the search

The other searches are those of ``toy_search.py``. Exit status 1 where one ended otherwise, left half a file, measured
an individual twice, or did not go on.
"""

import argparse
import contextlib
import io
import multiprocessing
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))  # ``search`` is also the name of this folder

import toy_search
from search import answer_loss, bench, run  # before processes are forked, which then start at once  # noqa: F401

OPTIMIZERS = tuple(toy_search.SETTINGS)
ON_RAY = (
    "--tasks kv_retrieval --model_args pretrained=reference-kv --held_out_examples 0 --metadata num_keys=20 "
    "--examples 16"
)


def go(folder: Path, name: str) -> None:
    """A search, in a process of its own."""
    with contextlib.redirect_stdout(io.StringIO()):
        toy_search.main(folder, name=name)


def start(folder: Path, name: str) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=go, args=(folder, name))
    process.start()
    return process


def finish(folder: Path, name: str) -> int:
    process = start(folder, name)
    process.join(3600)
    return process.exitcode


def measured(folder: Path) -> list[bytes]:
    """The journal's lines in one order, without the clock's share in them."""
    lines = (folder / "journal.jsonl").read_bytes().splitlines()
    return sorted(re.sub(rb'"seconds": [^,}]+', b"", line) for line in lines)


def check(folder: Path, undisturbed: Path) -> None:
    """The same factors and, but for their order of arrival, the same measurements, each once; nothing half written."""
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in undisturbed.iterdir()}, names
    for name in names & {"factors.json", "best_effort.json"}:
        assert (folder / name).read_bytes() == (undisturbed / name).read_bytes()
    assert measured(folder) == measured(undisturbed)


def kills(name: str, number: int, tmp: Path) -> str:
    undisturbed, rng, began = tmp / "undisturbed", random.Random(name), time.monotonic()
    assert finish(undisturbed, name) == 0
    took, killed, searches, evaluated = time.monotonic() - began, 0, 0, 0
    while killed < number:
        searches, ended = searches + 1, False
        folder = tmp / str(searches)
        while killed < number and not ended:
            process = start(folder, name)
            process.join(rng.random() * took)
            process.kill()
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
            ended = process.exitcode == 0
            killed += not ended
        assert finish(folder, name) == 0
        check(folder, undisturbed)
        evaluated += len(measured(folder))
    return f"{killed} kills in {searches} searches of {evaluated} measurements"


def worker_kills(workers: int, number: int, tmp: Path) -> str:
    """A random worker of a real search is killed every few seconds, or, one time in eight, the search itself.

    Two workers at most between two measured individuals: to a search a third death is the individual's own fault, and
    ends it where that is the plain model.
    """
    search = [sys.executable, "-m", "search.ga", *ON_RAY.split(), "--output"]
    rng, killed, searches = random.Random(0), Counter[str](), 0
    subprocess.run([*search, str(tmp / "undisturbed")], check=True, stdout=subprocess.DEVNULL)
    while killed.total() < number:
        searches, driver = searches + 1, None
        journal, lines, since = tmp / str(searches) / "journal.jsonl", 0, 0
        while True:
            if driver is None:
                command = [*search, str(journal.parent), "--workers", str(workers)]
                driver, since = psutil.Popen(command, stdout=subprocess.DEVNULL), 0
            with contextlib.suppress(psutil.TimeoutExpired):
                if (code := driver.wait(rng.uniform(1, 6))) == 0:
                    break
                assert code == -signal.SIGKILL, code
                driver = None
                continue
            if journal.exists() and (now := journal.read_bytes().count(b"\n")) > lines:
                lines, since = now, 0
            there = [each for each in driver.children(recursive=True) if each.name().startswith("ray::Worker")]
            if killed.total() < number and since < 2 and there:
                victim = driver if rng.random() < 1 / 8 else rng.choice(there)
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
                    since += 1
                    killed["search" if victim is driver else "worker"] += 1
        check(journal.parent, tmp / "undisturbed")
        print(f"search {searches}: {dict(killed)}", flush=True)
    return f"{killed['worker']} workers and {killed['search']} searches killed"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("names", nargs="*", help="only these optimisers")
    flags.add_argument("--kills", type=int, default=200)
    flags.add_argument("--workers", type=int, default=0, help="kill Ray workers of a real search, and the search")
    args = flags.parse_args()
    if args.workers:
        with tempfile.TemporaryDirectory() as folder:
            print(worker_kills(args.workers, args.kills, Path(folder)))
        return
    chosen = [name for name in OPTIMIZERS if name in (args.names or name)]
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {kills(name, args.kills // len(chosen), Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
