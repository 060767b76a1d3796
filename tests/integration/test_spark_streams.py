"""Streams: what names a micro-batch, two queries at once, a query that is stopped, a driver that dies while it decides."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from operator import attrgetter

import psutil
import pytest
from confluent_kafka import Producer
from harness.drivers import Drivers, as_installed, kill_group, paused_below, phases_of
from harness.patience import PATIENCE_S, wait_until
from harness.spark import HAS_CONNECTOR, ROWS, SPARKS_ERRORS, connector_jars
from harness.spark import numbers as numbered
from harness.spark_job import kafka_stream
from harness.spark_source import ArmedSource, nothing_is_left, options, write_with
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions
from pyspark.sql.types import StructType

from dualwrite import ConfigurationError
from dualwrite.sinks.spark import DualWriteDataSource, foreach_batch, register
from dualwrite.sinks.spark.source import TaskMessage

pytestmark = [pytest.mark.spark, pytest.mark.slow]

FILES = 3


def thorough(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.fixture
def source(spark, tmp_path):
    register(spark)
    spark.dataSource.register(ArmedSource)
    path = tmp_path / "source"
    numbered(spark, ROWS, 1).repartitionByRange(FILES, "id").write.parquet(str(path))
    return str(path)


@pytest.fixture
def start(spark, numbers, source, tmp_path):
    """Start a query over the files, or some of the rows in them."""

    def start(way, *, where="true", checkpoint="checkpoint", name="dualwrite", **more):
        rows = spark.readStream.schema("id bigint, name string").option("maxFilesPerTrigger", "1").parquet(source)
        writer = rows.where(where).repartition(2).writeStream
        if way == "foreach_batch":
            writer = writer.foreachBatch(foreach_batch(**numbers.settings))
        else:
            writer = writer.format(name).options(**options(numbers, databaseLeg=way, **more))
        return writer.option("checkpointLocation", str(tmp_path / checkpoint)).trigger(availableNow=True).start()

    return start


@pytest.mark.parametrize("way", [thorough("foreach_batch"), "staging"])
def test_a_micro_batch_is_named_by_the_id_of_its_query_which_the_checkpoint_keeps(numbers, start, way):
    queries = []
    for _ in range(2):
        queries.append(start(way))
        queries[-1].awaitTermination()
    first, second = queries
    assert first.id == second.id
    assert first.runId != second.runId
    names = {name for (name,) in numbers.execute("SELECT batch_id FROM dualwrite_ledger")}
    assert names == {f"{first.id}/{number}" for number in range(FILES)}
    numbers.verify()


@pytest.mark.parametrize("way", [thorough("foreach_batch"), "staging", thorough("prepared")])
def test_two_queries_write_into_one_sink_at_the_same_time(numbers, start, way):
    queries = [start(way, where=f"id % 2 = {half}", checkpoint=f"checkpoint-{half}") for half in range(2)]
    for query in queries:
        query.awaitTermination()
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.parametrize("way", ["staging", thorough("prepared")])
def test_a_query_that_is_stopped_while_a_task_writes_goes_on_from_its_checkpoint(numbers, start, way):
    query = start(way, name="armed", inTask="spark.rows_copied:1:stop")

    def check():
        assert query.isActive, query.exception()

    workers = paused_below(os.getpid(), check=check)
    query.stop()
    assert numbers.rows() == []
    assert not psutil.wait_procs(workers, timeout=PATIENCE_S)[1]
    start(way).awaitTermination()
    numbers.verify()
    nothing_is_left(numbers)


def test_a_thread_of_the_driver_that_has_registered_the_format_writes_a_stream_and_a_batch(spark, numbers, start):
    """Spark looks for the format in the thread's active session, and a new thread has none."""

    def write():
        with pytest.raises(SPARKS_ERRORS, match="DATA_SOURCE_NOT_FOUND"):
            start("staging")
        register(spark)
        start("staging", where="id >= 10").awaitTermination()
        write_with(numbers, numbered(spark, 10, 1), batchId="1")

    with ThreadPoolExecutor(1) as threads:
        threads.submit(write).result(PATIENCE_S)
    numbers.verify()
    nothing_is_left(numbers)


