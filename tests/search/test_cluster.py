"""Workers in processes of their own: the same answers, whoever gives them and whoever dies on the way."""

import contextlib
import math
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

from search.engines import cluster  # noqa: E402
from search.engines.cluster import Chunk, Pool, WorkerKilled  # noqa: E402
from test_ga import journal  # noqa: E402

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
ARGS = {"workers": 2, "gpus_per_worker": 0.0, "ray_address": None, "model_args": {}, "device": None, "batch_size": 1}


class Echo:
    """A worker without a model: it answers what it was asked, and dies of one prompt."""

    def __init__(self, args, packages, threads):
        self.pid = os.getpid()

    def ready(self):
        return {"node": "here", "model": ["the same"]}

    def begin(self, chunk):
        if 13 in chunk.order[0]:
            os._exit(1)

    def answer(self, chunk, requests, speed):
        time.sleep(0.05)
        self.begin(chunk)
        return {i: [f"{chunk.factors} {i} {self.pid}"] for together in chunk.order for i in together}, set()


def pool_of(kind=Echo, **args):
    """Workers of this kind, in place of those before, which hold the cores."""
    ray.shutdown()
    pool = Pool(Namespace(**ARGS | args), {}, kind)
    pool.number = pool.add([])
    return pool


@pytest.fixture(scope="module")
def pool():
    yield pool_of()
    ray.shutdown()


def chunks(pool, numbers, factors=(1.0, 1.2)):
    return [Chunk(pool.number, factors, ((number,),)) for number in numbers]


def asked(pool, numbers):
    """The numbers that were answered, in the order of the answers, and who answered them; each time asked anew."""
    pool.number = pool.add([])
    found = [next(iter(answers.items())) for answers, _ in pool.results(chunks(pool, numbers))]
    return [i for i, _ in found], {response.split()[-1] for _, (response,) in found}


def test_answers_come_in_the_order_of_the_questions_from_several_workers(pool):
    answered, workers = asked(pool, range(20, 40))
    assert answered == [*range(20, 40)]
    assert len(workers) == 2


def test_workers_killed_all_the_time_change_no_answer(pool):
    stop, kills, draw = threading.Event(), [], random.Random(0)

    def kill():
        while not stop.wait(10.0):
            if pids := subprocess.run(["pgrep", "-f", "ray::Echo"], capture_output=True).stdout.split():
                os.kill(int(draw.choice(pids)), signal.SIGKILL)
                kills.append(1)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        answered, _ = asked(pool, range(20, 420))
    finally:
        stop.set()
        killer.join()
    assert answered == [*range(20, 420)]
    assert kills


def test_prompts_that_kill_every_worker_are_named_and_the_others_are_answered(pool):
    for number in range(3):  # also where a copy of them was with another worker when they were given up
        with pytest.raises(WorkerKilled, match=r"factors 1, 1.2: 3 workers died"):
            asked(pool, [13])
        assert asked(pool, range(20, 40))[0] == [*range(20, 40)], number


def test_workers_with_nothing_to_do_begin_with_what_is_expected(pool):
    later = chunks(pool, range(50, 54), factors=(1.0, 1.5))
    pool.expect(later)
    asked(pool, range(20, 40))
    deadline = time.monotonic() + 20
    while not set(later) <= set(pool._found) and time.monotonic() < deadline:
        pool._hand_out(cluster.deque())
        pool._collect()
    assert set(later) <= set(pool._found)


def test_no_chunk_is_answered_twice(tmp_path):
    class Noting(Echo):
        def begin(self, chunk):
            with (tmp_path / "answered").open("a") as lines:
                lines.write(f"{chunk.factors} {chunk.order}\n")

    pool = pool_of(Noting)
    several = [chunks(pool, range(6), factors=(1.0, y)) for y in (1.1, 1.2, 1.3)]
    pool.expect([chunk for some in several for chunk in some])
    for some in several:
        list(pool.results(some))
    ray.shutdown()
    answered = (tmp_path / "answered").read_text().splitlines()
    assert sorted(answered) == sorted(f"{chunk.factors} {chunk.order}" for some in several for chunk in some)


def test_a_worker_that_hangs_is_not_waited_for(tmp_path):
    class Hanging(Echo):
        def begin(self, chunk):
            with contextlib.suppress(FileExistsError):
                (tmp_path / "hangs").touch(exist_ok=False)  # the first one that comes here
                time.sleep(3600)

    pool = pool_of(Hanging)
    (first, worker), (second, same) = (asked(pool, numbers) for numbers in (range(20, 40), range(40, 60)))
    assert first + second == [*range(20, 60)]
    assert len(worker | same) == 1


