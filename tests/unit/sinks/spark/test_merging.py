"""Which row of a key counts, what a deleted row leaves, and what is refused before anything runs."""

import random
from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark.sql import types as spark

from dualwrite import ConfigurationError
from dualwrite.sinks.spark import SinkOptions, SourceOptions
from dualwrite.sinks.spark.column_types import Table, TableColumn
from dualwrite.sinks.spark.layout import plan_layout
from dualwrite.sinks.spark.merging import DELETED, LEAST, ORDER, Merge, MergeStatements, deleted_rows, staged_arrays
from dualwrite.sinks.spark.writing import produce_batch

SCHEMA = spark.StructType(
    [
        spark.StructField("op", spark.StringType()),
        spark.StructField("at", spark.TimestampType()),
        spark.StructField("id", spark.LongType()),
        spark.StructField("name", spark.StringType()),
    ]
)
SETTINGS = {
    "sink": "s", "kafka": {"bootstrap.servers": "none:1"}, "url": "postgresql+psycopg://db/x", "table": "people",
    "topic": "t", "key": "id",
}  # fmt: skip
UPSERT = {"upsert_keys": ["id"], "columns": ["id", "name"]}
CHANGES = {"op_column": "op", "order_column": "at"}


def column(name, type_name, shown):
    return TableColumn(name=name, type_name=type_name, shown_type=shown, must_be_given=False, generated=False)


PEOPLE = Table(
    "public", "people", {"id": column("id", "int8", "bigint"), "name": column("name", "text", "text")}
)  # fmt: skip
DATED = Table("public", "people", {**PEOPLE.columns, "at": column("at", "timestamptz", "timestamp with time zone")})


def layout(table=PEOPLE, **settings):
    return plan_layout(SCHEMA, SinkOptions(**{**SETTINGS, **UPSERT, **settings}), table)


def batch(plan, *rows):
    """Projected rows of (op, at, id, name)."""
    arrays = []
    for one in plan.projected:
        values = ["{}" if one.source < 0 else row[one.source] for row in rows]
        arrays.append(pa.array([str(value) if one.arrow == pa.string() and value is not None else value
                                for value in values], one.arrow))  # fmt: skip
    return pa.RecordBatch.from_arrays(arrays, schema=plan.arrow_schema)


def name_row(index):
    return f"row {index + 1}"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"upsert_keys": "id"}, "upsert_keys is a string; give a list"),
        ({"upsert_keys": None, "on_conflict": "nothing"}, "on_conflict needs upsert_keys"),
        ({"upsert_keys": None, "order_column": "at"}, "order_column needs upsert_keys"),
        ({"upsert_keys": None, "upsert_columns": ["name"]}, "upsert_columns needs upsert_keys"),
        ({"upsert_keys": None, "op_column": "op"}, "op_column needs upsert_keys"),
        ({"on_conflict": "ignore"}, "on_conflict cannot be 'ignore'.*update, nothing, newer"),
        ({"on_conflict": "newer"}, 'on_conflict="newer" needs order_column'),
        ({"on_conflict": "nothing", "upsert_columns": ["name"]}, "upsert_columns contradict"),
        ({"on_conflict": "nothing", **CHANGES}, "op_column contradict"),
        ({"op_column": "op"}, "op_column needs order_column.*log position, or Kafka's offset"),
        ({"op_values": {"D": "delete"}}, "op_values needs op_column"),
        ({"on_delete": "record"}, "on_delete needs op_column"),
        ({**CHANGES, "on_delete": "nothing"}, "on_delete cannot be 'nothing'"),
        ({**CHANGES, "op_values": {"D": "remove"}}, "maps 'D' to 'remove'.*use upsert or delete"),
        ({**CHANGES, "key": None}, "a tombstone needs a key"),
        ({"upsert_keys": ["number"]}, "upsert_keys names the column 'number', which table 'people' does not have"),
        ({"upsert_columns": ["nam"]}, "upsert_columns names the column 'nam', which table 'people' does not have"),
        (
            {"columns": ["name"], "key": None},
            "upsert_keys names the column 'id' of .*no column of the DataFrame goes into",
        ),
        ({"upsert_keys": ["id", "id"]}, "upsert_keys names the column 'id' twice"),
        ({"upsert_columns": ["name", "name"]}, "upsert_columns names the column 'name' twice"),
        ({**CHANGES, "op_column": "operation"}, "op_column names the column 'operation', which the DataFrame"),
        ({**CHANGES, "op_column": "id"}, "op_column names the column 'id' of type bigint; it must be string"),
        ({"order_column": "name"}, "order_column names the column 'name' of type string; it must be a whole number"),
        ({**CHANGES, "on_conflict": "newer"}, "'at' does not go into table 'people'.*add such a column"),
    ],
)
def test_what_cannot_be_merged_is_refused(settings, says):
    with pytest.raises(ConfigurationError, match=f"(?s){says}"):
        layout(**settings)


