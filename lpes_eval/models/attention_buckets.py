"""The ``attention_buckets`` model type: several RoPE bases at once, their predictions combined (arXiv 2312.04455).

lm_eval --model attention_buckets --model_args pretrained=lmsys/vicuna-7b-v1.5 --tasks kv_retrieval
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lpes_eval.errors import UserError
from lpes_eval.models.base import RotaryLM
from lpes_eval.peers import buckets
from lpes_eval.peers.attention import bases_for, own_base


class AttentionBuckets(RotaryLM):
    """``hf`` with Attention Buckets; everything that ``hf`` takes means the same.

    Args:
        pretrained: as for ``hf``. Left out: the reference model that is shipped with this package.
        bases: RoPE bases, as a list or ``10000:17500:25000``. Left out: the seven of the paper, which are for models
            whose own base is 10000, multiplied by the model's own base / 10000.
        combine: ``probabilities`` as in the paper, or ``logits`` as in its authors' code (``lpes_eval.peers.buckets``).
        **kwargs: what ``hf`` takes.

    Raises:
        UserError: bases that are not numbers > 1, or beam search.
        UnsupportedModel: a model whose rotary embedding is not of the default kind; before any weight is loaded.
    """

    def __init__(
        self, pretrained: Any = None, bases: Any = None, combine: buckets.Combine = "probabilities", **kwargs: Any
    ) -> None:
        self.bases = parse_bases(bases)
        buckets.check_combine(combine)
        super().__init__(pretrained, **kwargs)
        self.method = buckets.Buckets(self.model, self.bases, combine)
        self.bases = self.method.bases

    def check(self, skeleton: nn.Module) -> None:
        """Refuse a model without a base of its own."""
        bases_for(own_base(skeleton, buckets.NAME), self.bases)

    def get_model_info(self) -> dict[str, Any]:
        """What ``hf`` reports, and the method's settings."""
        return super().get_model_info() | {
            "method": {"name": "attention_buckets", "bases": self.bases, "combine": self.method.combine}
        }

    @property
    def cache_key(self) -> str:
        """What sets this model's answers apart from the same model's with other bases, for ``--use_cache``."""
        return f"buckets_{self.method.combine}_" + "_".join(f"{base:g}" for base in self.bases or ())

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        if (options.get("num_beams") or 1) > 1:
            raise UserError(
                f"num_beams={options['num_beams']}: attention_buckets keeps a row for each base, which beam search "
                "would mix up; use num_beams=1"
            )
        return super()._model_generate(context, max_length, stop, **options)


def parse_bases(given: Any) -> tuple[float, ...] | None:
    """RoPE bases as a user may write them: a list, one number, or numbers with ``:`` between them.

    Raises:
        UserError: something else.
    """
    if given is None:
        return None
    parts = given.split(":") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    try:
        bases = tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        bases = ()
    if not bases or not all(1 < base < float("inf") for base in bases):
        raise UserError(f"bases={given}: expected numbers > 1 with ':' between them, such as 10000:17500:25000")
    return bases
