"""Errors for a refused row, and for a partition without rows: they can be seen without Spark."""

from contextlib import contextmanager
from dataclasses import replace

import psycopg
import pytest
from harness.one_task import ROWS, SCHEMA, OneTask
from harness.spark import SparkCase
from harness.spark_source import nothing_is_left
from pyspark.sql.types import StructType
from sqlalchemy import create_engine

from dualwrite import CompletionPending, ConfigurationError, TransactionAborted, TransactionInDoubt, failpoints
from dualwrite.migrations import upgrade
from dualwrite.sinks.spark import SinkOptions
from dualwrite.sinks.spark.per_partition import BatchJob
from dualwrite.sinks.spark.plan import plan_stream
from dualwrite.sinks.spark.targets import Wanted
from dualwrite.testing import EmbeddedPostgres


@pytest.mark.parametrize("way", ["write_batch", "staging"])
def test_a_key_that_is_there_already_is_named_with_the_table_that_is_written(numbers, way):
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    numbers.execute("INSERT INTO numbers VALUES (7, 'there already')")
    job = OneTask(numbers, way)
    job.begin()
    with pytest.raises(TransactionAborted) as caught:
        job.decide(job.run_task())
    assert "table 'numbers' does not take" in str(caught.value)
    assert "Key (id)=(7)" in str(caught.value)
    assert "dualwrite_staging" not in str(caught.value)
    assert "there already" not in str(caught.value)
    assert not caught.value.retryable
    job.fail()


@pytest.mark.parametrize("way", ["write_batch", "staging"])
@pytest.mark.parametrize(
    ("constraint", "number", "column"),
    [("ADD CHECK (id <> 5)", 6, ""), ("ALTER name SET NOT NULL", 8, "column 'name', ")],
)
def test_a_row_that_is_refused_is_named_by_its_number_and_its_key(numbers, way, constraint, number, column):
    """Also where it is refused when the batch is decided, and the database names it by all its values alone."""
    numbers.execute(f"ALTER TABLE numbers {constraint}")
    job = OneTask(numbers, way)
    job.begin()
    with pytest.raises(TransactionAborted) as caught:
        job.decide(job.run_task(without_name=7))
    assert f"({column}row {number} of partition 0, key '{number - 1}')" in str(caught.value)
    assert "row 5" not in caught.value.what.replace("row 5 of", "")
    job.fail()


def test_a_key_that_another_table_lacks_is_named(numbers):
    numbers.execute("CREATE TABLE known AS SELECT generate_series(0, 4)::bigint AS id")
    numbers.execute("ALTER TABLE known ADD PRIMARY KEY (id)")
    numbers.execute("ALTER TABLE numbers ADD FOREIGN KEY (id) REFERENCES known")
    job = OneTask(numbers, "staging")
    job.begin()
    with pytest.raises(TransactionAborted, match=r"\(Key \(id\)=\(5\), partition 0\)"):
        job.decide(job.run_task())
    job.fail()


