"""Multi-document QA: prompts to the byte, documents that move and nothing else, files in the benchmark's form."""

import gzip
import importlib.util
import json
import re
from pathlib import Path

import pytest

from lpes_eval.data import fiction, mdqa, splits
from lpes_eval.data.mdqa import best_subspan_em
from lpes_eval.errors import DataError

REPOSITORY = Path(__file__).resolve().parents[2]
TASKS = REPOSITORY / "tasks" / "mdqa_pos"
SHARED = REPOSITORY.parent / "shared" / "data"
needs_oracle = pytest.mark.skipif(
    not (SHARED / mdqa.ORACLE).is_file(), reason=f"{mdqa.ORACLE} is not beside the repository (../shared/data)"
)


def module(name: str):
    """A Python file of the task's folder."""
    spec = importlib.util.spec_from_file_location(f"mdqa_pos_{name}", TASKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(autouse=True)
def no_folder_in_the_environment(monkeypatch):
    monkeypatch.delenv("LPES_EVAL_DATA", raising=False)


@pytest.fixture(scope="module")
def utils():
    pytest.importorskip("lm_eval")
    return module("utils")


def line(number: int, num_documents: int = 10, gold_at: int = 0) -> dict:
    """A line of an official file."""
    contexts = [
        {
            "id": str(i),
            "title": f"Title {number}.{i}",
            "text": f"Text {i} of\n{number}.",
            "isgold": False,
            "hasanswer": False,
        }
        for i in range(1, num_documents)
    ]
    gold = {"title": f"Gold {{{number}}}", "text": f"Röntgen, number {number}.", "isgold": True, "hasanswer": True}
    contexts.insert(gold_at, gold)
    return {"question": f"who is {number}", "answers": ["Röntgen", f"n° {number}"], "ctxs": contexts}


def write(path: Path, lines: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines)
    return path


# -- the prompt ------------------------------------------------------------------------------------------------------


def test_prompt_is_the_benchmarks_to_the_byte():
    documents = [mdqa.Document(f"T{i}", f"text {i}.") for i in range(3)]
    example = mdqa.Example(7, "who wrote {it}", ("x",), documents[0], tuple(documents[1:]))
    assert example.prompt(50).encode() == (
        b"Write a high-quality answer for the given question using only the provided search results "
        b"(some of which might be irrelevant).\n"
        b"\n"
        b"Document [1](Title: T1) text 1.\n"
        b"Document [2](Title: T0) text 0.\n"
        b"Document [3](Title: T2) text 2.\n"
        b"\n"
        b"Question: who wrote {it}\n"
        b"Answer:"
    )


@pytest.mark.parametrize(
    ("num_documents", "indices"),
    [(10, [0, 2, 4, 6, 9]), (20, [0, 4, 9, 14, 19]), (30, [0, 7, 14, 21, 29])],
)
def test_positions_are_those_of_the_benchmark(num_documents, indices):
    example = fiction.generate(0, num_documents)
    assert [example.gold_index(position) for position in mdqa.POSITIONS] == indices
    for position, index in zip(mdqa.POSITIONS, indices, strict=True):
        assert example.documents(position)[index] == example.gold


def test_the_steps_of_ten_documents_are_eleven_positions():
    assert mdqa.STEPS == (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
    assert [fiction.generate(0, 10).gold_index(p) for p in mdqa.STEPS] == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("num_documents", mdqa.SIZES)
def test_a_questions_prompts_differ_in_nothing_but_the_order_of_documents(num_documents):
    for question_id in range(5):
        example = fiction.generate(question_id, num_documents)
        gold = f"](Title: {example.gold.title}) {example.gold.text}"
        frames, distractors = set(), set()
        for position in mdqa.STEPS:
            prompt = example.prompt(position)
            head, rest = prompt.split("\n\n", 1)
            body, tail = rest.split("\n\n", 1)
            lines = body.split("\n")
            assert [one.split("]")[0] for one in lines] == [f"Document [{i}" for i in range(1, num_documents + 1)]
            texts = [one[one.index("](") :] for one in lines]
            assert texts.index(gold) == position * (num_documents - 1) // 100
            texts.remove(gold)
            frames.add((head, tail))
            distractors.add(tuple(texts))
        assert len(frames) == len(distractors) == 1


# -- official files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gold_at", [0, 4, 9])
def test_official_file_gives_its_documents_in_their_order_wherever_the_gold_one_stands(tmp_path, gold_at):
    path = write(tmp_path / mdqa.official_name(10), [line(n, gold_at=gold_at) for n in range(3)])
    examples = mdqa.read_official(path, 10)
    assert [e.question_id for e in examples] == [0, 1, 2]
    for number, example in enumerate(examples):
        raw = line(number, gold_at=0)["ctxs"]
        assert example.question == f"who is {number}"
        assert example.answers == ("Röntgen", f"n° {number}")
        assert [(d.title, d.text) for d in example.documents(0)] == [(c["title"], c["text"]) for c in raw]
        assert f"Document [10](Title: Gold {{{number}}}) Röntgen, number {number}.\n\nQuestion" in example.prompt(100)


def changed(**fields) -> dict:
    return line(1) | fields


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ('{"question": "who', "line 2: not JSON"),
        ("[1, 2]", "line 2: found list, expected a JSON object"),
        ({"question": "who", "answers": ["x"]}, "line 2: the field 'ctxs' is missing"),
        (changed(question=7), "example 2: 'question' is not a text"),
        (changed(question=" "), "example 2: 'question' is not a text"),
        (changed(answers="x"), "example 2: 'answers' is not a list"),
        (changed(answers=[]), "example 2: 'answers' is not a list"),
        (changed(answers=[None]), "example 2: 'answers' is not a list"),
        (changed(ctxs={}), "example 2: 'ctxs' is not a list of documents"),
        (changed(ctxs=[{"title": "t", "text": None}]), "example 2: 'ctxs' is not a list of documents"),
        (line(1, 20), "example 2: 20 documents in 'ctxs', expected 10"),
        (changed(ctxs=[c | {"isgold": False} for c in line(1)["ctxs"]]), "example 2: 0 documents .* expected one"),
        (changed(ctxs=[c | {"isgold": True} for c in line(1)["ctxs"]]), "example 2: 10 documents .* expected one"),
    ],
)
def test_a_corrupt_line_is_reported_with_file_and_number(tmp_path, second, message):
    path = write(tmp_path / "nq.jsonl.gz", [line(0), second, line(2)])
    with pytest.raises(DataError, match=message) as error:
        mdqa.read_official(path, 10)
    assert str(error.value).startswith(str(path))


