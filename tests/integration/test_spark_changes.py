"""Change data: a table and a topic that follow another table, by the changes that a connector like Debezium has seen."""

import json
import random
from functools import partial
from unittest import mock

import pytest
from confluent_kafka import Producer
from harness.databases import by_way_on_both_databases
from harness.spark import HAS_CONNECTOR, ArmedTask, connector_jars
from harness.spark_source import WAYS, ArmedSource, nothing_is_left, options, options_of, write_by
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions
from sqlalchemy import create_engine, text

from dualwrite import ConfigurationError
from dualwrite.sinks.spark import foreach_partition, per_partition, register, write_batch
from dualwrite.testing.checker import read_committed

pytestmark = [pytest.mark.spark, pytest.mark.slow]

KEYS = 12
SETTINGS = {"upsert_keys": ["id"], "op_column": "op", "order_column": "lsn"}
# What Debezium writes into its topic: with the default replica identity, only the key is known of a deleted row.
SOURCE = """
CREATE TABLE source (id bigint PRIMARY KEY, name text NOT NULL);
CREATE TABLE history (lsn bigint GENERATED ALWAYS AS IDENTITY, id bigint, change jsonb);
CREATE FUNCTION note_change() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE of bigint := coalesce(NEW.id, OLD.id);
BEGIN
    INSERT INTO history (id, change) VALUES (of, jsonb_build_object(
        'op', CASE TG_OP WHEN 'INSERT' THEN 'c' WHEN 'UPDATE' THEN 'u' ELSE 'd' END,
        'before', CASE TG_OP WHEN 'INSERT' THEN NULL ELSE jsonb_build_object('id', OLD.id, 'name', NULL) END,
        'after', CASE TG_OP WHEN 'DELETE' THEN NULL ELSE to_jsonb(NEW) END,
        'source', jsonb_build_object('lsn', currval(pg_get_serial_sequence('history', 'lsn')))));
    RETURN NULL;
END $$;
CREATE TRIGGER note_change AFTER INSERT OR UPDATE OR DELETE ON source FOR EACH ROW EXECUTE FUNCTION note_change();
"""
ENVELOPE = (
    "op string, before struct<id bigint, name string>, after struct<id bigint, name string>, source struct<lsn bigint>"
)
ROW = ["change.op AS op", "change.source.lsn AS lsn", "coalesce(change.after.id, change.before.id) AS id",
       "change.after.name AS name"]  # fmt: skip


class Source:
    """A real table whose every change is noted; `changes` are (id, envelope), and `rows` is the table now."""

    def __init__(self, url, length=300):
        engine, chance = create_engine(url), random.Random(7)
        with engine.begin() as connection:
            connection.execute(text(SOURCE))
            # A row that is there when a connector begins, and that never changes: its snapshot alone tells of it.
            connection.execute(text(f"INSERT INTO source VALUES ({KEYS}, 'there before')"))
            connection.execute(text("""UPDATE history SET change = jsonb_set(change, '{op}', '"r"')"""))
            for number in range(length):
                key = chance.randrange(KEYS)
                if chance.random() < 0.3:
                    connection.execute(text(f"DELETE FROM source WHERE id = {key}"))
                else:
                    connection.execute(
                        text(
                            f"INSERT INTO source VALUES ({key}, 'name {number}') ON CONFLICT (id) "
                            "DO UPDATE SET name = excluded.name"
                        )
                    )
            self.rows = [tuple(row) for row in connection.execute(text("SELECT id, name FROM source ORDER BY id"))]
            found = connection.execute(text("SELECT id, change FROM history ORDER BY lsn"))
            self.changes = [(key, json.dumps(change)) for key, change in found]
        engine.dispose()
        # A connector that dies writes some of its last records again.
        self.changes[200:200] = self.changes[180:200]

    def by_key(self):
        """What the topic must have for each key, in that order: names, and None where the row was deleted."""
        found = {}
        for key, change in self.changes:
            after = json.loads(change)["after"]
            found.setdefault(key, []).append(None if after is None else after["name"])
        return found


@pytest.fixture
def source(migrated_database):
    return Source(migrated_database)


@pytest.fixture
def target(spark, numbers):
    numbers.execute("DROP TABLE numbers")
    numbers.execute("CREATE TABLE numbers (id bigint PRIMARY KEY, name varchar(99) NOT NULL)")
    register(spark)
    spark.dataSource.register(ArmedSource)
    return numbers


def verify(target, source, deletes_by=None):
    """The table equals its source; the topic has each change once, in order for each key.

    A deletion is a tombstone, or a record with the operation `deletes_by`.
    """
    assert target.rows() == source.rows
    found = {}
    for message in read_committed(target.kafka, target.topic):
        value = {} if message.value is None else json.loads(message.value)
        assert not value or message.key == str(value["id"]).encode()
        name = value.get("name")
        if name is None:
            assert (message.value is None) is (deletes_by is None), f"of a deletion: {message.value}"
            assert deletes_by is None or value["op"] == deletes_by
        found.setdefault(int(message.key), []).append(name)
    assert found == source.by_key()
    nothing_is_left(target)


