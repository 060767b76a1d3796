"""Types of PostgreSQL that no type of Spark is like, and arrays of them: in every way of writing, and with their errors."""

import json

import pytest
from harness.spark import SPARKS_ERRORS
from harness.spark_source import WAYS, options_of, write_by

from dualwrite.sinks.spark import foreach_batch, register, write_many
from dualwrite.testing.checker import read_committed

pytestmark = [pytest.mark.spark, pytest.mark.slow]

LEAST_WAYS = ["write_batch", pytest.param("foreach_partition", marks=pytest.mark.thorough), "staging", "prepared"]
UUID = "0f0e0d0c-0b0a-0908-0706-050403020100"

# DataFrame expression, PostgreSQL type, the same value as SQL of PostgreSQL's.
VALUES = [
    ("'10.0.0.1/8'", "inet", "'10.0.0.1/8'"),
    ("'10.0.0.1'", "address", "'10.0.0.1'"),
    ("'[1,5)'", "int4range", "int4range(1, 5)"),
    ("'(1,2)'", "point", "point(1, 2)"),
    ("'1011'", "bit(4)", "B'1011'"),
    ("'12:00:00+02'", "timetz", "'12:00:00+02'"),
    ("'a\\tb c\\nd'", "tsvector", "E'a\\tb c\\nd'"),
    ("'(1,\"x y\")'", "pair", "ROW(1, 'x y')"),
    ("array('10.0.0.1', null)", "inet[]", "ARRAY['10.0.0.1', NULL]"),
    ("array('[1,5)', 'empty')", "int4range[]", "ARRAY[int4range(1, 5), 'empty']"),
    (f"array('{UUID}')", "uuid[]", f"ARRAY['{UUID}']"),
    ("array('a,\"b\\\\c', '', null, 'NULL')", "varchar(9)[]", "ARRAY['a,\"b\\c', '', NULL, 'NULL']"),
    ("array('sad', null)", "mood[]", "ARRAY['sad', NULL]"),
    ('array(\'{"a": "b"}\')', "jsonb[]", 'ARRAY[\'{"a": "b"}\']'),
    ("array(timestamp'2013-11-03 05:30:00 UTC', null)", "timestamptz[]", "ARRAY['2013-11-03 05:30:00+00', NULL]"),
    ("array(cast(1 as int), null)", "bigint[]", "ARRAY[1, NULL]"),
    ("array(array(1, 2), array(3, null))", "int[]", "ARRAY[[1, 2], [3, NULL]]"),
    ("array(array(array(1.5D)))", "float8[]", "ARRAY[[[1.5]]]"),
    ("array(array(x'00ff'), array(x''))", "bytea[]", "ARRAY[['\\x00ff'::bytea], ['']]"),
    ("array(array(date'0001-01-01'))", "date[]", "ARRAY[['0001-01-01'::date]]"),
    ("cast(array() as array<string>)", "cidr[]", "ARRAY[]::cidr[]"),
]
WITH_EXTENSIONS = {
    "vector": [
        ("array(cast(1.5 as float), cast(-1e20 as float))", "vector(2)", "'[1.5,-1e20]'"),
        ("'[1,2]'", "vector", "'[1,2]'"),
        ("array('[1,2]', null)", "vector[]", "ARRAY['[1,2]', NULL]"),
    ],
    "hstore": [
        ("map('k\"', 'v\\\\', 'n', null)", "hstore", "hstore(ARRAY['k\"', 'n'], ARRAY['v\\', NULL])"),
        ("'a=>1'", "hstore", "hstore('a', '1')"),
        ("array(map('k', 'v'))", "hstore[]", "ARRAY[hstore('k', 'v')]"),
    ],
}


@pytest.fixture
def types(numbers):
    """The types, in the numbers' database, and the values that its server has types for."""
    numbers.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    numbers.execute("CREATE DOMAIN address AS inet")
    numbers.execute("CREATE TYPE pair AS (n int, name text)")
    values = list(VALUES)
    for extension, more in WITH_EXTENSIONS.items():
        if numbers.execute(f"SELECT 1 FROM pg_available_extensions WHERE name = '{extension}'"):
            numbers.execute(f"CREATE EXTENSION {extension}")
            values += more
    return values


