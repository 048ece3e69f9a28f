"""How well many workers would be used: the search's way of handing out chunks, with drawn times instead of a model.

    python -m benchmarks.workers

Chunks of a generation are handed in their order to whoever is free; the next generation begins when all are answered.
The times are assumptions, given as flags, and no measurement.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Sequence
from random import Random

from search.engines.cluster import chunks_of

WORKERS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 1000)


def generation(workers: int, chunks: int, seconds: float, args: argparse.Namespace, rng: Random) -> float:
    """Seconds until the last of these chunks, each of so many seconds on average, is answered."""
    free = [0.0] * workers
    end = 0.0
    waiting = chunks
    while waiting:
        at = heapq.heappop(free)
        took = seconds * rng.lognormvariate(-(args.spread**2) / 2, args.spread)
        took *= args.slower if rng.random() < args.stragglers else 1
        if rng.random() < took / (args.hours_between_failures * 3600):  # somebody else answers the chunk again
            heapq.heappush(free, at + took * rng.random() + args.restart)
            continue
        waiting -= 1
        end = max(end, at + took)
        heapq.heappush(free, at + took)
    return end


def efficiency(workers: int, args: argparse.Namespace) -> float:
    """Seconds of answering over seconds of all workers together, in a whole search."""
    rng = Random(f"{args.seed} {workers}")
    individuals = [args.first, *[args.individuals] * args.generations]
    chunks = min(args.questions, args.chunks or chunks_of(workers))
    each = args.seconds / chunks + args.overhead
    took = [generation(workers, number * chunks, each, args, rng) for number in individuals]
    return sum(individuals) * args.seconds / (workers * sum(took))


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for every number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--chunks", type=int, help="of an individual; by default as many as the search cuts it into")
    add("--questions", type=int, default=200, help="of an individual; a chunk has one at least")
    add("--first", type=int, default=32, help="individuals of the first generation")
    add("--individuals", type=int, default=20, help="of each later one: 16 mutants and 4 crossovers")
    add("--generations", type=int, default=20, help="after the first")
    add(
        "--seconds",
        type=float,
        default=230.0,
        help="of an individual on one GPU: 600 prompts at 2.6 a second (Table 10)",
    )
    add("--overhead", type=float, default=0.01, help="seconds a chunk")
    add("--spread", type=float, default=0.1, help="standard deviation of a chunk's time, as a share of it")
    add("--stragglers", type=float, default=0.01, help="share of chunks that take longer")
    add("--slower", type=float, default=3.0, help="so many times as long")
    add("--hours_between_failures", type=float, default=100.0, help="of one worker")
    add("--restart", type=float, default=120.0, help="seconds")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print("workers  efficiency")
    for workers in WORKERS:
        print(f"{workers:7}  {efficiency(workers, args):.0%}")


if __name__ == "__main__":
    main()
