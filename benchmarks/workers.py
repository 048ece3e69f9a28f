"""How well many workers would be used: the search's way of handing out chunks, replayed with measured times.

    python -m benchmarks.workers

The published search runs on a model of 32 layers whose answers are simulated (``benchmarks.landscapes``). A chunk of so
many questions takes as long as ``benchmarks.chunk_costs`` measured (between two measured sizes in proportion; more
questions than were measured as many times longer). Chunks of a generation are handed in their order to whoever is free,
those that are late a second time. Whoever is free then begins with what the next generation will probably be, by the
answers so far. How much times differ, how often a worker takes longer or is lost, and how long it then is away are
assumptions, given as flags.
"""

import argparse
import heapq
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from random import Random
from statistics import median

import numpy as np

from benchmarks.experiments.store import KEPT
from benchmarks.landscapes import factors_of, landscapes, simulation
from lpes_eval import files
from lpes_eval.errors import UserError, program
from lpes_eval.flags import amount, at_least, positive
from search.engines.cluster import GUESS, LATE, chunk_sizes
from search.optimizers.ga import GeneticAlgorithm, GeneticConfig
from search.space import Individual, Points, Space

WORKERS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 1000)
LAYERS = 32
Seconds = Callable[[int], float]
"""What a chunk of so many questions takes."""
Chunk = tuple[Points, int]
"""An individual, and which of its chunks."""


def measured(rows: Sequence[dict]) -> Seconds:
    """Seconds by questions, from the rows of one shape and length."""
    questions, took = zip(*sorted((row["questions"], median(row["seconds"])) for row in rows), strict=True)
    return lambda n: float(np.interp(n, questions, took)) * max(1.0, n / questions[-1])


def search(workers: int, seconds: Seconds, args: argparse.Namespace) -> float:
    """Seconds of a whole search."""
    rng, ties = Random(f"{args.seed} {workers}"), count()
    config = GeneticConfig(args.population, min(12, args.population), args.mutations, args.crossovers)
    ga = GeneticAlgorithm(Space(LAYERS), config, generations=args.generations, seed=args.seed)
    landscape = next(each for each in landscapes(LAYERS) if each.name == args.landscape)
    answers = simulation(landscape, args.questions, args.landscape, LAYERS, args.seed)
    sizes: dict[Points, list[int]] = {}  # of the chunks of an individual
    unanswered: dict[Points, set[int]] = {}  # which of them
    scores: dict[Points, list[np.ndarray]] = {}  # of the questions of each chunk
    fitness: dict[Points, float] = {}
    under_way = Counter[Chunk]()
    now, free = 0.0, workers
    events: list[tuple[float, int, str, Chunk]] = []  # when; in what order at the same time; what, of which chunk

    def later(after: float, what: str, chunk: Chunk) -> None:
        heapq.heappush(events, (now + after, next(ties), what, chunk))

    def chunks_of(individuals: Iterable[Individual]) -> deque[Chunk]:
        new = [points for points in dict.fromkeys(i.points for i in individuals) if points not in fitness]
        for done, points in enumerate(new):
            if points not in sizes:
                sizes[points] = chunk_sizes(args.questions, args.questions * (len(new) - done), workers)
                unanswered[points] = set(range(len(sizes[points])))
                of_all = answers(factors_of(points, "bezier", LAYERS))
                scores[points] = np.split(of_all, np.cumsum(sizes[points])[:-1])
        return deque((points, k) for points in new for k in unanswered[points])

    def guessed_fitness(points: Points) -> float:
        """By the answers so far, as ``search.evaluator.Evaluator.peek`` has it."""
        there = [k for k in range(len(sizes[points])) if k not in unanswered[points]]
        if 2 * sum(sizes[points][k] for k in there) < args.questions:
            return -math.inf
        return float(np.concatenate([scores[points][k] for k in there]).mean())

    while not ga.done:
        generation = ga.ask()
        waiting, late, guessed, guessed_at = chunks_of(generation), deque[Chunk](), deque[Chunk](), -math.inf
        needed = set(waiting)
        while any(individual.points not in fitness for individual in generation):
            while free:
                if not (waiting or late or args.no_guess) and now - guessed_at > GUESS:
                    guessed = chunks_of(ga.foresee([guessed_fitness(one.points) for one in generation]))
                    now += args.guessing
                    guessed_at = now
                if not (queue := waiting or late or guessed):
                    break
                points, k = chunk = queue.popleft()
                if k not in unanswered[points] or (under_way[chunk] and queue is not late):
                    continue
                usual = seconds(sizes[points][k]) + args.overhead
                if under_way[chunk] == 0:
                    later(LATE * usual, "late", chunk)
                took = usual * rng.lognormvariate(-(args.spread**2) / 2, args.spread)
                took *= args.slower if rng.random() < args.stragglers else 1
                lost = rng.random() < took / (args.hours_between_failures * 3600)
                later(took * rng.random() if lost else took, "lost" if lost else "answered", chunk)
                under_way[chunk] += 1
                free -= 1
            at, _, what, (points, k) = heapq.heappop(events)
            now = max(now, at)  # the driver may have been busy
            chunk = points, k
            free += what in ("answered", "back")
            under_way[chunk] -= what in ("answered", "lost")
            if what == "lost":
                later(args.restart, "back", chunk)
            if what == "answered":
                unanswered[points].discard(k)
                if not unanswered[points] and points not in fitness:
                    fitness[points] = float(np.concatenate(scores[points]).mean())
            elif what == "lost" and k in unanswered[points] and chunk in needed:
                waiting.append(chunk)
            elif what == "late" and k in unanswered[points] and chunk in needed:
                late.append(chunk)
        ga.tell([fitness[individual.points] for individual in generation])
    return now


@program("workers")
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, some = parser.add_argument, at_least(1)
    add("--costs", type=Path, default=KEPT / "chunk_costs.jsonl", metavar="FILE")
    add("--shape", default="vicuna-7b", help="of the measured model")
    add("--records", type=int, default=100, help="of a measured prompt")
    add("--questions", type=some, default=200, help="of an individual")
    add("--population", type=some, default=32, help="individuals of the first generation")
    add("--mutations", type=at_least(0), default=16, help="offspring by mutation of each later one")
    add("--crossovers", type=at_least(0), default=4, help="offspring by crossover; both children are asked for")
    add("--generations", type=at_least(0), default=20, help="after the first")
    add("--landscape", choices=[each.name for each in landscapes(LAYERS)], default="smooth")
    add("--no_guess", action="store_true", help="let workers wait for the end of a generation")
    add("--guessing", type=amount, default=0.2, help="seconds of the driver's time that a guess takes")
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
