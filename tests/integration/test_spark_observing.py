"""What people see of Spark's batches: from an output back to its input, by partition, and by micro-batch."""

import json
from functools import reduce
from operator import itemgetter

import pytest
from click.testing import CliRunner
from harness.drivers import Drivers
from harness.one_task import ROWS as ROWS_OF_A_TASK
from harness.one_task import OneTask
from harness.patience import wait_until
from harness.recorded import Recorded
from harness.spark import HAS_CONNECTOR, PARTITIONS, ROWS, delta_settings
from harness.spark import numbers as numbered
from harness.spark_source import options
from pyspark.sql import DataFrame

from dualwrite.cli.options import commands
from dualwrite.sinks.spark import DualWriteListener, foreach_batch, register, sources_of, worker, write_batch
from dualwrite.telemetry import names

pytestmark = [pytest.mark.spark, pytest.mark.slow]

FILES = 3


@pytest.fixture
def source(spark, tmp_path):
    """Numbers in three files."""
    register(spark)
    path = tmp_path / "source"
    numbered(spark, ROWS, 1).repartitionByRange(FILES, "id").write.parquet(str(path))
    return path


@pytest.fixture
def stream(spark, numbers, source, tmp_path):
    """Run a stream over the files in one of the ways, a file for each micro-batch, after other sources, and return its query."""

    def run(way, *before):
        read = spark.readStream.schema("id bigint, name string").option("maxFilesPerTrigger", "1").parquet
        rows = reduce(DataFrame.union, [read(str(path)) for path in (*before, source)])
        writer = rows.writeStream.queryName("counted")
        if way == "foreach_batch":
            writer = writer.foreachBatch(foreach_batch(**numbers.settings))
        else:
            writer = writer.format("dualwrite").options(**options(numbers, databaseLeg=way))
        checkpoint = str(tmp_path / "checkpoint")
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    return run


def made_of(case):
    """What the ledger says of each batch's sources, by the end of the batch's name."""
    return {one.batch_id.rpartition("/")[2]: json.loads(one.sources) for one in case.batches() if one.sources}


def test_the_report_of_a_batch_has_seconds_bytes_and_first_offsets_by_partition(spark, numbers):
    report = write_batch(numbered(spark), batch_id="1", **numbers.settings)
    assert [one.partition for one in report.parts] == list(range(PARTITIONS))
    assert [one.rows for one in report.parts] == [ROWS // PARTITIONS] * PARTITIONS
    assert sum(one.bytes for one in report.parts) == report.written_bytes > 0
    assert all(0 < one.seconds < report.seconds for one in report.parts)
    begins = [set(one.first_offsets.items()) for one in report.parts]
    assert all(begins)
    assert set.union(*begins) >= {(f"{numbers.topic}-0", 0)}
    assert sum(map(len, begins)) == len(set.union(*begins))  # no two transactions begin at the same place
    (seen,) = numbers.batches()
    assert seen.byte_count == report.written_bytes
    again = write_batch(numbered(spark), batch_id="1", **numbers.settings)
    assert (again.parts, again.written_bytes) == ([], 0)


def test_a_batch_of_files_names_its_files_partition_by_partition_and_at_once(spark, numbers, source):
    df = spark.read.parquet(str(source))
    files = sorted(f"file://{path}" for path in source.glob("*.parquet"))
    write_batch(df, batch_id="parts", **numbers.settings)
    whole = {**options(numbers, sink=f"{numbers.sink}-whole", batchId="whole"), "sources": sources_of(df)}
    df.write.format("dualwrite").mode("append").options(**whole).save()
    assert made_of(numbers) == {"parts": [{"files": files, "file_count": FILES}]}
    shown = CliRunner().invoke(commands, ["batches", "--json", "--url", numbers.url])
    found = {one["batch_id"]: one for one in json.loads(shown.output)["batches"]}
    assert found["whole"]["sources"] == found["parts"]["sources"]
    assert found["whole"]["byte_count"] == found["parts"]["byte_count"] > 0
    table = CliRunner().invoke(commands, ["batches", "--sources", "--url", numbers.url], env={"COLUMNS": "400"})
    assert files[0] in table.output.replace("\n", "")


def test_a_batch_of_rows_from_the_driver_has_no_sources(spark, numbers):
    assert sources_of(numbered(spark)) is None
    write_batch(numbered(spark), batch_id="1", **numbers.settings)
    assert made_of(numbers) == {}


@pytest.mark.parametrize("way", ["foreach_batch", "staging", pytest.param("prepared", marks=pytest.mark.thorough)])
def test_a_micro_batch_names_the_offsets_of_its_sources(numbers, stream, source, way):
    query = stream(way)
    expected = {
        str(number): {"start": {"logOffset": number - 1} if number else None, "end": {"logOffset": number}}
        for number in range(FILES)
    }
    found = made_of(numbers)
    if way == "foreach_batch":  # there Spark tells the sources' names, too
        assert {one.pop("source") for (one,) in found.values()} == {f"FileStreamSource[file:{source}]"}
    assert found == {number: [one] for number, one in expected.items()}
    assert all(one.batch_id.startswith(f"{query.id}/") for one in numbers.batches())


@pytest.mark.parametrize("way", ["staging", pytest.param("foreach_batch", marks=pytest.mark.thorough)])
def test_each_source_of_a_micro_batch_keeps_its_place(numbers, stream, tmp_path, way):
    empty = tmp_path / "empty"
    empty.mkdir()
    stream(way, empty)
    ends = {number: [one["end"] for one in sources] for number, sources in made_of(numbers).items()}
    assert ends == {str(number): [None, {"logOffset": number}] for number in range(FILES)}


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_CONNECTOR, reason="the jars of Delta are those for Spark 4.2")
def test_a_micro_batch_names_its_versions_of_a_delta_table(numbers, tmp_path, monkeypatch):
    events, other, path = tmp_path / "events", f"{numbers.sink}-parts", tmp_path / "delta"
    transport = {"type": "file", "log_file_path": str(events), "append": True}
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT", json.dumps(transport))
    numbers.execute("CREATE TABLE parts (id bigint, name text)")
    Drivers(tmp_path).run(
        do="delta_streams",
        session=delta_settings(),
        source=str(path),
        rows=FILES * 10,
        checkpoint=str(tmp_path / "checkpoint"),
        settings={**numbers.settings, "sink": other, "table": "parts", "lineage_namespace": "prod"},
        options=options(numbers),
    )
    assert numbers.execute("SELECT count(*), (SELECT count(*) FROM parts) FROM numbers") == [(30, 30)]
    shown = CliRunner().invoke(commands, ["batches", "--json", "--url", numbers.url])
    batches = sorted(json.loads(shown.output)["batches"], key=itemgetter("batch_id"))
    for sink in (numbers.sink, other):
        made = [one["sources"][0] for one in batches if one["sink"] == sink]
        assert [one["start"] for one in made] == [None, *[one["end"] for one in made[:-1]]]
        # The first trigger reads the table as it was found; the end is the version from which the next one would read.
        assert [(one["end"]["reservoirVersion"], one["end"]["index"]) for one in made] == [(2, 0), (2, 1), (3, -1)]
        assert {one.get("source") for one in made} == {f"DeltaSource[file:{path}]" if sink == other else None}
    inputs = [json.loads(line)["inputs"] for line in events.read_text().splitlines()]
    assert {(one["namespace"], one["name"]) for some in inputs for one in some} == {("file", str(path))}
    assert len(inputs) == 2 * FILES


