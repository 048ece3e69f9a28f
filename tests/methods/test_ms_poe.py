"""Ms-PoE: ranking and attention against slow, obvious float64 code; cache, padding, and PI as its limit."""

import math

import pytest
import torch
from lpes_eval.peers.ms_poe import MsPoE, Settings
from peer_checks import LENGTH, PADDING, distance, generated, inputs

import lpes_eval
from benchmarks.families import tiny_config, tiny_model
from lpes_eval.errors import UserError

FAMILIES = ("llama", "qwen2", "mistral", "gemma2", "gemma3_text", "stablelm", "glm")
SETTINGS = Settings(threshold=1.5)
"""Over a few random tokens no attention is three times its mean; the factors and the layers are the paper's."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(tiny_config(request.param))


def slow_llama(model, tokens, settings, end):
    """A Llama's logits under Ms-PoE in float64, head by head and key by key, and the heads in their order by layer."""
    config, weights = model.config, {name: p.double() for name, p in model.state_dict().items()}
    heads, key_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight

    def turn(x, factor):
        out = x.clone()
        for position in range(len(tokens)):
            for i in range(width // 2):
                angle = position / factor * config.rope_parameters["rope_theta"] ** (-2 * i / width)
                a, b = x[position, i], x[position, i + width // 2]
                out[position, i] = a * math.cos(angle) - b * math.sin(angle)
                out[position, i + width // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    x = weights["model.embed_tokens.weight"][tokens]
    orders = {}
    for h in range(config.num_hidden_layers):
        layer = {
            n.removeprefix(f"model.layers.{h}."): w for n, w in weights.items() if n.startswith(f"model.layers.{h}.")
        }
        inner = norm(x, layer["input_layernorm.weight"])
        q, k, v = ((inner @ layer[f"self_attn.{name}_proj.weight"].T).split(width, dim=-1) for name in "qkv")
        group = heads // key_heads
        factors = [1.0] * heads
        if h >= settings.skip:
            awareness = []
            for head in range(heads):
                scores = [float(q[head][end] @ k[head // group][key]) / math.sqrt(width) for key in range(end + 1)]
                total = sum(math.exp(score) for score in scores)
                attention = [math.exp(score) / total for score in scores]
                mean = sum(attention) / len(attention)
                awareness.append(sum(a >= settings.threshold * mean for a in attention) / len(attention))
            order = sorted(range(heads), key=lambda head: -awareness[head])  # stable: equal heads keep their order
            orders[h] = order
            for rank, head in enumerate(order):
                factors[head] = settings.min + (settings.max - settings.min) * rank / (heads - 1)
        out = []
        for head in range(heads):
            query, key = turn(q[head], factors[head]), turn(k[head // group], factors[head])
            scores = query @ key.T / math.sqrt(width)
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            out.append(scores.softmax(-1) @ v[head // group])
        x = x + torch.cat(out, dim=-1) @ layer["self_attn.o_proj.weight"].T
        inner = norm(x, layer["post_attention_layernorm.weight"])
        gate = inner @ layer["mlp.gate_proj.weight"].T
        inner = gate * gate.sigmoid() * (inner @ layer["mlp.up_proj.weight"].T)
        x = x + inner @ layer["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T, orders


@pytest.mark.parametrize("end", [LENGTH - 1, 11])
def test_ranking_and_logits_are_those_of_a_slow_implementation(end):
    model = tiny_model(tiny_config("llama"))
    tokens = inputs()["input_ids"][1]
    expected, orders = slow_llama(model, tokens, SETTINGS, end)
    method = MsPoE(model, SETTINGS)
    with torch.no_grad(), method.prompt_ends_at(end):
        logits = model(tokens[None]).logits[0]
    found = {h: ranks[0].argsort().tolist() for h, ranks in method.ranks.items()}
    assert found == orders
    assert set(orders) == {2, 3}
    assert any(order != sorted(order) for order in orders.values())
    assert (logits.double() - expected).abs().max() < 1e-4
    method.detach()
    with torch.no_grad():
        assert (model(tokens[None]).logits[0].double() - expected).abs().max() > 1e-2


def test_attention_that_just_reaches_the_threshold_counts():
    """A head whose queries are 0 attends to 16 keys alike: at threshold 1 all count (Eq. 1 has >=), above it none."""
    model = tiny_model(tiny_config("llama"))
    width, tokens = model.config.head_dim, inputs(1, 16, 0)["input_ids"]
    last = model.config.num_attention_heads - 1
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight[last * width :] = 0
        for threshold, rank in ((1.0, 0), (1.001, last)):
            method = MsPoE(model, Settings(threshold=threshold))
            model(tokens)
            assert [ranks[0, last].item() for ranks in method.ranks.values()] == [rank, rank]
            method.detach()


def test_every_layer_is_taken_where_none_is_to_be_left_out():
    method = MsPoE(tiny_model(tiny_config("llama")), Settings(skip=0))
    assert method.layers == (0, 1, 2, 3)


def test_one_factor_for_all_heads_is_position_interpolation_in_these_layers(model):
    with torch.no_grad():
        plain = model(**inputs()).logits
        method = MsPoE(model, Settings(1.5, 1.5))
        found = model(**inputs()).logits, generated(model)
        method.detach()
        assert torch.equal(model(**inputs()).logits, plain)
        lpes_eval.apply(model, [1.0, 1.0, *[1.5] * (model.config.num_hidden_layers - 2)])
        expected = model(**inputs()).logits, generated(model)
        lpes_eval.remove(model)
    assert (found[0] - expected[0]).abs().max() < 1e-5
    assert (found[0] - plain).abs().max() > 1e-3
    assert torch.equal(found[1].sequences, expected[1].sequences)


def test_nearly_one_factor_is_position_interpolation_by_the_general_way(model):
    """The shortcut for equal factors is not taken, keys are rotated head by head, and heads are ranked."""
    with torch.no_grad():
        method = MsPoE(model, Settings(1.5, 1.5 + 1e-6))
        found = model(**inputs()).logits
        assert set(method.ranks) == set(method.layers)
        method.detach()
        lpes_eval.apply(model, [1.0, 1.0, *[1.5] * (model.config.num_hidden_layers - 2)])
        expected = model(**inputs()).logits
        lpes_eval.remove(model)
    visible = inputs()["attention_mask"].bool()
    assert (found - expected)[visible].abs().max() < 2e-3


def test_the_choice_stands_with_a_cache_and_without_one(model):
    method = MsPoE(model, SETTINGS)
    try:
        with method.prompt_ends_at(LENGTH - 1):
            cached = generated(model)
            chosen = {h: ranks.clone() for h, ranks in method.ranks.items()}
            anew = generated(model, use_cache=False)
    finally:
        method.detach()
    assert torch.equal(cached.sequences, anew.sequences)
    assert distance(cached.logits, anew.logits) < 1e-4
    assert all(torch.equal(chosen[h], ranks) for h, ranks in method.ranks.items())


def test_a_prompt_in_chunks_is_refused_where_the_program_says_where_it_ends():
    model = tiny_model(tiny_config("llama"))
    method = MsPoE(model, SETTINGS)
    with (
        pytest.raises(UserError, match="the prompt ends in column 19, and the first pass has 7 columns; run the whole"),
        method.prompt_ends_at(torch.tensor([11, LENGTH - 1])),
    ):
        generated(model, prefill_chunk_size=7)
    with method.prompt_ends_at(LENGTH - 1):
        generated(model, prefill_chunk_size=LENGTH)


def test_each_row_of_a_padded_batch_is_ranked_as_if_alone(model):
    method = MsPoE(model, SETTINGS)
    try:
        batch, ranks = generated(model), dict(method.ranks)
        for row, start in ((0, PADDING), (1, 0)):
            alone = generated(model, {"input_ids": inputs()["input_ids"][row : row + 1, start:]})
            assert all(torch.equal(ranks[h][row], method.ranks[h][0]) for h in ranks)
            assert distance([a[row] for a in batch.logits], [b[0] for b in alone.logits]) < 1e-4
    finally:
        method.detach()


def test_padding_at_the_right_is_not_the_prompts_end():
    model = tiny_model(tiny_config("llama"))
    given = inputs()
    flipped = {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"].flip(1)}
    method = MsPoE(model, SETTINGS)
    with torch.no_grad():
        both = model(**flipped).logits[0, : LENGTH - PADDING]
        ranks = dict(method.ranks)
        alone = model(flipped["input_ids"][:1, : LENGTH - PADDING]).logits[0]
    assert all(torch.equal(ranks[h][0], method.ranks[h][0]) for h in ranks)
    assert (both - alone).abs().max() < 1e-4


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="min=2,max=1: expected 0 < min <= max"):
        Settings(2, 1)
    with pytest.raises(UserError, match="skip=-1"):
        Settings(skip=-1)
    with pytest.raises(UserError, match="the model has 4 layers, of which none would be left"):
        MsPoE(tiny_model(tiny_config("llama")), Settings(skip=4))
