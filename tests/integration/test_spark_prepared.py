"""The Data Source over prepared transactions: tasks load the table and prepare, the driver's decision ends all of it."""

from dataclasses import replace
from functools import partial

import pytest
from harness.spark import ROWS, SPARKS_ERRORS
from harness.spark import numbers as numbered
from harness.spark_source import (
    ArmedSource,
    nothing_is_left,
    options,
    prepared_transactions,
    staging_tables,
    write_with,
)
from sqlalchemy import create_engine, text

from dualwrite import recover
from dualwrite.errors import TransactionAborted
from dualwrite.recovery.recover import status
from dualwrite.sinks.spark import SinkOptions, register
from dualwrite.sinks.spark.databases.database import open_database
from dualwrite.sinks.spark.databases.postgresql import require_prepared
from dualwrite.stores.sql.store import SqlStateStore

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def write(spark, numbers):
    register(spark)
    spark.dataSource.register(ArmedSource)
    return partial(write_with, numbers, databaseLeg="prepared")


@pytest.mark.parametrize("point", [pytest.param("write.prepared", marks=pytest.mark.thorough), "batch.handed_over"])
def test_a_killed_task_is_run_again_also_where_its_former_self_holds_the_keys(spark, numbers, write, point):
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    write(numbered(spark), source="armed", batchId="1", inTask=point, waits="500ms")
    numbers.verify()
    nothing_is_left(numbers)


def test_a_driver_killed_before_its_decision_leaves_what_the_next_one_undoes(spark, numbers, write):
    with pytest.raises(SPARKS_ERRORS):
        write(numbered(spark), source="armed", batchId="1", inCommit="batch.recorded", inAbort="claim.before")
    assert len(prepared_transactions(numbers)) == 4
    assert staging_tables(numbers) == numbers.rows() == []
    found = status(kafka=numbers.kafka, database=numbers.url)
    assert [item.prepared_for_s is not None and item.needs_recovery for item in found] == [True] * 4
    # A recovery on a schedule cannot know that no driver will decide, as long as the leases live.
    for open_for_s, planned, skipped in ((0.001, 0, 4), (0.0, 4, 0)):
        report = recover(kafka=numbers.kafka, database=numbers.url, open_for_s=open_for_s, dry_run=True)
        assert (len(report.planned), len(report.skipped)) == (planned, skipped)
    numbers.execute("UPDATE dualwrite_slot SET lease_until = now()")
    assert not recover(kafka=numbers.kafka, database=numbers.url, open_for_s=0.001, dry_run=True).skipped
    write(numbered(spark), batchId="2")
    write(numbered(spark), batchId="1")
    assert len(numbers.rows()) == 2 * ROWS
    assert numbers.rows() == numbers.messages()
    nothing_is_left(numbers)


