"""Answers from several processes, on this machine or a cluster: Ray actors, each with the model loaded once.

The driver alone decides and writes. It cuts what an individual is asked into chunks, hands them to whichever worker is
free, and takes the answers in the order of the questions. So a search measures the same whatever the number of workers,
whoever answers first, and whoever is lost on the way. Workers that have nothing to do begin with the individuals that
come next, and at the end of a generation with those that are likely to be the next one (``Pool.expect``).
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from lpes_eval.engine import engine_for
from lpes_eval.engine.harness import HarnessEngine
from lpes_eval.errors import UserError
from search import identity
from search.model import load_model

logger = logging.getLogger(__name__)

CHUNKS, SMALLEST, ENOUGH = 8, 8, 24
"""Chunks of an individual, the fewest questions of one, and so many that more of them together are not faster
(``chunk_sizes``)."""
QUEUED = 2
"""Chunks that a worker has at a time: one to answer, the others to go on with at once."""
LATE = 1.3
"""A chunk that takes so many times as long as is usual goes to another worker too, if that has nothing else to do."""
DEATHS = 3
"""Workers that a chunk may kill before its individual is given up."""
LOOK, SAY_AFTER, GUESS = 1.0, 30.0, 1.0
"""Seconds between two looks at what is late, after which a person is told that there is no worker, and between two
guesses at the next generation."""

Order = tuple[tuple[int, ...], ...]
"""Requests by number, in the order in which they are answered: some together, then the next."""
Asked = Sequence[tuple[Sequence[float], Order, bool]]
"""Factors, the order of their requests, and whether these may stop before the last."""


class WorkerKilled(UserError):
    """An individual's questions ended several workers."""


class Chunk(NamedTuple):
    """Some requests of one list under some factors."""

    requests: int
    factors: tuple[float, ...]
    order: Order


class Worker:
    """The model in a process of its own; a Ray actor.

    Args:
        args: the search's command line.
        packages: the driver's versions.
        threads: of a worker on a CPU.
    """

    def __init__(self, args: dict[str, Any], packages: dict[str, str], threads: int) -> None:
        own = identity.packages()
        if other := [
            f"{name} {own.get(name)}, not {version}" for name, version in packages.items() if own.get(name) != version
        ]:
            raise UserError(
                f"the worker on {os.uname().nodename} has {', '.join(other)}; install the driver's versions"
            )
        torch.set_num_threads(threads)
        self._lm = load_model(Namespace(**args))
        self._engines: dict[int, Any] = {}

    def ready(self) -> dict[str, Any]:
        """What model it has, once it is loaded."""
        engine = HarnessEngine(self._lm, [])
        return {"node": os.uname().nodename, "model": (engine.fingerprint(), engine.weights())}

    def answer(self, chunk: Chunk, requests: list[Any], speed: dict[str, Any]) -> tuple[dict[int, list[Any]], set[int]]:
        """The responses to a chunk by number of the request, and which of them did not end by themselves."""
        import ray

        if (engine := self._engines.get(chunk.requests)) is None:
            engine, _ = engine_for(self._lm, ray.get(requests[0]), **speed)
            self._engines[chunk.requests] = engine
        engine.set_factors(chunk.factors)
        answers: dict[int, list[Any]] = {}
        for batch in engine.answer(chunk.order):
            answers |= batch
        return answers, engine.unended & answers.keys()


