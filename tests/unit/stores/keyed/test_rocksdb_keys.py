"""Conditional writes, and the user's batch with them; what a failed write means for each."""

import threading

import pytest
from harness.failing_rocksdb import Failing

from dualwrite.errors import ConfigurationError, TransactionAborted, TransactionInDoubt, Unavailable
from dualwrite.stores.keyed.rocksdb import RocksDatabase, RocksHandle, RocksKeys
from dualwrite.stores.keyed.store import Change, Entry

rocksdict = pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")

A, B = ("state", "a"), ("state", "b")


@pytest.fixture(params=[False, True], ids=["typed", "raw"])
def database(request, tmp_path):
    path = str(tmp_path / "db")
    rocksdict.Rdict(path, rocksdict.Options(raw_mode=request.param)).close()
    with RocksDatabase(path) as database:
        database.check()
        yield database


@pytest.fixture
def keys(database):
    return RocksKeys(database._client)


@pytest.fixture
def handle(database):
    return RocksHandle(database._client)


def test_a_write_needs_what_was_read(keys):
    assert keys.get([A, B]) == {}
    assert keys.write([Change(A, None, b"1"), Change(B, None, b"1")])
    assert not keys.write([Change(A, None, b"2")])
    found = keys.get([A, B])
    assert keys.write([Change(A, found[A], b"2")])
    assert not keys.write([Change(A, found[A], b"3"), Change(B, found[B], b"3")])
    assert {key: entry.value for key, entry in keys.get([A, B]).items()} == {A: b"2", B: b"1"}


def test_a_condition_alone_writes_nothing(keys):
    keys.write([Change(A, None, b"1")])
    found = keys.get([A])
    assert keys.write([Change(A, found[A], None), Change(B, None, b"1")])
    assert keys.get([A]) == found
    assert not keys.write([Change(("state", "c"), Entry(b"1", b"1"), None), Change(B, keys.get([B])[B], b"2")])
    assert keys.get([B])[B].value == b"1"


def test_a_prefix_is_taken_literally(keys):
    names = ["a", "a#1", "a#2", "aä", "b"]
    keys.write([Change(("state", name), None, b"1") for name in names] + [Change(("incident", "a#3"), None, b"1")])
    assert [name for _, name in keys.scan("state", "a#")] == ["a#1", "a#2"]
    assert [name for _, name in keys.scan("state", "aä")] == ["aä"]
    assert sorted(name for _, name in keys.scan("state", "")) == sorted(names)


def test_the_users_batch_and_the_changes_commit_together(database, keys, handle):
    handle.batch.put(b"order", b"1")
    assert keys.commit(handle, [Change(A, None, b"1")], answer_s=None)
    assert (database.rdict.get(b"order"), keys.get([A])[A].value) == (b"1", b"1")


def test_a_batch_whose_condition_fails_is_not_there(database, keys, handle):
    keys.write([Change(A, None, b"1")])
    handle.batch.put(b"order", b"1")
    assert not keys.commit(handle, [Change(A, None, b"2")], answer_s=1)
    assert database.rdict.get(b"order") is None


def test_what_was_got_for_update_must_not_have_changed(database, keys, handle):
    database.rdict[b"stock"] = b"5"
    assert handle.batch.get_for_update(b"stock") == b"5"
    assert handle.batch.get_for_update(b"new") is None
    handle.batch.put(b"stock", b"4")
    assert handle.batch.get_for_update(b"stock") == b"4"
    database.rdict[b"stock"] = b"3"
    with pytest.raises(TransactionAborted, match="has changed since") as caught:
        keys.commit(handle, [Change(A, None, b"1")], answer_s=1)
    assert caught.value.retryable
    assert keys.get([A]) == {}
    handle.clear()
    handle.batch.get_for_update(b"stock")
    handle.batch.put(b"stock", b"2")
    assert keys.commit(handle, [Change(A, None, b"1")], answer_s=1)


def test_all_of_a_decision_is_in_one_synced_batch(database, keys, handle):
    written = []

    class Watching(Failing):
        def write(self, batch, options):
            written.append((len(batch), options.sync))
            return self._db.write(batch, options)

    database._client._db = Watching(database._client._db, written=True)
    handle.batch.put(b"order", b"1")
    handle.batch.delete(b"draft")
    assert keys.commit(handle, [Change(A, None, b"1"), Change(B, None, b"1")], answer_s=None)
    assert keys.write([Change(A, keys.get([A])[A], b"2")])
    assert written == [(4, True), (1, True)]


@pytest.mark.parametrize("written", [True, False])
def test_a_decision_whose_write_fails_is_in_doubt_until_it_is_looked_up(database, keys, handle, written):
    database._client._db = Failing(database._client._db, written=written)
    handle.batch.put(b"order", b"1")
    with pytest.raises(TransactionInDoubt, match="could not write"):
        keys.commit(handle, [Change(A, None, b"1")], answer_s=1)
    assert (A in keys.get([A]), database.rdict.get(b"order")) == ((True, b"1") if written else (False, None))


def test_an_interrupted_decision_is_in_doubt_and_the_database_stays_usable(database, keys, handle):
    class Interrupted(Failing):
        def write(self, batch, options):
            self._db.write(batch, options)
            raise KeyboardInterrupt

    client, db = database._client, database._client._db
    client._db = Interrupted(db, written=True)
    with pytest.raises(TransactionInDoubt) as caught:
        keys.commit(handle, [Change(A, None, b"1")], answer_s=1)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert A in keys.get([A])
    client._db = db


def test_a_claim_whose_write_fails_is_unavailable(database, keys):
    database._client._db = Failing(database._client._db, written=True)
    with pytest.raises(Unavailable, match="could not write"):
        keys.write([Change(A, None, b"1")])
    assert keys.get([A])[A].value == b"1"


def test_a_decision_on_a_database_that_had_failed_before_is_aborted(tmp_path):
    db = rocksdict.Rdict(str(tmp_path / "db"))
    database = RocksDatabase(Failing(db, written=False))
    keys = RocksKeys(database._client)
    database._client.make_families(["kafka_transaction_state", "dualwrite_incident"])
    with pytest.raises(Unavailable):
        keys.write([Change(A, None, b"1")])
    with pytest.raises(TransactionAborted):
        keys.commit(RocksHandle(database._client), [Change(A, None, b"1")], answer_s=1)


def test_a_decision_does_not_wait_for_ever_for_other_writes(database, keys, handle):
    with database._client.locks.writing, pytest.raises(TransactionAborted, match="still writing"):
        keys.commit(handle, [Change(A, None, b"1")], answer_s=0.01)


def test_no_conditional_write_is_lost_among_threads(keys):
    keys.write([Change(A, None, b"0")])

    def count():
        for _ in range(25):
            while True:
                found = keys.get([A])[A]
                if keys.write([Change(A, found, b"%d" % (int(found.value) + 1))]):
                    break

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert keys.get([A])[A].value == b"100"


@pytest.mark.parametrize(("value", "words"), [(b"dualwrite 2\n{}", "format '2'"), (b"mine", "has not written it")])
def test_a_value_of_another_version_or_program_is_refused(database, keys, value, words):
    database.rdict.get_column_family("kafka_transaction_state")[b"a"] = value
    for call in (lambda: keys.get([A]), lambda: keys.scan("state", ""), lambda: keys.write([Change(A, None, b"1")])):
        with pytest.raises(ConfigurationError, match=words) as caught:
            call()
        assert caught.value.transactional_id == "a"
