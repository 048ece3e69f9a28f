"""What can go wrong around a search: a full disk, a folder that cannot be written, damage, a model without an answer.

Two processes in one folder and torn journals are in ``test_journal.py``, memory that runs out in
``tests/engine/test_engine.py``, and many more damages in ``tests/test_fuzz.py``.
"""

import random

import pytest

import toy_search
from lpes_eval import files, rope
from lpes_eval.engine.exact import ExactEngine
from lpes_eval.engine.harness import HarnessEngine
from lpes_eval.errors import UserError, program
from lpes_eval.factors import Factors
from search.guards import PENALTY
from search.journal import Journal
from search.optimizers.ga import GeneticAlgorithm, GeneticConfig
from search.space import Space


def test_what_does_not_fit_the_disk_is_not_believed_and_what_was_there_stays(tmp_path, disk):
    with Journal(tmp_path, {}) as journal:
        journal.record("a", {"fitness": 0.5})
        disk.room = 0
        with pytest.raises(OSError, match="No space left"):
            journal.record("b", {"fitness": 0.75})
        assert set(journal.entries) == {"a"}
    disk.room = 1
    with Journal(tmp_path, {}) as journal:
        assert journal.entries["a"].fitness == 0.5
        assert list(journal.entries) == ["a"]
        assert "torn off" in journal.notes[0]


def test_a_file_that_does_not_fit_the_disk_is_named(tmp_path, disk, capsys):
    disk.room, path = 0, tmp_path / "a.json"
    assert program("toy")(lambda: files.write_atomically(path, "{}" * 20))() == 2
    assert capsys.readouterr().err == f"toy: error: {path}: No space left on device\n"


def test_a_flipped_bit_in_a_journal_ends_in_one_line_or_in_a_search_that_goes_on(tmp_path):
    """Where the line is still one; the numbers in it are not sealed."""
    toy_search.main(tmp_path)
    whole, rng = (tmp_path / "journal.jsonl").read_bytes(), random.Random(0)
    refused = 0
    for at in (rng.randrange(len(whole)) for _ in range(40)):
        flipped = whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
        (tmp_path / "journal.jsonl").write_bytes(flipped)
        try:
            toy_search.main(tmp_path)
        except UserError as error:
            refused += 1
            assert "journal.jsonl" in str(error) or "other settings" in str(error)
            assert (tmp_path / "journal.jsonl").read_bytes() == flipped  # not ours to drop
    assert refused > 10


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
    class Deadly(toy_search.Bench):
        def measure(self, job):
            assert job.cutoff is None or job.cutoff.fitness < 0  # never the one that failed
            if job.factors.per_layer()[0] > 1.6:
                return {"failed": "3 workers died"}
            return super().measure(job)

    for early_stopping in (None, "probable"):
        optimizer = GeneticAlgorithm(Space(8), GeneticConfig(population=12, parents=4), generations=3, seed=0)
        search = toy_search.search(optimizer, Deadly(), early_stopping=early_stopping)
        with Journal(tmp_path / str(early_stopping), search.settings) as search.journal:
            search.measure("baseline", search.uniform(1.0))
            best = search.run(lambda individual, entry, new: None)
            failed = [entry for entry in search.journal.individuals if entry.failed]
            assert failed
            assert {(entry.failed, entry.fitness) for entry in failed} == {("3 workers died", -PENALTY)}
            assert search.factors(best).per_layer()[0] <= 1.6
            with pytest.raises(UserError, match=r"factors 1.7, .*: 3 workers died"):
                search.measure("best", Factors.from_uniform(1.7, num_layers=8))


def test_pi_has_its_factor_in_all_layers_but_those_left_alone():
    search = toy_search.search(GeneticAlgorithm(Space(6), GeneticConfig()), skip=2)
    assert search.uniform(1.33).per_layer() == [1.0] * 2 + [1.33] * 6
    assert search.pi(1.33) == "PI 1.330 from layer 2"
