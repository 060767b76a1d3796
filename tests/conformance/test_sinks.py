"""Every way into both sides keeps one promise, whatever engine runs it: a batch is there once, and whole where it says so.

A new engine adds its ways to ``SINKS``, and to ``BATCHES``, where streams are left to a thorough run; the interface is
:class:`harness.sinks.Sink`.
"""

from dataclasses import replace

import pytest
from harness.spark import numbers as made
from harness.spark_sinks import BATCHES, SINKS
from harness.spark_source import nothing_is_left

from dualwrite import recover
from dualwrite.sinks.spark import foreach_batch

ROWS = 20
REFUSED = r"table 'numbers' does not take the (?=.*few).*\(row \d+ of partition \d, key '1[5-9]'\)"


@pytest.fixture
def sink(request, spark):
    """One by its parameter. It names Spark's session, so that all tests of it run in one worker."""
    return request.param(request)


@pytest.mark.parametrize(("sink", "numbers"), SINKS, indirect=True)
def test_rows_equal_messages_and_a_second_run_changes_nothing(sink, numbers):
    for _ in range(2):
        sink.write(numbers, ROWS)
        numbers.verify(ROWS)
    nothing_is_left(numbers)


@pytest.mark.parametrize(("sink", "numbers"), BATCHES, indirect=True)
def test_a_refused_row_leaves_nothing_of_its_partition_and_a_second_run_completes_the_batch(sink, numbers):
    """Of the whole batch, where that is decided as one. What has failed is settled by a recovery, too."""
    numbers.execute("ALTER TABLE numbers ADD CONSTRAINT few CHECK (id < 15)")
    with pytest.raises(sink.errors, match=REFUSED):
        sink.write(numbers, ROWS)
    written = numbers.rows()
    assert written == numbers.messages()
    assert written in ([], [] if sink.decided_as_one else [(number, f"row {number}") for number in range(10)])
    recover(open_for_s=0, kafka=numbers.kafka, database=numbers.url)
    assert numbers.rows() == numbers.messages() == written
    numbers.execute("ALTER TABLE numbers DROP CONSTRAINT few")
    sink.write(numbers, ROWS)
    numbers.verify(ROWS)
    nothing_is_left(numbers)


@pytest.mark.parametrize(("sink", "numbers"), BATCHES, indirect=True)
def test_a_process_that_dies_when_it_has_written_its_rows_leaves_nothing_of_them(sink, numbers):
    """Another process writes them. The transactions of the dead one end at the latest when the batch runs again."""
    sink.write(numbers, ROWS, killed_at="write.prepared")
    assert len(numbers.rows()) == ROWS
    sink.write(numbers, ROWS)
    numbers.verify(ROWS)
    nothing_is_left(numbers)


@pytest.mark.parametrize(("sink", "numbers"), [one for one in SINKS if one.values[1] == "postgresql"], indirect=True)
def test_a_trigger_that_sets_another_search_path_changes_nothing(sink, numbers):
    """All statements of the library that follow it in its session name the schema of their tables."""
    numbers.execute("CREATE SCHEMA elsewhere")
    numbers.execute(
        "CREATE FUNCTION lead_elsewhere() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "PERFORM set_config('search_path', 'elsewhere', false); RETURN NEW; END $$"
    )
    numbers.execute(
        "CREATE TRIGGER leads BEFORE INSERT ON numbers FOR EACH ROW EXECUTE FUNCTION public.lead_elsewhere()"
    )
    for _ in range(2):
        sink.write(numbers, ROWS)
        numbers.verify(ROWS)
    nothing_is_left(numbers)


@pytest.mark.parametrize(("sink", "numbers"), BATCHES, indirect=True)
def test_a_batch_is_not_taken_for_one_of_the_same_name_that_has_another_table(sink, numbers):
    """It would find its batch written, write nothing, and report that as success."""
    numbers.execute("CREATE TABLE others (LIKE numbers)")
    sink.write(numbers, ROWS)
    with pytest.raises(sink.errors, match=r"(?s)numbers.*is now for.*others.*its own sink name"):
        sink.write(numbers, ROWS, table="others")
    assert numbers.execute("SELECT * FROM others") == []
    numbers.verify(ROWS)


@pytest.mark.spark
def test_one_function_of_a_stream_writes_two_tables_by_a_sink_name_for_each(spark, numbers, dualwrite_kafka, tmp_path):
    """Both sinks get the same batch id: only their names tell their batches apart."""
    topic = dualwrite_kafka.create_topic(f"{numbers.topic}-others", 2)
    others = replace(numbers, sink=f"{numbers.sink}-others", table="others", topic=topic)
    to_both = [foreach_batch(**case.settings) for case in (numbers, others)]

    def write(batch, number):
        for to_one in to_both:
            to_one(batch, number)

    made(spark, ROWS, 2).write.parquet(str(tmp_path / "source"))
    files = spark.readStream.schema("id bigint, name string").parquet(str(tmp_path / "source"))
    stream = files.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "checkpoint"))
    stream.trigger(availableNow=True).start().awaitTermination()
    for case in (numbers, others):
        case.verify(ROWS)
    assert [len(case.batches()) for case in (numbers, others)] == [1, 1]
