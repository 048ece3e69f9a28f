"""The ``pi`` model type: Position Interpolation (arXiv 2306.15595), one factor for all layers.

lm_eval --model pi --model_args pretrained=lmsys/vicuna-7b-v1.5,factor=1.5 --tasks kv_retrieval
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from lpes_eval import rope
from lpes_eval.errors import UserError
from lpes_eval.factors import MAX_LAYERS, Factors
from lpes_eval.models.base import count, real
from lpes_eval.models.lpes import LPES

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

    def __init__(self, pretrained: Any = None, factor: Any = FACTOR, skip: Any = 0, **kwargs: Any) -> None:
        if "factors" in kwargs:
            raise UserError("pi takes factor=NUMBER for all layers; factors=FILE is for lpes")
        value = real("factor", factor)
        self.skip = count("skip", skip)
        left_alone = tuple(range(min(self.skip, MAX_LAYERS)))
        uniform = Factors.from_dict({"uniform": value}, source=f"factor={factor}")
        super().__init__(pretrained, factors=replace(uniform, unscaled_layers=left_alone), **kwargs)
        self._factors_given = factor

    def check(self, skeleton: nn.Module) -> None:
        """Check that there are layers left after those that are skipped."""
        depth = len(rope.find_decoder(skeleton).layers)
        if self.skip >= depth:
            raise UserError(f"skip={self.skip}: the model has {depth} layers, of which none would be left")
