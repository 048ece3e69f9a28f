"""The lpes model type: hf with factors, on the shipped reference model."""

import json
from pathlib import Path

import lm_eval
import numpy as np
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lpes_eval.models.lpes import LPES
from transformers import GPT2Config, GPT2LMHeadModel

import lpes_eval
from lpes_eval import reference
from lpes_eval.compare.statistics import summarize
from lpes_eval.errors import FactorsError, PromptTooLong, UnsupportedModel, UserError
from lpes_eval.factors import Factors

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
QUICK = {"num_keys": 8, "positions": [20]}
TASK = "kv_retrieval"


def evaluate(model, task_manager, tasks=(TASK,), limit=6, metadata=QUICK, **options):
    options = {"log_samples": True, "bootstrap_iters": 0} | options
    return lm_eval.simple_evaluate(
        model, tasks=list(tasks), limit=limit, task_manager=task_manager(**metadata), **options
    )  # fmt: skip


@pytest.fixture(scope="module")
def lpes():
    return LPES(batch_size=4)


def answers(results):
    return {
        name: [(s["doc_id"], s["arguments"], s["resps"], s["filtered_resps"]) for s in samples]
        for name, samples in results["samples"].items()
    }


def test_without_factors_it_is_hf_sample_by_sample(lpes, task_manager):
    hf = HFLM(pretrained=str(reference.path()), device="cpu", batch_size=4)
    plain, other = evaluate(lpes, task_manager), evaluate(hf, task_manager)
    assert answers(plain) == answers(other)
    assert plain["results"] == other["results"]
    assert plain["results"][TASK]["acc,none"] > 0.5  # the reference model does read eight pairs


def test_factors_change_the_answers_and_leave_no_trace_when_taken_back(lpes, task_manager):
    before = evaluate(lpes, task_manager)
    lpes.set_factors(Factors.from_uniform(6.0))
    assert answers(evaluate(lpes, task_manager)) != answers(before)
    lpes.set_factors(None)
    assert answers(evaluate(lpes, task_manager)) == answers(before)


def test_factors_that_are_put_in_force_later_are_the_ones_reported(lpes):
    lpes.set_factors(1.2)
    assert lpes.get_model_info()["factors"]["given"] == "1.2"
    with pytest.raises(FactorsError, match="99 layers"):
        lpes.set_factors([1.1] * 99)
    assert lpes.get_model_info()["factors"]["per_layer"] == lpes.layer_factors == [1.2] * len(lpes.layer_factors)
    lpes.set_factors(None)
    assert lpes.get_model_info()["factors"] is None


def test_results_record_the_factors_their_hash_and_their_origin(tmp_path):
    depth = LPES().model.config.num_hidden_layers
    made = Factors.from_curve("linear", [(0, 1.0), (1, 1.4)], num_layers=depth, origin={"task": "kv_retrieval"})
    made.save(tmp_path / "f.json")
    info = json.loads(json.dumps(LPES(factors=str(tmp_path / "f.json")).get_model_info(), default=str))["factors"]
    assert info["given"] == str(tmp_path / "f.json")
    assert info["per_layer"] == made.per_layer()
    assert info["sha256"] == made.digest()
    assert info["origin"] == {"task": "kv_retrieval"}
    assert LPES().get_model_info()["factors"] is None


def test_the_model_is_the_one_the_factors_name(tmp_path):
    origin = {"model": {"name": str(tmp_path / "elsewhere")}}
    with pytest.raises(UserError, match="elsewhere: no such folder"):
        LPES(factors=Factors.from_uniform(1.2, origin=origin))
    assert LPES(factors=Factors.from_uniform(1.2, origin={"model": "reference"})).layer_factors[0] == 1.2


