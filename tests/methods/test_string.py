"""STRING: logits against slow float64 code, and the plain model as its limit."""

import math

import pytest
import torch

from checks import apart, inputs, logits
from lpes_eval.errors import UserError
from lpes_eval.methods.string import STRING
from slow import slow_llama
from tiny_models import tiny_config, tiny_model


def turned(x, angle_of):
    """One query or key (D,) rotated by ``angle_of(i)`` in its i-th plane."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        a, b, angle = x[i], x[i + half], angle_of(i)
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return out


def slow_string(model, tokens, shift, window):
    """A Llama's logits in float64, each query rotated for each key by the distance that STRING gives them."""
    width, theta = model.config.head_dim, model.config.rope_parameters["rope_theta"]

    def attend(h, hidden, project):
        heads = []
        for q, k, v in zip(*(project(name, hidden) for name in "qkv"), strict=True):
            out = []
            for m in range(len(tokens)):
                scores = []
                for n in range(m + 1):
                    distance = m - n if m - n < shift else m - n - shift + window
                    query = turned(q[m], lambda i, distance=distance: distance * theta ** (-2 * i / width))
                    scores.append(query @ k[n] / math.sqrt(width))
                out.append(torch.stack(scores).softmax(-1) @ v[: m + 1])
            heads.append(torch.stack(out))
        return torch.stack(heads)

    return slow_llama(model, tokens, attend)


@pytest.mark.parametrize(("shift", "window"), [(7, 3), (5, 1)])
def test_logits_are_those_of_a_slow_implementation(llama, shift, window):
    tokens = inputs()["input_ids"][1]
    expected, plain = slow_string(llama, tokens, shift, window), logits(llama, input_ids=tokens[None])[0]
    method = STRING.apply(llama, shift=shift, window=window)
    found = logits(llama, input_ids=tokens[None])[0]
    assert apart(found, expected) < 1e-4
    assert apart(found[:shift], plain[:shift]) < 1e-5
    assert apart(found, plain) > 1e-2
    method.detach()
    assert torch.equal(logits(llama, input_ids=tokens[None])[0], plain)


def test_up_to_the_shift_it_is_the_plain_model(llama):
    plain = logits(llama)
    method = STRING.apply(llama)
    assert method.shift == llama.config.max_position_embeddings // 3
    assert torch.equal(logits(llama), plain)


def test_a_sliding_window_hides_what_is_beyond_it():
    model = tiny_model(tiny_config("mistral"))
    window = model.config.sliding_window
    plain = logits(model)
    STRING.apply(model, shift=window, window=window // 2)
    assert apart(logits(model)[1], plain[1]) < 1e-5  # nothing that is seen is far


@pytest.mark.parametrize("settings", [{"shift": 4, "window": 4}, {"shift": 0}, {"window": "x"}])
def test_what_makes_no_sense_is_refused(settings):
    with pytest.raises(UserError, match=r"window|shift"):
        STRING.Inside(**settings)
