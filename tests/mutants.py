"""Faults that would mislead a user, each planted in a copy of the tree: the tests named beside it must fail.

    python tests/mutants.py            # all of them, in a few minutes
    python tests/mutants.py worst kv   # those whose claim contains one of these words

``mutants.txt`` has a paragraph a fault: what becomes untrue, the file and the tests of which at least one must fail,
the text that occurs once (``-``) and what replaces it (``+``). The exit status is 1 where a fault is not caught, or its
text is no longer there; ``tests/test_mutants.py`` looks in every run of the tests whether it is.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """A fault."""

    claim: str
    file: str
    tests: list[str]
    old: str
    new: str


def read(text: str) -> list[Mutant]:
    """The faults of ``mutants.txt``."""
    mutants = []
    for paragraph in text.strip().split("\n\n"):
        claim, where, *lines = paragraph.split("\n")
        file, _, tests = where.partition(": ")
        old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in ("- ", "+ "))
        mutants.append(Mutant(claim.removeprefix("# "), file, tests.split(), old, new))
    return mutants


MUTANTS = read(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


def copy_of_the_tree(folder: Path) -> None:
    """Copy what git tracks, and what it would, as it stands now."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (source := REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)


def run(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run tests in ``folder``, on the package that is there, up to the first failure."""
    settings = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=folder, env=os.environ | settings, capture_output=True, text=True)


def outcome(mutant: Mutant, folder: Path) -> str:
    """``caught``, or what is wrong."""
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    if (times := text.count(mutant.old)) != 1:
        return f"its text occurs {times} times in {mutant.file}, expected once"
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        ended = run(folder, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    if ended.returncode == 1:  # of pytest: a test failed
        return "caught"
    return "SURVIVED" if ended.returncode == 0 else f"pytest ended with {ended.returncode}: {ended.stdout[-300:]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Plant the faults one after another; return 1 where one is not caught."""
    parser = argparse.ArgumentParser(description="Plant faults in a copy of the tree and see whether the tests fail.")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only the faults whose claim contains one of these")
    words = parser.parse_args(argv).words
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.claim for word in words)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_of_the_tree(folder)
        sound = run(folder, sorted({test for mutant in chosen for test in mutant.tests}))
        if sound.returncode:
            print(sound.stdout, "these tests must pass before a fault is planted", sep="\n")
            return 1
        missed = 0
        for mutant in chosen:
            began = time.perf_counter()
            verdict = outcome(mutant, folder)
            missed += verdict != "caught"
            print(f"{verdict:9} {time.perf_counter() - began:4.0f} s  {mutant.file:32} {mutant.claim}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
