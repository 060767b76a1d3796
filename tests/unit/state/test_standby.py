"""Stores rolled forward, from a changelog in memory."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from dualwrite import Unavailable, failpoints
from dualwrite.clock import Deadline
from dualwrite.errors import ChangelogDiffers, IllegalStateError, StoreTooOld
from dualwrite.failpoints import FailpointError
from dualwrite.state import KeyValueStore, changelog
from dualwrite.state.changelog import Changelog, Log, ignore_progress, roll_forward

pytest.importorskip("rocksdict", reason="the extra 'state' is not installed")

DAY_MS = 86_400_000
START_MS = 2_000_000_000_000


class InMemory:
    """A changelog of records, read in parts of two; each part takes a minute."""

    def __init__(self, clock, *records, partition=0):
        self.clock, self.records, self.partition = clock, records, partition
        self.delete_retention_ms = DAY_MS

    def identity(self, _deadline, _check):
        return f"id/{self.partition}"

    def describe(self, _deadline, _at_least, check):
        check()
        end = len(self.records)
        return Log(
            f"log[{self.partition}]", 0, end, frozenset({"compact"}), -1, -1, self.delete_retention_ms, recent=end
        )

    def read(self, start, end, _deadline, check):
        for begin in range(start, end, 2):
            check()
            self.clock.now_ms += 60_000
            until = min(begin + 2, end)
            yield list(self.records[begin:until]), until


class Clock:
    now_ms = START_MS

    def time(self):
        return self.now_ms / 1000


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(changelog, "time", made)
    return made


@pytest.fixture
def store(tmp_path):
    with KeyValueStore(tmp_path / "store") as store:
        yield store


def rolled(store, *logs, **more):
    return roll_forward(store, *logs, timeout_s=60, wait_for_end=True, on_progress=ignore_progress, **more)


RECORDS = [(b"a", b"1"), (b"b", b"1"), (b"a", None), (b"c", b"1"), (b"b", b"2")]


def test_records_are_applied_in_their_order_and_uncommitted_writes_are_gone(store, clock):
    store.put(b"x", b"uncommitted")
    assert rolled(store, InMemory(clock, *RECORDS)) == 5
    assert dict(store.range()) == {b"b": b"2", b"c": b"1"}
    assert (store.committed.offset, store.committed.changelog) == (5, "id/0")
    assert rolled(store, InMemory(clock, *RECORDS)) == 0


def test_an_interrupted_one_goes_on_where_it_stopped(store, clock):
    class Interrupted(Exception):
        pass

    left = [3]

    def check():
        left[0] -= 1
        if not left[0]:
            raise Interrupted

    with pytest.raises(Interrupted):
        rolled(store, InMemory(clock, *RECORDS), check=check)
    assert store.committed.offset == 2
    assert rolled(store, InMemory(clock, *RECORDS)) == 3
    assert dict(store.range()) == {b"b": b"2", b"c": b"1"}


def test_a_store_is_as_old_as_it_was_until_the_end_is_reached(store, clock):
    """Deletions may vanish from the changelog while it is read."""
    log = InMemory(clock, *RECORDS)
    seen = []
    roll_forward(store, log, timeout_s=60, wait_for_end=True, on_progress=lambda *_: seen.append(store.committed.at_ms))
    assert seen == [START_MS] * 3
    clock.now_ms = later = START_MS + DAY_MS // 2
    log.records = [*RECORDS, *RECORDS]
    seen.clear()
    roll_forward(store, log, timeout_s=60, wait_for_end=True, on_progress=lambda *_: seen.append(store.committed.at_ms))
    assert seen == [START_MS, START_MS, later]


def test_a_store_that_is_at_the_end_becomes_young(store, clock):
    log = InMemory(clock, *RECORDS)
    rolled(store, log)
    clock.now_ms += 10 * DAY_MS
    rolled(store, log)
    assert store.committed.at_ms == clock.now_ms


def test_a_changelog_that_ends_before_the_store_is_refused_and_nothing_changes(store, clock):
    rolled(store, InMemory(clock, *RECORDS))
    with pytest.raises(ChangelogDiffers, match="ends at 3, before the store's offset 5"):
        rolled(store, InMemory(clock, *RECORDS[:3]))
    assert dict(store.range()) == {b"b": b"2", b"c": b"1"}
    assert store.committed.offset == 5


@pytest.mark.parametrize(
    ("at_least", "offsets", "end"),
    [
        (None, [(5, 7), (5, 7), (8, 8)], 8),  # a task waits until no transaction is open
        (0, [(5, 7)], 5),  # a standby does not
        (5, [(5, 7)], 5),
        # The marker of the transaction that its store stands after is not written yet.
        (7, [(5, 7), (8, 8)], 8),
        (7, [(5, 7), (8, 9)], 8),
        (7, [(5, 5)], 5),  # truncated
    ],
)
def test_the_end_of_a_changelog_with_open_transactions(monkeypatch, at_least, offsets, end):
    answers = iter([one for both in offsets for one in both])
    log = Changelog({"bootstrap.servers": "localhost:1"}, "log", 0)
    monkeypatch.setattr(log, "_offset", lambda *_: next(answers))
    monkeypatch.setattr(changelog, "_PAUSE_S", 0)
    assert log._stable_end(Deadline(10), at_least, lambda: None) == end
    assert next(answers, None) is None


def test_a_broker_that_does_not_answer_is_asked_again_until_the_time_is_over(monkeypatch):
    def describe_topics(*_, **__):
        answer = Future()
        if silent:
            silent.pop()
            answer.set_exception(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
        else:
            answer.set_result(SimpleNamespace(topic_id="id", partitions=[SimpleNamespace(id=0)]))
        return {"log": answer}

    log = Changelog({"bootstrap.servers": "localhost:1"}, "log", 0)
    monkeypatch.setattr(log, "_admin", SimpleNamespace(describe_topics=describe_topics))
    silent = [1, 1]
    assert log.identity(Deadline(60), lambda: None) == "id/0"
    silent = [1, 1]
    with pytest.raises(Unavailable, match=r"did not answer about the changelog log\[0\]"):
        log.identity(Deadline(0), lambda: None)
    assert silent == [1]


# Stores that are too old


def too_old(clock, path, **more):
    """A store that equalled its changelog two days ago, which others have written since."""
    store = KeyValueStore(path, **more)
    rolled(store, InMemory(clock, (b"gone", b"1"), (b"a", b"1")))
    clock.now_ms += 2 * DAY_MS
    # The tombstone at offset 2 was removed; what is recent begins behind the next record.
    return store, Compacted(clock, (b"gone", b"1"), (b"a", b"1"), None, (b"b", b"1"), (b"c", b"1"))


class Compacted(InMemory):
    """A changelog whose records of None were removed, and whose last record alone is recent."""

    start = 0

    def describe(self, deadline, at_least, check):
        return replace(super().describe(deadline, at_least, check), start=self.start, recent=len(self.records) - 1)

    def read(self, start, end, deadline, check):
        for changes, until in super().read(start, end, deadline, check):
            yield [change for change in changes if change is not None and change[0] != b"gone"], until


def test_a_store_that_is_too_old_is_moved_aside_and_built_again(tmp_path, clock, caplog):
    store, log = too_old(clock, tmp_path / "store", rebuild_if_too_old=True)
    reader = store.reader()
    snapshot = reader.snapshot()
    store.put(b"x", b"uncommitted")
    with store:
        assert rolled(store, log) == 3
        assert dict(store.range()) == dict(reader.range()) == {b"a": b"1", b"b": b"1", b"c": b"1"}
        assert (store.committed.offset, store.committed.changelog) == (5, "id/0")
        with pytest.raises(IllegalStateError, match="the store was closed, or opened again"):
            snapshot.get(b"gone")
    assert "48.0 hours old" in caplog.text
    (tmp_path / "another").mkdir()
    (tmp_path / "store" / "too-old").rename(tmp_path / "another" / "committed")
    with KeyValueStore(tmp_path / "another") as moved:
        assert dict(moved.range()) == {b"a": b"1", b"gone": b"1"}


def test_a_store_is_built_again_once_and_not_at_each_start(tmp_path, clock, caplog):
    """The data that was moved aside is what a rebuild replaces, and one copy of it is kept, however often it happens."""
    store, log = too_old(clock, tmp_path / "store", rebuild_if_too_old=True)
    store.close()
    for applied in (3, 0, 0):
        with KeyValueStore(tmp_path / "store", rebuild_if_too_old=True) as store:
            assert rolled(store, log) == applied
    assert caplog.text.count("is built again") == 1
    clock.now_ms += 2 * DAY_MS
    log.records += (None, (b"d", b"1"), (b"e", b"1"))
    with KeyValueStore(tmp_path / "store", rebuild_if_too_old=True) as store:
        assert rolled(store, log) == 5
        assert store.committed.offset == 8
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["committed", "too-old"]


@pytest.mark.parametrize("interrupted", [1, 2])
def test_an_interrupted_rebuild_goes_on(tmp_path, clock, interrupted):
    store, log = too_old(clock, tmp_path / "store", rebuild_if_too_old=True)
    failpoints.arm(f"state.restored:{interrupted}:raise")
    with store, pytest.raises(FailpointError):
        rolled(store, log)
    failpoints.arm("")
    with KeyValueStore(tmp_path / "store", rebuild_if_too_old=True) as store:
        rolled(store, log)
        assert dict(store.range()) == {b"a": b"1", b"b": b"1", b"c": b"1"}


def test_a_store_that_cannot_be_built_again_is_not_moved(tmp_path, clock):
    store, log = too_old(clock, tmp_path / "store", rebuild_if_too_old=True)
    log.start = 1
    with store, pytest.raises(ChangelogDiffers, match="were deleted"):
        rolled(store, log)
    with KeyValueStore(tmp_path / "store") as store:
        log.start = 0
        assert dict(store.range()) == {b"gone": b"1", b"a": b"1"}
        with pytest.raises(StoreTooOld, match="48.0 hours old"):
            rolled(store, log)
        assert dict(store.range()) == {b"gone": b"1", b"a": b"1"}


# Stores that follow all partitions of a topic


def test_a_store_of_two_partitions_has_an_offset_for_each(tmp_path, clock):
    first, second = InMemory(clock, *RECORDS), InMemory(clock, (b"x", b"1"), partition=1)
    with KeyValueStore(tmp_path / "store") as store:
        assert rolled(store, first, second) == 6
        first.records += ((b"c", None),)
        answer = store.reader().get(b"c")
        assert answer.committed.offsets == {"id/0": 5, "id/1": 1}
        assert rolled(store, first, second) == 1
        assert (answer.value, store.reader().get(b"c").value) == (b"1", None)
    with KeyValueStore(tmp_path / "store") as store:
        assert dict(store.range()) == {b"b": b"2", b"x": b"1"}
        assert [store.committed.offset_of(partition) for partition in (0, 1, 2)] == [6, 1, None]
        assert rolled(store, first, second) == 0
        with pytest.raises(IllegalStateError, match="follows 2 changelogs"):
            _ = store.committed.offset


def test_each_partition_is_as_old_as_it_is(store, clock):
    """One that is read to its end does not make another one younger, in which deletions may be gone."""
    records = (b"gone", b"1"), (b"a", b"1"), None, (b"b", b"1"), (b"c", b"1")
    second = InMemory(clock, (b"x", b"1"), partition=1)
    rolled(store, InMemory(clock, *records[:2]), second)
    clock.now_ms += 2 * DAY_MS
    store.commit({"id/1": 1}, as_of_ms=clock.now_ms)
    with pytest.raises(StoreTooOld, match=r"48.0 hours old, and the changelog log\[0\]"):
        rolled(store, Compacted(clock, *records), second)


def test_a_partition_more_is_followed_and_one_less_is_refused(store, clock):
    logs = [InMemory(clock, *RECORDS), InMemory(clock, (b"x", b"1"), partition=1)]
    rolled(store, logs[0])
    assert rolled(store, *logs) == 1
    assert dict(store.range()) == {b"b": b"2", b"c": b"1", b"x": b"1"}
    with pytest.raises(ChangelogDiffers, match=r"follows the changelog id/1, not id/0"):
        rolled(store, logs[0])
    assert store.committed.offsets == {"id/0": 5, "id/1": 1}


def test_all_partitions_are_built_again_where_one_is_too_old(tmp_path, clock):
    store, log = too_old(clock, tmp_path / "store", rebuild_if_too_old=True)
    another = InMemory(clock, (b"x", b"1"), partition=1)
    with store:
        assert rolled(store, log, another) == 4
        assert dict(store.range()) == {b"a": b"1", b"b": b"1", b"c": b"1", b"x": b"1"}


def test_an_interrupted_copy_of_two_partitions_goes_on_in_the_second(tmp_path, clock):
    logs = [InMemory(clock, *RECORDS), InMemory(clock, (b"x", b"1"), (b"y", b"1"), (b"z", b"1"), partition=1)]
    failpoints.arm("state.restored:4:raise")
    with KeyValueStore(tmp_path / "store") as store, pytest.raises(FailpointError):
        rolled(store, *logs)
    failpoints.arm("")
    with KeyValueStore(tmp_path / "store") as store:
        assert store.committed.offsets == {"id/0": 5, "id/1": 2}
        assert rolled(store, *logs) == 1
