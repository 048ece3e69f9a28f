"""Train MoICE's router: ``python -m lpes_eval.methods.moice.train --model MODEL --text FILE --out DIR``.

Only the router learns; every weight of the model is frozen. The defaults are the settings of the authors' training
script (docs/methods.md has a table). Any text will do; or ``--task`` makes prompts of benchmarks, from seeds that no
evaluation set is made of, and the loss is that of the answer alone, as the rest is drawn at random. The same settings
give the same file, byte for byte, on the same processor with the same number of threads.
"""

from __future__ import annotations

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
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lpes_eval import files, reference
from lpes_eval.data import fiction, kv, perplexity
from lpes_eval.errors import UserError, first_line, program
from lpes_eval.flags import amount, at_least, of, positive, whole
from lpes_eval.methods import moice
from lpes_eval.methods.base import check_device
from lpes_eval.methods.interception import find_attention
from lpes_eval.methods.moice import router as routers
from lpes_eval.methods.moice.router import Router, RouterConfig
from lpes_eval.methods.tables import own_base, parse_bases, published_bases
from lpes_eval.rng import below, shuffled, stream

LOG = "training.jsonl"
TASKS = ("kv_retrieval", "mdqa_pos")
TRAINING_SEED = 0x901CE
"""Generated training examples have this plus ``--seed`` as seed, the tasks ``kv.SEED`` and ``fiction.SEED``."""
HALF_SCALE = 1024.0  # of the loss in float16, or gradients would vanish; the router's gradients are divided again


@dataclass(frozen=True)
class Settings:
    """Everything that decides a router's weights, apart from the model, the processor and library versions.

    There is a ``text`` file, or ``tasks`` with numbers of records or documents. ``balance`` weighs the balance loss.
    """

    text: str | None = None
    text_sha256: str | None = None
    tasks: tuple[tuple[str, int], ...] = ()
    length: int = 4608
    steps: int = 7
    batch: int = 128
    rate: float = 1e-4
    balance: float = 0.3
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


def losses(model: Any, router: Router, sequences: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """The language-model loss of each sequence, (B,), a mean over its tokens; and the balance loss of them together."""
    ids = pad_sequence([ids for ids, _ in sequences], batch_first=True).to(model.device)
    lengths, firsts = torch.tensor([(len(ids), first) for ids, first in sequences], device=model.device).T
    place = torch.arange(ids.shape[1], device=model.device)
    real = place < lengths[:, None]
    start = int(firsts.min()) - 1  # logits from the first place on that any of the sequences is asked about
    options = {} if start == 0 else {"logits_to_keep": ids.shape[1] - start}
    mask = None if bool(real.all()) else real
    top_k, count = router.config.top_k, len(router.config.bases)
    seen: list[Tensor] = []
    router.seen = seen
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    router.seen = None
    balance = logits.new_tensor(float(count))  # with all bases, whatever the router does
    if top_k < count:
        balance = routers.load_balance([s[real[:, None].expand(s.shape[:3])] for s in seen], top_k)
    asked = (real & (place >= firsts[:, None]))[:, start + 1 :]
    each = functional.cross_entropy(logits.transpose(1, 2), ids[:, start + 1 :], reduction="none")
    return (each * asked).sum(1) / asked.sum(1), balance


def train(
    model: Any, config: RouterConfig, settings: Settings, one: Sequences, out: Path, *, micro_batch: int = 1
) -> Router:
    """Train a router for ``model``, which is given back as it was, and write it and its log to ``out``.

    ``micro_batch`` sequences are computed together. ``UserError``: the loss is not a number.
    """
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
            loss = balance = 0.0
            for start in range(0, batch, micro_batch):
                numbers = range(start, min(start + micro_batch, batch))
                each, of_balance = losses(model, router, [one(step * batch + number) for number in numbers])
                of_balance = of_balance * len(numbers) / batch
                (scale * (each.sum() / batch + settings.balance * of_balance)).backward()
                loss += each.sum().item() / batch
                balance += of_balance.item()
            for weight in router.parameters():
                weight.grad.div_(scale)  # type: ignore[union-attr]
            norm = torch.nn.utils.clip_grad_norm_(router.parameters(), 1.0).item()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                reason = f"the loss is {loss:g} and its gradient has norm {norm:g}"
                raise UserError(f"step {step + 1}: {reason}; use --dtype bfloat16 or float32")
            optimizer.step()
            optimizer.zero_grad()
            measured = {"loss": loss, "balance": balance, "gradient": norm}
            log.append({"step": step + 1} | {name: round(value, 6) for name, value in measured.items()})
            files.write_atomically(out / LOG, "".join(json.dumps(entry) + "\n" for entry in log))
    finally:
        method.detach()
        for weight in frozen:
            weight.requires_grad_(True)
    notes = {name: value for name, value in asdict(settings).items() if value not in (None, ())}
    router.config = replace(config, training=notes | {"first_loss": log[0]["loss"], "last_loss": log[-1]["loss"]})
    routers.write(router, out / routers.FILE)
    return router


def _parser() -> argparse.ArgumentParser:
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
        "balance": (amount, "weight of the balance loss"),
        "seed": (whole, "of the router's first weights and of the data"),
        "micro_batch": (at_least(1), "sequences computed together"),
    }
    for name, (kind, words) in numbers.items():
        default = getattr(Settings, name, 1)
        add(f"--{name}", type=kind, default=default, metavar="N", help=f"{words} ({default})")
    add("--top_k", type=whole, metavar="N", help="bases with the highest scores, which are mixed (7, or all if fewer)")
    add("--bases", help="such as 10000:17500; default: the published ones times the model's / 10000")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="the model's")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