def test_columns_of_operation_and_order_go_into_the_table_if_it_has_them():
    plan = layout(columns=None, **CHANGES)
    assert plan.table_column_names == ("id", "name")
    assert [one.name for one in plan.staged_columns] == ["id", "name", ORDER, DELETED]
    plan = layout(DATED, columns=None, **CHANGES, on_conflict="newer")
    assert plan.table_column_names == ("at", "id", "name")
    assert plan.merge.newer_by == "at"
    newer = {"columns": ["at", "id", "name"], "order_column": "at", "on_conflict": "newer"}
    assert layout(DATED, **newer, upsert_columns=["name", "at"]).merge.updated == ("name", "at")
    with pytest.raises(ConfigurationError, match="upsert_columns leaves out the column 'at': .*would look as old"):
        layout(DATED, **newer, upsert_columns=["name"])


def test_a_key_that_the_table_lets_nobody_change_is_not_replaced():
    fixed = {name: replace(one, set_once=True) for name, one in PEOPLE.columns.items()}
    assert layout(replace(PEOPLE, columns={**PEOPLE.columns, "id": fixed["id"]})).merge.updated == ("name",)
    with pytest.raises(ConfigurationError, match="'name' of table 'people' is GENERATED ALWAYS AS IDENTITY.*keeps its"):
        layout(replace(PEOPLE, columns=fixed))


def test_the_options_of_the_data_source_are_the_settings():
    given = {
        "sink": "s", "url": SETTINGS["url"], "dbtable": "people", "topic": "t", "kafka.bootstrap.servers": "none:1",
        "upsertKeys": "id, part", "upsertColumns": '["na,me"]', "onConflict": "newer", "orderColumn": "at",
        "opColumn": "op", "opValues": '{"D": "delete"}', "onDelete": "record",
    }  # fmt: skip
    found = SourceOptions.parse(given).sink
    assert (found.upsert_keys, found.upsert_columns, found.on_conflict) == (["id", "part"], ["na,me"], "newer")
    assert (found.order_column, found.op_column, found.op_values, found.on_delete) == (
        "at",
        "op",
        {"D": "delete"},
        "record",
    )
    for name, text in (("upsertKeys", '{"a": "b"}'), ("opValues", "D=delete"), ("opValues", '{"D": 1}')):
        with pytest.raises(ConfigurationError, match=f"the option {name} (must|is not)"):
            SourceOptions.parse({**given, name: text})


@pytest.mark.parametrize(
    "other", [{"truncate": "true"}, {"upsertKeys": "id", "orderColumn": "at", "opColumn": "op", "keyColumn": "id"}]
)
def test_a_condition_for_replaced_rows_is_refused_with_what_contradicts_it(other):
    given = {
        "sink": "s",
        "url": SETTINGS["url"],
        "dbtable": "people",
        "topic": "t",
        "kafka.bootstrap.servers": "none:1",
    }
    assert SourceOptions.parse({**given, "replaceWhere": "id > 0"}).replace_where == "id > 0"
    with pytest.raises(ConfigurationError, match="replaceWhere and (truncate|opColumn) contradict"):
        SourceOptions.parse({**given, "replaceWhere": "id > 0", **other})


