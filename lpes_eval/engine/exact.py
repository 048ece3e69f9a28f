"""The answers that ``HFLM.generate_until`` would give at batch size 1, in less time.

What a prompt shares with the one before is copied instead of computed, all answers are decoded together, and tokens
that stand earlier in the text are tried as drafts. Sums are rounded in another order, so a tie may fall otherwise.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from lpes_eval import rope
from lpes_eval.engine.harness import Answers, HarnessEngine, Order, Settled
from lpes_eval.engine.kv_cache import KVCache
from lpes_eval.engine.limits import fitted, no_number
from lpes_eval.errors import UserError

MEMORY = 2 << 30
"""Bytes of keys and values on a processor; on a GPU it is half of what is free."""
END = 64
"""The last tokens of prompts are run for all of them together if there are at most so many left to run."""
SHARED = 1 / 8
"""The share of a prompt that the one before must have in common with it: behind copied tokens attention has a mask."""
CHUNK = 256
"""Tokens behind copied ones that are run at once."""
MATCH, DRAFT = 3, 8
"""So many last tokens are looked up in the text, and so many that followed them there are a draft."""
ACCEPTED = 2 / 3
"""The share of drafted tokens that is expected to be right."""
STEP, STEP_ON_A_GPU = 48, 512
"""A decoding step takes as long for its first token as for so many more."""
LOOKS = 8
"""About how many batches are made at least where the caller may stop after any."""


@dataclass
class Prompt:
    """A request, tokenised; each of its ``stops`` with the number of last tokens in which lm-eval looks for it."""

    tokens: list[int]
    stops: dict[str, int]
    max_new: int


@dataclass
class Row:
    """How far request ``number`` is answered: ``tokens`` with the answer, of which the cache has the first ``held``."""

    number: int
    prompt: Prompt
    tokens: list[int]
    held: int = 0
    followed: dict[tuple[int, ...], int] = field(default_factory=dict)
    looked: int = MATCH

    @property
    def answer(self) -> list[int]:
        """The answer so far."""
        return self.tokens[len(self.prompt.tokens) :]

    @property
    def pending(self) -> list[int]:
        """What the model has not seen yet."""
        return self.tokens[self.held :]

    def draft(self, most: int) -> list[int]:
        """Tokens that followed the last ones where these stood last, earlier in the text (prompt lookup decoding)."""
        for end in range(self.looked, len(self.tokens)):
            self.followed[tuple(self.tokens[end - MATCH : end])] = end
        self.looked = max(MATCH, len(self.tokens))
        there = self.followed.get(tuple(self.tokens[-MATCH:]))
        return self.tokens[there : there + most] if there is not None else []


class ExactEngine(HarnessEngine):
    """Answers a fixed list of greedy ``generate_until`` requests, as often as it is asked to.

    ``prompts_per_batch`` and ``tokens_per_batch`` are the most that are answered together; by default memory decides.
    """

    def __init__(
        self, lm: HFLM, requests: Sequence[Any], prompts_per_batch: int | None = None, tokens_per_batch: int = 0
    ) -> None:
        super().__init__(lm, requests)
        self.model, self._on_cpu = lm.model, lm.device.type == "cpu"
        end = self.model.generation_config.eos_token_id
        self._ends = set(end if isinstance(end, list) else [end])
        self._pad = lm.tokenizer.pad_token_id or 0
        self._prompts = [self._prepare(*request.args) for request in requests]
        self.prompt_tokens = sum(len(prompt.tokens) for prompt in self._prompts)
        self.prompts_per_batch, self.tokens_per_batch = prompts_per_batch or len(self._prompts), tokens_per_batch
        self._settled: Settled = None

    def _prepare(self, context: str, arguments: dict[str, Any]) -> Prompt:
        options = normalize_gen_kwargs(arguments, self.lm.max_gen_toks)
        end = self.lm.tok_decode(self.lm.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(list(options["until"]), eos=end)
        tokens_of = self.lm.tokenizer.encode
        stops = {text: len(tokens_of(text, add_special_tokens=False)) + 2 for text in until}  # MultiTokenEOSCriteria
        return Prompt(fitted(self.lm, context, arguments)[0], stops, options["max_gen_toks"])

    def answer(self, order: Order = None, may_stop: bool = False, settled: Settled = None) -> Iterator[Answers]:
        """As lm-eval's own loop; without an order the longest first, so that memory runs out early or never."""
        self._settled = settled
        waiting = self._families() if order is None else [list(numbers) for numbers in order]
        looks = LOOKS if may_stop and self._on_cpu else 1  # a GPU gains nothing by it
        most = math.ceil(sum(map(len, waiting)) / looks)
        self.tokens_per_batch = self.tokens_per_batch or self._tokens_in_memory()
        while waiting:
            batch = waiting.pop(0)
            while waiting and len(batch) < most and self._fits(batch + waiting[0]):
                batch = batch + waiting.pop(0)
            while not self._fits(batch) and len(batch) > 1:
                half = len(batch) // 2
                batch, waiting = batch[:half], [batch[half:], *waiting]
            answers = None
            with contextlib.suppress(torch.OutOfMemoryError):
                answers = self._answer(batch)
            if answers is not None:
                yield {i: self._responses(i, tokens) for i, tokens in answers.items()}
                continue
            torch.cuda.empty_cache()  # only here, outside, has what it took been given back
            if len(batch) == 1:
                found = f"not even one prompt of {self._tokens(batch)} tokens fits the memory of {self.lm.device}"
                raise UserError(f"{found}; take a smaller dtype (--model_args dtype=...) or shorter prompts")
            self.tokens_per_batch = self._tokens(batch) // 2
            waiting.insert(0, batch)

    def _families(self) -> list[list[int]]:
        """All requests, those together that share half of their prompt with the one before; the longest first."""
        prompts = [prompt.tokens for prompt in self._prompts]
        families: list[list[int]] = []
        for i in sorted(range(len(prompts)), key=prompts.__getitem__):
            if families and 2 * common(prompts[families[-1][-1]], prompts[i]) > len(prompts[i]):
                families[-1].append(i)
            else:
                families.append([i])
        return sorted(families, key=lambda family: -max(len(prompts[i]) for i in family))

    def _columns(self, numbers: Sequence[int]) -> int:
        return max(len(self._prompts[i].tokens) + self._prompts[i].max_new for i in numbers)

    def _tokens(self, numbers: Sequence[int]) -> int:
        return len(numbers) * self._columns(numbers)

    def _fits(self, numbers: Sequence[int]) -> bool:
        return len(numbers) <= self.prompts_per_batch and self._tokens(numbers) <= self.tokens_per_batch

    def _tokens_in_memory(self) -> int:
        cache = KVCache(self.model.config, 1, 1)
        with torch.inference_mode(), self._precision():
            self._forward(cache, slice(0, 1), [0], [[self._pad]], [0])
        memory = MEMORY if self._on_cpu else torch.cuda.mem_get_info(self.lm.device)[0] // 2
        return memory // cache.nbytes

    def _precision(self) -> Any:
        dtype = self.lm.mixed_precision_dtype
        return torch.autocast(self.lm.device.type, dtype, enabled=dtype is not None)

    def _answer(self, numbers: Sequence[int]) -> dict[int, list[int]]:
        """Each prompt's answer, with the token that ended it."""
        cache = KVCache(self.model.config, len(numbers), self._columns(numbers) + END + DRAFT)
        rows = [Row(i, self._prompts[i], list(self._prompts[i].tokens)) for i in numbers]
        rows.sort(key=lambda row: row.tokens)  # each behind the one with which it shares most
        answers: dict[int, list[int]] = {}
        with torch.inference_mode(), self._precision(), masked_attention_of_groups(self._on_cpu):
            # 1) Of each prompt, run what it does not share with the one before, but for the end
            for number, row in enumerate(rows):
                if number:
                    self._share(cache, rows, number)
                while len(row.pending) > END:
                    tokens = row.pending[:-1][: CHUNK if row.held else None]
                    self._forward(cache, slice(number, number + 1), [row.held], [tokens], [0])
                    row.held += len(tokens)
            # 2) Run what is pending of all prompts, first their ends, then token after token, with drafts
            while rows:
                self._step(cache, rows)
                # 3) Take out the answers that are complete; the last row takes a free row's place
                for number in reversed(range(len(rows))):
                    if self._complete(row := rows[number]):
                        answers[row.number] = row.answer
                        last = rows.pop()
                        if last is not row:
                            rows[number] = last
                            cache.copy(len(rows), number, last.held)
        return answers

    def _share(self, cache: KVCache, rows: Sequence[Row], number: int) -> None:
        before, row = rows[number - 1 : number + 1]
        shared = min(common(before.tokens, row.tokens), before.held, len(row.tokens) - 1)
        if shared >= SHARED * len(row.tokens):
            cache.copy(number - 1, number, shared)
            row.held = shared

    def _step(self, cache: KVCache, rows: Sequence[Row]) -> None:
        """One forward pass over what is pending, with drafts: every answer grows by a token or more."""
        drafts = [row.draft(DRAFT) for row in rows]
        most = self._draft_length([len(draft) for draft in drafts], max(len(row.pending) for row in rows))
        drafts = [draft[:most] for draft in drafts]
        tokens = [row.pending + draft for row, draft in zip(rows, drafts, strict=True)]
        firsts = [len(row.pending) - 1 for row in rows]
        kept = sorted({k for first, some in zip(firsts, tokens, strict=True) for k in range(first, len(some))})
        highest, best = self._forward(cache, slice(0, len(rows)), [row.held for row in rows], tokens, kept)
        for number, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            first = kept.index(firsts[number])
            row.held = len(row.tokens)
            for k in range(len(draft) + 1):
                if math.isnan(highest[number][first + k]):
                    raise no_number(self.factors)
                token = best[number][first + k]
                row.tokens.append(token)
                if self._complete(row) or k == len(draft) or token != draft[k]:
                    break
                row.held += 1

    def _draft_length(self, drafts: Sequence[int], pending: int) -> int:
        """So many tokens of each draft are tried that the most tokens are expected in the time of the step."""
        fixed = STEP if self._on_cpu else STEP_ON_A_GPU

        def speed(most: int) -> float:
            expected = len(drafts) + ACCEPTED * sum(min(draft, most) for draft in drafts)
            return expected / (fixed + len(drafts) * (pending + most))

        return max(range(max(drafts) + 1), key=speed)

    def _forward(
        self, cache: KVCache, rows: slice, held: Sequence[int], tokens: Sequence[list[int]], kept: Sequence[int]
    ) -> tuple[list[list[float]], list[list[int]]]:
        """One forward pass over tokens that follow those held: the highest logits and their tokens, (rows, kept)."""
        width = max(map(len, tokens))
        first = torch.tensor(held)[:, None]
        cache.place(rows, first + torch.arange(width), device := self.model.device)
        logits = self.model(
            input_ids=torch.tensor([some + [self._pad] * (width - len(some)) for some in tokens], device=device),
            attention_mask=cache.mask(self.lm.mixed_precision_dtype or self.model.dtype),
            position_ids=cache.positions,
            **rope.with_cache(self.model, cache),
            use_cache=True,
            logits_to_keep=torch.tensor(kept, device=device),
        ).logits
        highest, best = logits.max(-1)
        return highest.float().tolist(), best.tolist()

    def _complete(self, row: Row) -> bool:
        if len(row.answer) >= row.prompt.max_new or self._ended(row.prompt, row.answer):
            return True
        return self._settled is not None and self._settled(row.number, self.lm.tok_decode(row.answer))

    def _ended(self, prompt: Prompt, answer: list[int]) -> bool:
        decode = self.lm.tokenizer.decode
        return answer[-1] in self._ends or any(stop in decode(answer[-last:]) for stop, last in prompt.stops.items())

    def _responses(self, i: int, answer: list[int]) -> list[str]:
        prompt = self._prompts[i]
        (self.unended.discard if self._ended(prompt, answer) else self.unended.add)(i)
        text = postprocess_generated_text(self.lm.tok_decode(answer), list(prompt.stops), None)
        return [text] * (self._requests[i].repeats or 1)


def common(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two texts share from the first one on."""
    pairs = zip(some, others, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@contextlib.contextmanager
def masked_attention_of_groups(on_cpu: bool) -> Iterator[None]:
    """On a processor, do not repeat keys and values for every query head; transformers does so behind a mask."""
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    set_here = on_cpu and name not in os.environ
    if set_here:
        os.environ[name] = "1"
    try:
        yield
    finally:
        if set_here:
            del os.environ[name]
