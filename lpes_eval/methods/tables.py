"""Rotary tables for other factors and other bases, from the model's own rotary module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
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
    """The cosines and sines that a rotary module answered to a call, (B, T, d) each; others can be asked of it."""

    rotary: nn.Module
    call: dict[str, Any]

    @classmethod
    def of(cls, rotary: nn.Module, args: tuple, kwargs: dict, output: Pair) -> Table:
        """From what a forward hook of a rotary module is given."""
        table = cls(output)
        table.rotary, table.call = rotary, rotations.named(args, kwargs)
        return table

    def to(self, device: Any, **options: Any) -> Table:
        """The same on another device; accelerate asks for it where a model is spread over several."""
        moved = Table(t.to(device, **options) for t in self)
        moved.rotary = self.rotary
        moved.call = {k: v.to(device, **options) if torch.is_tensor(v) else v for k, v in self.call.items()}
        return moved

    def identity(self) -> Pair:
        """A table that rotates nothing, (1, 1, d), on the same device and of the same dtype."""
        one = self[0].new_ones(1, 1, self[0].shape[-1])
        return one, torch.zeros_like(one)

    def by_factors(self, factors: Sequence[float]) -> Pair:
        """Tables at positions divided by each of U factors, (U, B, T, d); computed once a forward."""

        def make() -> Pair:
            ids = self.call["position_ids"]
            positions = rotations.divided(ids, torch.tensor(factors, dtype=torch.float32, device=ids.device))
            return tuple(t.unflatten(0, (len(factors), -1)) for t in rotations.ask(self.rotary, self.call, positions))

        return self._once(tuple(factors), make)

    def by_shift(self, shift: int) -> Pair:
        """Tables at positions moved by ``shift``, none of them below 0; computed once a forward."""

        def make() -> Pair:
            positions = (self.call["position_ids"] + shift).clamp(min=0)
            return tuple(rotations.ask(self.rotary, self.call, positions))

        return self._once(("shift", shift), make)

    def by_bases(self, bases: Sequence[float], theta: float) -> Pair:
        """Tables of N RoPE bases, (N, B, T, d), for a model whose own base is ``theta``; computed once a forward."""
        rotary: Any = self.rotary

        def at(base: float) -> Pair:
            other = copy.copy(rotary)  # the model's own stays as it is, whatever happens meanwhile
            other._buffers = {**rotary._buffers, "inv_freq": frequencies(base, rotary.inv_freq)}
            return rotations.ask(other, self.call, self.call["position_ids"])

        def make() -> Pair:
            tables = (tuple(self) if base == theta else at(base) for base in bases)
            return tuple(torch.stack(each) for each in zip(*tables, strict=True))

        return self._once(tuple(bases), make)

    def _once(self, key: Any, make: Callable[[], Pair]) -> Pair:
        made: dict[Any, Pair] = self.__dict__.setdefault("made", {})
        if key not in made:
            made[key] = make()
        return made[key]


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
        rounding = torch.finfo(kept.dtype)  # model.to(torch.bfloat16) rounds buffers, too
        near: Any = {"rtol": max(rounding.eps, 1e-5), "atol": max(rounding.tiny * rounding.eps, 1e-8)}
        positions = torch.zeros(3, 1, 1, dtype=torch.long, device=kept.device)
        try:
            table = rotary(kept.new_zeros(1, 1, 1), positions[0])
        except IndexError:  # Qwen 3.5 in transformers 5.18 takes positions of three axes alone
            table = rotary(kept.new_zeros(1, 1, 1), positions)
        if torch.is_tensor(table):
            found = "its rotary tables are complex numbers"
        elif not torch.allclose(kept.float(), frequencies(theta, kept.float()), **near):
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
    if not bases or not all(1 < base < float("inf") for base in bases):
        raise UserError(f"{name}={given}: expected numbers > 1 with ':' between them, such as 10000:17500:25000")
    return bases