def declared(values):
    return ", ".join(f"c{number} {kind}" for number, (_, kind, _) in enumerate(values))


def rows_of(spark, values):
    """A row of the values, and one of nulls."""
    names = [f"c{number}" for number in range(len(values))]
    selected = ", ".join(f"{one} AS {name}" for name, (one, _, _) in zip(names, values, strict=True))
    full = spark.sql(f"SELECT 0L AS id, 'row 0' AS name, {selected}")
    nulls = full.selectExpr("1L AS id", "'row 1' AS name", *(f"if(id = 1, {name}, null) AS {name}" for name in names))
    return full.union(nulls).coalesce(1)


def verify(case, values, table="everything"):
    """Both rows are there, as PostgreSQL itself would have them, and have their messages."""
    names = [f"c{number}" for number in range(len(values))]
    same = ", ".join(
        f"{name}::text = CAST({answer} AS {kind})::text" for name, (_, kind, answer) in zip(names, values, strict=True)
    )
    [answers] = case.execute(f"SELECT {same} FROM {table} WHERE id = 0".replace(":", "\\:"))
    wrong = [one for one, is_same in zip(values, answers, strict=True) if not is_same]
    assert not wrong, case.execute(f"SELECT * FROM {table} WHERE id = 0")
    assert set(case.execute(f"SELECT {', '.join(names)} FROM {table} WHERE id = 1")[0]) == {None}
    assert case.execute(f"SELECT count(*) FROM {table}") == [(2,)]
    messages = [json.loads(one.value) for one in read_committed(case.kafka, case.topic)]
    assert sorted(one["id"] for one in messages) == [0, 1]
    [full] = [one for one in messages if one["id"] == 0]
    assert full["c0"] == "10.0.0.1/8"
    assert full["c16"] == [[1, 2], [3, None]]


@pytest.mark.parametrize("way", WAYS)
def test_they_arrive_in_every_way_of_writing(spark, numbers, types, way):
    numbers.execute(f"CREATE TABLE everything (id bigint, name text, {declared(types)})")
    write_by(numbers, rows_of(spark, types), way, table="everything")
    verify(numbers, types)


@pytest.mark.parametrize("way", LEAST_WAYS)
def test_upserts_replace_and_delete_them_by_such_a_key(spark, numbers, types, way):
    numbers.execute(f"CREATE TABLE everything (id bigint, name text, {declared(types)}, PRIMARY KEY (c0))")
    numbers.execute(
        "INSERT INTO everything (id, c0, c16) VALUES (7, '10.0.0.1/8', '{{1}}'), (8, '10.0.0.2', NULL), (9, '10.0.0.3', NULL)"
    )
    keys = spark.sql("SELECT explode(array('10.0.0.1/8', '10.0.0.2')) AS c0")
    [row] = [one for one in rows_of(spark, types).drop("c0").collect() if one.id == 0]
    full = spark.createDataFrame([row], rows_of(spark, types).drop("c0").schema)
    df = keys.crossJoin(full).selectExpr(
        "*", "if(c0 = '10.0.0.2', 'd', 'u') AS op", "1L AS version"
    ).coalesce(1)  # fmt: skip
    more = {"upsert_keys": ["c0"], "op_column": "op", "order_column": "version", "key": "c0"}
    write_by(numbers, df, way, table="everything", **more)
    found = numbers.execute("SELECT id, host(c0), c16 FROM everything ORDER BY c0")
    assert found == [(0, "10.0.0.1", [[1, 2], [3, None]]), (9, "10.0.0.3", None)]


def test_several_tables_in_one_batch(spark, numbers, types):
    numbers.execute(f"CREATE TABLE everything (id bigint, name text, {declared(types)})")
    plain = spark.sql("SELECT 5L AS id, 'plain' AS name")
    common = {name: value for name, value in numbers.settings.items() if name not in {"table", "topic"}}
    write_many(
        [
            (rows_of(spark, types), {"table": "everything", "topic": numbers.topic}),
            (plain, {"table": "numbers", "topic": numbers.topic, "value": "name", "columns": ["id", "name"]}),
        ],
        batch_id="1",
        **common,
    )
    assert numbers.execute("SELECT id FROM everything ORDER BY id") == [(0,), (1,)]
    assert numbers.rows() == [(5, "plain")]


