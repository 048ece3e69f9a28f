"""Training is a function of its recipe: the same weights twice, and across a kill."""

import json

import pytest
import torch

from benchmarks.reference import recipe
from benchmarks.reference import train as training

pytestmark = pytest.mark.usefixtures("threads")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert training.main(["--smoke", "--out", str(folder)]) == 0
    return folder


def fingerprint(folder):
    return json.loads((folder / "run.json").read_text())["weights_sha256"]


def test_another_seed_gives_other_weights(undisturbed, tmp_path):
    training.main(["--smoke", "--seed", "1", "--out", str(tmp_path)])
    assert fingerprint(tmp_path) != fingerprint(undisturbed)


@pytest.mark.parametrize("killed_at", [11, 17])
def test_a_killed_run_ends_with_the_weights_and_log_of_an_undisturbed_one(
    undisturbed, tmp_path, killed_at, monkeypatch
):
    """Killed within a step: right behind a checkpoint, and where the model is about to grow."""
    clipped, clip = [], torch.nn.utils.clip_grad_norm_

    def kill(*args):
        clipped.append(clip(*args))
        if len(clipped) == killed_at:
            raise KeyboardInterrupt
        return clipped[-1]

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", kill)
    with pytest.raises(KeyboardInterrupt):
        training.train(recipe.SMOKE, tmp_path, save_every=10)
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"step": 30, "lo')
    training.train(recipe.SMOKE, tmp_path, save_every=10)
    assert len(clipped) == recipe.SMOKE[-1].steps + 1 + (killed_at - 1) % 10  # what came after the checkpoint, twice
    assert fingerprint(tmp_path) == fingerprint(undisturbed)
    written = (tmp_path / "log.jsonl").read_text()
    assert [json.loads(line)["step"] for line in written.splitlines()] == [10, 20]
    assert written == (undisturbed / "log.jsonl").read_text()


@torch.no_grad()
def test_a_grown_model_computes_what_the_smaller_one_did():
    small, last = recipe.build(recipe.SMOKE[0]), recipe.SMOKE[-1]
    large = recipe.grow(small, last)
    assert large.config.num_hidden_layers == last.layers > small.config.num_hidden_layers
    ids = torch.arange(30)[None]
    known = small.config.vocab_size
    torch.testing.assert_close(large(ids).logits[..., :known], small(ids).logits)


def test_what_a_grown_model_gained_is_trained_and_written(undisturbed):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(undisturbed)
    assert model.model.layers[-1].self_attn.o_proj.weight.abs().max() > 0
    assert len(model.model.layers) == recipe.SMOKE[-1].layers
    assert model.config.vocab_size == recipe.SMOKE[-1].vocabulary
    assert training.weights_hash(model) == fingerprint(undisturbed)


@pytest.mark.parametrize(
    ("out", "words"), [("undisturbed", "was made by another recipe"), ("damaged", "cannot be read as a checkpoint")]
)
def test_a_folder_in_which_a_run_cannot_go_on_is_named_in_one_line(undisturbed, tmp_path, capsys, out, words):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / training.CHECKPOINT).write_bytes(b"broken")
    where = undisturbed if out == "undisturbed" else tmp_path / out
    assert training.main(["--smoke", "--seed", "3", "--out", str(where)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("train: error: ")
    assert str(where) in error
    assert words in error
    assert error.count("\n") == 1
