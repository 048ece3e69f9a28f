"""The shipped models do what their cards say, and their factors help on examples that found neither."""

import json
import shutil
from dataclasses import asdict
from functools import partial

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.reference import tokenizer as vocabulary
from benchmarks.reference.evaluate import load, main, right, right_documents
from benchmarks.reference.recipe import RECORDS, REFERENCE
from benchmarks.reference.train import weights_hash
from lpes_eval import reference
from lpes_eval.data import fiction, kv

MODELS = ("base", "kv")
SHIPPED = "reference"  # the base model's factors


@pytest.fixture(scope="module")
def model():
    return load(reference.path())


def test_they_are_small_enough_for_a_package_and_hold_no_code():
    files = [file for file in reference.path().parent.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 16 << 20
    assert not {".bin", ".py"} & {file.suffix for file in files if file.parent.name in MODELS}


@pytest.mark.parametrize(("name", "stages"), [("base", REFERENCE), ("kv", RECORDS)])
def test_its_weights_and_log_are_those_that_card_and_recipe_name(name, stages):
    folder = reference.path(name)
    run = json.loads((folder / "run.json").read_text())
    assert weights_hash(load(folder)) == run["weights_sha256"]
    assert run["weights_sha256"] in (folder / "README.md").read_text()
    assert all(asdict(stage).items() <= noted.items() for stage, noted in zip(stages, run["stages"], strict=True))
    lines = (folder / "training.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(10, stages[-1].steps + 1, 10))


def test_prompts_of_records_are_the_same_tokens_for_both():
    small, large = (AutoTokenizer.from_pretrained(reference.path(name)) for name in ("kv", "base"))
    assert len(small) == vocabulary.RECORDS_SIZE < len(large) == vocabulary.VOCAB_SIZE
    prompt = kv.generate(0, 8).prompt(40)
    assert small(prompt).input_ids == large(prompt).input_ids
    assert small.get_vocab().items() < large.get_vocab().items()  # a grown model takes over the smaller one's rows


def answers(name, examples, position):
    """What each prompt is answered with by greedy decoding, which stops by itself."""
    folder = reference.path(name)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for example in examples:
        prompt = tokenizer(example.prompt(position), return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert len(answer) < 40
        yield tokenizer.decode(answer, skip_special_tokens=True).strip()


@pytest.mark.parametrize("name", MODELS)
def test_it_answers_by_greedy_decoding_what_a_prompt_of_the_task_asks(name):
    examples = [kv.generate(question, 8) for question in range(4)]
    for example, answer in zip(examples, answers(name, examples, 40), strict=True):
        assert example.target(40) in answer


def test_it_answers_questions_about_articles_by_greedy_decoding():
    examples = [fiction.generate(question, 2, seed=77) for question in range(8)]
    right = [answer in example.answers for example, answer in zip(examples, answers("base", examples, 0), strict=True)]
    assert sum(right) >= 7


def test_the_smaller_model_is_asked_about_records_alone(capsys):
    folder = str(reference.path("kv"))
    assert main([folder, "--sizes", "4", "--contexts", "2"]) == 0
    assert "documents" not in capsys.readouterr().out
    assert main([folder, "--documents", "2"]) == 2
    assert "--documents" in capsys.readouterr().err
    assert main([folder, "--factors", "1", "2"]) == 2
    assert "--factors: 2 numbers; expected one, or one for each of 4 layers" in capsys.readouterr().err


def test_a_folder_without_a_whole_model_is_named_in_one_line(tmp_path, capsys):
    for words in ("neither a model (config.json) nor a run", "no file named model.safetensors"):
        assert main([str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("evaluate: error: ")
        assert error.count("\n") == 1
        assert str(tmp_path) in error
        assert words in error
        shutil.copy(reference.path("kv") / "config.json", tmp_path)


def test_a_model_without_a_layer_is_measured_beside_the_plain_one(capsys):
    flags = ["--sizes", "8", "--contexts", "2", "--leave-out"]
    assert main([str(reference.path("kv")), *flags]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  8 ")]
    means = {row[:48].strip(): float(row.split("mean")[1].split("±")[0]) for row in rows}
    assert len(means) == 5  # plain, and without each of four layers
    assert means["8 plain"] == 100
    assert means["8 without layer 1"] == 0  # nothing looks across the context


def test_it_is_right_at_half_the_length_it_was_trained_on(model):
    assert right(model, 26, 12).mean() >= 0.9
    assert right_documents(model, 5, 20).mean() >= 0.9


def test_whole_answers_with_the_quote_behind_them_are_right_more_often_with_the_shipped_factors(model):
    whole = right(model, 50, 10, SHIPPED)
    assert whole.mean() > right(model, 50, 10).mean() + 0.1
    assert (right(model, 50, 10, SHIPPED, values=True) >= whole).all()


@pytest.mark.parametrize(
    ("measure", "size", "contexts", "gain"),
    [(partial(right, values=True), 50, 20, 0.112), (right_documents, 10, 40, 0.037)],
    ids=["fifty records", "ten articles"],
)
def test_what_is_read_with_a_bias_is_read_with_less_under_the_shipped_factors(model, measure, size, contexts, gain):
    plain, scaled = measure(model, size, contexts), measure(model, size, contexts, SHIPPED)
    by_position = plain.mean(0)
    assert by_position.max() - by_position.min() >= 0.15
    assert scaled.mean() - plain.mean() > gain
    assert scaled.mean(0).min() > by_position.min()
