"""The attention of answers under several sets of factors, averaged over prompts, and the decay that a set makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lpes_eval.attention.prompts import PARTS, Prompt
from lpes_eval.attention.weights import weights
from lpes_eval.decoder import device_of, find_decoder
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
