"""What can go wrong around a search: a full disk, a folder that cannot be written, damage, a model without an answer.

Two processes in one folder and torn journals are in ``test_journal.py``, memory that runs out in ``tests/engine/test_engine.py``,
and many more damages in ``tests/fuzz.py``.
"""

import random
from types import SimpleNamespace

import pytest

import toy_search
from lpes_eval import files, rope
from lpes_eval.engine.exact import ExactEngine
from lpes_eval.engine.harness import HarnessEngine
from lpes_eval.errors import UserError, program
from search.cache import FitnessCache
from search.journal import Journal
from search.optimizers.ga import GeneticAlgorithm, GeneticConfig
from search.run import Search
from search.space import Space, to_points


def test_what_does_not_fit_the_disk_is_not_believed_and_what_was_there_stays(tmp_path, disk):
    with Journal(tmp_path, {}) as journal:
        journal.record("a", {"fitness": 0.5})
        disk.room = 0
        with pytest.raises(OSError, match="No space left"):
            journal.record("b", {"fitness": 0.75})
        assert set(journal.entries) == {"a"}
    disk.room = 1
    with Journal(tmp_path, {}) as journal:
        assert journal.entries == {"a": {"key": "a", "fitness": 0.5}}
        assert "torn off" in journal.notes[0]


def test_a_file_that_does_not_fit_the_disk_is_named(tmp_path, disk, capsys):
    disk.room, path = 0, tmp_path / "a.json"
    assert program("toy")(lambda: files.write_atomically(path, "{}" * 20))() == 2
    assert capsys.readouterr().err == f"toy: error: {path}: No space left on device\n"


def test_a_search_goes_on_where_its_cache_cannot_be_kept_and_says_so_once(tmp_path, disk, caplog):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "cache", tmp_path / "file"):
        cache, disk.room = FitnessCache(folder), 0
        for name in "ab":
            cache.put("context", name, {"examples": {}})
            assert cache.get("context", name) is None
    assert ["cannot be kept for other searches" in record.getMessage() for record in caplog.records] == [True, True]
    assert not list(tmp_path.rglob("*.part"))


def test_a_flipped_bit_in_a_journal_is_named_or_its_line_measured_again(tmp_path):
    toy_search.main(tmp_path)
    whole, factors = (tmp_path / "journal.jsonl").read_bytes(), (tmp_path / "factors.json").read_bytes()
    rng, last = random.Random(0), whole[:-1].rindex(b"\n")
    for at in [len(whole) - 9, *(rng.randrange(len(whole)) for _ in range(20))]:
        flipped = whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
        (tmp_path / "journal.jsonl").write_bytes(flipped)
        try:
            toy_search.main(tmp_path)
        except UserError as error:
            assert f"line {whole[:at].count(10) + 1}: damaged" in str(error)
            assert (tmp_path / "journal.jsonl").read_bytes() == flipped  # not ours to drop
            assert at < last
        else:
            assert at >= last  # as if it had been torn off
        assert (tmp_path / "factors.json").read_bytes() == factors


@pytest.mark.parametrize(("engine", "task"), [(ExactEngine, "toy"), (HarnessEngine, "toy_choice")])
def test_an_individual_under_which_the_logits_are_nan_is_named(toy_lm, load, engine, task):
    parts = load(task)
    asked = engine(toy_lm, [request for part in parts for request in part.task.instances])
    broken = lambda module, args, output: output * (float("nan") if 1.5 in rope.applied(toy_lm.model) else 1)  # noqa: E731
    with toy_lm.model.lm_head.register_forward_hook(broken):
        asked.set_factors([1.0, 1.25, 1.0])
        assert list(asked.answer())
        asked.set_factors([1.0, 1.5, 1.0])
        with pytest.raises(UserError, match=r"under factors 1, 1\.5, 1 the model's logits are not numbers"):
            list(asked.answer())
    rope.remove(toy_lm.model)


def test_an_individual_whose_workers_die_is_recorded_and_the_search_goes_on(tmp_path):
    from search.engines.cluster import WorkerKilled
    from search.evaluator import Measured

    def measure(factors, cutoff=None, part=None):
        assert cutoff is None  # nothing is given up early
        if factors.per_layer()[0] > 1.6:
            raise WorkerKilled("3 workers died")
        return Measured(-sum(abs(s - 1.3) for s in factors.per_layer()), {"a": 0.5}, {})

    class Evaluator:
        num_layers, expect = 8, staticmethod(lambda *_: None)
        part, asked = staticmethod(lambda share: None), staticmethod(lambda part: 1)
        __call__ = staticmethod(measure)

    space = Space(8)
    optimizer = GeneticAlgorithm(space, GeneticConfig(population=12, parents=4), generations=3, seed=0)
    args = SimpleNamespace(curve="bezier", skip=0, budget=None, early_stopping=None)
    search = Search(args, None, Evaluator(), optimizer, {})
    with Journal(tmp_path, {}) as search.journal:
        best, _ = search.run(lambda individual, entry, new: None)
        failed = [entry for entry in search.journal.entries.values() if "failed" in entry]
    assert failed
    assert all(entry["failed"] == "3 workers died" for entry in failed)
    assert search.factors(best).per_layer()[0] <= 1.6
    search.args.early_stopping = "bound"
    search.optimizer = SimpleNamespace(cutoff=(to_points(failed[0]["points"]), 0.0))
    assert search.cutoff is None  # it has no answers to be held against
