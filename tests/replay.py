"""Replays what an attack on this project found, against the installed package, and expects the mended outcome.

    python tests/replay.py        # all findings, in about half a minute; exit status 1 where one is back
    python tests/replay.py 7 10   # these

One function a finding. ``tests/test_replay.py`` runs those that need no model with every run of the tests.
"""

import argparse
import contextlib
import gzip
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

sys.path.append(str(Path(__file__).parent))

from lpes_eval import cli
from lpes_eval.errors import UserError
from runs import write_run

FINDINGS: dict[str, tuple[Callable[[Path], None], bool]] = {}
"""What was found -> what replays it in an empty folder, and whether that loads a model."""
ESCAPES = "a\x1b[31m\n# heading ![](http://x) <img> |\x00 b"


def finding(claim, *, model=False):
    def keep(function):
        FINDINGS[f"{len(FINDINGS) + 1}. {claim}"] = function, model
        return function

    return keep


@contextlib.contextmanager
def within(seconds=3.0):
    """The answer comes within three times the second that is promised, on this process' own clock; a hang ends."""
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("hangs"))
    signal.alarm(30)
    began = time.process_time()
    yield
    signal.alarm(0)
    assert time.process_time() - began < seconds, "too late"


def refused(call, *arguments, says="", **options):
    """One line for the user, in time."""
    with within():
        try:
            call(*arguments, **options)
        except UserError as error:
            assert says in str(error), error
            assert len(str(error)) < 2100
            assert "\n" not in str(error)
            return
    raise AssertionError(f"{arguments}: taken")


