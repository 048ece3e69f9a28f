"""The optimisers against the paper's equations, written out a second time here in whole tenths."""

import doctest
import itertools
import math
import re
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpes_eval.errors import UserError
from search import optimizers
from search.optimizers import ga as genetic
from search.optimizers.base import Fitness, drive
from search.optimizers.ga import GeneticAlgorithm, GeneticConfig
from search.optimizers.layers import LayerSearch
from search.space import Individual, Space


def ga(space, *, N_ps=32, N_pa=12, N_mu=16, N_cr=4, N_ct=4, M_x=2, M_y=0.2, T=20, **options):
    """The genetic algorithm in the paper's symbols."""
    return GeneticAlgorithm(space, GeneticConfig(N_ps, N_pa, N_mu, N_cr, N_ct, M_x, M_y), generations=T, **options)


def equation_9(parent, k, L, M_x, M_y):
    """Bounds of control point k: ((x_low, x_high), (y_low, y_high))."""
    x, y, d = [x for x, _ in parent], parent[k][1], len(parent) - 1
    x_low = max(0, x[0] - M_x) if k == 0 else max(x[k - 1], x[k] - M_x)
    x_high = min(x[k] + M_x, L - 1) if k == d else min(x[k + 1], x[k] + M_x)
    return (x_low, x_high), (max(1, y - M_y), min(y + M_y, 2))


def run(algorithm, fitness):
    """All generations, and the individual that the search ends with."""
    generations = []

    def measure(generation):
        generations.append(generation)
        return [fitness(individual) for individual in generation.individuals]

    best = drive(algorithm, measure)
    return generations, best


def search(algorithm, fitness):
    return [generation.individuals for generation in run(algorithm, fitness)[0]]


def noise(seed):
    """A fitness without any structure, the same for the same points."""
    return lambda individual: int(sha256(repr((seed, individual.points)).encode()).hexdigest()[:12], 16) / 2**48


spaces = st.integers(2, 40).flatmap(
    lambda L: st.builds(Space, st.just(L), st.integers(1, min(4, L - 1)), st.booleans(), st.just(False))
)
any_space = st.one_of(spaces, st.builds(Space.free, st.integers(2, 24), st.booleans()))


@settings(max_examples=40, deadline=None)
@given(any_space, st.integers(0, 2**32), st.integers(0, 5), st.integers(0, 10))
def test_every_individual_obeys_equation_10_and_the_grid_and_every_mutant_equation_9(space, seed, M_x, tenths):
    algorithm = ga(space, N_ps=8, N_pa=4, T=4, N_mu=6, N_cr=2, M_x=M_x, M_y=tenths / 10, seed=seed)
    M_x, TABLE_9 = 0 if space.fixed_x else M_x, [tenth / 10 for tenth in range(10, 21)]
    for individual in itertools.chain(*search(algorithm, noise(seed))):
        xs = [x for x, _ in individual.points]
        assert len(xs) == space.d + 1
        assert xs == sorted({*xs, max(xs[0], 0), min(xs[-1], space.L - 1)})  # Eq. 10
        assert all(1 <= y <= 2 for _, y in individual.points)
        if space.grid:
            assert all(x in range(space.L) and y in TABLE_9 for x, y in individual.points)
        if individual.origin != "mutation":
            continue
        (parent,) = individual.parents
        for k, (x, y) in enumerate(individual.points):
            (x_low, x_high), (y_low, y_high) = equation_9(parent, k, space.L, M_x, tenths / 10)
            assert x_low - 1e-9 <= x <= x_high + 1e-9  # on the grid a step is far more
            assert y_low - 1e-9 <= y <= y_high + 1e-9


def test_first_individual_is_equation_8_rounded_to_the_grid_if_there_is_one_or_the_start():
    first, *others = search(ga(Space(L=31, d=3), T=0), noise(0))[0]
    assert first.points == ((0.0, 1.5), (10.0, 1.5), (20.0, 1.5), (30.0, 1.5))
    assert all(other.parents == (first.points,) for other in others)
    assert [x for x, _ in Space(L=32, d=3).start()] == [0, 10, 21, 31]
    assert [x for x, _ in Space(L=32, d=3, grid=False).start()] == [0, 31 / 3, 62 / 3, 31]
    P = ((0.0, 1.0), (3.0, 1.2), (9.0, 1.4), (15.0, 1.1))
    first, *others = search(ga(Space(L=16), start=P, T=0), noise(0))[0]
    assert first.points == P
    assert all(individual.parents == (P,) for individual in others)


