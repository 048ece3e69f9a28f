"""How well many workers would be used: the search's way of handing out chunks, replayed with measured times.

    python -m benchmarks.workers

A chunk of so many questions takes as long as ``benchmarks.chunk_costs`` measured (between two measured sizes in
proportion; more questions than were measured as many times longer). Chunks of a generation are handed in their order to
whoever is free, those that are late a second time; the next generation begins when all are answered. How much times
differ, how often a worker takes longer or is lost, and how long it then is away are assumptions, given as flags.
"""

import argparse
import heapq
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from random import Random
from statistics import median

import numpy as np

from benchmarks.experiments.store import KEPT
from lpes_eval import files
from lpes_eval.errors import UserError, program
from lpes_eval.flags import amount, at_least, positive
from search.engines.cluster import LATE, chunk_sizes

WORKERS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 1000)
Seconds = Callable[[int], float]
"""What a chunk of so many questions takes."""


def measured(rows: Sequence[dict]) -> Seconds:
    """Seconds by questions, from the rows of one shape and length."""
    questions, took = zip(*sorted((row["questions"], median(row["seconds"])) for row in rows), strict=True)
    return lambda n: float(np.interp(n, questions, took)) * max(1.0, n / questions[-1])


def search(workers: int, seconds: Seconds, args: argparse.Namespace) -> float:
    """Seconds of a whole search."""
    rng, ties = Random(f"{args.seed} {workers}"), count()
    now, free = 0.0, workers
    events: list[tuple[float, int, str, int, int]] = []  # when; in what order at the same time; what, of which chunk

    def later(after: float, what: str, generation: int, chunk: int) -> None:
        heapq.heappush(events, (now + after, next(ties), what, generation, chunk))

    for generation, individuals in enumerate([args.first, *[args.individuals] * args.generations]):
        left = range(args.questions * individuals, 0, -args.questions)
        usual = [
            seconds(size) + args.overhead for after in left for size in chunk_sizes(args.questions, after, workers)
        ]
        unanswered, waiting, late = set(range(len(usual))), deque(range(len(usual))), deque[int]()
        while unanswered:
            while free and (queue := waiting or late):
                if (chunk := queue.popleft()) not in unanswered:
                    continue
                if queue is waiting:
                    later(LATE * usual[chunk], "late", generation, chunk)
                took = usual[chunk] * rng.lognormvariate(-(args.spread**2) / 2, args.spread)
                took *= args.slower if rng.random() < args.stragglers else 1
                lost = rng.random() < took / (args.hours_between_failures * 3600)
                later(took * rng.random() if lost else took, "lost" if lost else "answered", generation, chunk)
                free -= 1
            now, _, what, of, chunk = heapq.heappop(events)
            free += what in ("answered", "back")
            if what == "lost":
                later(args.restart, "back", of, chunk)
            if of != generation:  # a copy of what is answered
                continue
            if what == "answered":
                unanswered.discard(chunk)
            elif what == "lost":
                waiting.append(chunk)
            elif what == "late":
                late.append(chunk)
    return now


@program("workers")
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, some = parser.add_argument, at_least(1)
    add("--costs", type=Path, default=KEPT / "chunk_costs.jsonl", metavar="FILE")
    add("--shape", default="vicuna-7b", help="of the measured model")
    add("--records", type=int, default=100, help="of a measured prompt")
    add("--questions", type=some, default=200, help="of an individual")
    add("--first", type=some, default=32, help="individuals of the first generation")
    add("--individuals", type=some, default=24, help="of each later one: 16 mutants and the children of 4 crossovers")
    add("--generations", type=at_least(0), default=20, help="after the first")
    add("--overhead", type=amount, default=0.002, help="seconds a chunk, of Ray")
    add("--spread", type=amount, default=0.1, help="standard deviation of a chunk's time, as a share of it")
    add("--stragglers", type=amount, default=0.01, help="share of chunks that take longer")
    add("--slower", type=positive, default=3.0, help="so many times as long")
    add("--hours_between_failures", type=positive, default=100.0, help="of one worker")
    add("--restart", type=amount, default=120.0, help="seconds")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    table = files.read_jsonl(args.costs, required=("shape", "records", "questions", "seconds"))
    known = [row for row in table if row["shape"] == args.shape]
    if not (rows := [row for row in known if row["records"] == args.records]):
        there = ", ".join(sorted({str(row["records"]) for row in known})) or "nothing"
        raise UserError(f"{args.costs}: no times of {args.shape} with {args.records} records; there is {there}")
    seconds = measured(rows)
    alone = search(1, seconds, args)
    print("workers     hours  efficiency")
    for workers in WORKERS:
        took = search(workers, seconds, args)
        print(f"{workers:7}  {took / 3600:8.2f}  {alone / workers / took:.0%}")


if __name__ == "__main__":
    sys.exit(main())
