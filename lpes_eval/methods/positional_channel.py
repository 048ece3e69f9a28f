"""Positional-channel scaling (arXiv 2406.02536): one channel of the hidden states scaled, for the last token alone.

lm_eval --model positional_channel --model_args pretrained=lmsys/vicuna-7b-v1.5,channel=2393 --tasks kv_retrieval

Some channels of the hidden states grow or fall smoothly with the position. In the chosen layers the channel is
multiplied by s < 1 in what the attention makes queries and keys of, and only the prompt's last token and the answer's
tokens attend in this way. The cache holds the scaled keys. As in the authors' code
(github.com/PositionalHidden/PositionalHidden) hidden states are averaged over random prompts; a channel is monotone in
a layer if a cubic fitted to it is; of those so in more than a quarter of the layers the smoothest one is taken.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.signal import savgol_filter
from torch import Tensor, nn

from lpes_eval.errors import UserError
from lpes_eval.flags import at_least, finite, of
from lpes_eval.methods.attention import Call
from lpes_eval.methods.prompt import PromptInterception, PromptLM

SAMPLES, LENGTH = 200, 1000  # random prompts and their tokens, as the authors


@dataclass(eq=False)
class ScaledChannel(PromptInterception):
    """Positional-channel scaling inside a model: a hidden ``channel`` (None: it is searched) multiplied by ``scale``.

    The scale is below 1; 0 in most of the authors' configurations, -1 in some.
    """

    channel: Any = None
    scale: float = 0.0
    name = "Positional-channel scaling"

    def __post_init__(self) -> None:
        """Read what a user wrote."""
        self.channel = of(at_least(0), "channel", self.channel) if self.channel is not None else None
        self.scale = of(finite, "scale", self.scale)
        if self.scale >= 1:
            raise UserError(f"scale={self.scale:g}: expected less than 1")

    def chosen_layers(self, depth: int) -> range:
        """From 5/16 to 13/16 of the depth, as the authors' layers 10 to 25 of 32."""
        return range(round(depth * 5 / 16), round(depth * 13 / 16))

    def check(self, model: Any) -> None:
        """Refuse a model without the channel, too."""
        super().check(model)
        width = model.config.get_text_config(decoder=True).hidden_size
        if self.channel is not None and self.channel >= width:
            raise UserError(f"channel={self.channel}: the model has {width} hidden channels, counted from 0")

    def prepare(self, model: nn.Module) -> None:
        """Find the channel where none is given."""
        if self.channel is None:
            if not (found := candidates(model)):
                raise UserError("no hidden channel is monotone in more than a quarter of the layers; give channel=N")
            self.channel = found[0]

    def attend(self, call: Call) -> Tensor:
        """Attention of the model as it is, and with the channel scaled from the prompt's last token on."""
        hidden = call.given["hidden_states"].clone()
        hidden[..., self.channel] *= self.scale
        query, key = call.rotate(*self.project(call, hidden_states=hidden), *call.table)
        if call.held > 0:  # the answer's tokens
            return call.compute(query, *call.cached(key, call.value))
        call.cached(key, call.value)
        length, mask = query.shape[2], call.mask
        last = call  # for the last token alone
        if mask is not None and mask.ndim == 4:
            mask = mask[..., :length]  # a static cache has room for more
            call, last = replace(call, mask=mask), replace(call, mask=mask[:, :, -1:])
        plain = call.compute(*call.rotate(call.query, call.key, *call.table), call.value)
        if self.prompt_is_all(call):
            return torch.cat((plain[:, :-1], last.compute(query[:, :, -1:], key, call.value)), dim=1)
        after = torch.arange(length, device=query.device) >= self.prompt_end(call)[:, None]  # (B, T)
        return torch.where(after[..., None, None], call.compute(query, key, call.value), plain)

    def plainly(self, call: Call) -> Tensor:
        """The attention of the model as it is, where its projections can be computed once more."""
        query, key = call.rotate(*self.project(call), *call.table)
        return call.compute(query, *call.cached(key, call.value))


@torch.no_grad()
def candidates(model: Any, samples: int = SAMPLES) -> list[int]:
    """The ten smoothest hidden channels of a plain model that are monotone in the position, the smoothest first."""
    config = model.config.get_text_config(decoder=True)
    length = min(LENGTH, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    total: Any = 0.0
    for _ in range(samples):
        ids = torch.randint(config.vocab_size, (1, length), generator=generator).to(model.device)
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
        total = total + torch.stack([state[0].float().cpu() for state in states[1:]])  # without the embeddings
    return ranked((total / samples).numpy())[:10]


def ranked(states: np.ndarray) -> list[int]:
    """All channels that are monotone, the smoothest first, from mean hidden states (layers, positions, channels)."""
    depth, length, channels = states.shape
    direction = np.zeros((depth, channels), dtype=int)  # 1: rises, -1: falls
    roughness = np.full((depth, channels), np.inf)
    for h in range(2, depth - 1):
        middle = _unit(states[h, 3 * length // 10 :])
        places = np.vander(np.arange(len(middle)) / len(middle), 4)
        slopes = np.diff(places @ np.linalg.lstsq(places, middle, rcond=None)[0], axis=0)  # of a cubic
        direction[h] = (slopes >= 0).all(0).astype(int) - (slopes <= 0).all(0)
        smoothed = savgol_filter(_unit(states[h, length // 5 :]), window_length=10, polyorder=3, axis=0)
        roughness[h] = np.square(np.diff(smoothed, n=2, axis=0)).sum(0)
    rises, falls = (direction == 1).sum(0), (direction == -1).sum(0)
    monotone = direction == np.where(rises > falls, 1, -1)
    found = np.where(np.maximum(rises, falls) > depth // 4, np.where(monotone, roughness, np.inf).min(0), np.inf)
    return [int(channel) for channel in np.argsort(found, kind="stable") if np.isfinite(found[channel])]


def _unit(values: np.ndarray) -> np.ndarray:
    """Each column between 0 and 1."""
    values = values.astype(np.float64) - values.min(0)
    return values / np.where(values.max(0) > 0, values.max(0), 1.0)


class PositionalChannel(PromptLM):
    """``hf`` with positional-channel scaling; its arguments are those of ``hf`` and of ``ScaledChannel``."""

    title = ScaledChannel.name
    paper = "2406.02536"
    Inside = ScaledChannel

    @classmethod
    def benchmark_settings(cls, model: nn.Module) -> dict[str, Any]:
        """A channel without a search: which one it is does not change the cost."""
        return {"channel": 0}


Method = PositionalChannel
