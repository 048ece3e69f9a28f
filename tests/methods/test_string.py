"""STRING: logits against slow float64 code, and the plain model as its limit."""

import math

import pytest
import torch

from checks import apart, inputs, logits
from lpes_eval.errors import UserError
from lpes_eval.methods.string import STRING
from slow import slow_llama, turn
from tiny_models import tiny_config, tiny_model


def slow_string(model, tokens, shift, window):
    """A Llama's logits in float64, each query rotated for each key by the distance that STRING gives them."""

    def attended(m, q, k, v):
        """What token m gets of one head."""
        distances = [m - n if m - n < shift else m - n - shift + window for n in range(m + 1)]
        queries = turn(model, q[m].expand(m + 1, -1), positions=distances)
        return ((queries * k[: m + 1]).sum(-1) / math.sqrt(len(q[m]))).softmax(-1) @ v[: m + 1]

    def attend(h, hidden, project):
        heads = zip(*(project(name, hidden) for name in "qkv"), strict=True)
        return torch.stack([torch.stack([attended(m, *head) for m in range(len(tokens))]) for head in heads])

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


def test_a_kernel_that_takes_no_mask_is_refused_also_where_the_model_needs_none(llama):
    STRING.apply(llama, shift=7, window=3)
    llama.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UserError, match=r"STRING: flash_attention_2 takes no mask; load the model with .*sdpa"):
        logits(llama, input_ids=inputs()["input_ids"][1:])
