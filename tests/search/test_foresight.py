"""Workers that begin with the next generation: what they are asked, and that a search measures the same."""

import math

import pytest

import test_optimizers
from lpes_eval.factors import Factors
from lpes_eval.methods.lpes import LPES
from search import engines, ga
from search.engines import cluster
from search.evaluator import Evaluator
from search.space import Space
from search.tasks import load_tasks
from small_searches import SEARCH_ONLY, journal


def test_the_next_generation_is_foreseen_but_for_the_children_of_those_not_known_yet():
    algorithm, fitness, same = test_optimizers.ga(Space(L=32), seed=3), test_optimizers.noise(5), []
    while not algorithm.done:
        generation = algorithm.ask()
        known = [fitness(individual) for individual in generation]
        foreseen = algorithm.foresee([*known[:-3], *[-math.inf] * 3])
        assert algorithm.foresee([*known[:-3], *[-math.inf] * 3]) == foreseen
        assert algorithm.ask() == generation
        right = algorithm.foresee(known)
        algorithm.tell(known)
        assert algorithm.ask() == right
        same += [child in foreseen for child in right]
        if not {individual.points for individual in generation[-3:]} & set(algorithm._select_parents()):
            assert foreseen == right
    assert 0.6 < sum(same) / len(same) < 1


class AtOnce:
    """A pool in this process: as soon as it waits for a chunk, all that is expected and guessed is answered too."""

    workers = 2

    def __init__(self, lm):
        self.lm, self.engines, self.ahead, self.in_time = lm, [], set(), [0, 0]
        self._found, self._expected, self._guess = {}, [], None

    @property
    def model(self):
        engine = self.engines[0]
        return engine.fingerprint(), engine.weights()

    def add(self, requests):
        self.engines.append(engines.choose(self.lm, requests)[0])
        return len(self.engines) - 1

    def expect(self, chunks, guess=None):
        self._expected, self._guess = chunks, guess
        self._found = {chunk: self._found[chunk] for chunk in chunks if chunk in self._found}

    found, forget = cluster.Pool.found, lambda *args: None

    def _answer(self, chunk):
        if chunk not in self._found:
            engine = self.engines[chunk.requests]
            engine.set_factors(chunk.factors)
            answers = {i: found for batch in engine.answer(chunk.order) for i, found in batch.items()}
            self._found[chunk] = answers, engine.unended & answers.keys()

    def results(self, chunks):
        for chunk in chunks:
            self.in_time[chunk in self.ahead] += 1
            for other in [chunk, *self._expected]:
                self._answer(other)
            for other in self._guess() if self._guess else ():
                self._answer(other)
                self.ahead.add(other)
            yield self._found[chunk]


FLAGS = (
    "--mutations 4 --model_args pretrained=reference-kv --tasks kv_retrieval --examples 3 --no_cache "
    "--metadata num_keys=3 --guard none --gen_kwargs max_gen_toks=8"
)
SMALL = [*SEARCH_ONLY, *FLAGS.split()]


def test_factors_are_guessed_to_be_as_fit_as_on_half_of_their_questions_once_these_are_answered():
    lm = LPES(pretrained="reference-kv", device="cpu")
    tasks = load_tasks(lm, ["kv_retrieval"], examples=16, metadata={"num_keys": 12})
    pool, factors = AtOnce(lm), Factors.from_uniform(1.1, num_layers=4)
    evaluator, whole = Evaluator(lm, tasks, pool=pool), Evaluator(lm, tasks)(factors)
    evaluator.expect([factors], None, None)
    assert evaluator.peek(factors, None, None) == -math.inf
    expected = [evaluator.only(whole.examples, range(8)).fitness, whole.fitness]
    assert expected[0] != expected[1]
    for chunk, fitness in zip(pool._expected, expected, strict=True):
        pool._answer(chunk)
        assert evaluator.peek(factors, None, None) == fitness


@pytest.mark.parametrize("stopping", ["off", "probable"])
def test_a_search_measures_the_same_where_workers_begin_with_the_next_generation(tmp_path, monkeypatch, stopping):
    flags = [*SMALL, "--early_stopping", stopping]
    ga.main([*flags, "--output", str(tmp_path / "alone")])
    pool = AtOnce(LPES(pretrained="reference-kv", device="cpu"))
    monkeypatch.setattr(cluster, "pool", lambda args, speed: pool if args.workers else None)
    ga.main([*flags, "--workers", "2", "--output", str(tmp_path / "workers")])

    def measured(folder):
        return [{k: v for k, v in line.items() if k in ("key", "fitness", "examples")} for line in journal(folder)]

    assert measured(tmp_path / "workers") == measured(tmp_path / "alone")
    late, ahead = pool.in_time
    assert ahead > late / 3
    assert pool._guess is None  # the search is over
