"""Damaged files for every parser: each is read, or refused in one sentence (UserError).

A file as this package writes it is changed in its JSON (a value of another type, a field that is gone, doubled or
renamed) or in its bytes (some flipped, missing or doubled, an end torn off); input n of a parser is always the same.
"""

import gzip
import json
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from lpes_eval import push, show
from lpes_eval.errors import UserError
from lpes_eval.report import watch
from runs import write_run

VALUES = (None, True, 0, -1, 1.5, 1e308, "", "0", "\x1b[31m\n# ![](x)", [], {}, [None], {"": {}}, float("nan"))


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A file's bytes, changed at one or two places."""
    for _ in range(rng.choice((1, 1, 2))):
        data = (in_json if rng.random() < 0.6 else in_bytes)(data, rng)
    return data


def in_json(data: bytes, rng: random.Random) -> bytes:
    """The file, or one of its lines, with another value somewhere; bytes that are no JSON are changed as bytes."""
    lines = data.split(b"\n") if data.startswith(b'{"') and b"\n{" in data else [data]
    at = rng.randrange(len(lines))
    try:
        value = json.loads(lines[at])
        places = list(places_in(value))
        holder, key = rng.choice(places)
    except (ValueError, IndexError):
        return in_bytes(data, rng)
    kind = rng.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, name = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[name]))
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice(("", "x", "acc@50", key.upper()))] = holder.pop(key)
    else:
        holder[key] = rng.choice(VALUES)
    lines[at] = json.dumps(value).encode()
    return b"\n".join(lines)


def places_in(value) -> Iterator[tuple]:
    """Every place of a JSON value, as its holder and its key or number there."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places_in(value[key])


def in_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes that are flipped, cut out or doubled, or an end that is torn off."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    kind = rng.randrange(4)
    if kind == 0 and a < len(data):
        return data[:a] + bytes([data[a] ^ (1 << rng.randrange(8))]) + data[a + 1 :]
    if kind == 1:
        return data[:a] + data[b:]
    if kind == 2:
        return data[:b] + data[a:]
    return data[:a]


# -- what reads them ---------------------------------------------------------------------------------------------------


def written(path: Path, *values) -> Path:
    lines = "\n".join(json.dumps(value) for value in values).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines + b"\n")
    return path


def factors(folder):
    from lpes_eval.factors import Factors, load

    origin = {"model": {"name": "m", "revision": "r"}, "task": "t", "fitness": 0.5, "seed": 1, "packages": {"a": "1"}}
    points = [(0, 1.0), (9, 1.5), (31, 1.2)]
    Factors.from_list([1.0, 1.5, 1.2], origin=origin).save(folder / "list.json")
    Factors.from_curve("bezier", points, num_layers=32, unscaled_layers=(0,)).save(folder / "bezier.json")
    Factors.from_uniform(1.5, num_layers=4).save(folder / "uniform.json")

    def read(path):
        found = load(path)
        depth = found.num_layers or len(found.factors or ()) or 32
        assert all(0.999e-3 < s < 1.001e6 for s in found.per_layer(depth))
        assert Factors.from_dict(found.to_dict()) == found
        show.run(Namespace(file=str(path), layers=depth))
        if found.model[0]:
            push.card(found, "me/mine")

    return list(folder.iterdir()), read


def carried(folder):
    """Factors in a model's ``config.json``, under an output of a command beside it."""
    from lpes_eval.factors import FIELD, Factors, carried

    for name, value in (("list", [1.0, 1.5]), ("file", Factors.from_list([1.25, 1.5]).to_dict())):
        written(folder / f"{name}.json", {"num_hidden_layers": 2, FIELD: value})

    def read(path):
        try:
            config = json.loads(path.read_bytes())
        except ValueError:
            return  # transformers says so
        found = carried(SimpleNamespace(**config)) if isinstance(config, dict) else None
        assert found is None or all(0.999e-3 < s < 1.001e6 for s in found.per_layer(2))

    return list(folder.iterdir()), read


def outputs(folder):
    """What a command would write over."""
    from lpes_eval.files import marker, write_output

    path, mark = folder / "page.md", marker("lpes-eval compare")
    path.write_text(f"<!-- {mark} -->\n\n## lpes-eval compare\n")

    def write(path):
        before = path.read_bytes()
        try:
            write_output(path, "new", mark)
        finally:
            assert path.read_bytes() == (b"new" if mark.encode() in before or not before else before)

    return [path], write


