"""The optimisers against the paper's equations, written out a second time here in whole tenths."""

import doctest
import itertools
import math
from functools import partial
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpes_eval.errors import UserError
from search import optimizers
from search.optimizers import ga as genetic
from search.optimizers.bands import BandScan, levels_of
from search.optimizers.base import drive
from search.optimizers.cma_es import CMAES
from search.optimizers.ga import GeneticAlgorithm, GeneticConfig
from search.optimizers.random import GenerationConfig, RandomSearch
from search.space import Individual, Space


def ga(space, *, N_ps=32, N_pa=12, N_mu=16, N_cr=4, N_ct=4, M_x=2, M_y=0.2, T=20, **options):
    """The genetic algorithm in the paper's symbols."""
    return GeneticAlgorithm(space, GeneticConfig(N_ps, N_pa, N_mu, N_cr, N_ct, M_x, M_y), generations=T, **options)


def of_size(kind, space, *, N=24, T=20, **options):
    return kind(space, GenerationConfig(N, 0), generations=T, **options)


random_search, cma_es = partial(of_size, RandomSearch), partial(of_size, CMAES)


TABLE_9_Y = {1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0}


def equation_9(parent, k, L, M_x, M_y):
    """Bounds of control point k: ((x_low, x_high), (y_low, y_high))."""
    x, y, d = [x for x, _ in parent], parent[k][1], len(parent) - 1
    x_low = max(0, x[0] - M_x) if k == 0 else max(x[k - 1], x[k] - M_x)
    x_high = min(x[k] + M_x, L - 1) if k == d else min(x[k + 1], x[k] + M_x)
    return (x_low, x_high), (max(1, y - M_y), min(y + M_y, 2))


def obeys_equation_10(points, L):
    xs = [x for x, _ in points]
    return xs[0] >= 0 and xs[-1] <= L - 1 and all(xs[i] < xs[j] for j in range(len(xs)) for i in range(j))


def run(algorithm, fitness):
    """All generations, and the individual that the search ends with."""
    generations = []

    def measure(generation):
        generations.append(generation)
        return [fitness(individual) for individual in generation.individuals]

    best = drive(algorithm, measure)
    return generations, best


def search(algorithm, fitness):
    """The individuals of all generations."""
    return [generation.individuals for generation in run(algorithm, fitness)[0]]


def first_generation(algorithm):
    return next(algorithm.search()).individuals


def noise(seed):
    """A fitness without any structure, the same for the same points."""
    return lambda individual: int(sha256(repr((seed, individual.points)).encode()).hexdigest()[:12], 16) / 2**48


spaces = st.integers(2, 40).flatmap(
    lambda L: st.builds(Space, st.just(L), st.integers(1, min(4, L - 1)), st.booleans(), st.just(False))
)
free_spaces = st.builds(Space.free, st.integers(2, 24), st.booleans())
any_space = st.one_of(spaces, free_spaces)


@settings(max_examples=60, deadline=None)
@given(any_space, st.integers(0, 2**32), st.integers(0, 5), st.integers(0, 10))
def test_every_mutant_lies_within_equation_9s_bounds_around_its_parent(space, seed, M_x, tenths):
    algorithm = ga(space, N_ps=8, N_pa=4, T=5, N_mu=6, N_cr=2, M_x=M_x, M_y=tenths / 10, seed=seed)
    M_x = 0 if space.fixed_x else M_x
    for mutant in (i for generation in search(algorithm, noise(seed)) for i in generation if i.origin == "mutation"):
        (parent,) = mutant.parents
        for k, (x, y) in enumerate(mutant.points):
            (x_low, x_high), (y_low, y_high) = equation_9(parent, k, space.L, M_x, tenths / 10)
            assert x_low - 1e-9 <= x <= x_high + 1e-9  # on the grid a step is far more
            assert y_low - 1e-9 <= y <= y_high + 1e-9


@settings(max_examples=60, deadline=None)
@given(space=any_space, seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["ga", "random"]))
def test_every_individual_obeys_equation_10_the_range_of_y_and_the_grid(space, seed, kind):
    algorithm = {
        "ga": lambda: ga(space, N_ps=8, N_pa=4, T=4, N_mu=6, N_cr=2, seed=seed),
        "random": lambda: random_search(space, N=8, T=2, seed=seed),
    }[kind]()
    for generation in search(algorithm, noise(seed)):
        for individual in generation:
            assert len(individual.points) == space.d + 1
            assert obeys_equation_10(individual.points, space.L)
            assert all(1 <= y <= 2 for _, y in individual.points)
            if space.grid:
                assert all(x in range(space.L) and y in TABLE_9_Y for x, y in individual.points)


