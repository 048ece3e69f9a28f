"""Attention Buckets: one base is the plain model, and several are what a loop over models of other bases gives."""

import pytest
import torch

from checks import LENGTH, apart, inputs, logits
from lpes_eval.errors import CacheError
from lpes_eval.methods.attention_buckets import AttentionBuckets
from tiny_models import tiny_config, tiny_model

BASES = (10000.0, 17500.0, 25000.0)


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2", "stablelm"])
def model(request):
    return tiny_model(tiny_config(request.param))


def by_models_of_these_bases(model, bases):
    """The combined prediction from models that are built with each base in their configuration, in float64."""
    each = []
    for base in bases:
        config = type(model.config).from_dict(model.config.to_dict())
        config.rope_parameters = config.rope_parameters | {"rope_theta": base}
        other = type(model)(config).eval()
        other.load_state_dict(model.state_dict())
        each.append(logits(other).double())
    confidence = torch.stack([x.amax(-1) for x in each]).exp()
    weights = (confidence / confidence.sum(0)).unsqueeze(-1)
    return (weights * torch.stack([x.exp() / x.exp().sum(-1, keepdim=True) for x in each])).sum(0).log()


def test_several_bases_are_combined_as_from_models_with_these_bases(model):
    expected, plain = by_models_of_these_bases(model, BASES), logits(model)
    visible = inputs()["attention_mask"].bool()
    method = AttentionBuckets.apply(model, bases=BASES)
    found = logits(model)
    assert apart(found[visible], expected[visible]) < 1e-4
    assert apart(found[visible], plain.log_softmax(-1)[visible]) > 1e-3
    method.detach()


def test_positions_with_several_axes_are_repeated_row_by_row_and_those_of_one_row_are_those_of_all():
    model = tiny_model(tiny_config("qwen3_5_text"))
    position_ids = torch.arange(LENGTH) + torch.tensor([[0], [3]])  # every row has its own
    given = {"input_ids": inputs()["input_ids"], "use_cache": False}
    AttentionBuckets.apply(model, bases=BASES)
    expected = logits(model, **given, position_ids=position_ids)
    assert apart(logits(model, **given, position_ids=position_ids.expand(3, -1, -1)), expected) < 1e-4
    assert apart(logits(model, **given, position_ids=position_ids.expand(3, -1, -1) * 2), expected) > 1e-3
    one = position_ids[:1]
    of_all = logits(model, **given, position_ids=one.expand(2, -1))
    assert torch.equal(logits(model, **given, position_ids=one), of_all)


def test_rows_are_counted_in_the_first_layer_that_holds_keys():
    model = tiny_model(tiny_config("qwen3_next"))  # its first layer is linear attention
    AttentionBuckets.apply(model, bases=BASES)
    cache = model(**inputs(), use_cache=True).past_key_values
    with pytest.raises(CacheError, match="holds 6 rows, and Attention Buckets with 3 bases needs 3"):
        model(inputs()["input_ids"][:1, :1], past_key_values=cache)


@pytest.mark.parametrize(
    ("given", "theta", "bases"),
    [
        ("10000:17500", 1e4, (10000.0, 17500.0)),
        (10000, 1e6, (10000.0,)),
        ([1e4, 2e4], 1e4, (10000.0, 20000.0)),
        (None, 1e4, (10000.0, 17500.0, 18000.0, 19000.0, 20000.0, 22500.0, 25000.0)),
        (None, 1e6, (1e6, 1.75e6, 1.8e6, 1.9e6, 2e6, 2.25e6, 2.5e6)),
    ],
)
def test_bases_are_read_as_they_are_written_and_the_published_ones_follow_the_models_own(given, theta, bases):
    model = tiny_model(tiny_config("llama", rope_parameters={"rope_type": "default", "rope_theta": theta}))
    assert AttentionBuckets.apply(model, bases=given).describe()["bases"] == bases
