"""Ms-PoE (arXiv 2403.04797): positions divided by a factor of each head's own, chosen on the prompt.

lm_eval --model ms_poe --model_args pretrained=lmsys/vicuna-7b-v1.5 --tasks kv_retrieval

In each layer the heads are ranked by position-awareness (Eq. 1): the share of the prompt's keys whose attention is at
least ``threshold`` times its mean, in the attention of the prompt's last token, with *un-rotated* queries and keys. The
factors run evenly from ``min`` to ``max`` (Eq. 2); the most position-aware head gets the least one (section 3.3).
docs/methods.md says where the authors' code differs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lpes_eval.errors import UserError
from lpes_eval.flags import at_least, of, positive
from lpes_eval.methods.attention import Call
from lpes_eval.methods.prompt import PromptInterception, PromptLM


@dataclass(eq=False)
class HeadFactors(PromptInterception):
    """Ms-PoE inside a model.

    Attributes:
        min, max: the least and the greatest factor.
        skip: so many layers at the beginning are left alone; 2 as in the authors' scripts, 0 as in Algorithm 1.
        threshold: attention counts for a head's awareness from so many times its mean on (the paper's alpha).
        ranks: by layer, the number of each head's factor in the last prompt, (B, H); 0 is the least factor.
    """

    min: float = 1.2
    max: float = 1.8
    skip: int = 2
    threshold: float = 3.0
    name = "Ms-PoE"

    def __post_init__(self) -> None:
        """Read what a user wrote, and refuse what makes no sense."""
        self.min, self.max = of(positive, "min", self.min), of(positive, "max", self.max)
        self.skip, self.threshold = of(at_least(0), "skip", self.skip), of(positive, "threshold", self.threshold)
        if self.min > self.max:
            raise UserError(f"min={self.min:g},max={self.max:g}: expected min <= max")
        self.ranks: dict[int, Tensor] = {}

    def factors(self, heads: int) -> list[float]:
        """The factors of so many heads, ascending (Eq. 2)."""
        return [self.min + number * (self.max - self.min) / max(heads - 1, 1) for number in range(heads)]

    def chosen_layers(self, depth: int) -> range:
        """All after the first ``skip``; ``UserError`` where none is left."""
        if self.skip >= depth:
            raise UserError(f"skip={self.skip}: the model has {depth} layers, of which none would be left")
        return range(self.skip, depth)

    def attend(self, call: Call) -> Tensor:
        """Attention with each head's own rotation, and keys rotated once for every query head."""
        heads, key_heads, batch = call.query.shape[1], call.key.shape[1], len(call.query)
        if "ranks" not in call.state:
            call.state["ranks"] = self.ranks[call.layer] = self._rank(call)
        tables = call.table.by_factors(self.factors(heads))  # (H, B or 1, T, d)
        rows = torch.arange(batch, device=call.query.device)[:, None]
        ranks = call.state["ranks"].to(call.query.device)
        cos, sin = (t.expand(-1, batch, -1, -1)[ranks, rows].flatten(0, 1) for t in tables)  # (B * H, T, d)
        key = call.key.repeat_interleave(heads // key_heads, dim=1)
        turned = call.rotate(call.query.flatten(0, 1)[:, None], key.flatten(0, 1)[:, None], cos, sin)
        query, key = (x.view(batch, heads, *x.shape[2:]) for x in turned)
        return call.compute(query, *call.cached(key, call.value))

    def _rank(self, call: Call) -> Tensor:
        last = self.prompt_end(call)  # (B,)
        rows = torch.arange(len(call.query), device=last.device)
        query = call.query[rows, :, last].float().unflatten(1, (call.key.shape[1], -1))  # (B, H_kv, G, D)
        scores = torch.matmul(query, call.key.float().transpose(-1, -2)).flatten(1, 2) * call.scale  # (B, H, T)
        if (cap := call.options.get("softcap")) is not None:
            scores = torch.tanh(scores / cap) * cap
        visible = _visible(call, last)
        weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
        least = self.threshold / visible.sum(-1)[:, None, None]
        counts = weights >= least
        order = counts.sum(-1).argsort(dim=-1, descending=True, stable=True)  # of rank r: the head
        return order.argsort(dim=-1)


def _visible(call: Call, last: Tensor) -> Tensor:
    """Which of the prompt's keys the layer lets each row's last token see, (B, T)."""
    batch, _, length, _ = call.query.shape
    columns = torch.arange(length, device=last.device)
    causal = columns <= last[:, None]
    if call.mask is None or call.mask.ndim == 2:  # causal, or flash attention: padding alone
        if (window := call.options.get("sliding_window")) is not None:
            causal = causal & (columns > last[:, None] - window)
        return causal if call.mask is None else causal & call.mask[:, :length].bool()
    mask = call.mask.expand(batch, -1, -1, -1)[torch.arange(batch, device=last.device), 0, last, :length]
    return causal & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)


class MsPoE(PromptLM):
    """``hf`` with Ms-PoE; its arguments are those of ``hf`` and of ``HeadFactors``."""

    title = HeadFactors.name
    paper = "2403.04797"
    published_time = 1.45
    Inside = HeadFactors


Method = MsPoE
