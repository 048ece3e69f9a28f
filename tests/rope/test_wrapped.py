"""Layer factors in models that are copied, saved, placed on devices, wrapped or adapted."""

import copy
import io

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

import lpes_eval
from lpes_eval import rope, rotary
from lpes_eval.errors import CacheError, UnsupportedModel
from small_llama import DYNAMIC, FACTORS, by_hand, generate, llama, logits


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def wrap_forwards(model):
    for module in (model.model, model.model.layers[1], model.model.rotary_emb):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))


@pytest.mark.parametrize("options", [{}, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("again", "wrapped"), [(copy.deepcopy, False), (copy.deepcopy, True), (saved_and_loaded, False)]
)
def test_a_copy_keeps_its_factors_whatever_becomes_of_the_original(ids, options, again, wrapped):
    model = llama(**options)
    if wrapped:  # by accelerate, which cannot be pickled
        wrap_forwards(model)
    plain = logits(model, ids)
    lpes_eval.apply(model, FACTORS)
    expected, first, second = logits(model, ids), again(model), again(model)
    lpes_eval.apply(model, [1.9] * 4)
    assert torch.equal(logits(first, ids), expected)
    lpes_eval.remove(model)
    assert torch.equal(logits(first, ids), expected)
    assert rope.applied(first) == FACTORS
    lpes_eval.remove(first)
    assert torch.equal(logits(first, ids), plain)
    assert torch.equal(logits(second, ids), expected)


def test_a_copy_rotates_by_its_own_frequencies(model, ids):
    lpes_eval.apply(model, FACTORS)
    other = copy.deepcopy(model)
    other.model.rotary_emb.inv_freq = other.model.rotary_emb.inv_freq / 2
    assert not torch.allclose(logits(other, ids[:1]), logits(model, ids[:1]), atol=1e-2)
    filled = model(ids, use_cache=True).past_key_values
    lpes_eval.remove(other)
    model(ids[:, :1], past_key_values=filled)


def test_a_copy_of_one_layer_is_one_layer(model):
    lpes_eval.apply(model, FACTORS)
    seen = {}
    layer = copy.deepcopy(model.model.layers[1], seen)
    modules = [value for value in seen.values() if isinstance(value, torch.nn.Module)]
    assert {id(module) for module in modules} == {id(module) for module in layer.modules()}


def replicated(model):
    """What ``torch.nn.parallel.replicate`` does, for one more device that is the same."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            setattr(replica, name, replicas[child])
        for name, weight in module._parameters.items():
            setattr(replica, name, None if weight is None else weight.detach() * 2)
    return replicas[model]


def test_a_data_parallel_replica_runs_its_own_weights(model, ids):
    twice = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twice.parameters():
            weight.mul_(2)
    lpes_eval.apply(twice, FACTORS)
    lpes_eval.apply(model, FACTORS)
    assert torch.equal(logits(replicated(model), ids), logits(twice, ids))
    lpes_eval.remove(twice)
    assert not torch.equal(logits(replicated(model), ids), logits(twice, ids))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("options", [{}, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("limit", [rotary.ROWS, 0])
def test_a_layer_on_another_device_gets_its_table_there(ids, first, options, limit, monkeypatch):
    """Whether accelerate places the model before the factors are applied or after; ``meta`` is the other device."""
    monkeypatch.setattr(rotary, "ROWS", limit)
    model, found = llama(**options), {}
    last = model.model.layers[3]
    if first:
        lpes_eval.apply(model, FACTORS)
    for module in (last, model.model.norm, model.lm_head):
        add_hook_to_module(module.to("meta"), AlignDevicesHook(execution_device="meta"))
    if not first:
        lpes_eval.apply(model, FACTORS)
    last.self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: found.update(tables=kwargs["position_embeddings"]), with_kwargs=True
    )
    assert logits(model, ids).device.type == "meta"
    assert [part.device.type for part in found["tables"]] == ["meta", "meta"]


def test_a_model_spread_by_device_map_answers_the_same(model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    places = {f"model.layers.{h}": "cpu" if h % 2 else "disk" for h in range(4)}
    places |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    spread = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    assert hasattr(spread, "hf_device_map")
    lpes_eval.apply(model, FACTORS)
    lpes_eval.apply(spread, FACTORS)
    assert torch.allclose(logits(spread, ids), logits(model, ids), atol=1e-5)


def test_layers_that_were_compiled_one_by_one_take_factors(model, ids):
    """As accelerate's ``compile_regions`` leaves them."""
    expected = by_hand(model, ids, FACTORS)
    torch._dynamo.reset()
    model.model.layers = torch.nn.ModuleList(torch.compile(layer, backend="eager") for layer in model.model.layers)
    lpes_eval.apply(model, FACTORS)
    assert torch.allclose(logits(model, ids), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LoraConfig, {"target_modules": ["q_proj"], "r": 2}),
        (IA3Config, {}),
        (PromptTuningConfig, {"num_virtual_tokens": 5}),
    ],
)
def test_adapters_that_leave_the_cache_alone_go_with_factors(model, ids, kind, options):
    expected = by_hand(model, ids, FACTORS)
    wrapped = get_peft_model(model, kind(task_type="CAUSAL_LM", **options)).eval()
    plain = logits(wrapped, ids)
    # PEFT 0.21 under transformers 5.24: prompt tuning decodes differently with a cache, factors or not
    cached = torch.equal(generate(wrapped, ids), generate(wrapped, ids, use_cache=False))
    assert cached or kind is PromptTuningConfig
    lpes_eval.apply(wrapped, [1.0] * 4)
    assert torch.equal(logits(wrapped, ids), plain)
    lpes_eval.apply(wrapped, FACTORS)
    found = logits(wrapped, ids)
    assert not torch.allclose(found, plain, atol=1e-2)
    assert kind is PromptTuningConfig or torch.allclose(found, expected, atol=1e-4)  # before they learn they do nothing
    assert not cached or torch.equal(generate(wrapped, ids), generate(wrapped, ids, use_cache=False))
    lpes_eval.remove(wrapped)
    assert rope.applied(wrapped) is None


def test_prefix_tuning_is_refused_and_the_reason_is_true(model, ids):
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    lpes_eval.apply(model, FACTORS)
    wrapped = get_peft_model(model, config)
    with pytest.raises(CacheError, match="5 positions whose keys were not rotated under the layer factors now in"):
        wrapped(input_ids=ids)
    lpes_eval.remove(wrapped)
    with pytest.raises(UnsupportedModel, match=r"^llama: its PEFT adapter \(prefix tuning\) adds learnt keys"):
        lpes_eval.apply(wrapped, FACTORS)
