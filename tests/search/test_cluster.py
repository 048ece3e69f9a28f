"""Workers in processes of their own: the same journal, whoever measures and whoever dies on the way."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

os.environ.setdefault("RAY_worker_niceness", "0")  # else whatever else runs goes before

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")

from lpes_eval.errors import UserError  # noqa: E402
from search import ga  # noqa: E402
from search.journal import packages  # noqa: E402
from search.workers import Pool  # noqa: E402
from small_searches import SMALL, found, journal  # noqa: E402

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Echo:
    """A worker without a model: it gives back its job, a number or a file, and is killed while it makes the file."""

    def __init__(self, args, folder, threads):
        self.pid = os.getpid()

    def describe(self):
        return {"node": "here", "packages": packages(), "model": "the same"}

    def measure(self, job):
        if job == -1:
            raise UserError("not this one")
        if isinstance(job, Path) and not job.exists():
            job.touch()
            os.kill(self.pid, signal.SIGKILL)
        if job == 13:
            os._exit(1)
        time.sleep(0.05 + 0.1 * (job in (20, 23, 26)))  # so that results come out of order
        return {"job": job, "pid": self.pid}


def pool_of(kind=Echo):
    """Workers of this kind, in place of those before, which hold the cores."""
    ray.shutdown()
    return Pool(Namespace(workers=2, gpus_per_worker=0.0, ray_address=None), kind)


@pytest.fixture(scope="module")
def pool():
    yield pool_of()
    ray.shutdown()


def measured(pool, jobs):
    """The jobs in the order of the results, and the processes that measured them."""
    results = list(pool.map(list(jobs)))
    return [result.get("job", result) for result in results], {result.get("pid") for result in results}


def test_results_come_in_the_order_of_asking_from_several_workers(pool):
    jobs, workers = measured(pool, range(20, 40))
    assert jobs == [*range(20, 40)]
    assert len(workers) == 2


def test_what_kills_three_workers_is_failed_and_all_else_is_measured(pool, tmp_path):
    jobs = [20, tmp_path / "a", 13, 21, tmp_path / "b", 22]
    failed = {"failed": "3 workers died while they measured it"}
    assert measured(pool, jobs)[0] == [failed if job == 13 else job for job in jobs]


def test_after_an_error_or_results_that_are_not_taken_the_workers_go_on(pool):
    with pytest.raises(UserError, match="not this one"):
        measured(pool, [20, -1, *range(21, 30)])
    results = pool.map([*range(20, 40)])
    assert next(results)["job"] == 20
    results.close()  # as where a budget ends the search
    assert measured(pool, range(50, 54))[0] == [50, 51, 52, 53]


def test_a_worker_with_another_model_is_refused(tmp_path):
    class Other(Echo):
        def describe(self):
            with contextlib.suppress(FileExistsError):
                (tmp_path / "first").touch(exist_ok=False)  # the first one that comes here
                return super().describe()
            return super().describe() | {"model": "another"}

    with pytest.raises(UserError, match="has another model than the first worker"):
        measured(pool_of(Other), range(40))


def test_a_worker_that_cannot_start_is_named_and_not_waited_for():
    class Broken(Echo):
        def __init__(self, args, folder, threads):
            raise UserError("x: no such model")

    with pytest.raises(UserError, match="a worker cannot start: x: no such model"):
        _ = pool_of(Broken).described


def test_workers_that_do_not_come_back_are_not_waited_for():
    pool = pool_of()
    assert measured(pool, range(20, 24))[0] == [*range(20, 24)]
    for worker in pool._workers:
        ray.kill(worker)
    with pytest.raises(UserError, match="Ray has ended"):
        measured(pool, range(20, 40))


LISTENING = """
import psutil
from search.workers import start_ray

ray = start_ray(None)
ray.get(ray.remote(lambda: 1).remote())
children = psutil.Process().children(recursive=True)
print(*{at.laddr.ip for child in children for at in child.net_connections() if at.status == "LISTEN"})
"""


def test_no_port_of_the_workers_can_be_reached_from_outside():
    pytest.importorskip("psutil")
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    printed = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True, check=True, env=env)
    assert {"127.0.0.1"} <= {*printed.stdout.split()} <= {"127.0.0.1", "::ffff:127.0.0.1"}


SEARCH = ["--tasks", "kv_retrieval", "--model_args", "pretrained=reference-kv", "--metadata", "num_keys=12", *SMALL]
SEARCH += ["--examples", "5", "--positions", "0,100", "--start", "1.1", "--guard_examples", "12"]


def searched(folder, *flags):
    """What a small search measures, and its factors."""
    ray.shutdown()
    assert ga.main([*SEARCH, *flags, "--output", str(folder)]) == 0
    entries = [{k: v for k, v in entry.items() if k != "seconds"} for entry in journal(folder)]
    return entries, found(folder).read_bytes()


WAYS = {"held out": ["--held_out_examples", "2"], "budget": ["--held_out_examples", "0", "--budget", "60prompts"]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return {way: searched(tmp_path_factory.mktemp("alone"), *flags) for way, flags in WAYS.items()}


@pytest.mark.parametrize(("way", "workers"), [("held out", "1"), ("budget", "2")])
def test_a_search_keeps_the_same_journal_with_any_number_of_workers(tmp_path, alone, way, workers):
    assert searched(tmp_path, *WAYS[way], "--workers", workers) == alone[way]


def test_workers_on_two_nodes_of_a_cluster_find_the_same(tmp_path, alone):
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    try:
        found = searched(tmp_path, *WAYS["held out"], "--workers", "2", "--ray_address", cluster.address)
        assert found == alone["held out"]
    finally:
        ray.shutdown()
        cluster.shutdown()
