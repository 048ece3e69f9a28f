"""What a search writes survives how its process ends."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lpes_eval.errors import UserError
from lpes_eval.files import unseal
from search.journal import Journal

TOY = [sys.executable, str(Path(__file__).with_name("toy_search.py"))]
REPOSITORY = Path(__file__).parents[2]


def start(folder):
    pipe, env = subprocess.PIPE, {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    return subprocess.Popen([*TOY, str(folder)], stdout=pipe, stderr=pipe, text=True, cwd=REPOSITORY, env=env)


def finish(folder):
    process = start(folder)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


def interrupted(undisturbed, folder, journal):
    """A search's folder as it was left, with these bytes in its journal."""
    folder.mkdir()
    (folder / "settings.json").write_bytes((undisturbed / "settings.json").read_bytes())
    (folder / "journal.jsonl").write_bytes(journal)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert finish(folder) == (0, "")
    return folder


def test_a_search_killed_at_30_random_instants_ends_with_the_same_bytes(undisturbed, tmp_path):
    """`kill -9` again and again, each time the same command goes on; nothing recorded is evaluated a second time."""
    rng = random.Random(0)
    evaluations = len((undisturbed / "journal.jsonl").read_bytes().splitlines())
    kills, folders, folder = 0, 0, None
    while kills < 30:
        if folder is None or (folder / "factors.json").exists():
            folders += 1
            folder = tmp_path / str(folders)
        process = start(folder)
        assert process.stdout.readline() == "at work\n", process.stderr.read()
        time.sleep(rng.random() * 0.06)  # a search is some 90 evaluations of 1 ms and more
        process.kill()
        process.communicate()
        kills += process.returncode == -9
    for number in range(1, folders + 1):
        folder = tmp_path / str(number)
        assert finish(folder) == (0, "")
        assert (folder / "factors.json").read_bytes() == (undisturbed / "factors.json").read_bytes()
        keys = [json.loads(line)["key"] for line in (folder / "journal.jsonl").read_text().splitlines()]
        assert len(set(keys)) == len(keys) == evaluations


def test_a_journal_torn_at_any_byte_of_its_last_line_goes_on_to_the_same_end(undisturbed, tmp_path):
    whole = (undisturbed / "journal.jsonl").read_bytes()
    last = len(whole) - len(whole.splitlines()[-1]) - 1
    for cut in (last + 1, (last + len(whole)) // 2, len(whole) - 1):
        folder = interrupted(undisturbed, tmp_path / str(cut), whole[:cut])
        with Journal(folder, {"seed": 0}) as journal:
            assert "torn off" in journal.notes[0]
            assert (folder / "journal.jsonl").read_bytes() == whole[:last]
        assert finish(folder) == (0, "")
        assert (folder / "journal.jsonl").read_bytes() == whole
        assert (folder / "factors.json").read_bytes() == (undisturbed / "factors.json").read_bytes()


def test_an_individual_whose_line_was_deleted_is_evaluated_again(undisturbed, tmp_path):
    """As the error about a damaged line says, whichever it was: the first generation's, the best one's or the last."""
    lines = (undisturbed / "journal.jsonl").read_bytes().splitlines(keepends=True)
    best = max(range(len(lines)), key=lambda k: json.loads(lines[k])["fitness"])
    for gone in {0, best, len(lines) - 1}:
        folder = interrupted(undisturbed, tmp_path / str(gone), b"".join(lines[:gone] + lines[gone + 1 :]))
        assert finish(folder) == (0, "")
        assert sorted((folder / "journal.jsonl").read_bytes().splitlines(keepends=True)) == sorted(lines)
        assert (folder / "factors.json").read_bytes() == (undisturbed / "factors.json").read_bytes()


def test_an_entry_can_be_read_when_record_returns_and_the_last_line_of_a_key_counts(tmp_path):
    with Journal(tmp_path, {}) as journal:
        journal.record("a", {"generation": None, "fitness": 1.0})
        assert unseal(json.loads((tmp_path / "journal.jsonl").read_text()), "")["fitness"] == 1.0  # it is on the disk
        journal.record("a", {"generation": 0, "fitness": 1.0})
    with Journal(tmp_path, {}) as journal:
        assert journal.individuals == {"a": {"key": "a", "generation": 0, "fitness": 1.0}}


def test_a_second_process_in_the_same_folder_is_refused(tmp_path):
    with Journal(tmp_path, {"seed": 0}):
        code, err = finish(tmp_path)
    assert code == 2
    assert "another search is at work" in err
    assert err.count("\n") == 1
    assert finish(tmp_path)[0] == 0  # and allowed again once the first has left


def test_changed_settings_are_refused_and_every_difference_is_named(tmp_path):
    before = {"model": {"name": "a", "layers": 32}, "seed": 0, "parts": [{"task": "a"}, {"task": "b", "version": 1}]}
    now = {"model": {"name": "b", "layers": 32}, "parts": [{"task": "a"}, {"task": "b", "version": 2}], "skip": 2}
    before, now = before | {"start": [1.0]}, now | {"start": [1.0, 1.5]}
    with Journal(tmp_path, before):
        pass
    with pytest.raises(UserError) as refused, Journal(tmp_path, now):
        pass
    changes = 'model.name was "a", is now "b"; seed was 0, is now null; parts[1].version was 1, is now 2; '
    changes += "start was [1.0], is now [1.0, 1.5]; skip was null"
    assert changes in str(refused.value)
    with Journal(tmp_path, before):  # nothing was changed by the refusal, nor is the folder left locked
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot be used"), Journal(tmp_path / "file", {}):
        pass
