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
from lpes_eval.errors import DataError, UserError
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


def interrupted(folder, journal):
    """A search's folder as it was left, with these bytes in its journal."""
    folder.mkdir()
    (folder / "journal.jsonl").write_bytes(journal)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    toy_search.main(folder)
    return folder


def test_a_search_killed_at_10_random_instants_ends_with_the_same_bytes(undisturbed, tmp_path):
    """`kill -9` again and again, each time the same command goes on; nothing recorded is evaluated a second time."""
    rng = random.Random(0)
    kills, folders, folder = 0, 0, None
    while kills < 10:
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
        assert (folder / "journal.jsonl").read_bytes() == (undisturbed / "journal.jsonl").read_bytes()


def test_a_journal_cut_at_any_byte_of_its_first_or_last_line_goes_on_to_the_same_end(undisturbed, tmp_path):
    whole = (undisturbed / "journal.jsonl").read_bytes()
    first, last = whole.index(b"\n"), len(whole) - len(whole.splitlines()[-1]) - 1
    for cut in (0, 5, first, last + 1, (last + len(whole)) // 2, len(whole) - 1):
        folder = interrupted(tmp_path / str(cut), whole[:cut])
        with Journal(folder, {"seed": {"seed": 0}}) as journal:
            assert len(journal.notes) == (cut > 0)
            assert all("torn off" in note for note in journal.notes)
        toy_search.main(folder)
        assert (folder / "journal.jsonl").read_bytes() == whole
        assert (folder / "factors.json").read_bytes() == (undisturbed / "factors.json").read_bytes()


def test_an_individual_whose_line_was_deleted_is_evaluated_again(undisturbed, tmp_path):
    """As the error about a damaged line says, whichever it was: the first generation's, the best one's or the last."""
    settings, *lines = (undisturbed / "journal.jsonl").read_bytes().splitlines(keepends=True)
    best = max(range(len(lines)), key=lambda k: json.loads(lines[k])["fitness"])
    for gone in {0, best, len(lines) - 1}:
        folder = interrupted(tmp_path / str(gone), b"".join([settings, *lines[:gone], *lines[gone + 1 :]]))
        toy_search.main(folder)
        assert sorted((folder / "journal.jsonl").read_bytes().splitlines(keepends=True)[1:]) == sorted(lines)
        assert (folder / "factors.json").read_bytes() == (undisturbed / "factors.json").read_bytes()


ENTRY = {"key": "a", "fitness": 0.5, "generation": 0}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (ENTRY | {"fitness": None}, "fitness is NoneType, expected float"),
        (ENTRY | {"fitness": 10**400}, "fitness is int"),
        (ENTRY | {"generation": True}, "generation is bool"),
        (ENTRY | {"guards": {"g": {"plain": 1.0}}}, "guards lacks a field"),
        (ENTRY | {"scores": {"a": "b"}}, "scores is str"),
        (ENTRY | {"points": [0.5]}, "points is float, expected list"),
        (ENTRY | {"fitnes": 0.5}, "unknown field 'fitnes'"),
        ({"key": "a"}, "lacks a field"),
        ([], "is list"),
        ('{"key": "a", "fitness": NaN}', "not a finite number"),
        ('{"key": "a", "fit', "not JSON"),
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
        assert [entry.to_dict() for entry in journal.individuals] == [
            {"key": "a", "fitness": 1.0, "generation": 0, "seconds": 0.0, "prompts": 0}
        ]


def test_a_second_process_in_the_same_folder_is_refused(tmp_path):
    with Journal(tmp_path, {"seed": {"seed": 0}}):
        code, err = finish(tmp_path)
    assert code == 2
    assert "another search is at work" in err
    assert err.count("\n") == 1
    toy_search.main(tmp_path)  # and allowed again once the first has left


def test_changed_settings_are_refused_and_every_difference_is_named(tmp_path):
    before = {"a": {"model": {"name": "a", "layers": 32}, "seed": 0, "parts": [{"task": "a"}, {"task": "b", "v": 1}]}}
    now = {"a": {"model": {"name": "b", "layers": 32}, "parts": [{"task": "a"}, {"task": "b", "v": 2}], "skip": 2}}
    before["b"], now["b"] = {"start": [1.0]}, {"start": [1.0, 1.5]}
    with Journal(tmp_path, before):
        pass
    with pytest.raises(UserError) as refused, Journal(tmp_path, now):
        pass
    changes = 'a.model.name was "a", is now "b"; a.seed was 0, is now null; a.parts[1].v was 1, is now 2; '
    changes += "a.skip was null, is now 2; b.start was [1.0], is now [1.0, 1.5]"
    assert changes in str(refused.value)
    with Journal(tmp_path, before):  # nothing was changed by the refusal, nor is the folder left locked
        pass


def test_a_folder_of_others_or_one_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot be used"), Journal(tmp_path / "file", {}):
        pass
    with pytest.raises(UserError, match="holds file but no search"), Journal(tmp_path, {}):
        pass
    (tmp_path / "journal.jsonl").write_text(json.dumps(ENTRY) + "\n\n")
    with pytest.raises(UserError, match=r"line 1: damaged .* take another folder"), Journal(tmp_path, {}):
        pass
