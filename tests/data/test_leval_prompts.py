"""L-Eval's prompts to the byte, its way of cutting, its files, and the tasks on a model of a few thousand weights."""

import json
from pathlib import Path

import pytest
import tiny_llama

from lpes_eval.data import leval
from lpes_eval.errors import DataError, PromptTooLong, UserError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "leval"
TASKS = Path(__file__).resolve().parents[2] / "tasks" / "leval"
needs_samples = pytest.mark.skipif(not SHARED.is_dir(), reason="the benchmark's own files are not there")

COURSERA_SYSTEM = (
    "Now you are given a very long document. Please follow the instruction based on this document. For multi-choice"
    " questions, there could be a sinlge correct option or multiple correct options. Please only provide the letter"
    " corresponding to the answer (like A or AB) when answering. "
)
EXAM_SYSTEM = (
    "Now you are given a very long document. Please follow the instruction based on this document. For multi-choice"
    " questions, there is only a sinlge correct option. Please only provide the letter corresponding to the answer"
    " (like A or B) when answering. For other questions, please directly give the concise and accurate answer. "
)
SCI_FI_SYSTEM = (
    'Now you are given a scientific fiction. I will ask you some questions and the answer should be "True" or "False".'
    " Notice that you should answer the question based on the evidence in the document instead of your background"
    " knowledge."
)
SYSTEMS = {"coursera": COURSERA_SYSTEM, "quality": EXAM_SYSTEM, "tpo": EXAM_SYSTEM, "sci_fi": SCI_FI_SYSTEM}
HEADER = (
    "A chat between a curious user and an artificial intelligence assistant.The assistant gives helpful, detailed, and"
    " polite answers to the user's questions."
)
DOC, QUESTION = "Zwei {Fragen}\n über «é» ", "Which one?\nA. {x}\nB. y"


@pytest.mark.parametrize("name", leval.NAMES)
def test_vicuna_prompt_to_the_byte(name):
    expected = HEADER + " USER: " + SYSTEMS[name] + "Document is as follows. " + DOC
    expected += " \nQuestion: " + QUESTION + " " + " \nAnswer:"
    assert leval.prompt(name, "vicuna", DOC, QUESTION) == leval.Prompt(expected)


@pytest.mark.parametrize("name", leval.NAMES)
def test_llama2_prompt_to_the_byte(name):
    expected = "[INST]" + "<<SYS>>\n" + SYSTEMS[name] + "\n<</SYS>>\n\n" + "Document is as follows. " + DOC
    expected += " \nQuestion: " + QUESTION + ".  Please directly give the answer without any additional output or "
    expected += "explanation " + "[/INST]" + "\nAnswer:"
    assert leval.prompt(name, "llama2", DOC, QUESTION) == leval.Prompt(expected)


@pytest.mark.parametrize("name", leval.NAMES)
def test_chat_prompt_to_the_byte(name):
    expected = (
        "Document is as follows. " + DOC + " Question: " + QUESTION + " \nPlease directly give answer without any "
    )
    expected += "additional output or explanation\n Answer: "
    assert leval.prompt(name, "chat", DOC, QUESTION) == leval.Prompt(expected, system=SYSTEMS[name])


@pytest.mark.parametrize(
    ("style", "ending"),
    [
        ("vicuna", "\nAnswer:"),
        ("llama2", "Please directly answer without any additional output or explanation. \nAnswer:"),
        ("chat", "\nPlease directly give answer without any additional output or explanation \nAnswer:"),
    ],
)
def test_second_question_of_sci_fi_is_about_the_real_world_to_the_byte(style, ending):
    story = "1. Time is a river, True or False? Answer this question based on the world described in the document."
    world = (
        "1. Time is a river, True or False? Answer this question based on the real-world knowledge and facts up until "
    )
    assert leval.fact_prompt(style, story) == leval.Prompt(world + "your last training" + ending)


def test_an_unknown_style_is_refused():
    with pytest.raises(DataError, match="vicuna, llama2, chat"):
        leval.prompt("tpo", "alpaca", DOC, QUESTION)


def cut_by_their_loop(document: str, max_length: int, num_tokens) -> str:
    """The benchmark's loop, which asks for the document's own tokens."""
    cnt = 0
    while num_tokens(document) > max_length:
        document = " ".join(document.split(" ")[: max_length - cnt])
        cnt += 250
    return document


@pytest.mark.parametrize("words", [10, 999, 1000, 1001, 1600, 5000])
@pytest.mark.parametrize("tokens_a_word", [1, 1.3, 2.2])
def test_documents_are_cut_by_the_benchmarks_own_loop(words, tokens_a_word):
    document = " ".join(f"w{i}" for i in range(words))

    def num_tokens(text):
        return int(len(text.split(" ")) * tokens_a_word)

    expected = cut_by_their_loop(document, 1000, num_tokens)
    assert leval.cut(document, 1000, lambda text: num_tokens(text) <= 1000) == expected


