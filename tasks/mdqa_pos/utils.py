"""What the YAML beside this file names."""

import hashlib
import json
from functools import lru_cache

from lpes_eval import files
from lpes_eval.data import fiction, mdqa, splits
from lpes_eval.data.source import Source, asked, download, find, missing, other_sizes
from lpes_eval.errors import DataError
from lpes_eval.harness.task import BenchmarkTask  # noqa: F401
from lpes_eval.scoring.qa import process_results  # noqa: F401


def load(*, num_documents, position, split="held_out", search_seed=0, **metadata):
    """The examples of one split with the gold document at one position, and where they came from."""
    if not isinstance(num_documents, int) or num_documents < 2:
        raise DataError(f"num_documents={num_documents!r}: expected a whole number of documents, at least 2")
    wish = asked(metadata)
    if wish.kind == "generated":
        drawn = splits.split(fiction.POOL, search_seed)
        examples = [fiction.generate(i, num_documents) for i in drawn.indices(split)]
        name, location = "generated", f"lpes_eval.data.fiction, seed {fiction.SEED}"
        digest = hashlib.sha256(json.dumps([[e.prompt(0), e.answers] for e in examples]).encode()).hexdigest()
    else:
        path, name = _file(wish, num_documents)
        total, example, digest = _read(path, name, num_documents, path.stat().st_mtime_ns)
        drawn = splits.split(total, search_seed)
        examples = [example(i) for i in drawn.indices(split)]
        location = str(path)
    rows = [
        {
            "question_id": e.question_id,
            "question": e.question,
            "answers": list(e.answers),
            "gold_index": e.gold_index(position),
            "prompt": e.prompt(position),
        }
        for e in examples
    ]
    return rows, Source(wish.kind, name, location, digest, split, drawn.seed(split), drawn.total, len(rows))


def _file(wish, num_documents):
    """The file to read, and what to call the set that is made from it."""
    official = mdqa.official_name(num_documents)
    if wish.kind == "official":
        return download(mdqa.official_url(num_documents)), official.removesuffix(".jsonl.gz")
    if path := find(wish.folder, official, mdqa.subfolders(num_documents)):
        return path, official.removesuffix(".jsonl.gz")
    if path := find(wish.folder, mdqa.ORACLE, ("qa_data",)):
        return path, mdqa.DRAWN
    others = other_sizes(wish.folder, mdqa.OFFICIAL_NAMES, "num_documents", mdqa.SUBFOLDERS)
    raise missing(wish.folder, f"{official} (or {mdqa.ORACLE})", mdqa.official_url(num_documents), others)


@lru_cache(maxsize=2)
def _read(path, name, num_documents, modified):
    """How many examples a file has, a function that gives one, and the checksum; read once for all positions."""
    if name == mdqa.DRAWN:
        examples = mdqa.read_oracle(path)
        example = lru_cache(maxsize=None)(mdqa.drawn_distractors(examples, num_documents))
    else:
        examples = mdqa.read_official(path, num_documents)
        example = examples.__getitem__
    return len(examples), example, files.sha256(path)
