"""Damaged files for every parser: each is read, or refused in one sentence (UserError) within a second.

    python -m tests.fuzz                             # 1,000 inputs for each parser
    python -m tests.fuzz journal --inputs 100000     # for one
    python -m tests.fuzz journal --first 4711 --inputs 1

Input number n of a parser is the same at every run: a file as this package writes it, changed at one to four places,
in its JSON (a value of another type, a field that is gone, doubled or put elsewhere) or in its bytes. What a search
keeps must be refused or read as it was written. ``tests/test_fuzz.py`` reads some with every run of the tests.
"""

import argparse
import gzip
import json
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parent))

import jsonschema

from lpes_eval.errors import UserError
from lpes_eval.files import shown
from runs import write_run

SECONDS = 1.0
"""Of this process' own time, for an answer; 5 for an archive."""
VALUES = (
    None, True, 0, -1, 1.5, 10**400, 1e308, -0.0, "", "0", "1_5", "x" * 10_000, "\x1b[31m\n# ![](x)", "\u0000", "../x",
    [], {}, [None], {"": {}}, [[[[0]]]], json.loads("[" * 90 + "]" * 90), {"name": []}, "NaN", list(range(1000)),
)  # fmt: skip
TOKENS = (b"NaN", b"Infinity", b'"\\ud800"', b"[" * 50_000, b"9" * 5000, b"\xff\xfe", b"\n", b"{}", b'"a":1,', b"\x00")


# -- how files are damaged ---------------------------------------------------------------------------------------------


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A file's bytes, changed at one to four places; of an archive, before or after it is packed."""
    with suppress(Exception):  # of one that is damaged already
        if data[:2] == b"\x1f\x8b" and rng.random() < 0.7:
            return gzip.compress(damaged(gzip.decompress(data), rng), 1)
        if data[2:9] == bytes(6) + b"{" and rng.random() < 0.7:  # safetensors: a length, JSON with JSON in it, numbers
            return in_header(data, rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        change = in_json if rng.random() < 0.6 else in_bytes
        data = change(data, rng)
    return data


def in_json(data: bytes, rng: random.Random) -> bytes:
    """The file, or one of its lines, with another value somewhere; bytes that are no JSON are changed as bytes."""
    lines = data.split(b"\n") if data.startswith(b'{"') and b"\n{" in data else [data]
    at = rng.randrange(len(lines))
    try:
        value = json.loads(lines[at])
        places = list(places_in(value))
        holder, key = rng.choice(places)
    except (ValueError, RecursionError, IndexError):
        return in_bytes(data, rng)
    kind = rng.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, name = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[name]))
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice(("", "x", "acc@50", "a\nb", key.upper()))] = holder.pop(key)
    elif kind == 3 and isinstance(holder[key], int | float | str):
        holder[key] = nearby(holder[key], rng)
    else:
        holder[key] = rng.choice(VALUES)
    lines[at] = json.dumps(value).encode()
    return b"\n".join(lines)


def in_header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header, whose length is right."""
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    [(name, text)] = header["__metadata__"].items()
    header["__metadata__"][name] = in_json(text.encode(), rng).decode(errors="replace")
    packed = json.dumps(header).encode() if rng.random() < 0.6 else in_json(data[8:size], rng)
    return len(packed).to_bytes(8, "little") + packed + data[size:]


def places_in(value) -> Iterator[tuple]:
    """Every place of a JSON value, as its holder and its key or number there."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places_in(value[key])


