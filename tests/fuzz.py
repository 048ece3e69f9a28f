"""Damaged files for every parser: each is read, or refused in one sentence (UserError).

    python -m tests.fuzz                             # 1,000 inputs for each parser
    python -m tests.fuzz journal --inputs 100000     # for one
    python -m tests.fuzz journal --first 4711 --inputs 1

Input number n of a parser is the same at every run: a file as this package writes it, changed in its JSON (a value of
another type, a field that is gone, doubled or renamed) or in its bytes (some flipped, missing or doubled, an end torn
off). ``tests/test_fuzz.py`` reads some with every run of the tests.
"""

import argparse
import gzip
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from lpes_eval.errors import UserError
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

    return list(folder.iterdir()), read


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


def data(folder):
    from lpes_eval.data import kv, leval, mdqa, perplexity, zeroscrolls

    zero, review = zeroscrolls.LINE | {"output": "4%"}, leval.LINE | {"outputs": ["True [fact: False]"]}
    records, articles = partial(kv.read, num_keys=2), partial(mdqa.read, num_documents=2)
    other_record, other_article = kv.LINE | {"key": "KEY 2", "value": "VALUE 2"}, mdqa.LINE | {"question": "WHICH"}
    readers = {
        written(folder / "kv.jsonl.gz", kv.LINE, other_record): records,
        written(folder / "mdqa.jsonl", mdqa.LINE, other_article): articles,
        written(folder / "leval.jsonl", review): partial(leval.read, name="sci_fi"),
        written(folder / "zero.jsonl", zero, zero): partial(zeroscrolls.read, name="space_digest", split="held_out"),
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
    **{function.__name__: function for function in (factors, journal, data, router)},
    "results": partial(compared, pattern="results_*"),
    "samples": partial(compared, pattern="samples_*"),
    "baselines": partial(compared, pattern="baseline.json"),
}
"""Parser -> a function that fills an empty folder; it returns the files to damage, and what reads one of them."""


def run(name: str, inputs: int, first: int = 0) -> tuple[int, int, int]:
    """Read inputs ``first`` and on, and before them the undamaged files, which must not be refused.

    Returns:
        How many were read, refused and failed.
    """
    counted = [0, 0, 0]
    with tempfile.TemporaryDirectory() as folder:
        paths, read = PARSERS[name](Path(folder))
        whole = {path: path.read_bytes() for path in sorted(paths)}
        for path in whole:
            read(path)
        for number in range(first, first + inputs):
            rng = random.Random(f"{name} {number}")
            path = rng.choice(list(whole))
            path.write_bytes(damaged(whole[path], rng))
            try:
                read(path)
                counted[0] += 1
            except UserError as error:
                counted[1] += 1
                assert "\n" not in str(error)
            except Exception:
                counted[2] += 1
                print(f"{name}, input {number}: {traceback.format_exc()}", file=sys.stderr)
            for each, content in whole.items():
                each.write_bytes(content)
    return counted[0], counted[1], counted[2]


def main(argv=None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("parser", nargs="?", choices=PARSERS, help="default: all")
    flags.add_argument("--inputs", type=int, default=1000)
    flags.add_argument("--first", type=int, default=0, help="the number of the first input")
    args = flags.parse_args(argv)
    failed = 0
    for name in [args.parser] if args.parser else PARSERS:
        read, refused, wrong = run(name, args.inputs, args.first)
        failed += wrong
        print(f"{name:10} {read:,} read, {refused:,} refused, {wrong} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
