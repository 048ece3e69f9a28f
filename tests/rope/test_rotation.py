"""Layer factors in one family (Llama), at every kind of RoPE; tests/test_families.py takes all families."""

import copy
import inspect
import io

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import lpes_eval
from lpes_eval import rope, rotary
from lpes_eval.errors import CacheError, FactorsError
from lpes_eval.factors import Factors
from small_llama import DYNAMIC, FACTORS, by_hand, generate, llama, logits


@pytest.mark.parametrize("positions", [range(40), [5, 5, 6, 7], [9, 8, 7, 6], [-2, -1, 0, 1]], ids=str)
def test_uniform_factor_equals_linear_interpolation(model, ids, positions):
    """Transformers' own, at positions in any order, which are divided one by one."""
    lpes_eval.apply(model, 1.7)
    ids, positions = ids[:, : len(positions)], torch.tensor([positions])
    own = llama(rope_parameters={"rope_type": "linear", "factor": 1.7, "rope_theta": 10_000.0})
    expected = logits(own, ids, position_ids=positions)
    assert torch.allclose(logits(model, ids, position_ids=positions), expected, atol=1e-4)


def test_other_factors_replace_the_first_and_one_table_at_a_time_gives_the_same(model, ids, monkeypatch):
    lpes_eval.apply(model, FACTORS)
    first = logits(model, ids)
    lpes_eval.apply(model, [1.9] * 4)
    lpes_eval.apply(model, Factors.from_list(FACTORS))
    assert torch.equal(logits(model, ids), first)
    monkeypatch.setattr(rotary, "ROWS", 0)
    assert torch.equal(logits(model, ids), first)
    assert rope.applied(model) == FACTORS
    for _ in range(2):  # a second time does nothing
        lpes_eval.remove(model)
        assert rope.applied(model) is None


@pytest.mark.parametrize(("kind", "rows"), [("linear", [(4, 256)]), ("dynamic", [(1, 40), (4, 40), (1, 1), (4, 1)])])
def test_fixed_frequencies_are_tabulated_once_and_others_in_one_call_for_all_layers(kind, rows, ids, monkeypatch):
    """Frequencies that depend on the length are chosen by the model's own call, at the true positions alone."""
    model = llama(rope_parameters={"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0})
    lpes_eval.apply(model, FACTORS)
    original, calls = inspect.unwrap(LlamaRotaryEmbedding.forward), []

    def forward(self, x, position_ids):
        calls.append(tuple(position_ids.shape))
        return original(self, x, position_ids)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)
    logits(model, ids[:1])
    logits(model, ids[:1, :1])
    assert calls == rows


@pytest.mark.parametrize("first", [0, 250, 5000])
def test_rows_of_kept_tables_are_what_the_rotary_module_computes(model, ids, first, monkeypatch):
    """At positions in the first block, across two blocks, and beyond what is kept from the beginning."""
    lpes_eval.apply(model, FACTORS)
    logits(model, ids)
    places = torch.stack((torch.arange(40), torch.arange(40).flip(0))) + first
    kept = logits(model, ids, position_ids=places)
    monkeypatch.setattr(rotary, "_kept", lambda *_: None)
    assert torch.equal(kept, logits(model, ids, position_ids=places))


@pytest.mark.parametrize("change", ["frequencies", "dtype"])
def test_frequencies_that_somebody_changes_are_tabulated_anew(model, ids, change):
    lpes_eval.apply(model, FACTORS)
    logits(model, ids)
    if change == "frequencies":
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq / 3
    else:
        model.double()
    expected = by_hand(model if change != "dtype" else llama(), ids, FACTORS)
    assert torch.allclose(logits(model, ids).float(), expected, atol=1e-3)


def test_a_forward_in_inference_mode_leaves_nothing_that_training_trips_over(model, ids):
    lpes_eval.apply(model, FACTORS)
    with torch.inference_mode():
        model(ids[:1])
    model(ids[:1]).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_generation_with_a_cache_equals_generation_without(attention, ids):
    model = llama(attn_implementation=attention)
    lpes_eval.apply(model, FACTORS)
    assert torch.equal(generate(model, ids), generate(model, ids, use_cache=False))


TOLERANCE = {"rtol": 1e-4, "atol": 1e-3}  # logits are of the order of 10
TRAINED = 32  # positions that the models below were "trained" on; they are run below and above it
OF_TRAINED = {"original_max_position_embeddings": TRAINED}
KINDS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **OF_TRAINED},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **OF_TRAINED},
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0],
        "factor": 4.0,
        **OF_TRAINED,
    },
}


