"""A Spark batch of many tasks becomes visible to the readers of its unit topic at one moment, whatever dies on the way."""

import json

import pytest
from harness.page_examples import example, run_example
from harness.spark import PARTITIONS, ROWS, SPARKS_ERRORS
from harness.spark import numbers as numbered
from harness.spark_source import ArmedSource, options, write_by, write_with
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions

from dualwrite import ConfigurationError, failpoints
from dualwrite.failpoints import FailpointError
from dualwrite.sinks.spark import foreach_batch, foreach_partition, plan, register, write_batch
from dualwrite.units import BatchReader

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def unit_topic(dualwrite_kafka, dualwrite_topic):
    return dualwrite_kafka.create_topic(f"{dualwrite_topic}-units", 1)


@pytest.fixture
def reader(numbers, unit_topic):
    with BatchReader(unit_topic, kafka=numbers.kafka) as reader:
        yield reader


def ids(batch):
    return sorted(json.loads(record.value)["id"] for record in batch.records())


VISIBLE_S = 60.0
"""A batch is announced before its write returns: no more than the broker's answer is waited for."""


def batches(reader, count=0):
    """The batches that are visible now, at least so many of them: name and rows."""
    found = []
    while (batch := reader.next_batch(VISIBLE_S if len(found) < count else 1.0 if not found else 0.2)) is not None:
        found.append((batch.name, ids(batch)))
    return found


@pytest.mark.parametrize("way", ["write_batch", pytest.param("staging", marks=pytest.mark.thorough)])
def test_a_batch_is_announced_once_when_it_is_complete(spark, numbers, unit_topic, reader, way):
    write_by(numbers, numbered(spark, 10, 1), way, "1", unit_topic=unit_topic)
    df = numbered(spark).where("id >= 10")
    write_by(numbers, df, way, "2", unit_topic=unit_topic)
    write_by(numbers, df, way, "2", unit_topic=unit_topic)
    first, second = list(range(10)), list(range(10, ROWS))
    assert batches(reader, 2) == [("1", first), ("2", second)]
    with BatchReader(unit_topic, kafka=numbers.kafka) as again:
        position = again.next_batch(30.0).position
    with BatchReader(unit_topic, kafka=numbers.kafka, position=position) as later:
        assert batches(later, 1) == [("2", second)]


def failing(spark):
    """Rows of which the last one cannot be computed."""
    fails = functions.when(functions.col("id") == ROWS - 1, functions.raise_error(functions.lit("bad row")))
    return numbered(spark).withColumn("name", fails.otherwise(functions.col("name")))


def test_a_batch_that_is_written_in_part_is_not_visible_until_all_of_it_is(spark, numbers, unit_topic, reader):
    settings = {**numbers.settings, "unit_topic": unit_topic}
    with pytest.raises((*SPARKS_ERRORS, Exception), match="bad row"):
        write_batch(failing(spark), batch_id="1", **settings)
    [seen] = numbers.batches()
    assert 0 < seen.written_partitions < PARTITIONS
    assert len(numbers.messages()) > 0
    # Another batch of the sink would show the part of the first one.
    with pytest.raises(ConfigurationError, match="batch '1' of the same sink is written in part"):
        write_batch(numbered(spark, 10, 1), batch_id="0", **settings)
    assert batches(reader) == []


@pytest.mark.parametrize("way", ["write_batch", pytest.param("staging", marks=pytest.mark.thorough)])
def test_a_driver_that_dies_before_it_announces_leaves_that_to_the_next_run(spark, numbers, unit_topic, reader, way):
    if way == "write_batch":
        settings = {**numbers.settings, "unit_topic": unit_topic}
        failpoints.arm("unit.batch:1:raise")
        with pytest.raises(FailpointError):
            write_batch(numbered(spark), batch_id="1", **settings)
        failpoints.arm("")
    else:
        register(spark)
        spark.dataSource.register(ArmedSource)
        with pytest.raises(SPARKS_ERRORS):
            write_with(
                numbers, numbered(spark), source="armed", batchId="1", unitTopic=unit_topic, inCommit="unit.batch"
            )
    numbers.verify()
    assert batches(reader) == []
    write_by(numbers, numbered(spark), way, "1", unit_topic=unit_topic)
    numbers.verify()
    assert batches(reader, 1) == [("1", list(range(ROWS)))]


