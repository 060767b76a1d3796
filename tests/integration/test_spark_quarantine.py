"""Rows that the table does not take are put aside with their reason, in the same batch: counted, limited, and once despite kills."""

import json
import re
from functools import partial

import pytest
from harness.databases import BOTH_DATABASES, by_way_on_both_databases
from harness.spark import SPARKS_ERRORS, ArmedTask, stopped_at
from harness.spark_source import LEGS, WAYS, ArmedSource, nothing_is_left, options_of, prepared_transactions, write_by
from pyspark.sql import functions

from dualwrite import ConfigurationError, TransactionAborted
from dualwrite.sinks.spark import JobFailed, foreach_batch, per_partition, register, write_batch, write_many
from dualwrite.testing.checker import read_committed

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROWS, PARTITIONS, EVERY = 60, 3, 20
# What is wrong with the rows whose number is this in each twenty, and words of the reason.
WRONG = {3: "name", 5: "name|too long", 7: "check|CONSTRAINT", 9: "level", 11: "amount|overflow", 13: "mood|enum"}
BAD = [number for number in range(ROWS) if number % EVERY in WRONG]
GOOD = [number for number in range(ROWS) if number % EVERY not in WRONG]
LISTED = ", ".join(map(str, WRONG))


class Readings:
    """The sink of a case, with a table that takes not everything, and a table and a topic for the rest."""

    def __init__(self, case, kafka):
        self.case = case
        self.aside = kafka.create_topic(f"{case.topic}-aside", partitions=1)
        mood = "ENUM ('good', 'bad')"
        if not case.on_mariadb:
            case.execute(f"CREATE TYPE mood AS {mood}")
            mood = "mood"
        case.execute(
            "CREATE TABLE readings (id bigint PRIMARY KEY, name varchar(9) NOT NULL, level int CHECK (level >= 0), "
            f"amount numeric(4, 1), mood {mood}, kind varchar(9) NOT NULL DEFAULT 'none')"
        )
        case.execute(
            "CREATE TABLE aside (reason text NOT NULL, row text NOT NULL, table_name text, partition_id int, row_number bigint)"
            if not case.on_mariadb
            else "CREATE TABLE aside (reason text NOT NULL, `row` longtext NOT NULL, table_name text, partition_id int, "
            "`row_number` bigint)"
        )
        case.table = "readings"
        self.more = {"quarantine_table": "aside", "quarantine_topic": self.aside}
        self.settings = {**case.settings, **self.more}

    def put_aside(self):
        return self.case.execute(
            "SELECT * FROM aside ORDER BY partition_id, row_number"
            if not self.case.on_mariadb
            else "SELECT * FROM aside ORDER BY partition_id, `row_number`"
        )

    def counts(self):
        """Rows in the table and put aside, messages of both."""
        topics = [len(list(read_committed(self.case.kafka, topic))) for topic in (self.case.topic, self.aside)]
        [(readings,)], [(aside,)] = (self.case.execute(f"SELECT count(*) FROM {one}") for one in ("readings", "aside"))
        return [readings, aside, *topics]

    def verify(self, good=GOOD, bad=BAD):
        assert [number for (number,) in self.case.execute("SELECT id FROM readings ORDER BY id")] == list(good)
        sent = sorted(json.loads(one.value)["id"] for one in read_committed(self.case.kafka, self.case.topic))
        assert sent == list(good)
        found = self.put_aside()
        rows = [json.loads(row) for _, row, *_ in found]
        assert sorted(row["id"] for row in rows) == list(bad)
        told = [json.loads(one.value) for one in read_committed(self.case.kafka, self.aside)]
        assert sorted(one["row"]["id"] for one in told) == list(bad)
        assert {one["reason"] for one in told} == {reason for reason, *_ in found}
        nothing_is_left(self.case)


def readings(spark, partitions=PARTITIONS, rows=ROWS):
    """Rows of which the table does not take those in WRONG."""
    df = spark.range(0, rows, 1, partitions)
    place = functions.expr(f"id % {EVERY}")
    when = functions.when
    return df.select(
        "id",
        when(place == 5, "a name that is too long")
        .when(place != 3, functions.concat(functions.lit("n"), "id"))
        .alias("name"),
        when(place == 7, -1)
        .when(place == 9, 3_000_000_000)
        .otherwise(functions.col("id"))
        .cast("bigint")
        .alias("level"),
        when(place == 11, 12345.6).otherwise(1.5).cast("decimal(9,1)").alias("amount"),
        when(place == 13, "so so").otherwise("good").alias("mood"),
    )


@pytest.fixture
def shop(spark, numbers, dualwrite_kafka):
    register(spark)
    spark.dataSource.register(ArmedSource)
    return Readings(numbers, dualwrite_kafka)


