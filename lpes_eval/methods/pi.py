"""Position Interpolation (arXiv 2306.15595), one factor for all layers; the model type ``pi``.

lm_eval --model pi --model_args pretrained=lmsys/vicuna-7b-v1.5,factor=1.5 --tasks kv_retrieval
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from lpes_eval import rope
from lpes_eval.errors import UserError
from lpes_eval.factors import MAX_LAYERS, Factors
from lpes_eval.methods.base import count, real
from lpes_eval.methods.lpes import LPES, LayerFactors

FACTOR = 1.5
"""The middle of the range that is searched, and every layer's factor in the search's first individual (Eq. 8)."""


class PI(LPES):
    """``lpes`` with one factor for all layers; everything that ``hf`` takes means the same.

    Args:
        pretrained: as for ``hf``. Left out: the reference model that is shipped with this package.
        factor: what positions are divided by. The paper's baseline takes the mean of the factors that were searched
            (section 4.1), which ``lpes-eval factors FILE`` prints.
        skip: so many layers at the beginning are left alone.
        **kwargs: what ``hf`` takes.

    Raises:
        UserError: ``factors``, which belongs to ``lpes``; a ``factor`` that is no number; a ``skip`` that is none, or
            that leaves no layer.
        FactorsError: a factor out of range.
        UnsupportedModel: a model without rotary position embeddings; before any weight is loaded.
    """

    title = "Position Interpolation"
    paper = "2306.15595"
    published_time = None

    def __init__(self, pretrained: Any = None, factor: Any = FACTOR, skip: Any = 0, **kwargs: Any) -> None:
        if "factors" in kwargs:
            raise UserError("pi takes factor=NUMBER for all layers; factors=FILE is for lpes")
        self.skip = count("skip", skip)
        super().__init__(pretrained, factors=uniform(factor, self.skip), **kwargs)
        self._factors_given = factor

    @classmethod
    def apply(cls, model: nn.Module, factor: Any = FACTOR, skip: Any = 0) -> LayerFactors:  # type: ignore[override]
        """Put the factor into a transformers model, until ``detach``."""
        check_skip(model, count("skip", skip))
        return LayerFactors(model, uniform(factor, count("skip", skip)))

    @classmethod
    def benchmark_settings(cls, model: nn.Module) -> dict[str, Any]:
        """The defaults."""
        return {}

    def check(self, skeleton: nn.Module) -> None:
        """Check that there are layers left after those that are skipped."""
        check_skip(skeleton, self.skip)


def uniform(factor: Any, skip: int) -> Factors:
    """One factor for all layers but the first ``skip``."""
    factors = Factors.from_dict({"uniform": real("factor", factor)}, source=f"factor={factor}")
    return replace(factors, unscaled_layers=tuple(range(min(skip, MAX_LAYERS))))


def check_skip(model: nn.Module, skip: int) -> None:
    """Raise ``UserError`` where the model has no more layers than the first ``skip``."""
    if skip >= (depth := len(rope.find_decoder(model).layers)):
        raise UserError(f"skip={skip}: the model has {depth} layers, of which none would be left")


Method = PI