def test_a_document_that_cannot_be_cut_to_fit_is_none():
    assert leval.cut("one two three", 700, lambda text: False) is None


def write(path: Path, *lines) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


GOOD = {"input": "text", "instructions": ["q", "r"], "outputs": ["A", "B"], "source": "s", "evaluation": "exam"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken\n", "line 2: not JSON"),
        ({**GOOD, "input": None}, "document 2: 'input' is NoneType"),
        ({**GOOD, "outputs": ["A"]}, "document 2: 2 instructions but 1 outputs"),
        ({**GOOD, "instructions": ["q", 3]}, "document 2: 'instructions' is not a list of strings"),
        ({"input": "text", "outputs": []}, "line 2: the field 'instructions' is missing"),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_place(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        leval.read(write(tmp_path / "tpo.jsonl", GOOD, line))


def test_no_question_and_no_document_is_in_both_splits():
    for total in (7, 15):
        held, search = (set(leval.document_numbers(total, split)) for split in ("held_out", "search"))
        assert held
        assert search
        assert not held & search
        assert held | search == set(leval.document_numbers(total, "all")) == set(range(total))


def test_an_unknown_split_is_refused():
    with pytest.raises(DataError, match="held_out, search, all"):
        leval.document_numbers(15, "test")


@needs_samples
def test_published_numbers_of_documents_and_questions():
    sizes = {name: leval.read(SHARED / f"{name}.jsonl") for name in leval.NAMES}
    assert {n: (len(d), sum(len(x.instructions) for x in d)) for n, d in sizes.items()} == {
        "coursera": (15, 172),
        "quality": (15, 202),
        "tpo": (15, 269),
        "sci_fi": (7, 64),
    }


def test_yaml_is_what_its_generator_writes():
    import runpy

    files = runpy.run_path(str(TASKS / "_generate.py"))["files"]()
    assert {path.name: path.read_text() for path in TASKS.glob("*.yaml")} == files


# -- the tasks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The benchmark's repository in small: five documents, the first one long."""
    home = tmp_path_factory.mktemp("leval")
    for name in leval.NAMES:
        lines = [
            {
                "input": f"Document {d}. " + "the story goes on and on " * (300 if d == 0 else 3),
                "instructions": [f"Question {q} about {d}, {leval._IN_THE_STORY}" + " why" * (q * 9) for q in range(3)],
                "outputs": ["True [fact: False]" if name == "sci_fi" else "AC"] * 3,
                "evaluation": "exam",
            }
            for d in range(5)
        ]
        write(home / "LEval-data" / "Closed-ended-tasks" / f"{name}.jsonl", *lines)
    return home


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(tiny_llama.save(tmp_path_factory.mktemp("model"), 1024)), device="cpu", batch_size=2)


def evaluate(lm, folder, tasks, limit=None, **options):
    import lm_eval
    from lm_eval.tasks import TaskManager

    metadata = {"data_dir": str(folder), "split": "all", **options.pop("metadata", {})}
    return lm_eval.simple_evaluate(
        lm,
        tasks=tasks,
        limit=limit,
        # only our own tasks: indexing lm-eval's thousands takes longer than everything else here
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata),
        gen_kwargs={"max_gen_toks": 8},
        bootstrap_iters=0,
        **options,
    )


@pytest.fixture(scope="module")
def results(lm, folder):
    return evaluate(lm, folder, ["leval"])


def test_every_prompt_reaches_the_model_whole(results, lm):
    for samples in results["samples"].values():
        for sample in samples:
            for prompt, arguments in sample["arguments"]:
                assert len(lm.tok_encode(prompt)) <= lm.max_length - arguments["max_gen_toks"]
                assert prompt.endswith("\nAnswer:")


def test_a_long_document_is_cut_once_for_all_its_questions_and_short_ones_stay(results, folder):
    text = leval.read(folder / leval.SUBFOLDERS[0] / "tpo.jsonl")[0].text
    prompts = [sample["arguments"][0][0] for sample in results["samples"]["leval_tpo"][:3]]
    documents = {p.partition("Document is as follows. ")[2].partition(" \nQuestion: ")[0] for p in prompts}
    (document,) = documents
    assert text.startswith(document)
    assert (len(text.split(" ")) - len(document.split(" "))) > 250
    assert len(document.split(" ")) % 250 == (1024 - 8) % 250  # the first 1016 words, less 250 at a time
    short = results["samples"]["leval_tpo"][3]
    expected = leval.prompt(
        "tpo", "vicuna", "Document 1. " + "the story goes on and on " * 3, short["doc"]["instruction"]
    )
    assert short["arguments"][0][0] == expected.text


