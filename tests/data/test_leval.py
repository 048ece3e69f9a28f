"""L-Eval: prompts to the byte, the authors' cutting and answer extraction, files, and the tasks on a tiny model."""

import hashlib
import re

import pytest

from lpes_eval.data import leval
from lpes_eval.harness.segments import join


def test_prompts_are_the_benchmarks_to_the_byte():
    """The digest was taken once, of the prompts that the benchmark's own scripts send."""
    document, question = "Zwei {Fragen}\n über «é» ", "Which one? based on the world described in the document."
    sent = []
    for name in leval.NAMES:
        for style in leval.STYLES:
            segments, system = leval.prompt(name, style, document, question)
            assert [part.label for part in segments] == ["instruction", "document", "question"]
            assert segments[1].text == document
            sent += [system, join(segments), leval.fact_prompt(style, question)]
    digest = "0c24f9c834ce27ba172a48fefe176cc6343d8160711e8cff3e2b59382f58067a"
    assert hashlib.sha256("\n".join(sent).encode()).hexdigest() == digest


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
    def num_tokens(text):
        return int(len(text.split(" ")) * tokens_a_word)

    document = " ".join(f"w{i}" for i in range(words))
    found = leval.cut(document, 1000, lambda text: num_tokens(text) <= 1000)
    assert found == cut_by_their_loop(document, 1000, num_tokens)


def test_letters_are_read_as_the_authors_script_reads_them():
    for text, one, several in (  # what auto_eval.py's process_output_mc returns for one letter, and for several
        ("\n", "None", "None"),  # a blank answer is no guess
        ("no letter here", "A", "A"),  # a letterless one is counted as a guess of A
        ("The Cat sat", "C", "C"),  # letters are found anywhere, even inside a word
        ("BC", "BC", "BC"),  # contained in "ABCD", so returned as it is, even where one letter is asked for
        ("AC", "A", "AC"),
        ("DCBA", "D", "ABCD"),
        ("Answer: (B)", "A", "AB"),
        ("B C D", "B", "BC"),  # the last letter has nothing behind it
        ("B, C and D.", "B", "BCD"),
        ("ACQuestion 3. B. D.", "A", "AC"),  # leading letters are taken before the text is cut at "Question"
        ("xCABx", "C", "CAB"),  # the first run anywhere stays in its order, not sorted
        ("xCAB. D", "C", "B"),
        ("Both B and D are correct", "B", "BD"),
        ("Βω", "A", "A"),  # Greek
        ("B Question C.", "B", "B"),
    ):
        assert (leval.predicted_letters(text), leval.predicted_letters(text, several=True)) == (one, several), text


def test_the_reference_is_read_from_its_first_word():
    read = {"B": "B", "ACD": "ACD", "(B) It was a planet. A": "B", "B, C": "B", "none": "A", " D ": "D"}
    assert {output: leval.reference_letters(output) for output in read} == read


def test_exact_match_is_the_authors():
    for prediction, reference, score in (  # em.py's exact_match_score
        ("a A", "A", 1.0),  # articles and punctuation go, case stays
        ("(B).", "B", 1.0),
        ("the", "A", 0.25),  # nothing is a part of everything
        ("AC", "ABC", 0.25),  # some of the correct ones
        ("ABD", "ABC", 0.0),  # one wrong letter
        ("None", "ABC", 0.0),  # a blank answer
        ("CAB", "ABC", 0.25),  # all of them, in another order: not the same string
        ("A C", "AC", 0.0),
        ("un t r u e", "TRUE", 1.0),  # contained, spaces and case aside
        ("1e1", "10", 1.0),
        ("12", "1", 0.0),  # two numbers are compared as numbers
        ("", "..", 1.0),
    ):
        assert leval.exact_match(prediction, reference) == score, (prediction, reference)


def test_sci_fi_has_two_judgements():
    for loyalty, fact, output, scores in (
        ("True", "False", "True [fact: False]", (1.0, 1.0)),
        ("False", "False", "True [fact: False]", (0.0, 1.0)),
        ("\nThe statement is true.", "FALSE, since", "True [fact: False]", (1.0, 1.0)),
        ("untrue", "no", "True [fact: False]", (1.0, 0.0)),  # "true" is found inside a word; no verdict is an error
        ("true/false", "x", "True [fact: True]", (1.0, 0.0)),  # true is looked for before false in each word
        ("True [fact: True]", "False", "True [fact: False]", (1.0, 0.0)),  # the first mark is the one that is read
    ):
        assert leval.judgement_scores(loyalty, fact, output) == scores, loyalty


WINDOW, NEW_TOKENS = 1024, 8
LONG = "Document 0. " + "the story goes on and on " * 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write):
    """The benchmark's repository in small: three documents, the first one long."""
    home = tmp_path_factory.mktemp("leval")
    asked = "Question {} about {}, based on the world described in the document."
    for name in leval.NAMES:
        output = "True [fact: False]" if name == "sci_fi" else "AC"
        lines = [
            {
                "input": f"Document {d}. " + "the story goes on and on " * 3 if d else LONG,
                "instructions": [asked.format(q, d) + " why" * (q * 9) for q in range(3)],
                "outputs": [output] * 3,
            }
            for d in range(3)
        ]
        write(home / "LEval-data" / "Closed-ended-tasks" / f"{name}.jsonl", *lines)
    return home


