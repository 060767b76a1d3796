"""OpenLineage's events of Spark's batches and streams, by the real client into a file: both outputs and the inputs of each run."""

import json
import sys

import pytest
from harness.spark import PARTITIONS, ROWS, SPARKS_ERRORS
from harness.spark import numbers as numbered
from harness.spark_source import options_of, write_by
from sqlalchemy import make_url

from dualwrite import ConfigurationError
from dualwrite.sinks.spark import foreach_batch, register, sources_of, write_batch, write_many

pytest.importorskip("openlineage", reason="the extra 'openlineage' is not installed")
pytestmark = [pytest.mark.spark, pytest.mark.slow]

MORE = {"lineage_namespace": "prod"}
WHOLE = ["staging", pytest.param("prepared", marks=pytest.mark.thorough)]


@pytest.fixture
def events(spark, tmp_path, monkeypatch):
    """Read the events of all processes so far."""
    path = tmp_path / "events"
    transport = json.dumps({"type": "file", "log_file_path": str(path), "append": True})
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT", transport)
    monkeypatch.setitem(spark.sparkContext.environment, "OPENLINEAGE__TRANSPORT", transport)
    register(spark)  # Spark's processes beside the driver get the environment of this moment
    return lambda: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def files(spark, tmp_path):
    path = tmp_path / "source"
    numbered(spark, ROWS, 1).repartitionByRange(2, "id").write.parquet(str(path))
    return path


def outputs(event):
    return {
        (one["namespace"], one["name"]): one.get("outputFacets", {}).get("outputStatistics", {}).get("rowCount")
        for one in event["outputs"]
    }


def expected(case, rows=ROWS, table="numbers", topic=None):
    url = make_url(case.url)
    place = f"{url.host or url.query['host']}:{url.port or url.query.get('port', 5432)}"
    kafka = case.kafka["bootstrap.servers"].split(",")[0]
    return {
        (f"postgres://{place}", f"{url.database}.public.{table}"): rows,
        (f"kafka://{kafka}", topic or case.topic): rows,
    }


def one_run(events, *states):
    assert [one["eventType"] for one in events] == list(states)
    assert len({one["run"]["runId"] for one in events}) == 1
    return events


@pytest.mark.parametrize("way", ["write_batch", *WHOLE])
def test_a_batch_is_one_run_with_its_table_topic_and_files(spark, numbers, events, files, way):
    df = spark.read.parquet(str(files))
    if way == "write_batch":
        write_batch(df, batch_id="1", **numbers.settings, **MORE)
    else:
        given = {
            **options_of({**numbers.settings, **MORE}),
            "batchId": "1",
            "databaseLeg": way,
            "sources": sources_of(df),
        }
        df.write.format("dualwrite").mode("append").options(**given).save()
    start, complete = one_run(events(), "START", "COMPLETE")
    assert outputs(start) == expected(numbers, rows=None)
    assert outputs(complete) == expected(numbers)
    assert start["inputs"] == complete["inputs"]
    assert [(one["namespace"], one["name"]) for one in start["inputs"]] == [("file", str(files))]
    assert (start["job"]["namespace"], start["job"]["name"]) == ("prod", numbers.sink)
    assert start["job"]["facets"]["jobType"]["processingType"] == "BATCH"
    assert "password" not in json.dumps(events())


@pytest.mark.parametrize("way", ["write_batch", *WHOLE])
def test_a_batch_that_fails_fails_its_run_and_the_next_one_is_another(spark, numbers, events, way):
    numbers.execute("ALTER TABLE numbers ADD CHECK (id < 900)")
    with pytest.raises(SPARKS_ERRORS):
        write_by(numbers, numbered(spark), way, **MORE)
    _, failed = one_run(events(), "START", "FAIL")
    if way == "write_batch":
        assert failed["run"]["facets"]["errorMessage"]["message"] == "JobFailed"
    numbers.execute("ALTER TABLE numbers DROP CONSTRAINT numbers_id_check")
    write_by(numbers, numbered(spark), way, **MORE)
    _, complete = one_run(events()[2:], "START", "COMPLETE")
    assert complete["run"]["runId"] != failed["run"]["runId"]
    if way != "write_batch":
        assert outputs(complete) == expected(numbers)
    write_by(numbers, numbered(spark), way, **MORE)  # it is written
    _, again = one_run(events()[4:], "START", "COMPLETE")
    assert outputs(again) == expected(numbers, rows=0)
    numbers.verify()


