"""Workers that Spark uses again keep their slots and producers: no claim and no new producer from the second batch on."""

import gc
import json
from functools import partial

import pyarrow as pa
import pytest
from click.testing import CliRunner
from harness.spark import ROWS, SPARKS_ERRORS
from harness.spark import numbers as numbered
from harness.spark_source import ArmedSource, nothing_is_left, options, write_with

from dualwrite.cli.options import commands
from dualwrite.sinks.spark import foreach_batch, register, write_batch

pytestmark = [pytest.mark.spark, pytest.mark.slow]

LEGS = ["staging", pytest.param("prepared", marks=pytest.mark.thorough)]
TASKS = 2  # as many as run at a time: each worker has one of them


@pytest.fixture
def write(spark, numbers):
    register(spark)
    spark.dataSource.register(ArmedSource)
    return partial(write_with, numbers)


def claims(case):
    """How often each slot was claimed."""
    found = case.execute("SELECT transactional_id, incarnation FROM kafka_transaction_state ORDER BY 1")
    return dict(found)


def assert_each_was_claimed_once(case, batches):
    """Spark has as many workers as it likes, and takes any; each keeps a slot of its own."""
    found = claims(case)
    assert set(found.values()) == {1}
    assert len(found) < batches * TASKS, "no slot was used twice"


def assert_idle_slots_are_settled(case):
    """To an operator, too: the workers' producers are alive, and nothing of theirs is unsettled."""
    servers = ["--url", case.url, "--bootstrap-server", case.kafka["bootstrap.servers"]]
    shown = CliRunner().invoke(commands, ["status", "--json", *servers])
    assert shown.exit_code == 0, shown.output
    items = json.loads(shown.stdout)["ids"]
    assert {item["transactional_id"] for item in items} == set(claims(case))
    assert not any(item["needs_recovery"] for item in items)


def shifted(spark, batch):
    """The batch of that number: other rows, the same partitions."""
    return numbered(spark, ROWS, TASKS).selectExpr(
        f"id + {batch * ROWS} AS id", f"'row ' || (id + {batch * ROWS}) AS name"
    )


def frozen_objects(spark):
    """The objects that no garbage collection looks at any more, in some of the workers."""

    def counted(batches):
        yield from (pa.record_batch({"objects": pa.array([gc.get_freeze_count()], pa.int64())}) for _ in batches)

    return [row.objects for row in spark.range(0, 8, 1, 8).mapInArrow(counted, "objects bigint").collect()]


# In every run micro-batches show it, which are whole batches.
@pytest.mark.thorough
@pytest.mark.parametrize("leg", ["staging", "prepared"])
def test_whole_batches_after_the_first_one_claim_nothing(spark, numbers, write, leg):
    for batch in range(4):
        write(shifted(spark, batch), batchId=str(batch), databaseLeg=leg)
    numbers.verify(4 * ROWS)
    nothing_is_left(numbers)
    assert_each_was_claimed_once(numbers, batches=4)
    assert_idle_slots_are_settled(numbers)


def test_partition_by_partition_nothing_is_claimed_after_the_first_batch_either(spark, numbers):
    for batch in range(4):
        write_batch(shifted(spark, batch), batch_id=str(batch), **numbers.settings)
    numbers.verify(4 * ROWS)
    nothing_is_left(numbers)
    assert_each_was_claimed_once(numbers, batches=4)
    assert_idle_slots_are_settled(numbers)
    assert max(frozen_objects(spark)) > 10_000  # the imported modules: Spark collects garbage after each task


@pytest.mark.parametrize("how", ["whole", pytest.param("by partition", marks=pytest.mark.thorough)])
def test_micro_batches_after_the_first_one_claim_nothing(spark, numbers, write, tmp_path, how):
    source = str(tmp_path / "source")
    numbered(spark, ROWS, 1).repartitionByRange(5, "id").write.parquet(source)
    stream = (
        spark.readStream.schema("id bigint, name string")
        .option("maxFilesPerTrigger", "1")
        .parquet(source)
        .repartition(TASKS)
        .writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
    )
    if how == "whole":
        stream = stream.format("dualwrite").options(**options(numbers))
    else:
        stream = stream.foreachBatch(foreach_batch(**numbers.settings))
    stream.start().awaitTermination()
    numbers.verify()
    nothing_is_left(numbers)
    assert_each_was_claimed_once(numbers, batches=5)


def test_nothing_is_kept_where_that_was_said(spark, numbers, write):
    for batch in range(2):
        write(shifted(spark, batch), batchId=str(batch), keepSlots="false")
    numbers.verify(2 * ROWS)
    assert claims(numbers) == {f"{numbers.sink}.spark#{number}": 2 for number in (1, 2)}


@pytest.mark.parametrize(
    "point",
    [
        "complete.ended",
        *(pytest.param(point, marks=pytest.mark.thorough) for point in ("batch.decided", "complete.recorded")),
    ],
)
@pytest.mark.parametrize("leg", LEGS)
def test_workers_whose_driver_died_do_not_go_on_before_somebody_has_settled(spark, numbers, write, point, leg):
    write(shifted(spark, 0), batchId="0", databaseLeg=leg)
    with pytest.raises(SPARKS_ERRORS):
        write(shifted(spark, 1), source="armed", batchId="1", databaseLeg=leg, inCommit=point, inAbort="claim.before")
    # Another batch: what the first one has left stays its own, its slots are still leased.
    write(shifted(spark, 2), batchId="2", databaseLeg=leg)
    assert set(claims(numbers).values()) == {1}
    write(shifted(spark, 1), batchId="1", databaseLeg=leg)
    write(shifted(spark, 3), batchId="3", databaseLeg=leg)
    numbers.verify(4 * ROWS)
    nothing_is_left(numbers)
    assert sum(number > 1 for number in claims(numbers).values()) >= TASKS


def test_what_a_driver_could_not_drop_is_dropped_though_its_worker_goes_on(spark, numbers, write):
    """It dies after it has returned the slots: they are not claimed again."""
    write(shifted(spark, 0), batchId="0")
    with pytest.raises(SPARKS_ERRORS):
        write(shifted(spark, 1), source="armed", batchId="1", inCommit="slot.released")
    write(shifted(spark, 2), batchId="2")
    numbers.verify(3 * ROWS)
    nothing_is_left(numbers)
    assert 1 in claims(numbers).values()
