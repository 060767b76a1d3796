"""A state store against two dictionaries: what is committed, and what a read sees; with every way to spill and to reopen."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dualwrite import failpoints
from dualwrite.errors import ChangelogDiffers, IllegalStateError, StoreInUse, StoreUnreadable
from dualwrite.failpoints import FailpointError
from dualwrite.state import Committed, KeyValueStore, Position
from dualwrite.state.store import Rocks

pytest.importorskip("rocksdict", reason="the extra 'state' is not installed")

KEYS = st.binary(max_size=2)
VALUES = st.binary(max_size=3)
BOUNDS = st.none() | KEYS
NEVER, AT_ONCE, AT_TIMES = 1 << 30, 0, 600


def everything(store):
    return dict(store.range())


@pytest.fixture(params=[NEVER, AT_ONCE, AT_TIMES], ids=["memory", "spilled", "both"])
def bound(request):
    return request.param


@pytest.fixture
def store(tmp_path, bound):
    with KeyValueStore(tmp_path / "store", max_memory_bytes=bound) as store:
        yield store


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of calls leaves the store equal to a pair of dictionaries."""

    @initialize(bound=st.sampled_from([NEVER, AT_ONCE, AT_TIMES]))
    def start(self, bound):
        # In memory where there is such a place: what a disk keeps is the concern of the processes that are killed below.
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.bound = bound
        self.committed, self.seen, self.offset = {}, {}, 0
        self.scans = []
        self.open()

    def open(self):
        self.store = KeyValueStore(self.directory / "store", max_memory_bytes=self.bound)

    @rule(key=KEYS, value=VALUES)
    def put(self, key, value):
        self.store.put(key, value)
        self.seen[key] = value

    @rule(key=KEYS)
    def delete(self, key):
        assert self.store.delete(key) == self.seen.pop(key, None)

    @rule(key=KEYS, value=VALUES)
    def put_if_absent(self, key, value):
        assert self.store.put_if_absent(key, value) == self.seen.get(key)
        self.seen.setdefault(key, value)

    @rule(key=KEYS)
    def get(self, key):
        assert self.store.get(key) == self.seen.get(key)

    @rule(lower=BOUNDS, upper=BOUNDS, reverse=st.booleans())
    def scan(self, lower, upper, reverse):
        inside = [k for k in self.seen if (lower is None or lower <= k) and (upper is None or k < upper)]
        expected = [(key, self.seen[key]) for key in sorted(inside, reverse=reverse)]
        assert list(self.store.range(lower, upper, reverse=reverse)) == expected
        self.scans.append((self.store.range(lower, upper, reverse=reverse), expected))

    @precondition(lambda self: self.scans)
    @rule()
    def an_older_scan_shows_what_was_there_when_it_began(self):
        scan, expected = self.scans.pop()
        assert list(scan) == expected

    @rule(prefix=KEYS, reverse=st.booleans())
    def prefix(self, prefix, reverse):
        expected = sorted((e for e in self.seen.items() if e[0].startswith(prefix)), reverse=reverse)
        assert list(self.store.prefix(prefix, reverse=reverse)) == expected

    @rule(step=st.integers(0, 3))
    def commit(self, step):
        self.offset += step
        self.store.commit(self.offset)
        self.committed = dict(self.seen)
        self.scans_have_ended()

    @rule(offset=st.integers(0, 20))
    def recover(self, offset):
        assert self.store.recover(offset) is (self.offset >= offset)
        self.seen = dict(self.committed)
        self.scans_have_ended()

    @rule()
    def reopen(self):
        self.store.close()
        self.scans_have_ended()
        self.open()
        self.seen = dict(self.committed)

    @rule(point=st.sampled_from(["spilled", "decided", "copied", "finished", "committed"]))
    def commit_fails(self, point):
        """The store comes back as it was, or as it should have become: as the place of the failure says."""
        self.offset += 1
        failpoints.arm(f"state.{point}:1:raise")
        try:
            self.store.commit(self.offset)
        except FailpointError:
            if point == "spilled":
                self.offset -= 1
            else:
                self.committed = dict(self.seen)
            self.store.recover(0)
        else:
            self.committed = dict(self.seen)
        finally:
            failpoints.arm("")
        self.seen = dict(self.committed)
        self.scans_have_ended()

    def scans_have_ended(self):
        for scan, expected in self.scans:
            if expected:
                with pytest.raises(IllegalStateError, match="transaction has ended"):
                    next(scan)
        self.scans = []

    @invariant()
    def the_uncommitted_writes_make_the_difference(self):
        if not hasattr(self, "store"):
            return
        seen = dict(self.committed)
        for key, value in self.store.uncommitted():
            seen = {k: v for k, v in seen.items() if k != key} | ({} if value is None else {key: value})
        assert seen == self.seen
        assert (self.store.committed.offset or 0) == self.offset

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.directory)


StoreMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestStoreAgainstDictionaries = StoreMachine.TestCase

WORK = """
import sys
from dualwrite.state import KeyValueStore
with KeyValueStore(sys.argv[1], max_memory_bytes=int(sys.argv[2])) as store:
    for number in range(400):
        store.put(b"%06d" % number, b"new" * 10_000)
    store.put(b"deleted", None)
    store.commit(7)
"""


@pytest.mark.parametrize(
    ("point", "committed"),
    [("spilled:3", False), ("decided", True), ("copied:2", True), ("finished", True), ("committed", True)],
)
def test_a_process_killed_in_a_spilled_commit_leaves_all_of_it_or_nothing(tmp_path, point, committed):
    with KeyValueStore(tmp_path / "store") as store:
        store.put(b"000000", b"old")
        store.put(b"deleted", b"old")
        store.commit(3)
    done = subprocess.run(
        [sys.executable, "-c", WORK, tmp_path / "store", str(1 << 20)],
        env={**os.environ, "DUALWRITE_FAILPOINT": f"state.{point}"}, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    for _ in range(2):
        with KeyValueStore(tmp_path / "store") as store:
            found = everything(store)
            if committed:
                assert found == {b"%06d" % number: b"new" * 10_000 for number in range(400)}
            else:
                assert found == {b"000000": b"old", b"deleted": b"old"}
            assert store.committed.offset == (7 if committed else 3)
            assert store.recover(7) is committed
            assert not store.has_uncommitted
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["committed"]


def test_a_commit_of_memory_is_on_disk_when_the_process_dies_after_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WORK, tmp_path / "store", str(1 << 30)],
        env={**os.environ, "DUALWRITE_FAILPOINT": "state.committed"}, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    with KeyValueStore(tmp_path / "store") as store:
        assert len(everything(store)) == 400
        assert store.committed.offset == 7


def test_uncommitted_writes_are_gone_after_closing(tmp_path, bound):
    with KeyValueStore(tmp_path / "store", max_memory_bytes=bound) as store:
        store.put(b"a", b"1")
        store.commit(1)
        store.put(b"b", b"2")
    with KeyValueStore(tmp_path / "store") as store:
        assert everything(store) == {b"a": b"1"}


def test_a_second_opener_is_refused_in_this_process_and_in_another(tmp_path):
    with KeyValueStore(tmp_path / "store") as store:
        store.put(b"a", b"1")
        with pytest.raises(StoreInUse, match="is open elsewhere, in this process"):
            KeyValueStore(tmp_path / "store")
        other = [sys.executable, "-c", f"from dualwrite.state import *; KeyValueStore({str(tmp_path / 'store')!r})"]
        done = subprocess.run(other, capture_output=True, text=True, check=False)
        assert "StoreInUse" in done.stderr
        if Path("/proc/locks").exists():
            assert f"in process {os.getpid()} (" in done.stderr
        store.commit(1)
        assert everything(store) == {b"a": b"1"}
    KeyValueStore(tmp_path / "store").close()


