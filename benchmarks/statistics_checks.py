"""How often intervals cover, and how often the gate fails, over simulated evaluations: the tables of docs/.

    python benchmarks/statistics_checks.py

500 questions at five positions; a question's answers hang together through its difficulty (a normal with standard
deviation 1 on the logit scale). No model runs: minutes on one core.
"""

import argparse
from pathlib import Path

import numpy as np

from lpes_eval.compare import gate, statistics
from lpes_eval.compare.results import Metric, Model, Results, Task
from lpes_eval.flags import at_least

QUESTIONS = 500
U_SHAPE = np.array([0.9, 0.75, 0.65, 0.7, 0.85])
LEVEL = np.full(5, 0.75)


def chances(rng, accuracies):
    """The chance of a right answer, shape (questions, positions)."""
    logit = np.log(accuracies / (1 - accuracies))
    return 1 / (1 + np.exp(-(logit + rng.normal(size=(QUESTIONS, 1)))))


def draw(rng, chance):
    return (rng.random(chance.shape) < chance).astype(float)


def flipped(rng, answers, share):
    return np.where(rng.random(answers.shape) < share, 1 - answers, answers)


def lose(rng, answers, points, columns):
    """Turn right answers wrong: ``points`` in a hundred of all the questions, at each of the columns."""
    answers = answers.copy()
    for column in columns:
        right = np.flatnonzero(answers[:, column])
        answers[rng.choice(right, round(points * QUESTIONS / 100), replace=False), column] = 0
    return answers


def failure_rate(runs, noise, points=0, columns=()):
    """How often the gate fails where a share ``noise`` of answers flips (None: all drawn anew) and points are lost."""

    def as_run(answers):
        by_question = {f"{position} %": tuple(line) for position, line in enumerate(answers.T.tolist())}
        values = {label: sum(line) / len(line) for label, line in by_question.items()}
        task = Task("1", {}, QUESTIONS, "d", "p", {"acc,none": Metric(True, values, by_question)})
        return Results(Path("simulated"), Model("hf", "simulated", None), None, {}, {"simulated": task})

    failed = 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        chance = chances(rng, U_SHAPE)
        old = truth = draw(rng, chance)
        if noise is not None:
            old = flipped(rng, truth, noise)
        new = draw(rng, chance) if noise is None else flipped(rng, truth, noise)
        failed += gate.regress(as_run(old), as_run(lose(rng, new, points, columns))).failed
    return failed / runs


def false_alarms(runs):
    print(f"\nGate, nothing changed: share of {runs} reruns that fail (promised: at most {gate.ALPHA})")
    for label, noise in (("0.2 %", 0.002), ("2 %", 0.02), ("20 %", 0.2), ("all drawn anew", None)):
        print(f"answers that flip: {label:15} {failure_rate(runs, noise):.4f}")


def losses(runs):
    print(f"\nGate, planted loss: share of {runs} runs that fail")
    for where, columns in (("all positions", range(5)), ("one position", [2])):
        for noise in (0.02, None):
            shares = [failure_rate(runs, noise, points, columns) for points in (1, 2, 3, 5)]
            label = "all drawn anew" if noise is None else f"{noise:.0%} flip"
            print(f"{where:14} {label:15} 1, 2, 3, 5 points: " + "  ".join(f"{share:.2f}" for share in shares))


def coverage(runs):
    print(f"\n95 % intervals of compare: share of {runs} pairs of models whose true difference is covered")
    for label, of_a, of_b in (
        ("positions apart", U_SHAPE, U_SHAPE + np.array([0, 0.05, 0.1, 0.1, 0])),
        ("positions all equal", LEVEL, LEVEL + 0.05),
    ):
        drawn = ([chances(np.random.default_rng(i), x).mean(axis=0) for i in range(2000)] for x in (of_a, of_b))
        truth_a, truth_b = (np.mean(each, axis=0) for each in drawn)
        true = {
            "mean": (truth_b - truth_a).mean(),
            "worst": truth_b.min() - truth_a.min(),
            "spread": np.ptp(truth_b) - np.ptp(truth_a),
        }
        covered, spreads = dict.fromkeys([*true, "position"], 0), []
        for seed in range(runs):
            rng = np.random.default_rng(seed)
            difficulty = rng.normal(size=(QUESTIONS, 1))
            a, b = (draw(rng, 1 / (1 + np.exp(-(np.log(x / (1 - x)) + difficulty)))) for x in (of_a, of_b))
            found = statistics.compare_paired(a, b, replicates=1000, seed=seed)
            for name, value in true.items():
                covered[name] += getattr(found, name).low <= value <= getattr(found, name).high
            covered["position"] += found.positions[1].low <= (truth_b - truth_a)[1] <= found.positions[1].high
            spreads.append(found.spread.a)
        shares = "  ".join(f"{name} {count / runs:.3f}" for name, count in covered.items())
        print(f"{label:20} {shares}   (A's true spread {np.ptp(truth_a):.3f}, measured {np.mean(spreads):.3f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=at_least(1), default=1000, help="simulated evaluations a line (default: 1000)")
    runs = parser.parse_args().runs
    coverage(runs)
    losses(max(1, runs // 10))
    false_alarms(runs)
