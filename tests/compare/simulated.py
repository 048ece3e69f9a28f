"""Simulated evaluations: intervals should cover their truth, and the gate should fail only where something is lost.

A question's answers hang together through its difficulty (a normal with standard deviation 1 on the logit scale).
"""

from pathlib import Path

import numpy as np
from scipy.special import expit, logit

from lpes_eval.compare import gate, statistics
from lpes_eval.compare.results import Metric, Model, Results, Task

QUESTIONS = 500
U_SHAPE = np.array([0.9, 0.75, 0.65, 0.7, 0.85])
LEVEL = np.full(5, 0.75)
MIXED = {8: np.array([1 - 1e-9]), 24: U_SHAPE, 200: U_SHAPE}
"""Questions -> accuracies: tasks of one gate, the smallest with a single score, which is perfect."""
LOST = {8: 8, 24: 12, 200: 12}
"""Questions -> right answers that are lost at each position, while noise turns 2 % of all answers over."""
PASSES = {24: 0.05, 200: 0.05}
"""Questions -> the promise: how often such a loss may pass."""
NOISE = 0.02
"""The share of answers that a rerun turns over."""


def chances(rng, *accuracies, questions=QUESTIONS):
    """The chances of a right answer with each of the accuracies, of shape (questions, positions), to one difficulty."""
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


def failing(seed, tasks, lost=None):
    """The tasks (questions -> accuracies) that fail the gate.

    NOISE of the answers flip in both runs. As many right answers as ``lost`` says of a task (questions) turn wrong at
    each position.
    """
    rng, old, new = np.random.default_rng(seed), {}, {}
    for questions, accuracies in tasks.items():
        (chance,) = chances(rng, accuracies, questions=questions)
        truth = draw(rng, chance)
        old[questions] = flipped(rng, truth, NOISE)
        new[questions] = lose(rng, flipped(rng, truth, NOISE), (lost or {}).get(questions, 0), range(len(accuracies)))
    runs = [as_run({name: task_of(answers) for name, answers in tasks.items()}) for tasks in (old, new)]
    sections = gate.regress(*runs).sections
    return {section.task for section in sections if any(row.outcome == "failure" for row in section.rows)}


def covered(runs, of_a, of_b, questions=QUESTIONS, replicates=1000):
    """The share of intervals of each quantity that cover its truth."""
    drawn = [[each.mean(0) for each in chances(np.random.default_rng(i), of_a, of_b)] for i in range(2000)]
    truth_a, truth_b = np.mean(drawn, axis=0)
    true = {
        "mean": (truth_b - truth_a).mean(),
        "worst": truth_b.min() - truth_a.min(),
        "spread": np.ptp(truth_b) - np.ptp(truth_a),
        "position": (truth_b - truth_a)[1],
    }
    counts = dict.fromkeys(true, 0)
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        a, b = (draw(rng, chance) for chance in chances(rng, of_a, of_b, questions=questions))
        found = statistics.compare_paired(a, b, replicates=replicates, seed=seed)
        for name, value in true.items():
            one = found.positions[1] if name == "position" else getattr(found, name)
            counts[name] += one.low <= value <= one.high
    return {name: count / runs for name, count in counts.items()}
