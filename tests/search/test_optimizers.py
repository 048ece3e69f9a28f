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
from search.optimizers.cma_es import CMAES
from search.optimizers.ga import GeneticAlgorithm, GeneticConfig
from search.optimizers.random import GenerationConfig, RandomSearch
from search.space import Individual, Space


def ga(space, *, N_ps=32, N_pa=12, N_mu=16, N_cr=4, N_ct=4, M_x=2, M_y=0.2, diverse=False, T=20, **options):
    """The genetic algorithm in the paper's symbols."""
    config = GeneticConfig(N_ps, N_pa, N_mu, N_cr, N_ct, M_x, M_y, diverse)
    return GeneticAlgorithm(space, config, generations=T, **options)


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


def search(algorithm, fitness):
    """All individuals ever asked for, by generation."""
    asked = []
    while not algorithm.done:
        asked.append(algorithm.ask())
        algorithm.tell([fitness(individual) for individual in asked[-1]])
    return asked


def noise(seed):
    """A fitness without any structure, the same for the same points."""
    return lambda individual: int(sha256(repr((seed, individual.points)).encode()).hexdigest()[:12], 16) / 2**48


spaces = st.integers(2, 40).flatmap(
    lambda L: st.builds(Space, st.just(L), st.integers(1, min(4, L - 1)), st.booleans(), st.just(False))
)
free_spaces = st.builds(Space.free, st.integers(2, 24), st.booleans())
any_space = st.one_of(spaces, free_spaces)


@settings(max_examples=60, deadline=None)
@given(any_space, st.integers(0, 2**32), st.integers(0, 5), st.integers(0, 10), st.booleans())
def test_every_mutant_lies_within_equation_9s_bounds_around_its_parent(space, seed, M_x, tenths, diverse):
    algorithm = ga(space, N_ps=8, N_pa=4, T=5, N_mu=6, N_cr=2, M_x=M_x, M_y=tenths / 10, diverse=diverse, seed=seed)
    M_x = 0 if space.fixed_x else M_x
    for mutant in (i for generation in search(algorithm, noise(seed)) for i in generation if i.origin == "mutation"):
        (parent,) = mutant.parents
        for k, (x, y) in enumerate(mutant.points):
            (x_low, x_high), (y_low, y_high) = equation_9(parent, k, space.L, M_x, tenths / 10)
            assert x_low - 1e-9 <= x <= x_high + 1e-9  # on the grid a step is far more
            assert y_low - 1e-9 <= y <= y_high + 1e-9


@settings(max_examples=60, deadline=None)
@given(space=any_space, seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["ga", "diverse", "random", "cma-es"]))
def test_every_individual_obeys_equation_10_the_range_of_y_and_the_grid(space, seed, kind):
    algorithm = {
        "ga": lambda: ga(space, N_ps=8, N_pa=4, T=4, N_mu=6, N_cr=2, seed=seed),
        "diverse": lambda: ga(space, N_ps=20, N_pa=4, T=2, N_mu=6, N_cr=2, diverse=True, seed=seed),
        "random": lambda: random_search(space, N=8, T=2, seed=seed),
        "cma-es": lambda: cma_es(space, N=6, T=4, seed=seed),
    }[kind]()
    for generation in search(algorithm, noise(seed)):
        for individual in generation:
            assert len(individual.points) == space.d + 1
            assert obeys_equation_10(individual.points, space.L)
            assert all(1 <= y <= 2 for _, y in individual.points)
            if space.grid:
                assert all(x in range(space.L) and y in TABLE_9_Y for x, y in individual.points)


def test_first_individual_is_equation_8_rounded_to_the_grid_if_there_is_one():
    (first, *others) = ga(Space(L=31, d=3)).ask()
    assert first.points == ((0.0, 1.5), (10.0, 1.5), (20.0, 1.5), (30.0, 1.5))
    assert all(other.parents == (first.points,) for other in others)
    assert [x for x, _ in Space(L=32, d=3).start()] == [0, 10, 21, 31]
    assert [x for x, _ in Space(L=32, d=3, grid=False).start()] == [0, 31 / 3, 62 / 3, 31]


