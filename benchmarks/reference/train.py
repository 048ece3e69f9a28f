"""Train the reference model: ``python -m benchmarks.reference.train --out DIR``.

Two phases, every batch fresh. First, random sequences that repeat themselves, until the model copies: this is where
induction heads form (Olsson et al., arXiv 2209.11895), and without it retrieval did not form at all in the time this
recipe takes. Then key-value contexts in the task's own prompt, many queries on each
(:mod:`benchmarks.reference.queries`), with a loss on every token of a query that the context determines. Keys and
values grow from 2 to 16 bytes and contexts to ``--pairs`` records; a level is left once its answers are right. Last,
generated articles in the prompt of ``mdqa_pos`` (:mod:`lpes_eval.data.fiction`, of another stream than the task's),
short ones before long ones.

The shipped models are trained in stages (``REFERENCE`` in :mod:`benchmarks.reference.recipe`, which begins with
``RECORDS``), one recipe after the other on the same weights, which a stage may make larger (``grow``). Flags that
change a recipe train a single stage instead.

A batch is a function of the seed and of its step alone, so a run that was killed goes on from its last checkpoint to
the same weights, and the same command on the same processor ends with the same hash (printed, and in ``run.json``).
Records are random UUIDs of a stream that no evaluation set uses; that a 122-bit UUID is drawn twice does not happen.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.reference import tokenizer as vocabulary
from benchmarks.reference.queries import IGNORE, Asked, draw, draw_documents, hidden
from benchmarks.reference.recipe import (
    RECORDS,
    REFERENCE,
    SMOKE,
    WINDOW,
    Recipe,
    build,
    check,
    flag,
    grow,
    grows,
    levels,
    stage_of,
)
from lpes_eval import checkpoint
from lpes_eval.errors import UserError
from lpes_eval.files import write_atomically
from lpes_eval.flags import at_least, finite, whole
from lpes_eval.rng import below, stream

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CHECKPOINT = "checkpoint.safetensors"
STREAM = 0x7EA1
"""First word of every training seed; evaluation draws use other words."""


@dataclass
class State:
    """Where a run stands, weights and optimizer apart."""

    step: int = 0
    phase: str = "copy"
    level: int = 0
    level_step: int = 0
    right: float = 0.0
    """Running share of tokens right that decides when a level is left."""
    documents_right: float = 0.0
    """As ``right``, of answers about articles."""
    documents_read: bool = False
    """Whether answers about a single article were right."""


def _copy_loss(
    model: LlamaForCausalLM, rng: np.random.Generator, recipe: Recipe, device: str
) -> tuple[torch.Tensor, dict[str, Any]]:
    length = min(256, recipe.tokens)
    period = int(rng.integers(8, length // 2))
    once = rng.integers(vocabulary.PAIR_ID, vocabulary.PAIR_ID + 512, (max(1, recipe.tokens // length), period))
    ids = torch.tensor(np.tile(once, (1, length // period + 1))[:, :length], device=device)
    states = hidden(model, ids, ids.new_zeros(len(ids), 0, 1))[:, period:-1]
    logits, targets = model.lm_head(states).float(), ids[:, period + 1 :]
    right = (logits.argmax(-1) == targets).float().mean().item()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), {"period": period, "right": right}


def _query_loss(
    model: LlamaForCausalLM, rng: np.random.Generator, recipe: Recipe, level: tuple[int, int], device: str
) -> tuple[torch.Tensor, dict[str, Any]]:
    size, most = level
    power = recipe.length_power if level == levels(recipe)[-1] else 1.0
    pairs = 4 + round((most - 4) * float(rng.random()) ** power)
    asked = min(recipe.queries, pairs)
    contexts = max(1, recipe.tokens // (pairs * (2 * size + 2) + asked * (2 * size + 4)))
    batch = draw(rng, contexts, pairs, asked, size)
    loss, correct = _loss(model, batch, device)
    answers = correct[:, :, size + 2 :].float()
    return loss, {
        "pairs": pairs,
        "long": float(pairs >= 0.75 * most),
        "right": answers.mean().item(),
        "answers": answers.amin(2).mean().item(),
    }


def _loss(
    model: LlamaForCausalLM, batch: Asked, device: str, with_context: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean cross-entropy of all targets, and (B, Q, W) whether each of the queries' is the likeliest token."""
    context, queries = torch.tensor(batch.context, device=device), torch.tensor(batch.queries, device=device)
    targets = torch.tensor(batch.targets, device=device).flatten(1)
    size = context.shape[1]
    states = hidden(model, context, queries)
    if with_context and batch.context_targets is not None:
        targets = torch.cat([torch.tensor(batch.context_targets, device=device), targets], dim=1)
    else:
        states = states[:, size:]
    known = targets != IGNORE
    logits = model.lm_head(states[known]).float()
    correct = torch.zeros_like(known)
    correct[known] = logits.argmax(-1) == targets[known]
    asked = queries.shape[1] * queries.shape[2]
    return functional.cross_entropy(logits, targets[known]), correct[:, -asked:].reshape(queries.shape)


