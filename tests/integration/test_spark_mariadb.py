"""MariaDB as the database of a Spark sink: what it does in its own way. What every database does is in conformance/."""

import datetime as dt
import json
import secrets
import signal
from decimal import Decimal

import pytest
from harness.drivers import Drivers
from harness.messages import consume
from harness.page_examples import example
from harness.spark import ROWS, SPARKS_ERRORS
from harness.spark import numbers as numbered
from harness.spark_source import ArmedSource, nothing_is_left, staging_tables, write_by, write_with
from sqlalchemy import create_engine, make_url, text

from dualwrite import ConfigurationError, TransactionAborted
from dualwrite.sinks.spark import SinkOptions, register, write_batch
from dualwrite.sinks.spark.databases.database import open_database

pytestmark = [
    pytest.mark.spark,
    pytest.mark.mariadb,
    pytest.mark.slow,
    pytest.mark.parametrize("numbers", ["mariadb"], indirect=True),
]
ANY = (ConfigurationError, *SPARKS_ERRORS)

# DataFrame expression, MariaDB type, the database's answer, the message's JSON.
TYPES = [
    ("true", "boolean", 1, True),
    ("-128Y", "tinyint", -128, -128),
    ("32767S", "smallint", 32767, 32767),
    ("cast(255 as int)", "tinyint unsigned", 255, 255),
    ("cast(-2147483648 as int)", "int", -2147483648, -2147483648),
    ("4294967295L", "int unsigned", 4294967295, 4294967295),
    ("9223372036854775807L", "bigint", 9223372036854775807, 9223372036854775807),
    ("9223372036854775807L", "decimal(19)", Decimal(9223372036854775807), 9223372036854775807),
    ("cast(1.1 as float)", "float", 1.1, 1.1),
    ("cast(0.5 as float)", "double", 0.5, 0.5),
    ("1e300D", "double", 1e300, 1e300),
    ("0.1D", "double", 0.1, 0.1),
    ("cast('1234567890123456789012345678.0123456789' as decimal(38,10))", "decimal(38,10)",
     Decimal("1234567890123456789012345678.0123456789"), 1234567890123456789012345678.0123456789),
    ("cast('-0.0000000001' as decimal(38,10))", "decimal(38,10)", Decimal("-1E-10"), -1e-10),
    ("cast('-0.01' as decimal(4,2))", "decimal(6,3)", Decimal("-0.010"), -0.01),
    ("'größer \\u2028 😀'", "text character set utf8mb4", "größer \u2028 😀", "größer \u2028 😀"),
    ("'it''s \\\\ \\\" 100% %s \\n'".replace("''", "\\'"), "varchar(99)", "it's \\ \" 100% %s \n", "it's \\ \" 100% %s \n"),
    ("''", "varchar(3)", "", ""),
    ("'ab'", "char(2)", "ab", "ab"),
    ("'sad'", "enum('sad','happy')", "sad", "sad"),
    ("'{\"a\": [1, null]}'", "json", {"a": [1, None]}, '{"a": [1, null]}'),
    ("x'00ff27'", "blob", b"\x00\xff'", "AP8n"),
    ("x'00ff'", "binary(2)", b"\x00\xff", "AP8="),
    ("x''", "varbinary(9)", b"", ""),
    ("date'0001-01-01'", "date", dt.date(1, 1, 1), "0001-01-01"),
    # What the server answers is in UTC: the session that asks is.
    ("timestamp'1970-01-01 00:00:01.999999 UTC'", "timestamp(6) null",
     dt.datetime.fromisoformat("1970-01-01T00:00:01.999999"), "1970-01-01T00:00:01.999999Z"),
    ("timestamp'2013-07-01 08:00:00 America/New_York'", "timestamp null",
     dt.datetime.fromisoformat("2013-07-01T12:00:00"), "2013-07-01T12:00:00.000000Z"),
    ("timestamp'2013-11-03 05:30:00 UTC'", "timestamp(6) null",
     dt.datetime.fromisoformat("2013-11-03T05:30:00"), "2013-11-03T05:30:00.000000Z"),
    ("timestamp'2013-11-03 06:30:00 UTC'", "timestamp(6) null",
     dt.datetime.fromisoformat("2013-11-03T06:30:00"), "2013-11-03T06:30:00.000000Z"),
    ("timestamp_ntz'2013-03-10 02:30:00.5'", "datetime(6)",
     dt.datetime.fromisoformat("2013-03-10T02:30:00.500000"), "2013-03-10T02:30:00.500000"),
    ("map('k', x'01', 'n', null)", "json", {"k": "AQ==", "n": None}, {"k": "AQ==", "n": None}),
    ("array(1, null)", "json", [1, None], [1, None]),
]  # fmt: skip


