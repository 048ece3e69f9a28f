"""Training is a function of its recipe: the same weights twice, and across a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.reference import recipe  # noqa: E402
from benchmarks.reference import train as training  # noqa: E402
from benchmarks.reference.evaluate import load  # noqa: E402
from lpes_eval.errors import UserError  # noqa: E402


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert training.main(["--smoke", "--out", str(folder)]) == 0
    return folder


def fingerprint(folder: Path) -> str:
    return json.loads((folder / "run.json").read_text())["weights_sha256"]


@pytest.mark.parametrize("seed", ["0", "1"])
def test_only_the_same_recipe_gives_the_same_weights(undisturbed: Path, tmp_path: Path, seed: str) -> None:
    training.main(["--smoke", "--seed", seed, "--out", str(tmp_path)])
    assert (fingerprint(tmp_path) == fingerprint(undisturbed)) == (seed == "0")


@pytest.mark.parametrize("killed_at", [3, 12, 15])
def test_a_killed_run_ends_with_the_weights_and_log_of_an_undisturbed_one(
    undisturbed: Path, tmp_path: Path, killed_at: int
) -> None:
    training.train(recipe.SMOKE, tmp_path, save_every=2, log_every=1, stop_after=killed_at)
    assert not (tmp_path / "model.safetensors").exists()
    training.train(recipe.SMOKE, tmp_path, save_every=2, log_every=1)
    assert fingerprint(tmp_path) == fingerprint(undisturbed)
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, recipe.SMOKE[-1].steps + 1))


def test_every_stage_can_be_kept_and_the_last_one_is_the_model(undisturbed: Path, tmp_path: Path) -> None:
    assert training.main(["--smoke", "--keep-stages", "--save-every", "5", "--out", str(tmp_path)]) == 0
    kept = {int(folder.name): training.weights_hash(load(folder)) for folder in (tmp_path / "stages").iterdir()}
    assert sorted(kept) == [stage.steps for stage in recipe.SMOKE]
    assert len(set(kept.values())) == len(kept)
    assert kept[recipe.SMOKE[-1].steps] == fingerprint(undisturbed)


@torch.no_grad()
def test_a_grown_model_computes_what_the_smaller_one_did() -> None:
    small, last = recipe.build(recipe.SMOKE[0]), recipe.SMOKE[-1]
    large = recipe.grow(small, last)
    assert large.config.num_hidden_layers == last.layers > small.config.num_hidden_layers
    ids = torch.arange(30)[None]
    known = small.config.vocab_size
    torch.testing.assert_close(large(ids).logits[..., :known], small(ids).logits)


def test_what_a_grown_model_gained_is_trained_and_written(undisturbed: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(undisturbed)
    assert model.model.layers[-1].self_attn.o_proj.weight.abs().max() > 0
    assert len(model.model.layers) == recipe.SMOKE[-1].layers
    assert model.config.vocab_size == recipe.SMOKE[-1].vocabulary
    assert training.weights_hash(model) == fingerprint(undisturbed)


def test_a_checkpoint_of_another_recipe_is_refused_in_one_line(
    undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.main(["--smoke", "--rate", "0.5", "--out", str(undisturbed)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "rate" in error
    with pytest.raises(UserError, match="another recipe"):
        training.train(recipe.REFERENCE, undisturbed)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--layers 0", "--layers 0: expected 1 or more"),
        ("--pairs 3", "--pairs 3: expected 4 or more"),
        ("--remarks 9", "--remarks 9: expected 0 to 8"),
        ("--heads 3", "--width 32: expected a multiple of 6"),
        ("--vocabulary 700", "--vocabulary 700: expected 778 to 1616"),
        ("--articles 0.5", "--vocabulary 778: expected all 1616 entries, as articles need them"),
    ],
)
def test_a_recipe_that_cannot_be_trained_is_refused_in_one_line(
    flags: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.main(["--smoke", *flags.split(), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {words}")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_recipes_of_this_package_can_be_trained() -> None:
    for one in (*recipe.RECORDS, *recipe.REFERENCE, *recipe.SMOKE):
        recipe.check(one)


def test_a_file_in_the_way_and_a_damaged_checkpoint_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "run" / training.CHECKPOINT
    damaged.parent.mkdir()
    damaged.write_bytes(b"broken")
    for out, words in (
        (damaged, f"--out {damaged}: is a file; expected a folder"),
        (damaged.parent, f"{damaged}: cannot be read as a checkpoint"),
    ):
        assert training.main(["--smoke", "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        load(damaged.parent)


def test_levels_grow_from_two_bytes_to_whole_uuids_and_to_the_longest_context() -> None:
    stages = recipe.levels(recipe.Recipe(pairs=30))
    assert stages[0] == (2, 8)
    assert stages[-1] == (16, 30)
    assert stages == sorted(stages)