def test_an_archive_that_was_cut_off_or_is_empty_is_reported(tmp_path):
    path = write(tmp_path / "nq.jsonl.gz", [line(n) for n in range(200)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="broken gzip archive"):
        mdqa.read_official(path, 10)
    with pytest.raises(DataError, match="no examples in it"):
        mdqa.read_official(write(tmp_path / "empty.jsonl.gz", []), 10)


# -- distractors from other questions --------------------------------------------------------------------------------


@needs_oracle
def test_drawn_distractors_are_other_questions_paragraphs_without_an_accepted_answer():
    oracle = mdqa.read_oracle(SHARED / mdqa.ORACLE)
    assert len(oracle) == 2655
    with gzip.open(SHARED / mdqa.ORACLE, "rt", encoding="utf-8") as file:
        raw = [json.loads(one) for one in file]
    paragraphs = {(c["title"], c["text"]) for one in raw for c in one["ctxs"]}
    example = mdqa.drawn_distractors(oracle, 30)
    for question_id in [1840, *range(0, 2655, 20)]:
        drawn = example(question_id)
        assert drawn.question == raw[question_id]["question"]
        assert list(drawn.answers) == raw[question_id]["answers"]
        assert {(d.title, d.text) for d in drawn.documents(0)} <= paragraphs
        assert len({d.text for d in drawn.documents(0)}) == 30
        for copy in (f"{d.title} {d.text}".replace("\n", " ") for d in drawn.distractors):
            for answer in drawn.answers:
                if len(letters := re.sub(r"[^\w\s]", "", answer.lower())) > 1:
                    assert best_subspan_em(copy, [answer]) == 0.0
                else:
                    assert letters not in re.sub(r"[^\w\s]", "", copy.lower()).split()


@needs_oracle
def test_drawn_distractors_are_the_same_for_every_size():
    oracle = mdqa.read_oracle(SHARED / mdqa.ORACLE)
    ten, thirty = mdqa.drawn_distractors(oracle, 10), mdqa.drawn_distractors(oracle, 30)
    assert thirty(5).distractors[:9] == ten(5).distractors
    assert ten(5) == mdqa.drawn_distractors(oracle, 10)(5)
    assert ten(5).distractors != ten(6).distractors


def test_too_few_paragraphs_to_draw_from_is_an_error_with_the_numbers(tmp_path):
    path = write(tmp_path / mdqa.ORACLE, [line(n, 1) for n in range(6)])
    with pytest.raises(DataError, match=r"example 3: 0 distractors .* among 6 documents, expected 9"):
        mdqa.drawn_distractors(mdqa.read_oracle(path), 10)(2)


def test_an_oracle_file_with_distractors_is_refused(tmp_path):
    with pytest.raises(DataError, match="example 1: 10 documents in 'ctxs', expected the gold one alone"):
        mdqa.read_oracle(write(tmp_path / mdqa.ORACLE, [line(0)]))


# -- the task --------------------------------------------------------------------------------------------------------


def test_search_and_held_out_questions_are_disjoint_at_every_search_seed(utils):
    held_out, source = utils.load(num_documents=10, position=0)
    assert (len(held_out), source.examples, source.total) == (500, 500, fiction.POOL)
    seen = {row["question"] for row in held_out}
    for seed in (0, 1):
        search, _ = utils.load(num_documents=10, position=0, split="search", search_seed=seed)
        assert len(search) == 200
        assert seen.isdisjoint(row["question"] for row in search)
        assert {row["question_id"] for row in search}.isdisjoint(row["question_id"] for row in held_out)


def documents_of(prompt: str) -> set[str]:
    return {one.split("]", 1)[1] for one in prompt.split("\n\n")[1].split("\n")}


def test_every_position_has_the_same_questions_in_the_same_order(utils):
    tables = {p: utils.load(num_documents=10, position=p, split="search")[0] for p in mdqa.POSITIONS}
    for position, rows in tables.items():
        for row, first in zip(rows, tables[0], strict=True):
            same = ("question_id", "question", "answers")
            assert [row[field] for field in same] == [first[field] for field in same]
            assert row["gold_index"] == position * 9 // 100
            assert documents_of(row["prompt"]) == documents_of(first["prompt"])
            assert (row["prompt"] == first["prompt"]) == (position == 0)


def test_the_prompt_in_the_table_is_the_examples(utils):
    rows, source = utils.load(num_documents=20, position=75, split="search")
    assert [row["prompt"] for row in rows[:9]] == [fiction.generate(r["question_id"], 20).prompt(75) for r in rows[:9]]
    assert source.kind == source.name == "generated"


@pytest.mark.parametrize("place", ["", "10_total_documents", "qa_data/10_total_documents", "qa_data"])
def test_a_local_folder_is_read_flat_or_as_the_repository_lays_it_out(utils, tmp_path, place):
    path = write(tmp_path / place / mdqa.official_name(10), [line(n) for n in range(50)])
    write(tmp_path / mdqa.ORACLE, [line(n, 1) for n in range(50)])  # the benchmark's own distractors are preferred
    rows, source = utils.load(num_documents=10, position=100, data_dir=str(tmp_path))
    held_out = splits.split(50).indices("held_out")
    assert [row["question"] for row in rows] == [f"who is {i}" for i in held_out]
    assert (source.kind, source.name) == ("folder", "nq-open-10_total_documents_gold_at_0")
    assert (source.location, source.total, source.examples) == (str(path), 50, 30)


@needs_oracle
def test_a_folder_with_the_gold_paragraphs_alone_says_so_in_the_sets_name(utils):
    rows, source = utils.load(num_documents=10, position=50, data_dir=str(SHARED))
    assert len(rows) == 500
    assert source.version(1) == "1 folder: nq-open-oracle+drawn"
    assert source.sha256 == "6a7f72b846f663a133ef952244e5a4e43f06bcf190afe34e8fbe687ce0d1653e"
    assert all(row["prompt"].count("\nDocument [") == 10 for row in rows)


def test_a_folder_without_the_file_is_one_line_with_file_origin_and_way_out(utils, tmp_path):
    with pytest.raises(DataError) as error:
        utils.load(num_documents=20, position=0, data_dir=str(tmp_path))
    for part in (str(tmp_path), mdqa.official_name(20), mdqa.ORACLE, mdqa.official_url(20), "source=generated"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", ["", "8_total_documents/", "qa_data/8_total_documents/"])
def test_where_a_size_is_not_in_the_folder_those_that_are_there_are_named(utils, tmp_path, place):
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / place / mdqa.official_name(8)).touch()
    with pytest.raises(DataError) as error:
        utils.load(num_documents=10, position=0, data_dir=str(tmp_path))
    assert f"there is {mdqa.official_name(8)}: add num_documents=8 to --metadata" in str(error.value)


@pytest.mark.parametrize(("name", "documents"), [(mdqa.official_name(3), 3), (mdqa.ORACLE, 1)])
def test_a_file_may_lie_in_the_folder_uncompressed(utils, tmp_path, name, documents):
    path = tmp_path / name.removesuffix(".gz")
    lines = (line(n, documents) | {"answers": [f"number {n}"]} for n in range(10))
    path.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    rows, source = utils.load(num_documents=3, position=0, data_dir=str(tmp_path))
    assert len(rows) == 6
    assert source.location == str(path)


def test_the_line_that_the_readme_shows_is_read(tmp_path):
    (shown,) = re.findall(r"^```json\n(.*)\n```$", (TASKS / "README.md").read_text(), re.M)
    example, _ = mdqa.read_official(write(tmp_path / "f.jsonl.gz", [shown] * 2), 2)
    assert example.prompt(100).splitlines()[2].startswith("Document [1](Title: New mill)")
    assert example.gold.title == "Old mill"


def test_the_line_that_errors_show_is_read(tmp_path):
    (example, _) = mdqa.read_official(write(tmp_path / "f.jsonl.gz", [mdqa.LINE] * 2), 2)
    assert example.gold.text == "TEXT WITH THE ANSWER"


def test_a_file_that_changed_is_read_anew(utils, tmp_path):
    path = tmp_path / mdqa.official_name(10)
    for offset in (0, 100):
        write(path, [line(n + offset) for n in range(20)])
        rows, _ = utils.load(num_documents=10, position=0, data_dir=str(tmp_path))
        assert {int(row["question"].split()[-1]) // 100 for row in rows} == {offset // 100}


@pytest.mark.parametrize("num_documents", [1, "10", None])
def test_a_wrong_number_of_documents_is_refused(utils, num_documents):
    with pytest.raises(DataError, match="num_documents="):
        utils.load(num_documents=num_documents, position=0)


def test_the_committed_yaml_is_what_the_generator_writes():
    files = module("_generate").files()
    assert {path.name for path in TASKS.glob("*.yaml")} == files.keys()
    for name, text in files.items():
        assert (TASKS / name).read_text(encoding="utf-8") == text


@pytest.fixture(scope="module")
def loaded(task_manager):
    """A group of each kind and a tag, loaded by lm-eval."""
    manager = task_manager()
    return {name: manager.load([name]) for name in ("mdqa_pos", "mdqa_pos_steps", "mdqa_pos_searched")}


def test_groups_and_tags_hold_the_positions_they_promise(loaded):
    for name, positions in (
        ("mdqa_pos", mdqa.POSITIONS),
        ("mdqa_pos_steps", mdqa.STEPS),
        ("mdqa_pos_searched", (0, 50, 100)),
    ):
        tasks = loaded[name]["tasks"]
        assert sorted(tasks) == sorted(f"mdqa_pos_10_pos_{p:03}" for p in positions)
        for task in tasks.values():
            assert task.config.metadata["num_documents"] == 10
            assert task.config.metadata["position"] in positions


def test_a_task_generates_greedily_100_tokens_at_most_up_to_a_newline(loaded):
    task = loaded["mdqa_pos"]["tasks"]["mdqa_pos_10_pos_025"]
    assert task.config.generation_kwargs == {"until": ["\n"], "do_sample": False, "max_gen_toks": 100}
    assert task.OUTPUT_TYPE == "generate_until"


def test_what_the_model_is_sent_is_the_prompt_and_nothing_else(loaded):
    task = loaded["mdqa_pos"]["tasks"]["mdqa_pos_10_pos_025"]
    task.build_all_requests(limit=2)
    for instance in task.instances:
        question_id = instance.doc["question_id"]
        assert instance.args[0] == fiction.generate(question_id, 10).prompt(25)


def test_a_task_scores_the_first_line_against_every_answer(loaded):
    task = loaded["mdqa_pos"]["tasks"]["mdqa_pos_10_pos_025"]
    doc = {"answers": ["14 March 1712", "March 14, 1712"]}
    assert task.process_results(doc, [" It was March 14 1712."]) == {"best_subspan_em": 1.0}
    assert task.process_results(doc, ["1712\nMarch 14, 1712"]) == {"best_subspan_em": 0.0}


def test_source_checksum_and_split_seed_stand_in_the_tasks_metadata_and_version(loaded):
    task = loaded["mdqa_pos"]["tasks"]["mdqa_pos_10_pos_025"]
    dumped = json.loads(json.dumps(task.dump_config()["metadata"]))["source"]
    assert task.VERSION == "2 generated"
    assert dumped["kind"] == "generated"
    assert dumped["split"] == "held_out"
    assert dumped["split_seed"] == str(splits.SPLIT_SEED)
    assert len(dumped["sha256"]) == 64
    assert (dumped["total"], dumped["examples"]) == (fiction.POOL, 500)
