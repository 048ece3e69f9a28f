"""Train MoICE's router: ``python -m lpes_eval.methods.moice.train --model MODEL --text FILE --out DIR``.

Every weight of the model is frozen. The defaults are the settings of the authors' training script (docs/methods.md has
a table). ``--task`` makes prompts of benchmarks, from seeds that no evaluation set is made of; the loss is that of the
answer alone. The same settings give the same file, byte for byte, on the same processor with as many threads.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from lpes_eval import files, reference
from lpes_eval.data import fiction, kv, perplexity
from lpes_eval.errors import UserError, first_line, program
from lpes_eval.flags import at_least, of, positive, whole
from lpes_eval.methods import moice
from lpes_eval.methods.base import check_device
from lpes_eval.methods.moice import router as routers
from lpes_eval.methods.moice.router import Router, RouterConfig
from lpes_eval.methods.tables import own_base, published_bases
from lpes_eval.rng import below, shuffled, stream

LOG = "training.jsonl"
TASKS = ("kv_retrieval", "mdqa_pos")
TRAINING_SEED = 0x901CE
"""Generated training examples have this plus ``--seed`` as seed, the tasks ``kv.SEED`` and ``fiction.SEED``."""
HALF_SCALE = 1024.0  # of the loss in float16, or gradients would vanish


@dataclass(frozen=True)
class Settings:
    """What decides a router's weights: a ``text`` file, or ``tasks`` with numbers of records or documents."""

    text: str | None = None
    text_sha256: str | None = None
    tasks: tuple[tuple[str, int], ...] = ()
    length: int = 4608
    steps: int = 7
    batch: int = 128
    rate: float = 1e-4
    seed: int = 0


Tokens = tuple[Tensor, int]
"""Token ids (T,), and the index of the first that the loss is about."""
Sequences = Callable[[int], Tokens]  # sequence number i of a run


def task_text(task: str, size: int, seed: int, number: int) -> tuple[str, str]:
    """Prompt and answer of training example ``number`` of a task; the gold item stands anywhere with equal chance."""
    index = below(size, stream("moice router", task, seed, number))
    position = min(100.0, 100 * (index + 0.5) / (size - 1))  # a percentage at which that item stands
    if task == "kv_retrieval":
        records = kv.generate(number, size, seed=TRAINING_SEED + seed)
        return records.prompt(position), f' "{records.target(position)}"'
    question = fiction.generate(number, size, seed=TRAINING_SEED + seed)
    return question.prompt(position), f" {question.answers[0]}"


def from_tasks(settings: Settings, tokenizer: Any) -> Sequences:
    """Sequences of prompts of ``settings.tasks`` with their answers."""

    def one(number: int) -> Tokens:
        task, size = settings.tasks[number % len(settings.tasks)]
        prompt, answer = task_text(task, size, settings.seed, number)
        context = tokenizer(prompt).input_ids
        ids = context + tokenizer(answer, add_special_tokens=False).input_ids + _end(tokenizer)
        if len(ids) > settings.length:
            found = f"a prompt and its answer take {len(ids)} tokens, more than --length {settings.length}"
            raise UserError(f"--task {task}:{size}: {found}; choose fewer records or documents")
        return torch.tensor(ids), len(context)

    return one


def from_texts(settings: Settings, tokenizer: Any, texts: Sequence[str]) -> Sequences:
    """Pieces of at most ``settings.length`` tokens of the texts, all of them in a drawn order, then all again."""
    pieces: list[list[int]] = []
    for number in shuffled(range(len(texts)), stream("moice texts", settings.seed)):
        ids = tokenizer(texts[number]).input_ids + _end(tokenizer)
        pieces += [ids[start : start + settings.length] for start in range(0, len(ids), settings.length)]
        if len(pieces) >= settings.steps * settings.batch:  # no more texts are read than the run needs
            break
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise UserError(f"--text {settings.text}: no text of two tokens or more is in it")

    def one(number: int) -> Tokens:
        epoch, place = divmod(number, len(pieces))
        order = shuffled(range(len(pieces)), stream("moice pieces", settings.seed, epoch))
        return torch.tensor(pieces[order[place]]), 1

    return one


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def loss_of(model: Any, ids: Tensor, first: int) -> Tensor:
    """The language-model loss of a sequence (T,), a mean over its tokens from the ``first`` on."""
    ids = ids.to(model.device)
    options = {} if first == 1 else {"logits_to_keep": len(ids) - first + 1}
    logits = model(input_ids=ids[None], use_cache=False, **options).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    each = functional.cross_entropy(logits.transpose(1, 2), ids[None, first:], reduction="none")
    return each.sum() / each.numel()


