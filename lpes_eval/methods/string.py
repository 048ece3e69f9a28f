"""STRING (arXiv 2410.18745): distances from ``shift`` on are shortened by ``shift`` minus a small window.

lm_eval --model string --model_args pretrained=lmsys/vicuna-7b-v1.5 --tasks kv_retrieval

A query at position m attends to a key at position n with the distance m - n where that is below S, and with
m - n - S + W from there on (Figure 5): the W nearest distances stay the nearest tokens' alone.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lpes_eval.errors import UserError
from lpes_eval.flags import at_least, of
from lpes_eval.methods.attention import Call
from lpes_eval.methods.base import MethodLM
from lpes_eval.methods.interception import Interception


@dataclass(eq=False)
class ShiftedPositions(Interception):
    """STRING inside a model.

    ``shift`` is S; by default a third of ``max_position_embeddings``, as in the authors' setting. ``window`` is W.
    """

    shift: Any = None
    window: int = 128
    name = "STRING"

    def __post_init__(self) -> None:
        """Read what a user wrote."""
        self.window = of(at_least(1), "window", self.window)
        if self.shift is not None:
            self._set(of(at_least(1), "shift", self.shift))

    def _set(self, shift: int) -> None:
        self.shift = shift
        if shift <= self.window:
            raise UserError(f"shift={shift},window={self.window}: expected window < shift")

    def check(self, model: nn.Module) -> None:
        """Take the shift from the configuration, too, where none is given."""
        super().check(model)
        if self.shift is None:
            config = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
            self._set(config.max_position_embeddings // 3)

    def attend(self, call: Call) -> Tensor:
        """Attention in which a key is seen once from near and once from afar, by a query of twice the width."""
        query, key = call.rotate(call.query, call.key, *call.table)
        afar, _ = call.rotate(call.query, call.key, *call.table.by_shift(self.window - self.shift))
        key, value = call.cached(key, call.value)
        end, width = call.held + query.shape[2], key.shape[2]
        first = max(end - width, 0)  # a sliding window's cache has lost what is before
        rows = torch.arange(call.held, end, device=key.device)[:, None]
        distance = rows - torch.arange(first, first + width, device=key.device)  # (T, S)
        if end - first <= self.shift:
            return call.compute(query, key, value)
        self.refuse_flash_attention(call)
        far = distance >= self.shift
        mask = torch.cat((_masked(call.mask, (distance >= 0) & ~far), _masked(call.mask, far)), -1)
        # A key (k, 0) meets what is rotated as usual of a query (near, far), a key (0, k) what is rotated for afar.
        size = key.shape[-1]
        both = replace(call, mask=mask, options={**call.options, "scaling": call.scale, "is_causal": False})
        keys = torch.cat((pad(key, (0, size)), pad(key, (size, 0))), 2)
        return both.compute(torch.cat((query, afar), -1), keys, torch.cat((value, value), 2))


def _masked(mask: Tensor | None, seen: Tensor) -> Tensor:
    """The model's mask, (B, 1, T, S) of truths or of what is added to scores, where ``seen`` (T, S) allows it."""
    if mask is None:
        return seen[None, None]
    mask = mask[..., : seen.shape[-1]]
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


class STRING(MethodLM):
    """``hf`` with STRING; its arguments are those of ``hf`` and the settings of ``ShiftedPositions``."""

    title = ShiftedPositions.name
    paper = "2410.18745"
    Inside = ShiftedPositions


Method = STRING
