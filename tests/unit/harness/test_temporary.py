"""Where a run of the tests keeps its files."""

import os
import subprocess
import sys
import tempfile

import pytest
from harness.places import PROOF
from harness.temporary import VARIABLE, use_memory

PLACE = "import tempfile; print(tempfile.gettempdir())"


@pytest.fixture(autouse=True)
def as_without_a_choice(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_all_processes_of_the_run_keep_their_files_in_memory_until_its_end(tmp_path):
    delete = use_memory(tmp_path, needed_bytes=1)
    [made] = tmp_path.iterdir()
    assert tempfile.gettempdir() == str(made)
    started = subprocess.run([sys.executable, "-c", PLACE], capture_output=True, text=True, check=True)
    assert started.stdout.strip() == str(made)
    made.joinpath("left behind").touch()
    delete()
    assert list(tmp_path.iterdir()) == []
    assert VARIABLE not in os.environ
    assert tempfile.gettempdir() != str(made)


def test_they_are_deleted_when_the_process_exits_and_not_by_its_children(tmp_path):
    code = """
import multiprocessing.util, sys
from pathlib import Path
from harness.temporary import use_memory
use_memory(Path(sys.argv[1]), 1)
child = multiprocessing.get_context("fork").Process(target=multiprocessing.util.get_temp_dir)
child.start()
child.join()
multiprocessing.util.get_temp_dir()
print(len(list(Path(sys.argv[1]).iterdir())))
"""
    command = [sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, cwd=PROOF, capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (["1"], "")
    assert list(tmp_path.iterdir()) == []


def test_files_stay_on_the_disk_without_room_in_memory(tmp_path):
    assert use_memory(tmp_path, 1 << 60) is None
    assert use_memory(tmp_path / "none", 1) is None
    assert VARIABLE not in os.environ
    assert list(tmp_path.iterdir()) == []


def test_files_stay_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "chosen"))
    assert use_memory(tmp_path, 1) is None
    assert os.environ[VARIABLE] == str(tmp_path / "chosen")


def test_what_a_killed_run_has_left_is_deleted_by_the_next_one(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f"dualwrite-tests-{ended.pid}-x"
    others = tmp_path / f"dualwrite-tests-{os.getpid()}-x", tmp_path / "of-another-program"
    for directory in (left, *others):
        directory.mkdir()
    delete = use_memory(tmp_path, needed_bytes=1)
    delete()
    assert sorted(tmp_path.iterdir()) == sorted(others)
