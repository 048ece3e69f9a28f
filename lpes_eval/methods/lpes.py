"""Layer factors: every decoder layer has its own factor; the model type ``lpes``.

lm_eval --model lpes --model_args pretrained=lmsys/vicuna-7b-v1.5,factors=factors.json --tasks kv_retrieval
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from lpes_eval import factors as factors_file
from lpes_eval import rope, weights
from lpes_eval.errors import FactorsError, UserError
from lpes_eval.factors import FIELD, Factors, carried, text_config
from lpes_eval.files import entry
from lpes_eval.methods.base import InModel, MethodLM

logger = logging.getLogger(__name__)

ASKED = ("apply_chat_template", "system_instruction", "num_fewshot", "gen_kwargs")
"""Settings of a search that its scores depend on, and that are flags of ``lm_eval``."""


@dataclass
class LayerFactors(InModel):
    """Layer factors inside a model: a file's path, one number, or one a layer; None for those of the model's folder."""

    factors: Any = None

    def __post_init__(self) -> None:
        """Read the factors; ``FactorsError`` where they cannot be."""
        self.parsed: Factors | None = factors_file.parse(self.factors) if self.factors is not None else None

    @property
    def plain(self) -> bool:  # type: ignore[override]
        """Whether there are no factors."""
        return self.parsed is None

    def read(self, config: Any) -> None:
        """Without factors of its own, take those that the model's folder carries."""
        if self.parsed is None and (in_config := carried(config)) is not None:
            self.factors, self.parsed = f"{FIELD} in config.json", in_config

    def check(self, model: nn.Module) -> None:
        """Refuse a model without rotary position embeddings, and one with another number of layers."""
        try:
            rope.resolve(model, self.parsed)
        except FactorsError as error:
            given = f"={self.factors}" if isinstance(self.factors, str | Path | int | float) else ""
            raise FactorsError(f"factors{given}: {error}") from None

    def attach(self, model: nn.Module) -> None:
        """Put the factors into the model, in place of others; without any, refuse one that has some in it."""
        self._model, config = model, getattr(model, "config", None)
        self._carried = getattr(text_config(config), FIELD, None)
        self.read(config)
        if self.parsed is not None:
            self.check(model)
            rope.apply(model, self.parsed)
            if asked := [name for name in ASKED if self.parsed.origin.get("search", {}).get(name)]:
                logger.warning("these factors were found with --%s; ask in the same way", ", --".join(asked))
        elif rope.applied(model) is not None:
            way_out = "take them back for the plain model (lpes_eval.remove), or give factors="
            raise UserError(f"pretrained: the model has layer factors in it; {way_out}")
        elif (method := rope.method_in(model)) is not None:
            raise UserError(f"pretrained: the model has {method} in it; detach it first")

    def detach(self) -> None:
        """Leave the plain model, with what its folder carries."""
        rope.remove(self._model)
        if self._carried is not None:
            setattr(text_config(self._model.config), FIELD, self._carried)

    def describe(self) -> dict[str, Any]:
        """The factors, one a layer."""
        return {"factors": rope.applied(self._model)}


class LPES(MethodLM):
    """``hf`` with layer factors; its arguments are those of ``hf`` and of ``LayerFactors``.

    Without ``pretrained`` it loads the model that the factors name as their origin, or the reference model.
    """

    title = "Layer factors"
    paper = "2606.27705"
    published_time: ClassVar[float | None] = 1.0
    Inside: ClassVar[Any] = LayerFactors
    by_engine = True

    @classmethod
    def benchmark_settings(cls, model: nn.Module) -> dict[str, Any]:
        """All factors different, from above 1 to 1.8: the most expensive."""
        depth = len(rope.find_decoder(model).layers)
        return {"factors": [1.0 + 0.8 * (h + 1) / depth for h in range(depth)]}

    def set_factors(self, factors: Any) -> None:
        """Put other factors in force, without loading anything anew; None for the plain model."""
        method = LayerFactors(factors)
        if method.plain:
            rope.remove(self.model)
        method.attach(self.model)
        self.method = method

    def note_carried_factors(self) -> None:
        """Say so where the model's folder carries factors, for whoever measures the model without them."""
        if self.layer_factors is not None:
            logger.warning("the model carries layer factors (%s in config.json); they are left out here", FIELD)

    @property
    def layer_factors(self) -> list[float] | None:
        """The factors in force, one a layer, or None."""
        return rope.applied(self.model)

    @property
    def cache_key(self) -> str:
        """As of every method; Position Interpolation is layer factors that are all the same."""
        return weights.cache_key(self, "lpes", {"factors": self.layer_factors})

    def recorded(self) -> dict[str, Any]:
        """The factors, their hash and their origin."""
        parsed, values = self.method.parsed, self.layer_factors or []
        if parsed is None:
            return {"factors": None}
        hashed, origin = parsed.digest(len(values)), dict(parsed.origin)
        return {"factors": {"given": str(self.method.factors), "per_layer": values, "sha256": hashed, "origin": origin}}

    def default_model(self, kwargs: dict[str, Any]) -> str:
        """The factors' origin, in the revision that they name, or else the reference model."""
        name = None
        if (parsed := self.method.parsed) is not None:
            name, revision = parsed.model
            if revision is not None:
                kwargs.setdefault("revision", revision)
            if (file := entry(parsed.origin, "model_args").get("gguf_file")) is not None:
                kwargs.setdefault("gguf_file", file)
        return name or super().default_model(kwargs)


Method = LPES
