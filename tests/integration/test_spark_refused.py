"""Batches that would tear or lose rows in silence are refused, before anything of them is written."""

from dataclasses import replace

import psycopg
import pytest
from harness.spark import ROWS, SPARKS_ERRORS
from harness.spark import numbers as numbered
from harness.spark_source import nothing_is_left, options, write_by
from pyspark import TaskContext
from pyspark.sql import functions

from dualwrite import ConfigurationError
from dualwrite.sinks.spark import JobFailed, foreach_partition, register, write_batch
from dualwrite.testing.checker import read_committed

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.parametrize(
    "way",
    [
        "write_batch",
        "staging",
        *(pytest.param(way, marks=pytest.mark.thorough) for way in ("foreach_partition", "prepared")),
    ],
)
def test_rows_that_a_trigger_leaves_out_are_not_told_as_written(spark, numbers, way):
    """Its message would be there, and its row would not."""
    numbers.execute(
        "CREATE FUNCTION skip_one() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF NEW.id = 700 THEN RETURN NULL; END IF; RETURN NEW; END $$"
    )
    numbers.execute("CREATE TRIGGER skip_one BEFORE INSERT ON numbers FOR EACH ROW EXECUTE FUNCTION skip_one()")
    df = numbered(spark, ROWS, 1)
    with pytest.raises(SPARKS_ERRORS, match="'numbers' stored 999 of 1000 rows: a trigger or rule"):
        write_by(numbers, df, way)
    assert numbers.rows() == numbers.messages() == []
    numbers.execute("DROP TRIGGER skip_one ON numbers")
    write_by(numbers, df, way)
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("write_batch", "staging"),
        pytest.param("staging", "write_batch", marks=pytest.mark.thorough),
        pytest.param("prepared", "foreach_partition", marks=pytest.mark.thorough),
    ],
)
def test_a_batch_that_is_written_in_one_way_is_not_written_in_another(spark, numbers, first, second):
    df = numbered(spark, 10, 2)
    write_by(numbers, df, first)
    with pytest.raises(
        (ConfigurationError, *SPARKS_ERRORS), match="(?s)is now for.*run the batch again where it was begun"
    ):
        write_by(numbers, df, second)
    numbers.verify(10)


@pytest.mark.thorough
def test_the_ways_of_a_whole_batch_are_one_and_another_topic_is_another_batch(spark, numbers):
    df = numbered(spark, 10, 2)
    write_by(numbers, df, "staging")
    write_by(numbers, df, "prepared")
    with pytest.raises(SPARKS_ERRORS, match=f"topic '{numbers.topic}'.*is now for.*the topics in column 'topic'"):
        write_by(
            numbers, df.withColumn("topic", functions.lit(numbers.topic)), "staging", topic=None, topic_column="topic"
        )
    numbers.verify(10)
    nothing_is_left(numbers)


def test_a_run_of_other_rows_is_refused_and_one_of_the_same_rows_in_another_order_completes_the_batch(
    spark, numbers, caplog
):
    """Half of the first run is written; the second has its rows the other way round, and would write that half again."""
    url = numbers.url.replace("+psycopg", "")

    def fail_when_the_other_is_written(batches):
        if TaskContext.get().partitionId() == 1:
            with psycopg.connect(url, autocommit=True) as connection:
                while not connection.execute("SELECT 1 FROM dualwrite_ledger WHERE partition_id = 0").fetchone():
                    pass
            raise RuntimeError("partition 1 fails")
        yield from batches

    df = numbered(spark, 10, 2)
    words = "1 of its 2 partitions are committed and stay (0); run it again with the same batch id: it skips these"
    with pytest.raises(JobFailed) as failed:
        write_batch(df.mapInArrow(fail_when_the_other_is_written, df.schema), batch_id="1", **numbers.settings)
    [reason, stays] = str(failed.value).splitlines()
    assert reason.endswith("batch '1': RuntimeError: partition 1 fails")
    assert stays.startswith(words)
    assert f"batch '1' failed: {words}" in caplog.text
    assert [(seen.phase, seen.written_partitions) for seen in numbers.batches()] == [("failed", 1)]
    half = [(number, f"row {number}") for number in range(5)]
    assert numbers.rows() == numbers.messages() == half

    turned = df.select((9 - functions.col("id")).alias("id"), "name")
    with pytest.raises(
        JobFailed, match="partition 0.*is written already with 5 rows, and has other rows now"
    ) as failed:
        write_batch(turned, batch_id="1", **numbers.settings)
    assert str(failed.value).splitlines()[1].startswith(words)
    assert numbers.rows() == numbers.messages() == half

    in_order = df.sortWithinPartitions(functions.col("id").desc())
    assert write_batch(in_order, batch_id="1", **numbers.settings).written_rows == 5
    numbers.verify(10)