def test_sources_are_not_an_option_of_a_stream(spark, numbers, source, tmp_path):
    given = {**options(numbers), "sources": "mine", "checkpointLocation": str(tmp_path / "checkpoint")}
    rows = spark.readStream.schema("id bigint, name string").parquet(str(source))
    query = rows.writeStream.format("dualwrite").options(**given).trigger(availableNow=True).start()
    with pytest.raises(Exception, match="sources is for batches"):
        query.awaitTermination()
    assert numbers.rows() == []


@pytest.mark.parametrize("way", ["foreach_batch", "staging"])
def test_a_listener_reports_the_rows_and_bytes_of_each_micro_batch(spark, numbers, stream, way):
    reports = []
    listener = DualWriteListener(numbers.url, reports.append)
    spark.streams.addListener(listener)
    try:
        query = stream(way)
        wait_until(lambda: len(reports) == FILES)
    finally:
        spark.streams.removeListener(listener)
    assert [one.number for one in reports] == list(range(FILES))
    assert {(one.query_id, one.query_name) for one in reports} == {(str(query.id), "counted")}
    assert sum(one.rows for one in reports) == ROWS
    assert [one.bytes for one in reports] == [one.byte_count for one in numbers.batches()]
    assert min(one.bytes for one in reports) > 0
    assert {one.sink for report in reports for one in report.sinks} == {numbers.sink}


def test_a_listener_without_a_database_harms_no_query(spark, numbers, stream, caplog):
    listener = DualWriteListener("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    spark.streams.addListener(listener)
    try:
        stream("staging")
        wait_until(lambda: caplog.text.count("what it has written is not known") == FILES)
    finally:
        spark.streams.removeListener(listener)
    numbers.verify()


@pytest.mark.parametrize("way", ["write_batch", "staging", "prepared"])
def test_a_task_records_the_spans_of_its_dual_write(numbers, monkeypatch, way):
    recorded = Recorded()
    monkeypatch.setattr(worker, "observer_if_loaded", lambda: recorded.telemetry)
    task = OneTask(numbers, way)
    task.begin()
    done = task.run_task()
    [write] = recorded.named("dual_write")
    assert write.attributes[names.WRITER] == f"{numbers.sink}.spark"
    assert write.attributes[names.TRANSACTIONAL_ID] == f"{numbers.sink}.spark#1"
    [send] = recorded.named(f"send {numbers.topic}")
    assert send.attributes[names.MESSAGE_COUNT] == ROWS_OF_A_TASK
    assert send.parent.span_id == write.context.span_id
    task.decide(done)
    numbers.verify(ROWS_OF_A_TASK)
    recorded.close()
