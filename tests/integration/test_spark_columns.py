"""Every type on both sides, by both ways; names that need care; what the catalog and Kafka lack is reported before a task runs."""

import base64
import datetime as dt
import json
import random
import uuid
from decimal import Decimal

import pytest
from harness.messages import consume
from harness.spark import ROWS, SPARKS_ERRORS, SparkCase
from harness.spark import numbers as numbered
from harness.spark_source import WAYS, options_of, write_by
from pyspark.sql import types
from sqlalchemy import create_engine

from dualwrite import ConfigurationError
from dualwrite.sinks.spark import JobFailed, foreach_partition, register, write_batch
from dualwrite.sinks.spark.databases.postgresql import read_table

IDENTIFIER = uuid.UUID("0f0e0d0c-0b0a-0908-0706-050403020100")

# DataFrame expression, PostgreSQL type, the database's answer, the message's JSON.
TYPES = [
    ("true", "boolean", True, True),
    ("-128Y", "smallint", -128, -128),
    ("32767S", "smallint", 32767, 32767),
    ("cast(5 as int)", "smallint", 5, 5),
    ("cast(-2147483648 as int)", "integer", -2147483648, -2147483648),
    ("9223372036854775807L", "bigint", 9223372036854775807, 9223372036854775807),
    ("9223372036854775807L", "numeric", Decimal(9223372036854775807), 9223372036854775807),
    ("7L", "numeric(5,2)", Decimal("7.00"), 7),
    ("cast(1.1 as float)", "real", 1.1, 1.1),
    ("cast(0.5 as float)", "double precision", 0.5, 0.5),
    ("cast('NaN' as float)", "real", "nan", "NaN"),
    ("1e300D", "double precision", 1e300, 1e300),
    ("cast('-Infinity' as double)", "double precision", float("-inf"), "-Infinity"),
    ("cast('1234567890123456789012345678.0123456789' as decimal(38,10))", "numeric",
     Decimal("1234567890123456789012345678.0123456789"), 1234567890123456789012345678.0123456789),
    ("cast('-0.01' as decimal(4,2))", "numeric(6,3)", Decimal("-0.010"), -0.01),
    ("'größer \\u2028 😀'", "text", "größer \u2028 😀", "größer \u2028 😀"),
    ("''", "varchar(3)", "", ""),
    ("'ab'", "char(2)", "ab", "ab"),
    ("'sad'", "mood", "sad", "sad"),
    ("'sad'", "feeling", "sad", "sad"),
    ("'{\"a\": [1, null]}'", "json", {"a": [1, None]}, '{"a": [1, null]}'),
    ("'{\"a\": [1, null]}'", "jsonb", {"a": [1, None]}, '{"a": [1, null]}'),
    (f"'{IDENTIFIER}'", "uuid", IDENTIFIER, str(IDENTIFIER)),
    (f"'{IDENTIFIER.hex.upper()}'", "uuid", IDENTIFIER, IDENTIFIER.hex.upper()),
    ("x'00ff'", "bytea", b"\x00\xff", "AP8="),
    ("date'0001-01-01'", "date", dt.date(1, 1, 1), "0001-01-01"),
    ("timestamp'1969-12-31 23:59:59.999999 UTC'", "timestamptz",
     dt.datetime(1969, 12, 31, 23, 59, 59, 999999, dt.timezone.utc), "1969-12-31T23:59:59.999999Z"),
    ("timestamp'2013-07-01 08:00:00 America/New_York'", "timestamptz",
     dt.datetime(2013, 7, 1, 12, tzinfo=dt.timezone.utc), "2013-07-01T12:00:00.000000Z"),
    ("timestamp'2013-11-03 05:30:00 UTC'", "timestamptz",
     dt.datetime(2013, 11, 3, 5, 30, tzinfo=dt.timezone.utc), "2013-11-03T05:30:00.000000Z"),
    ("timestamp'2013-11-03 06:30:00 UTC'", "timestamptz",
     dt.datetime(2013, 11, 3, 6, 30, tzinfo=dt.timezone.utc), "2013-11-03T06:30:00.000000Z"),
    ("timestamp_ntz'2013-07-01 08:00:00.5'", "timestamp",
     dt.datetime.fromisoformat("2013-07-01T08:00:00.500000"), "2013-07-01T08:00:00.500000"),
    ("array(1, null, 3)", "integer[]", [1, None, 3], [1, None, 3]),
    ("array('a', null)", "text[]", ["a", None], ["a", None]),
    ("array(cast(1.5 as decimal(3,1)))", "numeric[]", [Decimal("1.5")], [1.5]),
    ("array(1D, cast('NaN' as double))", "jsonb", [1, "NaN"], [1, "NaN"]),
    ("map('k', x'01', 'n', null)", "jsonb", {"k": "AQ==", "n": None}, {"k": "AQ==", "n": None}),
    ("named_struct('x', date'2020-01-01', 'y', null, 'z', array(named_struct('t', timestamp'2020-01-01 00:00:00 UTC')))"
     .replace("'y', null", "'y', cast(null as int)"), "json",
     {"x": "2020-01-01", "y": None, "z": [{"t": "2020-01-01T00:00:00.000000Z"}]},
     {"x": "2020-01-01", "y": None, "z": [{"t": "2020-01-01T00:00:00.000000Z"}]}),
    ("parse_json('{\"v\": [1, \"x\"]}')", "jsonb", {"v": [1, "x"]}, {"v": [1, "x"]}),
]  # fmt: skip


