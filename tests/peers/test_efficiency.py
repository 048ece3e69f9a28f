"""The efficiency benchmark: every method is measured in every round, and the report's figures are those of the file."""

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "efficiency.py"


@pytest.fixture(scope="module")
def efficiency():
    import sys

    spec = importlib.util.spec_from_file_location("efficiency", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["efficiency"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["efficiency"]


def test_one_command_measures_all_methods_and_reports_them(efficiency, tmp_path, capsys):
    file = tmp_path / "e.json"
    flags = "--shapes tiny --lengths 16 24 --batches 1 --rounds 3 --new_tokens 2 --threads 1"
    efficiency.main([*flags.split(), "--out", str(file)])
    results = json.loads(file.read_text())
    assert [(cell["shape"], cell["length"]) for cell in results["cells"]] == [("tiny", 16), ("tiny", 24)]
    for cell in results["cells"]:
        assert set(cell["methods"]) == set(efficiency.METHODS)
        for seen in cell["methods"].values():
            assert seen["error"] is None
            assert [len(seen[key]) for key in ("prefill_s", "decode_s", "peak_bytes")] == [3, 3, 3]
            assert min(seen["prefill_s"] + seen["decode_s"]) > 0
    assert results["versions"]["torch"]
    assert results["hardware"]["threads"] >= 1
    first = capsys.readouterr().out
    efficiency.main(["--report", str(file)])
    assert capsys.readouterr().out == first
    assert file.with_suffix(".png").stat().st_size > 10_000


def made(**seconds):
    """A results file with given seconds of prefill and decode, per round."""
    methods = {
        name: {"settings": {}, "error": None, "prefill_s": prefill, "decode_s": decode, "peak_bytes": [2**30] * 3}
        for name, (prefill, decode) in seconds.items()
    }
    model = {"parameters": 7e9, "layers": 32, "heads": 32, "key_value_heads": 32}
    cell = {"shape": "vicuna-7b", "batch": 2, "length": 1500, "new_tokens": 10, "rounds": 3, "model": model}
    return {
        "hardware": {"gpu": "a GPU"},
        "versions": {"torch": "2", "transformers": "5"},
        "settings": {"dtype": "float16", "new_tokens": 10, "cpu_time": False},
        "cells": [cell | {"methods": methods}],
        "left_out": [{"shape": "vicuna-13b", "batch": 1, "length": 32768}],
    }


def test_ratios_are_medians_of_the_rounds_own_ratios(efficiency):
    """The machine is three times as slow in the last round; the ratio does not see it."""
    results = made(
        plain=([1.0, 1.0, 3.0], [2.0, 2.0, 6.0]),
        lpes=([1.0, 1.0, 3.0], [2.0, 2.1, 6.0]),
        moice=([2.5, 2.4, 7.5], [4.0, 4.2, 12.0]),
    )
    table = efficiency.report(results)
    (row,) = (line for line in table.splitlines() if line.startswith("| moice"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2] == "420.00 (410.00–810.00)"  # milliseconds a step
    assert cells[3] == "4.8"  # two rows, 0.42 seconds a step
    assert [cell.split()[0] for cell in cells[4:7]] == ["2.50", "2.00", "2.17"]
    assert cells[7] == "2.42"
    assert "the target of 1.01 is met" in table
    assert "Left out: vicuna-13b, batch 1, 32768 tokens (no time left)" in table


def test_a_missed_target_and_a_method_that_did_not_fit_are_said(efficiency):
    results = made(
        plain=([1.0] * 3, [2.0] * 3), lpes=([1.0] * 3, [2.1] * 3), attention_buckets=([], [])
    )  # fmt: skip
    results["cells"][0]["methods"]["attention_buckets"]["error"] = "out of memory"
    table = efficiency.report(results)
    assert "decode 1.050 (vicuna-7b, batch 2, 1500 tokens); the target of 1.01 is missed" in table
    assert "| attention_buckets | out of memory |" in table


def test_cells_go_from_cheap_to_dear_and_large_ones_stay_out(efficiency):
    args = efficiency.arguments(["--preset", "gpu"])
    assert (args.device, args.dtype, args.largest) == ("cuda", "float16", 65536)
    costs = [efficiency.Cell("vicuna-7b", 1, n).cost for n in (1500, 4096, 16384)]
    assert costs == sorted(costs)
    with pytest.raises(SystemExit):
        efficiency.arguments(["--rounds", "1"])