@pytest.mark.parametrize(
    "way", ["staging", *(pytest.param(way, marks=pytest.mark.thorough) for way in ("write_batch", "foreach_partition"))]
)
def test_every_type_arrives_on_both_sides(spark, numbers, way):
    """Also on a server whose session, unlike ours, changes what it cannot keep, and where it is not noon in UTC."""
    lax = numbers.url.partition("?")[0] + "?init_command=SET+time_zone%3D%27%2B05:00%27,sql_mode%3D%27ANSI_QUOTES%27"
    names = [f"c{number}" for number in range(len(TYPES))]
    declared = ", ".join(f"{name} {kind}" for name, (_, kind, _, _) in zip(names, TYPES, strict=True))
    numbers.execute(f"CREATE TABLE everything ({declared}, n int)")
    values = ", ".join(f"{expression} AS {name}" for name, (expression, _, _, _) in zip(names, TYPES, strict=True))
    full = spark.sql(f"SELECT {values}, 0 AS n")
    nulls = full.selectExpr(*(f"if(n = 1, {name}, null) AS {name}" for name in names), "1 AS n")
    write_by(numbers, full.union(nulls).coalesce(1), way, url=lax, table="everything", key=None)

    engine = create_engine(numbers.url.partition("?")[0])
    with engine.connect() as connection:
        connection.execute(text("SET time_zone = '+00:00'"))
        rows = connection.execute(text(f"SELECT {', '.join(names)} FROM everything ORDER BY n")).all()
    engine.dispose()
    found = [
        json.loads(value) if kind == "json" else value for value, (_, kind, _, _) in zip(rows[0], TYPES, strict=True)
    ]
    assert found == [answer for _, _, answer, _ in TYPES]
    assert set(rows[1]) == {None}
    found = [json.loads(message.value()) for message in consume(numbers.kafka, numbers.topic)]
    full_json, null_json = sorted(found, key=lambda message: message["n"])
    assert full_json == {**{name: value for name, (_, _, _, value) in zip(names, TYPES, strict=True)}, "n": 0}
    assert null_json == {**dict.fromkeys(names), "n": 1}


