"""MoICE (arXiv 2406.19598): every head attends under all N rotary bases, and a router mixes what comes out.

For base b and head h, with query and key rotated by b's angles, ``A_b = softmax(q_b k_b^T / sqrt(D))``. The head's
output for a token is ``sum_b w_b A_b v``, where the weights w of this token and head are the router's
(:mod:`lpes_eval.peers.router`). Values carry no position, so they are the same for all bases.

How it is computed:

- *Prefill*: the bases are further heads of one attention call of the model's own kernel, as long as its inputs stay
  below ``BATCHED_BYTES``; above, and where each head has a learnt sink, base after base.
- *Decoding*: one query attends to the keys of all bases in one product, the weights are applied to the attention
  pattern, and the values are read once.
- *Cache*: it holds every key N times, rotated by each base when it came, and every value once: (N + 1) / 2 times the
  memory of the plain model's cache, 4 times for 7 bases. Un-rotated keys would need no more memory than the plain
  model's, but all of them would have to be rotated N times again for every token (docs/moice.md has the times).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lpes_eval import rope
from lpes_eval.errors import UserError
from lpes_eval.peers.attention import Call, Interception, bases_for, own_base
from lpes_eval.peers.cache import grow_in_place
from lpes_eval.peers.router import Router

NAME = "MoICE"
BATCHED_BYTES = 1 << 30
"""Queries, keys and values of all bases may take this much memory a layer before the bases are computed in turns."""


def apply(model: nn.Module, router: Router) -> Interception:
    """Put MoICE into ``model``; ``detach()`` of what is returned takes it out again.

    Args:
        model: a transformers causal language model with default rotary embeddings, loaded.
        router: for this model (:func:`lpes_eval.peers.router.check`); it is moved to the model's device.

    Raises:
        UnsupportedModel: a model with another kind of rotary embedding, or attention that cannot be reached.
        UserError: layer factors or another method are in the model already.
    """
    if rope.applied(model) is not None:
        raise UserError(f"{NAME}: the model has layer factors; take them back first (lpes_eval.remove)")
    theta = own_base(model, NAME)
    return Interception(model, _Mixture(router.to(next(model.parameters()).device), theta), NAME)


def default_bases(model: nn.Module) -> tuple[float, ...]:
    """The bases for ``model``, which may be without weights: the published ones where its own is 10000."""
    return bases_for(own_base(model, NAME), None)


class _Mixture:
    """What takes the place of the layers' attention.

    Shapes: N bases, B rows, T new tokens, S keys in all, K key heads with G query heads each, so H = K * G. Where bases
    are heads, what shares a value stands together: head ``(k * N + n) * G + g``.
    """

    def __init__(self, router: Router, theta: float) -> None:
        self.router = router
        self.bases = router.config.bases
        self.theta = theta

    def __call__(self, call: Call) -> Tensor:
        tables = call.rotation.table.by_bases(self.bases, self.theta)  # (N, B, T, d) each
        cos, sin = (table.transpose(0, 1)[:, None] for table in tables)  # (B, 1, N, T, d)
        count, key_heads = len(self.bases), call.key.shape[1]
        query = call.query.unflatten(1, (key_heads, -1))  # (B, K, G, T, D)

        def turned(n: int) -> Tensor:
            """Queries rotated by base n, (B, H, T, D)."""
            return call.rotation.rotate(query, cos[:, :, n, None], sin[:, :, n, None]).flatten(1, 2)

        weights = self.router(call.layer, turned(0)).unflatten(1, (key_heads, -1))  # (B, K, G, T, N)
        keys, value = None, call.value
        if call.cache is not None:
            grow_in_place(call)
            keys, value = call.cached(self._keys(call, cos, sin), value)  # (B, K * N, S, D), (B, K, S, D_v)
            if call.query.shape[2] == 1 and _is_plain_softmax(call):
                every = call.rotation.rotate(query[:, :, None], cos[..., None, :, :], sin[..., None, :, :])
                return _one_token(call, every.squeeze(-2), keys, value, weights.squeeze(-2))

        one_base = call.query.nbytes + 2 * value.nbytes
        if count * one_base <= BATCHED_BYTES and not _has_numbers_by_head(call):
            every = call.rotation.rotate(query[:, :, None], cos[..., None, :, :], sin[..., None, :, :])
            keys = self._keys(call, cos, sin) if keys is None else keys
            out = call.attend(every.flatten(1, 3), keys, value).unflatten(2, (key_heads, count, -1))
            mix = weights.permute(0, 3, 1, 4, 2)[..., None]  # (B, T, K, N, G, 1)
            return (out * mix.to(out.dtype)).sum(3).flatten(2, 3)

        def attended(n: int) -> Tensor:
            key = call.rotation.rotate(call.key, cos[:, :, n], sin[:, :, n]) if keys is None else keys[:, n::count]
            out = call.attend(turned(n), key, value)  # (B, T, H, D_v)
            return out * weights[..., n].flatten(1, 2).transpose(1, 2)[..., None].to(out.dtype)

        mixed = attended(0)
        for n in range(1, count):
            mixed = mixed + attended(n)
        return mixed

    def _keys(self, call: Call, cos: Tensor, sin: Tensor) -> Tensor:
        """The new keys, rotated by every base: (B, K * N, T, D)."""
        return call.rotation.rotate(call.key[:, :, None], cos, sin).flatten(1, 2)


def _has_numbers_by_head(call: Call) -> bool:
    """Whether the layer's attention takes something that has one entry for each head, so that there may be no more."""
    return any(call._options.get(name) is not None for name in ("s_aux", "position_bias"))


def _is_plain_softmax(call: Call) -> bool:
    """Whether the layer's attention is a masked softmax and nothing else: no soft capping, no sinks."""
    extra = _has_numbers_by_head(call) or call._options.get("softcap") is not None
    return not extra and not call.module.training and (call.mask is None or getattr(call.mask, "ndim", 0) == 4)


def _one_token(call: Call, query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """One token a row: the patterns of all bases are mixed before the values are read.

    Args:
        call: for scale and mask.
        query: (B, K, N, G, D), rotated.
        key: (B, K * N, S, D), rotated.
        value: (B, K, S, D_v).
        weights: (B, K, G, N).

    Returns:
        (B, 1, H, D_v).
    """
    scale = call._options.get("scaling") or query.shape[-1] ** -0.5
    scores = torch.matmul(query.flatten(1, 2) * scale, key.transpose(-1, -2))  # (B, K * N, G, S)
    if call.mask is not None:
        mask = call.mask
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    pattern = scores.float().softmax(-1).unflatten(1, query.shape[1:3])  # (B, K, N, G, S)
    mixed = (pattern * weights.transpose(-1, -2)[..., None]).sum(2).to(value.dtype)  # (B, K, G, S)
    return torch.matmul(mixed, value).flatten(1, 2)[:, None]