def test_several_tables_and_a_quarantine_are_outputs_of_one_run(spark, numbers, events):
    numbers.execute("CREATE TABLE others (id bigint, name text CHECK (name <> 'row 3'))")
    numbers.execute("CREATE TABLE aside (reason text, row text)")
    common = {name: value for name, value in numbers.settings.items() if name != "table"}
    parts = [(numbered(spark), {"table": "numbers"}), (numbered(spark, 5, 1), {"table": "others"})]
    write_many(parts, batch_id="1", **common, **MORE, quarantine_table="aside")
    _, complete = one_run(events(), "START", "COMPLETE")
    rows = {name.rpartition(".")[2]: count for (_, name), count in outputs(complete).items()}
    assert rows == {"numbers": ROWS, "others": 4, "aside": 1, numbers.topic: ROWS + 4}


@pytest.mark.parametrize("way", ["foreach_batch", "staging"])
def test_each_micro_batch_of_a_stream_is_a_run(spark, numbers, events, files, tmp_path, way):
    rows = spark.readStream.schema("id bigint, name string").option("maxFilesPerTrigger", "1").parquet(str(files))
    settings = {**numbers.settings, **MORE}
    writer = rows.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    if way == "foreach_batch":
        writer = writer.foreachBatch(foreach_batch(**settings))
    else:
        writer = writer.format("dualwrite").options(**options_of(settings), databaseLeg=way)
    writer.trigger(availableNow=True).start().awaitTermination()
    found = events()
    counts = []
    for number in range(2):
        start, complete = one_run(found[2 * number : 2 * number + 2], "START", "COMPLETE")
        assert start["eventTime"] < complete["eventTime"]
        assert complete["job"]["facets"]["jobType"]["processingType"] == "STREAMING"
        counts.append(outputs(complete)[next(key for key in outputs(complete) if key[1] == numbers.topic)])
        if way == "foreach_batch":
            assert [(one["namespace"], one["name"]) for one in start["inputs"]] == [("file", str(files))]
    assert (len(found), sum(counts)) == (4, ROWS)


def test_a_micro_batch_that_fails_is_a_run_that_fails(spark, numbers, events, files, tmp_path):
    numbers.execute("ALTER TABLE numbers ADD CHECK (id < 0)")
    rows = spark.readStream.schema("id bigint, name string").parquet(str(files)).writeStream.format("dualwrite")
    rows = rows.options(**options_of({**numbers.settings, **MORE})).option(
        "checkpointLocation", str(tmp_path / "checkpoint")
    )
    with pytest.raises(SPARKS_ERRORS):
        rows.trigger(availableNow=True).start().awaitTermination()
    start, _ = one_run(events(), "START", "FAIL")
    assert outputs(start) == expected(numbers, rows=None)


def test_a_transport_that_fails_fails_no_batch(spark, numbers, monkeypatch, caplog):
    monkeypatch.setenv(
        "OPENLINEAGE__TRANSPORT", json.dumps({"type": "http", "url": "http://127.0.0.1:1", "retry": {"total": 0}})
    )
    report = write_batch(numbered(spark), batch_id="1", **numbers.settings, **MORE)
    assert report.written_partitions == PARTITIONS
    assert "the lineage event COMPLETE was not sent" in caplog.text
    numbers.verify()


def test_a_client_that_is_not_installed_is_refused_before_a_task_runs(spark, numbers, monkeypatch):
    monkeypatch.setitem(sys.modules, "openlineage", None)
    with pytest.raises(ConfigurationError, match=r"dualwrite\[openlineage\]"):
        write_batch(numbered(spark), batch_id="1", **numbers.settings, **MORE)
    assert not numbers.execute("SELECT * FROM dualwrite_ledger")