def _article_loss(
    model: LlamaForCausalLM, recipe: Recipe, state: State, device: str
) -> tuple[torch.Tensor, dict[str, Any]]:
    """As many contexts as fill a batch, each with as many articles of its own."""
    rng = stream("reference", recipe.seed, state.step)
    documents = 1 + below(recipe.documents if state.documents_read else 1, rng)
    losses, right, whole, tokens = [], [], [], 0
    while tokens < 0.75 * recipe.tokens:
        batch = draw_documents(rng, documents, recipe.queries, recipe.remarks)
        tokens += batch.context.size + batch.queries.size
        loss, correct = _loss(model, batch, device, with_context=bool(recipe.subjects))
        losses.append(loss)
        answers = torch.tensor(batch.answers, device=device)
        right.append((correct & answers).sum() / answers.sum())
        whole.append((correct | ~answers).all(2).float().mean())
    return torch.stack(losses).mean(), {
        "documents": documents,
        "documents_right": torch.stack(right).mean().item(),
        "documents_answers": torch.stack(whole).mean().item(),
    }


def _advance(state: State, recipe: Recipe, seen: dict[str, Any], stages: list[tuple[int, int]]) -> None:
    """Count the step, and go to the next phase or level when this one is learnt."""
    state.step += 1
    state.level_step += 1
    if state.phase == "copy":
        state.right += 0.1 * (seen["right"] - state.right)
        if state.right > recipe.advance_at or state.level_step >= recipe.copy_steps:
            state.phase, state.level_step, state.right = "query", 0, 0.0
        return
    if "documents" in seen:
        state.documents_right += 0.1 * (seen["documents_right"] - state.documents_right)
        state.documents_read |= state.documents_right > recipe.advance_at
        return
    if seen["long"]:
        state.right += 0.1 * (seen["right"] - state.right)
    if state.right > recipe.advance_at and state.level + 1 < len(stages):
        state.level, state.level_step, state.right = state.level + 1, 0, 0.0


def _rate(step: int, recipe: Recipe, began: int = 0) -> float:
    """Learning rate: a short rise from the step at which the model ``began``, a plateau, a straight fall to zero."""
    left = (recipe.steps - step) / max(1.0, recipe.decay_share * recipe.steps)
    return recipe.rate * min(1.0, (step - began + 1) / 50, left)


