"""Rotary tables for other factors and other bases, from the model's own rotary module."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from lpes_eval import rope
from lpes_eval import rotary as rotations
from lpes_eval.errors import UnsupportedModel, UserError
from lpes_eval.flags import finite, of

PUBLISHED_BASES = (10000.0, 17500.0, 18000.0, 19000.0, 20000.0, 22500.0, 25000.0)
"""The RoPE bases of Attention Buckets and MoICE, for models whose own base is 10000 (arXiv 2312.04455, 2406.19598)."""

Pair = tuple[Tensor, ...]
"""Cosines and sines."""


class Table(tuple[Tensor, Tensor]):
    """The cosines and sines that a rotary module answered to a call, (B, T, d); others are computed once a forward."""

    rotary: nn.Module
    call: dict[str, Any]
    made: dict[Any, Pair]

    @classmethod
    def of(cls, rotary: nn.Module, args: tuple, kwargs: dict, output: Pair) -> Table:
        """From what a forward hook of a rotary module is given."""
        table = cls(output)
        table.rotary, table.call, table.made = rotary, rotations.named(args, kwargs), {}
        return table

    def to(self, device: Any, **options: Any) -> Table:
        """The same on another device; accelerate asks for it where a model is spread over several."""
        call = {k: v.to(device, **options) if torch.is_tensor(v) else v for k, v in self.call.items()}
        return Table.of(self.rotary, (), call, tuple(t.to(device, **options) for t in self))

    def identity(self) -> Pair:
        """A table that rotates nothing, (1, 1, d), on the same device and of the same dtype."""
        one = self[0].new_ones(1, 1, self[0].shape[-1])
        return one, torch.zeros_like(one)

    def by_factors(self, factors: Sequence[float]) -> Pair:
        """Tables at positions divided by each of U factors, (U, B, T, d)."""
        if (key := tuple(factors)) not in self.made:
            ids = self.call["position_ids"]
            positions = rotations.divided(ids, torch.tensor(factors, dtype=torch.float32, device=ids.device))
            tables = rotations.ask(self.rotary, self.call, positions)
            self.made[key] = tuple(t.unflatten(0, (len(factors), -1)) for t in tables)
        return self.made[key]

    def by_shift(self, shift: int) -> Pair:
        """Tables at positions moved by ``shift``, none of them below 0."""
        if (key := ("shift", shift)) not in self.made:
            positions = (self.call["position_ids"] + shift).clamp(min=0)
            self.made[key] = tuple(rotations.ask(self.rotary, self.call, positions))
        return self.made[key]

    def by_bases(self, bases: Sequence[float], theta: float) -> Pair:
        """Tables of N RoPE bases, (N, B, T, d), for a model whose own base is ``theta``."""
        if (key := tuple(bases)) not in self.made:
            rotary: Any = copy.copy(self.rotary)  # the model's own stays as it is
            tables: list[Pair] = []
            for base in bases:
                rotary._buffers = {**rotary._buffers, "inv_freq": frequencies(base, rotary.inv_freq)}
                own = base == theta
                tables.append(tuple(self) if own else rotations.ask(rotary, self.call, self.call["position_ids"]))
            self.made[key] = tuple(torch.stack(each) for each in zip(*tables, strict=True))
        return self.made[key]


def frequencies(base: float, like: Tensor) -> Tensor:
    """The inverse frequencies ``base ** (-2 i / d)`` of default RoPE, as many as ``like`` has, of its dtype."""
    dimension = 2 * like.numel()
    exponents = torch.arange(0, dimension, 2, dtype=torch.float32, device=like.device) / dimension
    return (1.0 / base**exponents).to(like.dtype)


def own_base(model: nn.Module, method: str) -> float:
    """The RoPE base of a model, which may be without weights, for a method that needs one (``UnsupportedModel``)."""
    decoder = rope.find_decoder(model)
    config: Any = model.config
    parameters = config.get_text_config(decoder=True).rope_parameters or {}
    theta: Any = parameters.get("rope_theta")
    kind = parameters.get("rope_type", "default")
    rotary: Any = decoder.rotaries[0] if len(decoder.rotaries) == 1 and not decoder.own else None
    kept: Any = getattr(rotary, "inv_freq", None)
    found = None
    if any(isinstance(value, dict) for value in parameters.values()):
        found = "it has rotary tables of its own for each kind of attention"
    elif kind != "default":
        found = f"its rotary embedding is of type {kind}"
    elif theta is None or kept is None:
        found = "it has no single rotary module with a rope_theta and inverse frequencies"
    elif not kept.is_meta:
        near = max(torch.finfo(kept.dtype).eps, 1e-5)  # model.to(torch.bfloat16) rounds buffers, too
        if torch.is_tensor(rotary(kept.new_zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.long, device=kept.device))):
            found = "its rotary tables are complex numbers"
        elif not torch.allclose(kept.float(), frequencies(theta, kept.float()), rtol=near):
            found = f"its frequencies are not powers of its rope_theta, {theta:g}"
    if found is not None:
        needs = f"{method} replaces the base of default RoPE, which has nothing else (docs/methods.md)"
        raise UnsupportedModel(f"{config.model_type}: {found}; {needs}")
    return float(theta)


def published_bases(theta: float) -> tuple[float, ...]:
    """The published bases times ``theta / 10000``, so that the first is always the model's own."""
    return tuple(base * theta / PUBLISHED_BASES[0] for base in PUBLISHED_BASES)


def parse_bases(name: str, given: Any) -> tuple[float, ...]:
    """RoPE bases as a user may write them for the argument ``name``: a list, one number, or ``10000:17500:25000``."""
    parts = given.split(":") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    bases: tuple[float, ...] = ()
    with suppress(UserError):
        bases = tuple(of(finite, name, part) for part in parts)
    if not bases or not all(base > 1 for base in bases):
        raise UserError(f"{name}={given}: expected numbers > 1 with ':' between them, such as 10000:17500:25000")
    return bases
