"""One question at all its positions, under some factors: likelihood of the gold answer, and the answer itself.

The gold answer is teacher-forced: one pass over the prompt and the answer says how likely each of its tokens is, and
whether greedy decoding would give just these. Prompts of one question share most of their tokens where only the key
changes; that prefix goes through the model once.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import lpes_eval
from lpes_eval import methods
from lpes_eval.data import documents, kv, mdqa, splits

POSITIONS = (0.0, 25.0, 50.0, 75.0, 100.0)
MAX_NEW = 100
"""Tokens that an answer may have (Liu et al. 2024)."""


@dataclass(frozen=True)
class Question:
    """A question at the positions of its gold item: the prompt, the gold answer, and all answers that are accepted."""

    number: int
    prompts: tuple[str, ...]
    gold: tuple[str, ...]
    accepted: tuple[tuple[str, ...], ...]


def questions(task: str, size: int, split: str, limit: int, data: Path | None = None) -> list[Question]:
    """The first questions of a split of ``kv_retrieval`` (``size`` records) or ``mdqa_pos`` (``size`` documents).

    ``mdqa_pos`` reads ``nq-open-10_total_documents_gold_at_0.jsonl.gz`` below ``data``; fewer documents are the gold
    one and the first distractors.
    """
    if task == "kv_retrieval":
        numbers = splits.indices(kv.POOL, split)[:limit]
        examples: list[Any] = [kv.generate(number, size) for number in numbers]
        written = lambda target: f'"{target}'  # noqa: E731
    else:
        assert data is not None, "mdqa_pos needs --data, the folder of nq-open-10_total_documents_gold_at_0.jsonl.gz"
        every = mdqa.read(data / "nq-open-10_total_documents_gold_at_0.jsonl.gz", 10)
        numbers = splits.indices(len(every), split)[:limit]
        examples = [replace(every[number], distractors=every[number].distractors[: size - 1]) for number in numbers]
        written = lambda target: target[0]  # noqa: E731
    made = []
    for number, example in zip(numbers, examples, strict=True):
        targets = [example.target(position) for position in POSITIONS]
        accepted = tuple((t,) if isinstance(t, str) else tuple(t) for t in targets)
        prompts = tuple(example.prompt(position) for position in POSITIONS)
        made.append(Question(number, prompts, tuple(map(written, targets)), accepted))
    return made


class Model:
    """A pretrained model that is asked the same questions under many factors."""

    def __init__(self, folder: str, dtype: str = "bfloat16", chat: bool = False, **config: Any) -> None:
        self.name, self.chat = Path(folder).name, chat
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **config).eval()
        self.num_layers, self.method = self.model.config.num_hidden_layers, None

    def change(self, change: Sequence[float] | str | None) -> None:
        """Put one factor a layer in force, or a method by its name; None for the plain model."""
        lpes_eval.remove(self.model)
        if self.method is not None:
            self.method.detach()
        self.method = methods.load(change).apply(self.model) if isinstance(change, str) else None
        if change is not None and self.method is None:
            lpes_eval.apply(self.model, list(change))

    def prompt(self, text: str) -> list[int]:
        """A prompt's tokens, in the chat template where the model is asked in one."""
        if not self.chat:
            return self.tokenizer(text)["input_ids"]
        message = [{"role": "user", "content": text}]
        ids = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        return ids

    @torch.inference_mode()
    def likelihood(self, question: Question) -> dict[str, list[float]]:
        """For each position the mean log-likelihood of a token of the gold answer, and whether greedy would give it."""
        space = "" if self.chat else " "
        prompts = [self.prompt(text) for text in question.prompts]
        gold = [self.tokenizer(space + text, add_special_tokens=False)["input_ids"] for text in question.gold]
        # Whether an answer opens with a quotation mark is a matter of form, so that one is given.
        prompts = [p + g[:1] if t[0] == '"' else p for p, g, t in zip(prompts, gold, question.gold, strict=True)]
        gold = [g[1:] if t[0] == '"' else g for g, t in zip(gold, question.gold, strict=True)]
        if self.method is not None:  # which may have to know where a prompt ends: one after the other
            return self._likelihood_one_by_one(prompts, gold)
        shared = common(prompts)
        rows = [prompt[shared:] + answer for prompt, answer in zip(prompts, gold, strict=True)]
        longest, cache = max(map(len, rows)), None
        if shared > longest:  # 1. prefill what all prompts share, once
            cache = DynamicCache(config=self.model.config)
            self.model(input_ids=torch.tensor([prompts[0][:shared]]), past_key_values=cache, logits_to_keep=1)
            cache.batch_repeat_interleave(len(rows))
        else:
            shared = 0
            rows = [prompt + answer for prompt, answer in zip(prompts, gold, strict=True)]
            longest = max(map(len, rows))
        # 2. the rest of each prompt and its gold answer; padding stands behind them, where nothing sees it
        kept = max(map(len, gold)) + longest - min(map(len, rows)) + 1
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        logits = self.model(
            input_ids=ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=kept
        ).logits
        firsts = [len(row) - len(answer) - 1 - (longest - kept) for row, answer in zip(rows, gold, strict=True)]
        return judged([scores[first:] for scores, first in zip(logits, firsts, strict=True)], gold)

    def _likelihood_one_by_one(self, prompts: list[list[int]], gold: list[list[int]]) -> dict[str, list[float]]:
        logits = []
        for prompt, answer in zip(prompts, gold, strict=True):
            ends = getattr(self.method, "prompt_ends_at", None)
            with ends(len(prompt) - 1) if ends else contextlib.nullcontext():
                ids = torch.tensor([prompt + answer[:-1]])
                logits.append(self.model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0])
        return judged(logits, gold)

    @torch.inference_mode()
    def answers(self, question: Question, stop: str = "\n") -> list[str]:
        """The greedy answer at each position, up to ``stop``."""
        prompts = [self.prompt(text) for text in question.prompts]
        longest = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

        def ended(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            texts = self.tokenizer.batch_decode(ids[:, longest:], skip_special_tokens=True)
            return torch.tensor([bool(stop) and stop in text.lstrip() for text in texts])

        made = self.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW, do_sample=False, stopping_criteria=[ended]
        )
        return self.tokenizer.batch_decode(made[:, longest:], skip_special_tokens=True)