def journal(folder):
    from search.journal import Journal

    settings = {"search": {"seed": 0, "start": [1.0]}, "packages": {"torch": "2"}}
    with Journal(folder, settings) as kept:
        for n in range(3):
            kept.record(f"k{n}", {"generation": n, "fitness": n / 3, "scores": {"a": n / 3}, "examples": {"a": [1]}})

    def read(path):
        with Journal(folder, settings) as found:
            assert all(isinstance(entry.fitness, float) for entry in found.entries.values())

    return [folder / "journal.jsonl"], read


def watched(folder):
    """A folder of a search, as ``lpes-eval watch`` shows it."""
    journal(folder)
    written(folder / "report.json", {"finished": True})

    def read(path):
        with patch("time.sleep", side_effect=KeyboardInterrupt):  # one look
            watch.run(Namespace(folder=path.parent))

    return list(folder.glob("*.json*")), read


def data(folder):
    from lpes_eval.data import kv, leval, mdqa, perplexity

    review = leval.LINE | {"outputs": ["True [fact: False]"]}
    records, articles = partial(kv.read, num_keys=2), partial(mdqa.read, num_documents=2)
    other_record, other_article = kv.LINE | {"key": "KEY 2", "value": "VALUE 2"}, mdqa.LINE | {"question": "WHICH"}
    readers = {
        written(folder / "kv.jsonl.gz", kv.LINE, other_record): records,
        written(folder / "mdqa.jsonl", mdqa.LINE, other_article): articles,
        written(folder / "leval.jsonl", review): partial(leval.read, name="sci_fi"),
        written(folder / "text.jsonl.gz", {"text": "TEXT"}): perplexity.read,
    }
    return list(readers), lambda path: readers[path](path)


def compared(folder: Path, pattern: str):
    """A run and its baseline, of which the files of this pattern are damaged."""
    from lpes_eval.compare import baseline, command, gate, regress, results
    from lpes_eval.compare.comparison import compare

    data = {"source": {"kind": "generated"}}
    path = write_run(folder, {0: [1.0, 0.0] * 5, 100: [1.0, 0.5] * 5}, metadata=data)
    other = results.read(write_run(folder / "other", {0: [0.0, 1.0] * 5, 100: [1.0, 0.4] * 5}, metadata=data))
    baseline.save(results.read(path), folder / "baseline.json")

    def read(damaged_file):
        now, committed = results.read(path), baseline.load(folder / "baseline.json")
        verdict = gate.regress(committed, now, gate.Options(max_drop=0.1))
        regress.junit(verdict), regress.page_of(verdict).to_text()
        if damaged_file.name != "baseline.json":
            command.page_of(compare(other, now), with_flips=True).to_markdown()

    return list(folder.glob(pattern)), read


def router(folder):
    from lpes_eval.methods.moice import router as module

    made = module.Router(module.RouterConfig(1, 2, 2, bases=(10000.0, 20000.0), top_k=1, training={"steps": 1}))
    module.write(made, folder / module.FILE)
    return [folder / module.FILE], lambda path: module.read(path)


PARSERS: dict[str, Callable[[Path], tuple[list[Path], Callable[[Path], None]]]] = {
    **{function.__name__: function for function in (factors, carried, journal, watched, data, router, outputs)},
    "results": partial(compared, pattern="results_*"),
    "samples": partial(compared, pattern="samples_*"),
    "baselines": partial(compared, pattern="baseline.json"),
}
"""Parser -> a function that fills an empty folder; it returns the files to damage, and what reads one of them."""


@pytest.mark.parametrize("name", PARSERS)
def test_no_damaged_file_ends_in_a_traceback(name, tmp_path):
    paths, read = PARSERS[name](tmp_path)
    whole = {path: path.read_bytes() for path in sorted(paths)}
    for path in whole:
        read(path)
    for number in range(200):
        rng = random.Random(f"{name} {number}")
        path = rng.choice(list(whole))
        path.write_bytes(damaged(whole[path], rng))
        try:
            read(path)
        except UserError as error:
            assert "\n" not in str(error)
        for each, content in whole.items():
            each.write_bytes(content)
