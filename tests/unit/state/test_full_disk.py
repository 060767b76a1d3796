"""Stores on a disk that is really full: nothing committed is lost, and they go on as soon as there is space."""

import os
import subprocess
import sys

import pytest
from harness.small_disk import fill_up, make_room, small_disk

from dualwrite import Unavailable
from dualwrite.state import KeyValueStore

pytest.importorskip("rocksdict", reason="the extra 'state' is not installed")

LITTLE = 100_000
MUCH = 400_000
IN_MEMORY, SPILLED = 1 << 30, 0


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path) as disk:
        yield disk


@pytest.fixture
def opened(disk):
    """Opens the store on the disk, with a first commit; closes it at the end."""
    stores = []

    def open_store(max_memory_bytes):
        store = KeyValueStore(disk / "store", max_memory_bytes=max_memory_bytes)
        stores.append(store)
        store.put(b"kept", b"1")
        store.commit(1)
        return store

    yield open_store
    for store in stores:
        store.close()


def test_a_commit_that_a_full_disk_has_failed_is_recovered_as_often_as_it_takes(disk, opened):
    store = opened(IN_MEMORY)
    fill_up(disk, LITTLE)
    store.put(b"big", os.urandom(MUCH))
    with pytest.raises(Exception, match="No space left on device"):
        store.commit(2)
    try:
        store.recover(0)  # whether RocksDB can open on so little space is its affair
    except Unavailable as full:
        assert "is full" in str(full)  # noqa: PT017 - as above
    make_room(disk)
    for _ in range(2):
        assert store.recover(2) is False
    assert dict(store.range()) == {b"kept": b"1"}
    store.put(b"big", b"2")
    store.commit(2)
    assert store.get(b"big") == b"2"


def test_a_store_that_a_full_disk_does_not_let_open_is_not_left_open(disk, opened):
    store = opened(IN_MEMORY)
    store.put(b"big", os.urandom(MUCH))
    store.commit(2)
    store.close()
    fill_up(disk)
    with pytest.raises(Unavailable, match="is full.*free space on it"):
        KeyValueStore(disk / "store")
    make_room(disk)
    with KeyValueStore(disk / "store") as another:
        assert (another.get(b"kept"), another.committed.offset) == (b"1", 2)


@pytest.mark.parametrize("times", [1, 3])
def test_spilled_writes_that_have_filled_the_disk_are_discarded(disk, opened, times):
    store = opened(SPILLED)
    for _ in range(times):
        with pytest.raises(Unavailable, match="No space left on device"):
            for number in range(1000):
                store.put(b"%d" % number, os.urandom(LITTLE))
        assert store.recover(1) is True
        assert dict(store.range()) == {b"kept": b"1"}
    store.put(b"after", b"1")
    store.commit(2)
    assert store.get(b"after") == b"1"


def test_a_decided_commit_that_a_full_disk_has_stopped_is_finished_once_there_is_space(disk, opened):
    store = opened(SPILLED)
    for number in range(40):
        store.put(b"%d" % number, os.urandom(LITTLE))
    fill_up(disk, 20 * LITTLE)
    with pytest.raises(Exception, match="No space left on device"):
        store.commit(2)
    make_room(disk)
    assert store.recover(2) is True
    assert len(dict(store.range())) == 41


DYING = """
import os, sys
from dualwrite.state import KeyValueStore
store = KeyValueStore(sys.argv[1], max_memory_bytes=0)
try:
    for number in range(1000):
        store.put(b"%d" % number, os.urandom(100_000))
finally:
    os.kill(os.getpid(), 9)
"""


def test_a_process_that_dies_on_a_disk_full_of_its_own_writes_leaves_a_store_that_opens_with_little_space(disk, opened):
    opened(SPILLED).close()
    (disk / "reserve").write_bytes(os.urandom(5 * LITTLE))
    assert subprocess.run([sys.executable, "-c", DYING, disk / "store"], check=False).returncode == -9
    (disk / "reserve").unlink()
    with KeyValueStore(disk / "store") as store:
        assert dict(store.range()) == {b"kept": b"1"}
