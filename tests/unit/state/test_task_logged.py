"""A store in the transactions that carry its changelog, without a broker."""

import pytest

from dualwrite import failpoints
from dualwrite.errors import IllegalStateError
from dualwrite.state import KeyValueStore, task
from dualwrite.state.task import LoggedStore

pytest.importorskip("rocksdict", reason="the extra 'state' is not installed")


class Delivered:
    def __init__(self, offset):
        self._offset = offset

    def offset(self):
        return self._offset


class Broker:
    """Takes what is produced, and says so of all or of all but the last."""

    topic, partition = "changelog", 0

    def __init__(self):
        self.records, self.silent_about = [], 0

    def produce(self, topic, value, key, *, partition, on_delivery):
        assert (topic, partition) == (self.topic, self.partition)
        self.records.append((key, value))
        if len(self.records) != self.silent_about:
            on_delivery(None, Delivered(len(self.records) - 1))


@pytest.fixture
def broker():
    return Broker()


@pytest.fixture
def of_store(tmp_path, monkeypatch, broker):
    def roll_forward(store, changelog, **_):
        store.recover()
        store.put_all(changelog.records[store.committed.offset or 0 :])
        store.commit(len(changelog.records))
        return 0

    monkeypatch.setattr(task, "roll_forward", roll_forward)
    with KeyValueStore(tmp_path / "store", max_memory_bytes=0) as store:
        yield LoggedStore(store, broker, 60)


def test_a_store_that_cannot_commit_leaves_the_transaction_as_it_is(of_store, broker, caplog):
    """Raised, the error would look as if the transaction had failed, and its work would be run again."""
    of_store.begin()
    of_store.store.put(b"a", b"1")
    of_store.log(broker)
    failpoints.arm("state.spilled:1:raise")
    of_store.commit()
    failpoints.arm("")
    assert of_store.behind
    assert "cannot commit; the next block restores the store first" in caplog.text
    assert of_store.store.get(b"a") is None
    of_store.begin()
    assert of_store.store.get(b"a") == b"1"
    assert of_store.store.committed.offset == 1


def test_a_store_whose_offset_is_not_known_is_restored(of_store, broker, caplog):
    of_store.begin()
    of_store.store.put_all([(b"a", b"1"), (b"b", b"1")])
    broker.silent_about = 2
    of_store.log(broker)
    of_store.commit()
    assert of_store.behind
    assert "not every changelog offset was reported" in caplog.text
    of_store.begin()
    assert dict(of_store.store.range()) == {b"a": b"1", b"b": b"1"}
    assert of_store.store.committed.offset == 2


def test_a_store_that_was_written_outside_is_refused(of_store, broker):
    of_store.begin()
    of_store.log(broker)
    of_store.commit()
    assert not of_store.behind
    of_store.store.put(b"a", b"1")
    with pytest.raises(IllegalStateError, match="outside of a block"):
        of_store.begin()


def test_a_transaction_that_is_not_committed_leaves_the_store_behind(of_store, broker):
    of_store.begin()
    of_store.store.put(b"a", b"1")
    assert of_store.behind
    of_store.discard()
    assert of_store.store.get(b"a") is None
    assert of_store.behind


@pytest.mark.parametrize(
    "verb", [lambda store: store.commit(None), lambda store: store.recover(), lambda store: store.start_over()]
)
def test_only_the_block_ends_the_stores_transaction(of_store, broker, verb):
    """Committed by the block's code, the changes would be missing from the changelog, and so on every other member."""
    of_store.begin()
    of_store.store.put(b"a", b"1")
    with pytest.raises(IllegalStateError, match="part the store from its changelog"):
        verb(of_store.store)
    of_store.log(broker)
    of_store.commit()
    assert broker.records == [(b"a", b"1")]
    assert not of_store.behind
    verb(of_store.store)