def judged(logits: Sequence[torch.Tensor], gold: Sequence[list[int]]) -> dict[str, list[float]]:
    """Of each answer the mean log-likelihood of a token, and whether all are the likeliest."""
    means, exact = [], []
    for scores, answer in zip(logits, gold, strict=True):
        of_tokens, target = scores[: len(answer)].float().log_softmax(-1), torch.tensor(answer)
        means.append(round(of_tokens.gather(1, target[:, None]).mean().item(), 5))
        exact.append(float((of_tokens.argmax(-1) == target).all()))
    return {"ll": means, "exact": exact}


def common(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens with which all prompts begin; never a whole prompt."""
    shortest = min(map(len, prompts)) - 1
    return next((i for i in range(shortest) if len({prompt[i] for prompt in prompts}) > 1), shortest)


def record(
    path: Path,
    model: Model,
    asked: Sequence[Question],
    changes: Iterable[tuple[str, Sequence[float] | str | None]],
    task: str,
    **said: Any,
) -> Iterator[dict[str, Any]]:
    """Measure factors, or methods, by name on questions, and add a line for each to ``path`` that is not there yet.

    ``said`` goes into each line; with ``decode=True`` the answers are decoded and scored too.
    """
    decode = said.get("decode", False)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    there = {(line["factors"], line["question"]) for line in lines if all(line.get(k) == v for k, v in said.items())}
    for name, change in changes:
        model.change(change)
        for question in asked:
            if (name, question.number) in there:
                continue
            start = time.perf_counter()
            line = {"factors": name, "question": question.number, **said, **model.likelihood(question)}
            if decode:
                texts = model.answers(question, "\n" if task == "mdqa_pos" else "")
                score = documents.best_subspan_em if task == "mdqa_pos" else (lambda text, a: kv.accuracy(text, a[0]))
                line["score"] = [score(text, a) for text, a in zip(texts, question.accepted, strict=True)]
                line["answers"] = texts
            line["seconds"] = round(time.perf_counter() - start, 2)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            yield line
