"""What real models answered under many factors, recorded once so that every search can be replayed on it.

    python -m benchmarks.recorded records          # half an hour of one core; goes on where it stopped
    python -m benchmarks.recorded articles
    python -m benchmarks.recorded small

``benchmarks/results/recorded-NAME.jsonl`` has a line for each vector of factors: which search examples were answered
right at each position, the mean negative log-likelihood of the gold answer's tokens, and the tokens and seconds that
answering took. ``benchmarks.landscapes`` replays searches on it.
"""

import argparse
import json
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from tqdm import tqdm

from benchmarks.experiments.store import KEPT, rows
from lpes_eval.flags import at_least
from lpes_eval.rng import stream
from search.optimizers.bands import levels_of

MODELS = {
    "records": ("kv_retrieval", "reference", 220),
    "articles": ("mdqa_pos", "reference", 160),
    "small": ("kv_retrieval", "reference-kv", 220),
}
"""Each recording's task, model, and number of vectors of factors."""
EXAMPLES, LOSSES = 32, 8
"""Search examples that answer under each vector; examples whose log-likelihood is taken."""


def vector(number: int, L: int, known: Sequence[dict[str, Any]]) -> list[float]:
    """The factors to measure next: uniform ones and single bands first, then drawn ones.

    Of four drawn ones, one has some layers from 1 to 1.6 and the others 1, one has each layer from 1 to 2 or is a
    straight line, and two are neighbours of one of the twenty best so far.
    """
    fixed = [[1 + k / 10] * L for k in range(11)]
    fixed += [
        [step if first <= h < end else 1.0 for h in range(L)]
        for level in levels_of(L, 8)[1:]
        for first, end in level
        for step in (1.2, 1.5)
    ]
    if number < len(fixed):
        return fixed[number]
    rng, measured = stream("recorded", L, number), [row["factors"] for row in known]
    best = sorted(known, key=lambda row: -sum(part.count("1") for part in row["right"]))[:20]
    while True:
        drawn = [_even(rng, 1.0, 2.0 if number % 4 else 1.6) for _ in range(L)]
        if number % 4 == 0:
            factors = [f if rng.random() < 0.4 else 1.0 for f in drawn]
        elif number % 8 == 1:
            factors = [round(drawn[0] + (drawn[-1] - drawn[0]) * h / (L - 1), 2) for h in range(L)]
        elif number % 8 == 5:
            factors = drawn
        else:
            near, width = best[int(rng.random() * len(best))]["factors"], rng.choice((0.05, 0.1, 0.2))
            factors = [round(f + (rng.random() < 0.5) * _even(rng, -width, width), 2) for f in near]
        factors = [min(2.0, max(1.0, f)) for f in factors]
        if factors not in measured:
            return factors


def _even(rng: Random, low: float, high: float) -> float:
    return round((low + (high - low) * rng.random()) * 20) / 20


def load(name: str) -> list[dict[str, Any]]:
    """The lines of a recording."""
    return rows(KEPT / f"recorded-{name}.jsonl")


def record(name: str, threads: int) -> None:
    """Measure the vectors that are not in the file yet."""
    import torch

    from lpes_eval.methods.lpes import LPES
    from search.answer_loss import AnswerLoss
    from search.evaluator import Evaluator
    from search.tasks import load_tasks

    torch.set_num_threads(threads)
    task, model, vectors = MODELS[name]
    lm = LPES(pretrained=model)
    # With layers reused, a vector's seconds would depend on the vectors before it.
    evaluate = Evaluator(lm, load_tasks(lm, [task], examples=EXAMPLES), reuse_layers=False)
    loss = AnswerLoss(lm, load_tasks(lm, [task], examples=LOSSES))
    known = load(name)
    with (KEPT / f"recorded-{name}.jsonl").open("a", encoding="utf-8") as file:
        for number in tqdm(range(len(known), vectors), initial=len(known), total=vectors, unit="vector"):
            factors = vector(number, evaluate.num_layers, known)
            tokens, start = evaluate.engine.count.tokens, time.perf_counter()
            measured = evaluate(factors)
            seconds = time.perf_counter() - start
            right = ["".join(str(int(value)) for value in values) for values in measured.examples.values()]
            row = {"factors": factors, "right": right, "loss": [round(loss.mean(p), 3) for p in range(len(right))]}
            row |= {"tokens": evaluate.engine.count.tokens - tokens, "seconds": round(seconds, 2)}
            known.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("--threads", type=at_least(1), default=1)
    args = parser.parse_args()
    record(args.name, args.threads)


if __name__ == "__main__":
    main()