def test_a_batch_is_not_announced_while_another_one_of_the_sink_is_at_work(
    spark, numbers, unit_topic, reader, monkeypatch
):
    settings = {**numbers.settings, "unit_topic": unit_topic}
    write_batch(numbered(spark, 10, 1), batch_id="1", **settings)
    monkeypatch.setattr(plan, "_OTHERS_S", 0.1)
    numbers.execute("UPDATE dualwrite_slot SET lease_owner = '\"other\" task', lease_until = now() + interval '1 hour'")
    df = numbered(spark, 20, 1).where("id >= 10")
    with pytest.raises(ConfigurationError, match='"other" task is at work in the same sink'):
        write_batch(df, batch_id="2", **settings)
    assert batches(reader, 1) == [("1", list(range(10)))]
    numbers.execute("UPDATE dualwrite_slot SET lease_owner = NULL, lease_until = NULL")
    write_batch(df, batch_id="2", **settings)
    assert batches(reader, 1) == [("2", list(range(10, 20)))]


def test_a_driver_that_was_paused_before_it_announces_finds_a_part_of_the_next_batch(
    spark, numbers, unit_topic, reader
):
    settings, passed = {**numbers.settings, "unit_topic": unit_topic}, []

    def next_driver(name):
        passed.append(name)
        if name == "claim.before" and passed.count("unit.batch") == 1 and "next" not in passed:
            passed.append("next")
            with pytest.raises((*SPARKS_ERRORS, Exception), match="bad row"):
                write_batch(failing(spark), batch_id="2", **settings)

    with (
        failpoints.watched(next_driver),
        pytest.raises(ConfigurationError, match="batch '2' of the same sink is written in part"),
    ):
        write_batch(numbered(spark, 10, 1), batch_id="1", **settings)
    assert batches(reader) == []


def test_a_driver_that_was_paused_before_it_announces_finds_a_later_batch_and_announces_it_by_its_name(
    spark, numbers, unit_topic, reader
):
    """Its own batch was run again meanwhile, and has a unit: readers that know it would take another one for a repetition."""
    settings, passed = {**numbers.settings, "unit_topic": unit_topic}, []
    first, second = numbered(spark, 10, 1), numbered(spark, 20, 1).where("id >= 10")

    def next_drivers(name):
        passed.append(name)
        if name == "claim.before" and passed.count("unit.batch") == 1 and "next" not in passed:
            passed.append("next")
            write_batch(first, batch_id="1", **settings)
            with pytest.raises(FailpointError):
                write_batch(second, batch_id="2", **settings)
        if name == "unit.batch" and passed.count(name) == 3:
            raise FailpointError(name)

    with failpoints.watched(next_drivers):
        write_batch(first, batch_id="1", **settings)
    write_batch(first, batch_id="1", **settings)
    write_batch(second, batch_id="2", **settings)
    assert batches(reader, 2) == [("1", list(range(10))), ("2", list(range(10, 20)))]


def test_a_batch_is_announced_by_the_name_of_the_newest_one_in_the_topic(
    spark, numbers, unit_topic, reader, dualwrite_kafka
):
    """Batches to other topics do not count, nor do those without messages."""
    other_topic = {**numbers.settings, "topic": dualwrite_kafka.create_topic(f"{unit_topic}-others", 1)}
    write_batch(numbered(spark, 10, 1), batch_id="1", **numbers.settings)
    write_batch(numbered(spark, 20, 1).where("id >= 10"), batch_id="2", **other_topic)
    write_batch(numbered(spark, 0, 1), batch_id="3", **numbers.settings, unit_topic=unit_topic)
    assert batches(reader, 1) == [("1", list(range(10)))]


FILES = 3


@pytest.fixture
def start(spark, numbers, unit_topic, tmp_path):
    """Start a query over files of ten rows each, one file in a micro-batch; with a fail point where it decides."""
    register(spark)
    spark.dataSource.register(ArmedSource)
    source = str(tmp_path / "source")
    for number in range(FILES):
        numbered(spark, 10 * (number + 1), 1).where(f"id >= {10 * number}").write.mode("append").parquet(source)

    def start(way, point=""):
        rows = spark.readStream.schema("id bigint, name string").option("maxFilesPerTrigger", "1").parquet(source)
        stream = rows.repartition(2).writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        if way == "foreach_batch":
            failpoints.arm(point)
            stream = stream.foreachBatch(foreach_batch(**numbers.settings, unit_topic=unit_topic))
        else:
            more = {"databaseLeg": way, "unitTopic": unit_topic, "inCommit": point}
            stream = stream.format("armed").options(**options(numbers, **more))
        return stream.trigger(availableNow=True).start()

    yield start
    failpoints.arm("")


