"""The efficiency benchmark: every method is measured in every round, and the report's figures are those of the file."""

import json
import random
from collections import Counter

import pytest
import torch

from benchmarks import efficiency
from benchmarks.efficiency_report import interval, report
from lpes_eval import methods, rope
from lpes_eval.errors import UnsupportedModel

FLAGS = ["--shapes", "tiny", "--lengths", "16", "--batches", "1", "--rounds", "3"]
FLAGS += ["--new_tokens", "2", "--threads", "1"]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "e.json"


def run(file, *flags):
    """What the command writes to the file."""
    efficiency.main([*FLAGS, *flags, "--output", str(file)])
    return json.loads(file.read_text())


def test_one_command_measures_all_methods_and_reports_them(file, capsys):
    results = run(file, "--lengths", "16", "24")
    assert [(cell["shape"], cell["length"]) for cell in results["cells"]] == [("tiny", 16), ("tiny", 24)]
    for cell in results["cells"]:
        assert list(cell["settings"]) == ["plain", *methods.names()]
        taken = Counter(row["method"] for row in cell["rows"])
        assert taken == {name: 15 if name == "lpes" else 3 for name in cell["settings"]}
        for row in cell["rows"]:
            assert row["in_step"]
            for of in ("", "plain_"):
                assert row[f"{of}prefill_s"] > 0
                assert 0 < row[f"{of}step_s"] < row[f"{of}decode_s"]
        assert cell["settings"]["ms_poe"]["skip"] == 2
    assert results["left_out"] == []
    assert results["versions"]["torch"]
    first = capsys.readouterr().out
    assert file.with_suffix(".md").read_text() == first
    efficiency.main(["--report", str(file)])
    assert capsys.readouterr().out == first
    assert file.with_suffix(".png").stat().st_size > 10_000


def test_decoding_steps_are_compiled_and_prefills_are_not(file, capsys, monkeypatch):
    tokens = []

    def without_waiting(forward, **options):
        return lambda ids, **given: tokens.append(ids.shape[1]) or forward(ids, **given)

    monkeypatch.setattr(torch, "compile", without_waiting)
    run(file, "--methods", "lpes", "--compiled")
    models = 2 + 2 * (3 + 15)  # each alone, then beside the plain one
    assert tokens == [1] * (2 * models)
    assert "the prefill and 2 compiled decoding steps." in capsys.readouterr().out


def made(plain, **seconds):
    """A results file with given seconds of prefill and decode, sample by sample."""
    rows, (of_plain, steps) = [], plain
    for name, (prefill, decode) in {"plain": plain, **seconds}.items():
        for p, d, plain_p, plain_d in zip(prefill, decode, of_plain, steps, strict=True):
            times = {"prefill_s": p, "decode_s": d, "step_s": d / 10}
            times |= {"plain_prefill_s": plain_p, "plain_decode_s": plain_d, "plain_step_s": plain_d / 10}
            rows.append({"method": name, "in_step": True, "peak_bytes": 2**30, **times})
    model = {"parameters": 7e9, "layers": 32, "heads": 32, "key_value_heads": 32}
    cell = {"shape": "vicuna-7b", "batch": 2, "length": 1500, "rounds": 3, "model": model, "rows": rows}
    return {
        "hardware": {"gpu": "a GPU"},
        "versions": {"torch": "2", "transformers": "5"},
        "settings": {"dtype": "float16", "new_tokens": 10},
        "cells": [cell | {"settings": dict.fromkeys(["plain", *seconds])}],
        "left_out": [{"shape": "vicuna-13b", "batch": 1, "length": 32768, "error": "no time left"}],
    }


def test_ratios_are_medians_of_the_samples_own_ratios():
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
    assert cells[3] == "420.00 (410.00–810.00)"  # milliseconds a step
    assert cells[4] == "4.8"  # two rows, 0.42 seconds a step
    assert [cell.split()[0] for cell in cells[5:8]] == ["2.50", "2.00", "2.17"]
    assert cells[8:] == ["2.42", "1.00"]
    assert "prefill 1.000 (1.000 to 1.000) at" in table
    assert "decode 1.000 (1.000 to 1.050) at vicuna-7b, batch 2, 1500 tokens." in table
    assert "The target of 1.01 is met; 1 of the 2 medians" in table
    assert "Left out: vicuna-13b, batch 1, 32768 tokens (no time left)" in table


def test_a_missed_target_is_said_and_none_without_lpes():
    plain = ([1.0] * 3, [2.0] * 3)
    table = report(made(plain=plain, lpes=([1.0] * 3, [2.1] * 3)))
    assert "decode 1.050 (1.050 to 1.050) at vicuna-7b, batch 2, 1500 tokens. The target of 1.01 is missed" in table
    assert "1 of the 2 medians have their whole interval below it." in table
    assert "target" not in report(made(plain=plain))


