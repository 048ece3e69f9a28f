"""Outputs of layers in earlier prefills: layers below the first one whose factor has changed are not run again.

The output of a layer depends on its factor and on those of the layers below it, and the individuals of a search often
begin with the same factors. A layer whose output is known computes its keys and values, and no more.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from lpes_eval import rope
from lpes_eval.engine.kv_buffer import Buffer, Stored

MOST = 2 << 30
"""Bytes that are kept of one model; what was not needed for longest goes first."""

_kept: WeakKeyDictionary[nn.Module, LayerOutputs] = WeakKeyDictionary()


def of(model: nn.Module) -> LayerOutputs:
    """A model's, for all engines that ask it; empty for each new one, as its weights may have changed."""
    if model not in _kept:
        _kept[model] = LayerOutputs(rope.find_decoder(model).layers)
    _kept[model].clear()
    return _kept[model]


class LayerOutputs:
    """The layers' outputs, of (B, T, d), by the prompts and the factors of the layer and of those below."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._outputs: OrderedDict[tuple[Hashable, tuple[float, ...]], Any] = OrderedDict()
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._outputs.clear()
        self._left = MOST

    @contextlib.contextmanager
    def reused(self, prompts: Hashable, factors: Sequence[float], buffer: Buffer) -> Iterator[int]:
        """Within, a prefill of the prompts runs only the layers above those that are known; yields how many these are.

        Args:
            prompts: the tokens of the forward pass.
            factors: those in force, one a layer.
            buffer: the cache of the forward pass.
        """
        keys = [(prompts, tuple(factors[: h + 1])) for h in range(len(self._layers) - 1)]
        known = 0
        while known < len(keys) and keys[known] in self._outputs:
            self._outputs.move_to_end(keys[known])
            known += 1
        before = [vars(layer).get("forward") for layer in self._layers]  # accelerate has its own there
        for h, (layer, key) in enumerate(zip(self._layers, keys, strict=False)):
            layer.forward = (self._known if h < known else self._noted)(layer.forward, key)
        buffer.known = known
        try:
            yield known
        finally:
            buffer.known = 0
            for layer, forward in zip(self._layers[:-1], before, strict=False):
                del layer.forward
                if forward is not None:
                    layer.forward = forward

    def _known(self, forward: Callable[..., Any], key: Any) -> Callable[..., Any]:
        output = self._outputs[key]

        def stored(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Stored):
                forward(*args, **kwargs)
            return output

        return stored

    def _noted(self, forward: Callable[..., Any], key: Any) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if all(isinstance(part, Tensor | None) for part in _parts(output)):  # else it is run every time
                self._left += _size(self._outputs.pop(key, ())) - _size(output)
                self._outputs[key] = output
                while self._left < 0:
                    self._left += _size(self._outputs.popitem(last=False)[1])
            return output

        return noted


def _parts(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def _size(output: Any) -> int:
    return sum(part.nbytes for part in _parts(output) if part is not None)
