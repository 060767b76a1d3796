"""Streams: what names a micro-batch, two queries at once, a query that is stopped, a driver that dies while it decides."""

import os

import psutil
import pytest
from harness.drivers import Drivers, kill_group, paused_below
from harness.patience import PATIENCE_S
from harness.spark import ROWS
from harness.spark import numbers as numbered
from harness.spark_source import ArmedSource, nothing_is_left, options

from dualwrite.sinks.spark import foreach_batch, register

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


@pytest.mark.parametrize("way", ["foreach_batch", "staging"])
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


@pytest.mark.parametrize(
    ("where", "point", "written"),
    [
        ("inCommit", "batch.decided", True),
        thorough("inCommit", "batch.recorded", False),
        thorough("inAbort", "claim.before", False),
        thorough("inAbort", "settle.retired", False),
    ],
)
def test_a_driver_that_dies_with_all_its_processes_is_followed_by_one_that_goes_on(
    numbers, start, source, tmp_path, where, point, written
):
    """The process that decides stands still at that point; then everything of that driver is killed."""
    armed = {where: f"{point}:1:stop"}
    if where == "inAbort":
        armed |= {"inTask": "batch.handed_over", "attempts": "99"}
    drivers = Drivers(tmp_path)
    driver = drivers.start(
        do="source_stream",
        master="local[2,4]",
        source=source,
        checkpoint=str(tmp_path / "checkpoint"),
        options=options(numbers, **armed),
    )

    def check():
        assert driver.poll() is None, drivers.log.read_text()[-3000:]

    try:
        [deciding] = paused_below(driver.pid, check=check)
    finally:
        kill_group(driver)
    # Spark's daemon is in a group of its own, and ends what it has started when the driver is gone.
    assert not psutil.wait_procs([deciding], timeout=PATIENCE_S)[1]
    assert bool(numbers.rows()) == written
    start("staging").awaitTermination()
    numbers.verify()
    nothing_is_left(numbers)
