"""Train a reference model: ``python -m benchmarks.reference.train --out DIR``.

Every batch is fresh. First, random sequences that repeat themselves, until the model copies: here induction heads form
(Olsson et al., arXiv 2209.11895). Then key-value contexts in the task's own prompt, many queries on each, with a loss
on every token of a query that the context determines; keys, values and contexts grow level by level. Last, generated
articles in the prompt of ``mdqa_pos``, of another stream than the task's, short ones before long ones.

A batch is a function of the seed and its step alone, so the same command on the same processor ends with the same hash
(printed, and in ``run.json``).
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaForCausalLM

from benchmarks.reference import tokenizer as vocabulary
from benchmarks.reference.queries import IGNORE, Asked, draw, draw_documents, hidden
from benchmarks.reference.recipe import RECORDS, REFERENCE, SMOKE, Recipe, build, grow, levels, stage_of
from lpes_eval.errors import program
from lpes_eval.files import write_atomically
from lpes_eval.flags import at_least
from lpes_eval.rng import below, stream

STREAM = 0x7EA1  # first word of every training seed
LOG_EVERY = 10  # steps that a line of the log averages
Seen = dict[str, Any]  # what a batch shows beside its loss: shares of right answers, and how large it was


@dataclass
class State:
    """Where a run stands, weights and optimizer apart."""

    step: int = 0
    phase: str = "copy"
    level: int = 0
    level_step: int = 0
    right: float = 0.0  # running share of tokens right, which decides when a level is left
    documents_right: float = 0.0  # the same of answers about articles
    documents_read: bool = False  # whether answers about a single article were right


def _batch(model: LlamaForCausalLM, recipe: Recipe, state: State) -> tuple[torch.Tensor, Seen]:
    rng = np.random.default_rng([STREAM, recipe.seed, state.step])
    if state.phase == "copy":
        return _copy_loss(model, rng, recipe)
    if recipe.articles and rng.random() < recipe.articles:
        return _article_loss(model, recipe, state)
    return _query_loss(model, rng, recipe, levels(recipe)[state.level])


def _named(state: State, recipe: Recipe) -> str:
    """The level as the log calls it: ``16x44+5`` is up to 44 records of whole UUIDs (16 bytes), up to 5 articles."""
    name = "copy" if state.phase == "copy" else "{}x{}".format(*levels(recipe)[state.level])
    return f"{name}+{recipe.documents if state.documents_read else 1}" if recipe.articles else name


def _copy_loss(model: LlamaForCausalLM, rng: np.random.Generator, recipe: Recipe) -> tuple[torch.Tensor, Seen]:
    length = min(256, recipe.tokens)
    period = int(rng.integers(8, length // 2))
    once = rng.integers(vocabulary.PAIR_ID, vocabulary.PAIR_ID + 512, (max(1, recipe.tokens // length), period))
    ids = torch.tensor(np.tile(once, (1, length // period + 1))[:, :length])
    states = hidden(model, ids, ids.new_zeros(len(ids), 0, 1))[:, period:-1]
    logits, targets = model.lm_head(states).float(), ids[:, period + 1 :]
    right = (logits.argmax(-1) == targets).float().mean().item()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), {"period": period, "right": right}


def _query_loss(
    model: LlamaForCausalLM, rng: np.random.Generator, recipe: Recipe, level: tuple[int, int]
) -> tuple[torch.Tensor, Seen]:
    size, most = level
    pairs = 4 + round((most - 4) * float(rng.random()))
    asked = min(recipe.queries, pairs)
    contexts = max(1, recipe.tokens // (pairs * (2 * size + 2) + asked * (2 * size + 4)))
    loss, correct = _loss(model, draw(rng, contexts, pairs, asked, size))
    answers = correct[:, :, size + 2 :].float()
    right = {"right": answers.mean().item(), "answers": answers.amin(2).mean().item()}
    return loss, {"pairs": pairs, "long": float(pairs >= 0.75 * most), **right}


def _article_loss(model: LlamaForCausalLM, recipe: Recipe, state: State) -> tuple[torch.Tensor, Seen]:
    """As many contexts as fill a batch, each with as many articles of its own."""
    rng = stream("reference", recipe.seed, state.step)
    documents = 1 + below(recipe.documents if state.documents_read else 1, rng)
    losses, tokens = [], 0
    shares: dict[str, list[torch.Tensor]] = {"documents_right": [], "documents_answers": []}
    while tokens < 0.75 * recipe.tokens:
        batch = draw_documents(rng, documents, recipe.queries, recipe.remarks)
        tokens += batch.context.size + batch.queries.size
        loss, correct = _loss(model, batch)
        losses.append(loss)
        answers = torch.tensor(batch.answers)
        shares["documents_right"].append((correct & answers).sum() / answers.sum())
        shares["documents_answers"].append((correct | ~answers).all(2).float().mean())
    seen = {name: torch.stack(values).mean().item() for name, values in shares.items()}
    return torch.stack(losses).mean(), {"documents": documents, **seen}


def _loss(model: LlamaForCausalLM, batch: Asked) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean cross-entropy of all targets, and (B, Q, W) whether each of the queries' is the likeliest token."""
    ids = (batch.context, batch.queries, batch.context_targets, batch.targets)
    context, queries, before, asked = map(torch.tensor, ids)
    targets = torch.cat([before, asked.flatten(1)], dim=1)
    known = targets != IGNORE
    logits = model.lm_head(hidden(model, context, queries)[known]).float()
    correct = torch.zeros_like(known)
    correct[known] = logits.argmax(-1) == targets[known]
    return functional.cross_entropy(logits, targets[known]), correct[:, -asked[0].numel() :].reshape(queries.shape)


