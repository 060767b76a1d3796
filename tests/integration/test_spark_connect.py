"""Spark Connect: the Data Source runs on the server and works; what needs the driver's own JVM says so."""

import pytest
from harness.driver_process import Failed
from harness.spark import PARTITIONS, ROWS
from harness.spark import numbers as numbered
from harness.spark_connect import Connected, refused, stream, write
from harness.spark_source import nothing_is_left

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def connected():
    with Connected() as found:
        yield found


@pytest.fixture
def source(spark, tmp_path):
    """Numbers in two files."""
    path = tmp_path / "source"
    numbered(spark, ROWS, 2).write.parquet(str(path))
    return str(path)


@pytest.mark.parametrize("leg", ["staging", pytest.param("prepared", marks=pytest.mark.thorough)])
def test_a_batch_is_written_once(connected, numbers, leg):
    for _ in range(2):
        connected.run(write, numbers, batchId="1", databaseLeg=leg)
        numbers.verify()
    (seen,) = numbers.batches()
    assert (seen.phase, seen.written_partitions, seen.row_count) == ("completed", PARTITIONS, ROWS)
    nothing_is_left(numbers)


def test_an_option_that_is_wrong_is_told_to_the_client(connected, numbers):
    with pytest.raises(Failed, match="no option 'topik'.*did you mean 'topic'"):
        connected.run(write, numbers, batchId="1", topik="x")


@pytest.mark.thorough
def test_a_stream_writes_each_micro_batch_once_by_the_name_of_its_query(connected, numbers, source, tmp_path):
    queries = {connected.run(stream, numbers, source, str(tmp_path / "checkpoint")) for _ in range(2)}
    numbers.verify()
    batches = numbers.execute("SELECT DISTINCT batch_id FROM dualwrite_ledger ORDER BY 1")
    assert batches == [(f"{query}/{number}",) for query in queries for number in range(2)]
    nothing_is_left(numbers)


# A stream's function calls write_batch.
@pytest.mark.parametrize(
    "way", ["write_batch", "foreach_partition", pytest.param("foreach_batch", marks=pytest.mark.thorough)]
)
def test_what_needs_a_classic_session_says_so_and_writes_nothing(connected, numbers, source, tmp_path, way):
    with pytest.raises(Failed, match="Spark Connect does not report how many partitions.*format\\(.dualwrite.\\)"):
        connected.run(refused, numbers, way, source, str(tmp_path / "checkpoint"))
    assert numbers.rows() == numbers.messages() == []