@pytest.mark.parametrize(("number", "ends"), [(3, (0, 2)), (5, (0, 4)), (6, (0, 5)), (20, (5, 14)), (100, (39, 60))])
def test_the_interval_of_a_median_is_the_sign_tests(number, ends):
    """By binomial tables: of 20 values the 6th and the 15th, of 100 the 40th and the 61st."""
    values = list(range(number))
    random.Random(0).shuffle(values)
    assert interval(values) == ends


def test_a_preset_says_what_other_flags_leave_out():
    args = efficiency.arguments(["--preset", "gpu", "--batches", "2"])
    assert (args.device, args.dtype, args.batches) == ("cuda", "float16", [2])
    small = efficiency.arguments(["--preset", "small", "--out", "e.json"])  # --out is what --output was called
    assert (small.shapes, small.device, small.output) == (["reference"], "cpu", "e.json")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--rounds", "1"), ("--lengths", "0"), ("--threads", "0"), ("--budget", "nan")),
        *(("--device", "quantum"), ("--output", "e.md")),
    ],
)
def test_a_flag_with_which_nothing_can_be_measured_is_named(flag, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        efficiency.arguments([flag, value])
    assert f"argument {flag}: expected" in capsys.readouterr().err


def test_a_missing_device_and_a_file_of_something_else_are_named(tmp_path, capsys):
    assert efficiency.main(["--device", "cuda:99"]) == 2
    assert capsys.readouterr().err.startswith("efficiency: error: device=cuda:99: ")
    for name, content in (("text.json", "no JSON"), ("other.json", '{"version": 1}')):
        (tmp_path / name).write_text(content)
        assert efficiency.main(["--report", str(tmp_path / name)]) == 2
        assert f"{name}: " in capsys.readouterr().err


def test_what_is_measured_is_the_gpu_that_was_asked_for(monkeypatch):
    """PyTorch's events and memory statistics are those of the current device."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(efficiency, "run", lambda args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        efficiency.main(["--device", "cuda:1"])
    assert chosen == [1]


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
        both = [model, efficiency.with_method(name, model)[0]]
        efficiency.measure(both, tokens, 1, random.Random(0))


def failing(name, error):
    def apply(model, **settings):
        raise error

    return type(name, (methods.load(name),), {"apply": apply})


def test_what_does_not_fit_or_refuses_is_left_out_and_the_rest_is_measured(monkeypatch, file, capsys):
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
    results = run(file, "--shapes", "tiny", "small")
    assert {out.get("method", out["shape"]) for out in results["left_out"]} == {*errors, "small"}
    (cell,) = results["cells"]
    assert {row["method"] for row in cell["rows"]} == {"plain", *methods.names()} - errors.keys()
    said = capsys.readouterr().out
    at = "batch 1, 16 tokens"
    assert f"Left out: small, {at} (the model does not fit into memory)." in said
    assert f"Left out: ms_poe in tiny, {at} (refused: llama: not this one)." in said
    assert f"Left out: moice in tiny, {at} (out of memory: CUDA out of memory)." in said
    broken["lpes"] = failing("lpes", RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        run(file)


def test_two_caches_that_do_not_fit_are_made_one_after_the_other_and_one_that_does_not_is_left_out(monkeypatch, file):
    alone = efficiency.measure

    def full(models, tokens, **rest):
        if len(models) > 1 or tokens.shape[1] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return alone(models, tokens, **rest)

    monkeypatch.setattr(efficiency, "measure", full)
    results = run(file, "--lengths", "16", "24", "--methods", "lpes")
    (cell,) = results["cells"]
    assert {row["in_step"] for row in cell["rows"]} == {False}
    assert len(cell["rows"]) == 3 + 15
    assert {(out["method"], out["length"]) for out in results["left_out"]} == {("plain", 24), ("lpes", 24)}
    assert file.with_suffix(".png").exists()


def test_models_in_step_answer_as_each_does_alone():
    """What is timed is the same work: tokens decoded in turns are those of a model that has the machine to itself."""
    model = efficiency.build("tiny", "cpu", "float32")
    other, _ = efficiency.with_method("plain", model)
    assert {p.data_ptr() for p in model.parameters()} == {p.data_ptr() for p in other.parameters()}
    tokens = torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(0))
    rope.apply(other, [1.5, 1.2, 1.9, 1.1])
    seen = {0: [], 1: []}
    for i, each in enumerate((model, other)):
        each.register_forward_hook(lambda module, args, output, i=i: seen[i].append(output.logits.clone()))
    efficiency.measure([model, other], tokens, 3, random.Random(0))
    for i, each in enumerate((model, other)):
        together, ids = list(seen[i]), tokens
        assert len(together) == 4
        for logits in together:
            with torch.no_grad():
                alone = each(ids, use_cache=False).logits[:, -1:]
            assert torch.allclose(logits[:, -1:], alone, atol=1e-4)
            ids = torch.cat((ids, alone.argmax(-1)), dim=1)
    assert not torch.allclose(seen[0][0], seen[1][0], atol=1e-3)
