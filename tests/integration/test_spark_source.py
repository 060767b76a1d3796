"""The Data Source: a whole batch on both sides or nothing of it, whatever its tasks and its driver suffer."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psycopg
import pytest
from harness.databases import BOTH_DATABASES, by_way_on_both_databases
from harness.drivers import Drivers, as_installed, phases_of
from harness.spark import HAS_CONNECTOR, PARTITIONS, ROWS, SPARKS_ERRORS, newest_job
from harness.spark import numbers as numbered
from harness.spark_source import WAYS, ArmedSource, nothing_is_left, options, write_by, write_with
from pyspark.sql import functions
from sqlalchemy import create_engine

from dualwrite.recovery.recover import status
from dualwrite.sinks.spark import register
from dualwrite.sinks.spark.databases.database import Emptying
from dualwrite.sinks.spark.databases.postgresql import empty
from dualwrite.stores.sql.ledger import WHOLE_BATCH


def thorough(*points):
    return [pytest.param(point, marks=pytest.mark.thorough) for point in points]


TASK_POINTS = [
    "spark.task_started",
    "slot.leased",
    "claim.initialized",
    "write.checked",
    "write.produced",
    "spark.rows_copied",
    "write.prepared",
    "batch.handed_over",
    "spark.task_done",
]
# The process that decides in a stream dies at the first and the last of these in every run.
UNDECIDED = ["batch.recorded", *thorough("batch.prepared", "ledger.inserted")]
DECIDED = [
    "batch.decided",
    *thorough("complete.before", "complete.ended", "complete.recorded", "batch.completed"),
]


@pytest.fixture
def write(spark, numbers):
    register(spark)
    spark.dataSource.register(ArmedSource)
    return partial(write_with, numbers)


def test_a_batch_is_on_both_sides_and_the_ledger_tells(spark, numbers, write):
    write(numbered(spark), batchId="1")
    numbers.verify()
    (seen,) = numbers.batches()
    assert (seen.phase, seen.written_partitions, seen.row_count) == ("completed", PARTITIONS, ROWS)
    assert seen.started_at < seen.decided_at < seen.completed_at
    ledger = numbers.execute("SELECT partition_id, row_count, message_count, partition_count FROM dualwrite_ledger")
    assert sorted(ledger) == [(-2, 0, 0, 1), (-1, ROWS, ROWS, PARTITIONS)]
    # Run again with other partitions: a batch that is decided as one has none that count.
    write(numbered(spark, ROWS, 3), batchId="1")
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.thorough
def test_a_task_that_fails_for_good_leaves_nothing(spark, numbers, write):
    bad = functions.when(functions.col("id") == 700, functions.raise_error(functions.lit("bad row"))).otherwise(
        functions.col("name")
    )
    with pytest.raises(SPARKS_ERRORS, match="bad row"):
        # One partition: Spark kills the other tasks of a failed job, later than it reports the failure.
        write(numbered(spark, ROWS, 1).withColumn("name", bad), batchId="1")
    assert numbers.rows() == numbers.messages() == []
    nothing_is_left(numbers)
    assert [(seen.phase, seen.written_partitions) for seen in numbers.batches()] == [("failed", 0)]
    write(numbered(spark), batchId="1")
    numbers.verify()
    assert [seen.phase for seen in numbers.batches()] == ["completed"]


def test_tasks_that_are_killed_each_at_another_point_are_run_again(spark, numbers, write):
    df = numbered(spark, partitions=len(TASK_POINTS))
    # A task that continued with the slot of a former one would not claim it.
    write(df, source="armed", batchId="1", inTasks=json.dumps(dict(enumerate(TASK_POINTS))), keepSlots="false")
    assert newest_job(spark)["failed_tasks"] == len(TASK_POINTS)
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.thorough
@pytest.mark.parametrize("point", TASK_POINTS)
def test_a_killed_task_is_run_again(spark, numbers, write, point):
    write(numbered(spark), source="armed", batchId="1", inTask=point)
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.parametrize("point", UNDECIDED)
def test_a_driver_killed_before_the_decision_leaves_nothing(spark, numbers, write, point):
    with pytest.raises(SPARKS_ERRORS):
        write(numbered(spark), source="armed", batchId="1", inCommit=point)
    assert numbers.rows() == []
    write(numbered(spark), batchId="1")
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.parametrize("point", DECIDED)
def test_a_driver_killed_after_the_decision_has_written_the_batch(spark, numbers, write, point):
    with pytest.raises(SPARKS_ERRORS):
        write(numbered(spark), source="armed", batchId="1", inCommit=point, inAbort="settle.looked,claim.before")
    assert len(numbers.rows()) == ROWS
    write(numbered(spark), batchId="1")
    numbers.verify()
    nothing_is_left(numbers)


def test_the_rows_appear_all_at_once_and_the_old_ones_stay_until_then(spark, numbers, write):
    numbers.execute("INSERT INTO numbers VALUES (-1, 'old')")
    with pytest.raises(SPARKS_ERRORS):
        write(numbered(spark), mode="overwrite", source="armed", batchId="1", inCommit="batch.recorded")
    assert numbers.rows() == [(-1, "old")]
    write(numbered(spark), mode="overwrite", batchId="2")
    numbers.verify()


def test_a_part_of_the_table_is_replaced(spark, numbers, write):
    numbers.execute("INSERT INTO numbers VALUES (-1, 'old'), (7, 'old'), (999, 'old')")
    old = numbers.rows()
    with pytest.raises(SPARKS_ERRORS, match="replaceWhere is not true for a row .*row 1 of partition 0, key '0'"):
        write(numbered(spark), mode="overwrite", source="armed", batchId="1", replaceWhere="id > 0")
    assert numbers.rows() == old
    write(numbered(spark), mode="overwrite", source="armed", batchId="1", replaceWhere="id >= 0")
    assert numbers.rows()[0] == (-1, "old")
    numbers.execute("DELETE FROM numbers WHERE id < 0")
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.parametrize(
    ("present", "says"),
    [
        (0, "table 'numbers' cannot be emptied: division by zero"),
        (7, "replaceWhere cannot be computed for the rows: div"),
    ],
)
def test_a_condition_that_fails_for_a_row_is_told_as_such(spark, numbers, write, present, says):
    numbers.execute(f"INSERT INTO numbers VALUES ({present}, 'old')")
    with pytest.raises(SPARKS_ERRORS, match=says) as told:
        write(numbered(spark), mode="overwrite", batchId="1", replaceWhere="1 / id >= 0")
    assert "grant" not in str(told.value)
    assert numbers.rows() == [(present, "old")]


@pytest.mark.parametrize("numbers", [pytest.param("mariadb", marks=pytest.mark.mariadb)], indirect=True)
def test_a_foreign_key_that_forbids_to_replace_rows_is_told_as_such(spark, numbers, write):
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    numbers.execute("INSERT INTO numbers VALUES (7, 'old')")
    numbers.execute("CREATE TABLE notes (number bigint, FOREIGN KEY (number) REFERENCES numbers (id))")
    numbers.execute("INSERT INTO notes VALUES (7)")
    with pytest.raises(
        SPARKS_ERRORS, match="table 'numbers' cannot be emptied: .*a foreign key constraint fails"
    ) as told:
        write(numbered(spark), mode="overwrite", batchId="1", replaceWhere="id >= 0")
    assert "grant" not in str(told.value)
    assert numbers.rows() == [(7, "old")]


@pytest.mark.parametrize("truncate", ["false", pytest.param("true", marks=pytest.mark.thorough)])
def test_a_transaction_that_began_before_an_overwrite_sees_the_old_rows_unless_it_truncates(
    spark, numbers, write, truncate
):
    numbers.execute("INSERT INTO numbers VALUES (-1, 'old')")
    with psycopg.connect(numbers.url.replace("+psycopg", "")) as older:
        older.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        older.execute("SELECT 1 FROM pg_class LIMIT 1")  # its snapshot, and no lock on the table
        write(numbered(spark), mode="overwrite", batchId="1", truncate=truncate)
        found = older.execute("SELECT id FROM numbers").fetchall()
    assert found == ([(-1,)] if truncate == "false" else [])
    numbers.verify()


@pytest.mark.parametrize("how", [Emptying(), Emptying(truncates=True)])
def test_two_batches_that_overwrite_a_table_at_once_leave_the_rows_of_one(numbers, how):
    numbers.execute("INSERT INTO numbers VALUES (-1, 'old')")
    engine = create_engine(numbers.url)

    def overwrite(connection, number):
        empty(connection, ("public", "numbers"), how)
        connection.exec_driver_sql(f"INSERT INTO numbers VALUES ({number}, 'new')")
        connection.commit()

    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with ThreadPoolExecutor() as pool, engine.connect() as first, engine.connect() as second:
        empty(first, ("public", "numbers"), how)
        first.exec_driver_sql("INSERT INTO numbers VALUES (1, 'new')")
        later = pool.submit(overwrite, second, 2)
        while not numbers.execute(waiting):
            assert not later.done()
        first.commit()
        later.result()
    engine.dispose()
    assert numbers.rows() == [(2, "new")]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mode": "overwrite"}, r"cannot be emptied: rows of table 'notes' refer to its rows.*delete those first"),
        (
            {"mode": "overwrite", "truncate": "true"},
            "cannot be truncated: the foreign key.*leave the option truncate out",
        ),
        ({"mode": "overwrite", "replaceWhere": "nowhere > 0"}, "not a condition on the columns.*nowhere"),
        ({"mode": "overwrite", "replaceWhere": "id = 'x'"}, 'not a condition on the columns.*"x"'),
        ({"upsertKeys": "nowhere"}, "upsert_keys names the column 'nowhere', which table 'numbers' does not have"),
        ({"upsertKeys": "name"}, "no unique key of just the columns name"),
    ],
)
def test_what_the_decision_would_refuse_is_refused_before_a_task_runs(spark, numbers, write, given, says):
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    numbers.execute("INSERT INTO numbers VALUES (7, 'old')")
    numbers.execute("CREATE TABLE notes (number bigint REFERENCES numbers (id))")
    numbers.execute("INSERT INTO notes VALUES (7)")
    with pytest.raises(SPARKS_ERRORS, match=says):
        write(numbered(spark), batchId="1", **given)
    assert numbers.execute("SELECT count(*) FROM dualwrite_slot") == [(0,)]
    assert numbers.rows() == [(7, "old")]


def test_rows_replace_those_of_the_same_key(spark, numbers, write):
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    numbers.execute("INSERT INTO numbers VALUES (0, 'old'), (999, 'old')")
    write(numbered(spark), batchId="1", upsertKeys="id")
    numbers.verify()


@by_way_on_both_databases([*WAYS, "foreach_batch"], quick=["write_batch", "staging", "staging-mariadb"])
def test_of_rows_of_one_key_the_newest_counts_if_it_is_newer_than_the_present_one(spark, numbers, way):
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id), ADD COLUMN age bigint")
    numbers.execute("INSERT INTO numbers VALUES (1, 'old', 5), (2, 'newer than all', 9), (3, 'of no age', NULL)")
    rows = [(1, "newest", 7), (1, "older", 6), (2, "newest", 8), (2, "older", 7), (3, "newest", 2), (3, "older", 1)]
    rows += [(4, "older", 1), (4, "newest", 2)]
    df = spark.createDataFrame(rows, "id bigint, name string, age bigint").repartition(2, "id")
    write_by(numbers, df, way, upsert_keys=["id"], order_column="age", on_conflict="newer")
    assert numbers.execute("SELECT * FROM numbers ORDER BY id") == [
        (1, "newest", 7),
        (2, "newer than all", 9),
        (3, "newest", 2),
        (4, "newest", 2),
    ]
    assert numbers.messages() == sorted((number, name) for number, name, _ in rows)
    nothing_is_left(numbers)


@pytest.mark.parametrize("way", ["write_batch", "staging"])
def test_rows_replace_those_whose_key_the_database_would_number(spark, numbers, way):
    numbers.execute("DROP TABLE numbers")
    numbers.execute("CREATE TABLE numbers (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text)")
    numbers.execute("INSERT INTO numbers OVERRIDING SYSTEM VALUE VALUES (7, 'old')")
    write_by(numbers, numbered(spark), way, upsert_keys=["id"])
    numbers.verify()


@BOTH_DATABASES
def test_of_equal_rows_of_a_key_that_of_the_last_partition_counts(spark, numbers):
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    # By their names, the slots of twelve partitions have another order.
    df = spark.range(0, 12, 1, 12).selectExpr("7L AS id", "concat('partition ', id) AS name", "1 AS age")
    write_by(numbers, df, "staging", upsert_keys=["id"], order_column="age")
    assert numbers.rows() == [(7, "partition 11")]
    nothing_is_left(numbers)


@pytest.mark.parametrize("partitions", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_key_that_comes_twice_in_a_batch_is_refused(spark, numbers, write, partitions):
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    numbers.execute("INSERT INTO numbers VALUES (7, 'old')")
    twice = numbered(spark, 8, 1).unionAll(spark.sql("SELECT 7L AS id, 'again' AS name"))
    with pytest.raises(SPARKS_ERRORS, match="a key occurs twice in them, '7'.*order_column.*each key occur once"):
        write(twice if partitions == 2 else twice.coalesce(1), batchId="1", upsertKeys="id")
    assert numbers.rows() == [(7, "old")]
    assert numbers.messages() == []
    nothing_is_left(numbers)


def test_an_empty_batch_is_done(spark, numbers, write):
    write(numbered(spark).where("id < 0"), batchId="1")
    write(numbered(spark), batchId="1")
    assert numbers.rows() == numbers.messages() == []


def test_names_with_quotes_and_columns_that_the_database_fills(spark, numbers, write):
    numbers.table = '"Odd ""na%me"'
    numbers.execute(
        'CREATE TABLE "Odd ""na%me" (id bigint GENERATED ALWAYS AS IDENTITY, "na%me ""x" text, '
        'twice bigint GENERATED ALWAYS AS (id * 2) STORED, "select" int DEFAULT 7)'
    )
    df = numbered(spark, 10).withColumnRenamed("name", 'na%me "x')
    write(df, batchId="1", columns='{"id": "id", "na%me \\"x": "na%me \\"x"}')
    found = numbers.execute('SELECT id, "na%me ""x", twice, "select" FROM "Odd ""na%me" ORDER BY 1')
    assert found == [(number, f"row {number}", number * 2, 7) for number in range(10)]


def test_an_emptied_staging_table_fails_the_batch(spark, numbers, write):
    """Empty an unlogged table, as a crash of the database does."""
    numbers.execute(
        "CREATE FUNCTION empty_it() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE name text; BEGIN "
        "FOR name IN SELECT relname FROM pg_class WHERE relname LIKE 'dualwrite_staging_%' LIMIT 1 LOOP "
        "EXECUTE format('TRUNCATE %I', name); END LOOP; RETURN NEW; END $$"
    )
    numbers.execute(
        "CREATE TRIGGER empty_it BEFORE INSERT ON dualwrite_ledger FOR EACH ROW "
        f"WHEN (NEW.partition_id = {WHOLE_BATCH}) EXECUTE FUNCTION empty_it()"
    )
    with pytest.raises(SPARKS_ERRORS, match="holds 0 rows of 250"):
        write(numbered(spark), batchId="1")
    assert numbers.rows() == numbers.messages() == []
    numbers.execute("DROP TRIGGER empty_it ON dualwrite_ledger")
    write(numbered(spark), batchId="1")
    numbers.verify()


def test_what_is_prepared_too_long_ago_is_not_decided(spark, numbers, write):
    with pytest.raises(SPARKS_ERRORS, match="prepared too long ago"):
        write(numbered(spark), batchId="1", decideWithinSeconds="0.001")
    assert numbers.rows() == numbers.messages() == []
    nothing_is_left(numbers)


def test_what_is_prepared_too_long_ago_when_its_rows_are_moved_is_not_decided(spark, numbers, write):
    """Moving them may take long: the leases end meanwhile."""
    numbers.execute(
        "CREATE FUNCTION end_leases() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "UPDATE dualwrite_slot SET lease_until = clock_timestamp() WHERE lease_owner IS NOT NULL; RETURN NULL; END $$"
    )
    numbers.execute("CREATE TRIGGER end_leases AFTER INSERT ON numbers EXECUTE FUNCTION end_leases()")
    with pytest.raises(SPARKS_ERRORS, match="too long ago"):
        write(numbered(spark), batchId="1")
    numbers.execute("DROP TRIGGER end_leases ON numbers")
    assert numbers.rows() == numbers.messages() == []
    write(numbered(spark), batchId="1")
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batchId": None}, "option batchId is missing"),
        pytest.param({"topik": "x"}, "no option 'topik'.*did you mean 'topic'", marks=pytest.mark.thorough),
        ({"kafka.plugin.library.paths": "x"}, "runs code"),
        ({"replaceWhere": "id > 0"}, 'replaceWhere is for mode."overwrite"'),
        *(
            pytest.param({name: "nowhere"}, says, marks=pytest.mark.thorough)
            for name, says in (
                ("topic", "no topic 'nowhere'"),
                ("dbtable", "no table 'nowhere'"),
                ("keyColumn", "names the column 'nowhere'"),
            )
        ),
    ],
)
def test_bad_options_are_refused_before_anything_runs(spark, numbers, write, given, says):
    with pytest.raises(SPARKS_ERRORS, match=f"(?s){says}"):
        write(numbered(spark), **{"batchId": "1", **given})
    assert numbers.execute("SELECT count(*) FROM dualwrite_slot") == [(0,)]


@pytest.fixture
def stream(spark, numbers, write, tmp_path):
    source = tmp_path / "source"
    numbered(spark, ROWS, 1).repartitionByRange(3, "id").write.parquet(str(source))

    def run(source_name="dualwrite", **more):
        query = (
            spark.readStream.schema("id bigint, name string")
            .option("maxFilesPerTrigger", "1")
            .parquet(str(source))
            .repartition(2)
            .writeStream.format(source_name)
            .options(**options(numbers, **more))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    return run


def test_a_stream_killed_again_and_again_writes_each_file_once(numbers, stream):
    for point in ("batch.prepared", "batch.completed"):
        with pytest.raises(SPARKS_ERRORS):
            stream("armed", inCommit=point)
    stream("armed", inTask="batch.handed_over")  # a killed task does not stop it
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.thorough
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_status_shows_what_a_dead_driver_has_left(spark, numbers, write, kafka, engine):
    with pytest.raises(SPARKS_ERRORS):
        write(numbered(spark), source="armed", batchId="1", inCommit="batch.decided", inAbort="claim.before")
    shown = status(kafka=kafka, database=engine, prefix=numbers.sink)
    assert len(shown) == PARTITIONS


# Where there is the connector, the stream that reads Kafka shows it in every run.
@(pytest.mark.thorough if HAS_CONNECTOR else pytest.mark.longest)
def test_spark_finds_the_format_by_itself_where_the_library_is_installed(numbers, tmp_path):
    drivers = Drivers(tmp_path, path=as_installed(tmp_path))
    drivers.run(do="source", options=options(numbers, batchId="1"))
    numbers.verify()
    # And the driver's log shows where the batch is.
    assert phases_of("1", drivers.log.read_text()) == ["settling", "writing", "decided", "completed"]
