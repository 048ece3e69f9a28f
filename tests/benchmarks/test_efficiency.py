"""The efficiency benchmark: every method is measured in every round, and the report's figures are those of the file."""

import json
import random

import pytest
import torch

from benchmarks import efficiency
from benchmarks.efficiency_report import interval, report
from lpes_eval import methods, rope
from lpes_eval.errors import UnsupportedModel, UserError

FLAGS = ["--shapes", "tiny", "--lengths", "16", "--batches", "1", "--rounds", "3"]
FLAGS += ["--pairs", "2", "--new_tokens", "2", "--threads", "1"]


def test_one_command_measures_all_methods_and_reports_them(tmp_path, capsys):
    file = tmp_path / "e.json"
    efficiency.main([*FLAGS, "--lengths", "16", "24", "--out", str(file)])
    results = json.loads(file.read_text())
    assert [(cell["shape"], cell["length"]) for cell in results["cells"]] == [("tiny", 16), ("tiny", 24)]
    for cell in results["cells"]:
        assert set(cell["methods"]) == {"plain", *methods.names()}
        for name in ("plain", "lpes"):
            assert [len(cell["pairs"][name][key]) for key in ("prefill_s", "step_s")] == [2, 2]
        for seen in cell["methods"].values():
            assert seen["error"] is None
            assert [len(seen[key]) for key in efficiency.MEASURED] == [3] * 4
            assert min(seen["prefill_s"] + seen["step_s"]) > 0
            assert all(step < total for step, total in zip(seen["step_s"], seen["decode_s"], strict=True))
        assert cell["methods"]["ms_poe"]["settings"]["skip"] == 2
    assert results["versions"]["torch"]
    assert results["hardware"]["threads"] >= 1
    first = capsys.readouterr().out
    efficiency.main(["--report", str(file)])
    assert capsys.readouterr().out == first
    assert file.with_suffix(".png").stat().st_size > 10_000


def made(**seconds):
    """A results file with given seconds of prefill and decode, per round."""
    found, pairs = {}, {name: {"prefill_s": [], "step_s": []} for name in ("plain", "lpes")}
    for name, (prefill, decode) in seconds.items():
        steps = [seconds / 10 for seconds in decode]
        found[name] = {"prefill_s": prefill, "decode_s": decode, "step_s": steps, "peak_bytes": [2**30] * 3}
        found[name] |= {"settings": {}, "error": None if prefill else "out of memory"}
        if name in pairs:
            pairs[name] = {"prefill_s": prefill, "step_s": steps}
    if not pairs["lpes"]["step_s"]:
        pairs["plain"] = {"prefill_s": [], "step_s": []}
    model = {"parameters": 7e9, "layers": 32, "heads": 32, "key_value_heads": 32}
    cell = {"shape": "vicuna-7b", "batch": 2, "length": 1500, "new_tokens": 10, "rounds": 3, "model": model}
    return {
        "hardware": {"gpu": "a GPU"},
        "versions": {"torch": "2", "transformers": "5"},
        "settings": {"dtype": "float16", "new_tokens": 10, "cpu_time": False},
        "cells": [cell | {"methods": found, "pairs": pairs}],
        "left_out": [{"shape": "vicuna-13b", "batch": 1, "length": 32768}],
    }


def test_ratios_are_medians_of_the_rounds_own_ratios():
    """The machine is three times as slow in the last round; the ratio does not see it."""
    table = report(
        made(
            plain=([1.0, 1.0, 3.0], [2.0, 2.0, 6.0]),
            lpes=([1.0, 1.0, 3.0], [2.0, 2.1, 6.0]),
            moice=([2.5, 2.4, 7.5], [4.0, 4.2, 12.0]),
        )
    )
    (row,) = (line for line in table.splitlines() if line.startswith("| moice"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2] == "420.00 (410.00–810.00)"  # milliseconds a step
    assert cells[3] == "4.8"  # two rows, 0.42 seconds a step
    assert [cell.split()[0] for cell in cells[4:7]] == ["2.50", "2.00", "2.17"]
    assert cells[7] == "2.42"
    assert "in step, 3 pairs: prefill 1.000 (1.000 to 1.000), decode 1.000 (1.000 to 1.050)." in table
    assert "The target of 1.01 is met; 1 of the 2 medians" in table
    assert "Left out: vicuna-13b, batch 1, 32768 tokens (no time left)" in table


def test_a_missed_target_and_a_method_that_did_not_fit_are_said():
    plain = ([1.0] * 3, [2.0] * 3)
    table = report(made(plain=plain, lpes=([1.0] * 3, [2.1] * 3), attention_buckets=([], [])))
    assert "decode 1.050 (1.050 to 1.050) at vicuna-7b, batch 2, 1500 tokens. The target of 1.01 is missed" in table
    assert "1 of the 2 medians have their whole interval below it." in table
    assert "| attention_buckets | out of memory |" in table
    assert "target" not in report(made(plain=plain, lpes=([], [])))


@pytest.mark.parametrize(("number", "ends"), [(3, (0, 2)), (5, (0, 4)), (6, (0, 5)), (20, (5, 14)), (100, (39, 60))])
def test_the_interval_of_a_median_is_the_sign_tests(number, ends):
    """By binomial tables: of 20 values the 6th and the 15th, of 100 the 40th and the 61st."""
    values = list(range(number))
    random.Random(0).shuffle(values)
    assert interval(values) == ends


def test_cells_go_from_cheap_to_dear_and_large_ones_stay_out():
    args = efficiency.arguments(["--preset", "gpu"])
    assert (args.device, args.dtype, args.largest) == ("cuda", "float16", 65536)
    costs = [efficiency.Cell("vicuna-7b", 1, n).cost for n in (1500, 4096, 16384)]
    assert costs == sorted(costs)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--rounds", "1"), ("--lengths", "0"), ("--threads", "0"), ("--budget", "nan"), ("--device", "quantum")],
)
def test_a_flag_with_which_nothing_can_be_measured_is_named(flag, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        efficiency.arguments([flag, value])
    assert f"argument {flag}: expected" in capsys.readouterr().err


def test_a_missing_device_and_a_file_of_something_else_are_named(tmp_path):
    with pytest.raises(UserError, match="--device cuda:99: PyTorch cannot use it"):
        efficiency.main(["--device", "cuda:99"])
    for name, content in (("text.json", "no JSON"), ("list.json", "[]"), ("other.json", '{"version": 1}')):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=f"{name}: expected a file that this program wrote"):
            efficiency.main(["--report", str(tmp_path / name)])
    with pytest.raises(UserError, match=r"none\.json: expected a file that this program wrote"):
        efficiency.main(["--report", str(tmp_path / "none.json")])


