"""Batches that are run again partition by partition: what is compared, what is refused, and where a warning says that it is not."""

import pytest
from harness.spark import SPARKS_ERRORS
from harness.spark import numbers as numbered
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions

from dualwrite import ConfigurationError
from dualwrite.sinks.spark import foreach_batch, foreach_partition, write_batch

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def half_written(numbers, df, **settings):
    """A batch of two partitions, of which the ledger has forgotten the second."""
    write_batch(df, batch_id="1", **numbers.settings, **settings)
    numbers.execute("DELETE FROM dualwrite_ledger WHERE partition_id = 1")


def refused(df, numbers, **settings):
    with pytest.raises(SPARKS_ERRORS, match="partition 0.*has other rows now"):
        write_batch(df, batch_id="1", **numbers.settings, **settings)


@pytest.mark.parametrize("message", ["whole_row", "id_alone"])
def test_a_value_that_moves_to_a_column_that_was_null_makes_another_row(spark, numbers, message):
    numbers.execute("ALTER TABLE numbers ADD home text, ADD work text")
    plain = numbered(spark, 4, 2).withColumn("value", functions.expr("cast(id AS string)"))
    columns = ["id", "name", "home", "work"]
    settings = {"columns": columns, **({} if message == "whole_row" else {"value": "value"})}

    def rows(home, work):
        return plain.selectExpr("*", f"{home} AS home", f"{work} AS work")

    phone, nothing = "'5 1'", "cast(null AS string)"
    half_written(numbers, rows(phone, nothing), **settings)
    for other in (rows(nothing, phone), rows(nothing, nothing), rows(phone, phone)):
        refused(other, numbers, **settings)
    report = write_batch(rows(phone, nothing), batch_id="1", **numbers.settings, **settings)
    assert report.written_partitions == 1


def test_maps_and_variants_are_compared_at_any_depth(spark, numbers):
    numbers.execute("ALTER TABLE numbers ADD nested jsonb, ADD variant jsonb")
    plain = numbered(spark, 4, 2)

    def rows(nested, variant):
        return plain.selectExpr("*", f"array({nested}) AS nested", f"parse_json('{variant}') AS variant")

    half_written(numbers, rows("map('a', 1, 'b', id)", '{"c": 1}'))
    for other in (rows("map('a', 2, 'b', id)", '{"c": 1}'), rows("map('a', 1, 'b', id)", '{"c": 2}')):
        refused(other, numbers)
    # The same map, but not the same message.
    refused(rows("map('b', id, 'a', 1)", '{"c": 1}'), numbers)
    same = rows("map('a', 1, 'b', id)", '{"c": 1}')
    assert write_batch(same, batch_id="1", **numbers.settings).written_partitions == 1


def test_of_a_batch_that_another_version_has_begun_only_the_number_of_rows_is_compared(spark, numbers):
    df = numbered(spark, 4, 2)
    half_written(numbers, df)
    numbers.execute("UPDATE dualwrite_ledger SET rows_digest = (rows_digest & ~65535) | 1 WHERE partition_id = 0")
    with pytest.raises(SPARKS_ERRORS, match="written already with 2 rows, and has 1 rows now"):
        write_batch(df.where("id <> 1"), batch_id="1", **numbers.settings)
    assert write_batch(df, batch_id="1", **numbers.settings).written_partitions == 1


def test_a_partition_that_was_written_with_rows_and_has_none_now_is_refused_and_the_reverse(spark, numbers):
    df = numbered(spark, 4, 2)
    half_written(numbers, df)
    with pytest.raises(
        ConfigurationError, match="partition 0: the partition is written already with 2 rows, and has 0"
    ):
        write_batch(df.where("id >= 2"), batch_id="1", **numbers.settings)
    numbers.execute("UPDATE dualwrite_ledger SET row_count = 0, rows_digest = 0 WHERE partition_id = 0")
    with pytest.raises(SPARKS_ERRORS, match="written already with 0 rows, and has 2 rows now"):
        write_batch(df, batch_id="1", **numbers.settings)
    numbers.verify(4)


def test_foreach_partition_warns_that_it_compares_nothing(spark, numbers, caplog):
    df = numbered(spark, 4, 2)
    foreach_partition(df, batch_id="1", **numbers.settings)
    assert "foreach_partition compares no rows" in caplog.text
    caplog.clear()
    foreach_partition(df.coalesce(1), batch_id="2", **numbers.settings)
    assert "compares" not in caplog.text


@pytest.fixture
def run_stream(spark, numbers, tmp_path):
    """Run a stream of two micro-batches by foreach_batch."""
    numbered(spark, 10, 2).write.parquet(str(tmp_path / "source"))

    def run(*columns, **settings):
        rows = spark.readStream.schema("id bigint, name string").option("maxFilesPerTrigger", "1")
        rows = rows.parquet(str(tmp_path / "source")).selectExpr(*columns).repartition(2, "id")
        write = foreach_batch(**numbers.settings, **settings)
        stream = rows.writeStream.foreachBatch(write).trigger(availableNow=True)
        stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()

    return run


def test_a_stream_that_gives_other_rows_each_time_is_refused_unless_it_is_allowed(numbers, run_stream, caplog):
    with pytest.raises(StreamingQueryException, match=r"rand\(\).*may give other rows|may give other rows.*rand\(\)"):
        run_stream("id", "concat('row ', rand()) AS name")
    assert numbers.rows() == numbers.messages() == []
    run_stream("id", "concat('row ', rand()) AS name", allow_nondeterministic=True)
    assert len(numbers.rows()) == len(numbers.messages()) == 10
    assert "compare" not in caplog.text


@pytest.mark.thorough
def test_the_time_of_a_micro_batch_is_the_same_when_it_is_replayed(numbers, run_stream, caplog):
    run_stream("id", "concat('row ', id + year(current_timestamp()) - year(current_timestamp())) AS name")
    numbers.verify(10)
    assert "compare" not in caplog.text


@pytest.mark.thorough
def test_one_warning_for_a_stream_whose_plan_spark_does_not_show(numbers, run_stream, caplog, monkeypatch):
    monkeypatch.setattr("dualwrite.sinks.spark.api.require_deterministic_stream", lambda *_: False)
    run_stream("id", "name")
    numbers.verify(10)
    assert caplog.text.count("Spark does not show the stream's plan") == 1
