"""What the peers share: attention taken over and given back, and rotary tables for other factors and bases."""

import copy
import inspect

import pytest
import torch
from lpes_eval.peers import moice
from lpes_eval.peers import router as routers
from lpes_eval.peers.attention import Interception, bases_for, check, frequencies, own_base
from lpes_eval.peers.buckets import Buckets
from lpes_eval.peers.ms_poe import MsPoE, Settings
from lpes_eval.peers.router import Router
from peer_checks import LENGTH, distance, generated, inputs
from transformers import DynamicCache

import lpes_eval
from benchmarks.families import tiny_config, tiny_model
from lpes_eval.errors import CacheError, UnsupportedModel, UserError

FAMILIES = (
    "llama",
    "qwen2",
    "mistral",
    "gemma2",  # soft capping
    "gemma3_text",  # two rotary tables
    "stablelm",  # a part of the head rotated
    "glm",  # neighbours paired
    "cohere2",  # layers without positions, which get the tables all the same
    "granite_swa",  # layers without positions, which get none
    "gpt_oss",  # attention sinks, and a table of half the width
    "gpt_neox",  # a cache by another name
)


def plain(call):
    cos, sin = call.rotation.own()
    query, key = (call.rotation.rotate(x, cos, sin) for x in (call.query, call.key))
    return call.attend(query, *call.cached(key, call.value))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(tiny_config(request.param))


def test_rotating_for_oneself_is_what_the_family_does(model):
    with torch.no_grad():
        expected, answer = model(**inputs()).logits, generated(model)
        interception = Interception(model, plain, "test")
        assert interception.layers
        assert (model(**inputs()).logits - expected).abs().max() < 1e-5
        found = generated(model)
        assert torch.equal(found.sequences, answer.sequences)
        assert distance(found.logits, answer.logits) < 1e-4
        interception.detach()
        assert torch.equal(model(**inputs()).logits, expected)
    assert not any("_peer" in name for module in model.modules() for name in module.__dict__)


def test_layers_are_taken_over_one_by_one_and_those_without_positions_never():
    model = tiny_model(tiny_config("cohere2"))  # every second layer here has no positions
    seen = []
    interception = Interception(model, lambda call: (seen.append(call.layer), plain(call))[1], "test", layers=[0, 1])
    model(**inputs())
    assert interception.layers == (0,)
    assert seen == [0]


def test_attention_is_computed_by_the_implementation_that_was_asked_for(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = tiny_model(tiny_config("llama"))
    expected = {}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        expected[implementation] = model(**inputs()).logits
        interception = Interception(model, plain, "test")
        assert torch.equal(model(**inputs()).logits, expected[implementation])
        interception.detach()
    assert not torch.equal(expected["sdpa"], expected["eager"])
    calls = []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    model.set_attn_implementation("sdpa")
    interception = Interception(model, plain, "test")
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *a, **k: (calls.append(1), sdpa(*a, **k))[1]
    )
    model(**inputs())
    assert len(calls) == model.config.num_hidden_layers


def test_values_that_heads_share_are_read_as_if_every_head_had_a_copy():
    model = tiny_model(tiny_config("qwen2"))
    assert model.config.num_key_value_heads < model.config.num_attention_heads

    def copied(call, values_too):
        groups = call.query.shape[1] // call.key.shape[1]
        cos, sin = call.rotation.own()
        query = call.rotation.rotate(call.query, cos, sin)
        key = call.rotation.rotate(call.key.repeat_interleave(groups, dim=1), cos, sin)
        value = call.value.repeat_interleave(groups, dim=1) if values_too else call.value
        return call.attend(query, *call.cached(key, value))

    with torch.no_grad():
        expected = generated(model)
        for values_too in (True, False):
            interception = Interception(model, lambda call, both=values_too: copied(call, both), "test")
            assert distance(generated(model).logits, expected.logits) < 1e-4
            interception.detach()


def test_a_cache_filled_by_a_method_and_one_filled_without_it_are_told_apart():
    model = tiny_model(tiny_config("llama"))
    ids = inputs()["input_ids"]
    filled, ours = DynamicCache(), DynamicCache()
    model(ids, past_key_values=filled)
    interception = Interception(model, plain, "Test")
    with pytest.raises(CacheError, match=f"{LENGTH} positions whose keys Test has not rotated"):
        model(ids[:, :1], past_key_values=filled)
    model(ids, past_key_values=ours)
    model(ids[:, :1], past_key_values=ours)
    interception.detach()
    with pytest.raises(CacheError, match="rotated by a method that has been taken out"):
        model(ids[:, :1], past_key_values=ours)
    ours.reset()
    model(ids, past_key_values=ours)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", "no decoder layers with rotary position embeddings"),
        ("deepseek_v3", "latent attention"),
        ("gemma3n_text", "keys of another layer"),
        ("llama4_text", "complex numbers"),
        ("diffllama", "call the attention function more than once"),
        ("doge", "uses what is cached in a way of its own"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_with_the_reason(family, reason):
    if family in ("llama4_text", "diffllama", "doge"):  # what only shows when it runs
        with pytest.raises(UnsupportedModel, match=reason):
            Interception(tiny_model(tiny_config(family)), plain, "test")
        return
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), pytest.raises(UnsupportedModel, match=reason):
        check(AutoModelForCausalLM.from_config(tiny_config(family)), "test")


