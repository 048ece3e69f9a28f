"""The costs: every method beside the plain model, with the same work on both sides."""

import random
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import costs
from lpes_eval import rope
from lpes_eval.errors import UnsupportedModel

pytestmark = pytest.mark.usefixtures("threads")
FLAGS = ["--model", "tiny", "--lengths", "16", "--rounds", "2", "--new_tokens", "2"]


def test_one_command_measures_all_methods_and_writes_the_page(tmp_path, capsys, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- numbers: costs_cpu -->\nold\n<!-- /numbers -->\n")
    monkeypatch.setattr(costs, "PAGE", page)
    assert costs.main([*FLAGS, "--write"]) == 0
    said = capsys.readouterr().out
    assert page.read_text() == f"Before.\n\n<!-- numbers: costs_cpu -->\n{said.rstrip()}\n<!-- /numbers -->\n"
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| 16")]
    assert [row[1] for row in rows] == ["plain", *costs.METHODS]
    assert all(re.fullmatch(r"\d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\]", cell) for row in rows for cell in row[2:5])
    assert rows[1][-1] == "4.76"  # attention_buckets, in the paper
    prefill = {row[1]: float(row[2].split()[0]) for row in rows}
    assert prefill["attention_sorting"] > 3  # five passes more
    assert prefill["calibrated_attention"] > 6  # and eleven


@pytest.mark.parametrize(("rounds", "ends"), [(5, (0, 4)), (20, (5, 14)), (100, (39, 60))])
def test_a_cost_is_the_median_ratio_with_the_sign_tests_interval(rounds, ends):
    """By binomial tables: of 20 ratios the 6th and the 15th, of 100 the 40th and the 61st; whatever a round took."""
    ratios = list(range(1, rounds + 1))
    random.Random(0).shuffle(ratios)
    plain = [random.Random(i).choice([1.0, 4.0]) for i in range(rounds)]
    own = [a * b for a, b in zip(ratios, plain, strict=True)]
    low, high = ends
    assert costs.ratio(own, plain) == f"{(rounds + 1) / 2:.3f} [{low + 1:.3f}, {high + 1:.3f}]"


@pytest.mark.parametrize(("shape", "published"), [("vicuna-7b", 6_738_415_616), ("qwen2.5-7b", 7_615_616_512)])
def test_the_large_shapes_have_as_many_weights_as_the_models_they_are_named_after(shape, published):
    assert sum(weight.numel() for weight in costs.build(shape, "meta", "float16").parameters()) == published


@pytest.mark.parametrize("name", ["plain", *(name for name in costs.METHODS if name != "calibrated_attention")])
def test_no_method_mixes_devices(name, monkeypatch):
    """On a device that computes no numbers and joins no tensor of another device."""
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda positions: None)
    model = costs.build("tiny", "meta", "float16")
    tokens = torch.zeros(1, 16, dtype=torch.long, device="meta")
    costs.in_turns([model, costs.with_method(name, model)], tokens, 1, random.Random(0))


def test_a_method_that_refuses_is_named_and_a_bug_is_not_hidden(monkeypatch, capsys):
    build, fails = costs.with_method, {"pi": UnsupportedModel("llama: not this")}

    def failing(name, model):
        if name in fails:
            raise fails[name]
        return build(name, model)

    monkeypatch.setattr(costs, "with_method", failing)
    costs.main(FLAGS)
    assert "| pi: llama: not this | – |" in capsys.readouterr().out
    fails["lpes"] = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        costs.main(FLAGS)


def test_models_in_turns_answer_as_each_does_alone():
    """What is timed is the same work."""
    model = costs.build("tiny", "cpu", "float32")
    other = costs.with_method("plain", model)
    assert {p.data_ptr() for p in model.parameters()} == {p.data_ptr() for p in other.parameters()}
    rope.apply(other, [1.5, 1.2, 1.9, 1.1])
    tokens, seen = torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(0)), ([], [])
    for each, logits in zip((model, other), seen, strict=True):
        each.register_forward_hook(lambda *passed, logits=logits: logits.append(passed[-1].logits[0, -1]))
    seconds = costs.in_turns([model, other], tokens, 3, random.Random(0))
    assert [len(each) for each in seconds] == [4, 4]
    in_turns = [torch.stack(logits) for logits in seen]
    for each, logits in zip((model, other), in_turns, strict=True):
        alone = each.generate(
            tokens, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
        ).logits
        assert torch.allclose(logits, torch.cat(alone), atol=1e-4)
    assert not torch.allclose(*in_turns, atol=1e-3)


def test_an_individual_of_a_search_scores_as_simple_evaluate_does():
    asked = {"task": "kv_retrieval", "metadata": {"source": "generated", "num_keys": 10}, "questions": 1, "rounds": 1}
    given = {"model": "reference-kv", "dtype": "float32", "device": "cpu", "batch_size": 8}
    what, against, _, _ = costs.individual(SimpleNamespace(**asked, **given))
    assert (what, against) == ("an individual of a search (6 of 6 scores equal)", "simple_evaluate with hf")