def test_first_individual_is_equation_8_rounded_to_the_grid_if_there_is_one():
    first, *others = first_generation(ga(Space(L=31, d=3)))
    assert first.points == ((0.0, 1.5), (10.0, 1.5), (20.0, 1.5), (30.0, 1.5))
    assert all(other.parents == (first.points,) for other in others)
    assert [x for x, _ in Space(L=32, d=3).start()] == [0, 10, 21, 31]
    assert [x for x, _ in Space(L=32, d=3, grid=False).start()] == [0, 31 / 3, 62 / 3, 31]


def test_a_search_may_set_out_from_anywhere():
    space, P = Space(L=16), ((0.0, 1.0), (3.0, 1.2), (9.0, 1.4), (15.0, 1.1))
    first, *others = first_generation(ga(space, start=P))
    assert first.points == P
    assert all(individual.parents == (P,) for individual in others)
    heights = [individual.points for individual in first_generation(cma_es(Space.free(4), N=200, start=P))]
    first, _, third, _ = (sum(points[k][1] for points in heights) / 200 for k in range(4))
    assert third > first + 0.1  # around the start, as far as the range lets it


def test_cma_es_searches_one_factor_a_layer_within_the_range_and_on_the_grid():
    for grid in (True, False):
        for generation in search(cma_es(Space.free(5, grid), N=6, T=8, seed=2), noise(2)):
            assert all([x for x, _ in i.points] == [0, 1, 2, 3, 4] for i in generation)
            assert all(1 <= y <= 2 and (not grid or y in TABLE_9_Y) for i in generation for _, y in i.points)


def test_where_all_are_equally_fit_chance_decides_and_the_first_have_no_advantage():
    chosen = [0] * 8
    for seed in range(400):
        generations = search(ga(Space(L=32), N_ps=8, N_pa=2, N_mu=0, N_cr=4, T=1, seed=seed), lambda i: 0.0)
        first = [individual.points for individual in generations[0]]
        for P in {P for child in generations[1] for P in child.parents}:
            chosen[first.index(P)] += 1
    assert sum(chosen) == pytest.approx(800, abs=8)  # now and then two are the same
    assert all(60 <= count <= 140 for count in chosen)  # 100 each, give or take 4 standard errors


def test_the_search_does_not_depend_on_the_fitness_of_those_that_are_not_chosen():
    """Giving a poor individual up early reports another fitness for it, below the cutoff: nothing may change."""

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
    for T, seed in itertools.product((0, 3), range(20)):
        generations, best = run(ga(Space(L=32), T=T, seed=seed), noise(seed))
        fitness = [noise(seed)(i) for generation in generations for i in generation.individuals]
        assert noise(seed)(best) == max(fitness)


def test_the_search_beats_random_search_on_a_smooth_fitness():
    def smooth(individual):
        return -sum((y - 1.8 + 0.05 * k) ** 2 for k, (_, y) in enumerate(individual.points))

    reached = {
        make: sum(smooth(run(make(Space.free(9), seed=seed), smooth)[1]) for seed in range(10))
        for make in (ga, cma_es, random_search)
    }
    assert min(reached[ga], reached[cma_es]) > reached[random_search]


ALGORITHMS = [
    lambda seed: ga(Space(L=16), N_ps=12, N_pa=5, T=6, seed=seed),
    lambda seed: ga(Space(L=16, grid=False), N_ps=12, N_pa=5, T=6, seed=seed),
    lambda seed: ga(Space.free(9), N_ps=12, N_pa=5, T=6, seed=seed),
    lambda seed: random_search(Space(L=16), N=5, T=6, seed=seed),
    lambda seed: cma_es(Space.free(9), N=12, T=6, seed=seed),
    lambda seed: cma_es(Space.free(9, grid=False), N=12, T=6, seed=seed),
]


@pytest.mark.parametrize("make", ALGORITHMS)
def test_a_seed_gives_one_search_and_another_seed_another(make):
    assert run(make(3), noise(1)) == run(make(3), noise(1)) != run(make(4), noise(1))


