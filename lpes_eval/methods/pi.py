"""Position Interpolation (arXiv 2306.15595), one factor for all layers; the model type ``pi``.

lm_eval --model pi --model_args pretrained=lmsys/vicuna-7b-v1.5,factor=1.5 --tasks kv_retrieval
"""

from dataclasses import dataclass, field
from typing import Any

from lpes_eval.factors import Factors
from lpes_eval.flags import finite, of
from lpes_eval.methods.base import MethodLM
from lpes_eval.methods.lpes import LPES, LayerFactors


@dataclass
class OneFactor(LayerFactors):
    """One factor for all layers inside a model."""

    factors: Any = field(init=False, repr=False)
    factor: Any = 1.5

    def __post_init__(self) -> None:
        """Read it; ``UserError`` for what is no number, ``FactorsError`` for one out of range."""
        self.factors = self.factor
        given = {"uniform": of(finite, "factor", self.factor)}
        self.parsed = Factors.from_dict(given, source=f"factor={self.factor}")


class PI(LPES):
    """``lpes`` with the argument ``factor`` in place of ``factors``."""

    title = "Position Interpolation"
    paper = "2306.15595"
    published_time = None
    Inside = OneFactor
    benchmark_settings = MethodLM.benchmark_settings


Method = PI
