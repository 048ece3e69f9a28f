"""Attention Buckets: one base is the plain model, and several are what a loop over models of other bases gives."""

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.families import tiny_config, tiny_model
from checks import LENGTH, answers, distance, evaluate, generated, inputs
from lpes_eval import reference
from lpes_eval.errors import CacheError, UserError
from lpes_eval.methods.attention_buckets import AttentionBuckets

FAMILIES = ("llama", "qwen2", "mistral", "gemma2", "stablelm", "glm")
BASES = (10000.0, 17500.0, 25000.0)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(tiny_config(request.param))


def logits(model):
    with torch.no_grad():
        return model(**inputs()).logits


def by_models_of_these_bases(model, bases, combine="probabilities"):
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
    if combine == "logits":
        return (weights * torch.stack(each)).sum(0)
    return (weights * torch.stack([x.exp() / x.exp().sum(-1, keepdim=True) for x in each])).sum(0).log()


def test_one_base_the_models_own_is_the_plain_model_bit_for_bit(model):
    plain, answer = logits(model), generated(model)
    method = AttentionBuckets.apply(model, bases=model.config.rope_parameters["rope_theta"])
    assert torch.equal(logits(model), plain)
    assert torch.equal(torch.stack(generated(model).logits), torch.stack(answer.logits))
    method.detach()
    assert torch.equal(logits(model), plain)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("combine", ["probabilities", "logits"])
def test_several_bases_are_combined_as_from_models_with_these_bases(model, combine):
    expected = by_models_of_these_bases(model, BASES, combine)
    plain = logits(model)
    method = AttentionBuckets.apply(model, bases=BASES, combine=combine)
    found = logits(model)
    method.detach()
    visible = inputs()["attention_mask"].bool()
    assert (found - expected)[visible].abs().max() < 1e-4
    assert (found - plain.log_softmax(-1))[visible].abs().max() > 1e-3


def test_combined_probabilities_add_up_to_one():
    model = tiny_model(tiny_config("llama"))
    AttentionBuckets.apply(model)
    torch.testing.assert_close(logits(model).exp().sum(-1), torch.ones(2, LENGTH), atol=1e-5, rtol=0)


def test_cache_no_cache_parts_and_single_rows_agree(model):
    method = AttentionBuckets.apply(model, bases=BASES)
    try:
        cached = generated(model)
        anew = generated(model, use_cache=False)
        alone = generated(model, {"input_ids": inputs()["input_ids"][:1, 5:]})
        method.parts = 2
        in_parts = generated(model)
        scored_in_parts = logits(model)
        method.parts = 1
        scored = logits(model)
    finally:
        method.detach()
    for other in (anew, in_parts):
        assert torch.equal(cached.sequences, other.sequences)
        assert distance(cached.logits, other.logits) < 1e-4
    assert distance([x[:1] for x in cached.logits], alone.logits) < 1e-4
    assert (scored - scored_in_parts).abs().max() < 1e-4


def test_positions_with_several_axes_are_repeated_row_by_row():
    model = tiny_model(tiny_config("qwen3_5_text"))
    position_ids = torch.arange(LENGTH) + torch.tensor([[0], [3]])  # every row has its own
    given = {"input_ids": inputs()["input_ids"], "use_cache": False}
    AttentionBuckets.apply(model, bases=BASES)
    with torch.no_grad():
        expected = model(**given, position_ids=position_ids).logits
        found = model(**given, position_ids=position_ids.expand(3, -1, -1)).logits
        elsewhere = model(**given, position_ids=position_ids.expand(3, -1, -1) * 2).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (elsewhere - expected).abs().max() > 1e-3


def test_what_does_not_fit_into_memory_is_done_in_parts():
    model = tiny_model(tiny_config("llama"))
    method = AttentionBuckets.apply(model, bases=BASES)
    expected = generated(model)
    rows = []

    def small(decoder, args, kwargs):
        rows.append(kwargs["input_ids"].shape[0])
        if kwargs["input_ids"].shape[1] > 1 and rows[-1] > 4:
            raise torch.OutOfMemoryError("too much")

    model.model.register_forward_pre_hook(small, with_kwargs=True)
    found = generated(model)
    assert method.parts == 2
    assert rows[:3] == [6, 4, 2]  # three bases of two rows; two bases, then one
    assert rows[3:] == [6] * 4  # decoding has all rows again
    assert distance(found.logits, expected.logits) < 1e-4