@pytest.mark.thorough
def test_the_pages_example_writes_both_sides(spark, numbers, monkeypatch):
    register(spark)
    [code] = example("spark-columns.md", "MariaDB and MySQL")
    monkeypatch.setenv("DATABASE_PASSWORD", make_url(numbers.url).password)
    for theirs, ours in {
        "mysql+pymysql://app@db/air": numbers.url,
        "broker:9092": numbers.kafka["bootstrap.servers"],
        '"dbtable", "flights"': '"dbtable", "numbers"',
        '"topic", "flights"': f'"topic", "{numbers.topic}"',
    }.items():
        assert theirs in code
        code = code.replace(theirs, ours)
    exec(compile(code, "the page's example", "exec"), {"flights": numbered(spark)})
    numbers.verify()


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("varchar(3)", "'four'", r"Data too long for column 'v'.*\(row 3 of partition 0, key '2'\)"),
        pytest.param("varchar(3)", "'bye '", "would change a value", marks=pytest.mark.thorough),
        pytest.param("datetime", "timestamp_ntz'2020-01-01 00:00:00.5'", "0 digits.*row 3", marks=pytest.mark.thorough),
        pytest.param("timestamp", "timestamp'1960-01-01 00:00:00'", "Incorrect datetime", marks=pytest.mark.thorough),
        pytest.param("int unsigned", "-1", "Out of range value", marks=pytest.mark.thorough),
        pytest.param("double", "cast('NaN' as double)", "not a finite number", marks=pytest.mark.thorough),
        pytest.param(
            "varchar(3) character set latin1", "'😀'", "Incorrect string value: \\.\\.\\.", marks=pytest.mark.thorough
        ),
        pytest.param(
            "longblob", "cast(repeat('x', 9000000) AS binary)", "max_allowed_packet.*row 3", marks=pytest.mark.thorough
        ),
        pytest.param("json", "'{'", "json_valid|CONSTRAINT", marks=pytest.mark.thorough),
    ],
)
def test_a_value_that_the_column_would_change_leaves_nothing_of_its_batch(spark, numbers, kind, value, says):
    numbers.execute(f"CREATE TABLE kept (id bigint, v {kind})")
    df = spark.range(0, 5, 1, 1).selectExpr("id", f"if(id = 2, {value}, null) AS v")
    with pytest.raises(ANY, match=says):
        write_batch(df, batch_id="1", **{**numbers.settings, "table": "kept"})
    assert numbers.execute("SELECT * FROM kept") == []
    assert numbers.messages() == []


def test_a_table_that_cannot_take_part_is_refused(numbers):
    numbers.execute("CREATE TABLE flat (id bigint, name text) ENGINE=MyISAM")
    database = open_database(SinkOptions(**numbers.settings))
    try:
        for name, says in {
            "nowhere": "no table 'nowhere'",
            "Numbers": "no table 'Numbers'.*upper and lower case",
            "num bers": "not the name of a table",
            "dualwrite_batch": "not a table but a view",
            "flat": "in the engine MyISAM.*ENGINE=InnoDB",
        }.items():
            with database.engine.connect() as connection, pytest.raises(ConfigurationError, match=says):
                database.read_table(connection, name)
        with database.engine.connect() as connection:
            assert database.read_table(connection, "`numbers`").columns.keys() == {"id", "name"}
    finally:
        database.engine.dispose()


def test_a_prepared_leg_is_refused_and_nothing_is_written(spark, numbers):
    with pytest.raises(SPARKS_ERRORS, match='no PREPARE TRANSACTION.*XA.*set it to "staging"'):
        write_by(numbers, numbered(spark, 10), "prepared")
    assert numbers.rows() == numbers.messages() == []


UPSERT = {"upsert_keys": ["id"]}
CHANGES = {**UPSERT, "op_column": "op", "order_column": "id"}
STAGING = "CREATE, DROP, SELECT, INSERT"


