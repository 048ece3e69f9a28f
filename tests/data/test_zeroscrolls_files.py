"""ZeroSCROLLS' files, its way of cutting, the tasks on a tiny model, and the leaderboard's submission file."""

import csv
import json
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_llama

from lpes_eval.data import zeroscrolls
from lpes_eval.errors import DataError, PromptTooLong
from lpes_eval.harness import budget

TASKS = Path(__file__).resolve().parents[2] / "tasks" / "zeroscrolls"
SEPARATOR = "... [The rest of the article is omitted]\n\n"

QASPER = (  # the published prompt (arXiv 2305.14196, Table 6)
    "You are given a scientific article and a question. Answer the question as concisely as you can, using a single "
    "phrase or sentence if possible. If the question cannot be answered based on the information in the article, write "
    '"unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable".{chat}'
    "\n\nArticle:\n{document}\n\nQuestion:\n{query}{header}"
)
GOV_REPORT = (
    "You are given a report by a government agency. Write a one-page summary of the report."
    "\n\nReport:\n{document}{header}"
)


def row(name: str, number: int, document: str, output: str | None, query: str = "Who is it?") -> dict:
    """A line in the benchmark's form."""
    template, header = (QASPER, "\n\nAnswer:\n") if name not in ("gov_report",) else (GOV_REPORT, "\n\nSummary:\n")
    text = template.format(document=document, query=query, header=header, chat="")
    start = text.index(":\n") + 2
    asked = text.index("Question:\n") if name != "gov_report" else start + len(document)
    return {
        "id": f"{name}_{number}",
        "pid": f"{name}_{number}_0",
        "input": text,
        "output": output,
        "document_start_index": start,
        "document_end_index": start + len(document),
        "query_start_index": asked,
        "query_end_index": len(text) - len(header),
        "truncation_seperator": SEPARATOR,
    }


def archive(folder: Path, name: str, validation: list[dict], test: list[dict]) -> Path:
    """``NAME.zip`` as the Hub has it."""
    path = folder / f"{name}.zip"
    with zipfile.ZipFile(path, "w") as file:
        for split, lines in (("validation", validation), ("test", test)):
            file.writestr(f"{name}/{split}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return path


def examples(name: str, output: str | None) -> list[dict]:
    return [row(name, n, f"Document {n}. " + "the story goes on " * (4 if n else 200), output) for n in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("zero_scrolls")
    for name in zeroscrolls.NAMES:
        output = "40%" if name == "space_digest" else "the story goes"
        archive(home, name, examples(name, output), examples(name, None))
    return home


def test_archive_and_unpacked_folder_give_the_same_examples(folder, tmp_path):
    with zipfile.ZipFile(folder / "qasper.zip") as file:
        file.extractall(tmp_path)
    unpacked = zeroscrolls.locate(tmp_path, "qasper", "held_out")
    packed = zeroscrolls.locate(folder, "qasper", "held_out")
    assert (unpacked.name, packed.name) == ("validation.jsonl", "qasper.zip")
    assert zeroscrolls.read(unpacked, "qasper", "held_out") == zeroscrolls.read(packed, "qasper", "held_out")


def test_lines_with_one_id_are_one_example_with_several_references(tmp_path):
    lines = [row("squality", n, "text", f"reference {i}") for i in range(4) for n in range(2)]
    found = zeroscrolls.read(archive(tmp_path, "squality", lines, lines), "squality", "held_out")
    assert [example.id for example in found] == ["squality_0", "squality_1"]
    assert found[1].references == tuple(f"reference {i}" for i in range(4))


def test_an_unlabelled_file_has_no_references(folder):
    assert all(e.references == () for e in zeroscrolls.read(folder / "qasper.zip", "qasper", "test"))


def test_all_labelled_examples_are_held_out_and_none_can_be_searched_on():
    with pytest.raises(DataError, match="search on another task"):
        zeroscrolls.file_for("search")
    with pytest.raises(DataError, match="held_out, test"):
        zeroscrolls.file_for("train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": 3}, "example 2: 'input' is missing or no text"),
        ({"truncation_seperator": None}, "'truncation_seperator' is missing"),
        ({"query_start_index": "5"}, "'query_start_index' is missing or no whole number"),
        ({"query_start_index": 10**6}, "do not follow each other"),
        ({"document_end_index": 1}, "do not follow each other"),
        ({"output": ["a"]}, "'output' is list"),
    ],
)
def test_a_line_of_another_form_is_refused_with_its_place(tmp_path, change, message):
    lines = [row("qasper", 0, "text", "x"), {**row("qasper", 1, "text", "x"), **change}]
    with pytest.raises(DataError, match=message):
        zeroscrolls.read(archive(tmp_path, "qasper", lines, lines), "qasper", "held_out")


