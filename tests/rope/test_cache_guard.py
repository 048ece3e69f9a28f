"""A key-value cache holds keys that are rotated already: under other factors it is refused, compiled or not."""

import copy
import pickle

import pytest
import torch
from packaging import version
from transformers import ContinuousBatchingConfig, GenerationConfig, StaticCache

import lpes_eval
from benchmarks.families import tiny_config, tiny_model
from lpes_eval.errors import CacheError
from small_llama import FACTORS, by_hand, generate, llama, logits


def test_a_copied_or_pickled_cache_goes_on_under_the_same_factors_alone(model, ids):
    other = llama()
    lpes_eval.apply(model, FACTORS)
    lpes_eval.apply(other, [*FACTORS[:3], 1.27])
    with torch.no_grad():
        filled = model(ids, use_cache=True).past_key_values
        for cache in (filled, copy.deepcopy(copy.deepcopy(filled)), pickle.loads(pickle.dumps(filled))):
            with pytest.raises(CacheError, match=r"40 positions whose keys were not rotated under the layer factors"):
                other(ids[:, :1], past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)


def test_a_cache_in_a_tuple_is_known_again(model, ids):
    lpes_eval.apply(model, FACTORS)
    base = model.model
    with torch.no_grad():
        _, cache = base(ids, use_cache=True, return_dict=False)
        base(ids[:, :1], past_key_values=cache)
        lpes_eval.apply(model, [1.5] * 4)
        with pytest.raises(CacheError):
            base(ids[:, :1], past_key_values=cache)


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
    for factors in (None, FACTORS, [1.9] * 4, None):
        lpes_eval.remove(model) if factors is None else lpes_eval.apply(model, factors)
        expected = model.generate(prompt, generation_config=greedy)[0, prompt.shape[1] :].tolist()
        (found,) = model.generate_batch(prompt.tolist(), warmup=False, **options).values()
        assert found.generated_tokens == expected
    lpes_eval.remove(model)


# -- the same where forwards are compiled ----------------------------------------------------------------------------


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", **options)


@pytest.fixture
def small():
    model = llama(num_hidden_layers=2)
    lpes_eval.apply(model, [1.3, 1.7])
    return model


@pytest.mark.parametrize("what", ["the model", "in place", "each layer"])
def test_compiled_code_follows_apply_other_factors_and_remove(ids, what):
    """Whichever comes first; torch.compile by itself looks for no hook that a module got since (PyTorch 117758)."""
    model = llama(num_hidden_layers=2)
    expected = {}
    for factors in (None, [1.34, 1.675], [1.21, 1.43]):
        expected[str(factors)] = logits(model, ids) if factors is None else by_hand(model, ids, factors)
    torch._dynamo.reset()
    fast = model
    if what == "the model":
        fast = compiled(model)
    elif what == "in place":
        model.compile(backend="aot_eager")
    else:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    for factors in (None, [1.34, 1.675], [1.21, 1.43], None, [1.34, 1.675]):
        lpes_eval.remove(model) if factors is None else lpes_eval.apply(model, factors)
        assert torch.allclose(logits(fast, ids), expected[str(factors)], atol=1e-4)


def test_generation_that_falls_back_from_compiled_code_goes_on(small, ids):
    expected = generate(small, ids)
    small.forward = compiled(small.forward, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):  # prefill, one step, and from then on uncompiled
        assert torch.equal(generate(small, ids), expected)


@pytest.mark.parametrize("first", ["compiled", "uncompiled"])
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_a_cache_goes_from_compiled_code_to_uncompiled_and_back(small, ids, first, kind):
    lpes_eval.apply(small, kind([1.3, 1.7]))
    expected = logits(small, ids, use_cache=False)
    steps = [compiled(small, fullgraph=kind is list), small]  # in one graph: no hook and nothing about caches breaks it
    with torch.no_grad():
        output = steps[first == "uncompiled"](ids[:, :36], use_cache=True)
        assert torch.allclose(output.logits, expected[:, :36], atol=1e-4)
        for t in range(36, 40):
            output = steps[t % 2](ids[:, t : t + 1], past_key_values=output.past_key_values)
            assert torch.allclose(output.logits[:, 0], expected[:, t], atol=1e-4)


@pytest.mark.parametrize("filled", ["compiled", "uncompiled", "without factors"])
def test_a_cache_filled_under_other_factors_is_refused(small, ids, filled):
    """By compiled code and by uncompiled, and so is a copy, which under the same factors is as good as the cache."""
    fast = compiled(small)
    with torch.no_grad():
        if filled == "without factors":
            lpes_eval.remove(small)
        cache = (fast if filled == "compiled" else small)(ids, use_cache=True).past_key_values
        copied = copy.deepcopy(cache)
        small(ids[:, :1], past_key_values=copied)
        lpes_eval.apply(small, [1.7, 1.3])
        for decode, given, length in ((fast, cache, 40), (small, cache, 40), (small, copied, 41)):
            with pytest.raises(CacheError, match=f"{length} positions"):
                decode(ids[:, :1], past_key_values=given)


@pytest.mark.skipif(version.parse(torch.__version__) < version.parse("2.13"), reason="torch 2.10 compiles each time")
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


@pytest.mark.parametrize("how", ["compiled", "uncompiled"])
def test_a_static_cache_that_was_emptied_serves_other_factors(small, ids, how):
    cache = StaticCache(config=small.config, max_cache_len=64)
    fast = compiled(small, fullgraph=True) if how == "compiled" else small
    with torch.no_grad():
        fast(ids, past_key_values=cache)
        lpes_eval.apply(small, [1.7, 1.3])
        with pytest.raises(CacheError, match="40 positions"):
            small(ids[:, :1], past_key_values=cache)
        cache.reset()
        assert torch.allclose(fast(ids, past_key_values=cache).logits, logits(small, ids), atol=1e-4)