@pytest.mark.parametrize("factors", [[1.6] * 4, [0.6, 1.0, 2.0, 1.7]], ids=["uniform", "per layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_factors_divide_positions_at_the_frequencies_of_the_true_length(kind, factors):
    model = llama(
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0} | KINDS[kind],
        max_position_embeddings=TRAINED if kind in ("linear", "dynamic") else 4 * TRAINED,
    )
    # below the trained length, above it (there 1.6 and 2 would bring positions back below it), and below it again
    for length in (24, 48, 24):
        rotation = ROPE_INIT_FUNCTIONS[kind](model.config, torch.device("cpu"), seq_len=length)
        ids = torch.randint(1, 61, (2, length), generator=torch.Generator().manual_seed(1))
        plain = logits(model, ids)
        torch.testing.assert_close(by_hand(model, ids, [1.0] * 4, *rotation), plain, **TOLERANCE)
        lpes_eval.apply(model, factors)
        found = logits(model, ids)
        lpes_eval.remove(model)
        torch.testing.assert_close(found, by_hand(model, ids, factors, *rotation), **TOLERANCE)
        assert (found - plain).abs().max() > 0.1


def test_gradients_reach_factors_that_are_a_tensor(ids):
    """Against central differences over factors applied as plain numbers; in float64, as far as the model's code is."""
    model = llama(initializer_range=0.1).double()
    answer = ids[:, 1:].flatten()

    def loss(logits):
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), answer)

    factors = torch.tensor([1.0, 1.3, 1.7, 1.3], dtype=torch.float64, requires_grad=True)
    lpes_eval.apply(model, factors)
    (gradient,) = torch.autograd.grad(loss(model(ids).logits), factors)

    def moved(h, step):
        lpes_eval.apply(model, [factor + step * (k == h) for k, factor in enumerate(factors.tolist())])
        return loss(logits(model, ids)).item()

    for h in range(4):  # angles are float32, so narrow steps would drown in rounding: two wide ones, extrapolated
        narrow, wide = ((moved(h, step) - moved(h, -step)) / (2 * step) for step in (4e-3, 8e-3))
        assert gradient[h].item() == pytest.approx((4 * narrow - wide) / 3, rel=0.02, abs=1e-4)
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


def test_wrong_factors_are_refused_with_their_file_and_leave_the_model_as_it_was(model, ids, tmp_path):
    path = tmp_path / "f.json"
    Factors.from_list([1.5] * 5).save(path)
    other_depth, zero = "the factors are for {} layers, the model has 4", [1.0, 1.0, 0.0, 1.0]
    lpes_eval.apply(model, FACTORS)
    before = logits(model, ids)
    for reason, given in {
        f"{path}: {other_depth.format(5)}": (path, str(path)),
        other_depth.format(3): ([1.0] * 3, np.ones(3), torch.ones(3)),
        r"factors: factors\[2\]: found 0.0": (zero, torch.tensor(zero)),
        "factors: a tensor of shape": (torch.ones(4, 1), torch.tensor(1.5)),
    }.items():
        for wrong in given:
            with pytest.raises(FactorsError, match=f"^{reason}"):
                lpes_eval.apply(model, wrong)
    assert torch.equal(logits(model, ids), before)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("options", [{}, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("again", "wrapped"), [(copy.deepcopy, False), (copy.deepcopy, True), (saved_and_loaded, False)]
)
def test_a_copy_keeps_its_factors_whatever_becomes_of_the_original(ids, options, again, wrapped):
    model = llama(**options)
    for module in (model.model, model.model.layers[1], model.model.rotary_emb) if wrapped else ():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))  # which cannot be pickled
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


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_on_another_device_gets_its_table_there(model, ids, first):
    """Whether accelerate places the model before the factors are applied or after; ``meta`` is the other device."""
    found, last = {}, model.model.layers[3]
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


def test_adapters_go_with_factors(model, ids):
    expected = by_hand(model, ids, FACTORS)
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2)).eval()
    plain = logits(wrapped, ids)
    lpes_eval.apply(wrapped, FACTORS)
    assert torch.allclose(logits(wrapped, ids), expected, atol=1e-4)  # before it learns an adapter does nothing
    assert torch.equal(generate(wrapped, ids), generate(wrapped, ids, use_cache=False))
    lpes_eval.remove(wrapped)
    assert torch.equal(logits(wrapped, ids), plain)
    assert rope.applied(wrapped) is None


def test_learnt_keys_of_prefix_tuning_are_refused(model, ids):
    wrapped = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
    lpes_eval.apply(wrapped, FACTORS)
    with pytest.raises(CacheError, match="5 positions whose keys were not rotated under the layer factors now in"):
        wrapped(input_ids=ids)
