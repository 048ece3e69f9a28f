"""Perplexity windows: the same scored tokens at every length, exact sizes, and the figure a forward pass gives."""

import math

import pytest
import torch

from lpes_eval.data import perplexity
from lpes_eval.errors import DataError, PromptTooLong, UserError

BOOK = " ".join(f"The story of the {n}th döcument goes on, and what is the question?\n" for n in range(150))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(perplexity, "STRIDE", 32)
    monkeypatch.setattr(perplexity, "WINDOWS", 3)


def cut(tokenizer, length):
    def encode_pair(context, continuation):
        whole, first = tokenizer(context + continuation)["input_ids"], tokenizer(context)["input_ids"]
        return first, whole[len(first) :]

    offsets = tokenizer(BOOK, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return perplexity.windows(BOOK, length, longest=900, offsets=offsets, encode_pair=encode_pair)


@pytest.fixture(scope="module")
def metaspace():
    """As Llama-2's SentencePiece: spaces are letters, one is put in front of every text, and so is ``<s>``."""
    from tokenizers import SentencePieceBPETokenizer, processors
    from transformers import PreTrainedTokenizerFast

    inner = SentencePieceBPETokenizer()
    inner.train_from_iterator([BOOK], vocab_size=80, special_tokens=["<unk>", "<s>"], show_progress=False)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner._tokenizer, bos_token="<s>")


@pytest.mark.parametrize("kind", ["tokenizer", "metaspace"])
def test_windows_have_the_length_asked_for_and_the_same_targets_at_every_length(request, kind):
    tokenizer = request.getfixturevalue(kind)
    found = {length: cut(tokenizer, length) for length in (64, 200, 513, 900)}
    for length, windows in found.items():
        assert len(windows) == 3
        for window, longest in zip(windows, found[900], strict=True):
            assert window.target == longest.target
            assert longest.context.endswith(window.context)
            assert window.context + window.target in BOOK
            assert len(tokenizer(window.context + window.target)["input_ids"]) == window.tokens
            assert length - 2 <= window.tokens <= length  # a cut inside a merge can cost a token, never add one
            assert abs(window.target_tokens - 32) <= 2
    for length in (32, 901):
        with pytest.raises(DataError, match="expected more than 32 and at most longest=900"):
            cut(tokenizer, length)


def test_a_start_that_swings_to_and_fro_ends_with_a_window_that_fits():
    def encode_pair(context, continuation):  # cutting at an odd place costs three tokens
        return range(len(context) + 3 * (len(context) % 2)), range(len(continuation))

    options = {"offsets": [(at, at + 1) for at in range(400)], "encode_pair": encode_pair}
    for length in (49, 50, 51, 52):
        for window in perplexity.windows("x" * 400, length, longest=200, **options):
            assert window.tokens == sum(map(len, encode_pair(window.context, window.target)))
            assert length - 4 <= window.tokens <= length


@pytest.mark.parametrize(
    ("total", "ends"), [(899, []), (900, [900]), (931, [900]), (932, [900, 932]), (1900, [900, 1400, 1900])]
)
def test_scored_spans_are_spread_over_the_text_and_do_not_overlap(total, ends):
    assert perplexity.target_ends(total, longest=900) == ends


