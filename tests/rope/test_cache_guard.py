"""A key-value cache holds keys that are rotated already: under other factors it is refused, compiled or not."""

import copy
import pickle

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, StaticCache

import lpes_eval
from lpes_eval.errors import CacheError
from small_llama import FACTORS, by_hand, llama, logits
from tiny_models import tiny_config, tiny_model


def test_a_copied_or_pickled_cache_goes_on_under_the_same_factors_alone(model, ids):
    lpes_eval.apply(model, FACTORS)
    with torch.no_grad():
        filled = model(ids, use_cache=True).past_key_values
        _, in_a_tuple = model.model(ids, use_cache=True, return_dict=False)
        caches = (filled, in_a_tuple, copy.deepcopy(copy.deepcopy(filled)), pickle.loads(pickle.dumps(filled)))
        for cache in caches:
            model(ids[:, :1], past_key_values=cache)
        lpes_eval.apply(model, [*FACTORS[:3], 1.27])
        for cache in caches:
            with pytest.raises(CacheError, match=r"41 positions whose keys were not rotated under the layer factors"):
                model(ids[:, :1], past_key_values=cache)


def test_a_cache_whose_first_layer_holds_no_keys_is_refused_too(ids):
    model = tiny_model(tiny_config("minimax"))  # linear attention in layers 0 and 2, of which it keeps something else
    lpes_eval.apply(model, [1.5] * 4)
    with torch.no_grad():
        filled = model(ids, use_cache=True).past_key_values
        lpes_eval.apply(model, [1.2] * 4)
        with pytest.raises(CacheError, match="40 positions"):
            model(ids[:, :1], past_key_values=filled)


def test_a_batch_shares_no_keys_with_a_batch_under_other_factors(model, ids):
    """Continuous batching would, for a prompt that it has had, from a manager that stays."""
    prompt = ids.reshape(1, -1)
    greedy = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=16, block_size=16, max_batch_tokens=128)
    options = {"generation_config": greedy, "continuous_batching_config": small, "persistent_manager": True}
    for factors in (None, FACTORS, None):
        lpes_eval.remove(model) if factors is None else lpes_eval.apply(model, factors)
        expected = model.generate(prompt, generation_config=greedy)[0, prompt.shape[1] :].tolist()
        (found,) = model.generate_batch(prompt.tolist(), warmup=False, **options).values()
        assert found.generated_tokens == expected


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", **options)


@pytest.fixture
def small():
    model = llama(num_hidden_layers=2)
    lpes_eval.apply(model, [1.3, 1.7])
    return model


@pytest.mark.parametrize("what", ["the model", "each layer"])
def test_compiled_code_follows_apply_other_factors_and_remove(ids, what):
    """Whichever comes first; torch.compile by itself looks for no hook that a module got since (PyTorch 117758)."""
    model = llama(num_hidden_layers=2)
    torch._dynamo.reset()
    fast = compiled(model) if what == "the model" else model
    plain = logits(model, ids)
    for layer in model.model.layers if what == "each layer" else ():
        layer.compile(backend="eager")
    for factors in (None, [1.34, 1.675], [1.21, 1.43], None):
        lpes_eval.remove(model) if factors is None else lpes_eval.apply(model, factors)
        expected = plain if factors is None else by_hand(model, ids, factors)
        assert torch.allclose(logits(fast, ids), expected, atol=1e-4)


def test_a_cache_goes_from_compiled_code_to_uncompiled_and_back(small, ids):
    expected = logits(small, ids, use_cache=False)
    steps = [compiled(small, fullgraph=True), small]  # in one graph: no hook and nothing about caches breaks it
    with torch.no_grad():
        output = steps[0](ids[:, :36], use_cache=True)
        for t in range(36, 39):
            output = steps[t % 2](ids[:, t : t + 1], past_key_values=output.past_key_values)
            assert torch.allclose(output.logits[:, 0], expected[:, t], atol=1e-4)


@pytest.mark.parametrize("filled", ["uncompiled", "without factors"])
def test_a_cache_filled_under_other_factors_is_refused(small, ids, filled):
    """By compiled code and by uncompiled, and so is a copy, which under the same factors is as good as the cache."""
    fast = compiled(small)
    with torch.no_grad():
        if filled == "without factors":
            lpes_eval.remove(small)
        cache = small(ids, use_cache=True).past_key_values
        copied = copy.deepcopy(cache)
        small(ids[:, :1], past_key_values=copied)
        lpes_eval.apply(small, [1.7, 1.3])
        for decode, given, length in ((fast, cache, 40), (small, cache, 40), (small, copied, 41)):
            with pytest.raises(CacheError, match=f"{length} positions"):
                decode(ids[:, :1], past_key_values=given)


def test_a_static_cache_that_was_emptied_serves_other_factors(small, ids):
    cache = StaticCache(config=small.config, max_cache_len=64)
    with torch.no_grad():
        small(ids, past_key_values=cache)
        lpes_eval.apply(small, [1.7, 1.3])
        with pytest.raises(CacheError, match="40 positions"):
            small(ids[:, :1], past_key_values=cache)
        cache.reset()
        assert torch.allclose(small(ids, past_key_values=cache).logits, logits(small, ids), atol=1e-4)