def weights_hash(model: torch.nn.Module) -> str:
    """SHA-256 over names and values of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)


def _load_state(file: Path, stages: Sequence[Recipe]) -> State:
    """Where the run of a checkpoint stands; ``UserError`` where it is one of other stages."""
    state, before = checkpoint.notes(file, "state", "stages")
    changed = [f"{len(before)} stages -> {len(stages)}"] if len(before) != len(stages) else []
    for old, new in zip(before, stages, strict=False):
        changed += checkpoint.changes(old, asdict(new))
    if changed:
        raise UserError(
            f"{file}: was made by another recipe ({', '.join(changed)}); "
            "go on with its own settings, or choose another --out"
        )
    return State(**state)


def train(
    stages: Sequence[Recipe],
    out: Path,
    save_every: int = 100,
    log_every: int = 10,
    stop_after: int | None = None,
    keep_stages: bool = False,
) -> LlamaForCausalLM:
    """Run ``stages`` one after the other, or go on with them; leave model, tokenizer, log and ``run.json`` in ``out``.

    ``stop_after`` leaves off after that many steps, as a kill would, the last checkpoint being the only trace.
    ``keep_stages`` also leaves the model as each stage ended, in ``out/stages/STEP``.

    Raises:
        UserError: a recipe with which nothing can be trained, ``out`` is a file, or holds a checkpoint of another
            recipe, or one that cannot be read.
    """
    for stage in stages:
        check(stage)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; expected a folder, or a name that is free")
    recipe = stages[0]
    torch.set_num_threads(recipe.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out.mkdir(parents=True, exist_ok=True)
    state, file, log = State(), out / CHECKPOINT, out / "log.jsonl"
    if file.exists():
        state = _load_state(file, stages)
        recipe = stages[stage_of(state.step - 1, stages)]
    model = build(recipe).to(device)  # type: ignore[arg-type]
    optimizer = _optimizer(model, recipe)
    if file.exists():
        checkpoint.restore(file, model, optimizer)
        print(f"going on from step {state.step} of {stages[-1].steps}", flush=True)
    lines = log.read_text().splitlines() if log.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] <= state.step]
    write_atomically(log, "".join(line + "\n" for line in kept))

    began, begun_at = time.perf_counter(), state.step
    since_logged: dict[str, list[float]] = {}
    while state.step < stages[-1].steps:
        if stop_after is not None and state.step >= stop_after:
            return model
        index = stage_of(state.step, stages)
        recipe, of_stage = stages[index], levels(stages[index])
        larger = max((i for i in range(index + 1) if grows(i, stages)), default=0)
        began_model = stages[larger - 1].steps if larger else 0
        if larger and state.step == began_model:
            model = grow(model, recipe).to(device)  # type: ignore[arg-type]
            optimizer = _optimizer(model, recipe)
        rng = np.random.default_rng([STREAM, recipe.seed, state.step])
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=device == "cuda"):
            if state.phase == "copy":
                loss, seen = _copy_loss(model, rng, recipe, device)
            elif recipe.articles and rng.random() < recipe.articles:
                loss, seen = _article_loss(model, recipe, state, device)
            else:
                loss, seen = _query_loss(model, rng, recipe, of_stage[state.level], device)
        rate = _rate(state.step, recipe, began_model)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        phase = "copy" if state.phase == "copy" else "{}x{}".format(*of_stage[state.level])
        if recipe.articles:
            phase += f"+{recipe.documents if state.documents_read else 1}"
        _advance(state, recipe, seen, of_stage)

        for key, value in {"loss": loss.item(), **seen}.items():
            since_logged.setdefault(key, []).append(value)
        if state.step % log_every == 0:
            means = {key: round(sum(values) / len(values), 4) for key, values in since_logged.items()}
            with log.open("a") as stream:
                stream.write(json.dumps({"step": state.step, "level": phase, **means, "rate": round(rate, 6)}) + "\n")
            speed = (time.perf_counter() - began) / (state.step - begun_at)
            left = speed * (stages[-1].steps - state.step) / 60
            shown = "  ".join([phase, *(f"{key} {value:.3f}" for key, value in means.items())])
            done = f"step {state.step}/{stages[-1].steps}"
            print(f"{done}  {shown}  {speed:.2f} s a step, {left:.0f} min left", flush=True)
            since_logged = {}
        if keep_stages and state.step == recipe.steps:
            save(model, out / "stages" / str(state.step))
        if state.step % save_every == 0 or state.step == stages[-1].steps:
            checkpoint.save(file, model, optimizer, state=asdict(state), stages=[asdict(stage) for stage in stages])

    save(model, out)
    summary = {
        "stages": [asdict(recipe) for recipe in stages],
        "weights_sha256": weights_hash(model),
        "device": device,
        "torch": torch.__version__,
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
    write_atomically(out / "run.json", json.dumps(summary, indent=2) + "\n")
    print(f"{out}: weights {summary['weights_sha256']}", flush=True)
    return model


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write model and tokenizer as ``from_pretrained`` reads them, the configuration last, when the rest is there."""
    model.config._attn_implementation = "sdpa"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving.") as made:
        model.save_pretrained(made)
        vocabulary.save(Path(made), WINDOW, model.config.vocab_size)
        for file in sorted(Path(made).iterdir(), key=lambda file: file.name == "config.json"):
            file.chmod(0o644)
            os.replace(file, folder / file.name)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reference.train", description="Train the reference model from scratch."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; a run that was killed goes on there")
    parser.add_argument("--smoke", action="store_true", help="a tiny model through every phase, in seconds")
    parser.add_argument("--records", action="store_true", help="the smaller model: the first stages, records alone")
    parser.add_argument(
        "--save-every", type=at_least(1), default=100, metavar="STEPS", help="steps between checkpoints (100)"
    )
    parser.add_argument("--keep-stages", action="store_true", help="also keep the model as each stage ended")
    for field in fields(Recipe):
        kind = {"int": whole, "float": finite}[str(field.type)]
        words = f"of a single stage; default {field.default}"
        parser.add_argument(flag(field.name), type=kind, metavar="N", help=words)
    given = parser.parse_args(arguments)
    stages: tuple[Recipe, ...] = SMOKE if given.smoke else RECORDS if given.records else REFERENCE
    changes = {name: value for name in asdict(stages[0]) if (value := getattr(given, name)) is not None}
    if set(changes) <= {"seed", "threads"}:
        stages = tuple(replace(stage, **changes) for stage in stages)
    else:
        stages = (replace(stages[0] if given.smoke else Recipe(), **changes),)
    try:
        train(stages, given.out, save_every=given.save_every, keep_stages=given.keep_stages)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
