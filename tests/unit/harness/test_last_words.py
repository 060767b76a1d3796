import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

from harness.last_words import VARIABLE, Run, note, noted, reason, told

SKIPPED = SimpleNamespace(longrepr=("tests/test_a.py", 3, "Skipped: pgbouncer is not installed: apt install pgbouncer"))


def test_each_reason_is_told_with_the_number_of_its_tests():
    words = told([Run(8_000, [], {"mysqlclient is not installed": 2, reason(SKIPPED): 12}, 1_800)])
    assert words == (
        "8000 tests passed, 0 failed, 14 were left out. 12: pgbouncer is not installed: apt install pgbouncer. "
        "2: mysqlclient is not installed. 1800 repetitions run with THOROUGH=1."
    )


def test_a_test_that_passed_only_alone_is_named():
    words = told([Run(10, ["test_a", "test_b"]), Run(1, ["test_b"])])
    assert "Alone, 1 of the 2 passed" in words
    assert words.endswith(" test_a.")


def test_nothing_is_said_of_a_second_run_that_was_not_needed():
    assert told([Run(10)]) == "10 tests passed, 0 failed, 0 were left out."


def test_a_run_of_pytest_notes_its_outcome(tmp_path):
    notes = tmp_path / "notes"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "each_reason", __file__]
    environment = {**os.environ, VARIABLE: str(notes)}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert [Run(**run) for run in noted(notes)] == [Run(1)]


def test_what_is_noted_is_told_again(tmp_path):
    runs = [Run(10, ["test_a"], Counter({"no such server": 2}), 5), Run(1)]
    for run in runs:
        note(run, tmp_path / "notes")
    assert [Run(**run) for run in noted(tmp_path / "notes")] == runs
