"""A small model with definite opinions, and small lm-eval tasks for it, made on the spot."""

import errno
import math
import os
import textwrap
from types import SimpleNamespace

import pytest

from lpes_eval import rope
from search import bench, ga
from search.report import pages

LAYERS = 3


@pytest.fixture(scope="session")
def toy_lm(tmp_path_factory):
    """An ``lpes`` model: a Llama with large random weights, so that factors change answers and ties do not occur."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from benchmarks.reference import tokenizer
    from lpes_eval.methods.lpes import LPES

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder, 1024)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.25,
        pad_token_id=tokenizer.PAD_ID,
        eos_token_id=tokenizer.END_ID,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    return LPES(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=5, device="cpu")


@pytest.fixture(scope="session")
def load(toy_lm, task_folder):
    """Loads tasks of ``task_folder``."""
    from search.tasks import load_tasks

    return lambda *names, **options: load_tasks(toy_lm, names, include_path=task_folder, **options)


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory):
    """Tasks as somebody else would write them: generated text by position, multiple choice, and an error rate."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "utils.py").write_text(
        textwrap.dedent(
            """
            from datasets import Dataset

            from lpes_eval.data import splits
            from lpes_eval.data.source import Source
            from lpes_eval.harness.segments import Segment
            from lpes_eval.harness.task import PositionTask

            WORDS = "red blue green black white brown pink grey".split()

            def load(**metadata):
                rows = []
                for i in range(12):
                    words = [WORDS[(i * 3 + k) % 8] + str(k) for k in range(5 + i % 3)]
                    rows.append({
                        "question_id": i,
                        "text": f"{' '.join(words)} number 0 is:",
                        "words": words,
                        "answer": "c" if i % 2 else "e",
                        "gold": i % 3,
                    })
                shown = [{**row, "text": row["text"].upper()} for row in rows]
                return {"test": Dataset.from_list(rows), "train": Dataset.from_list(shown)}

            def process_results(doc, results):
                shared = len(set(results[0]) & set("0123456789abcdef")) / 16
                luck = float(sum(map(ord, results[0])) % 2)
                return {"hits": shared, "misses": 1 - shared, "em": luck}  # em alone is known to be from 0 to 1

            def words(doc, results):
                return {"word_perplexity": (results[0], len(doc["words"]))}

            class Toy(PositionTask):
                METRIC = "hits"

                def load(self, split="held_out", search_seed=0, **metadata):
                    rows, seed = list(load()["test"]), splits.seed(split, search_seed)
                    rows = [rows[i] for i in splits.indices(12, split, search_seed)]
                    source = Source("generated", "toy", "here", "0", split, seed, 12, len(rows))
                    return rows, source

                def segments(self, doc, position):
                    words = " ".join(doc["words"])
                    return [Segment("question", f"{words} number {int(position) * len(doc['words']) // 101} is:")]

                def target(self, doc, position):
                    return doc["answer"]

                def score(self, doc, position, answer):
                    return process_results(doc, [answer])[self.METRIC]

            class Lucky(Toy):
                METRIC = "em"
            """
        )
    )
    text = """
        task: {name}
        custom_dataset: !function utils.load
        test_split: test
        fewshot_split: train
        output_type: generate_until
        doc_to_text: text
        doc_to_target: answer
        process_results: !function utils.process_results
        metric_list:
          - {{metric: hits, aggregation: mean, higher_is_better: true}}
          - {{metric: misses, aggregation: mean, higher_is_better: false}}
          - {{metric: em, aggregation: mean, higher_is_better: true}}
        generation_kwargs: {{until: ["b", "{stop}"], do_sample: false, max_gen_toks: {tokens}}}
        metadata: {metadata}
    """
    write = lambda name, content: (folder / f"{name}.yaml").write_text(textwrap.dedent(content))  # noqa: E731
    by_position = """
        task: {name}
        class: !function utils.{kind}
        test_split: test
        output_type: generate_until
        metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
        generation_kwargs: {{until: ["b", "7"], do_sample: false, max_gen_toks: 8}}
        metadata: {{version: 1, positions: [0, 50, 100]}}
    """
    write("toy", by_position.format(name="toy", kind="Toy", metric="hits"))
    write("toy_luck", by_position.format(name="toy_luck", kind="Lucky", metric="em"))
    write("toy_plain", text.format(name="toy_plain", stop="99", tokens=5, metadata="{version: 1}") + "    tag: toy_tag")
    write(
        "toy_choice",
        """
        task: toy_choice
        custom_dataset: !function utils.load
        test_split: test
        output_type: multiple_choice
        doc_to_text: text
        doc_to_choice: ["red", "blue", "green"]
        doc_to_target: gold
        metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
        metadata: {version: 1}
        """,
    )
    write(
        "words_toy",
        """
        task: words_toy
        custom_dataset: !function utils.load
        test_split: test
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: text
        process_results: !function utils.words
        metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
        metadata: {version: 1}
        """,
    )
    return str(folder)


@pytest.fixture
def disk(monkeypatch):
    """A disk with ``room`` for so many more writes: of one that does not fit, all but the end gets there."""
    disk, fsync = SimpleNamespace(room=math.inf), os.fsync

    def write(descriptor):
        disk.room -= 1
        if disk.room < 0:
            os.truncate(descriptor, os.fstat(descriptor).st_size - 20)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", write)
    return disk


@pytest.fixture
def command(toy_lm, task_folder, tmp_path, monkeypatch, capsys):
    """Runs the command on the toy model, without pictures, and returns its exit status and what it printed."""
    monkeypatch.setattr(bench, "load_model", lambda args, whole: toy_lm)
    monkeypatch.setattr(pages, "draw", lambda *_: None)  # the pictures take longer than the search

    def call(*flags, output=tmp_path / "out"):
        task = [] if "--tasks" in flags else ["--tasks", "toy"]
        status = ga.main([*flags, "--include_path", task_folder, "--output", str(output), *task])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    yield call
    rope.remove(toy_lm.model)
