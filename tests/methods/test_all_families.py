"""Every family that takes layer factors: the peers run on it, or are refused with a reason; nothing in between."""

import pytest
import torch
from lpes_eval.peers import moice, router
from lpes_eval.peers.buckets import Buckets
from lpes_eval.peers.ms_poe import MsPoE, Settings
from peer_checks import distance, generated

from benchmarks.families import NOT_BUILT, model_types, tiny_config, tiny_model
from lpes_eval import rope
from lpes_eval.errors import UnsupportedModel

pytestmark = pytest.mark.slow
TOKENS = torch.arange(3, 27)[None]
GIVEN = {"input_ids": TOKENS}
OTHERWISE = {"minimax", "zamba2"}
"""Families whose own answers with a cache differ from those without one, or nearly so."""


def mixture(model):
    """MoICE with a new router."""
    described = router.describe(model.config, None, bases=moice.default_bases(model))
    return moice.apply(model, router.Router(described))


@pytest.mark.parametrize("family", sorted(set(model_types()) - set(NOT_BUILT) - set(rope.REFUSED)))
def test_it_runs_with_and_without_a_cache_or_says_why_not(family):
    model = tiny_model(tiny_config(family))
    try:
        rope.find_decoder(model)
    except UnsupportedModel:
        return
    with torch.no_grad():
        plain = model(input_ids=TOKENS, use_cache=False).logits
        for make in (lambda model: MsPoE(model, Settings(skip=1, threshold=1.5)), Buckets, mixture):
            try:
                method = make(model)
            except UnsupportedModel as refusal:
                assert str(refusal).startswith(f"{model.config.model_type}: ")
                continue
            assert not torch.equal(model(input_ids=TOKENS, use_cache=False).logits, plain)
            if isinstance(method, MsPoE):
                with method.prompt_ends_at(TOKENS.shape[1] - 1):
                    cached, anew = generated(model, GIVEN), generated(model, GIVEN, use_cache=False)
            else:
                cached, anew = generated(model, GIVEN), generated(model, GIVEN, use_cache=False)
            assert family in OTHERWISE or distance(cached.logits, anew.logits) < 1e-3
            method.detach()
        assert torch.equal(model(input_ids=TOKENS, use_cache=False).logits, plain)