def test_texts_come_from_files_folders_and_pg19s_parquet_file(tmp_path, write):
    import pyarrow
    from pyarrow import parquet

    for name in ("b", "a"):
        write(tmp_path / f"{name}.txt", f"text {name}")
    a, b = (perplexity.Text(f"{name}.txt", f"text {name}\n") for name in "ab")
    assert perplexity.read(tmp_path) == [a, b]
    assert perplexity.read(tmp_path / "a.txt") == [a]
    lines = write(tmp_path / "lines.jsonl.gz", {"text": "one"}, {"text": "two"})
    assert [text.text for text in perplexity.read(lines)] == ["one", "two"]
    table = pyarrow.table({"short_book_title": ["Emma"], "publication_date": [1815], "url": ["-"], "text": ["I"]})
    parquet.write_table(table, tmp_path / "test.parquet")
    assert perplexity.read(tmp_path / "test.parquet") == [perplexity.Text("Emma", "I")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", b"caf\xe9", "cannot be read as UTF-8 text"),
        ("nothing", None, "no text"),
        ("empty.jsonl", b"", "no text"),
        ("test.parquet", b"broken", "cannot be read as .* PG-19"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: {message}"):
        perplexity.read(tmp_path / name)


def test_a_text_is_in_one_split_only_and_few_texts_are_all_held_out():
    held, search = (set(perplexity.text_numbers(100, split)) for split in ("held_out", "search"))
    assert not held & search
    assert held | search == set(range(100)) == set(perplexity.text_numbers(100, "all"))
    assert perplexity.text_numbers(4, "held_out") == [0, 1, 2, 3]
    with pytest.raises(DataError, match="too few"):
        perplexity.text_numbers(4, "search")


@pytest.fixture
def run(tmp_path, evaluate):
    def evaluated(lm, tasks, texts=(BOOK,), **metadata):
        for number, content in enumerate(texts):
            (tmp_path / f"{number}.txt").write_text(content)
        return evaluate(lm, tasks, **{"data_dir": str(tmp_path), "longest": 2048, **metadata})

    return evaluated


def by_forward_pass(lm, arguments):
    """Mean negative log-likelihood of the targets, from the model's logits at once."""
    total, tokens = 0.0, 0
    for context, target in arguments:
        ids = torch.tensor([lm.tokenizer(context + target)["input_ids"]])
        n = ids.shape[1] - len(lm.tokenizer(context.rstrip())["input_ids"])  # a space belongs to the next word
        with torch.no_grad():
            logits = lm.model(ids[:, :-1]).logits[0, -n:]  # dynamic frequencies depend on how many tokens are fed
        total += torch.nn.functional.cross_entropy(logits, ids[0, -n:], reduction="sum").item()
        tokens += n
    return total / tokens


def test_task_gives_the_perplexity_of_a_forward_pass_beyond_the_trained_window(toy, run):
    lm = toy(256, max_length=2048)
    results = run(lm, ["lpes_ppl_001k", "lpes_ppl_002k"], texts=(BOOK, BOOK[::-1], "short"))
    for name, samples in results["samples"].items():
        assert [sample["doc"]["name"] for sample in samples] == ["0.txt", "1.txt"]  # the short one is left out
        pairs = [pair for sample in samples for pair in sample["arguments"]]
        assert len(pairs) == 6  # three windows of each
        assert set(results["higher_is_better"][name].values()) == {False}
        length = 1024 * int(name[-4:-1])
        assert all(length - 2 <= len(lm.tokenizer(a + b)["input_ids"]) <= length for a, b in pairs)
        expected = by_forward_pass(lm, pairs)  # every token weighs alike
        assert results["results"][name]["token_perplexity,none"] == pytest.approx(math.exp(expected), rel=1e-5)
        assert samples[0]["nll"] == pytest.approx(by_forward_pass(lm, samples[0]["arguments"]), rel=1e-5)
    targets = [[p[1] for s in results["samples"][n] for p in s["arguments"]] for n in results["samples"]]
    assert targets[0] == targets[1]


@pytest.mark.parametrize(
    ("window", "texts", "message"),
    [
        (256, (BOOK,), r"windows of 1024 tokens, but max_length is 256 .* add max_length=2048"),
        (2048, ("short",), "1 texts have fewer than longest=2048 tokens, and none"),
    ],
)
def test_windows_that_lm_eval_would_cut_and_texts_that_are_too_short_are_refused(toy, run, window, texts, message):
    with pytest.raises(PromptTooLong, match=message):
        run(toy(256, max_length=window), ["lpes_ppl_001k"], texts)


@pytest.mark.parametrize(
    ("group", "window"),
    [("lpes_ppl", 4096), ("lpes_ppl_window_2k", 2048), ("lpes_ppl_window_8k", 8192), ("lpes_ppl_window_32k", 32768)],
)
def test_a_groups_lengths_share_their_longest_and_reach_four_times_the_window(tmp_path, task_manager, group, window):
    (tmp_path / "0.txt").write_text(BOOK)
    members = task_manager(data_dir=str(tmp_path)).load([group])["tasks"]
    lengths = {name: task.config.metadata["length"] for name, task in members.items()}
    assert list(lengths.values()) == [1024 * 2**k for k in range(window.bit_length() - 8)]
    assert list(lengths) == [f"lpes_ppl_{length // 1024:03}k" for length in lengths.values()]
    assert {task.config.metadata["longest"] for task in members.values()} == {4 * window}
    with pytest.raises(UserError, match=r"lpes_ppl_001k: .* prompts that are too long would silently be truncated"):
        members["lpes_ppl_001k"].build_all_requests()