def test_layer_factors_and_a_method_exclude_each_other():
    model = tiny_model(tiny_config("llama"))
    lpes_eval.apply(model, 1.5)
    with pytest.raises(UserError, match="the model has layer factors"):
        Interception(model, plain, "test")
    lpes_eval.remove(model)
    Interception(model, plain, "test")
    with pytest.raises(UserError, match="another method"):
        Interception(model, plain, "test")


def test_tables_by_factor_and_by_base_are_those_of_the_closed_form():
    model = tiny_model(tiny_config("llama"))
    theta, width = own_base(model, "test"), model.config.head_dim
    found = {}

    def note(call):
        found["factors"] = call.rotation.table.by_factors([1.0, 1.3, 1.8])
        found["bases"] = call.rotation.table.by_bases([theta, 2 * theta], theta)
        found["own"] = call.rotation.own()
        return plain(call)

    Interception(model, note, "test")
    position_ids = torch.tensor([[0, 3, 7], [100, 250, 500]])
    model(torch.tensor([[5, 6, 7], [8, 9, 10]]), position_ids=position_ids)

    def angles(base, factor):
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        half = position_ids.double()[..., None] / factor * base**-exponents
        return torch.cat((half, half), dim=-1)

    for (cos, sin), settings in (
        (found["factors"], [(theta, 1.0), (theta, 1.3), (theta, 1.8)]),
        (found["bases"], [(theta, 1.0), (2 * theta, 1.0)]),
    ):
        expected = torch.stack([angles(*setting) for setting in settings])
        torch.testing.assert_close(cos.double(), expected.cos(), atol=1e-4, rtol=0)
        torch.testing.assert_close(sin.double(), expected.sin(), atol=1e-4, rtol=0)
    assert torch.equal(found["bases"][0][0], found["own"][0][:, 0])  # its own base: the model's numbers, not like them


def test_bases_follow_the_models_own():
    assert bases_for(10000.0, None) == (10000.0, 17500.0, 18000.0, 19000.0, 20000.0, 22500.0, 25000.0)
    assert bases_for(1e6, None)[0] == 1e6
    assert bases_for(1e6, None)[-1] == 2.5e6
    assert bases_for(1e6, [10000]) == (10000.0,)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma3_text", {}, "tables of its own for each kind of attention"),
        ("llama4_text", {}, "complex numbers"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "type linear"),
    ],
)
def test_a_base_is_replaced_only_where_it_is_all_there_is(family, changes, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        own_base(tiny_model(tiny_config(family, **changes)), "test")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_rounded_frequencies_have_the_base_that_they_were_made_of(dtype, theta):
    parameters = {"rope_type": "default", "rope_theta": theta}
    model = tiny_model(tiny_config("llama", rope_parameters=parameters, head_dim=128)).to(dtype)
    rotary = model.model.rotary_emb
    assert rotary.inv_freq.dtype == dtype
    assert own_base(model, "test") == theta
    rotary.inv_freq = frequencies(1.2 * theta, rotary.inv_freq)
    with pytest.raises(UnsupportedModel, match="not powers of its rope_theta"):
        own_base(model, "test")


def test_frequencies_that_are_not_powers_of_the_base_are_noticed():
    model = tiny_model(tiny_config("llama"))
    assert own_base(model, "test") == 10000.0
    model.model.rotary_emb.inv_freq = frequencies(10500.0, model.model.rotary_emb.inv_freq)
    with pytest.raises(UnsupportedModel, match="not powers of its rope_theta, 10000"):
        own_base(model, "test")


@pytest.mark.parametrize(
    "method",
    [
        Buckets,
        lambda model: MsPoE(model, Settings(min=2, max=20, skip=1, threshold=1.5)),
        lambda model: moice.apply(model, Router(routers.describe(model.config, None), seed=1)),
    ],
    ids=["Attention Buckets", "Ms-PoE", "MoICE"],
)
def test_a_copy_of_a_model_runs_its_own_method_on_its_own_weights(method):
    model = tiny_model(tiny_config("llama"))
    plain = generated(model)
    there = method(model)
    expected = generated(model)
    assert distance(expected.logits, plain.logits) > 1e-3
    copied = copy.deepcopy(model)
    assert inspect.signature(copied.forward) == inspect.signature(type(copied).forward.__get__(copied))
    there.detach()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    found = generated(copied)
    assert torch.equal(found.sequences, expected.sequences)
    assert distance(found.logits, expected.logits) == 0


@pytest.mark.parametrize(
    ("method", "heads"),
    [
        (lambda model: MsPoE(model, Settings(skip=1)), "Ms-PoE caches 4 heads of keys beside 2 of values"),
        (
            lambda model: moice.apply(model, Router(routers.describe(model.config, None), seed=1)),
            "MoICE caches 14 heads of keys beside 2 of values",
        ),
    ],
    ids=["Ms-PoE", "MoICE"],
)
def test_a_static_cache_has_no_room_for_more_keys_than_values(method, heads):
    model = tiny_model(tiny_config("llama"))
    method(model)
    with pytest.raises(UserError, match=f"^{heads}, for which a static cache has no room"):
        generated(model, cache_implementation="static")


def test_two_methods_exclude_each_other():
    for first, second in ((Buckets, MsPoE), (MsPoE, Buckets)):
        model = tiny_model(tiny_config("llama"))
        there = first(model)
        with pytest.raises(UserError, match="another method is in"):
            second(model)
        there.detach()
        second(model)
