"""A whole search with a toy fitness, run as a process of its own so that tests can kill it: FOLDER [SEED]."""

import sys
import time
from pathlib import Path

from search.optimizer import GeneticAlgorithm, Space

from lpes_eval.errors import UserError
from lpes_eval.factors import Factors
from search import loop
from search.journal import Journal

L = 8


def factors(individual):
    return Factors.from_curve("bezier", individual.points, num_layers=L)


def key(individual):
    return factors(individual).digest()


def evaluate(individual):
    time.sleep(0.001)
    return {"fitness": -sum((s - 1.3 - h / 20) ** 2 for h, s in enumerate(factors(individual).per_layer()))}


def main(folder, seed):
    ga = GeneticAlgorithm(Space(L), N_ps=12, N_pa=4, T=8, N_mu=6, N_cr=3, seed=seed)
    with Journal(folder, {"seed": seed}) as journal:
        print("at work", flush=True)
        loop.restore(ga, journal, key)
        for note in journal.notes:
            print(note, flush=True)
        best, entry = loop.run(ga, evaluate, journal, key)
    origin = {"fitness": entry["fitness"], "seed": seed}
    Factors.from_curve("bezier", best.points, num_layers=L, origin=origin).save(Path(folder) / "factors.json")


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