def test_broken_archives_are_refused(tmp_path):
    path = tmp_path / "qasper.zip"
    with pytest.raises(DataError, match="no such file"):
        zeroscrolls.read(path, "qasper", "test")
    path.write_bytes(b"PK\3\4 cut off")
    with pytest.raises(DataError, match="broken archive"):
        zeroscrolls.read(path, "qasper", "test")
    archive(tmp_path, "qasper", [], [])
    with pytest.raises(DataError, match="holds no example"):
        zeroscrolls.read(path, "qasper", "test")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("qasper/validation.jsonl", "{}\n{broken\n")
    with pytest.raises(DataError, match=r"does not hold qasper/test\.jsonl"):
        zeroscrolls.read(path, "qasper", "test")
    with pytest.raises(DataError, match=r"example 1: 'id' is missing"):
        zeroscrolls.read(path, "qasper", "held_out")


def test_an_archive_is_refused_in_one_line_wherever_a_byte_is_wrong(tmp_path):
    path = archive(tmp_path, "qasper", [row("qasper", 0, "text", "x" * 400)], [])
    whole, refused = path.read_bytes(), 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            zeroscrolls.read(path, "qasper", "held_out")
        except DataError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > len(whole) // 2


def parse(line: dict) -> zeroscrolls.Example:
    return zeroscrolls._parse(line, "test")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_llama.tokenizer()


def limits(tokenizer, window, new_tokens=8):
    return budget.for_model(SimpleNamespace(tokenizer=tokenizer, max_length=window), new_tokens)


def test_an_input_that_fits_is_sent_to_the_byte(tokenizer):
    line = row("qasper", 1, "A dööcument.\n", "x")
    assert zeroscrolls.fit(parse(line), limits(tokenizer, 4000), str) == line["input"]


def cut_by_their_tokens(tokenizer, line, max_tokens):
    """The benchmark's own cutting: tokens before the query, as many as leave room for separator and query."""
    suffix = line["truncation_seperator"] + line["input"][line["query_start_index"] :]
    room = max_tokens - len(tokenizer(suffix)["input_ids"])
    kept = tokenizer(line["input"][: line["query_start_index"]])["input_ids"][:room]
    return tokenizer.decode(kept, skip_special_tokens=True), suffix


@pytest.mark.parametrize("name", ["qasper", "gov_report"])
@pytest.mark.parametrize("window", [420, 500, 611])
def test_a_long_document_is_cut_as_the_benchmark_cuts_it(tokenizer, name, window):
    line = row(name, 1, "the story of the döcument goes on; " * 60, "x")
    fitted = zeroscrolls.fit(parse(line), limits(tokenizer, window), str)
    beginning, suffix = cut_by_their_tokens(tokenizer, line, window - 8)
    assert fitted.endswith(suffix)
    assert line["input"].startswith(ours := fitted.removesuffix(suffix))
    assert ours.startswith(beginning.rstrip("\ufffd"))
    # Theirs spends one token on a second beginning-of-text token, in front of the separator.
    assert len(tokenizer(ours)["input_ids"]) - len(tokenizer(beginning)["input_ids"]) <= 1
    assert len(tokenizer(fitted)["input_ids"]) <= window - 8