def test_an_open_scan_keeps_no_store_open(tmp_path):
    with KeyValueStore(tmp_path / "store") as store:
        store.put_all([(b"a", b"1"), (b"b", b"2")])
        store.commit(1)
        scan = store.range()
        assert next(scan) == (b"a", b"1")
    with KeyValueStore(tmp_path / "store"), pytest.raises(IllegalStateError, match="transaction has ended"):
        next(scan)


def test_a_closed_scan_is_exhausted(store):
    store.put(b"a", b"1")
    scan = store.range()
    scan.close()
    assert list(scan) == []


def test_an_offset_never_goes_back(store):
    store.commit(5)
    store.put(b"a", b"1")
    with pytest.raises(IllegalStateError, match="already at offset 5, cannot commit 4"):
        store.commit(4)
    store.commit(5)
    store.commit(None)
    assert store.committed.offset == 5
    assert everything(store) == {b"a": b"1"}


def test_a_store_without_a_changelog_commits_without_an_offset(tmp_path):
    with KeyValueStore(tmp_path / "store") as store:
        store.put(b"a", b"1")
        store.commit(None)
    with KeyValueStore(tmp_path / "store") as store:
        assert everything(store) == {b"a": b"1"}
        assert store.committed.offset is None
        assert store.recover(0)


def test_a_store_follows_one_changelog_for_ever(tmp_path, bound):
    with KeyValueStore(tmp_path / "store", max_memory_bytes=bound) as store:
        store.put(b"a", b"1")
        with pytest.raises(IllegalStateError, match="uncommitted writes"):
            store.follow("one")
        store.commit(1)
        store.follow("one")
    with KeyValueStore(tmp_path / "store", max_memory_bytes=bound) as store:
        store.follow("one")
        store.put(b"b", b"2")
        store.commit(2)
        with pytest.raises(ChangelogDiffers, match="follows the changelog one, not another"):
            store.follow("another")
        assert (store.committed.changelog, store.committed.offset) == ("one", 2)


def test_a_store_of_several_changelogs_has_an_offset_for_each(tmp_path, bound):
    with KeyValueStore(tmp_path / "store", max_memory_bytes=bound) as store:
        store.follow("id/0", "id/1")
        assert store.committed.offsets == {"id/0": None, "id/1": None}
        store.put(b"a", b"1")
        store.commit({"id/0": 5}, as_of_ms=1_000)
        store.commit({"id/0": 6, "id/1": 3}, as_of_ms=2_000)
        store.commit({"id/1": 4}, as_of_ms=3_000)
        with pytest.raises(IllegalStateError, match="already at offset 6, cannot commit 5"):
            store.commit({"id/1": 9, "id/0": 5})
        with pytest.raises(IllegalStateError, match="does not follow the changelog id/2"):
            store.commit({"id/2": 1})
        for single in (7, None):
            with pytest.raises(IllegalStateError, match="follows 2 changelogs"):
                store.commit(single)
    with KeyValueStore(tmp_path / "store", max_memory_bytes=bound) as store:
        assert everything(store) == {b"a": b"1"}
        assert store.committed.offsets == {"id/0": 6, "id/1": 4}
        assert (store.committed.positions[0].at_ms, store.committed.at_ms) == (2_000, 2_000)
        assert store.recover({"id/0": 6, "id/1": 4})
        assert not store.recover({"id/0": 6, "id/1": 5})


def test_an_offset_that_is_of_no_named_changelog_is_not_taken_for_one_of_several(store):
    store.commit(5)
    with pytest.raises(IllegalStateError, match="at offset 5 of a changelog that was never named"):
        store.follow("id/0", "id/1")
    store.follow("id/0")
    store.follow("id/0", "id/1")
    assert store.committed.offsets == {"id/0": 5, "id/1": None}


