"""What can go wrong around a search: a model without an answer, workers that die."""

import pytest

import toy_search
from lpes_eval import rope
from lpes_eval.engine.exact import ExactEngine
from lpes_eval.engine.harness import HarnessEngine
from lpes_eval.errors import UserError
from lpes_eval.factors import Factors
from search.guards import PENALTY
from search.journal import Journal
from search.optimizers.ga import GeneticAlgorithm, GeneticConfig
from search.space import Space


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


@pytest.mark.parametrize(("early_stopping", "ended"), [(None, 0), ("probable", 1)])
def test_an_individual_whose_workers_die_is_recorded_and_the_search_goes_on(tmp_path, early_stopping, ended):
    settled = set()

    class Deadly(toy_search.Bench):
        def measure(self, job):
            assert job.cutoff is None or job.cutoff.fitness < 0  # never the one that failed
            settled.add(job.settle)
            if job.factors.per_layer()[0] > 1.6:
                return {"failed": "3 workers died"}
            return super().measure(job) | {"ended": [0, ended]}

    optimizer = GeneticAlgorithm(Space(8), GeneticConfig(population=12, parents=4), generations=3, seed=0)
    search = toy_search.search(optimizer, Deadly(), early_stopping=early_stopping)
    with Journal(tmp_path, search.settings) as search.journal:
        search.measure("baseline", search.uniform(1.0))
        best = search.run(lambda individual, entry, new: None)
        failed = [entry for entry in search.journal.individuals if entry.failed]
        assert {(entry.failed, entry.fitness) for entry in failed} == {("3 workers died", -PENALTY)}
        assert search.factors(best).per_layer()[0] <= 1.6
        with pytest.raises(UserError, match=r"factors 1.7, .*: 3 workers died"):
            search.measure("best", Factors.from_uniform(1.7, num_layers=8))
    assert settled == ({False} if ended else {False, True})  # only where no answer of the plain model ended


def test_pi_has_its_factor_in_all_layers_but_those_left_alone():
    search = toy_search.search(GeneticAlgorithm(Space(6), GeneticConfig()), skip=2)
    assert search.uniform(1.33).per_layer() == [1.0] * 2 + [1.33] * 6
    assert search.pi(1.33) == "PI 1.330 from layer 2"
