"""Workers in processes of their own: the same journal, whoever measures and whoever dies on the way."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace

import pytest

os.environ.setdefault("RAY_worker_niceness", "0")  # else whatever else runs on this machine goes before the workers

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")

from lpes_eval.errors import UserError  # noqa: E402
from search.journal import packages  # noqa: E402
from search.workers import Pool  # noqa: E402
from small_searches import journal  # noqa: E402

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Echo:
    """A worker without a model: it gives back its job, a number, and dies of one."""

    def __init__(self, args, folder, threads):
        self.pid = os.getpid()

    def describe(self):
        return {"node": "here", "packages": packages(), "model": "the same"}

    def begin(self, job):
        if job == 13:
            os._exit(1)
        if job == -1:
            raise UserError("not this one")

    def measure(self, job):
        time.sleep(0.05 + 0.1 * (job % 3 == 0))  # so that results come out of order
        self.begin(job)
        return {"job": job, "pid": self.pid}


def pool_of(kind=Echo, **args):
    """Workers of this kind, in place of those before, which hold the cores."""
    ray.shutdown()
    return Pool(Namespace(**{"workers": 2, "gpus_per_worker": 0.0, "ray_address": None} | args), kind)


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


def test_workers_killed_all_the_time_change_no_result(pool):
    stop, kills, draw = threading.Event(), [], random.Random(0)

    def kill():
        while not stop.wait(10.0):
            if pids := subprocess.run(["pgrep", "-f", "ray::Echo"], capture_output=True).stdout.split():
                os.kill(int(draw.choice(pids)), signal.SIGKILL)
                kills.append(1)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        jobs, _ = measured(pool, range(20, 420))
    finally:
        stop.set()
        killer.join()
    assert jobs == [*range(20, 420)]
    assert kills


def test_what_kills_three_workers_is_failed_and_the_rest_is_measured(pool):
    jobs, _ = measured(pool, [20, 13, 21, 22])
    assert jobs == [20, {"failed": "3 workers died while they measured it"}, 21, 22]


def test_what_a_worker_raises_is_raised_and_the_workers_go_on(pool):
    with pytest.raises(UserError, match="not this one"):
        measured(pool, [20, -1, *range(21, 30)])
    assert measured(pool, range(20, 24))[0] == [20, 21, 22, 23]


def test_results_that_are_not_taken_hold_nothing_up(pool):
    results = pool.map([*range(20, 40)])
    assert next(results)["job"] == 20
    results.close()  # as where a budget ends the search
    assert measured(pool, range(50, 54))[0] == [50, 51, 52, 53]


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"packages": {"torch": "1"}}, r"has torch 1, not .*; install the driver's"),
        ({"model": "another"}, "has another model than the first worker"),
    ],
)
def test_a_worker_with_other_packages_or_another_model_is_refused(tmp_path, described, message):
    class Other(Echo):
        def describe(self):
            with contextlib.suppress(FileExistsError):
                (tmp_path / "first").touch(exist_ok=False)  # the first one that comes here
                return super().describe()
            return super().describe() | described

    with pytest.raises(UserError, match=message):
        measured(pool_of(Other), range(40))


def test_a_worker_that_cannot_start_is_named_and_not_waited_for():
    class Broken(Echo):
        def __init__(self, args, folder, threads):
            raise UserError("x: no such model")

    with pytest.raises(UserError, match="a worker cannot start: x: no such model"):
        _ = pool_of(Broken).described


def test_workers_share_the_cores_of_a_container_and_not_those_of_its_machine(monkeypatch):
    ray.shutdown()
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    pool = Pool(Namespace(workers=2, gpus_per_worker=0.0, ray_address=None), Echo)
    assert len(measured(pool, range(20, 60))[1]) == 2


LISTENING = """
from argparse import Namespace
from pathlib import Path
from search.journal import packages
from search.workers import Pool

class Empty:
    def __init__(self, *args): pass
    def describe(self): return {"node": "here", "packages": packages(), "model": "the same"}

def listening():  # local address and inode
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {(row[1].split(":")[0], row[9]) for row in rows if row[3] == "0A"}

before = listening()
pool = Pool(Namespace(workers=1, gpus_per_worker=0.0, ray_address=None), Empty)
pool.described
print(*{address for address, _ in listening() - before})
"""


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="reads Linux's table of sockets")
def test_no_port_of_the_workers_can_be_reached_from_outside():
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    printed = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True, check=True, env=env)
    addresses = set(printed.stdout.split())
    assert addresses
    assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1


@pytest.fixture
def nodes():
    """A cluster of one node, with one core, on this machine; more can join."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_worker_whose_node_joins_later_is_used_and_one_whose_node_leaves_is_not_waited_for(nodes):
    pool, jobs = pool_of(ray_address=nodes.address), range(20, 40)
    _, first = measured(pool, jobs)
    assert len(first) == 1
    joined = nodes.add_node(num_cpus=1)
    deadline = time.monotonic() + 120
    while not first < measured(pool, jobs)[1]:
        assert time.monotonic() < deadline
    nodes.remove_node(joined, allow_graceful=False)
    while measured(pool, jobs)[1] != first:
        assert time.monotonic() < deadline


SEARCH = [sys.executable, "-m", "search.ga", "--tasks", "kv_retrieval", "--model_args", "pretrained=reference-kv"]
SEARCH += ["--metadata", "num_keys=12", "--examples", "13", "--positions", "0,100", "--finest", "1"]


def searched(folder, *flags):
    """What a small search measures, and its factors."""
    ended = subprocess.run([*SEARCH, *flags, "--output", str(folder)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    files = [path.read_bytes() for path in sorted(folder.glob("*s.json")) + sorted(folder.glob("best_effort.json"))]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in journal(folder)], files


WAYS = {"held out": ["--held_out_examples", "2"], "budget": ["--held_out_examples", "0", "--budget", "260prompts"]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What it finds without workers."""
    return {way: searched(tmp_path_factory.mktemp("alone"), *flags) for way, flags in WAYS.items()}


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("way", WAYS)
def test_a_search_keeps_the_same_journal_with_any_number_of_workers(tmp_path, alone, workers, way):
    assert searched(tmp_path, *WAYS[way], "--workers", workers) == alone[way]


def test_a_search_keeps_the_same_journal_with_8_workers_on_two_nodes(tmp_path, alone, nodes):
    for _ in range(2):
        nodes.add_node(num_cpus=4)
    flags = ["--workers", "8", "--ray_address", nodes.address]
    assert searched(tmp_path, *WAYS["held out"], *flags) == alone["held out"]


def test_a_search_whose_head_node_is_lost_ends_and_the_same_command_goes_on_with_the_next_one(tmp_path, alone):
    from ray.cluster_utils import Cluster

    env = os.environ | {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}  # else it is waited for for a minute
    head = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    flags = [*WAYS["held out"], "--workers", "2", "--output", str(tmp_path), "--ray_address"]
    running = subprocess.Popen([*SEARCH, *flags, head.address], env=env, stderr=subprocess.PIPE, text=True)
    lines, deadline = tmp_path / "journal.jsonl", time.monotonic() + 240
    while not lines.exists() or len(lines.read_text().splitlines()) < 4:
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    head.shutdown()
    print(running.communicate(timeout=240)[1][-3000:])
    assert running.returncode
    head = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        again = searched(tmp_path, *WAYS["held out"], "--workers", "2", "--ray_address", head.address)
        assert again == alone["held out"]
    finally:
        head.shutdown()
