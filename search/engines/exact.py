"""The answers that ``HFLM.generate_until`` would give, in less time: for asking the same questions over and over.

A search asks a fixed set of prompts under hundreds of factors. What that leaves to save, without changing an answer:

* prompts are tokenised once;
* a beginning that several prompts share (the records of a question that is asked at several positions) is prefilled
  once. Its keys and values are there once, and the prompts that share them go through the model in one row, each of
  their tokens behind a mask that shows it the beginning and its own prompt;
* a prefill ends with the keys and values of the last layer: what that layer would make of them is of no use;
* keys and values are written in place, with room for the whole answer, instead of being copied token after token;
* what followed the last two tokens when they last stood in the prompt or in the answer is put behind the answer and
  checked, a dozen tokens in a forward pass (speculative decoding, arXiv 2211.17192, with references as in arXiv
  2304.04487): a wrong value is mostly some other key's, and an answer that rambles repeats itself;
* batches are filled up to a number of tokens, which is halved when memory runs out.

Greedy decoding is what the model says is most probable next, and each of these asks the model for just that, so the
answers are those of ``hf`` at batch size 1. Sums are rounded in another order, as they are at any other batch size, so
a tie between two tokens, to the last bits, may fall the other way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from lpes_eval import rope
from lpes_eval.errors import UserError
from search.engines.kv_buffer import Buffer, Stored
from search.engines.limits import encode, room_for_prompt
from search.engines.prompts import AHEAD, Group, Prompt, Tokens, common, halves, share

PREFILLED = 2048
"""Tokens that are prefilled at once on a CPU, where more do not go faster."""


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
class _State:
    """How far a prompt has been answered.

    Attributes:
        lane: its number in its row.
        pending: tokens that the model has not seen yet.
        held: tokens behind the row's prefix that it has.
        answer: the answer so far.
    """

    lane: int
    pending: Tokens
    held: int = 0
    answer: Tokens = ()


@dataclass
class _Row:
    """Prompts (by their number) that go through the model together, behind a prefix of some length."""

    prefix: int
    states: dict[int, _State]


class ExactEngine:
    """Answers a fixed list of greedy ``generate_until`` requests, as often as it is asked to.

    Args:
        lm: an lm-eval model for which ``search.engines.reason_against`` knows none.
        requests: lm-eval's instances.
        share_prefixes: prefill a common beginning once.
        look_up: check what followed the same two tokens before, in the prompt or in the answer.
        tokens_per_batch: tokens that are worked on at once; halved whenever memory runs out. By default 65,536 on a
            GPU and 16,384 elsewhere.

    Attributes:
        count: what answering has cost so far.
        cut: whether each prompt lost its beginning, as it does not fit the model's window beside its answer.
        num_layers: layers of the model.
        unended: requests whose last answer did not end by itself, but at the most tokens that it may have.
    """

    def __init__(
        self,
        lm: HFLM,
        requests: Sequence[Any],
        *,
        share_prefixes: bool = True,
        look_up: bool = True,
        tokens_per_batch: int | None = None,
    ) -> None:
        self.lm, self.model = lm, lm.model
        self.count = Count()
        self.unended: set[int] = set()
        self.tokens_per_batch = tokens_per_batch or (65_536 if lm.device.type == "cuda" else 16_384)
        self._look_up = look_up
        self.num_layers = len(rope.find_decoder(lm.model).layers)
        end = self.model.generation_config.eos_token_id
        self._ends = set(end if isinstance(end, list) else [] if end is None else [end])
        self._end_text = lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
        self._pad = lm.tokenizer.pad_token_id or 0
        self._repeats = [request.repeats or 1 for request in requests]
        self._prompts = [self._prepare(*request.args) for request in requests]
        self.cut = [prompt.cut for prompt in self._prompts]
        self._groups = share(self._prompts) if share_prefixes else [Group((), [i]) for i in range(len(self._prompts))]
        for group in self._groups:
            if len(group.members) == 1:  # its last token is what it asks about; all before can be prefilled
                group.prefix = self._prompts[group.members[0]].tokens[:-1]
        self._groups.sort(key=lambda g: -max(len(self._prompts[i].tokens) for i in g.members))

    def _prepare(self, context: str, arguments: dict[str, Any]) -> Prompt:
        asked = normalize_gen_kwargs(arguments, self.lm.max_gen_toks)
        max_new = asked["max_gen_toks"]
        room = room_for_prompt(self.lm, max_new)
        whole = encode(self.lm, context)
        kept = encode(self.lm, context, truncation=True) if self.lm.truncation else whole
        kept = kept[-room:]  # as HFLM
        until = handle_stop_sequences(list(asked["until"]), eos=self._end_text)
        tokens_of = self.lm.tokenizer.encode
        stops = [(text, len(tokens_of(text, add_special_tokens=False)) + 2) for text in until]  # MultiTokenEOSCriteria
        return Prompt(tuple(kept), until, stops, max_new, cut=len(kept) < len(whole))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(prompt.tokens) for prompt in self._prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest answer it may get."""
        return max(len(prompt.tokens) + prompt.max_new for prompt in self._prompts)

    def set_factors(self, factors: Sequence[float]) -> None:
        """Answer with these factors from now on, one a layer."""
        rope.apply(self.model, factors)

    def answer(self, order: Sequence[Sequence[int]] | None = None) -> Iterator[dict[int, list[str]]]:
        """Answer all requests, batch by batch: each request's number and its responses.

        Args:
            order: the requests by number, as they are to be answered: some together, then the next; by default the
                longest first.
        """
        for batch in self.answer_tokens(order):
            yield {i: [self.text(i, tokens)] * self._repeats[i] for i, tokens in batch.items()}

    def answer_tokens(self, order: Sequence[Sequence[int]] | None = None) -> Iterator[dict[int, Tokens]]:
        """As ``answer``, but each answer's tokens, with what ended it."""
        queue = list(self._batches(self._groups if order is None else self._in_order(order)))
        while queue:
            batch = queue.pop(0)
            answers: dict[int, Tokens] | None = None
            with contextlib.suppress(torch.OutOfMemoryError):
                answers = self._answer_batch(batch)
            if answers is None:  # only here, outside, has what it took been given back
                if sum(len(row.members) for row in batch) == 1:
                    tokens = len(self._prompts[batch[0].members[0]].tokens)
                    raise UserError(
                        f"not even one prompt of {tokens} tokens fits the memory of {self.lm.device}; take a smaller "
                        "dtype (--model_args dtype=...), another device or a task with shorter prompts"
                    )
                self.tokens_per_batch = max(1, self.tokens_per_batch // 2)
                torch.cuda.empty_cache()
                queue = [*halves(batch), *queue]
                continue
            for i in answers:
                self.count.answers += 1
                self.count.tokens += len(answers[i])
                (self.unended.discard if self._ended(self._prompts[i], answers[i]) else self.unended.add)(i)
            yield answers

    def _in_order(self, order: Sequence[Sequence[int]]) -> list[Group]:
        """The groups in parts, those together that share a prefix and are asked for together."""
        group_of = {i: g for g, group in enumerate(self._groups) for i in group.members}
        parts: list[Group] = []
        for together in order:
            of: dict[int, list[int]] = {}
            for i in together:
                of.setdefault(group_of[i], []).append(i)
            parts += [Group(self._groups[g].prefix, members) for g, members in of.items()]
        return parts

    def text(self, i: int, answer: Tokens) -> str:
        """Request ``i``'s answer as ``generate_until`` gives it."""
        return postprocess_generated_text(self.lm.tok_decode(list(answer)), self._prompts[i].until, None)

    def _batches(self, groups: Sequence[Group]) -> Iterator[list[Group]]:
        """Groups in order, in rows, as many at a time as the budget allows, at least one row."""
        batch: list[Group] = []
        prefix = behind = lanes = 0
        for group in groups:  # mostly the longest come first, so memory runs out early or never
            for row in self._rows(group):
                prefix, behind, lanes = map(max, (prefix, behind, lanes), self._room(row))
                if batch and (len(batch) + 1) * (prefix + behind * lanes) > self.tokens_per_batch:
                    yield batch
                    batch, (prefix, behind, lanes) = [], self._room(row)
                batch.append(row)
        if batch:
            yield batch

    def _rows(self, group: Group) -> Iterator[Group]:
        """The group in parts that go through the model in a row each.

        A token is masked from what is its neighbours', and attention computes that all the same; so what all of them
        may have is not to be more than their prefix.
        """
        lanes = max(1, len(group.prefix) // self._room(group)[1])
        for k in range(0, len(group.members), lanes):
            yield Group(group.prefix, group.members[k : k + lanes])

    def _room(self, row: Group) -> tuple[int, int, int]:
        """Tokens of a row's prefix, tokens that may come behind it of each prompt, and how many prompts there are."""
        longest = max(len(self._prompts[i].tokens) + self._prompts[i].max_new for i in row.members)
        return len(row.prefix), longest - len(row.prefix), len(row.members)

    def _answer_batch(self, groups: Sequence[Group]) -> dict[int, Tokens]:
        lm = self.lm
        with (
            torch.inference_mode(),
            torch.autocast(lm.device.type, lm.mixed_precision_dtype, lm.mixed_precision_dtype is not None),
        ):
            return self._decode(groups)

    def _decode(self, groups: Sequence[Group]) -> dict[int, Tokens]:
        room = zip(*map(self._room, groups), strict=True)
        buffer = Buffer(self.model.config, len(groups), *map(max, room))
        self._prefill(groups, buffer)
        rows = []  # in the buffer's order, each with the prompts still being answered
        for group in groups:
            n = len(group.prefix)
            states = {i: _State(m, self._prompts[i].tokens[n:]) for m, i in enumerate(group.members)}
            self.count.prefilled += sum(len(state.pending) for state in states.values())
            rows.append(_Row(n, states))

        answers: dict[int, Tokens] = {}
        while rows:
            asked = [(i, state) for row in rows for i, state in row.states.items()]
            ahead = {i: self._drafted(i, state.answer) for i, state in asked}
            predicted = self._forward(rows, ahead, buffer)
            self.count.forwards += 1
            for row in reversed(range(len(rows))):
                states = rows[row].states
                for i, state in list(states.items()):
                    draft = ahead[i]
                    accepted = common(draft, predicted[i])
                    new = draft if draft and accepted == len(draft) else (*draft[:accepted], predicted[i][accepted])
                    self.count.steps += 1
                    state.held += len(state.pending) + len(new) - 1
                    state.pending = new[-1:]
                    state.answer, finished = self._extend(self._prompts[i], state.answer, new)
                    if finished:
                        answers[i] = states.pop(i).answer
                if not states:
                    rows[row] = rows[-1]
                    rows.pop()
                    buffer.drop(row)
        return answers

    def _prefill(self, rows: Sequence[Group], buffer: Buffer) -> None:
        """Run the rows' prefixes through the model, each once, as far as their keys and values go.

        Padding stands behind them, where they do not see it, so attention needs no mask.
        """
        of: dict[Tokens, list[int]] = {}
        for number, row in enumerate(rows):
            of.setdefault(row.prefix, []).append(number)
            self.count.shared += len(row.prefix) * len(row.members)
        of.pop((), None)
        device = self.model.device
        waiting = sorted(of, key=len, reverse=True)
        while waiting:
            longest = len(waiting[0])
            some = waiting[: max(1, PREFILLED // longest)] if device.type == "cpu" else waiting
            waiting = waiting[len(some) :]
            tokens = torch.full((len(some), longest), self._pad)
            for source, prefix in enumerate(some):
                tokens[source, : len(prefix)] = torch.tensor(prefix)
                self.count.prefilled += len(prefix)
                self.count.shared -= len(prefix)
            pairs = [(source, target) for source, prefix in enumerate(some) for target in of[prefix]]
            buffer.place.copies, buffer.place.missing = torch.tensor(pairs, device=device).T, len(buffer.own)
            with contextlib.suppress(Stored):
                self.model(
                    input_ids=tokens.to(device),
                    position_ids=torch.arange(longest, device=device)[None],
                    past_key_values=buffer,
                    use_cache=True,
                    logits_to_keep=1,
                )
        buffer.place.copies = None

    def _drafted(self, i: int, so_far: Tokens) -> Tokens:
        prompt = self._prompts[i]
        return prompt.look_up(so_far)[: min(AHEAD, prompt.max_new - len(so_far))] if self._look_up else ()

    def _forward(self, rows: Sequence[_Row], ahead: dict[int, Tokens], buffer: Buffer) -> dict[int, Tokens]:
        """One forward pass over what is new: each prompt's pending tokens and its draft.

        The last token of a draft is only compared, not fed; a prompt without a draft is asked for one token.

        Returns:
            For each prompt the most probable token after what was pending, and after each token fed of its draft.
        """
        queries: list[list[tuple[int, int, int]]] = []  # for each row: token, lane, how far behind the prefix
        kept = 0
        for row in rows:
            unasked, asked = [], []
            for i, state in row.states.items():
                fed = state.pending + ahead[i][:-1]
                new = [(token, state.lane, n) for n, token in enumerate(fed, state.held)]
                unasked += new[: len(state.pending) - 1]
                asked += new[len(state.pending) - 1 :]
            queries.append(unasked + asked)
            kept = max(kept, len(asked))
        longest = max(map(len, queries))
        padding = (self._pad, 0, -1)
        table = torch.tensor([[padding] * (longest - len(row)) + row for row in queries], device=self.model.device)
        tokens, lane, n = table.unbind(-1)  # (rows, queries) each
        prefix = torch.tensor([row.prefix for row in rows], device=table.device)[:, None]
        padded = n < 0

        place, lanes = buffer.place, buffer.lanes
        place.written = (buffer.prefix + n * lanes + lane).masked_fill(padded, place.columns - 1)
        place.seen = buffer.prefix + (max(query[2] for row in queries for query in row) + 1) * lanes
        behind = torch.arange(place.seen - buffer.prefix, device=table.device)
        own = (behind % lanes == lane[..., None]) & (behind // lanes <= n[..., None])
        shared = (torch.arange(buffer.prefix, device=table.device) < prefix)[:, None].expand(-1, longest, -1)
        visible = torch.cat([shared, own], dim=-1) | padded[..., None]  # padding sees all, as it has to see something
        shown, hidden = torch.tensor([0, -torch.inf], dtype=buffer.dtype or self.model.dtype, device=table.device)
        logits = self.model(
            input_ids=tokens,
            attention_mask=torch.where(visible, shown, hidden)[:, None],
            position_ids=(prefix + n).masked_fill(padded, 0),
            past_key_values=buffer,
            use_cache=True,
            logits_to_keep=kept,
        ).logits
        found: dict[int, Tokens] = {}
        for row, best in zip(rows, logits[:, -kept:].argmax(-1).tolist(), strict=True):
            end = len(best) - sum(len(ahead[i][:-1]) + 1 for i in row.states)
            for i in row.states:
                start, end = end, end + len(ahead[i][:-1]) + 1
                found[i] = tuple(best[start:end])
        return found

    def _extend(self, prompt: Prompt, so_far: Tokens, new: Tokens) -> tuple[Tokens, bool]:
        """The answer with the new tokens, up to the one that ends it; and whether one does."""
        for n in range(1, len(new) + 1):
            if self._finished(prompt, so_far + new[:n]):
                return so_far + new[:n], True
        return so_far + new, False

    def _finished(self, prompt: Prompt, answer: Tokens) -> bool:
        """Whether the answer's last token is its last one."""
        return len(answer) >= prompt.max_new or self._ended(prompt, answer)

    def _ended(self, prompt: Prompt, answer: Tokens) -> bool:
        """Whether the answer's last token ends it."""
        if answer[-1] in self._ends:
            return True
        return any(stop in self.lm.tokenizer.decode(answer[-window:]) for stop, window in prompt.stops)