@settings(max_examples=60, deadline=None)
@given(space=any_space, N_ps=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_a_diverse_start_is_the_published_individual_then_lines_random_ones_and_mutants(space, N_ps, seed):
    individuals = ga(space, N_ps=N_ps, N_pa=1, diverse=True, seed=seed).ask()
    assert len(individuals) == N_ps
    assert individuals[0].points == space.start()
    of = {origin: [i for i in individuals if i.origin == origin] for origin in ("line", "random", "mutation")}
    if N_ps >= 8:
        assert [1.0] * (space.d + 1) in [[y for _, y in i.points] for i in of["line"]]  # the plain model
        assert len(of["random"]) == N_ps // 4
        assert len(of["line"]) >= min(N_ps // 4, 8)
        assert of["mutation"]
    lines = {space.start(), *(i.points for i in of["line"])}
    assert len(lines) == 1 + len(of["line"])  # none twice
    assert all(i.parents[0] in lines for i in of["mutation"])
    for points in lines:  # straight: the slope between neighbours is one, but for what the grid rounds
        ys = [y for _, y in points]
        bend = max((abs((ys[k + 1] - ys[k]) - (ys[-1] - ys[0]) / space.d) for k in range(space.d)), default=0)
        assert bend <= (0.1 + 1e-9 if space.grid else 1e-9)


def test_a_search_may_set_out_from_anywhere():
    space, P = Space(L=16), ((0.0, 1.0), (3.0, 1.2), (9.0, 1.4), (15.0, 1.1))
    assert ga(space, start=P, diverse=True).ask()[0].points == P
    first, *others = ga(space, start=P).ask()
    assert first.points == P
    assert all(individual.parents == (P,) for individual in others)
    first = cma_es(space, N=200, start=P).ask()
    heights = [sum(i.points[k][1] for i in first) / 200 for k in range(4)]
    assert heights[2] > heights[0] + 0.1  # around the start, as far as the range lets it


def test_where_all_are_equally_fit_chance_decides_and_the_first_have_no_advantage():
    chosen = [0] * 8
    for seed in range(400):
        algorithm = ga(Space(L=32), N_ps=8, N_pa=2, N_mu=0, N_cr=4, T=1, diverse=True, seed=seed)
        first = [i.points for i in algorithm.ask()]
        algorithm.tell([0.0] * 8)
        for P in {P for child in algorithm.ask() for P in child.parents}:
            chosen[first.index(P)] += 1
    assert sum(chosen) == pytest.approx(800, abs=8)  # now and then two are the same
    assert all(60 <= count <= 140 for count in chosen)  # 100 each, give or take 4 standard errors


def test_the_search_does_not_depend_on_the_fitness_of_those_that_are_not_chosen():
    """Giving a poor individual up early reports another fitness for it, below the threshold: nothing may change."""

    def asked(poor):
        algorithm = ga(Space(L=32), N_ps=12, N_pa=4, T=5, N_mu=6, N_cr=3, seed=3)
        found = []
        while not algorithm.done:
            found.append(algorithm.ask())
            told = [round(3 * noise(3)(i)) / 3 for i in algorithm.ask()]  # many are equal
            least = algorithm.cutoff[1] if algorithm.cutoff else -math.inf
            algorithm.tell([f if f >= least else poor(i) for i, f in zip(algorithm.ask(), told, strict=True)])
        return found

    assert asked(lambda i: -1.0) == asked(lambda i: -1.0 - noise(4)(i))


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
    """Replays line 7 of Algorithm 1 from what was asked and told."""
    algorithm = ga(Space(L=32), seed=5)
    fitness = noise(5)
    population = {i.points for i in algorithm.ask()}
    assert algorithm.cutoff is None
    algorithm.tell([fitness(i) for i in algorithm.ask()])
    while not algorithm.done:
        value = {P: fitness(Individual(P, "")) for P in population}
        *_, least = allowed = sorted(population, key=value.__getitem__, reverse=True)[:12]
        assert algorithm.cutoff == (least, value[least])
        allowed, generation = set(allowed), algorithm.ask()
        assert {P for i in generation for P in i.parents} <= allowed
        algorithm.tell([fitness(i) for i in generation])
        twins = {}
        for child in (i for i in generation if i.origin == "crossover"):
            twins.setdefault(child.parents, []).append(child)
        fitter = {max(pair, key=fitness).points for pair in twins.values()}  # of two children one lives
        population = allowed | fitter | {i.points for i in generation if i.origin == "mutation"}


def test_children_of_a_crossover_are_the_parents_exchanged_behind_one_cut():
    for child in (i for generation in search(ga(Space(L=32), seed=2), noise(2)) for i in generation):
        if child.origin == "crossover":
            genes = [g for P_k in child.points for g in P_k]
            a, b = ([g for P_k in parent for g in P_k] for parent in child.parents)
            assert any(genes in (a[:cut] + b[cut:], b[:cut] + a[cut:]) for cut in range(1, 8))


def test_best_counts_the_last_population_and_every_earlier_one():
    for T, seed in itertools.product((0, 3), range(20)):
        algorithm = ga(Space(L=32), T=T, seed=seed)
        asked = [i for generation in search(algorithm, noise(seed)) for i in generation]
        assert algorithm.best[1] == noise(seed)(algorithm.best[0]) == max(map(noise(seed), asked))


def test_the_search_beats_random_search_on_a_smooth_fitness():
    def smooth(individual):
        return -sum((y - 1.8 + 0.2 * k) ** 2 + (x - 9 * k) ** 2 / 50 for k, (x, y) in enumerate(individual.points))

    reached = dict.fromkeys((ga, cma_es, random_search), 0.0)
    for make in reached:
        for seed in range(10):
            algorithm = make(Space(L=32), seed=seed)
            search(algorithm, smooth)
            reached[make] += algorithm.best[1]
    assert min(reached[ga], reached[cma_es]) > reached[random_search]


ALGORITHMS = [
    lambda seed: ga(Space(L=16), N_ps=12, N_pa=5, T=6, seed=seed),
    lambda seed: ga(Space(L=16, grid=False), N_ps=12, N_pa=5, T=6, seed=seed),
    lambda seed: ga(Space.free(9), N_ps=12, N_pa=5, T=6, seed=seed),
    lambda seed: random_search(Space(L=16), N=5, T=6, seed=seed),
    lambda seed: cma_es(Space(L=16), N=12, T=6, seed=seed),
    lambda seed: cma_es(Space(L=16, grid=False), N=12, T=6, seed=seed),
    lambda seed: cma_es(Space.free(9), N=12, T=6, seed=seed),
]


@pytest.mark.parametrize("make", ALGORITHMS)
def test_a_seed_gives_one_search_and_another_seed_another_and_told_the_same_again_it_goes_on(make):
    undisturbed, again = search(make(3), noise(1)), make(3)
    assert search(make(4), noise(1)) != undisturbed
    for generation in undisturbed[:4]:
        assert again.ask() == again.ask() == generation
        again.tell([noise(1)(i) for i in generation])
    assert search(again, noise(1)) == undisturbed[4:]


def test_random_numbers_are_those_of_any_platform_and_version():
    """Measured once; only the Mersenne Twister's random() is behind them, which Python keeps for a seed."""
    algorithm = ga(Space(L=32), seed=20251121)
    search(algorithm, noise(7))
    assert algorithm.best[0].points == ((0.0, 1.5), (9.0, 1.4), (23.0, 2.0), (31.0, 1.6))


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
        ga(Space(L=32)).tell([0.0])


def test_a_space_without_room_to_mutate_still_searches():
    """As many control points as layers: the x have one arrangement on the grid, and nearly all draws break Eq. 10."""
    generations = search(ga(Space(L=16, d=15), N_ps=4, N_pa=2, T=1), noise(0))
    assert all([x for x, _ in i.points] == list(range(16)) for g in generations for i in g)


def test_the_examples_in_the_docstrings_run():
    outcome = doctest.testmod(genetic)
    assert outcome.attempted > 0
    assert outcome.failed == 0


# -- the scan of bands -------------------------------------------------------------------------------------------------


def bands(L, **settings):
    space = Space.free(L)
    return BandScan(space, BandScan.Config(**settings), start=space.line(1.0, 1.0))


def heights(individual):
    return [y for _, y in individual.points]


def ends_with(fitness, L=4):
    """The factors that a scan ends with; ``fitness`` is told some, and the share of the examples that is asked."""
    algorithm = bands(L)
    search(algorithm, lambda i: fitness(heights(i), algorithm.effort))
    return heights(algorithm.best[0])


def planted(first, end):
    """Highest where the layers from ``first`` up to ``end`` have a factor of 1.5 and all others 1."""
    return lambda i: -sum((y - (1.5 if first <= h < end else 1.0)) ** 2 for h, y in enumerate(heights(i)))


@pytest.mark.parametrize(("L", "first", "end"), [(4, 0, 2), (6, 1, 2), (6, 3, 6), (32, 8, 16), (80, 40, 80)])
def test_a_scan_finds_a_planted_band_and_asks_for_nothing_twice(L, first, end):
    algorithm, fitness, asked = bands(L), planted(first, end), []

    def measured(individual):
        if algorithm.cutoff is not None:  # as fit on the same examples
            assert (algorithm.cutoff[0], algorithm.effort) in asked
        asked.append((individual.points, algorithm.effort))
        return fitness(individual)

    search(algorithm, measured)
    assert algorithm.best[1] == 0.0
    assert len(set(asked)) == len(asked) <= algorithm.max_evaluations


def test_a_scan_puts_the_bands_of_a_level_together_that_help():
    target = [1.5, 1.0, 1.0, 1.2]
    algorithm = bands(4)
    generations = search(algorithm, lambda i: -sum(abs(y - t) for y, t in zip(heights(i), target, strict=True)))
    together = [i.points for generation in generations for i in generation if i.origin == "together"]
    assert heights(algorithm.best[0]) == target
    assert algorithm.best[0].points in together


def test_a_scan_puts_the_best_steps_of_all_bands_together_and_those_of_the_better_half():
    """Every other layer gains by 1.5, more by 1.2, and most of all the last ones."""
    weights, target = (1, 9, 2, 9, 3, 9, 4, 9), [1.3, 1.0] * 4
    distance = lambda i: sum(w * abs(y - t) for w, y, t in zip(weights, heights(i), target, strict=True))  # noqa: E731
    generations = search(bands(8), lambda i: -distance(i))
    together = next(generation for generation in generations if generation[0].origin == "together")
    assert list(map(heights, together)) == [[1.2, 1.0] * 4, [1.0] * 4 + [1.2, 1.0] * 2]


def test_a_scan_without_a_grid_rounds_nothing():
    space = Space.free(4, False)
    generations = search(BandScan(space, start=space.line(1.0, 1.0)), planted(0, 4))
    assert 1.5 * (1 / 1.1) in {y for generation in generations for i in generation for y in heights(i)}  # 1.3636...


def test_a_scan_goes_by_levels_from_the_whole_stack_to_the_finest_bands_and_ends_by_itself():
    assert list(map(len, levels_of(8, 3))) == [1, 2]
    algorithm = bands(32, finest=4)
    generations = search(algorithm, planted(0, 0))
    changed = [{32 - heights(i).count(1) for i in generation} for generation in generations]
    assert algorithm.best[0].points == algorithm.start  # nothing helps, and it ends by itself
    assert changed[:7] == [{0}] + 2 * [{32}, {16}, {8}]  # then the finalists
    assert changed[9:] == 3 * [{8}]  # and the bands that matter most, tuned by small steps


def test_the_finalists_of_a_scan_are_measured_on_all_examples_and_the_first_stays_unless_another_gains():
    """On a quarter of the examples a band seems to help that does not, and one that does is second."""
    lucky, good, efforts = (1.5, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.5), []

    def fitness(s, effort):
        efforts.append(effort)
        on_few, on_all = {lucky: (0.4, 0.0), good: (0.3, 0.2)}.get(tuple(s), (0.1, 0.1))
        return on_few if effort < 1 else on_all

    assert ends_with(fitness) == [*good]
    assert efforts == sorted(efforts)
    assert set(efforts) == {0.25, 1.0}


def test_of_equally_fit_finalists_one_is_measured_so_that_layers_that_do_not_matter_take_no_places():
    """Only the first layer matters; its 1.5 is better than its 1.2, but not on a quarter of the examples."""
    assert ends_with(lambda s, effort: {1.2: 0.4, 1.5: 0.35 if effort < 1 else 0.5}.get(s[0], 0.1))[0] == 1.5


def test_a_scan_tunes_the_bands_that_matter_by_small_steps_and_leaves_the_others():
    target = [1.03, 1.5, 1.0, 1.0, 1.0, 1.0]
    algorithm = bands(6)
    generations = search(algorithm, lambda i: -sum(w * abs(i.points[h][1] - target[h]) for h, w in ((0, 20), (1, 2))))
    assert heights(algorithm.best[0])[:2] == target[:2]
    tuned = [i.points for generation in generations[-2:] for i in generation]
    assert {P[2:] for P in tuned} == {algorithm.start[2:]}


def test_where_a_quarter_is_all_that_there_is_a_scan_counts_every_individual_in_full():
    scan = BandScan(Space.free(8), least_effort=1.0)
    assert scan.max_effort == scan.max_evaluations > BandScan(Space.free(8)).max_effort


def test_a_band_whose_steps_worsen_a_guard_is_tuned_before_others_as_smaller_steps_may_not():
    """Every layer gains up to 1.15; beyond 1.06 the fourth layer worsens a guard."""

    def fitness(s, effort):
        gains = zip(s, (3, 2, 2, 1), strict=True)
        return -1e6 if s[3] > 1.06 else sum(min(factor, 1.15) * gain for factor, gain in gains)

    assert ends_with(fitness)[3] > 1


def test_a_scan_puts_a_band_back_to_1_that_costs_on_all_examples():
    """On a quarter of the examples the first layer seems to help too."""
    first, *_, last = ends_with(lambda s, effort: (s[3] == 1.5) + (s[0] > 1) * (0.1 if effort < 1 else -0.1))
    assert (first, last) == (1.0, 1.5)


@pytest.mark.parametrize(("gain", "kept"), [(0.004, False), (0.02, True)])
def test_a_scan_keeps_what_gains_the_least_gain_and_on_all_examples_whatever_gains(gain, kept):
    algorithm, scanned = bands(4, least_gain=0.01), []

    def fitness(individual):
        if algorithm.told and algorithm.effort < 1:
            scanned.append(algorithm.best[0].points)
        return gain * (individual.points[0][1] > 1 and individual.points[3][1] == 1)

    search(algorithm, fitness)
    assert (scanned[-1] != algorithm.start) == kept
    assert algorithm.best[0].points != algorithm.start


def test_a_scan_keeps_nothing_that_was_given_up_however_close_it_came():
    algorithm = bands(4)

    def just_below(individual):
        if algorithm.told:
            assert algorithm.best[0].points == algorithm.start
        return 0.5 if algorithm.cutoff is None else math.nextafter(algorithm.cutoff[1], -math.inf)

    search(algorithm, just_below)
    assert algorithm.best[0].points == algorithm.start


# -- the list ----------------------------------------------------------------------------------------------------------


def test_every_file_of_the_folder_is_an_optimiser_with_a_line_for_help():
    assert optimizers.names() == ["bands", "cma-es", "ga", "gradient", "random"]
    for name in optimizers.names():
        assert optimizers.load(name).title