def test_totals_in_update_mode_replace_those_of_former_micro_batches_and_a_replay_writes_nothing(
    spark, numbers, source, tmp_path
):
    """As the documentation has it: each micro-batch is a batch that replaces rows of the same key, named by its number."""
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    checkpoint = tmp_path / "checkpoint"

    def write(totals, number):
        write_with(numbers, totals, upsertKeys="id", batchId=f"totals {number}")

    def run():
        rows = spark.readStream.schema("id bigint, name string").option("maxFilesPerTrigger", "1").parquet(source)
        counted = rows.groupBy((functions.col("id") % 7).alias("id")).count()
        totals = counted.select("id", functions.col("count").cast("string").alias("name"))
        stream = totals.writeStream.outputMode("update").foreachBatch(write)
        stream = stream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        stream.start().awaitTermination()

    run()
    expected = sorted((rest, str(len(range(rest, ROWS, 7)))) for rest in range(7))
    assert numbers.rows() == expected
    messages = numbers.messages()
    assert len(messages) == 7 * FILES
    assert set(expected) <= set(messages)
    (checkpoint / "commits" / str(FILES - 1)).unlink()
    (checkpoint / "commits" / f".{FILES - 1}.crc").unlink(missing_ok=True)
    run()
    assert numbers.rows() == expected
    assert numbers.messages() == messages
    nothing_is_left(numbers)


def die(drivers, **document):
    """Start a driver that stands still at a point where it decides; then kill all its processes."""
    driver = drivers.start(**document)

    def check():
        assert driver.poll() is None, drivers.log.read_text()[-3000:]

    try:
        [deciding] = paused_below(driver.pid, check=check)
    finally:
        kill_group(driver)
    # Spark's daemon is in a group of its own, and ends what it has started when the driver is gone.
    assert not psutil.wait_procs([deciding], timeout=PATIENCE_S)[1]


@pytest.mark.parametrize("numbers", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("done", [0, 1])
def test_a_commit_is_refused_if_a_task_has_handed_nothing_over(numbers, monkeypatch, done):
    """Spark has counted that task as done, so its rows would be gone; where it has counted none, there are none."""
    monkeypatch.setenv("SPARK_HIDE_TRACEBACK", "")  # a refusal sets it
    handed_over, schema = [TaskMessage("query/0", None)] * done, StructType().add("id", "long").add("name", "string")
    batch = DualWriteDataSource(options(numbers, batchId="1")).writer(schema, overwrite=False)
    stream = DualWriteDataSource(options(numbers)).streamWriter(schema, overwrite=False)
    discarded = f"discarded the rows of 1 of {done + 1} partitions; nothing is written"
    for commit, advice in ((batch.commit, "version of PySpark"), (partial(stream.commit, batchId=0), "new checkpoint")):
        with pytest.raises(ConfigurationError, match=f"{discarded}.*{advice}"):
            commit([*handed_over, None])
    assert [seen.phase for seen in numbers.batches()] == ["writing"]
    batch.abort([*handed_over, None])
    stream.abort([*handed_over, None], 0)
    stream.commit([], 0)
    nothing_is_left(numbers)


def test_a_stream_with_the_continuous_trigger_commits_nothing_and_its_driver_says_why(numbers, tmp_path):
    """Spark gives the rows of such a stream to no task of the library's."""
    drivers, checkpoint = Drivers(tmp_path), tmp_path / "checkpoint"
    driver = drivers.start(do="continuous", options=options(numbers), checkpoint=str(checkpoint))
    commits = checkpoint / "commits"

    def told():
        assert driver.poll() is None, drivers.log.read_text()[-3000:]
        return (commits / "0").exists() or "discarded the rows of 2 of 2 partitions" in drivers.log.read_text()

    try:
        wait_until(told)
        wait_until((checkpoint / "offsets" / "5").exists)  # Spark goes on
        assert not [path.name for path in commits.iterdir()]
    finally:
        kill_group(driver)
    assert numbers.rows() == numbers.messages() == []
    nothing_is_left(numbers)


# In every run the stream that reads Kafka loses its driver so.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("where", "point", "written"),
    [
        ("inCommit", "batch.decided", True),
        ("inCommit", "batch.recorded", False),
        ("inAbort", "claim.before", False),
        ("inAbort", "settle.retired", False),
    ],
)
def test_a_driver_that_dies_with_all_its_processes_is_followed_by_one_that_goes_on(
    numbers, start, source, tmp_path, where, point, written
):
    """The process that decides stands still at that point; then everything of that driver is killed."""
    armed = {where: f"{point}:1:stop"}
    if where == "inAbort":
        armed |= {"inTask": "batch.handed_over", "attempts": "99"}
    die(
        Drivers(tmp_path),
        do="source_stream",
        master="local[2,4]",
        checkpoint=str(tmp_path / "checkpoint"),
        source=source,
        options=options(numbers, **armed),
    )
    assert bool(numbers.rows()) == written
    start("staging").awaitTermination()
    numbers.verify()
    nothing_is_left(numbers)