def test_where_all_are_equally_fit_chance_decides_and_the_first_have_no_advantage():
    chosen = [0] * 8
    for seed in range(200):
        generations = search(ga(Space(L=32), N_ps=8, N_pa=2, N_mu=0, N_cr=4, T=1, seed=seed), lambda i: 0.0)
        first = [individual.points for individual in generations[0]]
        for P in {P for child in generations[1] for P in child.parents}:
            chosen[first.index(P)] += 1
    assert all(26 <= count <= 74 for count in chosen)  # 50 each, give or take 4 standard errors


def test_the_search_does_not_depend_on_the_fitness_of_those_that_are_not_chosen():
    """Of a poor individual that is given up, another fitness is reported, below the cutoff."""

    def individuals(poor):
        found = []

        def measure(generation):
            found.append(generation.individuals)
            fitness = [round(3 * noise(3)(i)) / 3 for i in generation.individuals]  # many are equal
            least = generation.cutoff[1] if generation.cutoff else -math.inf
            return [f if f >= least else poor(i) for i, f in zip(generation.individuals, fitness, strict=True)]

        drive(ga(Space(L=32), N_ps=12, N_pa=4, T=5, N_mu=6, N_cr=3, seed=3), measure)
        return found

    assert individuals(lambda i: -1.0) == individuals(lambda i: -1.0 - noise(4)(i))


def test_default_budget_is_table_12():
    algorithm = GeneticAlgorithm(Space(L=32))
    generations = search(algorithm, noise(0))
    assert [len(generations[0]), len(generations) - 1] == [32, 20]
    for generation in generations[1:]:
        origins = [individual.origin for individual in generation]
        assert origins.count("mutation") == 16
        assert 4 <= origins.count("crossover") <= 8  # one or both children of four crossovers
    assert sum(map(len, generations)) <= algorithm.max_evaluations == 32 + 20 * (16 + 2 * 4)


def test_parents_of_a_generation_are_the_fittest_of_the_population_before_and_the_last_is_the_cutoff():
    """Replays line 7 of Algorithm 1."""
    fitness = noise(5)
    (initial, *generations), _ = run(ga(Space(L=32), seed=5), fitness)
    assert initial.cutoff is None
    population = {individual.points for individual in initial.individuals}
    for generation in generations:
        value = {P: fitness(Individual(P, "")) for P in population}
        *_, least = allowed = sorted(population, key=value.__getitem__, reverse=True)[:12]
        assert generation.cutoff == (least, value[least])
        assert {P for i in generation.individuals for P in i.parents} <= set(allowed)
        siblings = {}
        for child in (i for i in generation.individuals if i.origin == "crossover"):
            siblings.setdefault(child.parents, []).append(child)
        fitter = {max(pair, key=fitness).points for pair in siblings.values()}
        mutants = {i.points for i in generation.individuals if i.origin == "mutation"}
        population = {*allowed} | fitter | mutants


def test_children_of_a_crossover_are_the_parents_exchanged_behind_one_cut():
    for child in (i for generation in search(ga(Space(L=32), seed=2), noise(2)) for i in generation):
        if child.origin == "crossover":
            genes = [g for P_k in child.points for g in P_k]
            a, b = ([g for P_k in parent for g in P_k] for parent in child.parents)
            assert any(genes in (a[:cut] + b[cut:], b[:cut] + a[cut:]) for cut in range(1, 8))


def test_the_best_may_be_of_the_last_population_or_any_before():
    for T, seed in itertools.product((0, 3), range(8)):
        generations, best = run(ga(Space(L=32), T=T, seed=seed), noise(seed))
        fitness = [noise(seed)(i) for generation in generations for i in generation.individuals]
        assert noise(seed)(best) == max(fitness)


def test_the_example_in_the_docstring_runs():
    outcome = doctest.testmod(genetic)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_random_numbers_are_those_of_any_platform_and_version():
    """Measured once; behind them is the Mersenne Twister's random() alone, which Python keeps."""
    _, best = run(ga(Space(L=32), seed=20251121), noise(7))
    assert best.points == ((3.0, 1.4), (10.0, 1.6), (17.0, 1.4), (28.0, 1.8))


def test_more_parents_than_individuals_are_refused():
    with pytest.raises(UserError, match="--parents 33"):
        ga(Space(L=32), N_pa=33)