def test_what_is_wrong_is_said_before_any_weight_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(HFLM, "_create_model", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(FactorsError, match="no such file"):
        LPES(factors="none.json")
    with pytest.raises(UserError, match=r"^factor=1.2: lpes takes factors="):
        LPES(factor=1.2)
    with pytest.raises(FactorsError, match=r"factors are for 99 layers, the model has \d+"):
        LPES(factors=Factors.from_list([1.0] * 99))
    with pytest.raises(UserError, match=r"^device=gpu: no device of PyTorch's; expected cpu, cuda"):
        LPES(device="gpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(UserError, match=rf"^device={device}: PyTorch .* finds no GPU here; leave it out"):
            LPES(device=device)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match=r"^device=cuda:2: there are 2 GPUs, .* take cuda:0 to cuda:1$"):
        LPES(device="cuda:2")
    GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=31).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="gpt2"):
        LPES(pretrained=str(tmp_path), factors=1.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default is the GPU here")
def test_the_device_that_lm_eval_names_when_nobody_did_is_the_processor_where_there_is_no_gpu():
    assert LPES(device="cuda:0").device.type == "cpu"


def test_a_loaded_model_that_has_factors_is_not_taken_for_the_plain_one():
    loaded = LPES(factors=1.5)
    with pytest.raises(UserError, match=r"^pretrained: the model has layer factors in it; take them back"):
        LPES(pretrained=loaded.model, tokenizer=loaded.tokenizer)
    other = LPES(pretrained=loaded.model, tokenizer=loaded.tokenizer, factors=1.2)
    assert other.get_model_info()["factors"]["per_layer"] == [1.2] * 6
    lpes_eval.remove(loaded.model)
    assert LPES(pretrained=loaded.model, tokenizer=loaded.tokenizer).get_model_info()["factors"] is None


def test_factors_for_another_depth_are_named_in_a_few_words():
    loaded = LPES()
    for pretrained in (None, loaded.model):
        with pytest.raises(FactorsError, match=r"^factors: the factors are for 99 layers, the model has 6"):
            LPES(pretrained=pretrained, tokenizer=loaded.tokenizer, factors=Factors.from_list([1.0] * 99))


def test_factors_for_another_model_than_the_default_say_that_it_is_the_default():
    hint = "; it is the reference model, as no pretrained= was given: add pretrained=YOUR_MODEL"
    factors = [1.0] * 32
    with pytest.raises(FactorsError, match=f"factors are for 32 layers, the model has 6; .*{hint}$"):
        LPES(factors=Factors.from_list(factors))
    for given in (
        {"pretrained": "reference", "factors": Factors.from_list(factors)},
        {"factors": Factors.from_list(factors, origin={"model": "reference"})},
    ):
        with pytest.raises(FactorsError, match=r"made for this model$"):
            LPES(**given)


def test_any_model_that_hf_takes_runs_without_factors(tmp_path):
    from transformers import AutoTokenizer

    GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=1000)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(reference.path()).save_pretrained(tmp_path)
    assert LPES(pretrained=str(tmp_path)).layer_factors is None


def test_a_prompt_that_does_not_fit_is_an_error_with_the_sizes(task_manager):
    for model in (LPES(max_length=300), HFLM(pretrained=str(reference.path()), device="cpu", max_length=300)):
        with pytest.raises(PromptTooLong, match=r"kv_retrieval, question \d+: \d+ prompt tokens, at most 200"):
            evaluate(model, task_manager)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the sample of the official files is not here")
def test_the_official_files_of_75_pairs_are_evaluated_from_a_folder(lpes, task_manager):
    manager = task_manager(data_dir=str(SHARED), positions=[40])
    results = lm_eval.simple_evaluate(
        lpes, tasks=["kv_retrieval_75"], limit=1, task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    (sample,) = results["samples"]["kv_retrieval_75"]
    assert sample["arguments"][0][0].count('": "') == 75
    assert results["versions"]["kv_retrieval_75"] == "2 folder: kv-retrieval-75_keys"
    source = results["configs"]["kv_retrieval_75"]["metadata"]["source"]
    assert (source["total"], source["examples"], len(source["sha256"])) == (500, 300, 64)


def test_a_task_by_position_reports_every_position_mean_worst_and_spread_with_errors_by_question(lpes, task_manager):
    results = evaluate(lpes, task_manager, limit=4, metadata={"num_keys": 8}, bootstrap_iters=100)
    row, samples = results["results"][TASK], results["samples"][TASK]
    names = [f"acc@{p}" for p in (0, 20, 40, 60, 80, 100)]
    assert [len(sample["resps"]) for sample in samples] == [6] * 4  # --limit 4 is four questions
    scores = np.array([[sample[name] for name in names] for sample in samples])
    for name, mean in zip(names, scores.mean(0), strict=True):
        assert row[f"{name},none"] == pytest.approx(mean)
    assert row["acc,none"] == pytest.approx(scores.mean())
    assert row["acc_stderr,none"] == pytest.approx(scores.mean(1).std(ddof=1) / 2)  # clustered by question
    assert row["acc_worst,none"] == pytest.approx(scores.mean(0).min())
    assert row["acc_spread,none"] == pytest.approx(np.ptp(scores.mean(0)))
    summary = summarize(scores)
    assert row["acc_worst_stderr,none"] == pytest.approx(summary.worst.stderr)
    assert row["acc_spread_stderr,none"] == pytest.approx(summary.spread.stderr)
    source = results["configs"][TASK]["metadata"]["source"]
    assert (source["kind"], source["split"], source["examples"]) == ("generated", "held_out", 500)
    assert results["versions"][TASK] == "2 generated: 8 pairs"


def test_it_takes_what_hf_takes():
    model = LPES(
        dtype="bfloat16", batch_size="auto", max_batch_size=4, max_length=512, add_bos_token=False, factors=1.1
    )
    assert (str(model.model.dtype), model.max_length) == ("torch.bfloat16", 512)
    assert model.layer_factors == [1.1] * model.model.config.num_hidden_layers