def test_random_numbers_are_those_of_any_platform_and_version():
    """Measured once; only the Mersenne Twister's random() is behind them, which Python keeps for a seed."""
    _, best = run(ga(Space(L=32), seed=20251121), noise(7))
    assert best.points == ((3.0, 1.4), (10.0, 1.6), (17.0, 1.4), (28.0, 1.8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Space(L=32, d=0), "1 control points do not fit 32 layer"),
        (lambda: Space(L=3, d=3), "4 control points do not fit 3 layer"),
        (lambda: ga(Space(L=32), N_pa=33), "--parents 33"),
        (lambda: ga(Space(L=32), T=-1), "generations=-1"),
        (lambda: ga(Space(L=32), M_x=-1), "max_dx=-1"),
        (lambda: random_search(Space(L=32), N=-1), "mutations=-1"),
        (lambda: cma_es(Space(L=32), seed=2**32), "from 0 to 4294967295"),
    ],
)
def test_settings_that_make_no_search_are_refused_in_one_line(make, message):
    with pytest.raises(UserError, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_fitness_must_be_one_number_for_each_individual():
    with pytest.raises(ValueError, match="shorter"):
        drive(ga(Space(L=32)), lambda generation: [0.0])


def test_a_space_without_room_to_mutate_still_searches():
    """As many control points as layers: the x have one arrangement on the grid, and nearly all draws break Eq. 10."""
    generations = search(ga(Space(L=16, d=15), N_ps=4, N_pa=2, T=1), noise(0))
    assert all([x for x, _ in i.points] == list(range(16)) for g in generations for i in g)


def test_the_examples_in_the_docstrings_run():
    outcome = doctest.testmod(genetic)
    assert outcome.attempted > 0
    assert outcome.failed == 0


# -- the scan of bands -------------------------------------------------------------------------------------------------


def bands(L, grid=True, **settings):
    space = Space.free(L, grid)
    return BandScan(space, BandScan.Config(**settings), start=space.start(1.0))


def heights(individual):
    return [y for _, y in individual.points]


def scan(fitness, L=4, **settings):
    """The generations of a scan, and the factors that it ends with; ``fitness`` gets factors and the share."""

    def measure(generation):
        generations.append(generation)
        return [fitness(heights(individual), generation.share) for individual in generation.individuals]

    generations = []
    best = drive(bands(L, **settings), measure)
    return generations, heights(best)


def distance(factors, target, weights=None):
    weights = weights or [1] * len(factors)
    return sum(w * abs(y - t) for w, y, t in zip(weights, factors, target, strict=True))


def planted(L, first, end):
    """1.5 in the layers from ``first`` up to ``end``."""
    return [1.5 if first <= h < end else 1.0 for h in range(L)]


@pytest.mark.parametrize(("L", "first", "end"), [(4, 0, 2), (6, 1, 2), (6, 3, 6), (32, 8, 16), (80, 40, 80)])
def test_a_scan_finds_a_planted_band_and_measures_nothing_twice(L, first, end):
    target, measured = planted(L, first, end), []
    generations, best = scan(lambda s, share: -distance(s, target), L)
    for generation in generations:
        if generation.cutoff is not None:  # as fit on the same examples
            assert (generation.cutoff[0], generation.share) in measured
        measured += [(individual.points, generation.share) for individual in generation.individuals]
    assert best == target
    assert len(set(measured)) == len(measured) <= bands(L).max_evaluations


def test_a_scan_puts_the_best_steps_of_all_bands_together_and_those_of_the_better_half():
    """Every other layer gains by 1.5, more by 1.2, and most of all the last ones."""
    weights, target = (1, 9, 2, 9, 3, 9, 4, 9), [1.3, 1.0] * 4
    generations, _ = scan(lambda s, share: -distance(s, target, weights), 8)
    together = next(g.individuals for g in generations if g.individuals[0].origin == "together")
    assert list(map(heights, together)) == [[1.2, 1.0] * 4, [1.0] * 4 + [1.2, 1.0] * 2]


def test_a_scan_without_a_grid_rounds_nothing():
    generations, _ = scan(lambda s, share: -distance(s, [1.5] * 4), grid=False)
    assert 1.5 * (1 / 1.1) in {y for g in generations for i in g.individuals for y in heights(i)}  # 1.3636...


def test_a_scan_goes_by_levels_from_the_whole_stack_to_the_finest_bands_and_ends_by_itself():
    assert list(map(len, levels_of(8, 3))) == [1, 2]
    generations, best = scan(lambda s, share: -distance(s, [1.0] * 32), 32, finest=4)
    changed = [{32 - heights(i).count(1) for i in generation.individuals} for generation in generations]
    assert best == [1.0] * 32  # nothing helps
    assert changed[:7] == [{0}] + 2 * [{32}, {16}, {8}]  # then the finalists
    assert changed[9:] == 3 * [{8}]  # and the bands that matter most, tuned by small steps


def test_the_finalists_of_a_scan_are_measured_on_all_examples_and_the_first_stays_unless_another_gains():
    """On a quarter of the examples a band seems to help that does not, and one that does is second."""
    lucky, good = (1.5, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.5)

    def fitness(s, share):
        on_few, on_all = {lucky: (0.4, 0.0), good: (0.3, 0.2)}.get(tuple(s), (0.1, 0.1))
        return on_few if share < 1 else on_all

    generations, best = scan(fitness)
    shares = [generation.share for generation in generations]
    assert best == [*good]
    assert shares == sorted(shares)
    assert {*shares} == {0.25, 1.0}


def test_of_equally_fit_finalists_one_is_measured_so_that_layers_that_do_not_matter_take_no_places():
    """Only the first layer matters; its 1.5 is better than its 1.2, but not on a quarter of the examples."""
    _, best = scan(lambda s, share: {1.2: 0.4, 1.5: 0.35 if share < 1 else 0.5}.get(s[0], 0.1))
    assert best[0] == 1.5


def test_a_scan_tunes_the_bands_that_matter_by_small_steps_and_leaves_the_others():
    generations, best = scan(lambda s, share: -20 * abs(s[0] - 1.03) - 2 * abs(s[1] - 1.5), 6)
    assert best[:2] == [1.03, 1.5]
    tuned = [heights(individual) for generation in generations[-2:] for individual in generation.individuals]
    assert {tuple(factors[2:]) for factors in tuned} == {(1.0,) * 4}


def test_where_a_quarter_is_all_that_there_is_a_scan_counts_every_individual_in_full():
    scan = BandScan(Space.free(8), least_effort=1.0)
    assert scan.max_effort == scan.max_evaluations > BandScan(Space.free(8)).max_effort


def test_a_band_whose_steps_worsen_a_guard_is_tuned_before_others_as_smaller_steps_may_not():
    """Every layer gains up to 1.15; beyond 1.06 the fourth layer worsens a guard."""

    def fitness(s, share):
        gains = zip(s, (3, 2, 2, 1), strict=True)
        return -1e6 if s[3] > 1.06 else sum(min(factor, 1.15) * gain for factor, gain in gains)

    assert scan(fitness)[1][3] > 1


def test_a_scan_puts_a_band_back_to_1_that_costs_on_all_examples():
    """On a quarter of the examples the first layer seems to help too."""
    _, best = scan(lambda s, share: (s[3] == 1.5) + (s[0] > 1) * (0.1 if share < 1 else -0.1))
    assert (best[0], best[3]) == (1.0, 1.5)


@pytest.mark.parametrize(("gain", "origins"), [(0.004, {"finalist"}), (0.02, {"band", "together"})])
def test_a_scan_keeps_what_gains_the_least_gain_and_on_all_examples_whatever_gains(gain, origins):
    """What was kept last is the parent of what comes after it."""
    (_, *generations), best = scan(lambda s, share: gain * (s[0] > 1 and s[3] == 1))
    start = bands(4).start
    kept = next(a for a, b in itertools.pairwise(generations) if b.individuals[0].parents != (start,))
    assert kept.individuals[0].origin in origins
    assert best != [1.0] * 4


def test_a_scan_keeps_nothing_that_was_given_up_however_close_it_came():
    def just_below(generation):
        fitness = 0.5 if generation.cutoff is None else math.nextafter(generation.cutoff[1], -math.inf)
        return [fitness] * len(generation.individuals)

    algorithm = bands(4)
    assert drive(algorithm, just_below).points == algorithm.start


# -- the list ----------------------------------------------------------------------------------------------------------


def test_every_file_of_the_folder_is_an_optimiser_with_a_line_for_help():
    assert optimizers.names() == ["bands", "cma-es", "ga", "gradient", "random"]
    for name in optimizers.names():
        assert optimizers.load(name).title
