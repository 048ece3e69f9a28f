"""The answers that ``HFLM.generate_until`` would give, in less time: for asking the same questions over and over.

A search asks a fixed set of prompts under hundreds of factors. What that leaves to save, without changing an answer:

* prompts are tokenised once;
* a beginning that several prompts share (the records of a question that is asked at several positions) is prefilled
  once. The prompts that share it go through the model in one row, each of their tokens behind a mask that shows it the
  beginning and its own prompt;
* a prefill ends with the keys and values of the last layer: what that layer would make of them is of no use;
* on a CPU, a prefill begins with the first layer whose factor has changed (``lpes_eval.engine.layer_outputs``);
* keys and values are written in place, with room for the whole answer, instead of being copied token after token;
* on a GPU, a decoding step is recorded once and replayed, so that the GPU does not wait for Python at each operation;
* batches are filled up to a number of tokens, which is lowered when memory runs out.

Greedy decoding is what the model says is most probable next, and each of these asks the model for just that, so the
answers are those of ``hf`` at batch size 1. Sums are rounded in another order, as they are at any other batch size, so
a tie between two tokens, to the last bits, may fall the other way.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from transformers.cache_utils import DynamicCache

from lpes_eval import rope
from lpes_eval.engine import layer_outputs
from lpes_eval.engine.harness import HarnessEngine
from lpes_eval.engine.kv_buffer import Buffer, Stored
from lpes_eval.engine.limits import encode, no_number, room_for_prompt
from lpes_eval.errors import UserError

Tokens = tuple[int, ...]

PREFILLED, PREFILLED_ON_A_GPU = 2048, 32_768
"""Tokens that are prefilled at once: more do not go faster, and take memory."""
BATCH, BATCH_ON_A_GPU = 65_536, 262_144
"""Tokens that are decoded at once, if memory allows. A GPU takes about as long for a step of many prompts as of few."""
SHORTEST_PREFIX, SHARED = 16, 7 / 8
"""Tokens that prompts must have in common before it is worth splitting them, and the share of each that these must be:
behind a prefix attention has a mask, and on a CPU a token there took seven times as long as one in a prefix."""


@dataclass
class Count:
    """What answering cost: tokens of answers and of prompts.

    Of these, ``prefilled`` went through the model, and ``shared`` did not have to: their prefix was there already.
    ``reused`` is what was saved of the former: tokens, times the share of the layers that were not run for them.
    """

    tokens: int = 0
    prefilled: int = 0
    shared: int = 0
    reused: float = 0.0


@dataclass
class Group:
    """Prompts (by their number) that begin with the same tokens, and go through the model in one row."""

    prefix: Tokens
    members: list[int]


@dataclass
class Prompt:
    """One request, tokenised; each stop with the number of last tokens in which lm-eval looks for it."""

    tokens: Tokens
    until: list[str]
    stops: list[tuple[str, int]]
    max_new: int


@dataclass
class _Lane:
    """How far a prompt has been answered: the model has ``held`` tokens behind the prefix, ``pending`` come next."""

    prompt: int
    lane: int
    pending: Tokens
    held: int = 0
    answer: Tokens = ()


class ExactEngine(HarnessEngine):
    """Answers a fixed list of greedy ``generate_until`` requests, as often as it is asked to.

    Args:
        lm: an lm-eval model for which ``lpes_eval.engine.limits.reason_against`` knows none.
        requests: lm-eval's instances.
        share_prefixes: prefill a common beginning once.
        reuse_layers: on a CPU, do not run layers whose outputs are known.
        record_steps: on a GPU, replay decoding steps as CUDA graphs.
        tokens_per_batch: tokens that are worked on at once, by default ``BATCH``; lowered whenever memory runs out.
        prompts_per_batch: the same in prompts of the longest size.

    Attributes:
        count: what answering has cost so far.
    """

    def __init__(
        self,
        lm: HFLM,
        requests: Sequence[Any],
        *,
        share_prefixes: bool = True,
        reuse_layers: bool = True,
        record_steps: bool = True,
        tokens_per_batch: int | None = None,
        prompts_per_batch: int | None = None,
    ) -> None:
        super().__init__(lm, requests)
        self.model, self.count = lm.model, Count()
        on_cpu = lm.device.type == "cpu"
        self._prefilled = PREFILLED if on_cpu else PREFILLED_ON_A_GPU
        if not on_cpu:  # of so many batches each would take nearly as long as one of all prompts
            self.looks = 1
        # A GPU prefills several prompts at once, hardly ever the same together again, and has no memory to spare.
        reuse_layers &= on_cpu and len(DynamicCache(config=self.model.config).layers) == self.num_layers
        self._outputs = layer_outputs.of(lm.model) if reuse_layers else None
        one_gpu = len({p.device for p in self.model.parameters()}) == 1 and lm.device.type == "cuda"
        self._records = record_steps and one_gpu and self.model._can_compile_fullgraph
        end = self.model.generation_config.eos_token_id
        self._ends = set(end if isinstance(end, list) else [end])
        self._pad = lm.tokenizer.pad_token_id or 0
        self._prompts = [self._prepare(*request.args) for request in requests]
        prompts = [prompt.tokens for prompt in self._prompts]
        self.prompt_tokens = sum(map(len, prompts))
        longest = max(len(prompt.tokens) + prompt.max_new for prompt in self._prompts)
        own_size = (prompts_per_batch or 0) * longest
        self.tokens_per_batch = tokens_per_batch or own_size or (BATCH if on_cpu else BATCH_ON_A_GPU)
        self._groups = share(prompts) if share_prefixes else [Group(p[:-1], [i]) for i, p in enumerate(prompts)]
        self._groups.sort(key=lambda g: -max(len(prompts[i]) for i in g.members))
        self._group_of = {i: group for group in self._groups for i in group.members}

    def _prepare(self, context: str, arguments: dict[str, Any]) -> Prompt:
        asked = normalize_gen_kwargs(arguments, self.lm.max_gen_toks)
        room = room_for_prompt(self.lm, asked["max_gen_toks"])
        kept = encode(self.lm, context, truncation=self.lm.truncation)[-room:]  # as HFLM
        end = self.lm.tok_decode(self.lm.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(list(asked["until"]), eos=end)
        tokens_of = self.lm.tokenizer.encode
        stops = [(text, len(tokens_of(text, add_special_tokens=False)) + 2) for text in until]  # MultiTokenEOSCriteria
        return Prompt(tuple(kept), until, stops, asked["max_gen_toks"])

    def answer(
        self, order: Sequence[Sequence[int]] | None = None, may_stop: bool = False
    ) -> Iterator[dict[int, list[str]]]:
        """As lm-eval's own loop; without an order the longest first, so that memory runs out early or never."""
        groups = self._groups if order is None else [group for some in order for group in self._parts(some)]
        waiting = [row for group in groups for row in self._rows(group)]
        most = math.ceil(len(waiting) / (self.looks if may_stop else 1))
        while waiting:
            size = 1
            while size < min(len(waiting), most) and self._tokens(waiting[: size + 1]) <= self.tokens_per_batch:
                size += 1
            batch, waiting = waiting[:size], waiting[size:]
            answers: dict[int, Tokens] | None = None
            with contextlib.suppress(torch.OutOfMemoryError):
                answers = self._answer(batch)
            if answers is None:  # only here, outside, has what it took been given back
                torch.cuda.empty_cache()
                self.tokens_per_batch = self._tokens(batch) // 2
                waiting = [*(batch if size > 1 else self._halves(batch[0])), *waiting]
                continue
            yield {i: self._responses(i, tokens) for i, tokens in answers.items()}

    def _responses(self, i: int, answer: Tokens) -> list[str]:
        """What lm-eval makes of the answer to prompt ``i``; whether it ended by itself is noted."""
        (self.unended.discard if self._ended(i, answer) else self.unended.add)(i)
        text = postprocess_generated_text(self.lm.tok_decode(list(answer)), self._prompts[i].until, None)
        return [text] * (self._requests[i].repeats or 1)

    def _parts(self, numbers: Sequence[int]) -> list[Group]:
        """These prompts, those together that share a prefix."""
        parts: dict[Tokens, list[int]] = {}
        for i in numbers:
            parts.setdefault(self._group_of[i].prefix, []).append(i)
        return [Group(prefix, members) for prefix, members in parts.items()]

    def _rows(self, group: Group) -> Iterator[Group]:
        """The group in parts that go through the model in a row each.

        A token is masked from what is its neighbours', and attention computes that all the same; so what all of them
        may have is not to be more than their prefix.
        """
        _, prefix, behind, _ = self._room([group])
        lanes = max(1, prefix // behind)
        for k in range(0, len(group.members), lanes):
            yield Group(group.prefix, group.members[k : k + lanes])

    def _halves(self, row: Group) -> list[Group]:
        middle = len(row.members) // 2
        if not middle:
            raise UserError(
                f"not even one prompt of {len(self._prompts[row.members[0]].tokens)} tokens fits the memory of "
                f"{self.lm.device}; take a smaller dtype (--model_args dtype=...), another device or a task with "
                "shorter prompts"
            )
        return [Group(row.prefix, some) for some in (row.members[:middle], row.members[middle:])]

    def _room(self, rows: Sequence[Group]) -> tuple[int, int, int, int]:
        """Rows of a batch, tokens of their prefix, tokens that may come behind it of each prompt, prompts of a row."""
        asked = [(self._prompts[i], len(row.prefix)) for row in rows for i in row.members]
        behind = max(len(prompt.tokens) + prompt.max_new - prefix for prompt, prefix in asked)
        return len(rows), max(len(row.prefix) for row in rows), behind, max(len(row.members) for row in rows)

    def _tokens(self, rows: Sequence[Group]) -> int:
        n, prefix, behind, lanes = self._room(rows)
        return n * (prefix + behind * lanes)

    def _answer(self, rows: Sequence[Group]) -> dict[int, Tokens]:
        """Each prompt's answer, with the token that ended it."""
        lm = self.lm
        buffer, prefilled = Buffer(self.model.config, *self._room(rows)), self.count.prefilled
        with (
            torch.inference_mode(),
            torch.autocast(lm.device.type, lm.mixed_precision_dtype, lm.mixed_precision_dtype is not None),
        ):
            self._prefill(rows, buffer)
            answers = self._decode(rows, buffer)
        self.count.shared += sum(len(self._prompts[i].tokens) for i in answers) - (self.count.prefilled - prefilled)
        self.count.tokens += sum(map(len, answers.values()))
        return answers

    def _prefill(self, rows: Sequence[Group], buffer: Buffer) -> None:
        """Run the rows' prefixes through the model, each once, as far as their keys and values go.

        Padding stands behind them, where they do not see it, so attention needs no mask.
        """
        targets: dict[Tokens, list[int]] = {}
        for number, row in enumerate(rows):
            if row.prefix:
                targets.setdefault(row.prefix, []).append(number)
        device = self.model.device
        waiting = sorted(targets, key=len, reverse=True)
        while waiting:
            longest = len(waiting[0])
            size = max(1, self._prefilled // longest)
            some, waiting = waiting[:size], waiting[size:]
            self.count.prefilled += sum(map(len, some))
            buffer.copies = [(source, target) for source, prefix in enumerate(some) for target in targets[prefix]]
            in_force = rope.applied(self.model) or [1.0] * self.num_layers
            reused = self._outputs.reused(tuple(some), in_force, buffer) if self._outputs else contextlib.nullcontext(0)
            with contextlib.suppress(Stored), reused as known:
                self.count.reused += sum(map(len, some)) * known / self.num_layers
                self.model(
                    input_ids=torch.tensor([p + (self._pad,) * (longest - len(p)) for p in some], device=device),
                    position_ids=torch.arange(longest, device=device)[None],
                    **rope.with_cache(self.model, buffer),
                    use_cache=True,
                    logits_to_keep=1,
                )
        buffer.copies = None

    def _decode(self, rows: Sequence[Group], buffer: Buffer) -> dict[int, Tokens]:
        prefixes = [len(row.prefix) for row in rows]
        asked = [  # for each row of the buffer the prompts still being answered
            [_Lane(i, lane, self._prompts[i].tokens[len(row.prefix) :]) for lane, i in enumerate(row.members)]
            for row in rows
        ]
        self.count.prefilled += sum(len(lane.pending) for lanes in asked for lane in lanes)
        answers: dict[int, Tokens] = {}
        while asked:
            best = self._forward(prefixes, asked, buffer)
            for lanes, tokens in zip(asked, best, strict=True):
                for lane, token in zip(lanes, tokens, strict=True):
                    lane.held += len(lane.pending)
                    lane.pending = (token,)
                    lane.answer += (token,)
                    if len(lane.answer) >= self._prompts[lane.prompt].max_new or self._ended(lane.prompt, lane.answer):
                        answers[lane.prompt] = lane.answer
                lanes[:] = [lane for lane in lanes if lane.prompt not in answers]
            answered = [row for row, lanes in enumerate(asked) if not lanes]
            if self._records and len(answered) < len(asked) / 2:
                continue  # with fewer rows the step would have to be recorded again
            for row in reversed(answered):
                buffer.drop(row)
                asked[row], prefixes[row] = asked[-1], prefixes[-1]
                asked.pop()
                prefixes.pop()
        return answers

    def _forward(self, prefixes: list[int], asked: list[list[_Lane]], buffer: Buffer) -> list[list[int]]:
        """One forward pass over what is pending: for each row, the most probable next token of each of its prompts."""
        queries: list[list[tuple[int, int, int]]] = []  # for each row: token, lane, how far behind the prefix
        for lanes in asked:
            new = [[(token, lane.lane, n) for n, token in enumerate(lane.pending, lane.held)] for lane in lanes]
            queries.append([query for some in new for query in some[:-1]] + [some[-1] for some in new])
        longest, kept = max(map(len, queries)), max(map(len, asked))
        seen = buffer.prefix + (max(query[2] for row in queries for query in row) + 1) * buffer.lanes
        if may_record := self._records and longest <= buffer.lanes:  # then the next steps have the same shape
            longest, kept, seen = buffer.lanes, buffer.lanes, buffer.columns
        queries = [[(self._pad, 0, -1)] * (longest - len(row)) + row for row in queries]
        rows = [[(*query, prefix) for query in row] for row, prefix in zip(queries, prefixes, strict=True)]
        table = torch.tensor(rows, device=self.model.device)
        if may_record and buffer.recorded is not None:
            found = buffer.recorded(table)
        else:
            step = functools.partial(self._step, kept=kept, seen=seen, buffer=buffer)
            found = step(table)
            if may_record:
                buffer.recorded = record(step, table)
                self._records = buffer.recorded is not None
        highest, best = found.tolist()
        if any(math.isnan(value) for row, lanes in zip(highest, asked, strict=True) for value in last(row, lanes)):
            raise no_number(self.factors)
        return [[int(token) for token in last(row, lanes)] for row, lanes in zip(best, asked, strict=True)]

    def _step(self, table: torch.Tensor, kept: int, seen: int, buffer: Buffer) -> torch.Tensor:
        """The highest logit and its token, (2, rows, kept), for the last queries of each row.

        ``table`` is (rows, queries, 4): a token, its lane, how far behind its row's prefix it stands (-1: padding), and
        the tokens of that prefix. ``seen`` columns of the buffer can be seen.
        """
        tokens, lane, n, prefix = table.unbind(-1)  # (rows, queries) each
        padded = n < 0
        buffer.written = (buffer.prefix + n * buffer.lanes + lane).masked_fill(padded, buffer.columns - 1)
        buffer.seen = seen
        logits = self.model(
            input_ids=tokens,
            attention_mask=self._mask(prefix, lane, n, buffer),
            position_ids=(prefix + n).masked_fill(padded, 0),
            **rope.with_cache(self.model, buffer),
            use_cache=True,
            logits_to_keep=kept,
        ).logits
        highest, best = logits[:, -kept:].max(-1)
        return torch.stack((highest.float(), best.float()))  # together, as a GPU waits for each copy

    def _mask(self, prefix: torch.Tensor, lane: torch.Tensor, n: torch.Tensor, buffer: Buffer) -> torch.Tensor:
        """What each token sees, (rows, 1, queries, columns): its row's prefix, and its own prompt up to itself."""
        column = torch.arange(buffer.seen, device=n.device)
        behind = column - buffer.prefix
        lane, n, prefix = lane[..., None], n[..., None], prefix[..., None]
        own = (behind >= 0) & (behind % buffer.lanes == lane) & (behind // buffer.lanes <= n)
        visible = (column < prefix) | own | (n < 0)  # padding sees all, as it has to see something
        dtype = next((keys.dtype for keys, _ in buffer.held.values()), self.model.dtype)  # autocast has its own
        return torch.zeros(visible.shape, dtype=dtype, device=n.device).masked_fill(~visible, -torch.inf)[:, None]

    def _ended(self, i: int, answer: Tokens) -> bool:
        """Whether the last token of prompt ``i``'s answer ends it."""
        decode = self.lm.tokenizer.decode
        return answer[-1] in self._ends or any(
            stop in decode(answer[-window:]) for stop, window in self._prompts[i].stops
        )


def last(row: list[Any], lanes: Sequence[_Lane]) -> list[Any]:
    """What belongs to a row's prompts; padding stands before it."""
    return row[len(row) - len(lanes) :]


def record(step: Callable[[torch.Tensor], torch.Tensor], table: torch.Tensor) -> Callable | None:
    """A step as a CUDA graph, which does the same with tables of the same shape; None where it cannot be recorded.

    The step has to have run before, as nothing may be loaded while it is recorded.
    """
    table, graph = table.clone(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            found = step(table)
    except RuntimeError:  # the model waits for the GPU, or there is no memory left
        return None

    def replay(new: torch.Tensor) -> torch.Tensor:
        table.copy_(new)
        graph.replay()
        return found

    return replay


def share(prompts: Sequence[Tokens]) -> list[Group]:
    """Group prompts of which nearly all is a common beginning; in sorted order these are neighbours.

    A prefix never is a whole prompt: the last token is what the model is asked about.
    """
    groups: list[Group] = []
    for i in sorted(range(len(prompts)), key=lambda i: prompts[i]):
        beginning = prompts[i][:-1]
        if groups:
            last = groups[-1]
            pairs = zip(last.prefix, beginning, strict=False)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            longest = max(len(prompts[j]) for j in (i, *last.members))
            if common >= max(SHORTEST_PREFIX, SHARED * longest):
                last.prefix = beginning[:common]
                last.members.append(i)
                continue
        groups.append(Group(beginning, [i]))
    return groups