def test_a_store_of_one_changelog_is_read_and_left_as_earlier_versions_wrote_it(tmp_path):
    written = b'{"offset": 7, "at_ms": 1234, "changelog": "id/0", "format": 1}'
    rocks = Rocks(tmp_path / "store" / "committed")
    rocks.write(rocks.batch(), note=written)
    rocks.close()
    with KeyValueStore(tmp_path / "store") as store:
        assert store.committed == Committed((Position(7, 1234, "id/0"),))
        store.commit(8, as_of_ms=1235)
    rocks = Rocks(tmp_path / "store" / "committed")
    assert rocks.note() == written.replace(b"7", b"8").replace(b"1234", b"1235")
    rocks.close()


def test_the_time_of_a_commit_stands_with_it(store):
    assert store.committed.at_ms == 0
    store.commit(1)
    assert store.committed.at_ms > 1_700_000_000_000


@pytest.mark.parametrize(
    "call", [lambda s: s.get(b"a"), lambda s: s.put(b"a", b"1"), lambda s: s.commit(1), lambda s: s.range()]
)
def test_a_failed_commit_stops_every_call_until_recovery(tmp_path, call):
    with KeyValueStore(tmp_path / "store", max_memory_bytes=0) as store:
        store.put(b"a", b"1")
        failpoints.arm("state.decided:1:raise")
        with pytest.raises(FailpointError):
            store.commit(1)
        failpoints.arm("")
        with pytest.raises(IllegalStateError, match="has failed .call recover"):
            call(store)
        assert store.recover(1)
        assert everything(store) == {b"a": b"1"}


@pytest.mark.parametrize("wrong", ["text", None, 1])
def test_only_bytes_are_taken(store, wrong):
    with pytest.raises(TypeError, match="key is not bytes but"):
        store.put(wrong, b"")
    with pytest.raises(TypeError, match="key is not bytes but"):
        store.get(wrong)
    if wrong is not None:
        with pytest.raises(TypeError, match="value is not bytes but"):
            store.put(b"a", wrong)
        with pytest.raises(TypeError, match="bound is not bytes but"):
            store.range(wrong)
    assert everything(store) == {}


def test_a_closed_store_refuses_and_closes_twice(tmp_path):
    store = KeyValueStore(tmp_path / "store")
    store.close()
    store.close()
    with pytest.raises(IllegalStateError, match="is closed"):
        store.get(b"a")


def test_a_directory_of_another_format_is_refused_and_stays(tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr("dualwrite.state.store.as_text", lambda _: b'{"format": 3}')
        with KeyValueStore(tmp_path / "store") as store:
            store.put(b"a", b"1")
            store.commit(1)
    for _ in range(2):
        with pytest.raises(StoreUnreadable, match="of format 3, not 1 or 2"):
            KeyValueStore(tmp_path / "store")


def test_a_directory_that_rocksdb_cannot_read_is_refused_and_stays(tmp_path):
    KeyValueStore(tmp_path / "store").close()
    (tmp_path / "store" / "committed" / "CURRENT").write_text("nonsense\n")
    with pytest.raises(StoreUnreadable, match="cannot be opened"):
        KeyValueStore(tmp_path / "store")
    assert (tmp_path / "store" / "committed" / "CURRENT").read_text() == "nonsense\n"


def test_the_size_of_uncommitted_writes_is_known_in_memory_and_on_disk(store):
    assert store.approximate_uncommitted_bytes == 0
    store.put_all((b"%d" % number, bytes(1000)) for number in range(10))
    assert 10_000 < store.approximate_uncommitted_bytes < 20_000
    store.commit(1)
    assert store.approximate_uncommitted_bytes == 0
    store.put(b"a", bytes(1000))
    assert store.approximate_uncommitted_bytes > 1000
    store.recover(0)
    assert store.approximate_uncommitted_bytes == 0


def test_flush_is_deprecated(store):
    store.put(b"a", b"1")
    with pytest.warns(DeprecationWarning, match="use commit"):
        store.flush()
    assert store.has_uncommitted
    assert store.transactional()