def test_the_chat_template_counts(tokenizer):
    line = row("qasper", 1, "the story goes on; " * 60, "x")

    def render(text):
        return budget.render(text, chat_template=lambda messages: f"<user>{messages[0]['content']}</user>" + "!" * 50)

    fitted = zeroscrolls.fit(parse(line), limits(tokenizer, 500), render)
    assert 490 <= len(tokenizer(render(fitted))["input_ids"]) <= 492
    assert len(fitted) < len(zeroscrolls.fit(parse(line), limits(tokenizer, 500), str))


def test_an_instruction_that_leaves_no_room_is_refused(tokenizer):
    with pytest.raises(PromptTooLong, match="ZeroSCROLLS, qasper_1 without its document"):
        zeroscrolls.fit(parse(row("qasper", 1, "text " * 500, "x")), limits(tokenizer, 200), str)


def test_chat_models_get_the_published_prompt_without_header():
    document, query = "Some text.", "Who is it?"
    chat = zeroscrolls.for_chat(parse(row("qasper", 1, document, "x", query)), "qasper")
    expected = QASPER.format(document=document, query=query, header="", chat=" Do not provide any explanation.")
    assert chat.input == expected
    assert chat.input[slice(*chat.document)] == document
    assert chat.input[chat.query[0] :] == f"Question:\n{query}"
    summary = zeroscrolls.for_chat(parse(row("gov_report", 1, document, "x")), "gov_report")
    assert summary.input == GOV_REPORT.format(document=document, header="")


def test_yaml_is_what_its_generator_writes():
    import runpy

    files = runpy.run_path(str(TASKS / "_generate.py"))["files"]()
    assert {path.name: path.read_text() for path in TASKS.glob("*.yaml")} == files


# -- the tasks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(tiny_llama.save(tmp_path_factory.mktemp("model"), 700)), device="cpu", batch_size=8)


def evaluate(lm, folder, tasks, **metadata):
    import lm_eval
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        lm,
        tasks=tasks,
        limit=2,
        task_manager=TaskManager(
            include_path=str(TASKS), include_defaults=False, metadata={"data_dir": str(folder), **metadata}
        ),
        gen_kwargs={"max_gen_toks": 8},
        bootstrap_iters=0,
    )


def test_chat_template_and_system_instruction_go_around_the_published_prompt(folder):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata={"data_dir": str(folder)})
    task = manager.load(["zeroscrolls_qasper"])["tasks"]["zeroscrolls_qasper"]
    doc = task.eval_docs[1]
    published = task.doc_to_text(doc)
    around = {
        "system_instruction": "Be brief.",
        "chat_template": lambda messages: "".join(f"<{m['role']}>{m['content']}" for m in messages),
    }
    assert task.fewshot_context(doc, 0) == published
    plain = task.fewshot_context(doc, 0, **around)
    chat = task.fewshot_context(doc, 0, apply_chat_template=True, **around)
    assert plain == f"Be brief.\n\n{published}"
    assert chat == f"<system>Be brief.<user>{published}"
    with pytest.raises(DataError, match="zeroscrolls_qasper is asked without examples"):
        task.fewshot_context(doc, 1)


def test_all_seven_run_whole_and_scored(lm, folder):
    results = evaluate(lm, folder, ["zeroscrolls"])
    assert set(results["samples"]) == {f"zeroscrolls_{name}" for name in zeroscrolls.NAMES}
    for samples in results["samples"].values():
        cut, whole = (sample["arguments"][0][0] for sample in samples)
        assert SEPARATOR in cut
        assert SEPARATOR not in whole
        assert 680 < len(lm.tok_encode(cut)) <= 692
        assert not any("input" in sample["doc"] for sample in samples)
    scores = {name: results["results"][f"zeroscrolls_{name}"] for name in zeroscrolls.NAMES}
    assert {"rouge1,none", "rouge2,none", "rougeL,none", "score,none"} <= set(scores["qmsum"])
    assert "f1,none" in scores["narrative_qa"]
    assert "exp_similarity,none" in scores["space_digest"]
    mean = sum(score["score,none"] for score in scores.values()) / 7
    assert results["results"]["zeroscrolls"]["score,none"] == pytest.approx(mean)


