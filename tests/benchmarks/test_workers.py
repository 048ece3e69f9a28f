"""What chunks of a search cost, and the simulation of many workers that replays it."""

import json

import pytest

from benchmarks import chunk_costs, workers
from search.engines.cluster import chunk_sizes


def test_chunks_are_an_eighth_of_an_individual_and_smaller_towards_the_end_of_a_generation():
    assert chunk_sizes(200, left=4000, workers=2) == [25] * 8
    assert [max(chunk_sizes(200, left, workers=64)) for left in (4000, 1000, 200)] == [25, 16, 8]
    assert sum(chunk_sizes(200, left=1000, workers=64)) == 200


def test_chunks_of_an_individual_that_is_asked_all_are_large_enough_for_a_batch():
    assert chunk_sizes(48, left=192, workers=1, may_stop=False) == [24, 24]
    assert max(chunk_sizes(48, left=96, workers=8, may_stop=False)) == 12
    assert chunk_sizes(200, left=4000, workers=2, may_stop=False) == [25] * 8


def test_costs_are_measured_for_every_length_and_number_of_questions(tmp_path):
    file = tmp_path / "costs.jsonl"
    flags = ["--shapes", "tiny", "--records", "4", "8", "--questions", "1", "3", "--new_tokens", "2", "--times", "2"]
    for _ in range(2):  # the second run takes the place of the first
        chunk_costs.main([*flags, "--output", str(file)])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["records"], row["questions"], row["prompts"], len(row["seconds"])) for row in rows] == [
        (4, 1, 3, 2), (4, 3, 9, 2), (8, 1, 3, 2), (8, 3, 9, 2),
    ]  # fmt: skip
    assert rows[0]["prompt_tokens"] < rows[2]["prompt_tokens"]
    assert all(second > 0 for row in rows for second in row["seconds"])


@pytest.fixture
def simulated(tmp_path, capsys, monkeypatch):
    """Hours by workers, of chunks that take a second and another one for each question; or the error."""
    file = tmp_path / "costs.jsonl"
    rows = [
        {"shape": "vicuna-7b", "records": 100, "questions": n, "seconds": [n + 0.5, n + 1, n + 9]} for n in (1, 9, 19)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(workers, "WORKERS", (2, 32, 64, 1000))

    def hours(*flags):
        workers.main(["--costs", str(file), *flags])
        out, error = capsys.readouterr()
        return error or {int(line.split()[0]): float(line.split()[1]) for line in out.splitlines()[1:]}

    return hours


CALM = ["--spread", "0", "--stragglers", "0", "--overhead", "0", "--guessing", "0", "--hours_between_failures", "1e9"]


def test_workers_share_a_generation_and_wait_for_its_last_chunk(simulated):
    # an individual is a chunk of 8 questions, which takes 9 seconds
    flags = [*CALM, "--questions", "8", "--population", "36", "--mutations", "36", "--crossovers", "0"]
    took = simulated(*flags, "--generations", "9", "--no_guess")
    assert took[2] == pytest.approx(10 * 36 * 9 / 2 / 3600, abs=0.01)  # some mutants are drawn twice
    assert took[32] == pytest.approx(10 * 2 * 9 / 3600, abs=0.005)
    assert took[64] == took[1000] == pytest.approx(10 * 9 / 3600, abs=0.005)
    waiting, guessing = (simulated(*flags, "--generations", "19", *more) for more in (["--no_guess"], []))
    assert guessing[2] == pytest.approx(waiting[2], rel=0.05)
    assert 20 * 36 * 9 / 32 / 3600 - 0.005 < guessing[32] < 0.9 * waiting[32]


def test_with_many_workers_a_search_takes_less_time_where_they_begin_with_the_next_generation(simulated):
    waiting, guessing = simulated("--generations", "4", "--no_guess"), simulated("--generations", "4")
    assert guessing[2] == pytest.approx(waiting[2], rel=0.02)
    assert guessing[32] < waiting[32]
    assert guessing[64] < 0.97 * waiting[64]


def test_slow_chunks_and_lost_workers_take_time(simulated):
    short = [*CALM, "--generations", "2", "--no_guess"]
    calm = simulated(*short)
    for flag, value in (("--stragglers", "0.1"), ("--hours_between_failures", "0.5"), ("--overhead", "2")):
        assert simulated(*short, flag, value)[32] > calm[32]


def test_a_length_that_was_not_measured_is_named_with_those_that_were(simulated):
    assert simulated("--records", "7").endswith("no times of vicuna-7b with 7 records; there is 100\n")


def test_a_number_or_table_that_cannot_be_simulated_is_named(simulated, tmp_path, capsys):
    for flag in ("--questions", "--hours_between_failures"):
        with pytest.raises(SystemExit):
            simulated(flag, "0")
        assert f"{flag}: expected " in capsys.readouterr().err
    (tmp_path / "costs.jsonl").write_text('{"shape": "vicuna-7b"}')
    assert "line 1: the field 'records' is missing" in simulated()
