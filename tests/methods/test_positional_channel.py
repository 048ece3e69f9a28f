"""Positional-channel scaling: against slow, obvious float64 code; the search on channels whose shape is known."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from checks import LENGTH, apart, inputs, logits
from lpes_eval import reference
from lpes_eval.errors import UserError
from lpes_eval.methods import positional_channel
from lpes_eval.methods.positional_channel import PositionalChannel, candidates, ranked
from slow import causal, slow_llama, turn


def slow_scaling(model, tokens, end, channel, scale, layers):
    """A Llama's logits in float64: tokens from ``end`` on attend with the channel scaled."""

    def attend(h, hidden, project):
        other = hidden.clone()
        if h in layers:
            other[:, channel] *= scale
        q, k = ([turn(model, project(name, each)) for each in (hidden, other)] for name in "qk")
        v = project("v", hidden)
        plain, scaled = (torch.stack(list(map(causal, q[i], k[i], v))) for i in (0, 1))
        return torch.cat((plain[:, :end], scaled[:, end:]), dim=1)

    return slow_llama(model, tokens, attend)


@pytest.mark.parametrize("end", [LENGTH - 1, 11])
def test_logits_are_those_of_a_slow_implementation(llama, end):
    tokens = inputs()["input_ids"][1]
    expected = slow_scaling(llama, tokens, end, 5, -3, (1, 2))
    plain = logits(llama, input_ids=tokens[None])[0]
    method = PositionalChannel.apply(llama, channel=5, scale=-3)
    with method.prompt_ends_at(end):
        found = logits(llama, input_ids=tokens[None])[0]
    assert method.layers == (1, 2)  # from 5/16 to 13/16 of four
    assert apart(found, expected) < 1e-4
    assert torch.equal(found[:end], plain[:end])  # nothing before the prompt's last token is changed
    assert apart(found[end:], plain[end:]) > 1e-2


def test_the_search_finds_the_channels_that_rise_or_fall_smoothly_in_most_layers():
    rng = np.random.default_rng(0)
    depth, length = 12, 400
    states = rng.normal(size=(depth, length, 6))  # noise in all channels but these:
    place = np.linspace(0, 1, length)
    states[:, :, 1] = place**2 + 0.01 * rng.normal(size=(depth, length))  # rises
    states[:, :, 3] = -place  # falls, and is the smoothest
    states[:, :, 4] = np.sin(9 * place)  # smooth, and neither
    states[:3, :, 5] = place  # rises in one of the layers that count
    assert ranked(states) == [3, 1]
    assert ranked(rng.normal(size=(3, 50, 4))) == []


def test_a_channel_is_searched_where_none_is_given_and_the_same_prompts_give_the_same(monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(reference.path())
    found = candidates(model, samples=3)
    assert len(set(found)) == len(found) == 10
    monkeypatch.setattr(positional_channel, "candidates", partial(candidates, samples=3))
    method = PositionalChannel.apply(model)
    assert (method.describe(), method.layers) == ({"channel": found[0], "scale": 0.0}, (2, 3, 4))
    shallow = AutoModelForCausalLM.from_pretrained(reference.path("kv"))  # one layer counts, more than one has to
    with pytest.raises(UserError, match=r"no hidden channel is monotone .* give channel="):
        PositionalChannel.apply(shallow)
