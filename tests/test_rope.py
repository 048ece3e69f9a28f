"""Layer factors in one family (Llama), in every way a model is run; tests/test_families.py takes all families."""

import copy
import inspect
import io

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, StaticCache

import lpes_eval
from benchmarks.families import tiny_config, tiny_model
from lpes_eval import methods, rope
from lpes_eval.errors import CacheError, FactorsError, UnsupportedModel, UserError
from lpes_eval.factors import Factors

FACTORS = [1.0, 1.3, 1.7, 1.3]
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # large, so that positions matter to the answers
}


def llama(**options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | options)).eval()


@pytest.fixture
def model():
    return llama()


@pytest.fixture
def ids():
    return torch.randint(1, SIZES["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1))


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


def generate(model, ids, **options):
    return model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=12, do_sample=False, **options)


def by_hand(model, ids, factors):
    """The reference: each layer is called with cosines and sines of positions that are divided here."""
    base, (batch, length) = model.model, ids.shape
    hidden = base.embed_tokens(ids)
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None].expand(batch, 1, -1, -1)
    for layer, factor in zip(base.layers, factors, strict=True):
        angles = torch.arange(length)[:, None] / factor * base.rotary_emb.inv_freq[None]
        table = torch.cat((angles, angles), -1)[None]
        hidden = layer(hidden, attention_mask=mask, position_embeddings=(table.cos(), table.sin()))
    return model.lm_head(base.norm(hidden))


def test_each_layer_rotates_at_its_own_scale(model, ids):
    lpes_eval.apply(model, FACTORS)
    with torch.no_grad():
        lpes = logits(model, ids)
        lpes_eval.remove(model)
        assert torch.allclose(lpes, by_hand(model, ids, FACTORS), atol=1e-4)
        assert not torch.allclose(lpes, by_hand(model, ids, FACTORS[::-1]), atol=1e-2)


def test_all_ones_is_the_plain_model_bit_for_bit(model, ids):
    plain = logits(model, ids)
    lpes_eval.apply(model, [1.0] * 4)
    assert torch.equal(logits(model, ids), plain)


def test_uniform_factor_equals_linear_interpolation(model, ids):
    linear = llama(rope_parameters={"rope_type": "linear", "factor": 1.7, "rope_theta": 10_000.0})
    lpes_eval.apply(model, 1.7)
    assert torch.allclose(logits(model, ids), logits(linear, ids), atol=1e-3)


def test_a_copy_of_a_model_with_factors_runs_on_its_own_weights(model, ids):
    lpes_eval.apply(model, FACTORS)
    expected = logits(model, ids)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert torch.equal(logits(copied, ids), expected)


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}


def copied(model):
    return copy.deepcopy(model)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def wrap_forwards(model):
    for module in (model.model, model.model.layers[1], model.model.rotary_emb):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))


