"""Batches that would tear or lose rows in silence are refused, before anything of them is written."""

import pytest
from harness.spark import ROWS, SPARKS_ERRORS
from harness.spark import numbers as numbered
from harness.spark_source import nothing_is_left, write_by
from pyspark.sql import functions

from dualwrite import ConfigurationError
from dualwrite.sinks.spark import foreach_batch

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
    with pytest.raises(SPARKS_ERRORS, match="'numbers' took 999 of 1000 rows: a trigger or a rule"):
        write_by(numbers, df, way)
    assert numbers.rows() == numbers.messages() == []
    numbers.execute("DROP TRIGGER skip_one ON numbers")
    write_by(numbers, df, way)
    numbers.verify()
    nothing_is_left(numbers)


def test_two_tables_under_one_sink_name_are_refused_and_work_with_a_name_for_each(spark, numbers):
    """As one foreachBatch does it: the second call would find its batch written, and write nothing."""
    numbers.execute("CREATE TABLE others (LIKE numbers)")
    df = numbered(spark, 10, 2)
    first = foreach_batch(**numbers.settings)
    first(df, 0)
    with pytest.raises(ConfigurationError, match="numbers.*is now for.*others.*a sink name of its own"):
        foreach_batch(**{**numbers.settings, "table": "others"})(df, 0)
    assert numbers.execute("SELECT * FROM others") == []
    assert len(numbers.messages()) == 10
    second = foreach_batch(**{**numbers.settings, "sink": f"{numbers.sink}-others", "table": "others"})
    for write in (first, second):
        write(df, 0)
    assert sorted(numbers.execute("SELECT * FROM others")) == numbers.rows()
    assert len(numbers.messages()) == 20


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("write_batch", "staging"),
        ("staging", "write_batch"),
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
