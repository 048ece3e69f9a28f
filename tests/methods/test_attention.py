"""What the methods share: attention taken over and given back, and rotary tables for other factors and bases."""

import copy
import inspect
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import lpes_eval
from benchmarks.families import tiny_config, tiny_model
from checks import LENGTH, distance, generated, inputs
from lpes_eval import methods
from lpes_eval.errors import CacheError, UnsupportedModel, UserError
from lpes_eval.methods.interception import Interception, find_attention
from lpes_eval.methods.tables import Table, frequencies, own_base

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


@dataclass(eq=False)
class Plain(Interception):
    """The attention of the model as it is."""

    name = "Test"

    @classmethod
    def into(cls, model):
        method = cls()
        method.put(model)
        return method

    def attend(self, call):
        query, key = call.rotate(call.query, call.key, *call.table)
        return call.compute(query, *call.cached(key, call.value))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(tiny_config(request.param))


@pytest.fixture
def llama():
    return tiny_model(tiny_config("llama"))


@torch.no_grad()
def logits(model, **given):
    return model(**given or inputs()).logits


def test_rotating_for_oneself_is_what_the_family_does(model):
    expected, answer, attributes = logits(model), generated(model), [set(m.__dict__) for m in model.modules()]
    method = Plain.into(model)
    assert method.layers
    assert (logits(model) - expected).abs().max() < 1e-5
    found = generated(model)
    assert torch.equal(found.sequences, answer.sequences)
    assert distance(found.logits, answer.logits) < 1e-4
    method.detach()
    assert torch.equal(logits(model), expected)
    assert [set(m.__dict__) for m in model.modules()] == attributes


def test_layers_are_taken_over_one_by_one_and_those_without_positions_never():
    model = tiny_model(tiny_config("cohere2"))  # every second layer here has no positions
    seen = []

    class Watching(Plain):
        def attend(self, call):
            seen.append(call.layer)
            return super().attend(call)

        def chosen_layers(self, depth):
            return range(2)

    method = Watching.into(model)
    logits(model)
    assert method.layers == (0,)
    assert seen == [0]


def test_attention_is_computed_by_the_implementation_that_was_asked_for(llama):
    expected = {}
    for implementation in ("sdpa", "eager"):
        llama.set_attn_implementation(implementation)
        expected[implementation] = logits(llama)
        method = Plain.into(llama)
        assert torch.equal(logits(llama), expected[implementation])
        method.detach()
    assert not torch.equal(expected["sdpa"], expected["eager"])


@pytest.mark.parametrize("values_too", [True, False])
def test_values_that_heads_share_are_read_as_if_every_head_had_a_copy(values_too):
    model = tiny_model(tiny_config("qwen2"))
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    assert groups > 1

    class Copied(Plain):
        def attend(self, call):
            keys = call.key.repeat_interleave(groups, dim=1)
            query, key = call.rotate(call.query, keys, *call.table)
            value = call.value.repeat_interleave(groups, dim=1) if values_too else call.value
            return call.compute(query, *call.cached(key, value))

    expected = generated(model)
    Copied.into(model)
    assert distance(generated(model).logits, expected.logits) < 1e-4


def test_a_cache_filled_by_a_method_and_one_filled_without_it_are_told_apart(llama):
    ids = inputs()["input_ids"]
    filled, ours = DynamicCache(), DynamicCache()
    llama(ids, past_key_values=filled)
    method = Plain.into(llama)
    with pytest.raises(CacheError, match=f"{LENGTH} positions whose keys Test has not rotated"):
        llama(ids[:, :1], past_key_values=filled)
    llama(ids, past_key_values=ours)
    llama(ids[:, :1], past_key_values=ours)
    method.detach()
    with pytest.raises(CacheError, match="rotated by a method that has been taken out"):
        llama(ids[:, :1], past_key_values=ours)
    ours.reset()
    llama(ids, past_key_values=ours)


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
            Plain.into(tiny_model(tiny_config(family)))
        return
    with torch.device("meta"), pytest.raises(UnsupportedModel, match=reason):
        find_attention(AutoModelForCausalLM.from_config(tiny_config(family)), "test")


