"""The model types lpes and pi on the shipped reference model; what all model types share, and refuse before loading."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import lpes_eval
from checks import TASK, answers, apart, evaluate, logits
from lpes_eval import methods, reference, rope
from lpes_eval.errors import PromptTooLong, UnsupportedModel, UserError
from lpes_eval.factors import Factors
from lpes_eval.methods.base import MethodLM
from lpes_eval.methods.lpes import LPES
from lpes_eval.methods.pi import PI


@pytest.fixture(scope="module")
def lpes():
    return LPES(batch_size=4)


def gpt2(path):
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=2000))
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(reference.path()).save_pretrained(path)
    return model


def test_without_factors_it_is_hf_sample_by_sample_and_factors_leave_no_trace(lpes, task_manager, answers_of_hf):
    plain = evaluate(lpes, task_manager)
    assert answers(plain) == answers_of_hf
    assert plain["results"][TASK]["acc,none"] >= 0.5  # the reference model does read eight pairs
    lpes.set_factors(Factors.from_uniform(6.0))
    assert answers(evaluate(lpes, task_manager)) != answers_of_hf
    lpes.set_factors(None)
    assert answers(evaluate(lpes, task_manager)) == answers_of_hf


def test_factors_in_force_are_recorded_with_their_hash_and_their_origin(lpes, tmp_path):
    made = Factors.from_curve("linear", [(0, 1.0), (1, 1.4)], num_layers=6, origin={"task": "kv_retrieval"})
    made.save(tmp_path / "f.json")
    info = json.loads(json.dumps(LPES(factors=str(tmp_path / "f.json")).get_model_info(), default=str))
    assert info["lpes_eval"] == lpes_eval.__version__
    assert info["factors"] == {
        "given": str(tmp_path / "f.json"),
        "per_layer": made.per_layer(),
        "sha256": made.digest(),
        "origin": {"task": "kv_retrieval"},
    }
    lpes.set_factors(1.2)
    info = lpes.get_model_info()["factors"]
    assert (info["given"], info["per_layer"]) == ("1.2", [1.2] * 6)
    lpes.set_factors(None)
    assert lpes.get_model_info()["factors"] is None


def test_the_model_is_the_one_the_factors_name_and_one_with_factors_is_not_taken_for_the_plain_one(tmp_path):
    origin = {"model": {"name": str(tmp_path / "elsewhere")}}
    with pytest.raises(UserError, match="elsewhere: no such folder"):
        LPES(factors=Factors.from_uniform(1.2, origin=origin))
    loaded = LPES(factors=Factors.from_uniform(1.5, origin={"model": "reference"}))
    assert loaded.layer_factors == [1.5] * 6
    with pytest.raises(UserError, match=r"^pretrained: the model has layer factors in it; take them back"):
        LPES(pretrained=loaded.model, tokenizer=loaded.tokenizer)
    assert LPES(pretrained=loaded.model, tokenizer=loaded.tokenizer, factors=1.2).layer_factors == [1.2] * 6
    methods.load("pi").apply(loaded.model, factor=1.4).detach()
    assert rope.applied(loaded.model) is None
    other = methods.load("attention_buckets").apply(loaded.model)
    with pytest.raises(UserError, match=r"^pretrained: the model has Attention Buckets in it; detach it first"):
        LPES(pretrained=loaded.model, tokenizer=loaded.tokenizer)
    other.detach()
    assert LPES(pretrained=loaded.model, tokenizer=loaded.tokenizer).layer_factors is None
    loaded.set_factors(Factors.from_uniform(1.2, origin={"model": {"name": "org/model", "revision": "5c1e"}}))
    assert (loaded.default_model(asked := {}), asked) == ("org/model", {"revision": "5c1e"})


def test_how_factors_were_found_is_said_and_an_unknown_argument_is_named(caplog):
    LPES(factors=Factors.from_uniform(1.25, origin={"search": {"apply_chat_template": True, "num_fewshot": 0}}))
    assert "these factors were found with --apply_chat_template; ask in the same way" in caplog.text
    with pytest.raises(UserError, match=r"--model_args: .*'factor'; neither hf nor this model type takes it"):
        LPES(factor=1.25)


def test_a_prompt_that_does_not_fit_is_an_error_with_the_sizes(task_manager):
    for model in (LPES(max_length=300), HFLM(pretrained=str(reference.path()), device="cpu", max_length=300)):
        with pytest.raises(PromptTooLong, match=r"kv_retrieval.*: \d+ prompt tokens, at most 200"):
            evaluate(model, task_manager, num_keys=20)


def test_it_takes_what_hf_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # lm_eval names cuda:0 where nobody named a device
    for device in ("cpu", "cuda:0", None):
        model = LPES(add_bos_token=False, factors=1.1, device=device, dtype="bfloat16", max_length=512)
        assert (str(model.model.dtype), model.max_length, model.layer_factors) == ("torch.bfloat16", 512, [1.1] * 6)
        assert model.device.type == "cpu"
    gpt2(tmp_path)
    assert LPES(pretrained=str(tmp_path), dtype="auto").layer_factors is None  # without factors any model runs


def test_pi_is_lpes_with_one_factor_and_transformers_linear_scaling():
    config = AutoConfig.from_pretrained(reference.path())
    config.rope_parameters = {"rope_type": "linear", "factor": 1.3, "rope_theta": 10000.0}
    linear = AutoModelForCausalLM.from_pretrained(reference.path(), config=config).eval()
    given = {"input_ids": torch.arange(20, 320)[None]}
    found, expected = logits(PI(factor=1.3).model, **given), logits(linear, **given)
    assert apart(found, expected) < 1e-4 * expected.abs().max()
    assert torch.equal(found, logits(LPES(factors=1.3).model, **given))
    assert PI(factor="1.3").layer_factors == [1.3] * 6
    loaded = PI(pretrained="reference-kv")
    assert loaded.layer_factors == [1.5] * 4


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (LPES, {"factors": Factors.from_list([1.0] * 99)}, r"for 99 layers, the model has 6; use some made"),
        (PI, {"factor": 0}, "factor=0: .* expected a number from 0.001"),
        (LPES, {"pretrained": "./nowhere"}, "^pretrained=./nowhere: no such folder"),
        (LPES, {"device": "gpu"}, "^device=gpu: PyTorch .* cannot use it .*; expected cpu, cuda"),
        (LPES, {"device": "cuda:99"}, "^device=cuda:99: PyTorch .* cannot use it .*; expected cpu, cuda"),
        (LPES, {"pretrained": "broken"}, r"broken: its configuration cannot be read \(.+\)"),
        (LPES, {"pretrained": "new"}, "new: .*model type `of 2040` but Transformers"),
    ],
)
def test_what_cannot_be_is_refused_before_any_weight_is_loaded(kind, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, content in (("broken", "{"), ("new", '{"model_type": "of 2040"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    with pytest.raises(UserError, match=words):
        kind(**arguments)


@pytest.mark.parametrize("name", [name for name in methods.names() if name != "attention_sorting"])
def test_a_model_without_rotary_positions_is_refused_by_every_method_inside_it(name, tmp_path, nothing_is_loaded):
    model = gpt2(tmp_path)
    arguments = {"lpes": {"factors": 1.5}, "moice": {"router": str(reference.path() / "router")}}.get(name, {})
    for pretrained in (str(tmp_path), model):
        with pytest.raises(UnsupportedModel, match="gpt2: no decoder layers with rotary"):
            methods.load(name)(pretrained=pretrained, tokenizer=str(reference.path()), **arguments)


@pytest.mark.parametrize(
    ("name", "nothing", "something"),
    [
        ("attention_buckets", "bases=10000", "bases=100:1000:1000000"),
        ("attention_sorting", "rounds=0", None),
        ("moice", "router={}/same", "router={}/other"),
        ("pi", "factor=1", "factor=6"),
    ],
)
def test_where_it_changes_nothing_it_answers_as_hf(name, nothing, something, routed, task_manager, answers_of_hf):
    assert answers(evaluate(name, task_manager, nothing.format(routed))) == answers_of_hf
    if something is not None:
        assert answers(evaluate(name, task_manager, something.format(routed))) != answers_of_hf


@pytest.mark.parametrize("name", methods.names())
def test_each_runs_by_its_name_and_says_what_it_did(name, task_manager):
    arguments = {"lpes": "factors=1.2", "positional_channel": "channel=0"}.get(name, "")
    results = evaluate(name, task_manager, arguments, limit=1, num_keys=4)
    assert set(results["results"][TASK]) >= {"acc,none", "acc_worst,none", "acc_spread,none"}
    config = json.loads(json.dumps(results["config"], default=str))
    if name in ("lpes", "pi"):
        assert config["factors"]["per_layer"] == [{"lpes": 1.2, "pi": 1.5}[name]] * 6
    else:
        assert config["method"]["name"] == name


def test_answers_of_hf_around_a_model_with_factors_are_cached_as_those_of_lpes(tmp_path):
    loaded = LPES("reference", factors=1.2)
    around = HFLM(loaded.model, tokenizer=loaded.tokenizer)
    key = loaded.cache_key
    files = [Path(CachingLM(lm, str(tmp_path / "cache.db")).cache_db).name for lm in (loaded, around)]
    lpes_eval.remove(loaded.model)
    files.append(Path(CachingLM(around, str(tmp_path / "cache.db")).cache_db).name)
    assert files == [f"cache_{key}.db"] * 2 + ["cache.db"]
    methods.load("ms_poe").apply(loaded.model)
    with pytest.raises(UserError, match="Ms-PoE was put into this model"):
        CachingLM(around, str(tmp_path / "cache.db"))


def test_answers_of_other_settings_are_cached_apart():
    keys = [
        methods.load(name)(**settings).cache_key
        for name, settings in (
            ("lpes", {"factors": 1.3}),
            ("pi", {}),
            ("pi", {"factor": 1.2}),
            ("ms_poe", {"max": 2}),
            ("attention_buckets", {}),
            *(("attention_buckets", {"bases": f"{base}:20000"}) for base in (1234567, 1234569)),
            ("moice", {}),
            ("ms_poe", {}),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert keys[-1] == methods.load("ms_poe")().cache_key


@pytest.mark.parametrize("factors", [None, 1.234])
def test_answers_of_other_weights_are_cached_apart_also_where_they_have_one_name(factors):
    """As after ``reference`` comes ``reference-kv``, or weights that were trained on in the same folder."""
    one = LPES(factors=factors)
    before = one.cache_key
    assert before == LPES("reference", factors=factors).cache_key != LPES("reference-kv", factors=factors).cache_key
    with torch.no_grad():
        one.model.model.norm.weight[0] += 1e-3
    assert one.cache_key != before
    two = LPES(factors=factors)
    two.model.config.rms_norm_eps *= 2
    assert two.cache_key != before != LPES(factors=factors, max_length=100).cache_key


def test_a_list_of_factors_in_a_text_of_arguments_is_a_list():
    arguments = "pretrained=reference-kv,factors=[1.0,1.25,1.125,1.3125]"
    assert LPES.create_from_arg_string(arguments, {"batch_size": 2}).layer_factors == [1.0, 1.25, 1.125, 1.3125]


def test_the_names_of_methods_cost_no_import():
    code = "import sys, lpes_eval.methods as m; m.names(); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


@pytest.mark.parametrize("name", methods.names())
def test_every_method_is_a_model_type_with_its_paper_and_a_section_of_the_docs(name):
    kind = methods.load(name)
    assert issubclass(kind, MethodLM)
    assert get_model(name) is kind
    assert re.fullmatch(r"\d{4}\.\d{5}", kind.paper)
    docs = Path(__file__).resolve().parents[2] / "docs" / "methods.md"
    section = docs.read_text(encoding="utf-8").split(f"\n## {kind.title}\n")[1].split("\n## ")[0]
    assert f"(https://arxiv.org/abs/{kind.paper})" in section
    assert f"`{name}`" in section
