"""Adaptive execution cuts the same rows into other partitions when a batch runs again: still written once, or refused."""

from contextlib import contextmanager
from functools import partial

import pytest
from harness.spark import SPARKS_ERRORS, ArmedTask
from harness.spark import numbers as numbered
from harness.spark_source import ArmedSource, nothing_is_left, staging_tables, write_with

from dualwrite import ConfigurationError
from dualwrite.sinks.spark import per_partition, register, write_batch

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SHUFFLES = {
    "spark.sql.shuffle.partitions": "6",
    "spark.sql.adaptive.coalescePartitions.minPartitionSize": "1",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
}


@contextmanager
def cut_by(spark, size):
    """Shuffles are cut into partitions of about that many bytes."""
    settings = {**SHUFFLES, "spark.sql.adaptive.advisoryPartitionSizeInBytes": size}
    former = {key: spark.conf.get(key, None) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield numbered(spark).repartition("id")
    finally:
        for key, value in former.items():
            spark.conf.unset(key) if value is None else spark.conf.set(key, value)


def test_a_whole_batch_may_be_cut_otherwise_when_it_is_run_again(spark, numbers):
    register(spark)
    spark.dataSource.register(ArmedSource)
    with cut_by(spark, "1") as df, pytest.raises(SPARKS_ERRORS):
        write_with(numbers, df, source="armed", batchId="1", inCommit="batch.recorded", inAbort="claim.before")
    assert len(staging_tables(numbers)) == 6
    assert numbers.rows() == []
    with cut_by(spark, "64MB") as df:
        write_with(numbers, df, batchId="1")
    of_decision = "SELECT partition_count FROM dualwrite_ledger WHERE partition_id = -1"
    assert numbers.execute(of_decision) == [(1,)]
    with cut_by(spark, "1") as df:
        write_with(numbers, df, batchId="1")
    numbers.verify()
    nothing_is_left(numbers)


def test_a_batch_by_partitions_that_is_cut_otherwise_is_refused_and_goes_on_when_cut_as_before(
    spark, numbers, monkeypatch
):
    monkeypatch.setattr(
        per_partition, "PartitionTask", partial(ArmedTask, point="spark.task_started:1:raise", partition=5, attempts=99)
    )
    with cut_by(spark, "1") as df, pytest.raises(SPARKS_ERRORS):
        write_batch(df, batch_id="1", **numbers.settings)
    monkeypatch.undo()
    with cut_by(spark, "64MB") as df, pytest.raises(ConfigurationError, match="begun with 6 partitions and now has 1"):
        write_batch(df, batch_id="1", **numbers.settings)
    assert 0 < len(numbers.rows()) < 1000
    with cut_by(spark, "1") as df:
        write_batch(df, batch_id="1", **numbers.settings)
    numbers.verify()
    nothing_is_left(numbers)
