"""Which rotary module gets which factor in a model of vLLM's, on a stand-in; tests/test_vllm.py runs vLLM itself."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lpes_eval import vllm
from lpes_eval.errors import FactorsError, UnsupportedModel
from lpes_eval.factors import Factors

FACTORS = [1.0, 1.25, 1.0625, 1.4375]


class RotaryEmbedding(nn.Module):
    """As vLLM's: one object for all layers, whose table follows from ``_compute_inv_freq``."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache(), persistent=False)

    def _compute_inv_freq(self, base):
        return 1.0 / base ** (torch.arange(0, 8, 2) / 8)

    def _compute_cos_sin_cache(self):
        angles = torch.arange(40.0)[:, None] * self._compute_inv_freq(100.0)
        return torch.cat((angles.cos(), angles.sin()), -1)


RotaryEmbedding.__module__ = "vllm.model_executor.layers.rotary_embedding"


def model():
    """Four layers that share a rotary module."""
    shared = RotaryEmbedding()
    attentions = [nn.Module() for _ in FACTORS]
    for attention in attentions:
        attention.rotary_emb = shared
    whole = nn.Module()
    whole.layers = nn.ModuleList(nn.ModuleDict({"self_attn": attention}) for attention in attentions)
    return whole


def tables(whole):
    return [layer["self_attn"].rotary_emb.cos_sin_cache for layer in whole.layers]


def expected(factor):
    angles = torch.arange(40.0)[:, None] / factor * RotaryEmbedding._compute_inv_freq(None, 100.0)
    return torch.cat((angles.cos(), angles.sin()), -1)


def test_every_layer_gets_a_table_of_its_own_factor_and_other_factors_while_it_runs():
    whole, plain = model(), RotaryEmbedding()
    shared = whole.layers[0]["self_attn"].rotary_emb
    vllm.apply(whole, Factors.from_list(FACTORS), SimpleNamespace(num_hidden_layers=4))
    for table, factor in zip(tables(whole), FACTORS, strict=True):
        assert torch.allclose(table, expected(factor), atol=1e-5)
    assert torch.equal(shared.cos_sin_cache, plain.cos_sin_cache)
    worker = vllm.Worker()
    worker.get_model = lambda: whole
    worker.set_lpes_factors(FACTORS[::-1])
    for table, factor in zip(tables(whole), FACTORS[::-1], strict=True):
        assert torch.allclose(table, expected(factor), atol=1e-5)


def test_what_was_not_tried_is_refused():
    with pytest.raises(FactorsError, match="for 4 layers, the model has 5"):
        vllm.apply(model(), Factors.from_list(FACTORS), SimpleNamespace(num_hidden_layers=5))
    other = model()
    for layer in other.layers:
        layer["self_attn"].rotary_emb = nn.Identity()
    with pytest.raises(UnsupportedModel, match="Identity: layer factors were not tried"):
        vllm.apply(other, Factors.from_list(FACTORS), SimpleNamespace(num_hidden_layers=4))