QUESTIONS = 96


def layer_search(value, L=6, score=None):
    """Its generations, factors and itself, where ``value`` gives a question's likelihood and ``score`` its score."""
    generations, space = [], Space.free(L)

    def measure(generation):
        generations.append(generation)
        fitness = value if generation.measure == "likelihood" else (score or value)
        asked = range(*(generation.part or (0, QUESTIONS)))
        rows = [[fitness(heights(individual), q) for q in asked] for individual in generation.individuals]
        return [Fitness(sum(row) / len(row), row) for row in rows]

    algorithm = LayerSearch(space, LayerSearch.Config(), start=space.start(1.0), examples=QUESTIONS)
    best = drive(algorithm, measure)
    assert sum(len(generation.individuals) for generation in generations) <= algorithm.max_evaluations
    return generations, heights(best), algorithm


def heights(individual):
    return [y for _, y in individual.points]


def chance(*what):
    """A number around 0 that looks drawn, the same for the same arguments."""
    return int(sha256(repr(what).encode()).hexdigest()[:8], 16) / 2**31 - 1


def noisy(target, noise=0.05):
    """Less likely the further factors are from the target (in ratios), with chance in every question."""

    def value(s, q):
        away = sum(abs(math.log(y / t)) for y, t in zip(s, target, strict=True))
        return chance(q) - away + noise * chance(q, s)

    return value


@pytest.mark.parametrize(
    "target", [[1, 1, 0.6, 1, 1, 1], [1] * 4 + [1.8] + [1] * 7 + [0.7] + [1] * 17, [1.25] * 30], ids=len
)
def test_it_finds_planted_layers_and_bands_above_and_below_1(target):
    _, best, _ = layer_search(noisy(target), len(target))
    assert best == pytest.approx(target, abs=0.06)


def test_where_nothing_helps_it_says_so_and_stops_before_any_score():
    stopped = 0
    for seed in range(10):
        generations, best, algorithm = layer_search(lambda s, q, seed=seed: chance(q) + 0.05 * chance(q, s, seed), 30)
        if "none raises" not in algorithm.said:
            continue
        stopped += 1
        assert best == [1.0] * 30
        assert {generation.measure for generation in generations} == {"likelihood"}
        prompts = sum(len(g.individuals) * (g.part[1] - g.part[0]) for g in generations)
        assert prompts < algorithm.max_effort * QUESTIONS / 10
        assert re.search(r"beyond chance; a gain of less than 0\.0\d+ would not have been seen", algorithm.said)
    assert stopped >= 7  # of ten at a level of 5 %, less are one in a thousand


def test_every_choice_is_tested_on_questions_that_no_choice_before_it_was_made_by():
    generations, _, _ = layer_search(noisy([1, 1.4, 1, 1, 1.2, 1]))
    parts = [g.part for g in generations if g.measure == "likelihood"]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert parts[-1][1] <= QUESTIONS


@pytest.mark.parametrize("score", [lambda s, q: -sum(s), lambda s, q: 0.5], ids=["lower", "the same"])
def test_what_raises_the_likelihood_alone_is_not_kept(score):
    _, best, algorithm = layer_search(noisy([1, 1.5, 1, 1, 1, 1]), score=score)
    assert best == [1.0] * 6
    assert "does not raise the score" in algorithm.said


def test_the_score_tunes_what_the_likelihood_chose_and_leaves_the_other_layers():
    score = lambda s, q: chance(q) - abs(math.log(s[1] / 1.62))  # noqa: E731
    _, best, _ = layer_search(noisy([1, 1.5, 1, 1, 1, 1]), score=score)
    assert best == pytest.approx([1, 1.62, 1, 1, 1, 1], abs=0.03)


def test_a_layer_obeys_the_narrowest_band_that_it_is_in_and_no_factor_leaves_the_range():
    search = LayerSearch(Space.free(4), start=Space.free(4).start(1.2))
    points = search._points({(1, 2): 1.5, (0, 4): 1.1, (2, 4): 4.0, (3, 4): 0.1})
    assert [y for _, y in points] == [1.32, 1.8, 2.0, 0.5]


def test_every_file_of_the_folder_is_an_optimiser_with_a_line_for_help():
    assert optimizers.names() == ["ga", "gradient", "layers"]
    assert all(optimizers.load(name).title for name in optimizers.names())
