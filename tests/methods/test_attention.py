"""What the methods share: attention taken over and given back, and rotary tables for other factors and bases."""

import copy
from dataclasses import dataclass

import accelerate
import pytest
import torch
from transformers import AutoModelForCausalLM

from checks import FAMILIES, apart, generated, logits
from lpes_eval import methods
from lpes_eval.errors import UnsupportedModel
from lpes_eval.methods.interception import Interception, find_attention
from lpes_eval.methods.tables import frequencies, own_base
from tiny_models import tiny_config, tiny_model


@dataclass(eq=False)
class Plain(Interception):
    name = "Test"

    def attend(self, call):
        return self.plainly(call)


@pytest.mark.parametrize("family", FAMILIES)
def test_rotating_for_oneself_is_what_the_family_does(family):
    model = tiny_model(tiny_config(family))
    expected, answer = logits(model), generated(model)
    method = Plain()
    method.attach(model)
    assert method.layers
    assert apart(logits(model), expected) < 1e-5
    assert apart(generated(model), answer) < 1e-4


@pytest.mark.parametrize(
    ("family", "reason", "without_weights", "changes"),
    [
        ("gpt2", "no decoder layers with rotary position embeddings", True, {}),
        ("deepseek_v3", "latent attention", True, {}),
        ("gemma3n_text", "keys of another layer", True, {}),
        ("llama4_text", "complex numbers", False, {}),
        ("diffllama", "call the attention function more than once", False, {}),
        ("doge", "uses what is cached in a way of its own", False, {}),
        ("exaone4", "none of the layers", False, {"layer_types": ["full_attention"] * 4}),  # none has positions
    ],
)
def test_what_cannot_be_taken_over_is_refused_with_the_reason(family, reason, without_weights, changes):
    config = tiny_config(family, **changes)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match=reason):
        find_attention(skeleton, "Test") if without_weights else Plain().attach(tiny_model(config))


def test_a_base_is_replaced_only_where_it_is_all_there_is():
    scaled, kinds = {"factor": 2.0, "rope_theta": 1e4}, ("linear", "dynamic", "yarn")
    for family, changes, reason in (
        ("gemma3_text", {}, "tables of its own for each kind of attention"),
        ("llama4_text", {}, "complex numbers"),
        *(("llama", {"rope_parameters": scaled | {"rope_type": kind}}, f"type {kind}") for kind in kinds),
    ):
        with pytest.raises(UnsupportedModel, match=reason):
            own_base(tiny_model(tiny_config(family, **changes)), "test")


@pytest.mark.parametrize(("dtype", "theta"), [(torch.float32, 1e6), (torch.bfloat16, 1e4)])
def test_frequencies_are_those_of_the_base_up_to_the_rounding_of_their_dtype(dtype, theta):
    parameters = {"rope_type": "default", "rope_theta": theta}
    model = tiny_model(tiny_config("llama", rope_parameters=parameters, head_dim=128)).to(dtype)
    rotary = model.model.rotary_emb
    assert rotary.inv_freq.dtype == dtype
    assert own_base(model, "test") == theta
    rotary.inv_freq = frequencies(1.2 * theta, rotary.inv_freq)
    with pytest.raises(UnsupportedModel, match="not powers of its rope_theta"):
        own_base(model, "test")


@pytest.mark.parametrize("name", ["ms_poe", "moice"])
def test_a_model_whose_weights_are_elsewhere_until_they_are_needed_answers_the_same(name, llama):
    offloaded, kind = copy.deepcopy(llama), methods.load(name)
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    for one in (llama, offloaded):
        kind.apply(one, **kind.benchmark_settings(llama))
    torch.testing.assert_close(logits(offloaded), logits(llama))
