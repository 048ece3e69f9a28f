"""Workers that begin with the next generation: what they are asked, and that a search measures the same."""

import pytest

from search import engines, ga
from search.engines import cluster
from small_searches import GA, journal


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
            yield self._found.pop(chunk)


SMALL = [*GA, "--population", "6", "--parents", "3", "--generations", "3", "--mutations", "4", "--crossovers", "1"]
SMALL += ["--model_args", "pretrained=reference-kv", "--tasks", "kv_retrieval", "--examples", "3", "--no_cache"]
SMALL += [
    "--metadata",
    '{"num_keys":3}',
    "--guard",
    "none",
    "--held_out_examples",
    "0",
    "--gen_kwargs",
    "max_gen_toks=8",
]


@pytest.mark.parametrize("stopping", ["off", "probable"])
def test_a_search_measures_the_same_where_workers_begin_with_the_next_generation(tmp_path, monkeypatch, stopping):
    from lpes_eval.methods.lpes import LPES

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
