"""What Ray costs a search: the same individuals measured by one process, by one Ray worker and by two.

    python -m benchmarks.ray_overhead --rounds 6

Each has one thread a process. They take turns, round by round, and answer the same questions under the same factors,
first without early stopping, then with a cutoff that all individuals reach, so that nothing is given up. It stops where
two of them score otherwise. Needs a core for each worker, and the extra ``[ray]``.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from benchmarks.experiments.store import hardware, versions
from lpes_eval import files
from lpes_eval.errors import UserError, program
from lpes_eval.factors import Factors
from lpes_eval.flags import at_least
from search import config
from search.engines import cluster
from search.evaluator import Cutoff, Evaluator
from search.model import load_model
from search.tasks import load_tasks

SPEED = {"reuse_layers": False}  # else who comes second in a round would find layers' outputs
WORKERS = (0, 1, 2)
"""0 is one process without Ray."""


@program("ray_overhead")
def main(argv: Sequence[str] | None = None) -> None:
    """Measure round after round, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=at_least(1), default=6)
    add("--individuals", type=at_least(1), default=6, help="of a round")
    add("--examples", type=at_least(1), default=48)
    add("--output", type=Path, default=Path("runs/ray_overhead.json"), metavar="FILE")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    settings = config.defaults()
    settings.model_args, settings.device = {"pretrained": "reference"}, "cpu"
    lm = load_model(settings)
    tasks = load_tasks(lm, ["kv_retrieval"], examples=args.examples)
    local = Evaluator(lm, tasks, **SPEED)
    plain = local([1.0] * local.num_layers)
    several = [(1.0, 1.4 + 0.1 * k / args.individuals, *[1.0] * 4) for k in range(args.individuals)]
    individuals = [Factors(factors=factors) for factors in several]
    cutoffs = {"all asked": None, "may be given up": Cutoff(plain.fitness, plain.examples, error=0.0)}
    seconds: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in cutoffs}
    scores = [local(factors).examples for factors in individuals]
    for number in range(args.rounds):
        for workers in WORKERS[number % 3 :] + WORKERS[: number % 3]:
            settings.workers = workers
            with mock.patch("os.cpu_count", return_value=max(1, workers)):  # of which a worker's threads follow
                evaluator = Evaluator(lm, tasks, pool=cluster.pool(settings, SPEED), **SPEED) if workers else local
                evaluator(Factors.from_uniform(1.01).per_layer(local.num_layers), part=[0])  # from cold
            for name, cutoff in cutoffs.items():
                start = time.perf_counter()
                evaluator.expect(individuals, cutoff, None)
                if [evaluator(factors, cutoff).examples for factors in individuals] != scores:
                    raise UserError(f"{workers} workers, {name}: other scores than without Ray")
                seconds[name][workers].append(round(time.perf_counter() - start, 3))
            took = ", ".join(f"{of[workers][-1]:.1f} s {name}" for name, of in seconds.items())
            print(f"round {number + 1}, {workers} workers: {took}", flush=True)
            if workers:
                import ray

                cluster._pools.clear()
                ray.shutdown()
    result = {
        "arguments": {name: value for name, value in vars(args).items() if name != "output"},
        "machine": hardware(1),
        "versions": {**versions(), "ray": version("ray")},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": seconds,
    }
    files.write_atomically(args.output, json.dumps(result) + "\n")
    for name, of in seconds.items():
        alone, two = (median(b / a for a, b in zip(of[than], of[1], strict=True)) for than in (0, 2))
        print(f"{name}: one worker takes {alone:.3f} times as long as one process, and {two:.2f} as long as two")


if __name__ == "__main__":
    sys.exit(main())
