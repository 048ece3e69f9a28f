"""Prompts by position with their reference answers, and the attention of these under several sets of factors.

Only the answer is read, token by token, with the eager attention, which hands its weights out: 32k tokens fit.
"""

from __future__ import annotations

import inspect
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lpes_eval import rope
from lpes_eval.decoder import device_of, find_decoder
from lpes_eval.errors import PromptTooLong, UnsupportedModel, UserError
from lpes_eval.factors import Factors
from lpes_eval.harness.segments import Segment, join

if TYPE_CHECKING:
    from lpes_eval.harness.task import PositionTask

REGIONS = ("beginning", "middle", "end", "gold")
"""The thirds of the tokens of the documents or records, and those of the gold one."""


@dataclass(frozen=True)
class Prompt:
    """The gold item's position in percent, all tokens, how many are the answer's, and the numbers of each region's."""

    position: float
    tokens: list[int]
    answer: int
    regions: list[list[int]]


def load(name: str, metadata: Mapping[str, Any]) -> PositionTask:
    """A task by position; ``UserError`` where there is none of this name."""
    from lpes_eval.harness.plugin import own_tasks
    from lpes_eval.harness.task import PositionTask

    manager = own_tasks(metadata)
    tasks = list(manager.load([name])["tasks"].values()) if name in manager.all_tasks else []
    if tasks and isinstance(tasks[0], PositionTask):
        return tasks[0]
    wrong = "is not by position" if tasks else "no such task"
    raise UserError(f"--task {name}: {wrong}; expected one by position, such as kv_retrieval or mdqa_pos")


def prompts(lm: Any, task: PositionTask, questions: int) -> Iterator[Prompt]:
    """The prompts of so many questions at every position; ``UserError`` for one that does not fit the window."""
    for doc in list(task.test_docs())[:questions]:
        for position in task.positions:
            answer = task.config.target_delimiter + task.written(doc, position)
            prompt = _prompt(lm, position, task.segments(doc, position), answer)
            if len(prompt.tokens) > lm.max_length:
                size = f"a prompt and its answer of {len(prompt.tokens)} tokens; the model's window is {lm.max_length}"
                way_out = "Take a shorter one (--metadata), or a longer window (--model_args max_length=)"
                raise PromptTooLong(f"{task.config.task}: {size}. {way_out}")
            yield prompt