def of_files(query):
    """The micro-batches of a query, each with the rows of its file."""
    return [(f"{query.id}/{number}", list(range(10 * number, 10 * number + 10))) for number in range(FILES)]


@pytest.mark.parametrize(
    "way", ["staging", *(pytest.param(way, marks=pytest.mark.thorough) for way in ("foreach_batch", "prepared"))]
)
def test_each_micro_batch_of_a_stream_is_announced_and_a_restart_announces_nothing(numbers, reader, start, way):
    first = start(way)
    first.awaitTermination()
    assert batches(reader, FILES) == of_files(first)
    start(way).awaitTermination()
    assert batches(reader) == []
    numbers.verify(10 * FILES)


POINTS = ["unit.batch", "claim.initialized", "unit.ending", "write.decided", "unit.ended"]


@pytest.mark.parametrize(
    ("way", "point"),
    [
        ("foreach_batch", "unit.batch:2:raise"),
        *(pytest.param("foreach_batch", f"{point}:2:raise", marks=pytest.mark.thorough) for point in POINTS[2:]),
        *(pytest.param(way, point, marks=pytest.mark.thorough) for way in ("staging", "prepared") for point in POINTS),
    ],
)
def test_a_stream_that_dies_while_it_announces_a_micro_batch_announces_it_when_it_is_run_again(
    numbers, reader, start, way, point
):
    """Every micro-batch of it once, in their order: none is left out, and none comes with the next one."""
    dying = start(way, point)
    with pytest.raises(StreamingQueryException):
        dying.awaitTermination()
    failpoints.arm("")
    seen = batches(reader)
    assert seen == of_files(dying)[: len(seen)]
    assert len(seen) < FILES
    again = start(way)
    again.awaitTermination()
    assert seen + batches(reader, FILES - len(seen)) == of_files(again)
    numbers.verify(10 * FILES)


@pytest.mark.thorough
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("leg", ["staging", "prepared"])
def test_a_batch_whose_announcing_process_is_killed_is_announced_by_the_next_run(
    spark, numbers, unit_topic, reader, leg, point
):
    register(spark)
    spark.dataSource.register(ArmedSource)
    given = {"source": "armed", "batchId": "1", "unitTopic": unit_topic, "databaseLeg": leg}
    with pytest.raises(SPARKS_ERRORS):
        write_with(numbers, numbered(spark), inCommit=point, **given)
    seen = batches(reader)
    write_with(numbers, numbered(spark), **given)
    assert seen + batches(reader, 1 - len(seen)) == [("1", list(range(ROWS)))]
    numbers.verify()


def test_what_cannot_work_is_refused_before_anything_is_written(spark, numbers):
    df = numbered(spark, 2, 1)
    with pytest.raises(ConfigurationError, match="there is no topic 'missing'"):
        write_batch(df, batch_id="1", **numbers.settings, unit_topic="missing")
    with pytest.raises(ConfigurationError, match="must be another one"):
        write_batch(df, batch_id="1", **numbers.settings, unit_topic=numbers.topic)
    with pytest.raises(ConfigurationError, match="not for foreach_partition"):
        foreach_partition(df, batch_id="1", **numbers.settings, unit_topic="units")
    assert numbers.rows() == []


def test_the_pages_example_reads_the_batches(spark, numbers, unit_topic):
    write_by(numbers, numbered(spark), "staging", "1", unit_topic=unit_topic)
    [writes, reads] = example("units.md", "A Spark batch, visible at one moment")
    assert 'unit_topic="flights-units"' in writes
    process, positions = [], []
    found = run_example(
        reads.replace("while True", "for _ in range(1)"),
        unit_topic,
        page_topic="flights-units",
        kafka=numbers.kafka,
        process=process.append,
        store=positions.append,
    )
    assert found["batch"].name == "1"
    assert (len(process), positions) == (ROWS, [found["batch"].position])
