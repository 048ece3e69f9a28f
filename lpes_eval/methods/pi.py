"""Position Interpolation (arXiv 2306.15595), one factor for all layers; the model type ``pi``.

lm_eval --model pi --model_args pretrained=lmsys/vicuna-7b-v1.5,factor=1.5 --tasks kv_retrieval
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lpes_eval import rope
from lpes_eval.errors import UserError
from lpes_eval.factors import MAX_LAYERS, Factors
from lpes_eval.flags import at_least, finite, of
from lpes_eval.methods.base import MethodLM
from lpes_eval.methods.lpes import LPES, LayerFactors


@dataclass
class OneFactor(LayerFactors):
    """One factor for all layers inside a model, but for ``skip`` layers at the beginning; see docs/methods.md."""

    factors: Any = field(init=False, repr=False)
    fit: Any = field(init=False, repr=False, default=None)
    factor: Any = 1.5
    skip: Any = 0

    def __post_init__(self) -> None:
        """Read both; ``UserError`` for what is no number, ``FactorsError`` for a factor out of range."""
        self.factors, self.skip = self.factor, of(at_least(0), "skip", self.skip)
        given = {"uniform": of(finite, "factor", self.factor), "unscaled_layers": range(min(self.skip, MAX_LAYERS))}
        self.parsed = Factors.from_dict(given, source=f"factor={self.factor}")

    def check(self, model: nn.Module) -> None:
        """Refuse a model without rotary position embeddings, and one with no more layers than are skipped."""
        if self.skip >= (depth := len(rope.find_decoder(model).layers)):
            raise UserError(f"skip={self.skip}: the model has {depth} layers, of which none would be left")


class PI(LPES):
    """``lpes`` with the arguments ``factor`` and ``skip`` (see ``OneFactor``) in place of ``factors``."""

    title = "Position Interpolation"
    paper = "2306.15595"
    published_time = None
    Inside = OneFactor
    benchmark_settings = MethodLM.benchmark_settings


Method = PI