IN_TASK = [
    "spark.task_started", "slot.leased", "claim.before", "claim.initialized", "write.checked", "write.produced",
    "spark.rows_copied", "write.prepared", "batch.handed_over", "spark.task_done",
]  # fmt: skip
IN_COMMIT = [
    "batch.prepared", "ledger.inserted", "batch.recorded", "batch.decided", "complete.before", "complete.ended",
    "complete.recorded", "batch.completed",
]  # fmt: skip
IN_ABORT = ["claim.before", "settle.looked", "settle.before_retire", "settle.retired"]
DEATHS = [
    *(("inTask", point) for point in IN_TASK),
    *(("inCommit", point) for point in IN_COMMIT),
    *(("inAbort", point) for point in IN_ABORT),
]


# In every run test_spark_source.py has a stream that dies again and again.
@pytest.mark.thorough
@pytest.mark.parametrize("way", ["staging", "prepared"])
@pytest.mark.parametrize(("where", "point"), DEATHS)
def test_a_query_one_of_whose_processes_dies_goes_on_from_its_checkpoint(numbers, start, way, where, point):
    """At every point: a task as often as Spark tries it, or the process that decides, or the one that gives up."""
    armed = {where: point}
    if where == "inAbort":
        armed |= {"inTask": "batch.handed_over"}
    query = start(way, name="armed", **armed, attempts="99")
    with pytest.raises(StreamingQueryException):
        query.awaitTermination()
    start(way).awaitTermination()
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.skipif(not HAS_CONNECTOR, reason="the connector is that of Spark 4.2")
def test_a_stream_that_reads_kafka_writes_each_record_once_over_the_death_of_its_driver(
    spark, numbers, kafka, dualwrite_kafka, tmp_path
):
    """Exactly once from a topic into a topic and a table: what the checkpoint has not noted is read and decided again.

    The driver that dies is one in which Spark finds the format by itself.
    """
    given, checkpoint = f"given-{numbers.topic}", tmp_path / "checkpoint"
    dualwrite_kafka.create_topic(given, partitions=2)
    producer = Producer(kafka)
    for number in range(ROWS):
        producer.produce(given, json.dumps({"id": number, "name": f"row {number}"}), str(number))
    producer.flush()
    document = {
        "source": {
            "kafka.bootstrap.servers": kafka["bootstrap.servers"],
            "subscribe": given,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(ROWS // 3 + 1),
        },
        "options": options(numbers),
        "checkpoint": str(checkpoint),
        "format": "dualwrite",
    }
    drivers = Drivers(tmp_path, path=as_installed(tmp_path))
    die(
        drivers,
        do="kafka_stream",
        session={"spark.jars": connector_jars()},
        failpoint="batch.decided:2:stop",
        **document,
    )
    assert 0 < len(numbers.rows()) < ROWS
    # And the driver's log shows where a batch is.
    query = json.loads((checkpoint / "metadata").read_text())["id"]
    assert phases_of(f"{query}/0", drivers.log.read_text()) == ["decided", "completed"]
    register(spark)
    for jar in connector_jars().split(","):
        spark.sql(f"ADD JAR '{jar}'")
    kafka_stream(spark, document)
    numbers.verify()
    nothing_is_left(numbers)
    # The ledger leads from each batch back to the records that it is made of.
    made_of = [json.loads(one.sources)[0] for one in sorted(numbers.batches(), key=attrgetter("batch_id"))]
    assert [one["start"] for one in made_of] == [None, *[one["end"] for one in made_of[:-1]]]
    read = [sum(one["end"][given].values()) for one in made_of]
    assert [later - before for before, later in pairwise([0, *read])] == [one.row_count for one in numbers.batches()]