@BOTH_DATABASES
@pytest.mark.parametrize("way", WAYS)
def test_rows_that_the_table_does_not_take_are_put_aside_with_their_reason(spark, shop, way):
    if shop.case.on_mariadb and way == "prepared":
        pytest.skip("MariaDB prepares nothing")
    write_by(shop.case, readings(spark), way, **shop.more)
    shop.verify()
    for reason, row, table, _, number in shop.put_aside():
        found = json.loads(row)
        assert re.search(WRONG[found["id"] % EVERY], reason), reason
        assert (table.rpartition(".")[2], number) == ("readings", found["id"] % EVERY + 1)
    [(rows, messages)] = shop.case.execute("SELECT row_count, message_count FROM dualwrite_batch")
    assert (rows, messages) == (ROWS, ROWS)
    write_by(shop.case, readings(spark), way, **shop.more)  # it is written, and nothing is put aside again
    shop.verify()


@BOTH_DATABASES
@pytest.mark.parametrize("way", ["write_batch", "staging"])
def test_a_text_of_bytes_that_are_no_text_is_put_aside(spark, shop, way):
    no_text = functions.expr("CASE WHEN id = 1 THEN cast(X'22FF' AS string) ELSE name END")
    df = readings(spark, 1, rows=3).withColumn("name", no_text)
    with pytest.raises((JobFailed, *SPARKS_ERRORS), match="a value of column 'name' does not fit string: Invalid UTF8"):
        write_by(shop.case, df, way)
    write_by(shop.case, df, way, **shop.more)
    shop.verify([0, 2], [1])
    [(reason, row, *_)] = shop.put_aside()
    assert "'name' does not fit string: Invalid UTF8" in reason
    assert json.loads(row)["name"] == '"'


def test_the_report_counts_what_was_put_aside(spark, shop, caplog):
    with caplog.at_level("INFO", "dualwrite.sinks.spark"):
        report = write_batch(readings(spark), batch_id="1", **shop.settings)
    assert f"; {len(BAD)} rows were put aside" in caplog.text
    assert (report.rows, report.messages, report.quarantined_rows) == (ROWS, ROWS, len(BAD))
    assert [part.quarantined for part in report.parts] == [len(WRONG)] * PARTITIONS
    more = readings(spark).withColumn("id", functions.expr("id + 1000"))
    [id_, *others] = [name for name in shop.settings if name not in {"table", "topic", "key"}]
    common = {name: shop.settings[name] for name in (id_, *others)}
    target = {"table": "readings", "topic": shop.case.topic, "key": "id"}
    report = write_many([(more, target)], batch_id="2", **common)
    assert report.written_by_table == {"readings": len(GOOD), "aside": len(BAD)}
    assert (report.quarantined_rows, [part.quarantined for part in report.parts]) == (len(BAD), [6, 6, 6])
    assert all(part.seconds > 0 and part.first_offsets for part in report.parts)
    again = write_batch(readings(spark), batch_id="1", **shop.settings)
    assert (again.rows, again.written_rows, again.quarantined_rows) == (ROWS, 0, 0)


@pytest.mark.parametrize("to", ["quarantine_table", "quarantine_topic"])
@pytest.mark.parametrize("way", ["write_batch", *LEGS])
def test_a_table_alone_or_a_topic_alone_takes_them(spark, shop, way, to):
    write_by(shop.case, readings(spark), way, **{to: shop.more[to]})
    aside = [len(BAD), 0] if to == "quarantine_table" else [0, len(BAD)]
    assert shop.counts() == [len(GOOD), aside[0], len(GOOD), aside[1]]
    [(rows, messages)] = shop.case.execute("SELECT row_count, message_count FROM dualwrite_batch")
    assert (rows, messages) == (ROWS, len(GOOD) + aside[1])
    nothing_is_left(shop.case)


@pytest.mark.parametrize("good", [[], GOOD], ids=["the whole batch", "one partition of two"])
def test_a_prepared_partition_whose_rows_are_all_put_aside_into_a_topic_is_ended(spark, shop, good):
    """Its transaction has no row, but a lock on the run, which would never end beside it."""
    by_partition = readings(spark, 1).repartitionByRange(2, functions.expr(f"id % {EVERY} IN ({LISTED})"))
    df = by_partition.where(f"id IN ({', '.join(map(str, [*good, *BAD]))})")
    write_by(shop.case, df, "prepared", quarantine_topic=shop.aside)
    assert shop.counts() == [len(good), 0, len(good), len(BAD)]
    assert prepared_transactions(shop.case) == []
    nothing_is_left(shop.case)


