"""The library's rows in a RocksDB: fencing, commits in doubt, and deleting old rows."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from harness.databases import CLUSTER, prepared
from harness.failing_rocksdb import Failing

from dualwrite.clock import Deadline
from dualwrite.errors import TransactionAborted, TransactionInDoubt
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.process import DoubtStep
from dualwrite.protocol.values import Decision, Outcome
from dualwrite.recovery.claim import OwnerContext
from dualwrite.recovery.in_doubt import resolve_commit
from dualwrite.stores.keyed.rocksdb import RocksDatabase

rocksdict = pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")


@pytest.fixture
def database(tmp_path):
    with RocksDatabase(tmp_path / "db") as database:
        database.check()
        yield database


def claim(database, *names, owner="me"):
    return database.store().claim(names or ["orders"], owner=owner, cluster_id=CLUSTER)


def write(database, handle, number, *, messages=True):
    """Everything of a dual write but its commit; returns its state and the database's name for it."""
    store = database.store()
    store.begin(handle)
    incarnation = store.read_incarnation(handle, "orders")
    handle.batch.put(f"order/{number}", number)
    state = prepared(incarnation, number) if messages else PreparedTxnState()
    ours, name = (
        store.decide(handle, Decision("orders", incarnation, state))
        if messages
        else store.hold(handle, Decision("orders", incarnation))
    )
    assert ours
    return state, name


def test_a_decision_and_its_entries_outlive_the_process_that_made_them(tmp_path, database):
    claim(database)
    with database.connect() as handle:
        state, _ = write(database, handle, 1)
        assert "order/1" not in database.rdict
        database.store().commit(handle)
    database.close()
    with RocksDatabase(tmp_path / "db", create=False) as again:
        again.check()
        assert (again.store().read(["orders"])[0].prepared, again.rdict["order/1"]) == (state, 1)


def test_an_owner_that_is_claimed_away_after_its_last_check_cannot_commit(database):
    claim(database)
    with database.connect() as handle:
        write(database, handle, 1)
        claim(database, owner="another")
        with pytest.raises(TransactionAborted, match="has changed"):
            database.store().commit(handle)
    assert "order/1" not in database.rdict
    assert not database.store().read(["orders"])[0].prepared.has_transaction


def test_a_block_that_rolls_back_leaves_nothing(database):
    claim(database)
    with database.connect() as handle:
        write(database, handle, 1)
        database.store().rollback(handle)
        with pytest.raises(TransactionAborted):
            database.store().commit(handle)
    assert "order/1" not in database.rdict


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize("written", [True, False])
def test_a_failed_commit_is_resolved_by_what_is_durable(database, written, messages):
    claim(database)
    store = database.store()
    with database.connect() as handle:
        state, name = write(database, handle, 1, messages=messages)
        database._client._db = Failing(database._client._db, written=written)
        with pytest.raises(TransactionInDoubt):
            store.commit(handle)
    found = resolve_commit(OwnerContext(None, store, "me"), "orders", state, name, Deadline(5))
    assert found is (DoubtStep.COMMITTED if written else DoubtStep.ABORTED)
    assert ("order/1" in database.rdict) is written


def test_ids_and_old_incidents_can_be_forgotten(database):
    store, forgetting = database.store(), database.forgetting()
    rows = claim(database, "orders", "orders#1", "others")
    for name in ("orders", "orders#1", "others"):
        [row] = [row for row in rows if row.transactional_id == name]
        store.record_outcomes([(replace(row, prepared=prepared(1)), Outcome.LOST, "gone")])
    store.acknowledge("orders", prepared(1))
    store.acknowledge("others", prepared(1))
    later = datetime.now(timezone.utc) + timedelta(seconds=1)
    assert forgetting.forget_incidents("", later - timedelta(days=1), dry_run=False) == 0
    assert forgetting.forget_incidents("", later, dry_run=True, name="orders") == 1
    assert forgetting.forget_incidents("", later, dry_run=False, name="orders") == 1
    assert [found.transactional_id for found in store.incidents(acknowledged=True)] == ["orders#1", "others"]
    assert not forgetting.forget([replace(rows[0], owner="another"), rows[1]])
    assert len(store.find("")) == 3
    assert forgetting.forget(rows[:2])
    assert [row.transactional_id for row in store.find("")] == ["others"]


def test_a_writer_whose_row_was_forgotten_is_fenced(database):
    [row] = claim(database)
    with database.connect() as handle:
        write(database, handle, 1)
        assert database.forgetting().forget([row])
        with pytest.raises(TransactionAborted):
            database.store().commit(handle)
    assert database.store().find("") == []