def test_rows_refer_to_their_document(results):
    docs = [sample["doc"] for sample in results["samples"]["leval_quality"]]
    assert [doc["question_id"] for doc in docs] == list(range(15))
    assert [doc["document"] for doc in docs] == [n for n in range(5) for _ in range(3)]
    assert not any("input" in doc for doc in docs)


def test_sci_fi_asks_twice_and_scores_both(results):
    for sample in results["samples"]["leval_sci_fi"]:
        (story, _), (world, _) = sample["arguments"]
        assert "Document is as follows." in story
        assert "Document is as follows." not in world
        assert world == leval.fact_prompt("vicuna", sample["doc"]["instruction"]).text
        assert sample["exact_match"] == (sample["loyalty"] + sample["fact"]) / 2


def test_the_results_say_where_the_questions_came_from(results, folder):
    source = results["configs"]["leval_tpo"]["metadata"]["source"]
    assert (source["kind"], source["split"], source["total"], source["examples"]) == ("folder", "all", 15, 15)
    assert source["location"] == str(folder / "LEval-data" / "Closed-ended-tasks" / "tpo.jsonl")
    assert len(source["sha256"]) == 64


def test_a_group_is_the_plain_mean_of_its_four_tasks(results):
    scores = [results["results"][f"leval_{name}"]["exact_match,none"] for name in leval.NAMES]
    assert results["results"]["leval"]["exact_match,none"] == pytest.approx(sum(scores) / 4)


def test_chat_template_gets_the_benchmarks_two_messages_and_counts(lm, folder):
    results = evaluate(lm, folder, ["leval_coursera", "leval_sci_fi"], limit=4, apply_chat_template=True)
    for name in ("coursera", "sci_fi"):
        for sample in results["samples"][f"leval_{name}"]:
            prompt = sample["arguments"][0][0]
            assert prompt.startswith(f"<system>{SYSTEMS[name].strip()}</system><user>Document is as follows. Document ")
            assert prompt.endswith("without any additional output or explanation\n Answer:</user><assistant>")
            assert len(lm.tok_encode(prompt)) <= 1024 - 8
    world = results["samples"]["leval_sci_fi"][0]["arguments"][1][0]
    assert world.startswith("<user>Question 0 about 0")


def test_the_larger_variant_allows_more(lm, folder):
    prompts = {}
    for task, tokens in (("leval_tpo", 600), ("leval_16k_tpo", 15872)):
        metadata = {"prompt_tokens": tokens} if task == "leval_tpo" else {}
        sample = evaluate(lm, folder, [task], limit=1, metadata=metadata)["samples"][task][0]
        prompts[task] = len(lm.tok_encode(sample["arguments"][0][0]))
    assert prompts["leval_tpo"] <= 600 < prompts["leval_16k_tpo"] <= 1016


def test_without_room_for_a_document_the_numbers_are_given(lm, folder):
    with pytest.raises(
        PromptTooLong, match=r"leval_tpo, document \d, without its text: \d+ prompt tokens, at most 100"
    ):
        evaluate(lm, folder, ["leval_tpo"], metadata={"prompt_tokens": 100})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"data_dir": None, "source": "generated"}, "no generated set"),
        ({"split": "test"}, "not a split of L-Eval"),
        ({"search_seed": "abc"}, "search_seed='abc' is not a whole number"),  # though every document is taken
    ],
)
def test_impossible_wishes_are_refused(lm, folder, metadata, message):
    with pytest.raises(UserError, match=message):
        evaluate(lm, folder, ["leval_tpo"], metadata=metadata)


def test_examples_before_the_question_are_refused(folder):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata={"data_dir": str(folder)})
    task = manager.load(["leval_tpo"])["tasks"]["leval_tpo"]
    doc = task.eval_docs[0]
    assert task.fewshot_context(doc, 0) == task.doc_to_text(doc)
    with pytest.raises(DataError, match="leval_tpo is asked without examples; drop --num_fewshot 2"):
        task.fewshot_context(doc, 2)


def test_a_missing_file_is_named_with_its_address(lm, tmp_path):
    with pytest.raises(
        DataError, match=r"tpo\.jsonl is not there; get it from https://raw.githubusercontent.com/OpenLMLab"
    ):
        evaluate(lm, tmp_path, ["leval_tpo"])


@needs_samples
def test_all_four_official_files_run(lm):
    results = evaluate(lm, SHARED.parent, ["leval"], limit=2, metadata={"split": "held_out"})
    assert all(len(samples) == 2 for samples in results["samples"].values())