@pytest.mark.parametrize("options", [{}, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize(("again", "wrapped"), [(copied, False), (copied, True), (saved_and_loaded, False)])
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


def halve(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq / 2


def test_a_copy_rotates_by_its_own_frequencies_and_refuses_its_own_caches(model, ids):
    lpes_eval.apply(model, FACTORS)
    other = copy.deepcopy(model)
    halve(other)
    assert not torch.allclose(logits(other, ids[:1]), logits(model, ids[:1]), atol=1e-2)
    filled = model(ids, use_cache=True).past_key_values
    lpes_eval.remove(other)
    model(ids[:, :1], past_key_values=filled)
    filled = model(ids, use_cache=True).past_key_values
    lpes_eval.remove(model)
    with pytest.raises(CacheError):
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
@pytest.mark.parametrize("limit", [rope.BATCHED_LIMIT, 0])
def test_a_layer_on_another_device_gets_its_table_there(ids, first, options, limit, monkeypatch):
    """Whether accelerate places the model before the factors are applied or after; ``meta`` is the other device."""
    monkeypatch.setattr(rope, "BATCHED_LIMIT", limit)
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


@pytest.mark.parametrize("places", [("model",), ("model.layers.0", "model.layers.2"), ("model.rotary_emb",)])
@pytest.mark.parametrize("first", [True, False])
def test_a_forward_that_somebody_else_has_wrapped_stays_theirs(model, ids, places, first):
    """As accelerate does to place a model; before the factors are applied, or after."""
    plain = logits(model, ids)
    lpes_eval.apply(model, FACTORS)
    expected = logits(model, ids)
    lpes_eval.remove(model)
    calls = []

    def wrapped(forward):
        def wrapper(*args, **kwargs):
            calls.append(forward)
            return forward(*args, **kwargs)

        return wrapper

    def wrap():
        wrappers = {place: wrapped(model.get_submodule(place).forward) for place in places}
        for place, wrapper in wrappers.items():
            model.get_submodule(place).forward = wrapper
        return wrappers

    if first:
        wrappers = wrap()
    lpes_eval.apply(model, FACTORS)
    if not first:
        wrappers = wrap()
    assert torch.equal(logits(model, ids), expected)
    assert len(calls) >= len(places)
    lpes_eval.remove(model)
    assert all(model.get_submodule(place).forward is wrapper for place, wrapper in wrappers.items())
    assert torch.equal(logits(model, ids), plain)


def test_other_factors_replace_the_first(model, ids):
    lpes_eval.apply(model, FACTORS)
    first = logits(model, ids)
    lpes_eval.apply(model, [1.9] * 4)
    lpes_eval.apply(model, Factors.from_list(FACTORS))
    assert torch.equal(logits(model, ids), first)
    assert rope.applied(model) == FACTORS
    for _ in range(2):  # a second time does nothing
        lpes_eval.remove(model)
        assert rope.applied(model) is None


def test_factors_below_one_rotate_by_the_same_rule(model, ids):
    """They are asked for one by one; the dynamic kinds must not take their larger positions for the length."""
    factors = [0.5, 1.0, 0.7, 1.3]
    for one, tolerance in ((model, 1e-4), (llama(**DYNAMIC), 1e-4)):
        lpes_eval.apply(one, factors)
        found = logits(one, ids)
        lpes_eval.remove(one)
        with torch.no_grad():
            assert torch.allclose(found, by_hand(one, ids, factors), atol=tolerance)


def test_layers_in_another_order_take_the_factors_again(model, ids):
    lpes_eval.apply(model, FACTORS)
    model.model.layers = torch.nn.ModuleList(reversed(model.model.layers))
    lpes_eval.apply(model, FACTORS)
    with torch.no_grad():
        found = logits(model, ids, use_cache=False)
        lpes_eval.remove(model)
        assert torch.allclose(found, by_hand(model, ids, FACTORS), atol=1e-4)


def test_factors_from_a_file(model, tmp_path):
    Factors.from_uniform(1.5).save(tmp_path / "f.json")
    lpes_eval.apply(model, tmp_path / "f.json")
    assert rope.applied(model) == [1.5] * 4
    Factors.from_list([1.5] * 5).save(tmp_path / "five.json")
    for given in (tmp_path / "five.json", str(tmp_path / "five.json")):
        with pytest.raises(FactorsError, match=rf"^{given}: the factors are for 5 layers, the model has 4"):
            lpes_eval.apply(model, given)


def test_one_table_at_a_time_gives_what_all_at_once_give(model, ids, monkeypatch):
    lpes_eval.apply(model, FACTORS)
    batched = logits(model, ids)
    monkeypatch.setattr(rope, "BATCHED_LIMIT", 0)
    assert torch.equal(logits(model, ids), batched)


def counted_calls(rotary, monkeypatch):
    """The shapes of the positions that a rotary module's own code is called with."""
    calls, original = [], inspect.unwrap(type(rotary).forward)

    def counted(self, x, position_ids):
        calls.append(tuple(position_ids.shape))
        return original(self, x, position_ids)

    monkeypatch.setattr(type(rotary), "forward", counted)
    return calls


@pytest.mark.parametrize("length", [1, 40])
def test_a_forward_computes_all_tables_in_the_call_that_makes_the_models_own(model, ids, length, monkeypatch):
    lpes_eval.apply(model, FACTORS)
    calls = counted_calls(model.model.rotary_emb, monkeypatch)
    logits(model, ids[:1, :length])
    assert calls == [(1 + 4, length)]  # the model's own and four layers'


@pytest.mark.parametrize("positions", [[5, 5, 6, 7], [0, 0, 0, 1], [9, 8, 7, 6], [-2, -1, 0, 1], [0, 2, 4, 6]])
def test_positions_in_any_order_are_divided_one_by_one(model, positions):
    """Against transformers' own linear interpolation."""
    linear = llama(rope_parameters={"rope_type": "linear", "factor": 1.5, "rope_theta": 10_000.0})
    linear.load_state_dict(model.state_dict())
    lpes_eval.apply(model, 1.5)
    ids, positions = torch.tensor([[3, 4, 5, 6]]), torch.tensor([positions])
    expected = logits(linear, ids, position_ids=positions)
    assert torch.allclose(logits(model, ids, position_ids=positions), expected, atol=1e-5)


@pytest.mark.parametrize("change", ["inv_freq", "inv_freq.data", "attention_scaling"])
def test_what_changes_in_place_in_the_rotary_module_counts(ids, change):
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
    model = llama(rope_parameters=yarn)
    lpes_eval.apply(model, FACTORS)
    before, rotary = logits(model, ids[:1]), model.model.rotary_emb
    if change == "attention_scaling":
        rotary.attention_scaling = 1.5
    else:
        frequencies = rotary.inv_freq.data if change == "inv_freq.data" else rotary.inv_freq
        frequencies.mul_(0.5)
    changed = logits(model, ids[:1])
    assert not torch.equal(changed, before)
    lpes_eval.remove(model)
    lpes_eval.apply(model, FACTORS)
    assert torch.equal(logits(model, ids[:1]), changed)


def test_a_forward_in_inference_mode_leaves_nothing_that_training_trips_over(model, ids):
    lpes_eval.apply(model, FACTORS)
    with torch.inference_mode():
        model(ids[:1])
    model(ids[:1]).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_tables_of_a_long_prompt_take_no_more_memory_with_more_layers(monkeypatch):
    """Beyond the limit one table is alive at a time; counted by the tables that the rotary module was asked for."""
    model = llama(num_hidden_layers=8, max_position_embeddings=4096)
    lpes_eval.apply(model, [1 + h / 10 for h in range(1, 9)])
    monkeypatch.setattr(rope, "BATCHED_LIMIT", 1000)
    alive, peak = set(), 0
    rotary = model.model.rotary_emb
    original = inspect.unwrap(type(rotary).forward)

    def watched(self, x, position_ids):
        nonlocal peak
        cos, sin = original(self, x, position_ids)
        alive.add(id(cos))
        torch.utils.weak.weakref.finalize(cos, alive.discard, id(cos))
        peak = max(peak, len(alive))
        return cos, sin

    monkeypatch.setattr(type(rotary), "forward", watched)
    logits(model, torch.ones(1, 600, dtype=torch.long))
    assert peak <= 3  # the model's own, a layer's, and the next one's while it is made


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_generation_with_a_cache_equals_generation_without(attention, dtype, ids):
    model = llama(attn_implementation=attention).to(dtype)
    lpes_eval.apply(model, FACTORS)
    step = logits(model, ids, use_cache=False)[:, -1].float()
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        cached = model(ids[:, -1:], past_key_values=cache).logits[:, -1].float()
    assert torch.allclose(step, cached, atol={torch.float32: 1e-4, torch.bfloat16: 0.35, torch.float16: 0.05}[dtype])
    if dtype == torch.float32:
        assert torch.equal(generate(model, ids), generate(model, ids, use_cache=False))


def test_a_static_cache_generates_the_same(model, ids):
    lpes_eval.apply(model, FACTORS)
    dynamic = generate(model, ids)
    assert torch.equal(generate(model, ids, cache_implementation="static", disable_compile=True), dynamic)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_answer(model, ids, side):
    lpes_eval.apply(model, FACTORS)
    short, long = ids[:1, :23], ids[1:, :40]
    padding = torch.zeros(1, 17, dtype=torch.long)
    if side == "left":
        batch = torch.cat((torch.cat((padding, short), 1), long))
        answers = generate(model, batch)[:, 40:]
        assert torch.equal(answers[:1], generate(model, short)[:, 23:])
        assert torch.equal(answers[1:], generate(model, long)[:, 40:])
    else:
        batch = torch.cat((torch.cat((short, padding), 1), long))
        scored = logits(model, batch, attention_mask=(batch != 0).long())
        assert torch.allclose(scored[0, :23], logits(model, short)[0], atol=1e-4)


def test_a_compiled_model_answers_the_same(model, ids):
    lpes_eval.apply(model, FACTORS)
    eager = logits(model, ids, use_cache=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)  # the whole forward, hooks included
    assert torch.allclose(logits(compiled, ids, use_cache=False), eager, atol=1e-4)


def test_a_model_spread_by_device_map_answers_the_same(model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    places = {f"model.layers.{h}": "cpu" if h % 2 else "disk" for h in range(4)}
    places |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    spread = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    assert hasattr(spread, "hf_device_map")
    lpes_eval.apply(model, FACTORS)
    lpes_eval.apply(spread, FACTORS)
    assert torch.allclose(logits(spread, ids), logits(model, ids), atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [IA3Config(task_type="CAUSAL_LM"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)],
    ids=["IA3", "prompt tuning"],
)
def test_adapters_that_leave_the_cache_alone_go_with_factors(model, ids, config):
    wrapped = get_peft_model(model, config).eval()
    plain = logits(wrapped, ids)
    # PEFT 0.21 under transformers 5.24: prompt tuning decodes differently with a cache, factors or not
    cached = torch.equal(generate(wrapped, ids), generate(wrapped, ids, use_cache=False))
    lpes_eval.apply(wrapped, [1.0] * 4)
    assert torch.equal(logits(wrapped, ids), plain)
    lpes_eval.apply(wrapped, FACTORS)
    assert not torch.allclose(logits(wrapped, ids), plain, atol=1e-2)
    assert not cached or torch.equal(generate(wrapped, ids), generate(wrapped, ids, use_cache=False))


def test_prefix_tuning_is_refused_and_the_reason_is_true(model, ids):
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    lpes_eval.apply(model, FACTORS)
    wrapped = get_peft_model(model, config)
    with pytest.raises(CacheError, match="5 positions whose keys were not rotated under the layer factors now in"):
        wrapped(input_ids=ids)
    lpes_eval.remove(wrapped)
    with pytest.raises(UnsupportedModel, match=r"^llama: its PEFT adapter \(prefix tuning\) adds learnt keys"):
        lpes_eval.apply(wrapped, FACTORS)


def test_a_model_under_peft_takes_factors(model, ids):
    lpes_eval.apply(model, FACTORS)
    expected = logits(model, ids)
    lpes_eval.remove(model)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    lpes_eval.apply(wrapped, FACTORS)
    assert torch.allclose(logits(wrapped, ids), expected, atol=1e-5)
    lpes_eval.remove(wrapped)
    assert rope.applied(wrapped) is None


# -- factors as a tensor ---------------------------------------------------------------------------------------------


def test_gradients_reach_factors_that_are_a_tensor(ids):
    """Against central differences over factors applied as plain numbers; in float64, as far as the model's code is."""
    model = llama(initializer_range=0.1).double()
    answer = ids[:, 1:].flatten()

    def loss(logits):
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), answer)

    factors = torch.tensor([1.0, 1.3, 1.7, 1.3], dtype=torch.float64, requires_grad=True)
    lpes_eval.apply(model, factors)
    (gradient,) = torch.autograd.grad(loss(model(ids).logits), factors)

    def difference(h, step):
        losses = []
        for sign in (1, -1):
            moved = factors.tolist()
            moved[h] += sign * step
            lpes_eval.apply(model, moved)
            losses.append(loss(logits(model, ids)).item())
        return (losses[0] - losses[1]) / (2 * step)

    for h in range(4):  # angles are float32, so narrow steps would drown in rounding: two wide ones, extrapolated
        slope = (4 * difference(h, 4e-3) - difference(h, 8e-3)) / 3
        assert gradient[h].item() == pytest.approx(slope, rel=0.02, abs=1e-4)
    assert gradient.abs().min() > 1e-3  # the layer at 1 and the two equal ones have slopes of their own
    assert gradient[1] != gradient[3]


def test_a_tensor_gives_what_its_numbers_give_and_counts_as_it_is_now(model, ids):
    lpes_eval.apply(model, FACTORS)
    plain = logits(model, ids)
    factors = torch.tensor(FACTORS)
    lpes_eval.apply(model, factors)
    assert torch.allclose(logits(model, ids), plain, atol=1e-5)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        factors.fill_(1.9)
        with pytest.raises(CacheError, match="40 positions"):
            model(ids[:, :1], past_key_values=cache)
    moved = logits(model, ids)
    assert rope.applied(model) == pytest.approx([1.9] * 4)
    lpes_eval.apply(model, 1.9)
    assert torch.allclose(moved, logits(model, ids), atol=1e-5)
    for wrong in (torch.ones(3), torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.ones(4, 1), torch.tensor(1.5)):
        with pytest.raises(FactorsError):
            lpes_eval.apply(model, wrong)


# -- a cache holds keys that are rotated already ---------------------------------------------------------------------


def test_a_cache_filled_under_other_factors_is_refused(model, ids):
    with torch.no_grad():
        plain = model(ids, use_cache=True).past_key_values
        lpes_eval.apply(model, FACTORS)
        with pytest.raises(CacheError, match="40 positions"):
            model(ids[:, :1], past_key_values=plain)
        scaled = model(ids, use_cache=True).past_key_values
        copied = copy.deepcopy(scaled)
        model(ids[:, :1], past_key_values=copied)  # under the same factors a copy is as good as the cache
        lpes_eval.apply(model, [1.5] * 4)
        for cache in (scaled, copied):
            with pytest.raises(CacheError):
                model(ids[:, :1], past_key_values=cache)
        last = model(ids, use_cache=True).past_key_values
        lpes_eval.remove(model)
        with pytest.raises(CacheError, match="changed or removed"):
            model(ids[:, :1], past_key_values=last)


def test_a_copy_of_a_cache_is_refused_where_the_cache_is(model, ids):
    lpes_eval.apply(model, FACTORS)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        copied = copy.deepcopy(copy.deepcopy(cache))
        lpes_eval.remove(model)
        for each in (cache, copied):
            with pytest.raises(CacheError, match="changed or removed"):
                model(ids[:, :1], past_key_values=each)


def test_a_cache_in_a_tuple_is_known_again(model, ids):
    lpes_eval.apply(model, FACTORS)
    base = model.model
    with torch.no_grad():
        _, cache = base(ids, use_cache=True, return_dict=False)
        base(ids[:, :1], past_key_values=cache)
        lpes_eval.apply(model, [1.5] * 4)
        with pytest.raises(CacheError):
            base(ids[:, :1], past_key_values=cache)


def test_a_cache_that_was_emptied_serves_other_factors(model, ids):
    cache = StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        lpes_eval.apply(model, [1.5] * 4)
        model(ids, past_key_values=cache)
        lpes_eval.apply(model, FACTORS)
        cache.reset()
        assert torch.allclose(model(ids, past_key_values=cache).logits, logits(model, ids), atol=1e-4)


def test_a_cache_whose_first_layer_holds_no_keys_is_refused_too(ids):
    model = tiny_model(tiny_config("minimax"))  # linear attention in layers 0 and 2, of which it keeps something else
    lpes_eval.apply(model, [1.5] * 4)
    with torch.no_grad():
        changed, removed = (model(ids, use_cache=True).past_key_values for _ in range(2))
        lpes_eval.apply(model, [1.2] * 4)
        with pytest.raises(CacheError, match="40 positions"):
            model(ids[:, :1], past_key_values=changed)
        lpes_eval.remove(model)
        with pytest.raises(CacheError, match="40 positions"):
            model(ids[:, :1], past_key_values=removed)


# -- the same where forwards are compiled ----------------------------------------------------------------------------


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", **options)


@pytest.fixture
def small():
    model = llama(num_hidden_layers=2)
    lpes_eval.apply(model, [1.3, 1.7])
    return model


def test_generation_that_falls_back_from_compiled_code_goes_on(small, ids):
    expected = generate(small, ids)
    small.forward = compiled(small.forward, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):  # prefill, one step, and from then on uncompiled
        assert torch.equal(generate(small, ids), expected)


@pytest.mark.parametrize("first", ["compiled", "uncompiled"])
def test_a_cache_goes_from_compiled_code_to_uncompiled_and_back(small, ids, first):
    expected = logits(small, ids, use_cache=False)
    steps = [compiled(small, fullgraph=True), small]  # in one graph: nothing about caches breaks it
    with torch.no_grad():
        output = steps[first == "uncompiled"](ids[:, :36], use_cache=True)
        for t in range(36, 40):
            output = steps[t % 2](ids[:, t : t + 1], past_key_values=output.past_key_values)
            assert torch.allclose(output.logits[:, 0], expected[:, t], atol=1e-4)


@pytest.mark.parametrize("filled", ["compiled", "uncompiled", "without factors"])
def test_a_cache_filled_under_other_factors_is_refused_by_compiled_code_too(small, ids, filled):
    fast = compiled(small)
    with torch.no_grad():
        if filled == "without factors":
            lpes_eval.remove(small)
        cache = (fast if filled == "compiled" else small)(ids, use_cache=True).past_key_values
        lpes_eval.apply(small, [1.7, 1.3])
        for decode in (fast, small):
            with pytest.raises(CacheError, match="40 positions"):
                decode(ids[:, :1], past_key_values=cache)


def test_compiled_steps_go_on_under_other_factors_without_compiling_anew(small, ids):
    graphs = []
    torch._dynamo.reset()
    fast = torch.compile(small, backend=lambda graph, _: graphs.append(graph) or graph.forward, dynamic=False)
    with torch.no_grad():
        for factors in ([1.3, 1.7], [1.4, 1.9], [1.2, 1.2]):
            lpes_eval.apply(small, factors)
            cache = small(ids, use_cache=True).past_key_values
            found = fast(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits
            assert torch.allclose(found, small(ids[:, :1], past_key_values=cache).logits, atol=1e-4)
            assert len(graphs) == 1


def test_a_static_cache_that_compiled_code_has_filled_and_that_was_emptied_serves_other_factors(small, ids):
    cache, fast = StaticCache(config=small.config, max_cache_len=64), compiled(small, fullgraph=True)
    with torch.no_grad():
        fast(ids, past_key_values=cache)
        lpes_eval.apply(small, [1.7, 1.3])
        with pytest.raises(CacheError, match="40 positions"):
            small(ids[:, :1], past_key_values=cache)
        cache.reset()
        assert torch.allclose(fast(ids, past_key_values=cache).logits, logits(small, ids), atol=1e-4)


def test_factors_that_are_a_tensor_go_on_from_compiled_code(small, ids):
    lpes_eval.apply(small, torch.tensor([1.3, 1.7]))
    expected = logits(small, ids, use_cache=False)
    with torch.no_grad():
        output = compiled(small)(ids[:, :38], use_cache=True)
        for t in (38, 39):
            output = small(ids[:, t : t + 1], past_key_values=output.past_key_values)
            assert torch.allclose(output.logits[:, 0], expected[:, t], atol=1e-4)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_wrong_factors_leave_the_model_as_it_was(model, ids):
    lpes_eval.apply(model, FACTORS)
    before = logits(model, ids)
    for wrong in ([1.0] * 3, [1.0, 1.0, 0.0, 1.0], "no-such-file.json", True):
        with pytest.raises(FactorsError):
            lpes_eval.apply(model, wrong)
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("method", ["attention_buckets", "ms_poe"])
def test_a_model_with_another_method_in_it_is_refused(model, ids, method):
    there = methods.load(method).apply(model)
    expected = logits(model, ids)
    with pytest.raises(UserError, match=r"^the model has (Ms-PoE|Attention Buckets) in it"):
        lpes_eval.apply(model, FACTORS)
    assert torch.equal(logits(model, ids), expected)
    there.detach()
    lpes_eval.apply(model, FACTORS)


def test_factors_may_be_an_array(model):
    lpes_eval.apply(model, np.array(FACTORS))
    assert rope.applied(model) == FACTORS
    with pytest.raises(FactorsError, match="factors are for 3 layers"):
        lpes_eval.apply(model, np.ones(3))


def test_a_model_without_rotary_positions_is_refused_with_the_reason():
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=31, n_positions=16))
    with pytest.raises(UnsupportedModel, match=r"^gpt2: no decoder layers with rotary position embeddings"):
        lpes_eval.apply(model, [1.0, 1.5])
    with pytest.raises(UnsupportedModel, match="no config"):
        lpes_eval.apply(torch.nn.Linear(2, 2), 1.5)