@pytest.mark.parametrize("way", ["write_batch", "staging", pytest.param("prepared", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("numbers", ["mortal"], indirect=True)
def test_a_batch_that_is_decided_when_kafka_goes_away_is_completed_by_its_next_run(numbers, mortal_kafka, way, caplog):
    """Its error asks for that run; what one block's error asks for would lose the messages."""
    job = OneTask(replace(numbers, timeout_s=10.0), way)

    def go_away(name):
        if name in {"write.decided", "batch.decided"}:
            mortal_kafka.kill()

    with pytest.raises(CompletionPending, match="run the batch again with the same batch id") as caught:
        run_to_its_end(job, go_away)
    mortal_kafka.start()
    told = [record.getMessage() for record in caplog.records if record.name.startswith("dualwrite.sinks")]
    assert "run the work again" not in "".join([str(caught.value), *told])
    assert len(numbers.rows()) == ROWS
    job.finish()
    nothing_is_left(numbers)


@pytest.mark.parametrize("numbers", ["mortal"], indirect=True)
def test_a_partition_of_foreach_partition_counts_as_done_only_when_kafka_has_it(numbers, mortal_kafka):
    """No driver completes it at the end: its task fails, and the next attempt completes it, as soon as it can."""
    job = OneTask(replace(numbers, timeout_s=10.0), "foreach_partition")
    job.begin()

    def go_away(name):
        if name == "write.decided":
            mortal_kafka.kill()

    again = "decided, and Kafka has not all of it yet.*run the batch again with the same batch id"
    with failpoints.watched(go_away), pytest.raises(CompletionPending, match=again):
        job.run_task()
    with pytest.raises(CompletionPending, match=again):
        job.run_task()
    mortal_kafka.start()
    assert not job.run_task().written
    numbers.verify(ROWS)
    nothing_is_left(numbers)


@pytest.mark.parametrize("numbers", ["postgresql", "mariadb"], indirect=True)
def test_a_task_that_does_not_know_whether_it_has_decided_asks_for_the_batchs_next_run(numbers):
    job = OneTask(numbers, "write_batch")

    def lose_the_answer(name):
        if name == "write.recorded":
            raise TransactionInDoubt("no answer to COMMIT")

    with pytest.raises(TransactionInDoubt, match="run the batch again with the same batch id"):
        run_to_its_end(job, lose_the_answer)
    job.finish()


def run_to_its_end(job, at):
    """Run the batch as its driver does, and call a function at each fail point."""
    with failpoints.watched(at):
        if job.by_partition:
            with job.driving() as driver:
                driver.finish(1, [job.run_task()])
        else:
            job.begin()
            job.decide(job.run_task())


def test_a_database_without_room_for_one_more_prepared_transaction_is_named_with_its_setting(kafka, dualwrite_topic):
    """Before rows are written where there is none; and when it prepares, where another task was faster."""
    with EmbeddedPostgres({"max_prepared_transactions": "1"}) as server:
        engine = create_engine(server.url)
        with engine.connect() as connection:
            upgrade(connection)
        engine.dispose()
        case = SparkCase(kafka, server.url, dualwrite_topic)
        job = OneTask(case, "prepared")
        for point, error, words in (
            ("spark.task_started", ConfigurationError, "takes 1 prepared transactions, and has 1 .*max_prepared_tr"),
            (
                "spark.rows_copied",
                TransactionAborted,
                "takes no more prepared transactions .*max_prepared_transactions",
            ),
        ):
            job.begin()
            with pytest.raises(error, match=words), preparing_at(point, server.dsn) as passed:
                job.run_task()
            assert ("spark.rows_copied" in passed) is (point == "spark.rows_copied")
            with psycopg.connect(server.dsn, autocommit=True) as connection:
                connection.execute("ROLLBACK PREPARED 'another'")
            job.fail()
            nothing_is_left(case)
        job.finish()
        nothing_is_left(case)


@contextmanager
def preparing_at(point, dsn):
    """Prepare another transaction when the task passes a point. Yields the points that it has passed."""
    passed = []

    def observe(name):
        if name == point and name not in passed:
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute("BEGIN")
                connection.execute("PREPARE TRANSACTION 'another'")
        passed.append(name)

    with failpoints.watched(observe):
        yield passed


@pytest.mark.parametrize("way", ["write_batch", "staging"])
def test_a_partition_without_rows_needs_no_slot(numbers, way):
    job = OneTask(numbers, way)
    job.begin()
    job.decide(job.run_task(ids=()))
    assert numbers.execute("SELECT count(*) FROM dualwrite_slot") == [(0,)]
    [batch] = numbers.batches()
    assert (batch.written_partitions, batch.row_count) == (1, 0)


UPSERT = {"upsert_keys": ["id"]}
CHANGED = StructType().add("op", "string").add("lsn", "long")
CHANGES = {**UPSERT, "op_column": "op", "order_column": "lsn"}


@pytest.mark.parametrize(
    ("way", "more", "missing", "words"),
    [
        ("write_batch", {}, "INSERT ON numbers", "rows may not be inserted into 'numbers'"),
        ("write_batch", UPSERT, "SELECT ON numbers", "the right to SELECT is missing on table 'numbers'"),
        ("write_batch", UPSERT, "UPDATE ON numbers", "the right to UPDATE is missing on table 'numbers'"),
        ("write_batch", CHANGES, "DELETE ON numbers", "the right to DELETE is missing on table 'numbers'"),
        ("write_batch", UPSERT, "TEMPORARY ON DATABASE here", "the right to TEMPORARY is missing on the database"),
        (
            "staging",
            {},
            "CREATE ON SCHEMA public",
            "the right to CREATE is missing on the schema 'public', for staging",
        ),
        ("staging", {}, "SELECT ON numbers", "the right to SELECT is missing on table 'numbers'"),
        ("staging", CHANGES, "DELETE ON numbers", "the right to DELETE is missing on table 'numbers'"),
        ("auto", {}, "SELECT ON numbers", "the right to SELECT is missing on table 'numbers'"),
        ("prepared", UPSERT, "SELECT ON numbers", "the right to SELECT is missing on table 'numbers'"),
    ],
)
def test_a_missing_right_is_refused_before_a_task_and_granted_by_what_the_error_says(
    numbers, way, more, missing, words
):
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    role = f"clerk_{numbers.sink.replace('-', '_')}"
    [(here,)] = numbers.execute("SELECT current_database()")
    numbers.execute(f"REVOKE TEMPORARY ON DATABASE {here} FROM PUBLIC; CREATE ROLE {role} LOGIN PASSWORD 'secret'")
    try:
        numbers.execute(
            f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}; GRANT TEMPORARY ON DATABASE {here} TO {role}; "
            f"GRANT CREATE ON SCHEMA public TO {role}"
        )
        numbers.execute(f"REVOKE {missing.replace('here', here)} FROM {role}")
        before, _, after = numbers.url.partition("://")
        settings = {**numbers.settings, **more, "url": f"{before}://{role}:secret@{after.rpartition('@')[2]}"}
        schema = SCHEMA if "op_column" not in more else StructType([*SCHEMA, *CHANGED])
        with pytest.raises(ConfigurationError) as refused:
            plan(settings, way, schema)
        assert words in str(refused.value)
        numbers.execute(refused.value.next_step.removeprefix("as its owner: "))
        plan(settings, way, schema)
        assert numbers.execute("SELECT count(*) FROM dualwrite_slot") == [(0,)]
    finally:
        numbers.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def plan(settings, way, schema):
    """Plan a batch as its driver does, by partition or by a database leg as a whole."""
    if way == "write_batch":
        with BatchJob(SinkOptions(**settings), "1") as job:
            job.plan(schema)
    else:
        options = SinkOptions(**settings, database_leg=way)
        plan_stream(options, [Wanted(options, schema)], None, stream=None)