def plain(value):
    """The database's answer, comparable: NaN as text, and times in UTC (in the hour that comes twice, Python finds no equals)."""
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(dt.timezone.utc)
    return "nan" if value != value else value  # noqa: PLR0124 - NaN is not itself


def thorough(*ways):
    return [pytest.param(way, marks=pytest.mark.thorough) for way in ways]


# What is planned, and what fails in a task, is so before the ways part.
before_the_ways_part = pytest.mark.parametrize(
    "write", ["write_batch", *thorough("foreach_partition", "data source")], indirect=True
)


# How rows come into a table is the table's matter, but a staging table is made after it.
staged = pytest.mark.parametrize("write", ["data source", *thorough("write_batch", "foreach_partition")], indirect=True)


@pytest.fixture(params=["write_batch", *thorough("foreach_partition", "data source")])
def write(request):
    def run(df, **settings):
        if request.param == "write_batch":
            write_batch(df, batch_id="1", **settings)
        elif request.param == "data source":
            register(df.sparkSession)
            df.write.format("dualwrite").mode("append").options(**options_of(settings)).option("batchId", "1").save()
        else:
            df.foreachPartition(foreach_partition(df, batch_id="1", **settings))

    return run


@pytest.fixture
def target(numbers):
    numbers.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    numbers.execute("CREATE DOMAIN feeling AS mood")
    return numbers


@pytest.mark.parametrize("form", ["binary", "text"])
def test_every_type_arrives_on_both_sides(spark, target, write, form):
    names = [f"c{number}" for number in range(len(TYPES))]
    declared = ", ".join(f"{name} {kind}" for name, (_, kind, _, _) in zip(names, TYPES, strict=True))
    place = "inet" if form == "text" else "text"  # the one makes all columns travel as text
    target.execute(f"CREATE TABLE everything ({declared}, n int, place {place})")
    values = ", ".join(f"{expression} AS {name}" for name, (expression, _, _, _) in zip(names, TYPES, strict=True))
    full = spark.sql(f"SELECT {values}, 0 AS n, '10.0.0.1' AS place")
    nulls = full.selectExpr(*(f"if(n = 1, {name}, null) AS {name}" for name in names), "1 AS n", "place")
    write(full.union(nulls).coalesce(1), **{**target.settings, "table": "everything", "key": None})

    rows = target.execute(f"SELECT {', '.join(names)} FROM everything ORDER BY n")
    assert [plain(value) for value in rows[0]] == [
        pytest.approx(answer) if kind == "real" and isinstance(answer, float) else answer
        for _, kind, answer, _ in TYPES
    ]
    assert set(rows[1]) == {None}
    found = [json.loads(message.value()) for message in consume(target.kafka, target.topic)]
    full_json, null_json = sorted(found, key=lambda message: message["n"])
    assert full_json == {
        **{name: value for name, (_, _, _, value) in zip(names, TYPES, strict=True)},
        "n": 0,
        "place": "10.0.0.1",
    }
    assert null_json == {**dict.fromkeys(names), "n": 1, "place": "10.0.0.1"}


