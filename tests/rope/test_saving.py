"""Factors travel with the model: in its folder, to a fresh process, and with one line where they do not fit."""

import json
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config

import lpes_eval
from lpes_eval import Factors, rope
from lpes_eval.errors import FactorsError, UserError
from lpes_eval.factors import carried
from lpes_eval.methods.lpes import LPES
from lpes_eval.methods.pi import PI
from lpes_eval.reference import path
from small_llama import FACTORS, by_hand, llama, logits
from tiny_models import tiny_config, tiny_model

IDS = torch.arange(1, 41)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model's folder that carries ``FACTORS``."""
    folder, model = tmp_path_factory.mktemp("model"), llama()
    origin = {"task": "records", "model": {"name": "lmsys/vicuna", "revision": "v1"}}
    lpes_eval.apply(model, Factors(factors=tuple(FACTORS), origin=origin))
    lpes_eval.save(model, folder)
    return folder


def test_a_loaded_folder_answers_as_the_model_that_was_saved_and_in_plain_transformers_as_the_plain_one(folder):
    model = lpes_eval.load_model(folder, config=str(folder))  # which transformers passes over
    assert torch.allclose(logits(model, IDS), by_hand(llama(), IDS, FACTORS), atol=1e-4)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(model, IDS), logits(llama(), IDS))
    lpes_eval.apply(torch.compile(model))  # whose weights are known again
    assert rope.applied(model) == FACTORS
    assert rope.in_force(model).origin["task"] == "records"


@pytest.mark.parametrize(("factors", "expected"), [(None, FACTORS), (1, [1.0] * 4)])
def test_the_model_type_takes_the_folders_factors_unless_it_is_given_others(folder, factors, expected, caplog):
    lm = LPES(str(folder), tokenizer=AutoTokenizer.from_pretrained(path()), factors=factors)
    assert lm.layer_factors == expected
    assert lm.get_model_info()["factors"]["per_layer"] == expected
    lm.note_carried_factors()
    assert "they are left out here" in caplog.text
    lm.set_factors(None)
    assert lm.layer_factors is None


@pytest.mark.parametrize("change", ["nothing", "remove", "other", "tensor"])
def test_save_pretrained_keeps_the_factors_in_force_or_warns(folder, change, tmp_path, caplog):
    model = lpes_eval.load_model(folder)
    if change == "remove":
        lpes_eval.remove(model)
    elif change == "other":
        lpes_eval.apply(model, 1.2)
    elif change == "tensor":
        lpes_eval.apply(model, torch.tensor(FACTORS, requires_grad=True))
    model.save_pretrained(tmp_path)
    assert ("lpes_eval.save" in caplog.text) == (change in ("other", "tensor"))
    again = lpes_eval.load_model(tmp_path)
    assert rope.applied(again) == (FACTORS if change == "nothing" else None)


def test_remove_leaves_the_configuration_as_a_plain_models_and_detach_what_the_folder_carries(folder):
    model = lpes_eval.load_model(folder)
    lpes_eval.remove(model)
    found, plain = model.config.to_dict(), llama().config.to_dict()
    other = {key for key in found | plain if found.get(key) != plain.get(key)}
    assert other <= {"architectures", "dtype", "_name_or_path"}
    model = AutoModelForCausalLM.from_pretrained(folder)
    PI.apply(model, factor=1.3).detach()
    assert rope.applied(model) is None
    lpes_eval.apply(model)
    assert rope.applied(model) == FACTORS


def test_factors_for_another_depth_are_refused_in_one_line_before_any_weight(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    for written, asked in (({"num_hidden_layers": 3}, {}), ({}, {"num_hidden_layers": 3})):
        (tmp_path / "config.json").write_text(json.dumps(config | written))  # there are no weights
        with pytest.raises(FactorsError, match=r"^lpes_factors in config.json: .* for 4 layers, the model has 3; .*$"):
            lpes_eval.load_model(tmp_path, **asked, dtype="auto", device_map="cpu", attn_implementation="eager")
    (tmp_path / "config.json").write_text(json.dumps(config | {"lpes_factors": [1, "x"]}))
    with pytest.raises(FactorsError, match=r"^lpes_factors in config.json: .*'x'"):
        lpes_eval.load_model(tmp_path)


def test_an_override_stands_beside_the_text_configuration_and_wins():
    config = Gemma3Config(text_config={"num_hidden_layers": 3, "lpes_factors": [1.1, 1.2, 1.3]})
    assert carried(config).per_layer() == [1.1, 1.2, 1.3]
    config.lpes_factors = 1
    assert carried(config).per_layer(3) == [1.0] * 3
    for name in ("hf://owner/repo", "factors.json", "1.5"):
        config.lpes_factors = name
        with pytest.raises(FactorsError, match=f"^lpes_factors in config.json: factors: found '{name}', expected num"):
            carried(config)
    config.lpes_factors = 0
    with pytest.raises(FactorsError, match=r"^lpes_factors in config.json: factors=0: uniform: found 0, expected"):
        carried(config)


def test_factors_on_other_weights_apply_with_one_line_that_names_theirs(folder, tmp_path, caplog):
    model = lpes_eval.load_model(folder)
    lpes_eval.load_model(folder, dtype=torch.bfloat16)  # of another type nothing can be said
    lpes_eval.apply(llama().to("meta"), rope.in_force(model))  # nor of weights that are elsewhere
    assert not caplog.text
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    model.save_pretrained(tmp_path)
    lpes_eval.load_model(tmp_path)
    assert caplog.text.count("\n") == 1
    assert "found on other weights (of lmsys/vicuna, revision v1)" in caplog.text


def test_there_is_nothing_to_save_without_factors_and_nothing_to_apply(tmp_path):
    with pytest.raises(UserError, match="no layer factors to save"):
        lpes_eval.save(llama(), tmp_path)
    with pytest.raises(FactorsError, match="carries none"):
        lpes_eval.apply(llama())
    (tmp_path / "file").write_text("")
    quantized = llama()
    lpes_eval.apply(quantized, FACTORS)
    quantized.save_pretrained = Mock(side_effect=ValueError("The model is quantized with gguf and is not serializable"))
    with pytest.raises(UserError, match=r"transformers does not save it \(.*gguf.*\); keep its file, and load it with"):
        lpes_eval.save(quantized, tmp_path / "new")
    with pytest.raises(UserError, match="file: is a file; expected a folder"):
        lpes_eval.save(llama(), tmp_path / "file")


def test_a_composite_models_factors_are_in_its_text_configuration(tmp_path):
    model = tiny_model(tiny_config("gemma3"))
    lpes_eval.apply(model, FACTORS)
    lpes_eval.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["lpes_factors"]["factors"] == FACTORS
    again = type(model).from_pretrained(tmp_path)
    lpes_eval.apply(again)
    assert rope.applied(again) == FACTORS
