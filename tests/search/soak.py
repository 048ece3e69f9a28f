"""Searches that are killed at random moments end with the same bytes. Takes some minutes.

    python tests/search/soak.py                  # 200 kills over all optimisers, of the searches of ``toy_search.py``
    python tests/search/soak.py --workers 2      # 200 of a search with two Ray workers: of a worker, or of the search

Exit status 1 where one ended otherwise, left half a file, measured an individual twice, or did not go on.
"""

import argparse
import contextlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))  # ``search`` is also the name of this folder

import toy_search

TOY = [sys.executable, str(Path(__file__).with_name("toy_search.py"))]
ON_RAY = "--tasks kv_retrieval --model_args pretrained=reference-kv --held_out_examples 0 --metadata num_keys=20"
REAL = [sys.executable, "-m", "search.ga", *ON_RAY.split(), "--examples", "16", "--output"]
NOWHERE = subprocess.DEVNULL


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


def soak(command: list[str], more: list[str], kills: int, tmp: Path) -> str:
    """Kill the search ``command FOLDER more`` again and again; with ``--workers`` seven times in eight one of these.

    Two workers at most between two measured individuals: to a search a third death is the individual's own fault, and
    ends it where that is the plain model.
    """
    undisturbed, rng, killed, searches = tmp / "undisturbed", random.Random(0), 0, 0
    began = time.monotonic()
    subprocess.run([*command, str(undisturbed), *([] if "--workers" in more else more)], check=True, stdout=NOWHERE)
    pause = min(6.0, time.monotonic() - began)
    while killed < kills:
        searches += 1
        folder, driver, lines, since = tmp / str(searches), None, 0, 0
        while True:
            if driver is None:
                driver, since = psutil.Popen([*command, str(folder), *more], stdout=NOWHERE), 0
            with contextlib.suppress(psutil.TimeoutExpired):
                if (code := driver.wait(rng.uniform(0, pause))) == 0:
                    break
                assert code == -signal.SIGKILL, code
                driver = None
                continue
            journal = folder / "journal.jsonl"
            if journal.exists() and (now := journal.read_bytes().count(b"\n")) > lines:
                lines, since = now, 0
            victims = [driver]
            if "--workers" in more and rng.random() > 1 / 8:
                victims = [each for each in driver.children(recursive=True) if each.name().startswith("ray::Worker")]
            if killed < kills and since < 2 and victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rng.choice(victims).kill()
                    killed, since = killed + 1, since + 1
        check(folder, undisturbed)
    return f"{killed} kills in {searches} searches"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--kills", type=int, default=200)
    flags.add_argument("--workers", type=int, default=0, help="kill Ray workers of a real search, and the search")
    args = flags.parse_args()
    runs = [(TOY, [name], args.kills // len(toy_search.SETTINGS)) for name in toy_search.SETTINGS]
    if args.workers:
        runs = [(REAL, ["--workers", str(args.workers)], args.kills)]
    for command, more, kills in runs:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{' '.join(more)}: {soak(command, more, kills, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
