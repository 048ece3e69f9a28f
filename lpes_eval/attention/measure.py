"""The attention of answers under several sets of factors, averaged over prompts, and the decay that a set makes.

A prompt is read with the attention that the model was loaded with, and the answer then token by token from the cache
with the eager one, which hands its weights out. So they are exactly those of these queries, and nothing of the size of
the prompt squared is ever made: 32k tokens fit.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lpes_eval import rope
from lpes_eval.attention.prompts import PARTS, Prompt
from lpes_eval.decoder import device_of, find_decoder
from lpes_eval.errors import UnsupportedModel
from lpes_eval.factors import Factors

POINTS = 160
"""Distances at which the decay is computed."""


def shares(model: Any, prompt: Prompt) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer, the attention that each head pays to each of ``PARTS`` and to each item, a mean over the answer.

    (heads, parts) and (heads, items). Parts add up to 1, but in families with a sink beside the keys.
    """
    total: dict[int, tuple[Tensor, Tensor]] = {}
    items = max(prompt.items) + 1
    for of_token in weights(model, prompt.tokens, prompt.answer):
        for h, weight in of_token.items():
            keys = weight.shape[-1]
            parts = torch.tensor(prompt.parts[:keys], device=weight.device)
            item = torch.tensor(prompt.items[:keys], device=weight.device) % (items + 1)  # -1 is one behind the last
            sums = [
                weight.new_zeros(len(weight), n, dtype=torch.float32).index_add_(1, of, weight.float())
                for of, n in ((parts, len(PARTS)), (item, items + 1))
            ]
            before = total.get(h, (0, 0))
            total[h] = before[0] + sums[0], before[1] + sums[1][:, :-1]
    return {h: (parts / prompt.answer, of_items / prompt.answer) for h, (parts, of_items) in total.items()}


def measure(
    lm: Any, sets: Mapping[str, Factors | None], prompts: Sequence[Prompt], note: Callable[[int], None]
) -> dict[str, Any]:
    """By name of a set of factors: the factors, and by layer and head the shares, as plain data.

    ``note`` is told how many prompts have been read, over all sets.
    """
    found: dict[str, Any] = {}
    for number, (name, factors) in enumerate(sets.items()):
        lm.set_factors(factors)
        sums: dict[int, Tensor] = {}
        gold: dict[int, Tensor] = {}
        by_position: dict[float, dict[int, list[Tensor]]] = {}
        for k, prompt in enumerate(prompts, 1):
            for h, (parts, items) in shares(lm.model, prompt).items():
                sums[h] = sums.get(h, 0) + parts / len(prompts)
                gold[h] = gold.get(h, 0) + items[:, prompt.gold] / len(prompts)
                by_position.setdefault(prompt.position, {}).setdefault(h, []).append(items)
            note(number * len(prompts) + k)
        found[name] = {
            "factors": lm.layer_factors,
            "layers": list(sums),
            "parts": [_rounded(sums[h]) for h in sums],
            "gold": [_rounded(gold[h]) for h in sums],
            "items": {
                f"{position:g}": [_rounded(torch.stack(layers[h]).mean(0)) for h in sums]
                for position, layers in by_position.items()
            },
            "decay": decay(lm.model, max(len(prompt.tokens) for prompt in prompts)),
        }
    lm.set_factors(None)
    return found


@torch.no_grad()
def decay(model: Any, furthest: int) -> dict[str, Any] | None:
    """How a score falls with the distance of query and key by rotation alone: the mean cosine of a layer's angles.

    It is the score of a query with itself as the key, all entries equal, over that at distance 0 (1 there, for any
    kind of RoPE). The model's own tables are read, so its frequencies and factors are in them. None where layers make
    their tables themselves.
    """
    decoder = find_decoder(model)
    distances = torch.linspace(0, furthest, POINTS).round().long().unique()
    tables: dict[int, Tensor] = {}

    def note(h: int, layer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, tuple) and len(value) == 2 and all(map(torch.is_tensor, value)):
                tables[h] = value[0].float()

    with ExitStack() as hooks:
        for h, layer in enumerate(decoder.layers):
            hooks.enter_context(layer.register_forward_pre_hook(partial(note, h), with_kwargs=True))
        ids = torch.zeros_like(distances)[None].to(device_of(model))
        model(input_ids=ids, position_ids=distances[None].to(ids.device), use_cache=False)
    means = {h: table.reshape(-1, len(distances), table.shape[-1])[0].mean(-1) for h, table in tables.items()}
    if not means:
        return None
    curves = [_rounded(mean / mean[0]) for mean in means.values()]
    return {"distances": distances.tolist(), "layers": list(means), "curves": curves}


def _rounded(values: Tensor) -> Any:
    """Numbers for JSON, to five digits behind the point."""
    return values.cpu().double().round(decimals=5).tolist()


@torch.no_grad()
def weights(model: Any, tokens: Sequence[int], answer: int) -> Iterator[dict[int, Tensor]]:
    """The attention with which each token of an answer is chosen.

    Args:
        model: a transformers causal language model, with or without factors.
        tokens: the prompt's and the answer's.
        answer: how many of them are the answer's.

    Yields:
        For each token of the answer, by layer, what the token before it, from which it is predicted, pays to each token
        up to itself, (heads, keys); layers without attention are not there. A layer whose window is shorter pays 0 to
        what lies before it.

    Raises:
        UnsupportedModel: the family does not hand out its weights, or they are not of single tokens.
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
        if not seen:
            raise UnsupportedModel(f"{model.config.model_type}: it does not hand out its attention weights")
        found = {}
        for h, parts in seen.items():
            weight = torch.cat(parts, dim=1)[0, :, 0]
            if weight.shape[-1] > last + 1:
                reason = f"the keys of layer {h} are not those of single tokens"
                raise UnsupportedModel(f"{model.config.model_type}: {reason}")
            found[h] = nn.functional.pad(weight, (last + 1 - weight.shape[-1], 0))
        yield found


@contextmanager
def _watched(layers: Sequence[nn.Module]) -> Iterator[dict[int, list[Tensor]]]:
    """By layer, the attention weights of one query, (1, heads, 1, keys), that modules in it hand out meanwhile."""
    seen: dict[int, list[Tensor]] = {}

    def note(h: int, module: nn.Module, args: Any, output: Any) -> None:
        for x in output[1:] if isinstance(output, tuple) else ():
            found = torch.is_tensor(x) and x.ndim == 4 and x.shape[2] == 1 and x.is_floating_point()
            if found and all(x is not known for known in seen.get(h, [])):  # a module within may hand it on
                seen.setdefault(h, []).append(x)

    attentions = re.compile("Attention|MLA")
    with ExitStack() as hooks:
        for h, layer in enumerate(layers):
            for module in layer.modules():
                if attentions.search(type(module).__name__):
                    hooks.enter_context(module.register_forward_hook(partial(note, h)))
        yield seen


@contextmanager
def _eager(decoder: nn.Module) -> Iterator[None]:
    """The eager attention in all of a decoder while this lasts."""
    configs = {id(config): config for module in decoder.modules() if (config := getattr(module, "config", None))}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