def test_a_column_that_is_not_used_may_be_of_a_type_that_arrow_does_not_know(spark, target):
    df = numbered(spark, 10).selectExpr("id", "make_interval(1, 2) AS unknown", "name")
    write_batch(df, batch_id="1", **target.settings, columns=["id", "name"])
    target.verify(10)


@before_the_ways_part
@pytest.mark.skipif(not hasattr(types, "TimeType"), reason="this Spark has no times")
def test_times_and_intervals(spark, target, write):
    target.execute("CREATE TABLE spans (t time, i interval)")
    spark.conf.set("spark.sql.timeType.enabled", "true")
    try:
        df = spark.sql("SELECT time'12:34:56.789' AS t, interval '-1 2' day to hour AS i").coalesce(1)
        with pytest.raises(
            (ConfigurationError, *SPARKS_ERRORS), match="'i' of type interval day to hour cannot be put into JSON"
        ):
            write(df, **{**target.settings, "table": "spans", "key": None})
        df = df.withColumn("v", df.t.cast("string"))
        write(df, **{**target.settings, "table": "spans", "key": None, "value": "v"})
    finally:
        spark.conf.unset("spark.sql.timeType.enabled")
    assert target.execute("SELECT * FROM spans") == [(dt.time(12, 34, 56, 789000), dt.timedelta(days=-1, hours=-2))]
    assert [message.value() for message in consume(target.kafka, target.topic)] == [b"12:34:56.789"]


@before_the_ways_part
def test_every_part_of_a_message_can_come_from_a_column(spark, numbers, write):
    df = spark.sql(
        f"""
        SELECT id, concat('row ', id) AS name, '{numbers.topic}' AS t, cast(id % 2 AS int) AS p, x'6b' AS k,
               if(id = 0, null, cast(id AS string)) AS v,
               if(id = 1, null, map('a', x'ff', 'b', null)) AS h, timestamp_millis(1700000000000 + id) AS ts
        FROM range(0, 3, 1, 1)
        """
    )
    write(
        df,
        **{**numbers.settings, "topic": None, "topic_column": "t", "key": "k", "value": "v", "headers": "h",
           "partition": "p", "timestamp": "ts", "columns": ["id", "name"]},
    )  # fmt: skip
    found = sorted(
        (message.timestamp()[1] - 1700000000000, message.partition(), message.key(), message.value(), message.headers())
        for message in consume(numbers.kafka, numbers.topic)
    )
    headers = [("a", b"\xff"), ("b", None)]
    assert found == [(0, 0, b"k", None, headers), (1, 1, b"k", b"1", None), (2, 0, b"k", b"2", headers)]
    assert numbers.rows() == [(number, f"row {number}") for number in range(3)]


@before_the_ways_part
def test_headers_as_an_array_of_pairs(spark, numbers, write):
    df = spark.sql("SELECT 1L AS id, 'a' AS name, array(named_struct('key', 'x', 'value', 'y')) AS h")
    write(df, **{**numbers.settings, "headers": "h"})
    [message] = consume(numbers.kafka, numbers.topic)
    assert message.headers() == [("x", b"y")]


