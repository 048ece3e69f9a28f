"""Layer factors: every decoder layer has its own factor; the model type ``lpes``.

lm_eval --model lpes --model_args pretrained=lmsys/vicuna-7b-v1.5,factors=factors.json --tasks kv_retrieval
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from lpes_eval import factors as factors_file
from lpes_eval import rope
from lpes_eval.errors import FactorsError, UserError
from lpes_eval.methods.base import RotaryLM


class LayerFactors:
    """Layer factors inside a model (``lpes_eval.apply``), until ``detach``."""

    def __init__(self, model: nn.Module, factors: Any) -> None:
        rope.apply(model, factors)
        self._model = model

    def describe(self) -> dict[str, Any]:
        """The factors, one a layer."""
        return {"factors": rope.applied(self._model)}

    def detach(self) -> None:
        """Leave the model exactly as it was."""
        rope.remove(self._model)


class LPES(RotaryLM):
    """``hf`` with layer factors; everything that ``hf`` takes means the same.

    Args:
        pretrained: as for ``hf``. Left out: the model that the factors name as their origin, or, where they name none
            or there are no factors, the reference model that is shipped with this package.
        factors: a factors file's path, or one number for all layers (Position Interpolation). Left out: the plain
            model, with the same answers as ``hf``.
        **kwargs: what ``hf`` takes.

    Raises:
        FactorsError: factors that cannot be read, or are for another number of layers; before any weight is loaded.
        UnsupportedModel: a model without rotary position embeddings; before any weight is loaded.
        UserError: no ``factors``, and a model that is handed over loaded has some in it.
    """

    title = "Layer factors"
    paper = "2606.27705"
    published_time = 1.0

    def __init__(self, pretrained: Any = None, factors: Any = None, **kwargs: Any) -> None:
        if "factor" in kwargs:
            raise UserError(f"factor={kwargs['factor']}: lpes takes factors=, which may be one number for all layers")
        self.factors = factors_file.parse(factors) if factors is not None else None
        self._factors_given = factors
        if factors is None and isinstance(pretrained, nn.Module) and rope.applied(pretrained) is not None:
            raise UserError(
                "pretrained: the model has layer factors in it; take them back for the plain model (lpes_eval.remove), "
                "or give factors="
            )
        origin = self.factors.origin.get("model") if self.factors is not None else None
        self._by_default = pretrained is None and origin is None
        if pretrained is None and origin is not None:
            pretrained = origin if isinstance(origin, str) else origin["name"]
            if not isinstance(origin, str) and origin.get("revision") is not None:
                kwargs.setdefault("revision", origin["revision"])
        super().__init__(pretrained=pretrained, **kwargs)
        if self.factors is not None:
            self.check(self.model)
            rope.apply(self.model, self.factors)

    @classmethod
    def apply(cls, model: nn.Module, factors: Any) -> LayerFactors:
        """Put the factors into a transformers model, until ``detach``."""
        return LayerFactors(model, factors)

    @classmethod
    def benchmark_settings(cls, model: nn.Module) -> dict[str, Any]:
        """All factors different, from above 1 to 1.8: the most expensive."""
        depth = len(rope.find_decoder(model).layers)
        return {"factors": [1.0 + 0.8 * (h + 1) / depth for h in range(depth)]}

    def set_factors(self, factors: Any) -> None:
        """Put other factors in force, without loading anything anew; None for the plain model."""
        parsed = factors_file.parse(factors) if factors is not None else None
        if parsed is None:
            rope.remove(self.model)
        else:
            rope.apply(self.model, parsed)
        self.factors, self._factors_given = parsed, factors

    @property
    def layer_factors(self) -> list[float] | None:
        """The factors in force, one a layer, or None."""
        return rope.applied(self.model)

    @property
    def cache_key(self) -> str | None:
        """What sets this model's answers apart from the same model's with other factors, for ``--use_cache``."""
        return self.factors.digest(len(self.layer_factors or ()))[:16] if self.factors is not None else None

    def get_model_info(self) -> dict[str, Any]:
        """What ``hf`` reports, and the factors, their hash and their origin."""
        info = super().get_model_info()
        if self.factors is None:
            return info | {"factors": None}
        return info | {
            "factors": {
                "given": str(self._factors_given),
                "per_layer": self.layer_factors,
                "sha256": self.factors.digest(len(self.layer_factors or ())),
                "origin": dict(self.factors.origin),
            }
        }

    def needs_check(self) -> bool:
        """Only with factors: any model that ``hf`` takes runs without."""
        return self.factors is not None

    def check(self, skeleton: nn.Module) -> None:
        """Check the factors against the model's layers."""
        assert self.factors is not None
        depth = len(rope.find_decoder(skeleton).layers)
        try:
            self.factors.per_layer(depth)
        except FactorsError as error:
            given = self._factors_given
            source = f"factors={given}" if isinstance(given, str | Path | int | float) else "factors"
            default = "; it is the reference model, as no pretrained= was given: add pretrained=YOUR_MODEL"
            raise FactorsError(f"{source}: {error}{default if self._by_default else ''}") from None


Method = LPES
