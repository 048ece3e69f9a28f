"""What a search writes survives how its process ends."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import toy_search
from lpes_eval import entries
from lpes_eval.entries import Entry
from lpes_eval.errors import DataError, UserError
from search.journal import Journal


def start(folder, name="ga"):
    root, pipe = Path(__file__).parents[2], subprocess.PIPE
    command = [sys.executable, str(Path(__file__).with_name("toy_search.py")), str(folder), name]
    env = {"PYTHONPATH": str(root), "PATH": ""}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=root, env=env)


@pytest.mark.parametrize("name", ["ga", "layers"])
def test_a_search_killed_at_random_instants_ends_with_the_same_bytes(name, tmp_path):
    """`kill -9` again and again, each time the same command goes on; nothing recorded is evaluated a second time."""
    toy_search.main(tmp_path / "undisturbed", name=name)
    kills, rng = 0, random.Random(0)
    while kills < 4:
        process = start(tmp_path / "killed", name)
        assert process.stdout.readline() == "at work\n", process.stderr.read()
        time.sleep(rng.random() * 0.04)  # a search is some 90 evaluations of 1 ms and more
        process.kill()
        process.communicate()
        if process.returncode == 0:
            break
        kills += 1
    assert kills
    toy_search.main(tmp_path / "killed", name=name)
    for file in ("factors.json", "journal.jsonl"):
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "undisturbed" / file).read_bytes()


def test_a_journal_cut_at_any_byte_of_its_first_or_last_line_goes_on_to_the_same_end(tmp_path):
    toy_search.main(tmp_path)
    path, factors = tmp_path / "journal.jsonl", tmp_path / "factors.json"
    whole, written = path.read_bytes(), factors.read_bytes()
    first, last = whole.index(b"\n"), len(whole) - len(whole.splitlines()[-1]) - 1
    for cut in (5, first, last + 1, (last + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        factors.unlink()
        with Journal(tmp_path, {"seed": {"seed": 0}}) as journal:
            (note,) = journal.notes
        assert "torn off" in note
        toy_search.main(tmp_path)
        assert (path.read_bytes(), factors.read_bytes()) == (whole, written)


ENTRY = {"key": "a", "fitness": 0.5, "generation": 0}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (ENTRY | {"fitness": None}, "Expected `float`, got `null` - at `$.fitness`"),
        (ENTRY | {"guards": {"g": {"plain": 1.0}}}, "missing required field `found` - at `$.guards[...]`"),
        (ENTRY | {"measure": "x"}, "Invalid enum value 'x'"),
        (ENTRY | {"points": [0.5]}, "Expected `array`, got `float` - at `$.points[0]`"),
        (ENTRY | {"fitnes": 0.5}, "unknown field `fitnes`"),
        ('{"key": "a", "fitness": NaN}', "invalid character (byte 24)"),
        ('{"key": "a", "fit', "Input data was truncated"),
    ],
)
def test_a_line_that_is_no_entry_is_named_with_what_is_wrong_and_the_way_out(tmp_path, line, reason):
    line = line if isinstance(line, str) else json.dumps(line)
    path = tmp_path / "journal.jsonl"
    path.write_text(f'{{"settings": {{}}}}\n{line}\n{json.dumps(ENTRY)}\n')
    with pytest.raises(DataError, match=r"journal.jsonl, line 2: damaged \(.*\); delete the line") as refused:
        entries.read(path)
    assert reason in str(refused.value)
    path.write_text(f'{{"settings": {{}}}}\n{line}\n')
    assert entries.read(path) == ({}, {}, len(line) + 1)  # the last line may be torn


def test_an_entry_can_be_read_when_record_returns_and_the_last_line_of_a_key_counts(tmp_path):
    with Journal(tmp_path, {}) as journal:
        made = journal.record("a", {"generation": None, "fitness": 1, "examples": {"b": [1, None]}})
        assert entries.read(tmp_path / "journal.jsonl").entries == {"a": made}  # it is on the disk
        with pytest.raises(ValueError, match="JSON compliant"):
            journal.record("b", {"fitness": float("nan")})
        journal.record("a", {"generation": 0, "fitness": 1.0})
    with Journal(tmp_path, {}) as journal:
        assert journal.individuals == [Entry("a", 1.0, generation=0)]


def test_a_second_process_in_the_same_folder_is_refused(tmp_path):
    with Journal(tmp_path, {"seed": {"seed": 0}}):
        process = start(tmp_path)
        _, err = process.communicate(timeout=120)
    assert process.returncode
    assert "another search is at work" in err
    toy_search.main(tmp_path)  # and allowed again once the first has left


def test_changed_settings_are_refused_and_every_difference_is_named(tmp_path):
    before = {"a": {"model": "a", "layers": 32, "seed": 0, "parts": [{"task": "a"}, {"v": 1}]}, "b": [1.0]}
    now = {"a": {"model": "b", "layers": 32, "parts": [{"task": "a"}, {"v": 2}], "skip": 2}, "b": [1.0, 1.5]}
    with Journal(tmp_path, before):
        pass
    with pytest.raises(UserError) as refused, Journal(tmp_path, now):
        pass
    changes = 'a.model was "a", is now "b"; a.seed was 0, is now null; a.parts[1].v was 1, is now 2; '
    changes += "a.skip was null, is now 2; b was [1.0], is now [1.0, 1.5]"
    assert changes in str(refused.value)
    with Journal(tmp_path, before):  # nothing was changed by the refusal, nor is the folder left locked
        pass


def test_a_folder_of_others_or_one_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot be used"), Journal(tmp_path / "file", {}):
        pass
    with pytest.raises(UserError, match="holds file but no search"), Journal(tmp_path, {}):
        pass
    for diary in (json.dumps(ENTRY) + "\n\n", "my diary\n", "x" * 50):
        (tmp_path / "journal.jsonl").write_text(diary)
        with pytest.raises(UserError, match=r"line 1: damaged .* take another folder"), Journal(tmp_path, {}):
            pass
        assert (tmp_path / "journal.jsonl").read_text() == diary
