"""What the YAML beside this file names."""

import hashlib
import json

from lpes_eval import files
from lpes_eval.data import kv, splits
from lpes_eval.data.source import Source, asked, download, find, missing, other_sizes
from lpes_eval.errors import DataError
from lpes_eval.harness.task import BenchmarkTask  # noqa: F401
from lpes_eval.scoring.kv import process_results  # noqa: F401


def load(*, num_keys, position, split="held_out", search_seed=0, **metadata):
    """The examples of one split with the gold record at one position, and where they came from.

    Unlike other benchmarks this one is generated for every model, unless its files are asked for: UUIDs are UUIDs.
    """
    if not isinstance(num_keys, int) or num_keys < 2:
        raise DataError(f"num_keys={num_keys!r}: expected a whole number of key-value pairs, at least 2")
    wish = asked({"source": metadata.get("source"), "data_dir": metadata.get("data_dir")})
    if wish.kind == "generated":
        drawn = splits.split(kv.POOL, search_seed)
        examples = [kv.generate(i, num_keys, position) for i in drawn.indices(split)]
        name, location = f"{num_keys} pairs", f"lpes_eval.data.kv, seed {kv.SEED}"
        digest = hashlib.sha256(json.dumps([e.prompt() for e in examples]).encode()).hexdigest()
    else:
        path = _official(wish, num_keys)
        questions = kv.read_official(path, num_keys)
        drawn = splits.split(len(questions), search_seed)
        examples = [questions[i].at(position) for i in drawn.indices(split)]
        name = kv.official_name(num_keys).removesuffix(".jsonl.gz")
        location, digest = str(path), files.sha256(path)
    rows = [{"question_id": e.question_id, "key": e.key, "value": e.value, "prompt": e.prompt()} for e in examples]
    return rows, Source(wish.kind, name, location, digest, split, drawn.seed(split), drawn.total, len(rows))


def _official(wish, num_keys):
    if wish.kind == "official":
        return download(kv.official_url(num_keys))
    name, subfolders = kv.official_name(num_keys), ("kv_retrieval_data",)
    path = find(wish.folder, name, subfolders)
    if path is None:
        others = other_sizes(wish.folder, kv.OFFICIAL_NAMES, "num_keys", subfolders)
        try:
            raise missing(wish.folder, name, kv.official_url(num_keys), others)
        except kv.NoSuchFile as reason:
            raise DataError(f"{wish.folder}: {name} is not there{others}, and {reason}") from None
    return path
