"""Reads of a store by other threads: whole commits, with their offsets, while the store goes on."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dualwrite import ConfigurationError, failpoints
from dualwrite.errors import IllegalStateError
from dualwrite.failpoints import FailpointError
from dualwrite.state import KeyValueStore

pytest.importorskip("rocksdict", reason="the extra 'state' is not installed")

IN_MEMORY, SPILLED = 1 << 30, 0
KEYS = [b"%02d" % number for number in range(50)]
COMMITS = 30


@pytest.fixture(params=[IN_MEMORY, SPILLED], ids=["memory", "spilled"])
def store(tmp_path, request):
    with KeyValueStore(tmp_path / "store", max_memory_bytes=request.param) as store:
        yield store


def put_everywhere(store, value):
    store.put_all((key, b"%d" % value) for key in KEYS)


def test_other_threads_see_whole_commits_and_the_offset_of_each(store):
    """Every commit writes its own offset under each key: whatever is read must be the offset that comes with it."""
    reader, ended = store.reader(), threading.Event()
    put_everywhere(store, 0)
    store.commit(0)

    def read():
        seen = set()
        while True:
            last_round = ended.is_set()
            answer = reader.get(KEYS[len(seen) % len(KEYS)])
            assert answer.value == b"%d" % answer.committed.offset
            with reader.snapshot() as snapshot:
                expected = b"%d" % snapshot.committed.offset
                assert dict(snapshot.range()) == dict.fromkeys(KEYS, expected)
                assert list(snapshot.range(KEYS[10], KEYS[12], reverse=True)) == [
                    (KEYS[11], expected),
                    (KEYS[10], expected),
                ]
                assert snapshot.get(KEYS[0]) == snapshot.get(KEYS[-1]) == expected
            seen.add(snapshot.committed.offset)
            if last_round:
                return seen

    with ThreadPoolExecutor(3) as threads:
        reads = [threads.submit(read) for _ in range(3)]
        try:
            for offset in range(1, COMMITS + 1):
                put_everywhere(store, offset)
                if offset % 7 == 0:  # what is discarded is seen by nobody
                    store.recover(0)
                    put_everywhere(store, offset)
                store.commit(offset)
        finally:
            ended.set()
        assert set.intersection(*(read.result(60) for read in reads)) >= {COMMITS}


def test_a_snapshot_stays_whole_while_the_store_goes_on(store):
    put_everywhere(store, 1)
    store.commit(1)
    reader = store.reader()
    snapshot, scan = reader.snapshot(), reader.range()
    assert next(scan) == (KEYS[0], b"1")
    put_everywhere(store, 2)
    store.put(KEYS[1], None)
    store.put(b"new", b"2")
    store.commit(2)
    assert dict(snapshot.range()) == dict.fromkeys(KEYS, b"1")
    assert (snapshot.get(KEYS[1]), snapshot.get(b"new"), snapshot.committed.offset) == (b"1", None, 1)
    assert [value for _, value in scan] == [b"1"] * 49
    assert (reader.get(KEYS[1]).value, reader.get(b"new").value, reader.committed.offset) == (None, b"2", 2)


def test_readers_go_on_during_a_spilled_commit_and_see_none_of_it(tmp_path):
    """The commit is stopped between its copies: what is copied by then stands in RocksDB already."""
    with KeyValueStore(tmp_path / "store", max_memory_bytes=SPILLED) as store:
        store.put_all((key, b"old") for key in KEYS)
        store.commit(1)
        reader = store.reader()
        store.put_all((key, os.urandom(1 << 18)) for key in KEYS)
        failpoints.arm("state.copied:1:raise")
        with pytest.raises(FailpointError):
            store.commit(2)
        failpoints.arm("")
        with reader.snapshot() as snapshot:
            assert set(dict(snapshot.range()).values()) == {b"old"}
            assert reader.get(KEYS[0]) == (b"old", snapshot.committed)
            assert snapshot.committed.offset == 1
            store.recover(2)
            with pytest.raises(IllegalStateError, match="opened again after a failed commit"):
                snapshot.get(KEYS[0])
        assert reader.committed.offset == 2
        assert len(reader.get(KEYS[-1]).value) == 1 << 18


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 272, 273, 700])
def test_scans_of_any_length_in_both_directions_and_at_once(tmp_path, count):
    """Scans of one commit share an iterator of RocksDB, and read parts of their ranges in turn."""
    with KeyValueStore(tmp_path / "store") as store:
        entries = [(b"%04d" % number, b"%d" % number) for number in range(count)]
        store.put_all(entries)
        store.commit(1)
        snapshot = store.reader().snapshot()
        forward, backward = snapshot.range(), snapshot.range(reverse=True)
        assert list(zip(forward, backward, strict=True)) == list(zip(entries, reversed(entries), strict=True))
        lower, upper = b"%04d" % (count // 3), b"%04d" % (count - 1)
        inside = [entry for entry in entries if lower <= entry[0] < upper]
        assert list(snapshot.range(lower, upper)) == inside
        after = [entry for entry in entries if lower < entry[0] <= upper]
        assert list(snapshot.range(lower + b"\0", upper + b"\0")) == after
        assert list(snapshot.range(lower, upper, reverse=True)) == inside[::-1]
        assert list(snapshot.range(upper, lower)) == []


def test_uncommitted_reads_see_the_open_transaction_and_what_is_discarded_of_it(store):
    store.put_all([(b"a", b"1"), (b"b", b"1"), (b"c", b"1")])
    store.commit(1)
    committed, uncommitted = store.reader(), store.reader("read_uncommitted")
    store.put_all([(b"a", b"2"), (b"b", None), (b"d", b"2")])
    assert [committed.get(key).value for key in (b"a", b"b", b"d")] == [b"1", b"1", None]
    assert [uncommitted.get(key).value for key in (b"a", b"b", b"c", b"d")] == [b"2", None, b"1", b"2"]
    scan = uncommitted.range(reverse=True)
    assert list(uncommitted.range(b"a", b"d")) == [(b"a", b"2"), (b"c", b"1")]
    assert list(uncommitted.prefix(b"d")) == [(b"d", b"2")]
    assert list(committed.prefix(b"d")) == []
    assert uncommitted.get(b"a").committed.offset == 1
    store.recover(0)
    assert uncommitted.get(b"a").value == b"1"
    assert list(scan) == [(b"d", b"2"), (b"c", b"1"), (b"a", b"2")]
    with pytest.raises(IllegalStateError, match="uncommitted writes have no snapshot"):
        uncommitted.snapshot()


def test_uncommitted_reads_beside_a_writer(store):
    """Each transaction counts up, and some are discarded: nothing is read that was never written, in any order of keys."""
    reader, ended = store.reader("read_uncommitted"), threading.Event()

    def read():
        while not ended.is_set():
            found = list(reader.range())
            assert found == sorted(found)
            assert {key for key, _ in found} <= set(KEYS)
            answer = reader.get(KEYS[0])
            assert int(answer.value or b"0") >= (answer.committed.offset or 0)

    with ThreadPoolExecutor(2) as threads:
        reads = [threads.submit(read) for _ in range(2)]
        try:
            for offset in range(1, COMMITS + 1):
                put_everywhere(store, offset)
                store.commit(offset)
                put_everywhere(store, offset + 1)
                store.recover(0)
        finally:
            ended.set()
        for one in reads:
            one.result(60)


def test_closing_the_store_ends_readers_and_keeps_no_database_open(tmp_path):
    with KeyValueStore(tmp_path / "store") as store:
        store.put_all([(b"a", b"1"), (b"b", b"1")])
        store.commit(1)
        reader = store.reader()
        snapshot, scan = reader.snapshot(), reader.range()
        of_snapshot = snapshot.range()
        assert next(scan) == next(of_snapshot) == (b"a", b"1")
    with KeyValueStore(tmp_path / "store") as again:
        for read in (
            lambda: next(scan), lambda: next(of_snapshot), lambda: snapshot.get(b"a"), lambda: list(snapshot.range()),
        ):  # fmt: skip
            with pytest.raises(IllegalStateError, match="the store was closed"):
                read()
        for read in (lambda: reader.get(b"a"), lambda: reader.committed, reader.range, reader.snapshot):
            with pytest.raises(IllegalStateError, match="is closed"):
                read()
        assert again.reader().get(b"a").value == b"1"


def test_a_store_can_be_opened_again_at_once_whatever_its_readers_do(tmp_path):
    """RocksDB's lock goes with the last reference: a read in the middle of the closing must not keep one."""
    readers, ended = [], threading.Event()

    def read():
        while not ended.is_set():
            for reader in readers[-1:]:
                try:
                    reader.get(b"a")
                    list(reader.range())
                except IllegalStateError:
                    pass

    with ThreadPoolExecutor(2) as threads:
        reads = [threads.submit(read) for _ in range(2)]
        try:
            for offset in range(1, 40):
                with KeyValueStore(tmp_path / "store") as store:
                    readers.append(store.reader("read_uncommitted" if offset % 2 else "read_committed"))
                    store.put_all([(b"a", b"1"), (b"b", b"1")])
                    store.commit(offset)
        finally:
            ended.set()
        for one in reads:
            one.result(60)


def test_a_closed_snapshot_and_what_cannot_be_asked(store):
    reader = store.reader()
    snapshot = reader.snapshot()
    snapshot.close()
    snapshot.close()
    with pytest.raises(IllegalStateError, match="the snapshot is closed"):
        snapshot.get(b"a")
    for read in (reader.get, reader.range, reader.prefix, store.reader("read_uncommitted").range):
        with pytest.raises(TypeError, match="are bytes, not str"):
            read("a")
    with pytest.raises(ConfigurationError, match="isolation is read_committed or read_uncommitted, not 'serializable'"):
        store.reader("serializable")
