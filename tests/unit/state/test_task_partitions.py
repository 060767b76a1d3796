"""The stores of a consumer's partitions, without a broker."""

import pytest

from dualwrite import Unavailable
from dualwrite.errors import IllegalStateError
from dualwrite.state import PartitionStores, task

pytest.importorskip("rocksdict", reason="the extra 'state' is not installed")


class Message:
    def __init__(self, partition):
        self._partition = partition

    def partition(self):
        return self._partition


@pytest.fixture
def restored(monkeypatch):
    """The partitions whose stores were restored, in order."""
    seen = []

    def roll_forward(store, _changelog, *, check, **_):
        check()
        store.recover()
        seen.append(int(store.path.name))
        return 0

    monkeypatch.setattr(task, "roll_forward", roll_forward)
    monkeypatch.setattr(task, "Changelog", lambda *_: None)
    return seen


@pytest.fixture
def stores(tmp_path):
    with PartitionStores(tmp_path / "stores", kafka={}, changelog="changelog") as stores:
        yield stores


def go_on():
    """Let it go on."""


def test_a_store_is_restored_once_for_each_assignment_and_after_a_failure(stores, restored):
    first, second = object(), object()
    for assigned in ({0: first}, {0: first, 1: first}, {0: first}):
        with stores._block(assigned, go_on) as join:
            join(None)()
    assert restored == [0, 1]
    with stores._block({0: second}, go_on) as join:  # it was another member's meanwhile
        join(None)()
    assert restored == [0, 1, 0]
    with pytest.raises(ZeroDivisionError), stores._block({0: second, 1: first}, go_on):
        stores.of(Message(0)).put(b"a", b"1")
        raise ZeroDivisionError
    with stores._block({1: first, 0: second}, go_on):
        assert stores.of(Message(0)).get(b"a") is None
    assert restored == [0, 1, 0, 0, 1]


def test_a_store_belongs_to_a_handler_that_runs(stores, restored):
    with stores._block({0: object()}, go_on), pytest.raises(IllegalStateError, match="partition 1 belongs to no"):
        stores.of(Message(1))
    with pytest.raises(IllegalStateError, match="partition 0 belongs to no"):
        stores.of(Message(0))


def test_another_thread_reads_the_store_of_a_partition(stores, restored):
    with pytest.raises(IllegalStateError, match="partition 0 is not open here"):
        stores.reader(0)
    with stores._block({0: object()}, go_on) as join:
        stores.of(Message(0)).put(b"a", b"1")
        committed, uncommitted = stores.reader(0), stores.reader(0, "read_uncommitted")
        assert (committed.get(b"a").value, uncommitted.get(b"a").value) == (None, b"1")
        join(None)
    stores.close()
    with pytest.raises(IllegalStateError, match="is closed"):
        committed.get(b"a")


def test_restoring_is_interrupted_and_begins_again(stores, restored):
    class Lost(Exception):
        pass

    def lost():
        raise Lost

    assignment = object()
    with pytest.raises(Lost), stores._block({0: assignment}, lost):
        pytest.fail("the block began")
    with stores._block({0: assignment}, go_on):
        assert restored == [0]


def test_a_disk_that_cannot_be_written_is_waited_for(stores, monkeypatch, restored):
    def full(*_, **__):
        raise Exception("No space left on device")  # noqa: TRY002 - as rocksdict

    monkeypatch.setattr(task, "roll_forward", full)
    with pytest.raises(Unavailable, match="No space left"), stores._block({0: object()}, go_on):
        pytest.fail("the block began")