def test_rows_are_counted_in_the_first_layer_that_holds_keys():
    model = tiny_model(tiny_config("qwen3_next"))  # its first layer is linear attention
    cache = model(**inputs(), use_cache=True).past_key_values
    AttentionBuckets.apply(model, bases=BASES)
    with pytest.raises(
        CacheError, match="the key-value cache holds 2 rows, and Attention Buckets with 3 bases needs 6"
    ):
        model(inputs()["input_ids"][:, :1], past_key_values=cache)


def test_misuse_is_refused():
    model = tiny_model(tiny_config("llama"))
    with pytest.raises(UserError, match="combine=mean"):
        AttentionBuckets.apply(model, combine="mean")
    AttentionBuckets.apply(model, bases=BASES)
    with pytest.raises(UserError, match="computes no loss"):
        model(**inputs(), labels=inputs()["input_ids"])
    with pytest.raises(CacheError, match="without beam search"):
        generated(model, num_beams=2)


def test_bases_are_read_as_they_are_written_and_the_published_ones_follow_the_models_own():
    published = (10000.0, 17500.0, 18000.0, 19000.0, 20000.0, 22500.0, 25000.0)
    for given, theta, bases in (
        ("10000:17500", 1e4, (10000.0, 17500.0)),
        (10000, 1e6, (10000.0,)),
        ([1e4, 2e4], 1e4, (10000.0, 20000.0)),
        (None, 1e4, published),
        (None, 1e6, tuple(100 * base for base in published)),
    ):
        model = tiny_model(tiny_config("llama", rope_parameters={"rope_type": "default", "rope_theta": theta}))
        assert AttentionBuckets.apply(model, bases=given).describe()["bases"] == bases
    for wrong in ("10000,17500", "", [0], ["x"]):
        with pytest.raises(UserError, match="numbers > 1 with ':' between them"):
            AttentionBuckets.apply(model, bases=wrong)


# -- the model type


def test_one_bucket_answers_as_hf_and_others_do_not(task_manager):
    plain = evaluate(HFLM(pretrained=str(reference.path()), device="cpu", batch_size=4), task_manager)
    one = evaluate("attention_buckets", task_manager, "bases=10000")
    other = evaluate("attention_buckets", task_manager, "bases=100:1000:1000000")
    assert answers(one) == answers(plain)
    assert answers(other) != answers(plain)
    assert (
        other["config"]["method"] | {"name": "attention_buckets", "bases": (100.0, 1000.0, 1000000.0)}
        == (other["config"]["method"])
    )


def test_buckets_are_scored_by_combined_probabilities():
    lm = AttentionBuckets(bases=[10000, 25000], batch_size=2)
    context, continuation = list(range(20, 80)), [101, 102, 103]
    (found,) = lm._loglikelihood_tokens([(("", ""), context, continuation)], disable_tqdm=True)
    each = []
    for base in (10000, 25000):
        config = AutoConfig.from_pretrained(reference.path())
        config.rope_parameters = {"rope_type": "default", "rope_theta": base}
        model = AutoModelForCausalLM.from_pretrained(reference.path(), config=config).eval()
        with torch.no_grad():
            each.append(model(torch.tensor([context + continuation[:-1]])).logits[0, -3:].double())
    confidence = torch.stack([logits.amax(-1) for logits in each]).softmax(0)
    combined = sum(c[:, None] * logits.softmax(-1) for c, logits in zip(confidence, each, strict=True))
    assert found[0] == pytest.approx(combined[range(3), continuation].log().sum().item(), abs=1e-4)


def test_beam_search_is_refused_where_rows_are_bases():
    lm = AttentionBuckets(bases="10000:17500")
    with pytest.raises(UserError, match="use num_beams=1"):
        lm._model_generate(torch.tensor([[5, 6]]), 8, ["\n"], num_beams=2)