def nearby(value, rng: random.Random):
    """A value of the same type, or nearly."""
    if isinstance(value, str):
        return rng.choice((value[:-1], value * 2, value + "\n", value.swapcase(), value[::-1], [value], f" {value}"))
    return rng.choice((-value, value + 1, value // 3, value * 10**9, value != 0, shown(value, 99), [value]))


def in_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes that are flipped, cut out, doubled or put in, or an end that is torn off."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    b = min(b, a + rng.choice((1, 1, 8, 64, 10**6)))
    kind = rng.randrange(5)
    if kind == 0 and a < len(data):
        return data[:a] + bytes([data[a] ^ (1 << rng.randrange(8))]) + data[a + 1 :]
    if kind == 1:
        return data[:a] + data[b:]
    if kind == 2:
        return data[:b] + data[a:]
    if kind == 3:
        return data[:a] + rng.choice(TOKENS) + data[a:]
    return data[:a]


# -- what reads them ---------------------------------------------------------------------------------------------------


def written(path: Path, *values) -> Path:
    lines = "\n".join(json.dumps(value) for value in values).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines + b"\n")
    return path


def factors(folder):
    from lpes_eval.factors import Factors, load

    origin = {"model": {"name": "m", "revision": "r"}, "task": "t", "fitness": 0.5, "seed": 1, "packages": {"a": "1"}}
    for name, made in {
        "list": Factors.from_list([1.0, 1.5, 1.2], origin=origin),
        "bezier": Factors.from_curve("bezier", [(0, 1.0), (9, 1.5), (31, 1.2)], num_layers=32, unscaled_layers=(0,)),
        "step": Factors.from_curve("step", [(0, 1.0), (4, 1.5)]),
        "uniform": Factors.from_uniform(1.5, num_layers=4),
    }.items():
        made.save(folder / f"{name}.json")
    schema = json.loads(resources.files("lpes_eval").joinpath("factors.schema.json").read_text())

    def read(path):
        found = load(path)
        depth = found.num_layers or len(found.factors or ()) or 32
        assert all(0.999e-3 < s < 1.001e6 for s in found.per_layer(depth))
        jsonschema.validate(found.to_dict(), schema)
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
    import zipfile

    import pandas

    from lpes_eval.data import kv, leval, mdqa, perplexity, zeroscrolls

    line = {**zeroscrolls.LINE, "output": "4%"}
    pandas.DataFrame({"short_book_title": ["A", "B"], "text": ["TEXT", "MORE"]}).to_parquet(folder / "pg.parquet")
    with zipfile.ZipFile(folder / "space_digest.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("space_digest/validation.jsonl", json.dumps(line))
    other_key, other_question = kv.LINE | {"key": "KEY 2", "value": "VALUE 2"}, mdqa.LINE | {"question": "WHICH"}
    records, reviews = partial(kv.read, num_keys=2), partial(zeroscrolls.read, name="space_digest", split="held_out")
    readers = {
        written(folder / "kv.jsonl", kv.LINE, other_key): records,
        written(folder / "kv.jsonl.gz", kv.LINE, other_key): records,
        written(folder / "mdqa.jsonl", mdqa.LINE, other_question): lambda path: [
            x.prompt(50) for x in mdqa.read(path, 2)
        ],
        written(folder / "leval.jsonl", leval.LINE | {"outputs": ["True [fact: False]"]}): partial(
            leval.read, name="sci_fi"
        ),
        folder / "space_digest.zip": reviews,
        written(folder / "text.jsonl.gz", {"text": "TEXT"}): perplexity.read,
        folder / "pg.parquet": perplexity.read,
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

    def read(_):
        now, committed = results.read(path), baseline.load(folder / "baseline.json")
        pages = [regress.page_of(gate.regress(committed, now, gate.Options(max_drop=0.1)), with_flips=True)]
        with suppress(UserError):
            pages.append(command.page_of(compare(other, now), with_flips=True))
        for page in pages:
            page.to_junit(), page.to_markdown(), page.to_json().encode(), page.to_text().encode()

    return list(folder.glob(pattern)), read


def outputs(folder):
    """What a command was told to write is there afterwards, or the file is as it was."""
    from lpes_eval import files
    from lpes_eval.compare import command, results
    from lpes_eval.compare.comparison import compare

    run = results.read(write_run(folder / "run", {0: [1.0, 0.0]}))
    page, mark = command.page_of(compare(run, run)), files.marker(command.COMMAND)
    contents = {f"out.{form}": getattr(page, f"to_{form}")() for form in ("json", "markdown")}
    for name, content in contents.items():
        files.write_output(folder / name, content, mark)

    def read(path):
        before = path.read_bytes()
        try:
            files.write_output(path, contents[path.name], mark)
            assert path.read_text() == contents[path.name]
        except UserError:
            assert path.read_bytes() == before
            raise

    return [folder / name for name in contents], read


def router(folder):
    from lpes_eval.methods.moice import router as module

    made = module.Router(module.RouterConfig(1, 2, 2, bases=(10000.0, 20000.0), top_k=1, training={"steps": 1}))
    module.write(made, folder / module.FILE)
    return [folder / module.FILE], lambda path: module.read(path)


def metadata(folder):
    from lpes_eval.data import source
    from lpes_eval.harness import settings

    told = {"num_keys": 50, "positions": [0, 50], "data_dir": str(folder), "search_seed": "1",
            "split": "search", "longest": 256.0, "pretrained": "m", "text_file": "t"}  # fmt: skip

    def read(path):
        try:
            found = json.loads(path.read_bytes())
        except (ValueError, RecursionError):  # lm-eval's own reading
            return
        if isinstance(found, dict):
            source.asked(settings.checked(found))

    return [written(folder / "told.json", told)], read


PARSERS: dict[str, Callable[[Path], tuple[list[Path], Callable[[Path], None]]]] = {
    **{function.__name__: function for function in (factors, journal, data, router, metadata)},
    "outputs": outputs,
    "results": partial(compared, pattern="results_*"),
    "samples": partial(compared, pattern="samples_*"),
    "baselines": partial(compared, pattern="baseline.json"),
}
"""Parser -> a function that fills an empty folder; it returns the files to damage, and what reads one of them."""


# -- the loop ----------------------------------------------------------------------------------------------------------


class Late(BaseException):
    """No Exception, which a reader could take for its own."""


@contextmanager
def in_time(seconds: float):
    def late(*_):
        raise Late(f"no answer within {seconds:g} s")

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def run(name: str, inputs: int, first: int = 0) -> SimpleNamespace:
    """Read inputs ``first`` and on, and before them the undamaged files, which must not be refused.

    Returns:
        How many were read, refused and failed, and the slowest answer.
    """
    count = SimpleNamespace(read=0, refused=0, failed=[], slowest=0.0)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        paths, read = PARSERS[name](Path(folder))
        whole = {path: path.read_bytes() for path in sorted(paths)}
        for path in whole:
            read(path)
        for number in range(first, first + inputs):
            rng = random.Random(f"{name} {number}")
            path = rng.choice(list(whole))
            path.write_bytes(damaged(whole[path], rng))
            began = time.process_time()
            try:
                with in_time(5 * SECONDS if path.suffix in (".gz", ".zip") else SECONDS):
                    read(path)
                count.read += 1
            except UserError as error:
                count.refused += 1
                assert "\n" not in str(error)
            except (Exception, Late):
                count.failed.append(number)
                print(f"{name}, input {number}: {traceback.format_exc()}", file=sys.stderr)
                if len(count.failed) == 10:
                    break
            count.slowest = max(count.slowest, time.process_time() - began)
            for each, content in whole.items():
                each.write_bytes(content)
    return count


def main(argv=None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("parser", nargs="?", choices=PARSERS, help="default: all")
    flags.add_argument("--inputs", type=int, default=1000)
    flags.add_argument("--first", type=int, default=0, help="the number of the first input")
    args = flags.parse_args(argv)
    failed = 0
    for name in [args.parser] if args.parser else PARSERS:
        count = run(name, args.inputs, args.first)
        failed += len(count.failed)
        total = count.read + count.refused + len(count.failed)
        print(
            f"{name:10} {total:7,} inputs: {count.read:,} read, {count.refused:,} refused, {len(count.failed)} failed; "
            f"slowest {count.slowest:.2f} s",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
