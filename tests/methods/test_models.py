"""The model types pi, attention_buckets, ms_poe and moice in lm-eval, on the shipped reference model."""

import contextlib
import json

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lpes_eval.models.attention_buckets import AttentionBuckets, parse_bases
from lpes_eval.models.lpes import LPES
from lpes_eval.models.moice import MoICE
from lpes_eval.models.ms_poe import MsPoE
from lpes_eval.models.pi import PI
from lpes_eval.peers.ms_poe import MsPoE as Method
from peer_checks import TASK, answers, distance, evaluate, generated
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig

from lpes_eval import reference
from lpes_eval.data import kv
from lpes_eval.errors import FactorsError, UnsupportedModel, UserError


@pytest.mark.parametrize("name", ["pi", "attention_buckets", "ms_poe"])
def test_each_runs_by_its_name_and_says_what_it_did(name, task_manager):
    results = evaluate(name, task_manager, tasks=["kv_retrieval"], limit=2)
    assert set(results["results"]["kv_retrieval"]) >= {"acc,none", "acc_worst,none", "acc_spread,none"}
    config = json.loads(json.dumps(results["config"], default=str))
    if name == "pi":
        assert config["factors"]["per_layer"] == [1.5] * 6
    else:
        assert config["method"]["name"] == name


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (PI, {"factor": 1.3}),
        (AttentionBuckets, {}),
        (MsPoE, {}),
        (MsPoE, {"skip": 0}),
        (MoICE, {}),
    ],
    ids=["pi", "attention_buckets", "ms_poe", "ms_poe in all layers", "moice"],
)
def test_with_a_cache_the_reference_model_generates_what_it_generates_without(kind, settings):
    lm, plain = kind(**settings), AutoModelForCausalLM.from_pretrained(reference.path())
    lm.tokenizer.padding_side = "left"
    prompts = [kv.generate(number, size).prompt(40) for number, size in ((0, 3), (1, 5))]
    given = dict(lm.tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False))
    assert given["attention_mask"][0, 0] == 0
    end = given["input_ids"].shape[1] - 1
    with lm.method.prompt_ends_at(end) if kind is MsPoE else contextlib.nullcontext():
        cached, anew = (generated(lm.model, given, max_new_tokens=16, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached.sequences, anew.sequences)
    assert distance(cached.logits, anew.logits) < 1e-3
    assert distance(cached.logits[:1], generated(plain, given, max_new_tokens=1).logits) > 1e-2


def test_pi_is_lpes_with_one_factor_and_transformers_linear_scaling(tmp_path):
    config = AutoConfig.from_pretrained(reference.path())
    config.rope_parameters = {"rope_type": "linear", "factor": 1.3, "rope_theta": 10000.0}
    linear = AutoModelForCausalLM.from_pretrained(reference.path(), config=config).eval()
    tokens = torch.arange(20, 320)[None]
    with torch.no_grad():
        found = PI(factor=1.3).model(tokens).logits
        expected = linear(tokens).logits
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
        assert torch.equal(found, LPES(factors=1.3).model(tokens).logits)
    assert PI(factor="1.3", skip="1").layer_factors == [1.0, *[1.3] * 5]
    assert PI(pretrained="reference-kv").layer_factors == [1.5] * 4


def test_one_bucket_answers_as_hf_and_others_do_not(task_manager):
    plain = evaluate(HFLM(pretrained=str(reference.path()), device="cpu", batch_size=4), task_manager)
    one = evaluate("attention_buckets", task_manager, "bases=10000")
    other = evaluate("attention_buckets", task_manager, "bases=100:1000:1000000")
    assert answers(one) == answers(plain)
    assert answers(other) != answers(plain)
    assert other["config"]["method"]["bases"] == (100.0, 1000.0, 1000000.0)


def test_buckets_are_scored_by_combined_probabilities():
    lm = AttentionBuckets(bases=[10000, 25000], batch_size=2)
    context, continuation = list(range(20, 80)), [101, 102, 103]
    (found,) = lm._loglikelihood_tokens([(("", ""), context, continuation)], disable_tqdm=True)
    each = []
    for base in lm.bases:
        config = AutoConfig.from_pretrained(reference.path())
        config.rope_parameters = {"rope_type": "default", "rope_theta": base}
        model = AutoModelForCausalLM.from_pretrained(reference.path(), config=config).eval()
        with torch.no_grad():
            each.append(model(torch.tensor([context + continuation[:-1]])).logits[0, -3:].double())
    confidence = torch.stack([logits.amax(-1) for logits in each]).softmax(0)
    combined = sum(c[:, None] * logits.softmax(-1) for c, logits in zip(confidence, each, strict=True))
    assert found[0] == pytest.approx(combined[range(3), continuation].log().sum().item(), abs=1e-4)


@pytest.fixture(scope="module")
def ms_poe():
    return MsPoE(min=2, max=20, skip=0, threshold=2, batch_size=3)


def score_alone(lm, context, continuation):
    """Log-likelihood with heads ranked on the context's last token, one request at a time, without a batch."""
    with torch.no_grad(), lm.method.prompt_ends_at(len(context) - 1):
        logits = lm.model(torch.tensor([context + continuation[:-1]])).logits[0, -len(continuation) :]
    return logits.log_softmax(-1)[range(len(continuation)), continuation].sum().item()


def test_likelihoods_rank_heads_on_the_last_token_of_the_context(ms_poe):
    texts = torch.randint(20, 700, (5, 90), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [
        (("", ""), text[:cut], text[cut:end])
        for text, cut, end in zip(texts, (40, 70, 20, 55, 60), (90, 75, 80, 56, 61), strict=True)
    ]
    requests.append((("", ""), [*texts[0][:30], 0], [0, 0, 5]))  # ends in what padding looks like
    requests.append((("", ""), texts[0][:60], texts[0][60:90]))  # the tokens of the first with another context
    found = ms_poe._loglikelihood_tokens(requests, disable_tqdm=True)
    expected = [score_alone(ms_poe, context, continuation) for _, context, continuation in requests]
    assert [score for score, _ in found] == pytest.approx(expected, abs=1e-3)
    assert abs(found[0][0] - score_alone(ms_poe, texts[0][:60], texts[0][60:90])) > 1e-3


def test_generation_ranks_heads_on_the_last_token_of_the_prompt(ms_poe, task_manager):
    found = evaluate(ms_poe, task_manager)
    ms_poe.method.detach()
    plain = evaluate(ms_poe, task_manager)
    ms_poe.method = Method(ms_poe.model, ms_poe.settings)
    assert answers(found) != answers(plain)
    (sample,) = (s for s in found["samples"][TASK] if s["doc_id"] == 0)
    tokens = torch.tensor([ms_poe.tok_encode(sample["arguments"][0][0])])
    with ms_poe.method.prompt_ends_at(tokens.shape[1] - 1):
        anew = ms_poe.model.generate(tokens, max_new_tokens=12, do_sample=False, use_cache=False)[0, tokens.shape[1] :]
    answer = sample["resps"][0][0]
    assert answer
    assert ms_poe.tok_decode(anew.tolist()).startswith(answer[:8])


def test_what_is_wrong_is_said_before_any_weight_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(HFLM, "_create_model", lambda *_, **__: pytest.fail("a model was loaded"))
    GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=31).save_pretrained(tmp_path / "gpt2")
    for model in (PI, AttentionBuckets, MsPoE):
        with pytest.raises(UnsupportedModel, match="gpt2: no decoder layers with rotary"):
            model(pretrained=str(tmp_path / "gpt2"))
        with pytest.raises(UserError, match="nowhere: no such folder"):
            model(pretrained="./nowhere")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    LlamaConfig(**sizes, rope_parameters=rope).save_pretrained(tmp_path / "linear")
    with pytest.raises(UnsupportedModel, match="llama: its rotary embedding is of type linear; Attention Buckets"):
        AttentionBuckets(pretrained=str(tmp_path / "linear"))
    with pytest.raises(UserError, match="skip=2: the model has 2 layers"):
        MsPoE(pretrained=str(tmp_path / "linear"))
    for arguments in ({"min": "a"}, {"min": 2}, {"threshold": 0}):
        with pytest.raises(UserError, match="expected"):
            MsPoE(**arguments)
    with pytest.raises(UserError, match=r"^factor=x: expected a number$"):
        PI(factor="x")
    with pytest.raises(FactorsError, match=r"factor=0: .* expected a number from 0.001"):
        PI(factor=0)
    for kind in (PI, MsPoE):
        for skip in ("some", -3, 1.7, True):
            with pytest.raises(UserError, match=rf"^skip={skip}: expected a whole number, 0 or more$"):
                kind(skip=skip)
        for skip in (6, 99, 10**9):
            with pytest.raises(UserError, match=rf"^skip={skip}: the model has 6 layers, of which none would be left$"):
                kind(skip=skip)
    with pytest.raises(UserError, match=r"^threshold=much: expected a number$"):
        MsPoE(threshold="much")
    with pytest.raises(UserError, match="factors=FILE is for lpes"):
        PI(factors=1.2)
    with pytest.raises(UserError, match="combine=max"):
        AttentionBuckets(combine="max")


def test_bases_are_read_as_they_are_written():
    assert parse_bases("10000:17500") == (10000.0, 17500.0)
    assert parse_bases(10000) == (10000.0,)
    assert parse_bases([1e4, 2e4]) == (10000.0, 20000.0)
    assert parse_bases(None) is None
    for wrong in ("10000,17500", "", [0], ["x"]):
        with pytest.raises(UserError, match="numbers > 1 with ':' between them"):
            parse_bases(wrong)


def test_beam_search_is_refused_where_rows_are_bases():
    lm = AttentionBuckets(bases="10000:17500")
    with pytest.raises(UserError, match="use num_beams=1"):
        lm._model_generate(torch.tensor([[5, 6]]), 8, ["\n"], num_beams=2)


def test_answers_of_other_settings_are_cached_apart():
    keys = [
        MsPoE().cache_key,
        MsPoE(max=2).cache_key,
        AttentionBuckets().cache_key,
        AttentionBuckets(combine="logits").cache_key,
        AttentionBuckets(bases=10000).cache_key,
        PI().cache_key,
        PI(factor=1.2).cache_key,
    ]
    assert len(set(keys)) == len(keys)


def test_a_model_that_is_loaded_already_is_checked_too():
    loaded = PI(skip=2.0)
    assert loaded.layer_factors == [1.0, 1.0, *[1.5] * 4]
    with pytest.raises(UserError, match=r"^skip=6: the model has 6 layers"):
        PI(pretrained=loaded.model, tokenizer=loaded.tokenizer, skip=6)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=1000))
    for kind in (MsPoE, AttentionBuckets):
        with pytest.raises(UnsupportedModel, match="gpt2"):
            kind(pretrained=model, tokenizer=str(reference.path()))
