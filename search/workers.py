"""A search on several GPUs or machines: Ray actors, each with the model and the tasks loaded once.

The driver hands an individual to each worker that is free, and takes the results in the order of asking.
"""

import logging
import os
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from lpes_eval.errors import UserError
from search.bench import Bench
from search.journal import packages
from search.space import Job

logger = logging.getLogger(__name__)

DEATHS = 3
"""Workers that an individual may kill before it is recorded as failed."""
SAY_AFTER = 30.0
"""Seconds without a worker after which a person is told so."""


class Worker(Bench):
    """A bench in a process of its own; a Ray actor. Relative paths start from the driver's ``folder``."""

    def __init__(self, args: dict[str, Any], folder: str, threads: int) -> None:
        import torch

        with suppress(OSError):  # a machine may need no such folder
            os.chdir(folder)
        torch.set_num_threads(threads)
        super().__init__(Namespace(**args))
        self.guards("search")
        engine = self.evaluator("search").engine
        self._described: dict[str, Any] = {"node": os.uname().nodename, "packages": packages()}
        self._described |= {"model": engine.fingerprint(), "weights": engine.weights()}

    def describe(self) -> dict[str, Any]:
        """Where it is, and what it measures with."""
        return self._described


class Pool:
    """The workers of a command line, of this kind; ``UserError`` where Ray is not there, or has no room for so many."""

    def __init__(self, args: Namespace, kind: type = Worker) -> None:
        ray = self._ray = start_ray(args.ray_address)
        gpus, have = args.gpus_per_worker, ray.cluster_resources()
        cores = int(have.get("CPU", 1))
        room = int(have.get("GPU", 0) / gpus) if gpus else cores
        if args.workers > room and not args.ray_address:
            raise UserError(f"--workers {args.workers}: this machine has room for {room} (--gpus_per_worker {gpus:g})")
        largest = max(int(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["Alive"])
        cpus = 1 if gpus else max(1, min(largest, cores // args.workers))
        actor: Any = ray.remote(kind).options(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=0)
        own = {**vars(args), "workers": None, "ray_address": None, "output": None}
        self._workers = [actor.remote(own, os.getcwd(), cpus) for _ in range(args.workers)]
        self._starting: dict[Any, Any] = {}
        self._dead = 0  # answers in a row that a worker is dead, and not only away
        for worker in self._workers:
            self._begin(worker)
        self._idle: deque[Any] = deque()
        self._first: dict[str, Any] | None = None

    def __len__(self) -> int:
        """How many workers there are to be."""
        return len(self._workers)

    @property
    def described(self) -> dict[str, Any]:
        """What the first worker that was there said of itself (``Worker.describe``)."""
        while self._first is None:
            self._wait({})
        return self._first

    def map(self, jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
        """Each job's result, in their order; of one that no worker survives its ``failed`` alone.

        ``UserError`` is what a worker raised, or a worker that cannot start or is not like the first.
        """
        waiting, deaths = deque(range(len(jobs))), Counter[int]()
        running: dict[Any, tuple[int, Any]] = {}
        results: dict[int, Any] = {}
        try:
            for number in range(len(jobs)):
                while number not in results:
                    while self._idle and waiting:
                        worker, job = self._idle.popleft(), waiting.popleft()
                        running[worker.measure.remote(jobs[job])] = job, worker
                    for ref in self._wait(running):
                        job, worker = running.pop(ref)
                        try:
                            results[job] = self._ray.get(ref)
                            self._idle.append(worker)
                        except self._ray.exceptions.RayTaskError as error:
                            self._idle.append(worker)
                            raise error.cause if isinstance(error.cause, Exception) else error from None
                        except self._ray.exceptions.RayActorError:  # it died, and Ray starts it again
                            self._begin(worker)
                            deaths[job] += 1
                            if deaths[job] < DEATHS:
                                waiting.appendleft(job)
                            else:
                                results[job] = {"failed": f"{DEATHS} workers died while they measured it"}
                yield results.pop(number)
        finally:
            # whoever is at work on what nobody waits for is free when it answers again
            for _, worker in running.values():
                self._begin(worker)

    def time_two_batches(self) -> tuple[int, float]:
        """As ``Bench.time_two_batches``, for all workers together."""
        while not self._idle:
            self._wait({})
        prompts, seconds = self._ray.get(self._idle[0].time_two_batches.remote())
        return prompts * len(self), seconds

    def _begin(self, worker: Any) -> None:  # wait for one that starts, or is busy, to say what it is
        self._starting[worker.describe.remote()] = worker

    def _wait(self, running: dict[Any, Any]) -> list[Any]:
        """Wait until a worker has something to say, and return what is ready of ``running``."""
        ready, _ = self._ray.wait([*running, *self._starting], timeout=SAY_AFTER)
        if not ready and not running:
            logger.warning("no worker is there yet: waiting for the cluster, or for the model to be loaded")
        for ref in [ref for ref in ready if ref in self._starting]:
            worker = self._starting.pop(ref)
            try:
                self._check(self._ray.get(ref))
                self._idle.append(worker)
                self._dead = 0
            except self._ray.exceptions.RayActorError as error:
                if error.actor_init_failed:  # it would fail again
                    said = str(error).strip().splitlines()[-1].strip().rpartition("UserError: ")[2]
                    raise UserError(f"a worker cannot start: {said}") from None
                self._dead += isinstance(error, self._ray.exceptions.ActorDiedError)
                if self._dead > 2 * len(self):  # a lost node's workers, one answer each, start elsewhere
                    raise UserError("Ray has ended, with its workers; the same command goes on") from None
                self._begin(worker)
        return [ref for ref in ready if ref in running]

    def _check(self, described: dict[str, Any]) -> None:
        """Refuse a worker that measures with something else than the driver, or than the first worker."""
        own, node = packages(), described["node"]
        for name, version in described["packages"].items():
            if own.get(name) != version:
                text = f"has {name} {version}, not {own.get(name)}; install the driver's versions"
                raise UserError(f"the worker on {node} {text}")
        self._first = self._first or described
        if described["model"] != self._first["model"]:
            raise UserError(f"the worker on {node} has another model than the first worker")


def start_ray(address: str | None) -> Any:
    """The module ``ray``, joined to the cluster at ``address`` or to one on this machine alone."""
    if not address:
        # the name is of another system's; what it does is to bind every port to 127.0.0.1
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # else 15: they are the search, not a side job
    try:
        import ray
    except ImportError:
        raise UserError("--workers needs Ray; install it with pip install 'lpes-eval[ray]'") from None
    if ray.is_initialized():
        return ray
    dashboard = None if address else False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address=address or "local", include_dashboard=dashboard, **options)
    except Exception as error:  # of several classes, one of which is Exception itself
        where = "--workers: Ray did not start on this machine"
        if address:
            where = f"--ray_address {address}: no Ray cluster answers, or it asks for a token (RAY_AUTH_MODE=token)"
        raise UserError(f"{where} ({' '.join(str(error).split())[:500]})") from None
    return ray