class Pool:
    """The workers, and what they are doing.

    Args:
        args: the search's command line.
        speed: ``lpes_eval.engine.engine_for``'s further arguments.
        kind: what a worker is.
    """

    def __init__(self, args: Namespace, speed: dict[str, Any], kind: type = Worker) -> None:
        if not args.ray_address:  # the name is of another system's; what it does is to bind every port to 127.0.0.1
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        try:
            import ray
        except ImportError:
            raise UserError("--workers needs Ray; install it with pip install 'lpes-eval[ray]'") from None
        self._ray, self._speed, self.workers = ray, speed, args.workers
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_worker_niceness", "0")  # else 15: they are the search, not a side job
            own = {} if args.ray_address else {"include_dashboard": False}
            try:
                ray.init(address=args.ray_address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
            except Exception as error:  # of several classes, one of which is Exception itself
                token = "" if "RAY_AUTH_MODE" in os.environ else ", or it asks for a token: set RAY_AUTH_MODE=token"
                where = f"--ray_address {args.ray_address}: no Ray cluster answers there{token}"
                if not args.ray_address:
                    where = "--workers: Ray did not start on this machine; try again, or search without --workers"
                raise UserError(f"{where} ({' '.join(str(error).split())[:500]})") from None
        gpus, have = args.gpus_per_worker, ray.cluster_resources()
        cores = int(have.get("CPU", 1))
        if not args.ray_address:
            most = int(have.get("GPU", 0) / gpus) if gpus else cores
            if args.workers > most:
                raise UserError(
                    f"--workers {args.workers}: this machine has room for {most} (--gpus_per_worker {gpus:g})"
                )
        largest = max(int(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["Alive"])
        cpus = 1 if gpus else max(1, min(largest, cores // args.workers))
        actor: Any = ray.remote(kind).options(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=0)
        loaded = {key: value for key, value in vars(args).items() if key in ("model_args", "device", "batch_size")}
        self._workers = [actor.remote(loaded, identity.packages(), cpus) for _ in range(args.workers)]
        self._requests: list[list[Any]] = []
        self._model: tuple[dict[str, Any], dict[str, str] | None] | None = None
        self._starting = {worker.ready.remote(): worker for worker in self._workers}
        # Chunk (None: it is settled), worker, and when it began with it.
        self._running: dict[Any, tuple[Chunk | None, Any, float]] = {}
        self._pace = deque[float](maxlen=100)
        self._last_there = time.monotonic()
        self._again: deque[Chunk] = deque()
        self._expected: deque[Chunk] = deque()
        self._guess: Callable[[], Sequence[Chunk]] | None = None
        self._guessed, self._guessed_next = 0.0, deque[Chunk]()
        self._found: dict[Chunk, Any] = {}
        self._needed = set[Chunk]()
        self._deaths = Counter[Chunk]()

    @property
    def model(self) -> tuple[dict[str, Any], dict[str, str] | None]:
        """The fingerprint and the weights of the model that the workers have."""
        while self._model is None:
            self._collect()
        return self._model

    def add(self, requests: Sequence[Any]) -> int:
        """Hand the workers a list of requests; its number."""
        self._requests.append([self._ray.put(list(requests))])
        return len(self._requests) - 1

    def expect(self, chunks: Sequence[Chunk], guess: Callable[[], Sequence[Chunk]] | None = None) -> None:
        """What will be asked next, and a guess at what then: workers with nothing else to do begin with it."""
        self._expected, self._guess = deque(chunks), guess
        self._guessed_next.clear()
        self._needed = set(chunks)
        self._again = deque(chunk for chunk in self._again if chunk in self._needed)
        self._found = {chunk: self._found[chunk] for chunk in chunks if chunk in self._found}

    def found(self, chunks: Sequence[Chunk]) -> dict[int, list[Any]]:
        """The answers to these chunks that are there."""
        found = [one for chunk in chunks if isinstance(one := self._found.get(chunk), tuple)]
        return {i: responses for answers, _ in found for i, responses in answers.items()}

    def forget(self, requests: int, factors: tuple[float, ...]) -> None:
        """Nobody will ask for more of these factors' answers."""

        def wanted(chunk: Chunk) -> bool:
            return (chunk.requests, chunk.factors) != (requests, factors)

        self._again, self._expected = (deque(filter(wanted, queue)) for queue in (self._again, self._expected))
        self._found = {chunk: answers for chunk, answers in self._found.items() if wanted(chunk)}
        for ref, (chunk, *others) in self._running.items():
            if chunk and not wanted(chunk):
                self._running[ref] = None, *others

    def results(self, chunks: Sequence[Chunk]) -> Iterator[tuple[dict[int, list[Any]], set[int]]]:
        """The answers to each chunk, in their order.

        Raises:
            WorkerKilled: a chunk that no worker survives.
        """
        waiting = deque(chunks)
        self._needed.update(chunks)
        for chunk in chunks:
            while chunk not in self._found:
                self._hand_out(waiting)
                self._collect()
            if isinstance(found := self._found[chunk], Exception):
                raise found
            yield found

    def _hand_out(self, waiting: deque[Chunk]) -> None:
        """Give every worker that is there enough to do: what is waited for first."""
        under_way = Counter(chunk for chunk, *_ in self._running.values() if chunk)
        now, usual = time.monotonic(), median(self._pace or [math.inf])
        late = deque(
            chunk
            for chunk, _, since in self._running.values()
            if chunk and now - since > LATE * usual * len(chunk.order)
            if under_way[chunk] == 1 and not self._deaths[chunk]  # what killed a worker is not to kill two at a time
        )
        needed, useful = lambda: self._again or waiting or self._expected, lambda: late or self._guesses()
        for most, queue_of in ((QUEUED, needed), (1, useful)):
            while (worker := self._free(most)) and (queue := queue_of()):
                chunk = queue.popleft()
                if queue is late or not (chunk in self._found or chunk in under_way):
                    self._run(chunk, worker)
                    under_way[chunk] += 1

    def _free(self, most: int) -> Any:
        """The worker with the fewest chunks, if it has fewer than ``most``."""
        there = [worker for worker in self._workers if worker not in self._starting.values()]
        load = Counter(worker for _, worker, _ in self._running.values())
        worker = min(there, key=lambda each: load[each], default=None)
        return worker if worker is not None and load[worker] < most else None

    def _guesses(self) -> deque[Chunk]:
        """What may be asked after all that is expected."""
        if self._guess is not None and time.monotonic() - self._guessed > GUESS:
            self._guessed_next = deque(chunk for chunk in self._guess() if not self._deaths[chunk])
            self._guessed = time.monotonic()
        return self._guessed_next

    def _run(self, chunk: Chunk, worker: Any) -> None:
        ref = worker.answer.remote(chunk, self._requests[chunk.requests], self._speed)
        self._running[ref] = chunk, worker, time.monotonic()

    def _collect(self) -> None:
        """Wait for an answer or for a worker, and take what has come."""
        from ray.exceptions import RayActorError, RayTaskError

        refs = [*self._running, *self._starting]
        ready, _ = self._ray.wait(refs, timeout=LOOK)
        now = time.monotonic()
        if self._running:
            self._last_there = now
        elif now - self._last_there > SAY_AFTER:
            waiting = "waiting for the cluster, or for the model to be loaded"
            logger.warning("no worker is there yet: %s; one that dies starts again, and Ray's logs say why", waiting)
            self._last_there = now
        for ref in ready:
            if (worker := self._starting.pop(ref, None)) is not None:
                try:
                    found, self._last_there = self._ray.get(ref), now
                    self._model = self._model or found["model"]
                    if found["model"] != self._model:
                        raise UserError(f"the worker on {found['node']} has another model than the first worker")
                except RayActorError as error:
                    if error.actor_init_failed:  # it would fail again
                        said = str(error).strip().splitlines()[-1].strip().rpartition("UserError: ")[2]
                        raise UserError(f"a worker cannot start: {said}") from None
                    self._starting[worker.ready.remote()] = worker
                continue
            chunk, worker, since = self._running.pop(ref)
            try:
                found = self._ray.get(ref)
            except RayTaskError as error:
                found = error.cause if isinstance(error.cause, Exception) else error
            except RayActorError:
                self._lost(chunk, worker)
                continue
            for other, (following, who, at) in self._running.items():  # the worker now begins with its next one
                self._running[other] = following, who, now if who is worker else at
            if chunk:
                self._pace.append((now - since) / len(chunk.order))
                self._settle(chunk, found)

    def _settle(self, chunk: Chunk, found: Any) -> None:
        """Keep what came of a chunk; what other workers may say of it counts no more."""
        self._found[chunk] = found
        for ref, (same, *others) in self._running.items():
            if same == chunk:
                self._running[ref] = None, *others

    def _lost(self, chunk: Chunk | None, worker: Any) -> None:
        """A worker died: Ray starts it again, and another one answers what it had to answer."""
        if worker not in self._starting.values():  # it was at work on this chunk; the others only waited
            self._starting[worker.ready.remote()] = worker
            if chunk:
                self._deaths[chunk] += 1
        if chunk is None:
            return
        if self._deaths[chunk] >= DEATHS:
            factors = ", ".join(f"{factor:g}" for factor in chunk.factors)
            self._settle(chunk, WorkerKilled(f"factors {factors}: {DEATHS} workers died on the same prompts"))
        elif chunk in self._needed:  # and not a guess
            self._again.append(chunk)


class ClusterEngine(HarnessEngine):
    """Has a pool's workers answer a fixed list of requests."""

    def __init__(self, pool: Pool, lm: Any, requests: Sequence[Any]) -> None:
        super().__init__(lm, requests)
        self._pool, self._number = pool, pool.add(requests)
        self.workers = pool.workers
        self._expected: dict[Any, list[Chunk]] = {}

    def set_factors(self, factors: Sequence[float]) -> None:
        """Answer with these factors from now on, one a layer."""
        self.factors = tuple(factors)

    def fingerprint(self) -> dict[str, Any]:
        """Of the workers' model."""
        return self._pool.model[0]

    def weights(self) -> dict[str, str] | None:
        """Of the workers' model."""
        return self._pool.model[1]

    def expect(self, asked: Asked, guess: Callable[[], Asked] | None = None) -> None:
        """What a generation will ask for, and a guess at what the next one will."""
        before, self._expected = self._expected, {}

        def planned(asked: Asked) -> list[Chunk]:
            left, found = sum(len(order) for _, order, _ in asked), []
            for factors, order, may_stop in asked:
                key = tuple(factors), order
                if key not in self._expected:
                    self._expected[key] = before.get(key) or self._chunks(*key, left, may_stop)
                found += self._expected[key]
                left -= len(order)
            return found

        self._pool.expect(planned(asked), guess and (lambda: planned(guess())))

    def found(self, factors: Sequence[float], order: Order) -> dict[int, list[Any]]:
        """The answers under factors that were expected, as far as they are there."""
        return self._pool.found(self._expected.get((tuple(factors), order), ()))

    def answer(self, order: Order, may_stop: bool = False) -> Iterator[dict[int, list[Any]]]:  # type: ignore[override]
        """The responses of each request by its number, chunk by chunk."""
        factors = self.factors
        chunks = self._expected.get((factors, order)) or self._chunks(factors, order, len(order), may_stop)
        try:
            for answers, unended in self._pool.results(chunks):
                self.unended = (self.unended - answers.keys()) | unended
                yield answers
        finally:
            self._pool.forget(self._number, factors)

    def _chunks(self, factors: tuple[float, ...], order: Order, left: int, may_stop: bool) -> list[Chunk]:
        questions, sizes = iter(order), chunk_sizes(len(order), left, self.workers, may_stop)
        return [Chunk(self._number, factors, tuple(itertools.islice(questions, size))) for size in sizes]


def chunk_sizes(questions: int, left: int, workers: int, may_stop: bool = True) -> list[int]:
    """How many of an individual's questions each chunk has; ``left`` are those of its generation not yet handed out.

    An eighth, as the individual may be given up between two chunks; of one that may not, at least ``ENOUGH``, as small
    batches waste time. Fewer towards the end of a generation, so that the workers are done at about the same time.
    docs/cluster.md has what this costs.
    """
    most = questions / CHUNKS if may_stop else max(questions / CHUNKS, ENOUGH)
    most = max(SMALLEST, math.ceil(min(most, left / workers)))
    chunks = math.ceil(questions / most)
    return [questions * (k + 1) // chunks - questions * k // chunks for k in range(chunks)]


_pools: dict[str, Pool] = {}


def pool(args: Namespace, speed: dict[str, Any]) -> Pool | None:
    """The workers of this process, which all evaluations of a search share; None where one process is enough."""
    if not getattr(args, "workers", None):
        return None
    key = repr([args.model_args, args.device, args.workers, args.gpus_per_worker, args.ray_address, speed])
    if key not in _pools:
        _pools.clear()
        _pools[key] = Pool(args, speed)
    return _pools[key]