@BOTH_DATABASES
@pytest.mark.parametrize("good", [[], GOOD], ids=["the whole batch", "one partition of two"])
@pytest.mark.parametrize("way", ["write_batch", "staging"])
def test_a_partition_whose_rows_are_all_put_aside_into_a_table_sends_nothing(spark, shop, way, good):
    by_partition = readings(spark, 1).repartitionByRange(2, functions.expr(f"id % {EVERY} IN ({LISTED})"))
    df = by_partition.where(f"id IN ({', '.join(map(str, [*good, *BAD]))})")
    for batch_id in ("1", "2"):
        write_by(
            shop.case, df.withColumn("id", df.id + 1000 * (int(batch_id) - 1)), way, batch_id, quarantine_table="aside"
        )
    assert shop.counts() == [2 * len(good), 2 * len(BAD), 2 * len(good), 0]
    nothing_is_left(shop.case)


def test_rows_that_are_all_put_aside_into_a_table_cannot_be_prepared(spark, shop):
    df = readings(spark, 1).where(f"id IN ({', '.join(map(str, BAD))})")
    with pytest.raises(SPARKS_ERRORS, match=r"no row of the partition has a message.*quarantine_topic.*staging"):
        write_by(shop.case, df, "prepared", quarantine_table="aside")
    assert shop.counts() == [0, 0, 0, 0]
    nothing_is_left(shop.case)
    write_by(shop.case, df, "staging", quarantine_table="aside")
    assert shop.counts() == [0, len(BAD), 0, 0]


@pytest.mark.parametrize("leg", LEGS)
def test_more_rows_than_the_limit_fail_the_whole_batch_at_its_decision(spark, shop, leg):
    with pytest.raises(SPARKS_ERRORS, match=rf"quarantine_limit \({len(BAD) - 1}\) allows: the batch has {len(BAD)}"):
        write_by(shop.case, readings(spark), leg, **shop.more, quarantine_limit=len(BAD) - 1)
    assert shop.counts() == [0, 0, 0, 0]
    nothing_is_left(shop.case)
    write_by(shop.case, readings(spark), leg, **shop.more, quarantine_limit=len(BAD))
    shop.verify()


def test_a_partition_with_more_rows_than_the_limit_fails_before_all_are_looked_for(spark, shop):
    words = r"quarantine_limit \(5\) allows: partition 0 has at least 6 of them; row \d+ of partition 0"
    with pytest.raises(JobFailed, match=words):
        write_batch(readings(spark, 1), batch_id="1", **shop.settings, quarantine_limit=5)
    with pytest.raises(TransactionAborted, match="the batch has 18"):
        common = {name: value for name, value in shop.settings.items() if name not in {"table", "topic", "key"}}
        target = {"table": "readings", "topic": shop.case.topic, "key": "id"}
        write_many([(readings(spark), target)], batch_id="2", **common, quarantine_limit=17)
    assert shop.counts() == [0, 0, 0, 0]
    nothing_is_left(shop.case)


@pytest.mark.parametrize("way", ["write_batch", *LEGS])
def test_a_key_that_is_there_already_fails_the_batch_and_is_not_put_aside(spark, shop, way):
    shop.case.execute("INSERT INTO readings (id, name) VALUES (1, 'here')")
    with pytest.raises(SPARKS_ERRORS, match="duplicate key"):
        write_by(shop.case, readings(spark), way, **shop.more)
    assert shop.put_aside() == [] or way == "write_batch"
    shop.case.execute("DELETE FROM readings WHERE name = 'here'")
    write_by(shop.case, readings(spark), way, **shop.more)
    shop.verify()


@pytest.mark.parametrize("way", ["write_batch", "staging"])
def test_a_batch_that_has_failed_for_its_rows_runs_again_with_a_quarantine(spark, shop, way):
    """Also where other partitions of it are written: their rows are the same with it and without it."""
    wrong = ", ".join(map(str, WRONG))
    df = readings(spark).where(f"id >= {ROWS - EVERY} OR id % {EVERY} NOT IN ({wrong})")
    with pytest.raises(SPARKS_ERRORS):
        write_by(shop.case, df, way)
    assert shop.put_aside() == []
    write_by(shop.case, df, way, **shop.more)
    shop.verify(bad=[number for number in BAD if number >= ROWS - EVERY])