@program("moice.train")
def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    given = _parser().parse_args(arguments)
    check_device(given.device)
    asked = {name: getattr(given, name) for name in ("length", "steps", "batch", "rate", "balance", "seed")}
    settings = Settings(tasks=tuple(map(_task, given.task or ())), **asked)
    if not settings.tasks:
        texts = [found.text for found in perplexity.read(given.text)]
        settings = replace(settings, text=given.text.name, text_sha256=files.sha256(given.text))
    name = str(reference.folder(given.model))
    try:
        config, tokenizer = AutoConfig.from_pretrained(name), AutoTokenizer.from_pretrained(name)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {name}: cannot be loaded ({first_line(error)})") from None
    one = from_tasks(settings, tokenizer) if settings.tasks else from_texts(settings, tokenizer, texts)
    find_attention(skeleton, moice.Mixture.name)
    own = own_base(skeleton, moice.Mixture.name)
    bases = published_bases(own) if given.bases is None else parse_bases("--bases", given.bases)
    top_k = min(routers.TOP_K, len(bases)) if given.top_k is None else given.top_k
    described = routers.describe(config, bases=bases, top_k=top_k, model=given.model)
    for number in range(len(settings.tasks)):
        one(number)  # whether a prompt fits is said before the model is loaded
    if given.out.exists() and not given.out.is_dir():
        raise UserError(f"--out {given.out}: is a file; expected a folder, or a name that is free")
    given.out.mkdir(parents=True, exist_ok=True)
    print(f"{given.model}: {described.shape}, bases {', '.join(f'{base:g}' for base in bases)}, top {top_k}")
    print(f"{settings.steps} steps of {settings.batch} sequences; {given.dtype} on {given.device}", flush=True)
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=given.dtype).to(given.device).eval()
    router = train(model, described, settings, one, given.out, micro_batch=given.micro_batch)
    first, last = (router.config.training[name] for name in ("first_loss", "last_loss"))
    print(f"{given.out / routers.FILE}: loss {first} in the first step, {last} in the last", flush=True)


def _task(given: str) -> tuple[str, int]:
    task, _, size = given.partition(":")
    if task not in TASKS:
        raise UserError(f"--task {given}: expected {' or '.join(TASKS)} with :SIZE")
    return task, of(at_least(2), f"--task {task}:SIZE", size)


if __name__ == "__main__":
    sys.exit(main())
