"""Searches that take seconds, and what is in their folders."""

import json

FLAGS = "--optimizer ga --curve bezier --control_points 3 --early_stopping off --mutations 3 --crossovers 1"
SMALL = [*FLAGS.split(), "--population", "5", "--parents", "3", "--epochs", "2"]
SEARCH_ONLY = [*SMALL, "--held_out_examples", "0"]


def journal(folder):
    """The entries, as JSON has them, without the settings before them."""
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()[1:]]


def report(folder):
    return json.loads((folder / "report.json").read_text())


def found(folder):
    """The factors file of a search, whichever of the two it is."""
    [path] = [path for name in ("factors.json", "best_effort.json") if (path := folder / name).exists()]
    return path