def changes(spark, source):
    """The changes, those of a key in one of two partitions, in their order."""
    rows = [(number, *change) for number, change in enumerate(source.changes)]
    df = spark.createDataFrame(rows, "number bigint, id bigint, value string").repartition(2, "id")
    parsed = df.sortWithinPartitions("number").selectExpr(f"from_json(value, '{ENVELOPE}') AS change")
    return parsed.selectExpr(*ROW)


@by_way_on_both_databases([*WAYS, "foreach_batch"], quick=[*WAYS, "write_batch-mariadb", "staging-mariadb"])
def test_a_table_and_a_topic_follow_their_source_over_the_death_of_a_task(spark, source, target, way):
    df = changes(spark, source)
    if way in {"staging", "prepared"}:
        given = {**options_of({**target.settings, **SETTINGS}), "databaseLeg": way, "inTask": "spark.rows_copied"}
        df.write.format("armed").mode("append").options(**given, batchId="1").save()
    else:
        with mock.patch.object(per_partition, "PartitionTask", partial(ArmedTask, point="spark.rows_copied")):
            write_by(target, df, way, **SETTINGS)
        if way == "foreach_partition":  # nothing settles what a dead task leaves, but the next run
            foreach_partition(df, batch_id="1", **target.settings, **SETTINGS)
    verify(target, source)


def test_a_deletion_may_be_a_record_and_operations_have_names_of_their_own(spark, source, target):
    df = changes(spark, source).withColumn("op", functions.expr("if(op = 'd', 'D', 'I')"))
    settings = {**SETTINGS, "op_values": {"I": "upsert", "D": "delete"}, "on_delete": "record"}
    write_by(target, df, "staging", **settings)
    verify(target, source, deletes_by="D")


LAST = ["batch.decided"]
POINTS = ["batch.prepared", "batch.recorded", *LAST, "complete.ended", "batch.completed", "batch.recorded"]


def kafka_changes(spark, given, kafka):
    read = {
        "kafka.bootstrap.servers": kafka["bootstrap.servers"],
        "subscribe": given,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "150",
    }
    records = spark.readStream.format("kafka").options(**read).load()
    parsed = records.selectExpr(f"from_json(cast(value AS string), '{ENVELOPE}') AS change")
    return parsed.where("change IS NOT NULL").selectExpr(*ROW)  # without Debezium's tombstones


@pytest.mark.skipif(not HAS_CONNECTOR, reason="the connector is that of Spark 4.2")
@pytest.mark.parametrize(
    ("numbers", "leg", "points"),
    [
        pytest.param("postgresql", "staging", LAST, id="staging"),
        pytest.param("postgresql", "staging", POINTS, id="staging, many", marks=pytest.mark.thorough),
        pytest.param("postgresql", "prepared", POINTS, id="prepared", marks=pytest.mark.thorough),
        pytest.param("mariadb", "staging", POINTS, id="mariadb", marks=[pytest.mark.mariadb, pytest.mark.thorough]),
    ],
    indirect=["numbers"],
)
def test_a_debezium_topic_ends_in_a_table_that_equals_its_source_killed_on_the_way(
    spark, source, target, dualwrite_kafka, tmp_path, leg, points
):
    """Each driver's first task dies, and then the process that decides."""
    given = f"given-{target.topic}"
    dualwrite_kafka.create_topic(given, partitions=2)
    producer = Producer(target.kafka)
    for key, change in source.changes:
        producer.produce(given, change, str(key))
        if json.loads(change)["op"] == "d":
            producer.produce(given, None, str(key))
    producer.flush()
    for jar in connector_jars().split(","):
        spark.sql(f"ADD JAR '{jar}'")

    def run(**armed):
        rows = kafka_changes(spark, given, target.kafka)
        merged = {**options(target, **options_of({"kafka": target.kafka, **SETTINGS})), "databaseLeg": leg, **armed}
        stream = rows.writeStream.format("armed").options(**merged)
        stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        stream.start().awaitTermination()

    for point in points:
        with pytest.raises(StreamingQueryException):
            run(inTask="spark.rows_copied", inCommit=point)
    assert target.rows() not in ([], source.rows)
    run()
    verify(target, source)


def test_a_table_without_the_key_is_refused_before_a_task_runs(spark, source, target):
    target.execute("ALTER TABLE numbers DROP CONSTRAINT numbers_pkey")
    with pytest.raises(ConfigurationError, match="'numbers' has no unique key of just the columns id"):
        write_batch(changes(spark, source), batch_id="1", **target.settings, **SETTINGS)
    assert target.execute("SELECT count(*) FROM dualwrite_slot") == [(0,)]