@pytest.fixture(scope="module")
def lm(toy):
    return toy(WINDOW)


@pytest.fixture(scope="module")
def run(evaluate, lm, folder):
    def evaluated(tasks, limit=None, options=(), **metadata):
        return evaluate(lm, tasks, limit, options, **{"data_dir": str(folder), "split": "all", **metadata})

    return evaluated


@pytest.fixture(scope="module")
def results(run):
    return run(["lpes_leval"])


def test_all_four_are_asked_whole_and_a_group_is_their_plain_mean(results, lm, folder):
    assert list(results["samples"]) == [f"lpes_leval_{name}" for name in leval.NAMES]
    for samples in results["samples"].values():
        assert [sample["doc"]["question_id"] for sample in samples] == list(range(9))
        assert [sample["doc"]["document"] for sample in samples] == [n for n in range(3) for _ in range(3)]
        assert not any("input" in sample["doc"] for sample in samples)
        for prompt, arguments in (request for sample in samples for request in sample["arguments"]):
            assert len(lm.tok_encode(prompt)) <= lm.max_length - arguments["max_gen_toks"]
            assert prompt.endswith("\nAnswer:")
    for sample in results["samples"]["lpes_leval_sci_fi"]:
        (story, _), (world, _) = sample["arguments"]
        assert "Document is as follows." in story
        assert world == leval.fact_prompt("vicuna", sample["doc"]["instruction"])
        assert sample["exact_match"] == (sample["loyalty"] + sample["fact"]) / 2
    scores = [results["results"][f"lpes_leval_{name}"]["exact_match,none"] for name in leval.NAMES]
    assert results["results"]["lpes_leval"]["exact_match,none"] == pytest.approx(sum(scores) / 4)
    source = results["configs"]["lpes_leval_tpo"]["metadata"]["source"]
    assert (source["kind"], source["split"], source["total"], source["examples"]) == ("folder", "all", 9, 9)
    assert source["location"] == str(folder / "LEval-data" / "Closed-ended-tasks" / "tpo.jsonl")
    assert len(source["sha256"]) == 64


def test_a_long_document_is_cut_once_for_all_its_questions_and_short_ones_stay(results):
    prompts = [sample["arguments"][0][0] for sample in results["samples"]["lpes_leval_tpo"][:4]]
    first, *same, short = [re.search("Document is as follows. (.*) \nQuestion: ", prompt)[1] for prompt in prompts]
    assert same == [first, first]
    assert LONG.startswith(first)
    assert (len(LONG.split(" ")) - len(first.split(" "))) > 250
    assert len(first.split(" ")) % 250 == (WINDOW - NEW_TOKENS) % 250  # so many words, less 250 at a time
    assert short == "Document 1. " + "the story goes on and on " * 3


def test_chat_template_gets_the_benchmarks_two_messages_and_counts(run, lm):
    results = run(["lpes_leval_coursera", "lpes_leval_sci_fi"], 4, {"apply_chat_template": True})
    for name in ("coursera", "sci_fi"):
        for sample in results["samples"][f"lpes_leval_{name}"]:
            prompt, system = sample["arguments"][0][0], leval.SYSTEM[name].strip()
            assert prompt.startswith(f"<system>{system}</system><user>Document is as follows. Document ")
            assert prompt.endswith("without any additional output or explanation\n Answer:</user><assistant>")
            assert len(lm.tok_encode(prompt)) <= WINDOW - NEW_TOKENS
    world = results["samples"]["lpes_leval_sci_fi"][0]["arguments"][1][0]
    assert world.startswith("<user>Question 0 about 0")


def test_the_official_files_have_the_published_sizes_and_run(run, shared):
    folder = shared("leval")
    sizes = {name: leval.read(folder / f"{name}.jsonl", name) for name in leval.NAMES}
    counted = {name: (len(found), sum(len(one["instructions"]) for one in found)) for name, found in sizes.items()}
    assert counted == {"coursera": (15, 172), "quality": (15, 202), "tpo": (15, 269), "sci_fi": (7, 64)}
    results = run(["lpes_leval"], limit=2, split="held_out", data_dir=str(folder.parent))
    assert all(len(samples) == 2 for samples in results["samples"].values())


def test_only_coursera_takes_several_letters(task_manager, folder):
    tasks = task_manager(data_dir=str(folder), split="all").load(["lpes_leval_multiple_choice"])["tasks"]
    scores = {name: task.process_results({"output": "AC"}, ["A. and C."]) for name, task in tasks.items()}
    expected = {"lpes_leval_coursera": 1.0, "lpes_leval_quality": 0.25, "lpes_leval_tpo": 0.25}
    assert scores == {name: {"exact_match": score} for name, score in expected.items()}