def test_a_worker_that_cannot_start_is_named_and_not_waited_for():
    class Other(Echo):
        def __init__(self, args, packages, threads):
            raise cluster.UserError("the worker on here has torch 1, not 2; install the driver's versions")

    with pytest.raises(cluster.UserError, match="cannot start: the worker on here has torch 1, not 2"):
        asked(pool_of(Other), [0])


def test_workers_share_the_cores_of_a_container_and_not_those_of_its_machine(monkeypatch):
    ray.shutdown()
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    pool = Pool(Namespace(**ARGS), {}, Echo)
    there, _ = ray.wait([*pool._starting], num_returns=2, timeout=60)
    assert len(there) == 2


LISTENING = """
from argparse import Namespace
from pathlib import Path
from search.engines.cluster import Pool

class Empty:
    def __init__(self, *args): pass
    def ready(self): return {"node": "here", "model": ["the same"]}

def listening():  # local address and inode
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {(row[1].split(":")[0], row[9]) for row in rows if row[3] == "0A"}

before = listening()
args = Namespace(workers=1, gpus_per_worker=0.0, ray_address=None, model_args={}, device=None, batch_size=1)
pool = Pool(args, {}, Empty)
pool.model
print(*{address for address, _ in listening() - before})
"""


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="reads Linux's table of sockets")
def test_no_port_of_the_workers_can_be_reached_from_outside():
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    found = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True, check=True, env=env)
    addresses = set(found.stdout.split())
    assert addresses
    assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1


def test_a_worker_with_another_model_than_the_first_is_refused():
    pool = object.__new__(Pool)
    found = [{"node": node, "model": [{"weights_sha256": node}, None]} for node in ("a", "b")]
    pool._ray = type("Ray", (), {"wait": staticmethod(lambda refs, timeout: (refs, [])), "get": found.__getitem__})
    pool._running, pool._starting, pool._model, pool._last_there = {}, {0: "worker", 1: "worker"}, None, math.inf
    with pytest.raises(cluster.UserError, match="the worker on b has another model"):
        pool._collect()


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
    pool, numbers = pool_of(ray_address=nodes.address), range(20, 40)
    _, first = asked(pool, numbers)
    assert len(first) == 1
    joined = nodes.add_node(num_cpus=1)
    deadline = time.monotonic() + 120
    while not first < asked(pool, numbers)[1]:
        assert time.monotonic() < deadline
    nodes.remove_node(joined, allow_graceful=False)
    while asked(pool, numbers)[1] != first:
        assert time.monotonic() < deadline


SEARCH = [sys.executable, "-m", "search.ga", "--tasks", "kv_retrieval", "--examples", "2", "--positions", "0,100"]
SEARCH += ["--lambdas", "1,1", "--guard", "none", "--held_out_examples", "0", "--finest", "1", "--no_cache"]


GENETIC = ["--optimizer", "ga", "--population", "6", "--parents", "3", "--generations", "2", "--mutations", "4"]


def searched(folder, *flags):
    """What a small search measures, and its factors."""
    subprocess.run([*SEARCH, *flags, "--output", str(folder)], check=True, capture_output=True)
    measured = [{k: v for k, v in line.items() if k in ("key", "scores", "examples")} for line in journal(folder)]
    return measured, (folder / "best_effort.json").read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What it finds without workers."""
    return searched(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_search_keeps_the_same_journal_with_any_number_of_workers(tmp_path, alone, workers):
    assert searched(tmp_path, "--workers", workers) == alone


def test_a_genetic_search_does_so_too_where_workers_begin_with_its_next_generation(tmp_path):
    alone = searched(tmp_path / "alone", *GENETIC)
    assert searched(tmp_path / "workers", *GENETIC, "--workers", "2") == alone


def test_a_search_keeps_the_same_journal_with_8_workers_on_two_nodes(tmp_path, alone, nodes):
    for _ in range(2):
        nodes.add_node(num_cpus=4)
    assert searched(tmp_path, "--workers", "8", "--ray_address", nodes.address) == alone


def test_a_search_whose_head_node_is_lost_ends_and_the_same_command_goes_on_with_the_next_one(tmp_path, alone):
    from ray.cluster_utils import Cluster

    env = os.environ | {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}  # else it is waited for for a minute
    head = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    flags = ["--workers", "2", "--output", str(tmp_path), "--ray_address"]
    running = subprocess.Popen([*SEARCH, *flags, head.address], env=env, stderr=subprocess.PIPE, text=True)
    journal, deadline = tmp_path / "journal.jsonl", time.monotonic() + 240
    while not journal.exists() or len(journal.read_text().splitlines()) < 4:
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    head.shutdown()
    said = running.communicate(timeout=240)[1]
    print(said[-3000:])
    assert running.returncode
    head = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        assert searched(tmp_path, *flags[:2], "--ray_address", head.address) == alone
    finally:
        head.shutdown()