def _prompt(lm: Any, position: float, segments: list[Segment], answer: str) -> Prompt:
    """The prompt of an instruction, items and a question, in this order."""
    text = join(segments)
    ids, starts = located(lm, text + answer)
    items = items_of(starts, segments, 0)
    within = [k for k, item in enumerate(items) if 0 <= item < len(segments) - 2]
    ends = [len(within) * third // 3 for third in range(4)]
    gold = next(i for i, item in enumerate(segments[1:]) if item.label == "gold")
    regions = [within[ends[third] : ends[third + 1]] for third in range(3)]
    regions.append([k for k in within if items[k] == gold])
    return Prompt(position, ids, sum(start >= len(text) for start in starts), regions)


def located(lm: Any, text: str) -> tuple[list[int], list[int]]:
    """The tokens of a text, with the special ones that ``hf`` adds, and where in the text each begins."""
    if not lm.tokenizer.is_fast:
        raise UserError("the model's tokenizer does not say where its tokens stand; expected a fast one")
    ids = lm.tok_encode(text)
    plain = lm.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    added = len(ids) - len(plain["input_ids"])
    if ids[added:] != plain["input_ids"]:
        raise UserError("the model's tokenizer adds tokens elsewhere than at the beginning of a text")
    return ids, [0] * added + [begin for begin, _ in plain["offset_mapping"]]


def items_of(starts: Sequence[int], segments: Sequence[Segment], before: int) -> list[int]:
    """The item of each token, by where it begins, in a prompt behind ``before`` characters; -1 before the items."""
    _, *bounds = accumulate((len(one.text) for one in segments[:-1]), initial=before)
    return [bisect_right(bounds, start) - 1 for start in starts]


def shares(model: Any, prompt: Prompt) -> dict[int, Tensor]:
    """By layer, the share of its attention that goes to each of ``REGIONS``, a mean over heads and answer tokens."""
    total: dict[int, Tensor] = {}
    for of_token in weights(model, prompt.tokens, prompt.answer):
        for h, weight in of_token.items():
            mean = weight.float().mean(dim=0)
            share = torch.stack([mean[region].sum() for region in prompt.regions]) / prompt.answer
            total[h] = total.get(h, 0) + share
    return total


def measure(
    lm: Any, sets: Mapping[str, Factors | None], prompts: Sequence[Prompt], advance: Callable[[], None]
) -> dict[str, Any]:
    """By set of factors: these, the layers with attention and their shares; ``advance`` is called after each prompt."""
    measured: dict[str, Any] = {}
    for name, factors in sets.items():
        lm.set_factors(factors)
        sums: dict[int, Tensor] = {}
        for prompt in prompts:
            for h, share in shares(lm.model, prompt).items():
                sums[h] = sums.get(h, 0) + share / len(prompts)
            advance()
        rounded = [share.cpu().double().round(decimals=5).tolist() for share in sums.values()]
        measured[name] = {"factors": lm.layer_factors, "layers": list(sums), "shares": rounded}
    lm.set_factors(None)
    return measured


@torch.no_grad()
def weights(model: Any, tokens: Sequence[int], answer: int) -> Iterator[dict[int, Tensor]]:
    """The attention with which each of the last ``answer`` tokens is chosen, by layer that has attention.

    It is what the token before pays to each token up to itself, (heads, keys), 0 beyond a layer's window.
    ``UnsupportedModel``: the family does not hand out its weights, or they are not of single tokens.
    """
    decoder = find_decoder(model)
    start, ids = len(tokens) - answer - 1, torch.tensor([list(tokens)], device=device_of(model))
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    cache = rope.cache_of(model(input_ids=ids[:, :start], use_cache=True, **few))
    for last in range(start, len(tokens) - 1):
        with _watched(decoder.layers) as seen, _eager(decoder.module):
            given = {"use_cache": True, "output_attentions": True, **rope.with_cache(model, cache)}
            output = model(input_ids=ids[:, last : last + 1], **given)
        cache = rope.cache_of(output)
        found = {h: torch.cat(parts, dim=1)[0, :, 0] for h, parts in seen.items()}
        if not found:
            raise UnsupportedModel(f"{model.config.model_type}: it does not hand out its attention weights")
        if compressed := [h for h, weight in found.items() if weight.shape[-1] > last + 1]:
            reason = f"the keys of layer {compressed[0]} are not those of single tokens"
            raise UnsupportedModel(f"{model.config.model_type}: {reason}")
        yield {h: nn.functional.pad(weight, (last + 1 - weight.shape[-1], 0)) for h, weight in found.items()}


@contextmanager
def _watched(layers: Sequence[nn.Module]) -> Iterator[dict[int, list[Tensor]]]:
    """By layer, the attention weights of one query, (1, heads, 1, keys), that modules in it hand out meanwhile."""
    seen: dict[int, list[Tensor]] = {}

    def note(h: int, module: nn.Module, args: Any, output: Any) -> None:
        for x in output[1:] if isinstance(output, tuple) else ():
            is_weight = torch.is_tensor(x) and x.ndim == 4 and x.shape[2] == 1 and x.is_floating_point()
            if is_weight and all(x is not known for known in seen.get(h, [])):  # others hand it on
                seen.setdefault(h, []).append(x)

    with ExitStack() as hooks:
        for h, layer in enumerate(layers):
            for module in layer.modules():
                if re.search("Attention|MLA", type(module).__name__):
                    hooks.enter_context(module.register_forward_hook(partial(note, h)))
        yield seen


@contextmanager
def _eager(decoder: nn.Module) -> Iterator[None]:
    """The eager attention in all of a decoder while this lasts."""
    configs: list[Any] = [module.config for module in decoder.modules() if getattr(module, "config", None)]
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation_internal = own
