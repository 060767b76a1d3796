"""A slot that is leased again by the worker for which it was kept."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING

import pytest
from harness.databases import Database, Thread
from harness.patience import wait_until
from sqlalchemy import update

from dualwrite.errors import Fenced
from dualwrite.protocol.batches import Destination, Way
from dualwrite.stores.sql.leases import SlotLease, SlotPool
from dualwrite.stores.sql.ledger import WHOLE_BATCH, Ledger, Run, Runs
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.stores.sql.tables import declare_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualwrite.protocol.values import StateRow

ORDERS = Destination(Way.WHOLE, "orders", "orders", "cluster")
ITEMS = Destination(Way.WHOLE, "items", "items", "cluster")


class Worker:
    """A worker with two lanes at rest, in a run of one batch."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.engine = database.engine()
        self.pool = SlotPool(self.engine, "job", schema=database.schema)
        self.store = SqlStateStore(self.engine, schema=database.schema)
        self.ledger = Ledger(database.schema)
        self.runs = Runs(self.engine, database.schema)
        self.run: Run = self.runs.present("sink", "batch")
        leases = [self.pool.lease("before", 60) for _ in range(2)]
        self.rows: Sequence[StateRow] = self.claim("job#1", "job#2")
        self.pool.release({lease.transactional_id: lease.owner for lease in leases}, kept=True)

    def claim(self, *ids: str) -> Sequence[StateRow]:
        return self.store.claim(ids, owner="owner", cluster_id="cluster")

    def lease(
        self, *, run: Run | None = None, destination: Destination | None = ORDERS
    ) -> tuple[SlotLease, StateRow] | None:
        held = self.runs.holding(run or self.run, waits=False)
        if destination is None:
            begins = partial(self.ledger.unless_written, "sink", "batch")
        else:
            begins = partial(self.ledger.beginning, self.engine, "sink", "batch", destination)
        of, bound = (run or self.run, destination), {} if destination else {"partition_": 3}
        return self.pool.lease_again("again", 60, self.rows, of=of, run=held, begins=begins, bound=bound)

    @property
    def is_begun(self) -> bool:
        return self.ledger.started(self.engine, "sink", "batch") is not None


# Spark has no sink for SQLite, where only one transaction writes at a time.
pytestmark = pytest.mark.parametrize(
    "database",
    [
        pytest.param("postgresql", marks=pytest.mark.postgresql),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
    ],
    indirect=True,
)


@pytest.fixture
def worker(database: Database) -> Worker:
    return Worker(database)


def test_the_slot_of_the_first_row_whose_slot_is_free_is_leased_and_its_row_read(worker: Worker) -> None:
    found = worker.lease()
    assert found is not None
    lease, row = found
    assert (lease.transactional_id, lease.owner, row) == ("job#1", "again", worker.rows[0])
    assert timedelta(seconds=50) < lease.until - datetime.now(timezone.utc) < timedelta(seconds=70)
    assert worker.pool.held_by("again") == [lease]
    assert worker.is_begun
    second = worker.lease()
    assert second is not None
    assert second[1] == worker.rows[1]
    assert worker.lease() is None
    worker.pool.keep(lease, datetime.now(timezone.utc) + timedelta(seconds=60))
    assert worker.lease() is None, "a part of its holder's is in it"


def test_a_slot_whose_id_another_has_claimed_since_is_left_to_that_one(worker: Worker) -> None:
    worker.claim("job#1")
    found = worker.lease()
    assert found is not None
    assert found[0].transactional_id == "job#2"


@pytest.mark.parametrize("replaced", [True, False])
def test_nothing_is_leased_and_no_batch_begun_for_a_run_that_is_over_or_just_being_replaced(
    worker: Worker, replaced: bool
) -> None:
    with worker.engine.begin() as connection:
        worker.runs.replace("sink", "batch", connection)
        if not replaced:
            assert worker.lease() is None
    if replaced:
        assert worker.lease() is None
    assert not worker.pool.held_by("")
    assert not worker.is_begun


def test_a_batch_that_is_written_or_failed_or_for_another_destination_is_left_to_the_longer_way(worker: Worker) -> None:
    worker.ledger.begin(worker.engine, "sink", "batch", ITEMS)
    assert worker.lease() is None
    assert worker.lease(destination=None) is not None
    worker.ledger.begin(worker.engine, "sink", "batch", ORDERS)
    worker.ledger.fail(worker.engine, "sink", "batch")
    assert worker.lease() is None
    worker.ledger.begin(worker.engine, "sink", "batch", ORDERS)
    with worker.engine.begin() as connection:
        worker.ledger.insert(connection, "sink", "batch", WHOLE_BATCH, row_count=0, message_count=0, partition_count=1)
    assert worker.lease() is None


def test_nothing_is_leased_for_a_partition_that_is_written(worker: Worker) -> None:
    with worker.engine.begin() as connection:
        worker.ledger.insert(connection, "sink", "batch", 3, row_count=0, message_count=0, partition_count=4)
    assert worker.lease(destination=None) is None


def test_two_that_begin_a_batch_at_once_both_lease(worker: Worker) -> None:
    threads = [Thread(worker.lease) for _ in range(2)]
    found = [thread.result() for thread in threads]
    leased = [one[0].transactional_id for one in found if one is not None]
    assert len(leased) == len(set(leased))
    assert leased, "a slot that the other one locks is passed over"


def test_a_lease_is_kept_only_while_its_run_may_write(worker: Worker) -> None:
    found = worker.lease()
    assert found is not None
    until = datetime.now(timezone.utc) + timedelta(seconds=60)
    held = worker.runs.holding(worker.run)
    with worker.engine.begin() as connection:
        worker.pool.keep(found[0], until, connection, held)
        assert worker.runs.replace("sink", "batch") is None, "a task holds it"
    assert worker.runs.replace("sink", "batch") is not None
    with worker.engine.begin() as connection, pytest.raises(Fenced):
        worker.pool.keep(found[0], until, connection, held)


def test_a_slot_that_another_is_leasing_is_not_leased_twice(worker: Worker) -> None:
    waits = "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
    with worker.engine.begin() as connection:
        table = declare_tables(worker.database.schema).slot
        leased = update(table).where(table.c.transactional_id == "job#1").values(lease_owner="another")
        connection.execute(leased.values(lease_until=datetime.now(timezone.utc) + timedelta(seconds=60)))
        thread = Thread(worker.lease)
        if worker.database.kind == "mariadb":  # PostgreSQL passes over what another has locked
            wait_until(lambda: worker.database.query(waits)[0][0], pause_s=0.3)
    found = thread.result()
    assert found is None or found[0].transactional_id == "job#2"
    assert [lease.transactional_id for lease in worker.pool.held_by("another")] == ["job#1"]