@pytest.mark.parametrize("way", ["foreach_batch", "staging", pytest.param("prepared", marks=pytest.mark.thorough)])
def test_streams_write_them(spark, numbers, types, tmp_path, way):
    numbers.execute(f"CREATE TABLE everything (id bigint, name text, {declared(types)})")
    df = rows_of(spark, types)
    df.write.parquet(str(tmp_path / "source"))
    stream = spark.readStream.schema(df.schema).parquet(str(tmp_path / "source")).writeStream
    settings = {**numbers.settings, "table": "everything"}
    if way == "foreach_batch":
        stream = stream.foreachBatch(foreach_batch(**settings))
    else:
        register(spark)
        stream = stream.format("dualwrite").options(**options_of(settings), databaseLeg=way)
    checkpoint = str(tmp_path / "checkpoint")
    stream.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
    verify(numbers, types)


BAD = [
    ("inet", "'10.0.0'", "invalid input syntax for type inet"),
    ("address", "'10.0.0'", "invalid input syntax for type inet"),
    ("int4range", "'[5,1)'", "range lower bound must be less"),
    ("int[]", "array(array(1), array(2, 3))", "multidimensional arrays must have|malformed array literal"),
    ("int[]", "array(array(1), cast(null as array<int>))", "an array in it is null or empty"),
    ("varchar(3)[]", "array('abc ')", "it has more than 3 characters"),
    ("uuid[]", "array('0f0e')", "invalid input syntax for type uuid"),
    ("vector(3)", "array(cast(1 as float))", "expected 3 dimensions, not 1"),
]


@pytest.mark.parametrize("way", LEAST_WAYS)
def test_a_value_that_the_type_does_not_take_names_row_column_and_type(spark, numbers, types, way):
    for kind, value, says in BAD:
        if kind.startswith("vector") and not any(one[1] == "vector" for one in types):
            continue
        numbers.execute(f"ALTER TABLE numbers DROP name, ADD name {kind}")
        df = spark.sql(f"SELECT id, if(id = 2, {value}, null) AS name FROM range(0, 4, 1, 1)")
        with pytest.raises(SPARKS_ERRORS) as failure:
            write_by(numbers, df, way, batch_id=kind)
        shown = kind.replace("int[]", "integer[]").replace("varchar(3)", "character varying(3)")
        text = str(failure.value)
        assert f"column 'name' of type {shown}" in text, text
        assert "row 3 of partition 0, key '2'" in text, text
        assert any(one in text for one in says.split("|")), text
    assert numbers.execute("SELECT id FROM numbers") == []
    assert list(read_committed(numbers.kafka, numbers.topic)) == []


@pytest.mark.parametrize("way", LEAST_WAYS)
def test_a_quarantine_takes_the_rows_that_the_type_does_not_take(spark, numbers, types, way):
    numbers.execute("ALTER TABLE numbers DROP name, ADD name inet CHECK (family(name) = 4), ADD places int[]")
    numbers.execute("CREATE TABLE aside (reason text, row text, row_number bigint)")
    name = "CASE id WHEN 2 THEN 'no address' WHEN 4 THEN '::1' ELSE concat('10.0.0.', id) END"
    places = "if(id = 6, array(array(1), array(2, 3)), array(array(cast(id AS int))))"
    df = spark.sql(f"SELECT id, {name} AS name, {places} AS places FROM range(0, 8, 1, 1)")
    write_by(numbers, df, way, quarantine_table="aside")
    assert numbers.execute("SELECT id, host(name) FROM numbers ORDER BY id") == [
        (number, f"10.0.0.{number}") for number in (0, 1, 3, 5, 7)
    ]
    first, second, third = numbers.execute("SELECT row_number, reason FROM aside ORDER BY row_number")
    assert first == (3, "column 'name' of type inet: invalid input syntax for type inet: \"no address\"")
    assert (second[0], "violates check constraint" in second[1]) == (5, True)
    assert (third[0], third[1].startswith("column 'places' of type integer[]: ")) == (7, True)