def test_a_dataframe_that_gives_other_rows_each_time_is_refused_unless_it_is_allowed(spark, numbers):
    df = numbered(spark, 10, 2)
    random = df.withColumn("name", functions.concat(functions.lit("row "), functions.rand()))
    for write in (write_batch, foreach_partition):
        with pytest.raises(ConfigurationError, match=r'rand\(\).*use format\("dualwrite"\)'):
            write(random, batch_id="1", **numbers.settings)
    shuffled = df.groupBy("name").agg(functions.max("id").alias("id")).select("id", "name")
    spark.conf.set("spark.sql.execution.sortBeforeRepartition", "false")
    try:
        with pytest.raises(ConfigurationError, match="in the order of their arrival"):
            write_batch(shuffled.repartition(2), batch_id="1", **numbers.settings)
    finally:
        spark.conf.unset("spark.sql.execution.sortBeforeRepartition")
    assert numbers.execute("SELECT * FROM dualwrite_ledger") == []
    write_batch(random, batch_id="1", **numbers.settings, allow_nondeterministic=True)
    assert len(numbers.rows()) == 10
    assert numbers.rows() == numbers.messages()


def test_a_right_that_is_missing_in_kafka_is_refused_before_a_task_runs(spark, numbers, guarded_kafka):
    """By what is asked of the brokers: Write on the ids, and the rights on the topic."""
    topic = guarded_kafka.create_topic(f"{numbers.topic}-guarded", 1)
    case = replace(numbers, kafka=guarded_kafka.client_config("spark"), topic=topic)
    pool = f"{case.sink}.spark"
    ids, of_topic = f"--transactional-id {pool} --resource-pattern-type prefixed", f"--topic {topic}"
    for granted, words, cure in (
        (None, f"rights on ids of {pool}: missing: Write on some of", f"--operation Write {ids}"),
        (("write", "transactional_id", case.sink), f"Describe on the topic '{topic}'", "Describe"),
        (
            ("describe", "topic", topic),
            f"rights on {topic}: missing: Write, Read",
            f"Write --operation Read {of_topic}",
        ),
        (("write", "topic", topic), f"rights on {topic}: missing: Read", f"--operation Read {of_topic}"),
    ):
        if granted is not None:
            guarded_kafka.allow("spark", *granted, prefixed=granted[1] == "transactional_id")
        for way in ("write_batch", "staging"):
            with pytest.raises((ConfigurationError, *SPARKS_ERRORS)) as refused:
                write_by(case, numbered(spark, 10, 1), way)
            assert words in str(refused.value)
            assert cure in str(refused.value)
        assert numbers.execute("SELECT count(*) FROM dualwrite_slot") == [(0,)]
    guarded_kafka.allow("spark", "read", "topic", topic)
    write_by(case, numbered(spark, 10, 1), "staging")
    assert len(numbers.rows()) == 10
    assert len(list(read_committed(guarded_kafka.admin_config(), topic))) == 10


def test_sql_is_refused_in_words_and_writes_nothing(spark, numbers):
    """Spark passes none of a table's options on to a Python data source."""
    register(spark)
    table = f"numbers_{numbers.sink.replace('-', '_')}"
    given = ", ".join(f"'{name}' = '{value}'" for name, value in options(numbers, batchId="1").items())
    spark.sql(f"CREATE TABLE {table} (id bigint, name string) USING dualwrite OPTIONS ({given})")
    try:
        with pytest.raises(SPARKS_ERRORS, match=r"there are no options.*INSERT INTO"):
            spark.sql(f"INSERT INTO {table} VALUES (1, 'one')")
    finally:
        spark.sql(f"DROP TABLE {table}")
    assert numbers.rows() == numbers.messages() == []