@before_the_ways_part
def test_names_that_need_quotes(spark, numbers, write):
    numbers.execute('CREATE SCHEMA "Sales.Data"')
    numbers.execute(
        'CREATE TABLE "Sales.Data"."order" ("select" int, "a.b" int, "A" int, a int, "say ""hi""" text, "ä`" text)'
    )
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        df = spark.sql(
            "SELECT 1 AS `select`, 2 AS `a.b`, 3 AS `A`, 4 AS `a`, 'x' AS `say \"hi\"`, 'y' AS `ä```"
        ).coalesce(1)
        write(df, **{**numbers.settings, "table": '"Sales.Data".order', "key": "a.b"})
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    assert numbers.execute('SELECT * FROM "Sales.Data"."order"') == [(1, 2, 3, 4, "x", "y")]
    [message] = consume(numbers.kafka, numbers.topic)
    assert message.key() == b"2"
    assert json.loads(message.value()) == {"select": 1, "a.b": 2, "A": 3, "a": 4, 'say "hi"': "x", "ä`": "y"}


@pytest.mark.parametrize(
    ("numbers", "way"),
    [*(("postgresql", way) for way in WAYS), pytest.param("mariadb", "write_batch", marks=pytest.mark.mariadb)],
    indirect=["numbers"],
)
def test_a_row_of_two_megabytes_that_do_not_compress(spark, numbers, dualwrite_kafka, way):
    """Its message is larger: JSON has binary values as base64."""
    body = random.Random(7).randbytes(2_000_000)
    numbers.execute(f"CREATE TABLE large (id bigint, body {'longblob' if numbers.on_mariadb else 'bytea'})")
    most = {"max.message.bytes": "4000000"}
    topic = dualwrite_kafka.create_topic(f"{numbers.topic}-large", 1, most)
    kafka = {**numbers.kafka, "message.max.bytes": "4000000"}
    df = spark.createDataFrame([(7, body)], "id bigint, body binary").coalesce(1)
    write_by(numbers, df, way, kafka=kafka, table="large", topic=topic)
    assert numbers.execute("SELECT id, body FROM large") == [(7, body)]
    [message] = consume(numbers.kafka, topic)
    value = json.loads(message.value())
    assert (value["id"], base64.b64decode(value["body"])) == (7, body)


@staged
def test_columns_of_the_table_that_nothing_goes_into_get_their_defaults(spark, numbers, write):
    numbers.execute(
        "CREATE TABLE wide (id bigint, at timestamptz NOT NULL DEFAULT 'epoch', n int GENERATED ALWAYS AS IDENTITY)"
    )
    write(numbered(spark, 2, 1), **{**numbers.settings, "table": "wide", "columns": ["id"]})
    assert numbers.execute("SELECT id, n, extract(epoch FROM at)::int FROM wide ORDER BY id") == [(0, 1, 0), (1, 2, 0)]


@staged
def test_a_partitioned_table(spark, numbers, write):
    numbers.execute("CREATE TABLE parted (id bigint, name text) PARTITION BY RANGE (id)")
    numbers.execute("CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (5)")
    numbers.execute("CREATE TABLE high PARTITION OF parted FOR VALUES FROM (5) TO (10)")
    write(numbered(spark, 10, 2), **{**numbers.settings, "table": "parted"})
    assert numbers.execute("SELECT (SELECT count(*) FROM low), (SELECT count(*) FROM high)") == [(5, 5)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"table": "nowhere"}, "there is no table 'nowhere'"),
        ({"table": "Numbers; DROP TABLE numbers"}, "there is no table 'Numbers; DROP|is not the name of a table"),
        ({"table": '"Numbers"'}, "there is no table"),
        ({"table": "looking"}, "'looking' is not a table but a view"),
        ({"table": "narrow"}, "table 'narrow' has no column 'name'"),
        ({"table": "strict"}, "column 'must' of table 'strict' is NOT NULL without a default"),
        ({"table": "other"}, "column 'name' of type string cannot be written into column 'name' of type integer"),
        ({"table": "made"}, "column 'name' of table 'made' is computed by the database"),
        ({"topic": "no-such-topic"}, "there is no topic 'no-such-topic'"),
        ({"schema": "elsewhere"}, "dualwrite's tables are not in schema 'elsewhere'"),
    ],
)
def test_what_cannot_work_is_told_before_a_task_runs(spark, numbers, changes, says):
    numbers.execute("CREATE VIEW looking AS SELECT * FROM numbers")
    numbers.execute("CREATE TABLE narrow (id bigint)")
    numbers.execute("CREATE TABLE strict (id bigint, name text, must int NOT NULL)")
    numbers.execute("CREATE TABLE other (id bigint, name int)")
    numbers.execute("CREATE TABLE made (id bigint, name text GENERATED ALWAYS AS ('x') STORED)")
    df = numbered(spark)
    for attempt in (write_batch, foreach_partition):
        with pytest.raises(ConfigurationError, match=says):
            attempt(df, batch_id="1", **{**numbers.settings, **changes})
    assert not numbers.execute("SELECT * FROM dualwrite_ledger")
    assert not numbers.execute("SELECT * FROM dualwrite_slot")


