"""Ms-PoE: ranking and attention against slow, obvious float64 code; cache, padding, and PI as its limit."""

import math

import pytest
import torch

import lpes_eval
from checks import LENGTH, PADDING, apart, inputs, logits
from lpes_eval.errors import UserError
from lpes_eval.methods.ms_poe import MsPoE
from slow import causal, slow_llama, turn
from tiny_models import tiny_config, tiny_model

SETTINGS = {"threshold": 1.5}
"""Over a few random tokens no attention is three times its mean; the factors and the layers are the paper's."""


def slow_ms_poe(model, tokens, end, threshold=1.5, least=1.2, greatest=1.8, skip=2):
    """A Llama's logits under Ms-PoE in float64, head by head and key by key, and each head's factor by layer."""
    heads, width, chosen = model.config.num_attention_heads, model.config.head_dim, {}

    def attend(h, hidden, project):
        q, k, v = (project(name, hidden) for name in "qkv")
        factors, awareness = [1.0] * heads, []
        if h >= skip:
            for head in range(heads):
                scores = [float(q[head][end] @ k[head][key]) / math.sqrt(width) for key in range(end + 1)]
                total = sum(math.exp(score) for score in scores)
                attention = [math.exp(score) / total for score in scores]
                mean = sum(attention) / len(attention)
                awareness.append(sum(a >= threshold * mean for a in attention) / len(attention))
            head_order = sorted(range(heads), key=lambda head: -awareness[head])  # stable
            for i in range(heads):  # the i-th head of those sorted by awareness has the i-th factor (section 3.3)
                factors[head_order[i]] = least + (greatest - least) * i / (heads - 1)
            chosen[h] = factors
        each = zip(q, k, v, factors, strict=True)
        return torch.stack([causal(turn(model, a, s), turn(model, b, s), c) for a, b, c, s in each])

    return slow_llama(model, tokens, attend), chosen


@pytest.mark.parametrize("end", [LENGTH - 1, 11])
def test_factors_and_logits_are_those_of_a_slow_implementation(llama, end):
    tokens = inputs()["input_ids"][1]
    expected, factors = slow_ms_poe(llama, tokens, end)
    method = MsPoE.apply(llama, **SETTINGS)
    with method.prompt_ends_at(end):
        found = logits(llama, input_ids=tokens[None])[0]
    assert set(factors) == {2, 3}
    for h, expected_factors in factors.items():
        steps = method.factors(len(expected_factors))
        assert [steps[rank] for rank in method.ranks[h][0]] == pytest.approx(expected_factors)
    assert any(each != sorted(each) for each in factors.values())
    assert apart(found, expected) < 1e-4
    method.detach()
    assert apart(logits(llama, input_ids=tokens[None])[0], expected) > 1e-2


def test_attention_that_just_reaches_the_threshold_counts(llama):
    """A head whose queries are 0 attends to 16 keys alike: at threshold 1 all count (Eq. 1 has >=), above it none."""
    last, width = llama.config.num_attention_heads - 1, llama.config.head_dim
    for layer in llama.model.layers:
        layer.self_attn.q_proj.weight.data[last * width :] = 0
    for threshold, first in ((1.0, True), (1.001, False)):
        method = MsPoE.apply(llama, threshold=threshold)
        logits(llama, **inputs(1, 16, 0))
        assert [ranks[0][last].item() == 0 for ranks in method.ranks.values()] == [first] * 2
        method.detach()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "stablelm", "glm"])
def test_one_factor_for_all_heads_is_position_interpolation_in_these_layers(family):
    model, visible = tiny_model(tiny_config(family)), inputs()["attention_mask"].bool()
    plain = logits(model)
    method = MsPoE.apply(model, min=1.5, max=1.5)
    found = logits(model)
    assert set(method.ranks) == set(method.layers)
    method.detach()
    lpes_eval.apply(model, [1.0, 1.0, *[1.5] * (model.config.num_hidden_layers - 2)])
    assert apart(found[visible], logits(model)[visible]) < 1e-5
    assert apart(found[visible], plain[visible]) > 1e-3


def test_a_row_that_is_padded_at_the_right_is_ranked_as_the_row_alone(llama):
    method, (ids, mask) = MsPoE.apply(llama, skip=0, **SETTINGS), inputs().values()
    assert method.layers == (0, 1, 2, 3)
    both = logits(llama, input_ids=ids, attention_mask=mask.flip(1))
    first = [ranks[0] for ranks in method.ranks.values()]
    assert apart(both[0, :-PADDING], logits(llama, input_ids=ids[:1, :-PADDING])[0]) < 1e-4
    assert all(torch.equal(a, b[0]) for a, b in zip(first, method.ranks.values(), strict=True))


def test_the_model_type_says_where_the_prompt_ends():
    with pytest.raises(UserError, match="ends in column 19, and the first pass has 7"):
        MsPoE()._model_generate(inputs()["input_ids"], LENGTH + 2, ["\n"], prefill_chunk_size=7)