@pytest.mark.parametrize(
    ("shape", "published"),
    [("vicuna-7b", 6_738_415_616), ("qwen2.5-7b", 7_615_616_512), ("vicuna-13b", 13_015_864_320)],
)
def test_the_large_shapes_have_as_many_weights_as_the_models_they_are_named_after(shape, published):
    model = efficiency.build(shape, "meta", "float16")
    assert sum(weight.numel() for weight in model.parameters()) == published


@pytest.mark.parametrize(("shape", "batch", "length"), [("vicuna-7b", 4, 16384), ("qwen2.5-7b", 1, 32768)])
def test_the_gpu_preset_runs_at_full_width_and_never_mixes_devices(monkeypatch, shape, batch, length):
    """On a device that computes no numbers and joins no tensor of another device: three layers, all other sizes."""
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda positions: None)
    monkeypatch.setitem(efficiency.SHAPES, shape, efficiency.SHAPES[shape] | {"num_hidden_layers": 3})
    model = efficiency.build(shape, "meta", "float16")
    tokens = torch.zeros(batch, length, dtype=torch.long, device="meta")
    for name in efficiency.METHODS:
        with efficiency.placed(name, model, {}):
            (seen,) = efficiency.measure([model], tokens, 1, efficiency.Clock("meta"), random.Random(0))
            assert seen["decode_s"] > 0


def failing(name, error):
    def apply(model, **settings):
        raise error

    return type(name, (methods.load(name),), {"apply": apply})


def test_what_does_not_fit_or_refuses_is_left_out_and_the_rest_is_measured(monkeypatch, tmp_path, capsys):
    build, load = efficiency.build, methods.load

    def small_memory(shape, device, dtype):
        if shape == "small":
            raise torch.OutOfMemoryError("no room for the weights")
        return build(shape, device, dtype)

    errors = {
        "moice": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        "pi": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        "ms_poe": UnsupportedModel("llama: not this one. Another sentence"),
    }
    broken = {name: failing(name, error) for name, error in errors.items()}
    monkeypatch.setattr(efficiency, "build", small_memory)
    monkeypatch.setattr(methods, "load", lambda name: broken.get(name) or load(name))
    efficiency.main([*FLAGS, "--shapes", "tiny", "small", "--out", str(tmp_path / "e.json")])
    results = json.loads((tmp_path / "e.json").read_text())
    assert [cell["shape"] for cell in results["left_out"]] == ["small"]
    (cell,) = results["cells"]
    found = {name: seen["error"] for name, seen in cell["methods"].items() if seen["error"]}
    assert found.keys() == errors.keys()
    assert found["moice"] == "out of memory: CUDA out of memory"
    assert found["pi"].startswith("out of memory: CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
    assert found["ms_poe"] == "refused: llama: not this one"
    assert all(len(cell["methods"][name]["decode_s"]) == 3 for name in ("plain", "lpes", "attention_buckets"))
    assert "Left out: small, batch 1, 16 tokens (the model does not fit into memory)." in capsys.readouterr().out
    broken["lpes"] = failing("lpes", RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        efficiency.main([*FLAGS, "--out", str(tmp_path / "e.json")])


def test_two_caches_that_do_not_fit_leave_the_rounds(monkeypatch, tmp_path, capsys):
    def full(model):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(efficiency, "twin", full)
    efficiency.main([*FLAGS, "--methods", "lpes", "--out", str(tmp_path / "e.json")])
    said = capsys.readouterr().out
    assert "| lpes |" in said
    assert "in step" not in said


def test_models_in_step_answer_as_each_does_alone():
    """What is timed is the same work: tokens decoded in turns are those of a model that has the machine to itself."""
    model = efficiency.build("tiny", "cpu", "float32")
    other = efficiency.twin(model)
    assert {p.data_ptr() for p in model.parameters()} == {p.data_ptr() for p in other.parameters()}
    tokens = torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(0))
    rope.apply(other, [1.5, 1.2, 1.9, 1.1])
    seen = {0: [], 1: []}
    for i, each in enumerate((model, other)):
        each.register_forward_hook(lambda module, args, output, i=i: seen[i].append(output.logits.clone()))
    efficiency.measure([model, other], tokens, 3, efficiency.Clock("cpu"), random.Random(0))
    for i, each in enumerate((model, other)):
        together, ids = list(seen[i]), tokens
        assert len(together) == 4
        for logits in together:
            with torch.no_grad():
                alone = each(ids, use_cache=False).logits[:, -1:]
            assert torch.allclose(logits[:, -1:], alone, atol=1e-4)
            ids = torch.cat((ids, alone.argmax(-1)), dim=1)
    assert not torch.allclose(seen[0][0], seen[1][0], atol=1e-3)
