"""A whole search with a toy fitness, run as a process of its own so that tests can kill it: FOLDER OPTIMIZER."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from lpes_eval.factors import Factors
from search import optimizers
from search.journal import Journal
from search.run import Search
from search.space import Space

L = 8
SETTINGS = {"ga": {"population": 12, "parents": 4, "mutations": 6, "crossovers": 3}, "layers": {}}


class Bench:
    part = staticmethod(lambda examples: None)
    by_question = staticmethod(lambda *entry: [])
    num_layers = L
    guards = staticmethod(lambda split: [])

    def evaluator(self, split):
        return self

    def measure(self, job):
        time.sleep(0.001)
        fitness = -sum((s - 1.3 - h / 20) ** 2 for h, s in enumerate(job.factors.per_layer()))
        return {"fitness": fitness, "examples": {"toy": [1]}, "ended": [1], "seconds": 0.0, "prompts": 1}


def search(optimizer, bench=None, curve="bezier", **flags):
    fixed = {"curve": curve, "skip": 0, "budget": None, "early_stopping": None, "early_stopping_error": 0.3}
    args = SimpleNamespace(**fixed | flags)
    return Search(args, bench or Bench(), optimizer, {"seed": {"seed": 0}})


def main(folder, name="ga"):
    kind = optimizers.load(name)
    space = Space.free(L) if kind.free else Space(L)
    optimizer = kind(space, kind.Config(**SETTINGS[name]), generations=8, seed=0)
    toy = search(optimizer, curve="free" if kind.free else "bezier")
    with Journal(folder, toy.settings) as toy.journal:
        print("at work", flush=True)
        toy.measure("baseline", Factors.from_uniform(1.0, num_layers=L))
        best = toy.run(lambda individual, entry, new: None)
        entry = toy.measure("best", toy.factors(best))
    factors = replace(toy.factors(best), origin={"fitness": entry.fitness})
    factors.save(Path(folder) / "factors.json")


if __name__ == "__main__":
    main(sys.argv[1], name=sys.argv[2])