def train(model: Any, config: RouterConfig, settings: Settings, one: Sequences, out: Path) -> Router:
    """Train a router for ``model``, left as it was, and write it to ``out``; ``UserError``: the loss is no number."""
    router, batch = Router(config, seed=settings.seed), settings.batch
    frozen = [weight for weight in model.parameters() if weight.requires_grad]
    method = moice.MoICE.apply(model, router=router)
    for weight in frozen:
        weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(router.parameters(), lr=settings.rate, weight_decay=0.0)
    scale = HALF_SCALE if model.dtype == torch.float16 else 1.0
    log: list[dict[str, Any]] = []
    try:
        for step in tqdm(range(settings.steps), unit="step"):
            loss = 0.0
            for number in range(step * batch, (step + 1) * batch):
                each = loss_of(model, *one(number)) / batch
                (scale * each).backward()
                loss += each.item()
            for weight in router.parameters():
                weight.grad.div_(scale)  # type: ignore[union-attr]
            norm = torch.nn.utils.clip_grad_norm_(router.parameters(), 1.0).item()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                reason = f"the loss is {loss:g} and its gradient has norm {norm:g}"
                raise UserError(f"step {step + 1}: {reason}; use --dtype bfloat16 or float32")
            optimizer.step()
            optimizer.zero_grad()
            log.append({"step": step + 1, "loss": round(loss, 6), "gradient": round(norm, 6)})
            files.write_atomically(out / LOG, "".join(json.dumps(entry) + "\n" for entry in log))
    finally:
        method.detach()
        for weight in frozen:
            weight.requires_grad_(True)
    notes = {name: value for name, value in asdict(settings).items() if value not in (None, ())}
    router.config = replace(config, training=notes | {"first_loss": log[0]["loss"], "last_loss": log[-1]["loss"]})
    routers.write(router, out / routers.FILE)
    return router


@program("moice.train")
def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    about = "Train MoICE's router for a model (arXiv 2406.19598). The defaults are the published settings."
    parser = argparse.ArgumentParser(prog="python -m lpes_eval.methods.moice.train", description=about)
    add = parser.add_argument
    add("--model", default="reference", help="folder or name on the Hub; default: the shipped model")
    add("--out", type=Path, required=True, help="folder to write")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--text", type=Path, help=".txt file, or .jsonl file with a 'text' in each line")
    task_help = f"train on prompts like these tasks' ({' or '.join(TASKS)}), with SIZE records or documents"
    data.add_argument("--task", nargs="+", metavar="TASK:SIZE", help=task_help)
    numbers = {
        "length": (at_least(2), "most tokens of a sequence"),
        "steps": (at_least(1), "optimizer steps"),
        "batch": (at_least(1), "sequences a step"),
        "rate": (positive, "learning rate"),
        "seed": (whole, "of the router's first weights and of the data"),
    }
    for name, (kind, words) in numbers.items():
        default = getattr(Settings, name)
        add(f"--{name}", type=kind, default=default, metavar="N", help=f"{words} ({default})")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="the model's")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    check_device(given.device)
    files.refuse_foreign(given.out / LOG, '{"step": 1, ')
    files.refuse_foreign(given.out / routers.FILE, routers.METADATA)
    asked = {name: getattr(given, name) for name in numbers}
    settings = Settings(tasks=tuple(map(_task, given.task or ())), **asked)
    if not settings.tasks:
        texts = [found.text for found in perplexity.read(given.text)]
        settings = replace(settings, text=given.text.name, text_sha256=files.sha256(given.text))
    name = str(reference.folder(given.model))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=given.dtype).to(given.device).eval()
    except (OSError, ValueError) as error:
        raise UserError(f"--model {name}: cannot be loaded ({first_line(error)})") from None
    one = from_tasks(settings, tokenizer) if settings.tasks else from_texts(settings, tokenizer, texts)
    bases = published_bases(own_base(model, moice.Mixture.name))
    described = routers.describe(model.config, bases=bases, model=given.model)
    given.out.mkdir(parents=True, exist_ok=True)
    print(f"{given.model}: {described.shape}, bases {', '.join(f'{base:g}' for base in bases)}")
    print(f"{settings.steps} steps of {settings.batch} sequences; {given.dtype} on {given.device}", flush=True)
    router = train(model, described, settings, one, given.out)
    first, last = (router.config.training[name] for name in ("first_loss", "last_loss"))
    print(f"{given.out / routers.FILE}: loss {first} in the first step, {last} in the last", flush=True)


def _task(given: str) -> tuple[str, int]:
    task, _, size = given.partition(":")
    if task not in TASKS:
        raise UserError(f"--task {given}: expected {' or '.join(TASKS)} with :SIZE")
    return task, of(at_least(2), f"--task {task}:SIZE", size)


if __name__ == "__main__":
    sys.exit(main())