@pytest.mark.parametrize(
    "point",
    [
        "participant.found",
        *(pytest.param(point, marks=pytest.mark.thorough) for point in ("participant.ended", "batch.decided")),
    ],
)
def test_what_was_decided_is_completed_by_whoever_comes_next(spark, numbers, write, point):
    with pytest.raises(SPARKS_ERRORS):
        write(numbered(spark), source="armed", batchId="1", inCommit=point, inAbort="claim.before")
    assert prepared_transactions(numbers)
    assert len(numbers.rows()) < ROWS
    recover(open_for_s=0, kafka=numbers.kafka, database=numbers.url)
    assert prepared_transactions(numbers) == []
    numbers.verify()
    write(numbered(spark), batchId="1")
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.parametrize(
    ("former", "latter"),
    [("native", "librdkafka"), pytest.param("librdkafka", "native", marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize("leg", ["prepared", pytest.param("staging", marks=pytest.mark.thorough)])
def test_a_driver_with_the_other_producer_engine_undoes_and_completes_what_the_last_one_has_left(
    spark, numbers, write, leg, former, latter
):
    """The sink's setting was changed between two runs, each time when a driver had died."""
    dies = {"source": "armed", "databaseLeg": leg, "inAbort": "claim.before"}
    first, second = numbered(spark).where("id < 50"), numbered(spark).where("id >= 50")
    with pytest.raises(SPARKS_ERRORS):
        write(first, **dies, batchId="1", producerEngine=former, inCommit="batch.recorded")
    assert numbers.rows() == []
    with pytest.raises(SPARKS_ERRORS):
        write(first, **dies, batchId="1", producerEngine=latter, inCommit="batch.decided")
    assert {row.prepared.engine.value for row in slots(numbers) if row.completed is None} == {latter}
    write(first, batchId="1", databaseLeg=leg, producerEngine=former)
    assert len(numbers.rows()) == 50
    assert numbers.rows() == numbers.messages()
    write(second, batchId="2", databaseLeg=leg, producerEngine=former)
    with pytest.raises(SPARKS_ERRORS):
        write(second, **dies, batchId="3", producerEngine=former, inCommit="batch.decided")
    recover(open_for_s=0, kafka=numbers.kafka, database=numbers.url)  # of no engine
    write(second, batchId="3", databaseLeg=leg, producerEngine=latter)
    assert len(numbers.rows()) == 2 * ROWS - 50
    assert numbers.rows() == numbers.messages()
    nothing_is_left(numbers)


def slots(case):
    """The rows of the sink's slots."""
    engine = create_engine(case.url)
    found = SqlStateStore(engine).find(f"{case.sink}.spark#")
    engine.dispose()
    return found


def test_what_a_late_task_has_prepared_is_undone(spark, numbers, write):
    write(numbered(spark), batchId="1")
    engine = create_engine(numbers.url)
    store = SqlStateStore(engine)
    row = store.find(f"{numbers.sink}.spark#")[0]
    with engine.connect() as connection:
        store.begin(connection)
        connection.execute(text("INSERT INTO numbers VALUES (-1, 'late')"))
        store.prepare(connection, row, replace(row.prepared, producer_id=row.prepared.producer_id + 1))
        store.claim([row.transactional_id], owner="another", cluster_id=row.cluster_id)
        store.mark_settled({row.transactional_id: row.incarnation})
    engine.dispose()
    [item] = [item for item in status(kafka=numbers.kafka, database=numbers.url) if item.prepared_for_s is not None]
    assert item.needs_recovery
    write(numbered(spark), batchId="1")
    numbers.verify()
    nothing_is_left(numbers)


def test_what_somebody_has_ended_cannot_be_decided(dualwrite_postgres):
    """An operator's ROLLBACK PREPARED: the rows are gone, so the messages must not come."""
    engine = create_engine(dualwrite_postgres.url)
    with engine.connect() as connection, pytest.raises(TransactionAborted, match="of 1 prepared .* 0 are there"):
        require_prepared(connection, ["dualwrite:any"], "sink 'any' batch '1'")
    engine.dispose()


@pytest.mark.thorough
def test_a_stream_writes_each_micro_batch_once(spark, numbers, tmp_path):
    register(spark)
    source = tmp_path / "source"
    numbered(spark).write.parquet(str(source))
    stream = spark.readStream.schema("id long, name string").option("maxFilesPerTrigger", 1).parquet(str(source))
    query = (
        stream.writeStream.format("dualwrite")
        .options(**options(numbers, databaseLeg="prepared"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    numbers.verify()
    nothing_is_left(numbers)


def test_what_cannot_be_prepared_is_refused(spark, numbers, write):
    with pytest.raises(SPARKS_ERRORS, match="need staging tables"):
        write(numbered(spark), mode="overwrite", batchId="1")
    assert numbers.rows() == numbers.messages() == []


REFERS = "CREATE TABLE others (id bigint PRIMARY KEY); ALTER TABLE numbers ADD FOREIGN KEY (id) REFERENCES others"
TRIGGER = """
CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE TRIGGER before_it BEFORE INSERT ON numbers FOR EACH ROW EXECUTE FUNCTION nothing()
"""


@pytest.mark.parametrize(
    ("more", "defers"),
    [
        ("", False),
        ("ALTER TABLE numbers ADD UNIQUE (id)", False),
        ("ALTER TABLE numbers ADD UNIQUE (id) DEFERRABLE", True),
        (REFERS, False),
        (f"{REFERS} DEFERRABLE INITIALLY DEFERRED", True),
        (TRIGGER, True),
    ],
)
def test_a_table_defers_something_to_commit_by_a_deferrable_constraint_or_a_trigger_of_a_user(numbers, more, defers):
    """Only then a task runs it before PREPARE TRANSACTION, where nothing would bound its time."""
    if more:
        numbers.execute(more)
    database = open_database(SinkOptions(**numbers.settings))
    try:
        with database.engine.connect() as connection:
            assert database.read_table(connection, "numbers").defers is defers
    finally:
        database.engine.dispose()
