"""Training is a function of its recipe, and goes through every phase."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.reference import recipe
from benchmarks.reference import train as training

pytestmark = pytest.mark.usefixtures("threads")


def trained(folder, *more):
    assert training.main(["--smoke", "--out", str(folder), *more]) == 0
    return json.loads((folder / "run.json").read_text())["weights_sha256"]


def test_the_same_recipe_gives_the_same_weights_and_log_and_another_seed_others(tmp_path):
    first, again, other = (trained(tmp_path / seed, "--seed", seed[0]) for seed in ("0", "0 again", "1"))
    assert first == again != other
    log = (tmp_path / "0" / "log.jsonl").read_text()
    assert [json.loads(line)["step"] for line in log.splitlines()] == [10, 20]
    assert log == (tmp_path / "0 again" / "log.jsonl").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "0")
    assert training.weights_hash(model) == first
    assert model.config.vocab_size == recipe.SMOKE[-1].vocabulary
    assert len(model.model.layers) == recipe.SMOKE[-1].layers
    assert model.model.layers[-1].self_attn.o_proj.weight.abs().max() > 0  # what it grew by is trained, too


@torch.no_grad()
def test_a_grown_model_computes_what_the_smaller_one_did():
    small, last = recipe.build(recipe.SMOKE[0]), recipe.SMOKE[-1]
    large = recipe.grow(small, last)
    assert large.config.num_hidden_layers == last.layers > small.config.num_hidden_layers
    ids = torch.arange(30)[None]
    known = small.config.vocab_size
    torch.testing.assert_close(large(ids).logits[..., :known], small(ids).logits)
