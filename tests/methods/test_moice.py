"""MoICE inside a model: against its definition, and against the plain model where the two must be the same."""

from dataclasses import replace

import pytest
import torch
from transformers.cache_utils import DynamicCache

from checks import apart, generated, inputs, logits, spread
from lpes_eval import reference
from lpes_eval.errors import UserError
from lpes_eval.methods import moice
from lpes_eval.methods.moice import MoICE, router
from lpes_eval.methods.moice.router import Router
from slow import causal, slow_llama, slow_weights, turn
from tiny_models import tiny_config, tiny_model


def make_router(model, **options):
    described = MoICE.benchmark_settings(model)["router"].config
    return spread(Router(replace(described, **options), seed=1)).requires_grad_(False)


@pytest.mark.parametrize("top_k", [7, 3])
def test_logits_are_those_of_a_slow_implementation(llama, top_k):
    tokens, made = inputs()["input_ids"][1, :12], make_router(llama, top_k=top_k)

    def attend(h, hidden, project):
        q, k, v = (project(name, hidden) for name in "qkv")
        w1, w2, w3 = (w[h].double().tolist() for w in (made.w1, made.w2, made.w3))
        out = []
        for query, key, value in zip(q, k, v, strict=True):
            by_base = [[turn(llama, x, base=base) for x in (query, key)] for base in made.config.bases]
            weights = torch.tensor([slow_weights(turned, w1, w2, w3, top_k) for turned in by_base[0][0].tolist()]).T
            attended = (causal(*turned, value) for turned in by_base)
            out.append(sum(w[:, None] * a for w, a in zip(weights, attended, strict=True)))
        return torch.stack(out)

    expected = slow_llama(llama, tokens, attend)
    MoICE.apply(llama, router=made)
    assert apart(logits(llama, input_ids=tokens[None])[0], expected) < 1e-4


@pytest.mark.parametrize(("attention", "changes"), [("eager", {}), ("sdpa", {"sliding_window": 7}), ("sdpa", {})])
def test_bases_at_once_are_bases_in_turns_in_any_implementation(attention, changes, monkeypatch):
    model = tiny_model(tiny_config("mistral", **changes))
    model.set_attn_implementation(attention)
    MoICE.apply(model, router=make_router(model))
    at_once = logits(model), generated(model)
    assert apart(generated(model, use_cache=False), at_once[1]) < 1e-4
    monkeypatch.setattr(moice, "BATCHED_BYTES", 0)
    for found, expected in zip((logits(model), generated(model)), at_once, strict=True):
        assert apart(found, expected) < 3e-5


def test_a_cache_holds_keys_for_every_base_and_values_once(llama):
    plain = DynamicCache()
    logits(llama, past_key_values=plain)
    MoICE.apply(llama, router=make_router(llama))
    for cache in (DynamicCache(), DynamicCache(config=llama.config)):
        logits(llama, past_key_values=cache, use_cache=True)
        for before, after in zip(plain.layers, cache.layers, strict=True):
            assert after.keys.numel() == 7 * before.keys.numel()
            assert after.values.shape == before.values.shape


def test_a_router_is_described_as_it_was_read_and_the_shipped_one_is_the_default(routed):
    lm, shipped = MoICE(router=str(routed / "other")), MoICE()
    described = lm.method.describe()
    assert described["bases"] == (30.0, 100.0, 300.0)
    assert shipped.method.describe()["router"] == str(reference.path() / router.SHIPPED / router.FILE)
    assert lm.cache_key != shipped.cache_key
    (routed / "other" / router.FILE).rename(routed / "moved")  # while the evaluation runs
    assert lm.method.describe() == described
    (routed / "moved").rename(routed / "other" / router.FILE)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_what_is_wrong_with_a_router_is_said_before_any_weight_is_loaded(tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"moice needs router=.*moice\.train"):
        MoICE(pretrained=str(tmp_path))
    with pytest.raises(UserError, match=r"6 layers of 4 heads of size 32.* has 4 layers of 4 heads of size 16"):
        MoICE(pretrained=str(tmp_path), router=str(reference.path() / "router"))