def test_a_table_that_may_not_be_written_to_is_told_with_the_grant(numbers, dualwrite_postgres):
    numbers.execute("CREATE ROLE reader LOGIN PASSWORD 'reader'")
    engine = create_engine(create_engine(numbers.url).url.set(username="reader", password="reader"))
    try:
        with (
            engine.connect() as connection,
            pytest.raises(ConfigurationError, match='GRANT INSERT ON numbers TO "reader"'),
        ):
            read_table(connection, "numbers")
    finally:
        engine.dispose()
        numbers.execute("DROP ROLE reader")


@before_the_ways_part
@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("if(id = 700, 'x', null)", "null value in column", marks=pytest.mark.thorough),
        ("if(id = 700, 'bad \\0', 'y')", "0x00"),
    ],
)
def test_a_row_that_the_database_refuses_fails_its_partition_on_both_sides(spark, numbers, write, name, says):
    numbers.execute("ALTER TABLE numbers ALTER name TYPE varchar(100), ALTER name SET NOT NULL")
    with pytest.raises(SPARKS_ERRORS, match=rf"table 'numbers' does not take the (rows|batch).*{says}"):
        # One partition: Spark kills the other tasks of a failed job, later than it reports the failure.
        write(numbered(spark, ROWS, 1).selectExpr("id", f"{name} AS name"), **numbers.settings)
    assert numbers.rows() == numbers.messages() == []


@before_the_ways_part
def test_a_value_that_does_not_fit_names_its_column(spark, numbers, write):
    numbers.execute("ALTER TABLE numbers ALTER id TYPE smallint")
    with pytest.raises(SPARKS_ERRORS, match="a value of column 'id' does not fit int16"):
        write(spark.sql("SELECT 40000L AS id, 'x' AS name"), **numbers.settings)
    numbers.verify(0)