def test_a_row_that_deletes_keeps_its_key_alone_and_a_row_without_an_order_is_the_oldest():
    plan = layout(**CHANGES)
    rows = batch(plan, ("c", 5, 1, "a"), ("d", None, 2, "b"))
    deleted = deleted_rows(plan, rows, name_row)
    assert deleted.to_pylist() == [False, True]
    found = [array.to_pylist() for array in staged_arrays(plan, rows, deleted)]
    assert found == [[1, 2], ["a", None], [5, LEAST], [False, True]]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (("t", 1, 2, "b"), r"operation of a row is 't', and op_values knows c, r, u, d \(row 2\).*opValues"),
        ((None, 1, 2, "b"), r"operation of a row is null.*\(row 2\).*tombstones"),
        (("d", 1, None, "b"), r"column 'id' of upsert_keys is null \(row 2\)"),
    ],
)
def test_a_row_without_a_known_operation_or_a_key_is_refused_by_name(row, says):
    plan = layout(**CHANGES)
    with pytest.raises(ConfigurationError, match=says):
        deleted_rows(plan, batch(plan, ("c", 1, 1, "a"), row), name_row)


class Sent:
    """Takes messages in each form in which a transaction does."""

    def __init__(self):
        self.values = []

    def produce_arrow(self, _topic, values, *_more, **_others):
        self.values += values.to_pylist()

    def produce(self, _topic, value, *_more, **_others):
        self.values.append(value)


@pytest.mark.parametrize("topics", [{}, {"topic": None, "topic_column": "op"}])
@pytest.mark.parametrize(("on_delete", "left"), [("tombstone", None), ("record", "{}")])
def test_the_message_of_a_deleted_row_is_a_tombstone_or_its_record(topics, on_delete, left):
    plan, sent = layout(**CHANGES, **topics, on_delete=on_delete), Sent()
    rows = batch(plan, ("c", 1, 1, "a"), ("d", 2, 1, "a"))
    produce_batch(sent, rows, plan, None if topics else "t", None, deleted=deleted_rows(plan, rows, name_row))
    assert [value if value is None or isinstance(value, str) else value.decode() for value in sent.values] == [
        "{}",
        left,
    ]


def test_a_record_tells_that_its_row_is_deleted():
    assert [name for _, name in layout(**CHANGES, on_delete="record").json_columns] == ["id", "name", "op"]
    assert [name for _, name in layout(**CHANGES).json_columns] == ["id", "name"]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("newer_by", [None, "at"])
def test_the_newest_row_of_each_key_decides_about_the_table(sqlite, seed, newer_by):
    """The statements with ``ON CONFLICT``, in SQLite; that PostgreSQL and MariaDB do the same, their own test shows."""
    chance = random.Random(seed)
    parts = [[(chance.randrange(5), number, chance.randrange(9), chance.random() < 0.4) for number in range(part, 30, 3)]
             for part in range(3)]  # fmt: skip
    expected = {key: (key, -1, 7) for key in range(3)}  # often the time of the newest row, too
    newest = {row[0]: row for row in sorted((row for part in parts for row in part), key=lambda row: row[2])}
    for key, name, at, deleted in newest.values():
        if newer_by is not None and key in expected and at <= expected[key][2]:
            continue
        expected.pop(key, None)
        if not deleted:
            expected[key] = (key, name, at)

    sqlite.execute("CREATE TABLE target (id PRIMARY KEY, name, at)")
    sqlite.executemany("INSERT INTO target VALUES (?, ?, ?)", [(key, -1, 7) for key in range(3)])
    for number, rows in enumerate(parts):
        sqlite.execute(f"CREATE TABLE s{number} (id, name, at, {ORDER}, {DELETED})")
        given = [(key, name, at, at, deleted) for key, name, at, deleted in rows]
        sqlite.executemany(f"INSERT INTO s{number} VALUES (?, ?, ?, ?, ?)", given)
    merge = Merge(("id",), ("name", "at"), newer_by, order=0, op=0)
    columns, staged = ("id", "name", "at"), ["s0", "s1", "s2"]
    statements = MergeStatements(merge, columns, "target", staged, quote='"{}"'.format, place="rowid")
    gone = [row[0] for row in newest.values() if row[3]]
    assert sqlite.execute(statements.newest_count()).fetchone() == (len(newest) - len(gone),)
    # SQLite has no DELETE ... USING.
    deleting = (
        statements.delete_using().partition(" USING ")[2].replace(" WHERE newest", ", target AS present WHERE newest")
    )
    sqlite.execute(f"DELETE FROM target WHERE id IN (SELECT present.id FROM {deleting})")
    sqlite.execute(statements.insert_or_update())
    assert sorted(sqlite.execute("SELECT * FROM target")) == sorted(expected.values())
