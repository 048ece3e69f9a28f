"""Positional-channel scaling: against slow, obvious float64 code; the search on channels whose shape is known."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.families import tiny_config, tiny_model
from checks import LENGTH, PADDING, distance, generated, inputs, slow_llama, turn
from lpes_eval import reference
from lpes_eval.errors import UserError
from lpes_eval.methods.positional_channel import PositionalChannel, candidates, ranked

FAMILIES = ("llama", "qwen2", "mistral", "gemma3_text", "stablelm", "glm", "phi3", "gpt_neox")
STRONG = {"channel": 5, "scale": -3, "layers": "0:4"}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(tiny_config(request.param))


def slow_scaling(model, tokens, end, channel, scale, layers):
    """A Llama's logits in float64, token by token: those from ``end`` on attend with the channel scaled."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads

    def attend(h, hidden, project):
        other = hidden.clone()
        if h in layers:
            other[:, channel] *= scale
        q, k = ([turn(model, project(name, each)) for each in (hidden, other)] for name in "qk")
        v = project("v", hidden)
        out = torch.zeros_like(q[0])
        for t in range(len(tokens)):
            which = int(t >= end)
            for head in range(len(out)):
                scores = k[which][head // group, : t + 1] @ q[which][head, t] / math.sqrt(out.shape[-1])
                out[head, t] = scores.softmax(-1) @ v[head // group, : t + 1]
        return out

    return slow_llama(model, tokens, attend)


@pytest.mark.parametrize("end", [LENGTH - 1, 11])
def test_logits_are_those_of_a_slow_implementation(end):
    model = tiny_model(tiny_config("llama"))
    tokens = inputs()["input_ids"][1]
    expected = slow_scaling(model, tokens, end, 5, -3, (1, 2))
    with torch.no_grad():
        plain = model(tokens[None]).logits[0].double()
        method = PositionalChannel.apply(model, channel=5, scale=-3)
        with method.prompt_ends_at(end):
            found = model(tokens[None]).logits[0].double()
    assert method.layers == (1, 2)  # from 5/16 to 13/16 of four
    assert (found - expected).abs().max() < 1e-4
    assert torch.equal(found[:end], plain[:end])  # nothing before the prompt's last token is changed
    assert (found[end:] - plain[end:]).abs().max() > 1e-2


def test_with_a_cache_a_static_one_and_none_it_generates_the_same(model):
    method = PositionalChannel.apply(model, **STRONG)
    with method.prompt_ends_at(LENGTH - 1):
        cached, anew = generated(model), generated(model, use_cache=False)
        static = generated(model, cache_implementation="static")
    for row, start in ((0, PADDING), (1, 0)):
        alone = generated(model, {"input_ids": inputs()["input_ids"][row : row + 1, start:]})
        assert distance([a[row] for a in cached.logits], [b[0] for b in alone.logits]) < 1e-4
    method.detach()
    assert distance(cached.logits, generated(model).logits) > 1e-2
    assert distance(cached.logits, anew.logits) < 1e-4
    assert distance(cached.logits, static.logits) < 1e-4


def test_likelihoods_scale_from_the_last_token_of_the_context_on():
    lm = PositionalChannel(channel=19, scale=-20, batch_size=3)
    texts = torch.randint(20, 700, (4, 60), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [(("", ""), text[:cut], text[cut:]) for text, cut in zip(texts, (40, 20, 59, 5), strict=True)]
    found = [score for score, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)]
    expected, plain = [], []
    for scores in (expected, plain):
        for _, context, continuation in requests:
            with torch.no_grad(), lm.method.prompt_ends_at(len(context) - 1):
                logits = lm.model(torch.tensor([context + continuation[:-1]])).logits[0, -len(continuation) :]
            scores.append(logits.log_softmax(-1)[range(len(continuation)), continuation].sum().item())
        if scores is expected:
            lm.method.detach()
    assert found == pytest.approx(expected, abs=1e-3)
    assert found != pytest.approx(plain, abs=1e-2)


def test_the_search_finds_the_channels_that_rise_or_fall_smoothly_in_most_layers():
    rng = np.random.default_rng(0)
    depth, length = 12, 400
    states = rng.normal(size=(depth, length, 6))  # noise in all channels but these:
    place = np.linspace(0, 1, length)
    states[:, :, 1] = place**2 + 0.01 * rng.normal(size=(depth, length))  # rises
    states[:, :, 3] = -place  # falls, and is the smoothest
    states[:, :, 4] = np.sin(9 * place)  # smooth, and neither
    states[:3, :, 5] = place  # rises in one of the layers that count
    assert ranked(states, most=2) == [3, 1]
    assert ranked(rng.normal(size=(3, 50, 4)), most=5) == []


def test_a_channel_is_searched_where_none_is_given_and_the_same_prompts_give_the_same():
    model = AutoModelForCausalLM.from_pretrained(reference.path())
    found = candidates(model, samples=3)
    assert len(set(found)) == len(found) == 10
    method = PositionalChannel.apply(model, samples=3)
    assert method.describe() == {"channel": found[0], "scale": 0.0, "layers": (2, 3, 4)}
    method.detach()
    shallow = AutoModelForCausalLM.from_pretrained(reference.path("kv"))  # one layer counts, more than one has to
    with pytest.raises(UserError, match=r"no hidden channel is monotone .* give channel="):
        PositionalChannel.apply(shallow, samples=1)


def test_what_cannot_be_is_refused():
    model = tiny_model(tiny_config("llama"))
    for settings, reason in (
        ({"channel": 64}, "channel=64: the model has 64 hidden channels"),
        ({"channel": "x"}, "channel=x: expected a whole number"),
        ({"scale": 1}, "scale=1,.*expected scale < 1"),
        ({"scale": "nan"}, "expected scale < 1"),
        ({"samples": 0}, "samples=0: expected"),
        *(({"layers": layers}, f"layers={layers}: expected FIRST:END with") for layers in ("2", "3:3", "1:5", "a:b")),
    ):
        with pytest.raises(UserError, match=reason):
            PositionalChannel.apply(model, **{"channel": 0} | settings)