def test_tables_by_factor_and_by_base_are_those_of_the_closed_form(llama):
    theta, width = own_base(llama, "test"), llama.config.head_dim
    found = {}

    class Noting(Plain):
        def attend(self, call):
            found["factors"] = call.table.by_factors([1.0, 1.3, 1.8])
            found["bases"] = call.table.by_bases([theta, 2 * theta], theta)
            found["own"] = tuple(call.table)
            return super().attend(call)

    Noting.into(llama)
    position_ids = torch.tensor([[0, 3, 7], [100, 250, 500]])
    llama(torch.tensor([[5, 6, 7], [8, 9, 10]]), position_ids=position_ids)

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
    assert torch.equal(found["bases"][0][0], found["own"][0])  # its own base: the model's numbers, not like them


def test_a_table_moves_to_another_device_with_the_call_that_made_it(llama):
    """As accelerate moves it, which calls ``to`` of whatever has one, for a model spread over several devices."""
    tables = []
    llama.model.rotary_emb.register_forward_hook(lambda *call: tables.append(Table.of(*call)), with_kwargs=True)
    llama(**inputs())
    moved = tables[0].to("meta", non_blocking=True)
    assert isinstance(moved, Table)
    assert {t.device.type for t in (*moved, *moved.by_factors([1.5]))} == {"meta"}
    assert moved.rotary is llama.model.rotary_emb


def test_a_base_is_replaced_only_where_it_is_all_there_is(llama):
    others = [
        ("llama", {"rope_parameters": {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}}, f"type {kind}")
        for kind in ("linear", "dynamic", "yarn")
    ]
    for family, changes, reason in (
        ("gemma3_text", {}, "tables of its own for each kind of attention"),
        ("llama4_text", {}, "complex numbers"),
        *others,
    ):
        with pytest.raises(UnsupportedModel, match=reason):
            own_base(tiny_model(tiny_config(family, **changes)), "test")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_frequencies_are_those_of_the_base_up_to_the_rounding_of_their_dtype(dtype, theta):
    parameters = {"rope_type": "default", "rope_theta": theta}
    model = tiny_model(tiny_config("llama", rope_parameters=parameters, head_dim=128)).to(dtype)
    rotary = model.model.rotary_emb
    assert rotary.inv_freq.dtype == dtype
    assert own_base(model, "test") == theta
    rotary.inv_freq = frequencies(1.2 * theta, rotary.inv_freq)
    with pytest.raises(UnsupportedModel, match="not powers of its rope_theta"):
        own_base(model, "test")


OTHERS = [name for name in methods.names() if name not in ("lpes", "pi")]
STRONG = {"ms_poe": {"min": 2, "max": 20, "skip": 1, "threshold": 1.5}}


def put(name, model):
    kind = methods.load(name)
    return kind.apply(model, **STRONG.get(name, kind.benchmark_settings(model)))


@pytest.mark.parametrize("name", OTHERS)
def test_a_copy_of_a_model_runs_its_own_method_on_its_own_weights(llama, name):
    plain = generated(llama)
    there = put(name, llama)
    expected = generated(llama)
    assert distance(expected.logits, plain.logits) > 1e-3
    copied = copy.deepcopy(llama)
    assert inspect.signature(copied.forward) == inspect.signature(type(copied).forward.__get__(copied))
    there.detach()
    with torch.no_grad():
        for weight in llama.parameters():
            weight.zero_()
    found = generated(copied)
    assert torch.equal(found.sequences, expected.sequences)
    assert distance(found.logits, expected.logits) == 0


@pytest.mark.parametrize(("name", "heads"), [("ms_poe", 4), ("moice", 14)])
def test_a_static_cache_has_no_room_for_more_keys_than_values(llama, name, heads):
    put(name, llama)
    with pytest.raises(UserError, match=f"caches {heads} heads of keys beside 2 of values"):
        generated(llama, cache_implementation="static")


@pytest.mark.parametrize("name", OTHERS)
def test_layer_factors_and_methods_exclude_each_other(llama, name):
    lpes_eval.apply(llama, 1.5)
    with pytest.raises(UserError, match="the model has layer factors"):
        put(name, llama)
    lpes_eval.remove(llama)
    there = put("attention_buckets", llama)
    with pytest.raises(UserError, match="in this model already, Attention Buckets"):
        put(name, llama)
    there.detach()
    put(name, llama)
    with pytest.raises(UserError, match="detach it first"):
        lpes_eval.apply(llama, 1.5)
