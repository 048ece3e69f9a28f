"""Every family that takes layer factors: the methods run on it, or are refused with a reason; nothing in between."""

import contextlib

import pytest
import torch

from benchmarks.families import NOT_BUILT, model_types, tiny_config, tiny_model
from checks import distance, generated
from lpes_eval import methods, rope
from lpes_eval.errors import UnsupportedModel

pytestmark = pytest.mark.slow
TOKENS = torch.arange(3, 27)[None]
GIVEN = {"input_ids": TOKENS}
OTHERWISE = {"minimax", "zamba2"}
"""Families whose own answers with a cache differ from those without one, or nearly so."""
SETTINGS = {"ms_poe": {"skip": 1, "threshold": 1.5}}
"""Where the defaults would change nothing in four layers and a few random tokens."""


@pytest.mark.parametrize("family", sorted(set(model_types()) - set(NOT_BUILT) - set(rope.REFUSED)))
def test_it_runs_with_and_without_a_cache_or_says_why_not(family):
    model = tiny_model(tiny_config(family))
    try:
        rope.find_decoder(model)
    except UnsupportedModel:
        return
    plain = logits(model)
    for name in methods.names():
        kind = methods.load(name)
        try:
            method = kind.apply(model, **SETTINGS.get(name) or kind.benchmark_settings(model))
        except UnsupportedModel as refusal:
            assert str(refusal).startswith(f"{model.config.model_type}: ")
            continue
        assert not torch.equal(logits(model), plain)
        with method.prompt_ends_at(23) if hasattr(method, "prompt_ends_at") else contextlib.nullcontext():
            cached, anew = generated(model, GIVEN), generated(model, GIVEN, use_cache=False)
        assert family in OTHERWISE or distance(cached.logits, anew.logits) < 1e-3
        method.detach()
    assert torch.equal(logits(model), plain)


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS, use_cache=False).logits
