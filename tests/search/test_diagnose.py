"""``lpes-eval diagnose``: its statistics against a closed form, and the command on a small model."""

import json
import random
import re
import shlex

import pytest
from scipy.stats import chi2

from lpes_eval.data import kv
from search import config, diagnose, ga
from search.diagnose import position_bias
from small_searches import journal


def test_bias_of_right_and_wrong_answers_is_cochrans_q():
    draw = random.Random(0)
    rows = [[float(draw.random() < p) for p in (0.3, 0.6, 0.8)] for _ in range(30)]
    columns, totals = list(map(sum, zip(*rows, strict=True))), list(map(sum, rows))
    k, n = 3, sum(totals)
    q = (k - 1) * (k * sum(c * c for c in columns) - n * n) / (k * n - sum(t * t for t in totals))
    assert position_bias(rows) == pytest.approx(chi2.sf(q, k - 1))
    assert position_bias([[1.0, 1.0, 1.0]] * 9) == 1


def command(folder, *more):
    words = ["reference-kv", "--tasks", "kv_retrieval", "--metadata", "num_keys=8", "--questions", "4"]
    words += ["--output", str(folder), *more]
    return diagnose.main(words)


def test_a_diagnosis_that_ran_out_of_budget_goes_on_and_so_does_the_search_that_it_names(tmp_path, capsys):
    assert command(tmp_path, "--budget", "100prompts") == 0
    assert "budget ended this" in capsys.readouterr().out
    begun = journal(tmp_path)
    assert command(tmp_path, "--budget", "2h") == 0
    text, ended = capsys.readouterr().out, journal(tmp_path)
    assert ended[: len(begun)] == begun
    assert len({entry["key"] for entry in ended}) == len(ended)

    said = json.loads((tmp_path / "diagnosis.json").read_text())
    assert [one["length"] for one in said["lengths"]] == ["num_keys=4", "num_keys=8", "num_keys=16"]
    assert [one["questions"] for one in said["lengths"]] == [4] * 3
    (one,) = said["searches"]
    assert one["search"] in ("likely", "unlikely")
    assert one["command"] in text

    assert (tmp_path / "lengths-kv_retrieval.png").read_bytes().startswith(b"\x89PNG")

    mapped = journal(tmp_path / "search-kv_retrieval")
    assert {entry["measure"] for entry in mapped} == {"likelihood"}
    assert ga.main([*shlex.split(one["command"])[3:], "--budget", "1prompts", "--held_out_examples", "0"]) == 0
    went_on = journal(tmp_path / "search-kv_retrieval")
    assert went_on[: len(mapped)] == mapped
    assert {entry["origin"] for entry in went_on[len(mapped) :]} == {"baseline"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["reference", "--tasks", "FOLDER/toy_choice.yaml"], "is not one task by position"),
        (["reference", "--tasks", "no_such"], "no_such"),
        (["./nowhere"], "no such folder"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused_in_one_line(words, error, tmp_path, capsys, task_folder, few_tasks):
    words = [word.replace("FOLDER", task_folder) for word in words]
    assert diagnose.main([*words, "--output", str(tmp_path / "new")]) == 2
    printed = capsys.readouterr().err  # transformers' bars may stand before the refusal
    assert "Traceback" not in printed
    assert re.match(f"diagnose: error: .*{error}", printed.splitlines()[-1])


def test_the_search_that_is_named_has_the_settings_of_the_diagnosis():
    words = ["m", "--output", "out", "--model_args", 'bnb_4bit_quant_type="a,b"']
    words += ["--metadata", '{"note": [1, "2"], "positions": [0, 50]}']
    args = diagnose.build_parser().parse_args([*words, "--gen_kwargs", "max_gen_toks=20"])
    asked = config.parse(diagnose.search_words(args, "kv_retrieval"))
    assert asked.model_args == {"pretrained": "m", **args.model_args}
    assert (asked.metadata, asked.positions, asked.gen_kwargs) == ({"note": [1, "2"]}, [0, 50], {"max_gen_toks": 20})
    asked = config.parse(diagnose.search_words(args, "mdqa_pos"))  # else a named model's are the official articles
    assert asked.metadata["source"] == "generated"


def test_lengths_that_a_file_does_not_have_are_left_out(tmp_path, capsys):
    records = [kv.generate(i, 8).records for i in range(80)]
    lines = [json.dumps({"ordered_kv_records": r, "key": r[0][0], "value": r[0][1]}) for r in records]
    (tmp_path / "kv-retrieval-8_keys.jsonl").write_text("\n".join(lines))
    assert command(tmp_path / "own", "--metadata", f"num_keys=8,data_dir={tmp_path}", "--budget", "1prompts") == 0
    said = json.loads((tmp_path / "own" / "diagnosis.json").read_text())
    assert [one["length"] for one in said["lengths"]] == ["num_keys=8"]
    assert "num_keys=4" in capsys.readouterr().out
    both = ("--tasks", "kv_retrieval,mdqa_pos", "--metadata", f"num_keys=8,data_dir={tmp_path}")
    assert command(tmp_path / "both", *both) == 2
    printed = capsys.readouterr()
    assert "nq-open" in printed.err
    assert "Loading" not in printed.out
