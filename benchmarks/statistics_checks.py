"""How often intervals cover, and how often the gate fails, over simulated evaluations: the tables of docs/.

    python benchmarks/statistics_checks.py        # 500 questions at five positions

A question's answers hang together through its difficulty (a normal with standard deviation 1 on the logit scale). No
model runs: minutes on one core.
"""

import argparse
from pathlib import Path

import numpy as np
from scipy.special import expit, logit

from lpes_eval.compare import gate, statistics
from lpes_eval.compare.results import Metric, Model, Results, Task
from lpes_eval.flags import at_least

QUESTIONS = 500
U_SHAPE = np.array([0.9, 0.75, 0.65, 0.7, 0.85])
LEVEL = np.full(5, 0.75)
NOISES = {"0.2 %": 0.002, "2 %": 0.02, "20 %": 0.2, "all drawn anew": None}


def chances(rng, *accuracies, questions=QUESTIONS):
    """The chances of a right answer with each of the accuracies: (questions, positions)."""
    difficulty = rng.normal(size=(questions, 1))
    return [expit(logit(each) + difficulty) for each in accuracies]


def draw(rng, chance):
    return (rng.random(chance.shape) < chance).astype(float)


def flipped(rng, answers, share):
    return np.where(rng.random(answers.shape) < share, 1 - answers, answers)


def lose(rng, answers, number, columns):
    """Turn so many right answers wrong at each of the columns, or all that are right."""
    answers = answers.copy()
    for column in columns:
        right = np.flatnonzero(answers[:, column])
        answers[rng.choice(right, min(number, len(right)), replace=False), column] = 0
    return answers


def task_of(answers, higher_is_better=True):
    """A task with one metric, of answers (questions, positions)."""
    labels = [f"{p} %" for p in range(answers.shape[1])] if answers.shape[1] > 1 else ["all"]
    by_question = dict(zip(labels, map(tuple, answers.T.tolist()), strict=True))
    values = {label: sum(line) / len(line) for label, line in by_question.items()}
    return Task("1", {}, len(answers), "d", "p", {"acc,none": Metric(higher_is_better, values, by_question)})


def as_run(tasks):
    """Results in memory, of tasks by their names."""
    return Results(Path("simulated"), Model("hf", "simulated", None), None, {}, tasks)


def failing(seed, tasks, noise, lost=None, columns=range(5)):
    """Which of the tasks (questions -> accuracies) fail the gate.

    A share ``noise`` of the answers flips in both runs (None: all are drawn anew), and ``lost`` right answers of a task
    turn wrong at each of the columns.
    """
    rng, old, new = np.random.default_rng(seed), {}, {}
    for questions, accuracies in tasks.items():
        (chance,) = chances(rng, accuracies, questions=questions)
        old[questions] = truth = draw(rng, chance)
        if noise is not None:
            old[questions] = flipped(rng, truth, noise)
        answers = draw(rng, chance) if noise is None else flipped(rng, truth, noise)
        new[questions] = lose(rng, answers, (lost or {}).get(questions, 0), columns[: len(accuracies)])
    runs = [as_run({name: task_of(answers) for name, answers in tasks.items()}) for tasks in (old, new)]
    return {row.task for row in gate.regress(*runs).rows if row.fails}


def failure_rate(runs, noise, points=0, columns=range(5)):
    """How often one task fails where so many points are lost at each of the columns."""
    lost = {QUESTIONS: round(points * QUESTIONS / 100)}
    return sum(bool(failing(seed, {QUESTIONS: U_SHAPE}, noise, lost, columns)) for seed in range(runs)) / runs


def of_gate(runs):
    print(f"\nGate, nothing changed: share of {runs} reruns that fail (promised: at most {gate.ALPHA})")
    for label, noise in NOISES.items():
        print(f"answers that flip: {label:15} {failure_rate(runs, noise):.4f}")
    runs = max(1, runs // 10)
    print(f"\nGate, planted loss of 1, 2, 3 and 5 points: share of {runs} runs that fail")
    for where, columns in (("all positions", range(5)), ("one position", [2])):
        for label in ("2 %", "all drawn anew"):
            shares = [failure_rate(runs, NOISES[label], points, columns) for points in (1, 2, 3, 5)]
            print(f"{where:14} answers that flip: {label:15} " + "  ".join(f"{share:.2f}" for share in shares))


def covered(runs, of_a, of_b, questions=QUESTIONS, replicates=1000):
    """The share of intervals of each quantity that cover its truth, and A's spread: the true one, and as measured."""
    drawn = [[each.mean(0) for each in chances(np.random.default_rng(i), of_a, of_b)] for i in range(2000)]
    truth_a, truth_b = np.mean(drawn, axis=0)
    true = {
        "mean": (truth_b - truth_a).mean(),
        "worst": truth_b.min() - truth_a.min(),
        "spread": np.ptp(truth_b) - np.ptp(truth_a),
        "position": (truth_b - truth_a)[1],
    }
    counts, spreads = dict.fromkeys(true, 0), []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        a, b = (draw(rng, chance) for chance in chances(rng, of_a, of_b, questions=questions))
        found = statistics.compare_paired(a, b, replicates=replicates, seed=seed)
        for name, value in true.items():
            one = found.positions[1] if name == "position" else getattr(found, name)
            counts[name] += one.low <= value <= one.high
        spreads.append(found.spread.a)
    return {name: count / runs for name, count in counts.items()}, np.ptp(truth_a), np.mean(spreads)


def coverage(runs):
    print(f"\n95 % intervals of compare: share of {runs} pairs of models whose true difference is covered")
    for label, of_a, of_b in (
        ("positions apart", U_SHAPE, U_SHAPE + np.array([0, 0.05, 0.1, 0.1, 0])),
        ("positions all equal", LEVEL, LEVEL + 0.05),
    ):
        found, spread, measured = covered(runs, of_a, of_b)
        shares = "  ".join(f"{name} {share:.3f}" for name, share in found.items())
        print(f"{label:20} {shares}   (A's true spread {spread:.3f}, measured {measured:.3f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=at_least(1), default=1000, help="simulated evaluations a line (default: 1000)")
    args = parser.parse_args()
    coverage(args.runs)
    of_gate(args.runs)
