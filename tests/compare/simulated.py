"""Runs in memory, of answers that are drawn: a question's hang together through its difficulty."""

from pathlib import Path

import numpy as np
from scipy.special import expit, logit

from lpes_eval.compare.results import Metric, Results, Task


def chances(rng, *accuracies, questions):
    """The chances of a right answer with each of the accuracies: (questions, positions)."""
    difficulty = rng.normal(size=(questions, 1))
    return [expit(logit(np.array(each)) + difficulty) for each in accuracies]


def draw(rng, chance):
    return (rng.random(chance.shape) < chance).astype(float)


def task_of(answers, higher_is_better=True):
    """A task with one metric, of answers (questions, positions)."""
    labels = [f"{p} %" for p in range(answers.shape[1])] if answers.shape[1] > 1 else ["all"]
    by_question = dict(zip(labels, answers.T.tolist(), strict=True))
    values = {label: sum(line) / len(line) for label, line in by_question.items()}
    return Task("1", {}, len(answers), "d", "p", {"acc,none": Metric(higher_is_better, values, by_question)})


def run_with(**tasks):
    """A run of tasks, each given by its scores or ready-made."""
    made = {name: task if isinstance(task, Task) else task_of(task) for name, task in tasks.items()}
    return Results(Path("simulated"), "hf simulated", None, {}, made, made)
