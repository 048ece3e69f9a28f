"""The answers that ``HFLM.generate_until`` would give, in less time: for asking the same questions over and over.

A search asks a fixed set of prompts under hundreds of factors. What that leaves to save, without changing an answer:

* prompts are tokenised once;
* a beginning that several prompts share (the records of a question that is asked at several positions) is prefilled
  once, on a CPU without padding, and its keys and values are handed to all of them;
* greedy decoding is deterministic and neighbouring factors mostly give the same answers, so an answer of the past is
  put behind the prompt and checked in the same forward pass (speculative decoding, arXiv 2211.17192, with the past as
  the draft model). Decoding goes on from the first token that differs, along another answer of the past if one fits;
* where none does, along what followed the last two tokens when they last stood in the prompt or in the answer itself
  (as arXiv 2304.04487 does with references): a wrong value is mostly some other key's, and an answer that rambles
  repeats itself;
* logits are computed for the positions that decide about a token, and for no other;
* batches are filled up to a number of tokens, which is halved when memory runs out.

Greedy decoding is what the model says is most probable next, and each of these asks the model for just that, so the
answers are those of ``hf`` at batch size 1. Sums are rounded in another order, as they are at any other batch size, so
a tie between two tokens, to the last bits, may fall the other way.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from lpes_eval.errors import UserError

Tokens = tuple[int, ...]

SAMPLING = {"do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p"}
HARMLESS = {
    *SAMPLING,
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "max_length",
    "transformers_version",
}
"""Entries of a generation config that leave greedy decoding the most probable token, one after another."""
NEUTRAL: dict[str, float] = {"repetition_penalty": 1, "length_penalty": 1, "num_beams": 1, "min_length": 0}
"""Further entries, which do so at these values."""


LOOKUP = 24
"""Tokens that are tried at once of what followed the last two tokens before."""


@dataclass
class Count:
    """What answering cost, in numbers of which the ratios matter.

    Attributes:
        answers: answers given.
        tokens: tokens of these answers: the steps that decoding them one by one takes.
        steps: forward passes that each answer took part in: the steps it did take.
        forwards: forward passes of whole batches for these steps.
        prefilled: prompt tokens that went through the model.
        shared: prompt tokens that did not have to, their prefix being there already.
    """

    answers: int = 0
    tokens: int = 0
    steps: int = 0
    forwards: int = 0
    prefilled: int = 0
    shared: int = 0


@dataclass
class _Prompt:
    """One request, tokenised, and every answer it has been given."""

    tokens: Tokens
    until: list[str]
    stops: list[tuple[str, int]]  # each stop, and in how many of the last tokens lm-eval looks for it
    max_new: int
    past: list[Tokens] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.raw = array("i", self.tokens)

    def recall(self, so_far: Tokens, first: Tokens | None) -> Tokens:
        """What a past answer that begins with ``so_far`` goes on with; ``first`` is tried first, then the latest."""
        for answer in ([first] if first else []) + self.past[::-1]:
            if answer[: len(so_far)] == so_far:
                return answer[len(so_far) :]
        return ()

    def look_up(self, so_far: Tokens) -> Tokens:
        """What followed the answer's last two tokens when they last stood in the prompt or the answer, if they did.

        Where that leads up to the answer's end, it goes round: two tokens that alternate may do so for long.
        """
        if len(so_far) < 2:
            return ()
        size = self.raw.itemsize
        at = (self.raw.tobytes() + array("i", so_far[:-1]).tobytes()).rfind(array("i", so_far[-2:]).tobytes())
        if at < 0 or at % size:  # a mention across the borders of tokens is none
            return ()
        followed = (self.tokens + so_far)[at // size + 2 :][:LOOKUP]
        return (followed * LOOKUP)[: min(LOOKUP, self.max_new - len(so_far))]


@dataclass
class _Group:
    """Prompts (by their number) that begin with the same tokens."""

    prefix: Tokens
    members: list[int]


def reason_against(lm: Any, requests: Sequence[Any]) -> str | None:
    """Why these requests have to be answered by lm-eval itself; None if they need not."""
    if not isinstance(lm, HFLM) or lm.backend != "causal":
        return "the model is not a causal transformers model"
    if type(lm)._model_generate is not HFLM._model_generate or lm.think_end_token is not None or lm.world_size > 1:
        return "the model generates in a way of its own"
    if any(request.request_type != "generate_until" or len(request.args) != 2 for request in requests):
        return "not all requests are for generated text"
    for request in requests:
        asked = normalize_gen_kwargs(request.args[1], lm.max_gen_toks)
        others = set(asked) - {"until", "max_gen_toks", *SAMPLING}
        if asked.get("do_sample") or others:
            return f"generation is not plainly greedy ({', '.join(sorted(others)) or 'do_sample'})"
    generation = lm.model.generation_config.to_diff_dict()
    effective = {key for key, value in generation.items() if value not in (None, False) and NEUTRAL.get(key) != value}
    if others := {key for key in effective - HARMLESS if not key.startswith("_")}:
        return f"the model's generation config sets {', '.join(sorted(others))}"
    config = lm.model.config.get_text_config(decoder=True)
    if not all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers):
        return "not all of the model's layers attend to the whole text"
    if (attention := lm.model.config._attn_implementation) not in ("sdpa", "eager"):
        return f"answers were not compared under {attention} attention"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    if dynamic := kinds & {"dynamic", "longrope"}:
        return f"its {dynamic.pop()} positions depend on how far decoding has come"
    return None


class Answerer:
    """Answers a fixed list of greedy ``generate_until`` requests, as often as it is asked to.

    Args:
        lm: an lm-eval model for which ``reason_against`` knows none.
        requests: lm-eval's instances.
        share_prefixes: prefill a common beginning once.
        draft: check answers of the past before decoding.
        look_up: check what followed the same two tokens before, in the prompt or in the answer.
        few_logits: compute logits only where they decide about a token.
        tokens_per_batch: tokens that are worked on at once; halved whenever memory runs out. By default 65,536 on a
            GPU and 16,384 elsewhere.

    Attributes:
        count: what answering has cost so far.
        too_long: how many prompts do not fit the model's window beside their answer.
    """

    SHORTEST_PREFIX = 16
    """Tokens that prompts must have in common before it is worth splitting them."""

    def __init__(
        self,
        lm: HFLM,
        requests: Sequence[Any],
        *,
        share_prefixes: bool = True,
        draft: bool = True,
        look_up: bool = True,
        few_logits: bool = True,
        tokens_per_batch: int | None = None,
    ) -> None:
        self.lm, self.model = lm, lm.model
        self.count = Count()
        self.tokens_per_batch = tokens_per_batch or (65_536 if lm.device.type == "cuda" else 16_384)
        self._draft, self._look_up, self._few_logits = draft, look_up, few_logits
        end = self.model.generation_config.eos_token_id
        self._ends = set(end if isinstance(end, list) else [] if end is None else [end])
        self._end_text = lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
        self._pad = lm.tokenizer.pad_token_id or 0
        self._prompts = [self._prepare(*request.args) for request in requests]
        self.too_long = sum(len(p.tokens) + p.max_new > lm.max_length for p in self._prompts)
        self._groups = self._share() if share_prefixes else [_Group((), [i]) for i in range(len(self._prompts))]
        self._groups.sort(key=lambda g: -max(len(self._prompts[i].tokens) for i in g.members))

    def _prepare(self, context: str, arguments: dict[str, Any]) -> _Prompt:
        asked = normalize_gen_kwargs(arguments, self.lm.max_gen_toks)
        max_new = asked["max_gen_toks"]
        room = self.lm.max_length - max_new  # as HFLM, which cuts what is more from the left
        ids, _ = self.lm.tok_batch_encode([context], left_truncate_len=room, truncation=self.lm.truncation)
        until = handle_stop_sequences(list(asked["until"]), eos=self._end_text)
        encode = self.lm.tokenizer.encode
        stops = [(text, len(encode(text, add_special_tokens=False)) + 2) for text in until]  # MultiTokenEOSCriteria
        return _Prompt(tuple(ids[0].tolist()), until, stops, max_new)

    def _share(self) -> list[_Group]:
        """Group prompts whose common beginning is at least half of each; in sorted order these are neighbours."""
        order = sorted(range(len(self._prompts)), key=lambda i: self._prompts[i].tokens)
        groups: list[_Group] = []
        for i in order:
            tokens = self._prompts[i].tokens
            if groups:
                last = groups[-1]
                beginning = last.prefix or self._prompts[last.members[0]].tokens
                common = min(_common(beginning, tokens), len(tokens) - 1)
                longest = max(len(tokens), *(len(self._prompts[j].tokens) for j in last.members))
                if common >= max(self.SHORTEST_PREFIX, longest / 2):
                    last.prefix = tokens[:common]
                    last.members.append(i)
                    continue
            groups.append(_Group((), [i]))
        return groups

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(prompt.tokens) for prompt in self._prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest answer it may get."""
        return max(len(prompt.tokens) + prompt.max_new for prompt in self._prompts)

    def answer(self, drafts: Sequence[Tokens] | None = None) -> tuple[list[str], list[Tokens]]:
        """Answer all requests with the model as it is now.

        Args:
            drafts: answers to try first, one a request: what the individual's parent answered.

        Returns:
            The answers as ``generate_until`` gives them, and their tokens, to be drafts for others.
        """
        answers: dict[int, Tokens] = {}
        for batch in self.answer_in_batches(drafts):
            answers |= batch
        numbers = range(len(self._prompts))
        return [self.text(i, answers[i]) for i in numbers], [answers[i] for i in numbers]

    @property
    def groups(self) -> list[list[int]]:
        """The requests by number, those together whose common beginning is prefilled once."""
        return [group.members for group in self._groups]

    def answer_in_batches(
        self, drafts: Sequence[Tokens] | None = None, order: Sequence[int] | None = None
    ) -> Iterator[dict[int, Tokens]]:
        """Answer as ``answer`` does, batch by batch: the number of each request in it, and its answer's tokens.

        Args:
            drafts: as for ``answer``.
            order: numbers of ``groups``, in the order in which they are to be answered; by default the longest first.
        """
        queue = list(self._batches(self._groups if order is None else [self._groups[g] for g in order]))
        while queue:
            batch = queue.pop(0)
            try:
                answers = self._answer_batch(batch, drafts)
            except torch.OutOfMemoryError:
                if sum(len(group.members) for group in batch) == 1:
                    tokens = len(self._prompts[batch[0].members[0]].tokens)
                    raise UserError(
                        f"not even one prompt of {tokens} tokens fits the memory of {self.lm.device}; take a smaller "
                        "dtype (--model_args dtype=...), another device or a task with shorter prompts"
                    ) from None
                self.tokens_per_batch = max(1, self.tokens_per_batch // 2)
                torch.cuda.empty_cache()
                queue = [*_halves(batch), *queue]
                continue
            for i in answers:
                past = self._prompts[i].past
                if answers[i] not in past:
                    past.append(answers[i])
                answers[i] = past[past.index(answers[i])]  # equal answers are one object: many are kept
                self.count.answers += 1
                self.count.tokens += len(answers[i])
            yield answers

    def text(self, i: int, answer: Tokens) -> str:
        """Request ``i``'s answer as ``generate_until`` gives it."""
        return postprocess_generated_text(self.lm.tok_decode(list(answer)), self._prompts[i].until, None)

    def _batches(self, groups: Sequence[_Group]) -> Iterator[list[_Group]]:
        """Groups in order, as many at a time as the budget allows, at least one."""
        batch: list[_Group] = []
        rows = longest = 0
        for group in groups:  # mostly the longest come first, so memory runs out early or never
            length = max(len(self._prompts[i].tokens) + self._prompts[i].max_new for i in group.members)
            if batch and (rows + len(group.members)) * max(longest, length) > self.tokens_per_batch:
                yield batch
                batch, rows, longest = [], 0, 0
            batch.append(group)
            rows, longest = rows + len(group.members), max(longest, length)
        if batch:
            yield batch

    def _answer_batch(self, groups: Sequence[_Group], drafts: Sequence[Tokens] | None) -> dict[int, Tokens]:
        lm = self.lm
        with (
            torch.inference_mode(),
            torch.autocast(lm.device.type, lm.mixed_precision_dtype, lm.mixed_precision_dtype is not None),
        ):
            return self._decode(groups, drafts)

    def _decode(self, groups: Sequence[_Group], drafts: Sequence[Tokens] | None) -> dict[int, Tokens]:
        rows = [i for group in groups for i in group.members]  # the prompts still being answered
        device = self.model.device
        pending = {i: self._prompts[i].tokens[len(group.prefix) :] for group in groups for i in group.members}
        if any(group.prefix for group in groups):
            cache, mask = self._prefill([group.prefix for group in groups])
            of_row = torch.tensor([g for g, group in enumerate(groups) for _ in group.members], device=device)
            cache.batch_select_indices(of_row)
            mask = mask[of_row]
            self.count.shared += sum(len(g.prefix) * (len(g.members) - 1) for g in groups)
        else:
            cache, mask = DynamicCache(config=self.model.config), self._no_columns(len(rows))
        self.count.prefilled += sum(len(g.prefix) for g in groups) + sum(map(len, pending.values()))

        answers: dict[int, Tokens] = dict.fromkeys(rows, ())
        while rows:
            ahead = [self._drafted(i, answers[i], drafts) for i in rows]
            # The last token of a draft is only compared, not fed; a row without a draft is asked for one token.
            predicted, mask = self._forward([pending[i] for i in rows], [d[:-1] for d in ahead], cache, mask)
            self.count.forwards += 1
            drafted = max(len(d[:-1]) for d in ahead)
            going_on = []
            for row, (i, draft) in enumerate(zip(rows, ahead, strict=True)):
                accepted = _common(draft, predicted[row])
                new = draft if draft and accepted == len(draft) else (*draft[:accepted], predicted[row][accepted])
                # Of the drafted tokens in the cache, those behind the first difference must not be seen again.
                mask[row, mask.shape[1] - drafted + len(new) - 1 :] = 0
                self.count.steps += 1
                answers[i], finished = self._extend(self._prompts[i], answers[i], new)
                if not finished:
                    pending[i] = new[-1:]
                    going_on.append(row)
            if len(going_on) < len(rows):
                rows = [rows[row] for row in going_on]
                if rows:
                    kept = torch.tensor(going_on, device=device)
                    cache.batch_select_indices(kept)
                    mask = mask[kept]
        return answers

    def _no_columns(self, rows: int) -> Tensor:
        """The attention mask over an empty cache: (rows, columns)."""
        return torch.zeros(rows, 0, dtype=torch.long, device=self.model.device)

    def _prefill(self, prefixes: Sequence[Tokens]) -> tuple[DynamicCache, Tensor]:
        """Run prefixes through the model; their keys and values, padded on the left, and the mask over them.

        On a CPU those of each length go by themselves: without padding attention needs no mask, and computes the half
        that is not hidden.
        """
        by_length: dict[int, list[int]] = {}
        for row, prefix in enumerate(prefixes):
            by_length.setdefault(len(prefix), []).append(row)
        if 0 in by_length or self.model.device.type != "cpu":
            by_length = {max(by_length): list(range(len(prefixes)))}
        caches, masks = [], []
        for rows in by_length.values():
            cache = DynamicCache(config=self.model.config)
            part = [prefixes[row] for row in rows]
            masks.append(self._forward(part, [()] * len(part), cache, self._no_columns(len(part)))[1])
            caches.append(cache)
        if len(caches) == 1:
            return caches[0], masks[0]
        longest = max(by_length)
        order = [row for rows in by_length.values() for row in rows]
        back = torch.tensor(sorted(range(len(order)), key=order.__getitem__))

        def together(parts: Sequence[Tensor], columns: int) -> Tensor:
            """Parts of shape (rows, ..., columns, ...) as one, in the order of the prefixes."""
            behind = (0, 0) * (parts[0].dim() - 1 - columns)
            return torch.cat([nn.functional.pad(t, (*behind, longest - t.shape[columns], 0)) for t in parts])[back]

        layers: tuple[Any, ...]  # the same layer of each of the caches
        for layers in zip(*(cache.layers for cache in caches), strict=True):
            layers[0].keys = together([layer.keys for layer in layers], 2)
            layers[0].values = together([layer.values for layer in layers], 2)
        return caches[0], together(masks, 1)

    def _drafted(self, i: int, so_far: Tokens, drafts: Sequence[Tokens] | None) -> Tokens:
        prompt, first = self._prompts[i], drafts[i] if drafts is not None else None
        ahead = prompt.recall(so_far, first) if self._draft else ()
        return ahead or (prompt.look_up(so_far) if self._look_up else ())

    def _forward(
        self, inputs: Sequence[Tokens], drafts: Sequence[Tokens], cache: DynamicCache, mask: Tensor
    ) -> tuple[list[Tokens], Tensor]:
        """One forward pass over what is new: padding, each row's input, its draft, padding.

        Returns:
            For each row the most probable token after its input, and after each token of its draft; and the attention
            mask over the cache, (rows, columns), which then includes what was new.
        """
        before, behind = max(map(len, inputs)), max(map(len, drafts))
        new = torch.full((len(inputs), before + behind), self._pad)
        new_mask = torch.zeros_like(new)
        for row, (tokens, draft) in enumerate(zip(inputs, drafts, strict=True)):
            start, end = before - len(tokens), before + len(draft)
            new[row, start:end] = torch.tensor(tokens + draft)
            new_mask[row, start:end] = 1
        mask = torch.cat([mask, new_mask.to(mask.device)], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        logits = self.model(
            input_ids=new.to(mask.device),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=behind + 1 if self._few_logits else 0,
        ).logits  # (rows, behind + 1, vocabulary)
        return [tuple(row) for row in logits[:, -(behind + 1) :].argmax(-1).tolist()], mask

    def _extend(self, prompt: _Prompt, so_far: Tokens, new: Tokens) -> tuple[Tokens, bool]:
        """The answer with the new tokens, up to the one that ends it; and whether one does."""
        known = any(answer[: len(so_far) + len(new) - 1] == so_far + new[:-1] for answer in prompt.past)
        for n in range(len(new) if known else 1, len(new) + 1):  # what an answer of the past began with did not end it
            if self._finished(prompt, so_far + new[:n]):
                return so_far + new[:n], True
        return so_far + new, False

    def _finished(self, prompt: _Prompt, answer: Tokens) -> bool:
        """Whether the answer's last token ends it."""
        if answer[-1] in self._ends or len(answer) >= prompt.max_new:
            return True
        return any(stop in self.lm.tokenizer.decode(answer[-window:]) for stop, window in prompt.stops)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    return next((k for k in range(n) if a[k] != b[k]), n)


def _halves(batch: list[_Group]) -> list[list[_Group]]:
    """The same prompts in two batches; a single group gives up its prefix's being shared by all of it."""
    if len(batch) == 1:
        prefix, members = batch[0].prefix, batch[0].members
        middle = (len(members) + 1) // 2
        return [[_Group(prefix, members[:middle])], [_Group(prefix, members[middle:])]]
    middle = len(batch) // 2
    return [batch[:middle], batch[middle:]]