@BOTH_DATABASES
@pytest.mark.parametrize("way", ["write_batch", "staging"])
def test_changes_that_mean_nothing_are_put_aside_and_deletions_need_their_key_alone(spark, shop, way):
    shop.case.execute("INSERT INTO readings (id, name) VALUES (1, 'one'), (2, 'two'), (3, 'three')")
    rows = "op string, lsn bigint, id bigint, name string, level int"
    changes = [("d", 1, 1, None, None), ("u", 2, 2, "newer", 4), ("u", 3, 2, "a name that is too long", 4),
               ("u", 4, None, "x", 1), ("x", 5, 3, "x", 1), ("c", 6, 4, "four", -4)]  # fmt: skip
    merging = {"upsert_keys": ["id"], "op_column": "op", "order_column": "lsn"}
    write_by(shop.case, spark.createDataFrame(changes, rows).coalesce(1), way, **shop.more, **merging)
    assert shop.case.execute("SELECT id, name FROM readings ORDER BY id") == [(2, "newer"), (3, "three")]
    reasons = [reason for reason, *_ in shop.put_aside()]
    assert len(reasons) == 4
    assert "is null" in reasons[1]
    assert "op_values knows" in reasons[2]
    assert shop.counts()[2:] == [2, 4]
    nothing_is_left(shop.case)


KILLED = ["write.produced", "spark.rows_copied", "spark.task_done"]


@pytest.mark.parametrize("leg", LEGS)
def test_killed_tasks_put_each_row_aside_once(spark, shop, leg):
    points = json.dumps(dict(enumerate(KILLED)))
    given = {**options_of(shop.settings), "batchId": "1", "databaseLeg": leg, "inTasks": points, "keepSlots": "false"}
    readings(spark).write.format("armed").mode("append").options(**given).save()
    shop.verify()


@pytest.mark.parametrize("leg", LEGS)
@pytest.mark.parametrize(
    "point", ["batch.recorded", "batch.decided", pytest.param("complete.recorded", marks=pytest.mark.thorough)]
)
def test_a_killed_decision_puts_each_row_aside_once(spark, shop, leg, point):
    given = {**options_of(shop.settings), "batchId": "1", "databaseLeg": leg}
    armed = {**given, "inCommit": point, "inAbort": "settle.looked,claim.before"}
    with pytest.raises(SPARKS_ERRORS):
        readings(spark).write.format("armed").mode("append").options(**armed).save()
    readings(spark).write.format("dualwrite").mode("append").options(**given).save()
    shop.verify()


@BOTH_DATABASES
@pytest.mark.parametrize(
    "point", [pytest.param("spark.rows_copied", marks=pytest.mark.thorough), "write.recorded", "write.decided"]
)
def test_a_killed_task_of_write_batch_puts_each_row_aside_once(spark, shop, monkeypatch, point):
    monkeypatch.setattr(per_partition, "PartitionTask", partial(ArmedTask, point=point))
    report = write_batch(readings(spark), batch_id="1", **shop.settings)
    assert report.rows == ROWS
    shop.verify()


@by_way_on_both_databases(["format", "foreach_batch"], quick=["format", "foreach_batch", "foreach_batch-mariadb"])
def test_a_stream_that_is_stopped_on_the_way_puts_each_row_aside_once(spark, shop, tmp_path, way):
    readings(spark, 4).write.parquet(str(tmp_path / "source"))
    schema = readings(spark).schema

    def run(point=""):
        read = spark.readStream.schema(schema).option("maxFilesPerTrigger", "2").parquet(str(tmp_path / "source"))
        if way == "format":
            stream = read.writeStream.format("armed").options(**options_of(shop.settings), inCommit=point)
        else:
            stream = read.writeStream.foreachBatch(partial(stopped_at, foreach_batch(**shop.settings), point))
        stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        stream.start().awaitTermination()

    points = ("batch.recorded", "batch.decided") if way == "format" else ("spark.driver_started", "spark.driver_done")
    for point in points:
        with pytest.raises(SPARKS_ERRORS):
            run(point)
    run()
    shop.verify()


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("quarantine_limit needs quarantine_table or quarantine_topic", {"quarantine_limit": 3}),
        ("quarantine_limit must not be less than 0", {"quarantine_table": "aside", "quarantine_limit": -1}),
        ("there is no table 'nowhere'", {"quarantine_table": "nowhere"}),
        ("there is no topic 'nowhere'", {"quarantine_topic": "nowhere"}),
        ("table 'readings' has no column 'reason'", {"quarantine_table": "readings"}),
        ("quarantine_topic must be another topic", {"quarantine_topic": "THE TOPIC"}),
    ],
)
def test_a_quarantine_that_cannot_be_is_refused_before_a_task_runs(spark, shop, words, more):
    more = {name: shop.case.topic if value == "THE TOPIC" else value for name, value in more.items()}
    for way in ("write_batch", "staging"):
        with pytest.raises((ConfigurationError, *SPARKS_ERRORS), match=words):
            write_by(shop.case, readings(spark), way, **more)
    assert shop.case.execute("SELECT count(*) FROM dualwrite_slot") == [(0,)]