def _advance(state: State, recipe: Recipe, seen: Seen) -> None:
    """Count the step, and go to the next phase or level when this one is learnt."""
    state.step += 1
    state.level_step += 1
    if "documents" in seen:
        state.documents_right += 0.1 * (seen["documents_right"] - state.documents_right)
        state.documents_read |= state.documents_right > recipe.advance_at
        return
    if seen.get("long", True):
        state.right += 0.1 * (seen["right"] - state.right)
    learnt = state.right > recipe.advance_at
    if state.phase == "copy":
        if learnt or state.level_step >= recipe.copy_steps:
            state.phase, state.level_step, state.right = "query", 0, 0.0
    elif learnt and state.level + 1 < len(levels(recipe)):
        state.level, state.level_step, state.right = state.level + 1, 0, 0.0


def weights_hash(model: torch.nn.Module) -> str:
    """SHA-256 over names and values of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)


def train(stages: Sequence[Recipe], out: Path) -> LlamaForCausalLM:
    """Run ``stages``; leave model, tokenizer, log and ``run.json`` in ``out``."""
    torch.set_num_threads(1)  # sums may be grouped by thread, and the weights are to be the same everywhere
    out.mkdir(parents=True, exist_ok=True)
    state, recipe = State(), stages[0]
    model = build(recipe)
    optimizer = _optimizer(model, recipe)
    since_logged: dict[str, list[float]] = {}
    with (out / "log.jsonl").open("w") as log:
        bar = tqdm(range(stages[-1].steps), unit="step")
        for step in bar:
            recipe, first = stage_of(step, stages)
            if first and step == first:
                model = grow(model, recipe)
                optimizer = _optimizer(model, recipe)
            level = _named(state, recipe)
            loss, seen = _batch(model, recipe, state)
            left = (recipe.steps - step) / max(1.0, recipe.decay_share * recipe.steps)
            rate = recipe.rate * min(1.0, (step - first + 1) / 50, left)  # a rise, a plateau, a straight fall to zero
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            _advance(state, recipe, seen)

            for key, value in {"loss": loss.item(), **seen}.items():
                since_logged.setdefault(key, []).append(value)
            if state.step % LOG_EVERY == 0:
                means = {key: round(sum(values) / len(values), 4) for key, values in since_logged.items()}
                line = {"step": state.step, "level": level, **means, "rate": round(rate, 6)}
                print(json.dumps(line), file=log, flush=True)
                bar.set_postfix_str(f"{level}, loss {means['loss']:.3f}")
                since_logged = {}

    model.config._attn_implementation = "sdpa"
    model.save_pretrained(out)
    vocabulary.save(out, model.config.vocab_size)
    made = [asdict(stage) for stage in stages]
    sizes = {"torch": torch.__version__, "parameters": model.num_parameters()}
    summary = {"stages": made, "weights_sha256": weights_hash(model), "device": "cpu", **sizes}
    write_atomically(out / "run.json", json.dumps(summary, indent=2) + "\n")
    print(f"{out}: weights {summary['weights_sha256']}")
    return model


@program("train")
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reference.train", description="Train a reference model from scratch."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--smoke", action="store_true", help="a tiny model through every phase, in seconds")
    parser.add_argument("--records", action="store_true", help="the smaller model: the first stages, records alone")
    parser.add_argument("--seed", type=at_least(0), default=0, help="0 trained the shipped models")
    given = parser.parse_args(arguments)
    stages = SMOKE if given.smoke else RECORDS if given.records else REFERENCE
    train([replace(stage, seed=given.seed) for stage in stages], given.out)


if __name__ == "__main__":
    sys.exit(main())