def test_a_missing_right_is_refused_before_a_task_runs(spark, numbers):
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    numbers.execute("INSERT INTO numbers VALUES (-1, 'old')")
    user, database = f"clerk_{secrets.token_hex(4)}", make_url(numbers.url).database
    url = make_url(numbers.url).set(username=user, password="secret").render_as_string(hide_password=False)
    numbers.execute(f"CREATE USER {user} IDENTIFIED BY 'secret'")
    ours = (
        "SELECT table_name FROM information_schema.tables WHERE table_schema = database() AND table_name <> 'numbers'"
    )
    try:
        for (table,) in numbers.execute(ours):
            numbers.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{table}` TO {user}")
        for way, settings, of_database, of_table, words in (
            (
                "staging",
                {},
                "SELECT, INSERT",
                "SELECT",
                "no staging table can be made in database .* CREATE command denied",
            ),
            ("staging", {}, "CREATE, DROP", "INSERT", "no staging table can be made .* denied .*"),
            ("staging", {}, STAGING, "SELECT", ""),
            ("staging", UPSERT, STAGING, "DELETE", "the right to UPDATE is missing on table 'numbers'"),
            ("staging", CHANGES, STAGING, "UPDATE", "the right to DELETE is missing on table 'numbers'"),
            (
                "write_batch",
                UPSERT,
                "CREATE TEMPORARY TABLES",
                "SELECT, INSERT",
                "the right to UPDATE is missing on table",
            ),
            ("write_batch", UPSERT, "SELECT", "SELECT, INSERT, UPDATE", "no temporary table can be made"),
            (
                "write_batch",
                CHANGES,
                "CREATE TEMPORARY TABLES",
                "SELECT, INSERT, UPDATE",
                "the right to DELETE is missing",
            ),
            ("write_batch", {}, "CREATE TEMPORARY TABLES", "SELECT", "rows may not be inserted into 'numbers'"),
        ):
            numbers.execute(f"GRANT {of_database} ON `{database}`.* TO {user}")
            numbers.execute(f"GRANT {of_table} ON numbers TO {user}")
            df = (
                numbered(spark, 10, 1).selectExpr("*", "'u' AS op")
                if "op_column" in settings
                else numbered(spark, 10, 1)
            )
            if words:
                with pytest.raises(ANY, match=words) as refused:
                    write_by(numbers, df, way, url=url, **settings)
                assert "GRANT" in str(refused.value)
                assert numbers.execute("SELECT count(*) FROM dualwrite_slot") == [(0,)]
                assert (numbers.rows(), numbers.messages()) == ([(-1, "old")], [])
            numbers.execute(f"REVOKE {of_database} ON `{database}`.* FROM {user}")
            numbers.execute(f"REVOKE {of_table} ON numbers FROM {user}")
    finally:
        numbers.execute(f"DROP USER {user}")


def test_a_row_of_number_0_stays_number_0_and_a_null_is_not_given_a_number(spark, numbers):
    numbers.execute("CREATE TABLE counted (id bigint AUTO_INCREMENT PRIMARY KEY, name text)")
    case = {**numbers.settings, "table": "counted"}
    write_batch(numbered(spark, 3, 1), batch_id="1", **case)
    assert numbers.execute("SELECT id FROM counted ORDER BY id") == [(0,), (1,), (2,)]
    with pytest.raises(SPARKS_ERRORS, match=r"NULL, which the server would replace.*row 1 of partition 0"):
        write_batch(spark.sql("SELECT cast(null AS bigint) AS id, 'x' AS name"), batch_id="2", **case)
    assert len(numbers.execute("SELECT id FROM counted")) == 3


@pytest.fixture
def write(spark, numbers):
    register(spark)
    spark.dataSource.register(ArmedSource)

    def write(df, **given):
        write_with(numbers, df, **given)

    return write


def test_rows_replace_those_of_the_same_key_and_others_are_added(spark, numbers, write):
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    numbers.execute("INSERT INTO numbers VALUES (0, 'old'), (999, 'old')")
    write(numbered(spark), batchId="1", upsertKeys="id")
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.parametrize(
    ("unique", "says"),
    [(True, "a key occurs twice.*each key occur once"), (False, "has no unique key of just the columns id")],
)
def test_keys_that_do_not_name_one_row_are_refused(spark, numbers, write, unique, says):
    numbers.execute(
        "ALTER TABLE numbers ADD PRIMARY KEY (id)" if unique else "ALTER TABLE numbers ADD UNIQUE (id, name(9))"
    )
    numbers.execute("INSERT INTO numbers VALUES (7, 'old')")
    twice = numbered(spark, 8, 1).unionAll(spark.sql("SELECT 7L AS id, 'again' AS name"))
    with pytest.raises(SPARKS_ERRORS, match=says):
        write(twice, batchId="1", upsertKeys="id")
    assert numbers.rows() == [(7, "old")]
    assert numbers.messages() == []
    nothing_is_left(numbers)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "cannot be emptied: rows of table 'notes' refer to its rows.*delete those first"),
        ({"truncate": "true"}, "the option truncate is not for MariaDB and MySQL"),
        ({"replaceWhere": "nowhere > 0"}, "not a condition on the columns.*nowhere"),
    ],
)
def test_an_overwrite_that_would_fail_is_refused_before_a_task_runs(spark, numbers, write, given, says):
    numbers.execute("ALTER TABLE numbers ADD PRIMARY KEY (id)")
    numbers.execute("INSERT INTO numbers VALUES (7, 'old')")
    numbers.execute("CREATE TABLE notes (number bigint, FOREIGN KEY (number) REFERENCES numbers (id))")
    numbers.execute("INSERT INTO notes VALUES (7)")
    with pytest.raises(SPARKS_ERRORS, match=says):
        write(numbered(spark), mode="overwrite", batchId="1", **given)
    assert numbers.execute("SELECT count(*) FROM dualwrite_slot") == [(0,)]
    assert numbers.rows() == [(7, "old")]


def test_the_rows_appear_all_at_once_and_the_old_ones_stay_until_then(spark, numbers, write):
    numbers.execute("INSERT INTO numbers VALUES (-1, 'old')")
    with pytest.raises(SPARKS_ERRORS):
        write(numbered(spark), mode="overwrite", source="armed", batchId="1", inCommit="batch.recorded")
    assert numbers.rows() == [(-1, "old")]
    write(numbered(spark), mode="overwrite", batchId="2")
    numbers.verify()


@pytest.mark.parametrize("point", ["batch.decided", pytest.param("batch.recorded", marks=pytest.mark.thorough)])
def test_a_driver_killed_at_its_decision_is_followed_by_one_that_writes_the_batch_once(spark, numbers, write, point):
    with pytest.raises(SPARKS_ERRORS):
        write(numbered(spark), source="armed", batchId="1", inCommit=point, inAbort="settle.looked,claim.before")
    assert len(numbers.rows()) == (ROWS if point == "batch.decided" else 0)
    write(numbered(spark), batchId="1")
    numbers.verify()
    nothing_is_left(numbers)


def test_tasks_killed_with_their_staging_tables_leave_none(spark, numbers, write):
    """MariaDB has them outside of the transactions that fill them: they are there, and empty, when the task dies."""
    points = {"0": "spark.rows_copied", "1": "write.prepared", "2": "batch.handed_over"}
    write(numbered(spark), source="armed", batchId="1", inTasks=json.dumps(points), keepSlots="false")
    numbers.verify()
    assert staging_tables(numbers) == []
    nothing_is_left(numbers)


@pytest.mark.thorough
@pytest.mark.parametrize("point", ["ledger.begun", "spark.driver_done"])
def test_a_driver_of_partitions_that_kills_itself_is_followed_by_one_that_finishes(spark, numbers, tmp_path, point):
    Drivers(tmp_path).run(do="batch", settings=numbers.settings, failpoint=point, ends_with=-signal.SIGKILL)
    report = write_batch(numbered(spark), batch_id="1", **numbers.settings)
    assert report.written_rows == (0 if point == "spark.driver_done" else ROWS)
    numbers.verify()


def test_a_column_that_changes_its_type_while_the_batch_is_decided_fails_it(numbers):
    """Rows that were made for one type are not written into another."""
    database = open_database(SinkOptions(**numbers.settings))
    try:
        with database.engine.connect() as connection:
            planned = {name: one.shown_type for name, one in database.read_table(connection, "numbers").columns.items()}
        numbers.execute("ALTER TABLE numbers MODIFY id decimal(10,2)")
        with (
            database.engine.begin() as connection,
            pytest.raises(TransactionAborted, match=r"'id' .* was bigint.* decimal\(10,2\)"),
        ):
            where = connection.exec_driver_sql("SELECT database()").scalar()
            database.require_types(connection, [(where, "numbers")], planned, shown_name="numbers")
    finally:
        database.engine.dispose()
