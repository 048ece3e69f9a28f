"""A whole search with a toy fitness, run as a process of its own so that tests can kill it: FOLDER [SEED]."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

from lpes_eval.errors import UserError
from lpes_eval.factors import Factors
from search.journal import Journal
from search.optimizers.ga import GeneticAlgorithm, GeneticConfig
from search.run import Search
from search.space import Space

L = 8


class Toy(Search):
    """A search whose individuals are measured by a formula."""

    def evaluate(self, individual):
        time.sleep(0.001)
        fitness = -sum((s - 1.3 - h / 20) ** 2 for h, s in enumerate(self.factors(individual).per_layer()))
        return {"fitness": fitness, "examples": {}, "seconds": 0.0, "prompts": 1}


def main(folder, seed):
    config = GeneticConfig(population=12, parents=4, mutations=6, crossovers=3)
    ga = GeneticAlgorithm(Space(L), config, generations=8, seed=seed)
    args = SimpleNamespace(curve="bezier", skip=0, budget=None)
    search = Toy(args, None, SimpleNamespace(num_layers=L, part=lambda share: None), ga, {"seed": seed})
    with Journal(folder, search.settings) as search.journal:
        print("at work", flush=True)
        best, entry = search.run(lambda individual, entry, new: None)
    origin = {"fitness": entry["fitness"], "seed": seed}
    Factors.from_curve("bezier", best.points, num_layers=L, origin=origin).save(Path(folder) / "factors.json")


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
