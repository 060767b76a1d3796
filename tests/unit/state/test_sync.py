"""Commits without fsync: a killed process loses none, and a crashed machine loses the last ones, each as a whole."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from dualwrite.errors import IllegalStateError, StoreUnreadable
from dualwrite.state import KeyValueStore

pytest.importorskip("rocksdict", reason="the extra 'state' is not installed")

COMMITS, KEYS = 300, 20
WORK = f"""
import os, signal, sys
from dualwrite.state import KeyValueStore
store = KeyValueStore(sys.argv[1], sync=False)
for offset in range(1, {COMMITS} + 1):
    store.put_all((b"%02d" % key, b"%d" % offset) for key in range({KEYS}))
    store.commit(offset)
os.kill(os.getpid(), signal.SIGKILL)
"""


def everything(store):
    return dict(store.range())


def as_committed(offset):
    return {b"%02d" % key: b"%d" % offset for key in range(KEYS)} if offset else {}


@pytest.fixture
def killed(tmp_path):
    done = subprocess.run([sys.executable, "-c", WORK, tmp_path / "store"], check=False)
    assert done.returncode == -signal.SIGKILL
    return tmp_path / "store"


def test_a_killed_process_loses_no_commit(killed):
    for sync in (False, True):  # with the option as it was, and changed
        with KeyValueStore(killed, sync=sync) as store:
            assert store.committed.offset == COMMITS
            assert everything(store) == as_committed(COMMITS)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_machine_that_crashes_leaves_an_earlier_commit_whole(tmp_path, killed, share):
    """What was not synced may be missing from the log's end, or hold anything: RocksDB stops there."""
    for name, left in (("missing", b""), ("zeros", bytes(4096)), ("garbage", os.urandom(4096))):
        copy = shutil.copytree(killed, tmp_path / name)
        (log,) = (copy / "committed").glob("*.log")
        os.truncate(log, int(log.stat().st_size * share))
        with log.open("ab") as end:
            end.write(left)
        with KeyValueStore(copy, sync=False) as store:
            offset = store.committed.offset or 0
            assert offset < COMMITS
            assert abs(offset - COMMITS * share) < COMMITS / 10
            assert everything(store) == as_committed(offset)
            assert not store.recover(COMMITS)


def test_a_commit_that_no_changelog_could_restore_is_refused(tmp_path):
    with KeyValueStore(tmp_path / "store", sync=False) as store:
        store.put(b"a", b"1")
        with pytest.raises(IllegalStateError, match="has no changelog that could restore them"):
            store.commit(None)
        store.commit(1)
        store.commit(None)  # the changelog is known now
        assert everything(store) == {b"a": b"1"}


OPTIONS = [
    {"sync": sync, "max_memory_bytes": memory, "rebuild_if_too_old": rebuild}
    for sync in (True, False)
    for memory in (0, 1 << 20)
    for rebuild in (True, False)
]


def copy_as_killed(store, copy):
    """As a killed process leaves it: a copy of one moment, though it is open, and RocksDB may be at work on its files."""
    while True:
        before = files_of(store)
        with suppress(shutil.Error):  # a file that was deleted meanwhile
            shutil.copytree(store, copy)
            if files_of(store) == before:
                return
        shutil.rmtree(copy)


def files_of(path):
    found = {}
    for one in path.rglob("*"):
        with suppress(FileNotFoundError):
            found[one] = one.stat().st_size
    return found


def test_options_that_change_between_starts_wipe_nothing(tmp_path):
    """Also after a process that ended without closing, and in each order: nothing on disk speaks of the options."""
    seen = {}
    for start in range(2 * len(OPTIONS)):
        options = OPTIONS[start * 5 % len(OPTIONS)]
        store = KeyValueStore(tmp_path / "store", **options)
        assert everything(store) == seen
        store.put(b"%d" % start, b"1")
        store.commit(start + 1)
        seen[b"%d" % start] = b"1"
        store.put(b"lost", b"1")  # in memory or spilled
        if start % 2:
            copy_as_killed(tmp_path / "store", tmp_path / "copy")
            store.close()
            shutil.rmtree(tmp_path / "store")
            (tmp_path / "copy").rename(tmp_path / "store")
        else:
            store.close()
    with KeyValueStore(tmp_path / "store") as store:
        assert everything(store) == seen


OPEN_FILES = Path("/proc/self/fd")


def open_files():
    found = []
    for one in OPEN_FILES.iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found.append(str(one.readlink()))
    return sorted(found)


@pytest.mark.skipif(not OPEN_FILES.is_dir(), reason="the system does not list open files")
@pytest.mark.parametrize("broken", ["format", "manifest", "spilled"])
def test_opening_that_fails_leaves_no_file_open(tmp_path, monkeypatch, broken):
    with KeyValueStore(tmp_path / "store", max_memory_bytes=0 if broken == "spilled" else 1 << 20) as store:
        if broken == "format":
            monkeypatch.setattr("dualwrite.state.store.as_text", lambda _: b'{"format": 99}')
        store.put(b"a", b"1")
        store.commit(1)
        store.put(b"b", b"1")
        if broken == "spilled":
            shutil.copytree(tmp_path / "store", tmp_path / "copy")
    directory = tmp_path / ("copy" if broken == "spilled" else "store")
    part = directory / ("uncommitted" if broken == "spilled" else "committed")
    if broken != "format":
        (part / "CURRENT").write_text("nonsense\n")
    before, kept = open_files(), []
    for _ in range(3):
        with pytest.raises(StoreUnreadable) as refused:
            KeyValueStore(directory)
        kept.append(refused)  # the traceback refers to all that the constructor has made
        assert open_files() == before
