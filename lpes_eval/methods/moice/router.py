"""MoICE's router (arXiv 2406.19598): which rotary bases a head listens to, decided anew for every token.

In layer h the router looks at a head's query, rotated with the first base, and scores all N bases,

    scores = (SiLU(q W1) * (q W3)) W2,      q: (D,)   W1, W3: (D, N)   W2: (N, N),

and the weights are the softmax over the k highest scores, 0 for the others. A layer's heads share its matrices. All is
float32. It is saved as one safetensors file: ``w1``, ``w2``, ``w3`` of all layers, and :class:`RouterConfig` as JSON.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from lpes_eval.errors import UserError
from lpes_eval.files import write_atomically
from lpes_eval.methods.tables import PUBLISHED_BASES, parse_bases

TOP_K = 7
INIT_STD = 0.02  # of new weights; those of the bases then begin near 1 / N
FILE = "router.safetensors"
SHIPPED = "router"  # apart: servers take *.safetensors for weights
METADATA = "moice_router"
VERSION = 1


@dataclass(frozen=True)
class RouterConfig:
    """What a router is for, and how it was trained; ``head_dim`` is that of a query."""

    layers: int
    heads: int
    head_dim: int
    bases: tuple[float, ...] = PUBLISHED_BASES
    top_k: int = TOP_K
    model: str | None = None
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the bases as a user may write them."""
        object.__setattr__(self, "bases", parse_bases("bases", self.bases))

    @property
    def shape(self) -> str:
        """The sizes in words, for messages."""
        return f"{self.layers} layers of {self.heads} heads of size {self.head_dim}"


class Router(nn.Module):
    """The routers of a model's L layers, float32: ``w1`` (L, D, N), ``w2`` (L, N, N), ``w3`` (L, D, N)."""

    def __init__(self, config: RouterConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        generator, count = torch.Generator().manual_seed(seed), len(config.bases)
        self.w1, self.w2, self.w3 = (
            nn.Parameter(INIT_STD * torch.randn(config.layers, width, count, generator=generator, dtype=torch.float32))
            for width in (config.head_dim, count, config.head_dim)
        )

    def forward(self, layer: int, query: Tensor) -> Tensor:
        """Weights of all bases, (..., N), at most k of them above 0, from queries (..., D) rotated with the first."""
        w1, w2, w3 = (w[layer].to(query.device) for w in (self.w1, self.w2, self.w3))
        query = query.to(w1.dtype)
        scores = (functional.silu(query @ w1) * (query @ w3)) @ w2
        if self.config.top_k < scores.shape[-1]:  # of equal scores the first ones count
            kept = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.config.top_k]
            scores = torch.full_like(scores, -math.inf).scatter(-1, kept, scores.gather(-1, kept))
        return scores.softmax(dim=-1)


def describe(config: Any, **options: Any) -> RouterConfig:
    """What a router must be for to serve a transformers model with this configuration; ``options`` are more fields."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    options.setdefault("model", getattr(config, "_name_or_path", None) or None)
    return RouterConfig(text.num_hidden_layers, heads, size, **options)


def write(router: Router, file: str | Path) -> None:
    """Save ``router``, whole or not at all; the same router gives the same bytes."""
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in router.named_parameters()}
    described = json.dumps({"version": VERSION, **asdict(router.config)}, sort_keys=True)
    write_atomically(file, save(tensors, metadata={METADATA: described}))


def read(path: str | Path) -> Router:
    """The router in a file, or in ``router.safetensors`` in a folder; ``UserError`` where there is no sound one."""
    file = file_of(path)
    try:
        with safe_open(file, framework="pt") as stored:
            data = json.loads((stored.metadata() or {})[METADATA])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        if (version := data.pop("version")) != VERSION:
            raise ValueError(f"version {version} of the format, expected {VERSION}")
        data.pop("weights_sha256", None)  # which the router of the reference model has
        config = RouterConfig(**data)
        expected = (config.layers, config.head_dim, len(config.bases))
        if tensors["w1"].shape != expected or not all(bool(one.isfinite().all()) for one in tensors.values()):
            raise ValueError(f"tensor 'w1' of shape {tuple(tensors['w1'].shape)}, expected {expected}, all finite")
        router = Router(config)
        router.load_state_dict(tensors)
    except (SafetensorError, OSError, TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise UserError(f"{file}: holds no MoICE router ({error}); train one, or name another") from None
    return router.requires_grad_(False)


def file_of(path: str | Path) -> Path:
    """The router's file for ``router=PATH``: that file, or ``router.safetensors`` in that folder."""
    given = Path(path).expanduser()
    file = given / FILE if given.is_dir() else given
    if not file.is_file():
        raise UserError(f"{file}: no such file; train a router with python -m lpes_eval.methods.moice.train")
    return file