def test_test_split_is_answered_and_becomes_a_submission(lm, folder, tmp_path, capsys):
    results = evaluate(lm, folder, ["zeroscrolls_qasper"], split="test")
    logged = tmp_path / "samples_zeroscrolls_qasper_2026-01-01T00-00-00.jsonl"
    samples = results["samples"]["zeroscrolls_qasper"]
    logged.write_text("".join(json.dumps(s, default=str) + "\n" for s in samples))
    output = tmp_path / "out.csv"
    arguments = [str(logged), "--data_dir", str(folder), "--output", str(output), "--partial"]

    assert zeroscrolls.main(arguments) == 2  # two of three examples were answered
    assert "2 predictions for 3 examples; 1 ids are missing, such as qasper_2" in capsys.readouterr().err
    third = {**samples[0], "doc": {"id": "qasper_2"}, "resps": [['a, "quoted"\nline']]}
    with logged.open("a") as file:
        file.write(json.dumps(third, default=str) + "\n")

    assert zeroscrolls.main(arguments[:-1]) == 2
    assert "no predictions for gov_report" in capsys.readouterr().err
    assert not output.exists()
    assert zeroscrolls.main(arguments) == 0
    with output.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["Task", "ID", "Prediction"]
    assert [tuple(r[:2]) for r in rows[1:]] == [("qasper", f"qasper_{n}") for n in range(3)]
    assert rows[3][2] == 'a, "quoted"\nline'
    assert [r[2] for r in rows[1:3]] == [s["resps"][0][0] for s in samples]

    other = tmp_path / "other model" / logged.name
    other.parent.mkdir()
    other.write_text(logged.read_text())
    assert zeroscrolls.main([str(other), *arguments]) == 2
    assert f"qasper: predictions in {other} and in {logged}; expected one file a task" in capsys.readouterr().err


# -- the submission file ---------------------------------------------------------------------------------------------


def complete():
    return {task: {"a": "x", "b": ""} for task in zeroscrolls.LEADERBOARD}


def test_a_complete_submission_passes():
    zeroscrolls.check_submission(complete(), {task: ["a", "b"] for task in zeroscrolls.LEADERBOARD})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qasper": {"a": "x"}}, "submission, qasper: 1 predictions for 2 examples; 1 ids are missing, such as b"),
        ({"qasper": {"a": "x", "b": "", "c": ""}}, "1 ids are not in the test set, such as c"),
        ({"qasper": {"a": "x", "b": None}}, "the prediction for b is no text"),
        ({"trivia": {}}, "trivia: no such task"),
    ],
)
def test_a_wrong_submission_is_refused(change, message):
    with pytest.raises(DataError, match=re.escape(message)):
        zeroscrolls.check_submission({**complete(), **change}, {"qasper": ["a", "b"]})


def test_predictions_of_other_origin_complete_the_ten(folder, tmp_path, capsys):
    archive(tmp_path, "quality", [], [row("quality", 1, "text", None)])
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"quality_1": "C"}))
    bad.write_text("[1]")
    common = ["--data_dir", str(tmp_path), "--output", str(tmp_path / "o.csv"), "--partial", "--predictions"]
    assert zeroscrolls.main([*common, f"quality={good}"]) == 0
    assert zeroscrolls.main([*common, f"quality={bad}"]) == 2
    assert "id -> prediction" in capsys.readouterr().err


def test_a_log_that_answers_an_example_twice_is_refused(tmp_path):
    line = json.dumps({"doc": {"id": "a"}, "resps": [["x"]]}) + "\n"
    (tmp_path / "log.jsonl").write_text(line * 2)
    with pytest.raises(DataError, match="sample 2: id a stands there twice"):
        zeroscrolls.predictions(tmp_path / "log.jsonl")
