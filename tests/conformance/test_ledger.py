"""The ledger, on every database."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from harness.databases import Database, Thread, wait_until_blocked
from sqlalchemy import Connection, text

from dualwrite.errors import ConfigurationError, Fenced, TransactionAborted
from dualwrite.protocol.batches import Destination, Way
from dualwrite.stores.sql.ledger import WHOLE_BATCH, Ledger, Run, Runs, WrittenPartition

COUNTS = {"row_count": 10, "message_count": 20, "partition_count": 4}
ORDERS = Destination(Way.PARTITIONS, "orders", "orders", "cluster")
ITEMS = Destination(Way.PARTITIONS, "items", "items", "cluster")
WHOLE = Destination(Way.WHOLE, "orders", "orders", "cluster")
WHOLE_ITEMS = Destination(Way.WHOLE, "items", "items", "cluster")


@pytest.fixture
def ledger(database: Database) -> Ledger:
    return Ledger(database.schema)


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    with database.engine().connect() as made:
        yield made


def test_what_is_committed_is_seen(database: Database, ledger: Ledger, connection: Connection) -> None:
    assert not ledger.seen(connection, "sink", "batch", 0)
    assert ledger.insert(connection, "sink", "batch", 0, **COUNTS)
    connection.commit()
    with database.engine().connect() as other:
        assert ledger.seen(other, "sink", "batch", 0)
        for key in [("sink", "batch", 1), ("sink", "other", 0), ("other", "batch", 0), ("sink", "batch", WHOLE_BATCH)]:
            assert not ledger.seen(other, *key)
    row = connection.execute(database.tables.ledger.select()).mappings().one()
    assert {name: row[name] for name in COUNTS} == COUNTS
    assert row["written_at"].tzinfo is not None


def test_what_is_rolled_back_is_not_seen(ledger: Ledger, connection: Connection) -> None:
    ledger.insert(connection, "sink", "batch", 0, **COUNTS)
    connection.rollback()
    assert not ledger.seen(connection, "sink", "batch", 0)
    assert ledger.started(connection, "sink", "batch") is None


def test_a_second_attempt_is_told_apart(ledger: Ledger, connection: Connection) -> None:
    assert ledger.insert(connection, "sink", "batch", 0, **COUNTS)
    connection.commit()
    assert not ledger.insert(connection, "sink", "batch", 0, **COUNTS)
    connection.execute(text("SELECT 1"))  # the transaction goes on
    assert ledger.insert(connection, "sink", "batch", 1, **COUNTS)
    connection.commit()


@pytest.mark.postgresql
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("first_commits", [True, False])
def test_of_two_attempts_at_once_one_counts(postgres: Database, level: str, first_commits: bool) -> None:
    ledger = Ledger()
    engine = postgres.engine(isolation_level=level)
    with engine.connect() as one, engine.connect() as two:
        assert ledger.insert(one, "sink", "batch", 0, **COUNTS)
        second = Thread(lambda: ledger.insert(two, "sink", "batch", 0, **COUNTS))
        wait_until_blocked(postgres)
        (one.commit if first_commits else one.rollback)()
        if not first_commits:
            assert second.result()
        elif level == "READ COMMITTED":
            assert not second.result()
        else:
            with pytest.raises(TransactionAborted) as caught:
                second.result()
            assert caught.value.retryable
            two.rollback()
            assert ledger.seen(two, "sink", "batch", 0)


def test_a_changed_number_of_partitions_is_refused(database: Database, ledger: Ledger, connection: Connection) -> None:
    ledger.begin(connection, "sink", "batch", ORDERS, partition_count=4)
    ledger.insert(connection, "sink", "batch", 0, **COUNTS)
    connection.commit()
    assert ledger.started(connection, "sink", "batch") == 4
    assert ledger.started(connection.engine, "sink", "batch") == 4
    with pytest.raises(ConfigurationError, match="4 partitions and now has 5") as caught:
        ledger.begin(connection, "sink", "batch", ORDERS, partition_count=5)
    assert "repartition(4" in str(caught.value)


def test_until_a_partition_is_written_the_run_that_may_write_changes_their_number(
    database: Database, ledger: Ledger, connection: Connection
) -> None:
    runs = Runs(database.engine(), database.schema)
    former, present = runs.present("sink", "batch"), runs.replace("sink", "batch")
    assert present is not None

    def begin(count: int, run: Run) -> None:
        ledger.begin(connection, "sink", "batch", ORDERS, partition_count=count, run=partial(runs.require, run=run))

    ledger.begin(connection, "sink", "batch", ORDERS, partition_count=4)
    with pytest.raises(Fenced):
        begin(5, former)
    assert ledger.started(connection, "sink", "batch") == 4
    begin(5, present)
    assert ledger.require(connection, "sink", "batch", ORDERS) == 5
    ledger.insert(connection, "sink", "batch", 3, **{**COUNTS, "partition_count": 5})
    with pytest.raises(ConfigurationError, match="5 partitions and now has 4"):
        begin(4, present)
    begin(5, former)  # asks for nothing that another run has not begun


def test_what_is_known_of_the_rows_of_partitions(ledger: Ledger, connection: Connection) -> None:
    assert ledger.insert(connection, "sink", "batch", 1, **COUNTS, rows_digest=-(2**63))
    assert ledger.insert(connection, "sink", "batch", 0, **COUNTS)
    connection.commit()
    assert ledger.partition(connection, "sink", "batch", 1) == WrittenPartition(10, -(2**63), COUNTS["message_count"])
    assert ledger.partition(connection, "sink", "batch", 0) == WrittenPartition(10, None, COUNTS["message_count"])
    assert ledger.partition(connection, "sink", "batch", 2) is None
    connection.rollback()
    ledger.insert_empty(connection, "sink", "batch", [], partition_count=4)
    ledger.insert_empty(connection, "sink", "batch", [3, 1], partition_count=4)
    connection.commit()
    found = ledger.partitions(connection.engine, "sink", "batch")
    assert list(found) == [0, 1, 3]
    assert found[1] == WrittenPartition(10, -(2**63), COUNTS["message_count"]), "it had rows before"
    assert found[3] == WrittenPartition(0, 0, 0)


def test_a_batch_that_is_for_another_destination_is_refused(ledger: Ledger, connection: Connection) -> None:
    ledger.begin(connection.engine, "sink", "batch", ORDERS, partition_count=4)
    ledger.begin(connection.engine, "sink", "batch", ORDERS, partition_count=4)
    ledger.begin(connection.engine, "fan-out", "batch", ITEMS, partition_count=4)  # each destination in its own name
    with pytest.raises(ConfigurationError, match="4 partitions and now has 5"):
        ledger.begin(connection.engine, "sink", "batch", ORDERS, partition_count=5)
    assert ledger.require(connection, "sink", "batch", ORDERS) == 4
    assert ledger.require(connection, "sink", "another", ORDERS) is None
    calls: list[Any] = [
        lambda: ledger.begin(connection, "sink", "batch", ITEMS, partition_count=4),
        lambda: ledger.begin(connection, "sink", "batch", WHOLE),
        lambda: ledger.require(connection, "sink", "batch", ITEMS),
    ]
    for call in calls:
        with pytest.raises(
            ConfigurationError, match="begun for table orders and topic 'orders'.* is now for"
        ) as caught:
            call()
        assert "its own sink name" in str(caught.value)
        connection.rollback()


def test_a_whole_batch_goes_elsewhere_until_it_is_written(ledger: Ledger, connection: Connection) -> None:
    for destination in (WHOLE, WHOLE_ITEMS):
        ledger.begin(connection.engine, "sink", "batch", destination)
    assert ledger.require(connection, "sink", "batch", WHOLE_ITEMS) == 1
    with pytest.raises(ConfigurationError):
        ledger.require(connection, "sink", "batch", WHOLE)
    ledger.begin(connection, "sink", "batch", WHOLE_ITEMS)
    assert ledger.insert(connection, "sink", "batch", WHOLE_BATCH, **COUNTS)
    connection.commit()
    ledger.begin(connection.engine, "sink", "batch", WHOLE_ITEMS)
    for destination in (WHOLE, ITEMS, ORDERS):
        with pytest.raises(ConfigurationError, match="as one; and is now for"):
            ledger.begin(connection.engine, "sink", "batch", destination)


@pytest.mark.postgresql
def test_of_two_destinations_at_once_one_is_written(postgres: Database) -> None:
    ledger = Ledger()
    with postgres.engine().connect() as one, postgres.engine().connect() as two:
        ledger.begin(one, "sink", "batch", WHOLE)
        assert ledger.insert(one, "sink", "batch", WHOLE_BATCH, **COUNTS)
        second = Thread(lambda: ledger.begin(two, "sink", "batch", WHOLE_ITEMS))
        wait_until_blocked(postgres)
        one.commit()
        with pytest.raises(ConfigurationError, match="'orders', as one; and is now for table items"):
            second.result()


@pytest.mark.parametrize(("sink", "batch"), [("", "b"), ("s", ""), ("x" * 256, "b"), ("s", "x" * 256), ("s", "a\x00")])
def test_names_that_cannot_be_keys_are_refused(ledger: Ledger, connection: Connection, sink: str, batch: str) -> None:
    with pytest.raises(ConfigurationError, match="the name of a"):
        ledger.insert(connection, sink, batch, 0, **COUNTS)


def test_counts_that_cannot_be_are_refused(ledger: Ledger, connection: Connection) -> None:
    with pytest.raises(ConfigurationError):
        ledger.insert(connection, "sink", "batch", 0, row_count=-1, message_count=0, partition_count=1)


def test_a_missing_table_names_the_command(database: Database, ledger: Ledger, connection: Connection) -> None:
    ledger_table = database.state_table.replace("kafka_transaction_state", "dualwrite_ledger")
    database.execute(f"ALTER TABLE {ledger_table} RENAME TO elsewhere")
    calls: list[Any] = [
        lambda: ledger.seen(connection, "sink", "batch", 0),
        lambda: ledger.started(connection, "sink", "batch"),
        lambda: ledger.started(connection.engine, "sink", "batch"),
        lambda: ledger.partition(connection, "sink", "batch", 0),
        lambda: ledger.partitions(connection.engine, "sink", "batch"),
        lambda: ledger.insert_empty(connection, "sink", "batch", [0], partition_count=1),
        lambda: ledger.require(connection, "sink", "batch", ORDERS),
        lambda: ledger.begin(connection.engine, "sink", "batch", ORDERS),
        lambda: ledger.fail(connection.engine, "sink", "batch"),
        lambda: ledger.insert(connection, "sink", "batch", 0, **COUNTS),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match="dualwrite migrate"):
            call()
        connection.rollback()
