"""MoICE (arXiv 2406.19598): every head attends under all N rotary bases, and a trained router mixes what comes out.

lm_eval --model moice --model_args pretrained=lmsys/vicuna-7b-v1.5,router=DIR_OR_FILE --tasks kv_retrieval

For base b, with query and key rotated by b's angles, ``A_b = softmax(q_b k_b^T / sqrt(D))``. A head's output is
``sum_b w_b A_b v`` with the router's weights w. The cache holds every key N times, and every value once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lpes_eval import files, reference
from lpes_eval.decoder import device_of
from lpes_eval.errors import UserError
from lpes_eval.methods.attention import Call
from lpes_eval.methods.base import MethodLM
from lpes_eval.methods.interception import Interception
from lpes_eval.methods.moice import router as routers
from lpes_eval.methods.moice.router import Router
from lpes_eval.methods.tables import own_base, published_bases

BATCHED_BYTES = 1 << 30
"""Queries, keys and values of all bases may take this much memory a layer before the bases are computed in turns."""


@dataclass(eq=False)
class Mixture(Interception):
    """MoICE inside a model; ``router`` is one for this model, or its file, or the folder that ``moice.train`` wrote.

    Shapes: N bases, B rows, T new tokens, S keys in all, K key heads with G query heads each, so H = K * G. Where bases
    are heads, what shares a value stands together: head ``(k * N + n) * G + g``.
    """

    router: Any = None
    name = "MoICE"

    def __post_init__(self) -> None:
        """Read the router; ``UserError`` for a damaged one."""
        self.file: Path | None = None
        self.sha256: str | None = None  # of the file as it is read
        if self.router is not None and not isinstance(self.router, Router):
            self.file = routers.file_of(self.router)
            self.sha256, self.router = files.sha256(self.file), routers.read(self.file)

    def check(self, model: Any) -> None:
        """Refuse a model without a base of its own, and one that the router was not made for."""
        self._theta = own_base(model, self.name)
        super().check(model)
        way_out = "train one with python -m lpes_eval.methods.moice.train"
        if self.router is None:
            raise UserError(f"moice needs router=FILE_OR_FOLDER, a router that was trained for the model; {way_out}")
        made, own = self.router.config, routers.describe(model.config)
        if made.shape != own.shape:
            found = f"made for {made.model} with {made.shape}, but {own.model} has {own.shape}"
            raise UserError(f"router={self.file}: {found}; {way_out}")

    def prepare(self, model: nn.Module) -> None:
        """Put the router on the model's device."""
        self.router.to(device_of(model))

    def describe(self) -> dict[str, Any]:
        """The router: where it is from, its checksum, and how it was trained."""
        source = {"router": str(self.file) if self.file else None, "sha256": self.sha256}
        return source | {name: getattr(self.router.config, name) for name in ("bases", "top_k", "model", "training")}

    def attend(self, call: Call) -> Tensor:
        """The weighted sum of the attention's outputs under all bases."""
        bases = self.router.config.bases
        cos, sin = call.table.by_bases(bases, self._theta)  # (N, B or 1, T, d)
        count, (batch, key_heads, length, _) = len(bases), call.key.shape

        def every(first: int, last: int) -> tuple[Tensor, Tensor]:
            """Queries and keys rotated by some of the bases, (B, K, n, G, T, D) and (B, K, n, T, D)."""
            n = last - first
            inputs = (x.expand(n, *x.shape).flatten(0, 1) for x in (call.query, call.key))
            tables = (t[first:last].expand(-1, batch, -1, -1).flatten(0, 1) for t in (cos, sin))
            query, key = (x.unflatten(0, (n, batch)) for x in call.rotate(*inputs, *tables))
            return query.unflatten(2, (key_heads, -1)).permute(1, 2, 0, 3, 4, 5), key.permute(1, 2, 0, 3, 4)

        value, cached = call.value, None
        small = length == 1 or count * (call.query.nbytes + 2 * value.nbytes) <= BATCHED_BYTES
        query, key = every(0, count) if small or call.cache is not None else every(0, 1)
        weights = self.router(call.layer, query[:, :, 0].flatten(1, 2))  # (B, H, T, N)
        if call.cache is not None:
            cached, value = call.cached(key.flatten(1, 2), value)  # (B, K * N, S, D), (B, K, S, D_v)
            key = cached.unflatten(1, (key_heads, count))
        if small and not any(call.options.get(name) is not None for name in ("s_aux", "position_bias")):
            out = call.compute(query.flatten(1, 3), key.flatten(1, 2), value).unflatten(2, (key_heads, count, -1))
            mix = weights.unflatten(1, (key_heads, -1)).permute(0, 3, 1, 4, 2)[..., None]  # (B, T, K, N, G, 1)
            return (out * mix.to(out.dtype)).sum(3).flatten(2, 3)
        total: Any = 0
        for n in range(count):  # large ones, or with something for each head
            one, own = every(n, n + 1)
            out = call.compute(one.flatten(1, 3), own[:, :, 0] if cached is None else key[:, :, n], value)
            total = total + out * weights[..., n].transpose(1, 2)[..., None].to(out.dtype)  # (B, T, H, D_v)
        return total


class MoICE(MethodLM):
    """``hf`` with MoICE; its arguments are those of ``hf`` and ``router``, which comes with the reference model."""

    title = Mixture.name
    paper = "2406.19598"
    published_time = 2.42
    Inside = Mixture

    def __init__(self, pretrained: Any = None, **kwargs: Any) -> None:
        if "router" not in kwargs and pretrained in (None, *reference.NAMES):
            shipped = reference.folder(pretrained or "reference") / routers.SHIPPED
            kwargs["router"] = shipped if shipped.is_dir() else None
        super().__init__(pretrained, **kwargs)

    @classmethod
    def benchmark_settings(cls, model: nn.Module) -> dict[str, Any]:
        """An untrained router with the published settings: what it has learnt does not change its cost."""
        bases = published_bases(own_base(model, cls.title))
        return {"router": Router(routers.describe(model.config, bases=bases))}


Method = MoICE