@before_the_ways_part
@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("varchar(3)", "'abc '", "it has more than 3 characters"),
        pytest.param("short", "'abc '", "it has more than 3 characters", marks=pytest.mark.thorough),
        ("timestamp", "timestamp_ntz'2000-01-01' - make_dt_interval(2600000)", "not in the years that the type has"),
        pytest.param(
            "date[]",
            "array(null, date_from_unix_date(-2147472692))",
            "not in the years that the type has",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_value_that_postgresql_would_change_is_refused_with_its_row(
    spark, numbers, write, kind, value, says, request
):
    numbers.execute("CREATE DOMAIN short AS varchar(3)")
    numbers.execute(f"ALTER TABLE numbers DROP name, ADD name {kind}")
    df = numbered(spark, 4, 1).selectExpr("id", f"if(id = 2, {value}, null) AS name", "'m' AS message")
    refusal = rf"column 'name' of type .* would not keep .*{says} \(row 3 of partition 0"
    if "years" in says and request.node.callspec.params["write"] == "foreach_partition":
        refusal = r"ValueError: (year -\d+ is out of range|ordinal must be >= 1)"  # PySpark's own: rows come as Python's values
    with pytest.raises(SPARKS_ERRORS, match=refusal):
        write(df, **numbers.settings, value="message")
    assert numbers.execute("SELECT id FROM numbers") == []
    write(df.where("id <> 2"), **numbers.settings, value="message")
    assert len(numbers.execute("SELECT id FROM numbers")) == 3


@pytest.mark.parametrize("engine", ["native", "librdkafka"])
def test_a_message_that_would_not_arrive_as_it_is_names_its_row(spark, numbers, engine):
    settings = {**numbers.settings, "producer_engine": engine, "columns": ["id", "name"]}
    df = numbered(spark, 3, 1)
    for more, says in (
        ({"timestamp": "if(id = 1, timestamp_millis(0), null)"}, "the timestamp of a row is 0 ms since 1970"),
        ({"timestamp": "if(id = 1, timestamp_millis(-1), null)"}, "the timestamp of a row is -1 ms since 1970"),
        (
            {"headers": "array(named_struct('key', if(id = 1, null, 'h'), 'value', 'v'))"},
            "a header of a row has no name",
        ),
        (
            {"headers": "array(if(id = 1, null, named_struct('key', 'h', 'value', 'v')))"},
            "a header of a row has no name",
        ),
        ({"partition": "if(id = 1, -1, 0)"}, "the partition of a row is -1"),
    ):
        [(part, value)] = more.items()
        with pytest.raises(JobFailed, match=rf"{says} \(row 2 of partition 0"):
            write_batch(df.selectExpr("*", f"{value} AS part"), batch_id="1", **settings, **{part: "part"})
    assert numbers.rows() == numbers.messages() == []
    header = "array(named_struct('key', 'h', 'value', cast(null AS string)))"
    kept = df.selectExpr("*", "if(id = 1, timestamp_millis(1), null) AS at", f"{header} AS h")
    write_batch(kept, batch_id="1", **settings, timestamp="at", headers="h")
    [early] = [one for one in consume(numbers.kafka, numbers.topic) if json.loads(one.value())["id"] == 1]
    assert early.timestamp()[1] == 1
    assert early.headers() == [("h", None)]
    numbers.verify(3)


@before_the_ways_part
def test_a_text_that_is_no_uuid_names_its_column(spark, numbers, write):
    numbers.execute("ALTER TABLE numbers ALTER name TYPE uuid USING null")
    with pytest.raises(SPARKS_ERRORS, match="a value for column 'name' of type uuid is not a UUID: row 1 of partition"):
        write(spark.sql("SELECT 1L AS id, '0f0e' AS name"), **numbers.settings)
    assert numbers.messages() == numbers.rows() == []


@before_the_ways_part
def test_an_unknown_topic_in_a_column_fails_the_task(spark, numbers, write):
    df = spark.sql("SELECT 1L AS id, 'x' AS name, 'no-such-topic' AS t")
    kafka = {**numbers.kafka, "topic.metadata.propagation.max.ms": "200"}  # each attempt waits for the topic so long
    with pytest.raises(SPARKS_ERRORS, match="no-such-topic"):
        write(df, **{**numbers.settings, "kafka": kafka, "topic": None, "topic_column": "t"})
    numbers.verify(0)


@before_the_ways_part
def test_a_null_topic_fails_the_task(spark, numbers, write):
    df = spark.sql("SELECT 1L AS id, 'x' AS name, cast(null AS string) AS t")
    with pytest.raises(SPARKS_ERRORS, match="the topic of a row is null"):
        write(df, **{**numbers.settings, "topic": None, "topic_column": "t"})
    numbers.verify(0)


@before_the_ways_part
def test_a_database_of_another_encoding_keeps_every_letter(spark, kafka, dualwrite_postgres, dualwrite_topic, write):
    from dualwrite.migrations import upgrade

    name = f"latin_{uuid.uuid4().hex[:8]}"
    admin = create_engine(dualwrite_postgres.url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    admin.dispose()
    url = dualwrite_postgres.url_of(name)
    try:
        engine = create_engine(url)
        with engine.connect() as connection:
            upgrade(connection)
        engine.dispose()
        case = SparkCase(kafka, url, dualwrite_topic)
        write(spark.sql("SELECT 1L AS id, 'größer' AS name"), **case.settings)
        assert case.rows() == case.messages() == [(1, "größer")]
    finally:
        dualwrite_postgres.drop_database(name)
