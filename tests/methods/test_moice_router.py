"""MoICE's router: its weights, its file, and its training."""

import json
import re
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lpes_eval import reference
from lpes_eval.data import fiction, kv
from lpes_eval.errors import UserError
from lpes_eval.methods.moice import MoICE, train
from lpes_eval.methods.moice import router as routers
from lpes_eval.methods.moice.router import Router, RouterConfig
from lpes_eval.methods.tables import PUBLISHED_BASES
from tiny_models import tiny_config, tiny_model

TEXTS = [f"{n}. The river runs past the mill {n}" for n in range(3)]
SMALL = train.Settings(text="texts", length=40, steps=6, batch=3, rate=0.05)


def config(**changes):
    return RouterConfig(**{"layers": 3, "heads": 2, "head_dim": 8} | changes)


def test_a_router_comes_back_from_its_file_and_the_same_router_gives_the_same_bytes(tmp_path):
    made = Router(config(model="org/name", top_k=4, bases=(1e4, 2e4, 3e4, 4e4), training={"steps": 7}), seed=5)
    routers.write(made, tmp_path / "a" / routers.FILE)
    found = routers.read(tmp_path / "a")
    assert found.config == made.config
    assert all(torch.equal(getattr(found, name), weight) for name, weight in made.named_parameters())
    routers.write(found, tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a" / routers.FILE).read_bytes()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b.safetensors", routers.FILE]


GOOD = {name: weight.detach() for name, weight in Router(config()).named_parameters()}