def command(*argv, status, main=cli.main):
    """What a command prints; it ends with this status and without a traceback."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = main([str(word) for word in argv])
    assert "Traceback" not in err.getvalue(), err.getvalue()
    assert found == status, (found, out.getvalue(), err.getvalue())
    return out.getvalue() + err.getvalue()


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@finding("regress passes a task that fell from 1.0000 to 0.0000")
def a_small_task_beside_a_large_one(tmp):
    for name, small in (("old", 1.0), ("new", 0.0)):
        few = json.loads(write_run(tmp / name, {None: [small] * 8}, group="small").read_text())
        path = write_run(tmp / name, {0: [1.0] * 24, 50: [1.0] * 24}, group="large")
        both = {k: few[k] | v if isinstance(v, dict) else v for k, v in json.loads(path.read_text()).items()}
        path.write_text(json.dumps(both))
    command("regress", tmp / "old", "--baseline", tmp / "b.json", "--update", status=0)
    printed = command("regress", tmp / "new", "--baseline", tmp / "b.json", "--strict", status=1)
    [row] = [line for line in printed.splitlines() if line.startswith("all")]
    assert row.endswith(("WORSE", "not testable"))


@finding("a search overwrites and deletes what is not its own")
def a_search_in_a_folder_of_the_users(tmp):
    from search.journal import Journal

    names = ("factors.json", "summary.md", "report.json", ".movie.mp4.part", ".summary.md.1.part")
    for name in names:
        written(tmp / name, "mine")
    refused(Journal(tmp, {}).__enter__, says="but no search")
    assert all((tmp / name).read_text() == "mine" for name in names)


@finding("regress --update overwrites any file")
def update_overwrites_baselines_alone(tmp):
    run = write_run(tmp / "run", {None: [1.0, 0.0] * 20})
    for other in (written(tmp / "notes.txt", "mine"), run):
        before = other.read_bytes()
        command("regress", run, "--baseline", other, "--update", status=2)
        assert other.read_bytes() == before


@finding("changed weights are not noticed", model=True)
def every_weight_is_part_of_the_fingerprint(tmp):
    import torch
    from transformers import AutoModelForCausalLM

    from lpes_eval import reference
    from search.identity import fingerprint

    model = AutoModelForCausalLM.from_pretrained(reference.path())
    before = fingerprint(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[7, 3] += 1e-3
    assert fingerprint(model) != before


@finding("a 7 kB Bezier file hangs")
def factors_files_answer_within_a_second(tmp):
    for points, layers in ((600, 32), (12, 1000), (4, 10_000)):
        curve = {"kind": "bezier", "points": [[x, 1.0 + x % 2 / 2] for x in range(points)]}
        file = {"format": "lpes-factors", "version": 1, "num_layers": layers, "curve": curve}
        path = written(tmp / "f.json", json.dumps(file))
        with within():
            command("factors", path, status=0 if (points, layers) == (12, 1000) else 2)


@finding("--metadata data_dir= quietly evaluates generated data")
def an_empty_setting_is_refused(tmp):
    from lpes_eval.harness.settings import checked

    for name in ("data_dir", "num_keys", "source", "text_file"):
        refused(checked, {name: ""}, says=f"{name}= is empty")


@finding("data that must score 100 % are accepted")
def empty_answers_and_repeated_keys_are_refused(tmp):
    from lpes_eval.data import kv, mdqa

    pair = {**kv.LINE, "ordered_kv_records": [["KEY", ""], ["b", "2"]], "value": ""}
    refused(kv.read, written(tmp / "f.jsonl", json.dumps(pair)), 2, says="empty")
    twice = '{"ordered_kv_records": [["KEY", "1"], ["b", "2"]], "key": "KEY", "value": "1", "value": "2"}'
    refused(kv.read, written(tmp / "f.jsonl", twice), 2, says="twice")
    refused(mdqa.read, written(tmp / "f.jsonl", json.dumps({**mdqa.LINE, "answers": [""]})), 2, says="empty")


@finding("tracebacks, hangs and bombs in users' data")
def users_data_are_read_or_refused(tmp):
    from lpes_eval import files
    from lpes_eval.data import leval, perplexity, source
    from lpes_eval.harness.plugin import check_examples
    from lpes_eval.harness.settings import checked

    written(tmp / "tpo.jsonl", json.dumps(leval.LINE)), written(tmp / "none.jsonl", "")
    check_examples(["kv_retrieval"], {}, {})  # the first call imports lm_eval
    refused(check_examples, ["leval_tpo"], {}, {"data_dir": str(tmp)}, says="two documents or more")
    refused(check_examples, ["lpes_ppl"], {}, {"text_file": str(tmp / "none.jsonl")}, says="no text")
    for setting in ({"stride": "x"}, {"stride": 0}, {"longest": "x"}):
        refused(checked, setting)
    refused(perplexity.read, 5)
    for name in ("~nosuchuser/x", "x" * 300, "a\0b"):
        refused(source.named_path, "data_dir", name)
    for text in ('{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}", "[" * 10**5, '{"a": NaN}', b"\xff"):
        refused(lambda path: list(files.read_jsonl(path)), written(tmp / "f.jsonl", text))
    os.mkfifo(tmp / "pipe.jsonl")
    refused(lambda path: list(files.read_jsonl(path)), tmp / "pipe.jsonl")
    bomb = written(tmp / "bomb.jsonl.gz", gzip.compress(b"0" * (64 << 20)))
    with within(5):
        refused(lambda path: list(files.read_jsonl(path)), bomb, says="times its size")
    written(tmp / "both.jsonl", "{}"), written(tmp / "both.jsonl.gz", gzip.compress(b"{}"))
    files_of = source.Files("kv_retrieval", "both.jsonl.gz", "http://nowhere")
    refused(files_of.path, source.asked({"data_dir": str(tmp)}), says="one of the two")


@finding("what compare and regress cannot read exits with 1, a verdict")
def unreadable_results_exit_with_2(tmp):
    good = write_run(tmp / "run", {0: [1.0, 0.0] * 20, 100: [1.0] * 40})
    command("regress", good, "--baseline", tmp / "b.json", "--update", status=0)
    whole, baseline = json.loads(good.read_text()), json.loads((tmp / "b.json").read_text())
    for key in ("results", "configs", "n-samples", "higher_is_better", "config"):
        for wrong in (5, [], "x", {"toy": 5}):
            bad = written(tmp / good.name, json.dumps(whole | {key: wrong}))
            status = command_status("regress", bad, "--baseline", tmp / "b.json")
            assert status in (0, 2, 4), (key, wrong, status)
    for key in ("tasks", "model", "provenance"):
        bad = written(tmp / "c.json", json.dumps(baseline | {key: 5}))
        command("regress", good, "--baseline", bad, status=2)
    samples = next((tmp / "run").glob("samples*"))
    samples.write_text("5\n")
    command("compare", good, good, status=2)


def command_status(*argv):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        status = cli.main([str(word) for word in argv])
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return status


@finding("damaged search files are believed")
def what_a_search_kept_is_checked(tmp):
    from search.cache import FitnessCache
    from search.journal import Journal

    def kept(line):
        folder = tmp / "search"
        with contextlib.suppress(FileNotFoundError):
            (folder / "journal.jsonl").unlink()
        with Journal(folder, {}) as journal:
            for key in "ab":
                journal.record(key, {"fitness": 0.5, "scores": {"acc": 0.5}})
        lines = (folder / "journal.jsonl").read_text().splitlines()
        written(folder / "journal.jsonl", f"{line or lines[0]}\n{lines[1]}\n")
        return Journal(folder, {})

    with kept("") as journal:
        assert journal.entries["a"]["fitness"] == 0.5
    first = json.dumps({"key": "a", "fitness": 9.0, "scores": {"acc": 0.5}})
    for line in (first, '{"key": "a"}', '{"key": "a", "fitness": 0.5}', "{}", "[]", "5", '{"key": []}'):
        refused(kept(line).__enter__, says="line 1: damaged")
    cache = FitnessCache(tmp / "cache")
    cache.put("c", "n", {"examples": {"acc": [1.0]}})
    [entry] = (tmp / "cache").rglob("*.json")
    assert cache.get("c", "n")["examples"] == {"acc": [1.0]}
    text = entry.read_text()
    for damaged in (text.replace("1.0", "0.0"), text.replace('"examples"', '"other"'), "{}", "[]", "[" * 10**5):
        written(entry, damaged)
        assert cache.get("c", "n") is None


@finding("--resume runs the Python of a planted include_path")
def resuming_asks_for_code_again(tmp):
    from lpes_eval.files import seal
    from search import config, ga

    planted = {**vars(config.defaults()), "tasks": ["x"], "include_path": str(tmp), "output": None, "resume": None}
    code, vllm = {"trust_remote_code": True}, {"engine_args": {"worker_cls": "planted.Worker"}}
    joins = {"ray_address": "127.0.0.1:6379"}
    planted_names = {"include_path": str(tmp), "model_args": code, "tasks": ["a.yaml"]} | vllm | joins
    for name, value in planted_names.items():
        kept = planted | {"include_path": None, "metadata": {}, "gen_kwargs": {}} | {name: value}
        written(tmp / "arguments.json", json.dumps(seal(kept)))
        said = command("--resume", tmp, status=2, main=ga.main)
        assert "runs code" in said
        assert f"--{name}" in said
    written(tmp / "arguments.json", json.dumps(kept))
    assert "damaged" in command("--resume", tmp, status=2, main=ga.main)


@finding("names break JUnit, Markdown and the terminal")
def names_stay_in_their_place(tmp):
    run = write_run(tmp / "run", {None: [1.0, 0.0] * 20}, metric=ESCAPES)
    command("regress", run, "--baseline", tmp / "b.json", "--update", status=0)
    outputs = ("--junit", tmp / "j.xml", "--markdown", tmp / "m.md")
    shown = command("regress", run, "--baseline", tmp / "b.json", "--no-strict", *outputs, status=0)
    ElementTree.fromstring((tmp / "j.xml").read_text())
    assert "\x1b" not in shown
    assert not any(line.startswith("# heading") for line in (tmp / "m.md").read_text().splitlines())
    assert not any(markup in (tmp / "m.md").read_text() for markup in ("![](", "<img", "\x1b"))
    origin = {"format": "lpes-factors", "version": 1, "factors": [1.5], "origin": {"note": ESCAPES}}
    assert "\x1b" not in command("factors", written(tmp / "f.json", json.dumps(origin)), status=0)
    assert "\x1b" not in command("factors", tmp / ESCAPES.replace("/", "").replace("\x00", ""), status=2)


@finding("smaller things: 1_5, long errors, -W error")
def smaller_things(tmp):
    from lpes_eval import factors, flags
    from lpes_eval.methods import base, tables

    refused(factors.parse, "1_5")
    refused(base.real, "factor", "1_5")
    refused(tables.parse_bases, "bases", "1_0000:2")
    with contextlib.suppress(flags.argparse.ArgumentTypeError):
        raise AssertionError(flags.whole("1_5"))
    refused(factors.parse, "x" * 100_000)
    refused(factors.Factors.from_dict, {"x" * 100_000: 1})
    broken = "import lpes_eval.harness.plugin as p; p.EXTENSIONS.clear(); import lm_eval.api.registry; print('here')"
    ended = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", broken], capture_output=True, text=True)
    assert ended.stdout == "here\n", ended.stderr
    assert "could not extend lm_eval.api.registry: KeyError" in ended.stderr
    assert "LPES_EVAL_PLUGIN=0" in ended.stderr


@finding("caches: close bases, pickled ones, another model's, reordered layers", model=True)
def caches_of_keys(tmp):
    import torch
    from transformers import AutoModelForCausalLM

    import lpes_eval
    from lpes_eval import methods, reference, rope

    with torch.no_grad():
        model, ids = AutoModelForCausalLM.from_pretrained(reference.path()), torch.arange(5, 13)[None]
        step = lambda cache: model(ids, **rope.with_cache(model, cache))  # noqa: E731
        lpes_eval.apply(model, 1.5)
        cache = rope.cache_of(model(ids, use_cache=True))
        other = AutoModelForCausalLM.from_pretrained(reference.path())
        refused(other, ids, **rope.with_cache(other, cache), says="which this model has not")
        lpes_eval.remove(model)
        refused(step, pickle.loads(pickle.dumps(cache)), says="which this model has not")
        values = [1.0 + h / 10 for h in range(len(model.model.layers))]
        lpes_eval.apply(model, values)
        model.model.layers = torch.nn.ModuleList(reversed(model.model.layers))
        lpes_eval.apply(model, values)
        again = model(ids).logits
        lpes_eval.remove(model)
        lpes_eval.apply(model, values)
        assert torch.equal(again, model(ids).logits)
    buckets = methods.load("attention_buckets")
    keys = {buckets(bases=f"{base}:20000", device="cpu").cache_key for base in (1234567, 1234569)}
    assert len(keys) == 2


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("findings", nargs="*", help="their numbers; default: all")
    chosen, failed = flags.parse_args().findings, 0
    for claim, (replay, _) in FINDINGS.items():
        if chosen and claim.partition(".")[0] not in chosen:
            continue
        outcome, began = "mended", time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                replay(Path(folder))
            except Exception:
                outcome, failed = "BACK", failed + 1
                traceback.print_exc()
        print(f"{outcome:6}  {time.perf_counter() - began:5.1f} s  {claim}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
