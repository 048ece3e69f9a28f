"""A factors file says what it says, and everything wrong with one is one clear line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jsonschema
import numpy as np
import pytest
import torch

from lpes_eval import cli, reference
from lpes_eval import factors as module
from lpes_eval.errors import FactorsError
from lpes_eval.factors import Factors, load, parse
from lpes_eval.files import write_atomically

SCHEMA = json.loads(Path(module.__file__).with_name("factors.schema.json").read_text())
GOOD = {"format": "lpes-factors", "version": 1, "factors": [1.0, 1.5, 2.0, 1.2]}
CURVE = {"kind": "bezier", "points": [[0, 1.0], [1, 1.8], [3, 1.1]]}


def with_(**changes):
    data = {**GOOD, **changes}
    return {key: value for key, value in data.items() if value is not ...}


def curved(**changes):
    return with_(factors=..., curve={**CURVE, **changes})


BAD: dict[str, tuple[object, str]] = {
    # what is wrong: (the file: JSON value, or text as it stands; what the message must name)
    "a list at the top": ([1.0, 1.2], "expected an object"),
    "no format": (with_(format=...), "format"),
    "a version to come": (with_(version=2), "found 2, expected 1"),
    "an unknown field": (with_(factor=1.5), "'factor'"),
    "no factors at all": (with_(factors=...), "found none"),
    "two kinds of factors": (with_(uniform=1.5), "factors and uniform"),
    "a text in the list": (with_(factors=[1.0, "1.5"]), "factors[1]"),
    "zero": (with_(factors=[1.0, 0]), "factors[1]: found 0, expected a number from 0.001"),
    "so large that all positions are one": (with_(factors=[1.0, 1e308]), "found 1e+308"),
    "NaN": ('{"format": "lpes-factors", "version": 1, "factors": [NaN]}', "not a finite number"),
    "a count that disagrees": (with_(num_layers=5), "for 4 layers, the model has 5"),
    "layers that are no whole number": (with_(num_layers=4.0), "num_layers"),
    "unscaled layers that are no list": (with_(unscaled_layers=0), "unscaled_layers"),
    "unscaled layers out of order": (with_(factors=..., uniform=1.5, unscaled_layers=[2, 1]), "rising"),
    "an unscaled layer with a factor": (with_(unscaled_layers=[1]), "layer 1"),
    "no such unscaled layer": (with_(factors=..., uniform=1.5, num_layers=4, unscaled_layers=[4]), "names layer 4"),
    "a curve that is a list": (with_(factors=..., curve=[[0, 1], [1, 2]]), "curve"),
    "a curve without a kind": (with_(factors=..., curve={"points": CURVE["points"]}), "'kind'"),
    "one control point": (curved(points=[[0, 1.0]]), "2 to 12"),
    "a control point of three": (curved(points=[[0, 1.0, 2], [1, 1]]), "points[0]"),
    "x that does not rise": (curved(points=[[0, 1.0], [2, 1.1], [2, 1.2]]), "points[2]"),
    "too few free factors": (curved(kind="free", points=[1.0, 1.1]) | {"num_layers": 4}, "2 given for 4"),
    "an origin that is text": (with_(origin="mdqa"), "origin"),
    "a proof that is text": (with_(origin={"proof": "x"}), "origin.proof"),
    "a model without a name": (with_(origin={"model": {"revision": "main"}}), "'name'"),
}


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


RULES_BEYOND_A_SCHEMA = {
    "a count that disagrees", "no such unscaled layer", "unscaled layers out of order",
    "an unscaled layer with a factor", "x that does not rise", "too few free factors",
    "layers that are no whole number",  # JSON Schema takes 4.0 for a whole number
}  # fmt: skip


@pytest.mark.parametrize("wrong", BAD)
def test_every_wrong_file_is_refused_in_one_line_by_the_loader_and_by_the_schema(wrong, tmp_path):
    content, named = BAD[wrong]
    path = write(tmp_path / "f.json", content)
    with pytest.raises(FactorsError) as caught:
        load(path).per_layer(4)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert named in message
    assert "\n" not in message
    if isinstance(content, dict | list):
        valid = jsonschema.Draft202012Validator(SCHEMA).is_valid(content)
        assert valid == (wrong in RULES_BEYOND_A_SCHEMA)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    write(tmp_path / "text.json", "1.2 1.3")
    for path, named in {"none.json": "no such file", tmp_path: "folder", tmp_path / "text.json": "not JSON"}.items():
        with pytest.raises(FactorsError, match=f"^{path}: .*{named}"):
            parse(path)


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path, monkeypatch):
    old = tmp_path / "old.json"
    Factors.from_uniform(1.5).save(old)
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "disk full")))
    with pytest.raises(OSError, match=r"disk full.*old\.json"):
        Factors.from_uniform(1.7).save(old)
    assert load(old) == Factors.from_uniform(1.5)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


def test_a_wrong_file_ends_the_command_before_torch_is_loaded(tmp_path):
    path = write(tmp_path / "f.json", with_(factors=[1.0, 0]))
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')\n")
    command = [sys.executable, "-m", "lm_eval", "--model", "lpes", "--model_args", f"factors={path}"]
    ended = subprocess.run([*command, "--tasks", "kv_retrieval"], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines()[-1].startswith(f"lm_eval: error: {path}: factors[1]: found 0")


def test_a_saved_file_loads_as_the_same_factors_and_follows_the_schema(tmp_path):
    for factors in (
        Factors.from_list([0.001, 1.25, 1_000_000], origin={"task": "mdqa_pos", "seed": 7}),
        Factors.from_curve("bezier", [(0, 1.0), (3, 2.0), (4, 1.1)], num_layers=12, unscaled_layers=[0, 1]),
        Factors.from_curve("free", [1.1, 1.2]),
        Factors.from_uniform(1.5, num_layers=4),
    ):
        path = tmp_path / "deep" / "f.json"
        factors.save(path)
        assert load(path) == factors
        jsonschema.validate(json.loads(path.read_text()), SCHEMA)
        assert [p.name for p in path.parent.iterdir()] == ["f.json"]


def test_layers_left_alone_keep_factor_one_and_the_curve_runs_over_the_others():
    points = [(0, 1.2), (1, 2.0), (2, 1.4)]
    whole, spared = (Factors.from_curve("bezier", points, unscaled_layers=range(n)).per_layer(6 + n) for n in (0, 2))
    assert spared == [1.0, 1.0, *whole]


def test_the_hash_is_of_the_factors_alone_and_another_depth_is_refused():
    written_out = Factors.from_list([1.5] * 4, origin={"task": "a"})
    assert written_out.digest() == Factors.from_uniform(1.5).digest(4)
    assert written_out.digest() != Factors.from_list([1.5, 1.5, 1.5, 1.25]).digest()
    for factors, depth, named in (
        (written_out, 6, "4 layers, the model has 6"),
        (Factors.from_uniform(1.5), 1001, "1001 layers"),
        (Factors.from_uniform(1.5, unscaled_layers=[5]), 4, "names layer 5"),
    ):
        with pytest.raises(FactorsError, match=named):
            factors.per_layer(depth)


def test_what_may_be_given_as_factors(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Factors.from_uniform(1.3).save(tmp_path / "f.json")
    assert parse("1.5") == parse(1.5) == parse(np.float32(1.5)) == Factors.from_uniform(1.5)
    assert parse([1, 2]) == parse(np.array([1.0, 2.0])) == parse(torch.tensor([1.0, 2.0])) == Factors.from_list([1, 2])
    for path in ("f.json", "~/f.json", tmp_path / "f.json", Path("~/f.json")):
        assert parse(path) == load(path) == Factors.from_uniform(1.3)
    assert parse("reference") == load("reference") == load(reference.path() / "factors.json")
    for wrong in (True, {"uniform": 1.5}, object(), "nan", "-1", "", np.ones((2, 2)), np.array([1.0, np.nan])):
        with pytest.raises(FactorsError, match=r"^factors.*(: .*expected| is empty)"):
            parse(wrong)


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    for content in ("made", "replaced"):
        write_atomically(tmp_path / "link", content)
        assert (tmp_path / "folder" / "file").read_text() == content
    assert (tmp_path / "link").is_symlink()
    assert {path.name for path in tmp_path.rglob("*")} == {"link", "folder", "file"}


def test_the_factors_command_shows_one_line_a_layer_or_what_is_wrong(tmp_path, capsys):
    Factors.from_list([1.0, 1.5, 1.25], origin={"task": "kv_retrieval"}).save(tmp_path / "f.json")
    assert cli.main(["factors", str(tmp_path / "f.json")]) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = [line.split()[1:3] for line in printed if line.startswith("  layer")]
    assert shown == [["0", "1.0000"], ["1", "1.5000"], ["2", "1.2500"]]
    assert printed[-1] == "  task: kv_retrieval"

    for file, layers, named in (("1.2", (), "--layers N"), ("reference", ("--layers", "9"), "the model has 9")):
        assert cli.main(["factors", file, *layers]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"lpes-eval: error: {file}: ")
        assert named in error