@pytest.mark.parametrize(
    ("words", "tensors", "notes"),
    [
        ("header", None, None),
        ("moice_router", {"w1": torch.zeros(2)}, None),
        (r"tensor 'w1' of shape \(3, 8, 7\), expected \(4, 8, 7\)", GOOD, {"layers": 4}),
        ("w3", {"w1": GOOD["w1"], "w2": GOOD["w2"]}, {}),
        ("size mismatch for w2", GOOD | {"w2": GOOD["w1"].clone()}, {}),
        ("all finite", GOOD | {"w2": GOOD["w2"] / 0}, {}),
        ("version 2 of the format, expected 1", GOOD, {"version": 2}),
        ("expected", GOOD, {"layers": "3"}),
        ("bases=", GOOD, {"bases": [10000.0, -1]}),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path, words, tensors, notes):
    file = tmp_path / "other"
    if tensors is None:
        file.write_bytes(b"not one")
    else:
        described = {routers.METADATA: json.dumps({"version": 1, **asdict(config())} | (notes or {}))}
        save_file(tensors, file, metadata=None if notes is None else described)
    with pytest.raises(UserError, match=f"other: holds no MoICE router .*({words}).*; train one") as caught:
        routers.read(file)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model of two layers with a tokenizer, and three texts: as many as a batch has."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(reference.path())
    config = tiny_config("llama", vocab_size=len(tokenizer), num_hidden_layers=2, initializer_range=0.3)
    tiny_model(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def command(folder, out, *more):
    data = () if "--task" in more else ("--text", str(folder / "texts.jsonl"))
    small = ("--length", "40", "--batch", "3", "--steps", "6", "--rate", "0.05")
    return train.main(["--model", str(folder), "--out", str(out), *data, *small, *more])


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_training_lowers_the_loss_and_leaves_the_model_alone(folder, tmp_path):
    one = train.from_texts(SMALL, AutoTokenizer.from_pretrained(folder), TEXTS)  # without the command
    (tmp_path / train.LOG).write_text("my diary")
    assert command(folder, tmp_path) == 2
    assert (tmp_path / train.LOG).read_text() == "my diary"
    (tmp_path / train.LOG).unlink()
    assert command(folder, tmp_path, "--steps", "8") == 0
    trained = routers.read(tmp_path)
    log = [json.loads(line) for line in (tmp_path / train.LOG).read_text().splitlines()]
    notes = trained.config.training
    assert [entry["step"] for entry in log] == list(range(1, 9))
    assert (notes["rate"], notes["last_loss"], notes["text"]) == (0.05, log[-1]["loss"], "texts.jsonl")

    means = []
    for router in (trained, Router(trained.config)):
        model = load(folder)
        MoICE.apply(model, router=router)
        with torch.no_grad():
            means.append(sum(train.loss_of(model, *one(i)).item() for i in range(3)) / 3)
    assert means[0] < means[1] - 0.03
    assert log[0]["loss"] == pytest.approx(means[1], abs=1e-3)

    model = load(folder)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    train.train(model, trained.config, replace(SMALL, steps=2), one, tmp_path / "again")
    assert all(torch.equal(weights[name], weight) for name, weight in model.named_parameters())
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


def test_for_a_model_of_half_precision_the_router_learns_the_same_in_float32(folder, tmp_path):
    for name in ("float32", "float16"):
        assert command(folder, tmp_path / name, "--dtype", name, "--steps", "4") == 0
    exact, half = (routers.read(tmp_path / name) for name in ("float32", "float16"))
    assert half.w1.dtype == torch.float32
    before, moved, moved_half = (
        torch.cat([w.flatten() for w in r.parameters()]) for r in (Router(exact.config), exact, half)
    )
    assert torch.cosine_similarity(moved - before, moved_half - before, dim=0) > 0.8


def test_what_cannot_be_trained_is_said_in_one_line(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for more, words in (
        (("--model", str(tmp_path / "none")), "none: cannot be loaded"),
        (("--device", "cuda:9"), "device=cuda:9: PyTorch"),
        (("--text", str(tmp_path / "none.txt")), "none.txt: no text there; expected a text file"),
        (("--task", "kv_retrieval:2"), "--task kv_retrieval:2: a prompt and its answer take"),
        (("--task", "kv_retrieval:9", "mdqa:1"), "--task mdqa:1: expected kv_retrieval or mdqa_pos with :SIZE"),
        (("--task", "kv_retrieval:1"), "--task kv_retrieval:SIZE=1: expected at least 2"),
    ):
        assert command(folder, tmp_path / "out", *more) == 2
        error = capsys.readouterr().err
        assert words in error
        assert "Traceback" not in error


@pytest.mark.parametrize("task", train.TASKS)
def test_training_prompts_are_the_tasks_own_with_the_gold_item_anywhere_and_none_of_its_examples(task):
    size, golds, evaluated = 6, set(), set()
    for i in range(300):
        records, question = kv.generate(i, size).records, fiction.generate(i, size)
        evaluated.update((key for key, _ in records) if task == "kv_retrieval" else [question.gold.text])
    for prompt, answer in (train.task_text(task, size, 0, number) for number in range(60)):
        items = re.findall(r'^(?:[{ ]".*|Document \[.*)', prompt, re.MULTILINE)
        golds.add(next(i for i, item in enumerate(items) if answer.strip() in item))
        assert len(items) == size
        assert not any(text in prompt for text in evaluated)
    assert golds == set(range(size))
    assert train.task_text(task, size, 1, 0) != train.task_text(task, size, 0, 0)


def test_of_a_tasks_prompt_the_answer_alone_counts(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = train.Settings(tasks=(("kv_retrieval", 3), ("mdqa_pos", 2)))
    one = train.from_tasks(settings, tokenizer)
    for number, task, size in ((4, "kv_retrieval", 3), (5, "mdqa_pos", 2)):  # tasks take turns
        (ids, first), (prompt, answer) = one(number), train.task_text(task, size, 0, number)
        assert tokenizer.decode(ids[:first]) == prompt
        assert tokenizer.decode(ids[first:-1]) == answer
        assert ids[-1] == tokenizer.eos_token_id


def test_a_run_records_its_tasks_and_bases(folder, tmp_path):
    tasks = ("--task", "kv_retrieval:2", "mdqa_pos:2", "--length", "900", "--batch", "2", "--steps", "2")
    assert command(folder, tmp_path, *tasks) == 0
    made = routers.read(tmp_path / routers.FILE)
    assert made.config.training["tasks"] == [["kv_retrieval", 2], ["mdqa_pos", 2]]
    assert made.config.bases == PUBLISHED_BASES


def test_the_shipped_router_was_trained_by_the_published_settings():
    trained = routers.read(reference.path() / routers.SHIPPED)
    found = trained.config
    settings = train.Settings(tasks=(("kv_retrieval", 50), ("mdqa_pos", 10)))
    assert (settings.steps, settings.batch, settings.length) == (7, 128, 4608)
    assert (settings.rate, routers.TOP_K) == (1e-4, 7)
    assert found.bases == PUBLISHED_BASES == (10000, 17500, 18000, 19000, 20000, 22500, 25000)
    expected = {name: value for name, value in json.loads(json.dumps(asdict(settings))).items() if value is not None}
    assert {name: found.training[name] for name in expected} == expected
    moved = [abs(a - b).max() for a, b in zip(Router(found).parameters(), trained.parameters(), strict=True)]
    assert 0 < max(moved) <= 1.01 * settings.steps * settings.rate  # a step of AdamW is at most about its rate
