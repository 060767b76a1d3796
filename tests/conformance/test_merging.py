"""On both databases a table takes what is expected of rows that meet others of the same key: in each way, without Spark."""

import random
from contextlib import contextmanager

import pyarrow as pa
import pytest
from pyspark.sql import types as spark

from dualwrite import ConfigurationError, TransactionAborted
from dualwrite.sinks.spark import SinkOptions
from dualwrite.sinks.spark.databases.database import Emptying, Staged, StagingTable, open_database
from dualwrite.sinks.spark.digests import RowNames
from dualwrite.sinks.spark.layout import plan_layout
from dualwrite.sinks.spark.merging import deleted_rows

SCHEMA = spark.StructType(
    [
        spark.StructField("op", spark.StringType()),
        spark.StructField("at", spark.LongType()),
        spark.StructField("id", spark.LongType()),
        spark.StructField("name", spark.StringType()),
        spark.StructField("note", spark.StringType()),
    ]
)
OLD = [(1, "old", "old 1", 50), (2, "old", "old 2", 50), (3, "old", "old 3", None)]
WAYS = ["direct", "prepared", "staging"]
KINDS = [
    *(pytest.param(("postgresql", way), id=f"postgresql-{way}") for way in WAYS),
    *(pytest.param(("mariadb", way), id=f"mariadb-{way}", marks=pytest.mark.mariadb) for way in ("direct", "staging")),
]
COLUMNS = ["id", "name", "note", "at"]
CHANGES = {"order_column": "at", "op_column": "op", "on_delete": "record"}


@pytest.fixture
def case(request):
    kind, way = request.param
    url = request.getfixturevalue("migrated_mariadb" if kind == "mariadb" else "migrated_database")
    made = Case(url, way)
    yield made
    made.database.engine.dispose()


class Case:
    """One table, and one way into it."""

    def __init__(self, url, way):
        self.way = way
        self._settings = {
            "sink": "s",
            "kafka": {"bootstrap.servers": "none:1"},
            "url": url,
            "topic": "t",
            "table": "merged",
        }
        self.database = open_database(SinkOptions(**self._settings))
        self.execute(
            "CREATE TABLE merged (id bigint PRIMARY KEY, name varchar(99) NOT NULL, note varchar(99), at bigint, "
            "UNIQUE (name, note))"
        )
        for row in OLD:
            self.execute("INSERT INTO merged VALUES ({}, '{}', '{}', {})".format(*row[:3], row[3] or "NULL"))

    def execute(self, statement):
        with self.database.engine.begin() as connection:
            found = connection.exec_driver_sql(statement)
            return [tuple(row) for row in found] if found.returns_rows else []

    def rows(self):
        return self.execute("SELECT id, name, note, at FROM merged ORDER BY id")

    def layout(self, **settings):
        options = SinkOptions(**self._settings, **{"upsert_keys": ["id"], **settings})
        with self.database.engine.connect() as connection:
            layout = plan_layout(SCHEMA, options, self.database.read_table(connection, "merged"))
        with self.database.engine.connect() as connection:
            self.database.require_replaceable(connection, layout, empty=None, direct=self.way == "direct")
        return layout

    def write(self, parts, empty=None, **settings):
        """Write rows of (op, at, id, name, note), a list for each partition; only "staging" decides on all at once."""
        layout = self.layout(**settings)
        staged = []
        for partition, rows in enumerate(parts):
            with self._writing(layout, partition, len(rows), staged) as (connection, table):
                names = RowNames(partition, layout)
                into = (
                    self.database.writing(connection, layout, table, names)
                    if self.way == "staging"
                    else self.database.merging(connection, layout, names, prepared=self.way == "prepared")
                )
                with into as writer:
                    for row in rows:
                        batch = self._batch(layout, row)
                        names.add(batch)
                        writer.write(batch, deleted_rows(layout, batch, names.in_batch))
        if self.way == "staging":
            with self.database.engine.begin() as connection:
                if empty is not None:
                    self.database.require_replaceable(connection, layout, empty=empty, direct=False)
                    self.database.empty(connection, layout.table, empty)
                    self.database.require_within(connection, staged, layout, empty)
                self.database.take_over(connection, staged, layout)
            self.database.drop_staging([part.table for part in staged])

    @contextmanager
    def _writing(self, layout, partition, rows, staged):
        with self.database.engine.connect() as connection:
            connection.begin()  # as a dual write does: rows go to the driver below SQLAlchemy
            made = StagingTable(layout.table[0], f"dualwrite_staging_{partition}", "slot", 1, "owner")
            if self.way == "staging":
                self.database.drop_staging([made])  # of a test that failed
                self.database.create_staging(connection, made, layout)
                staged.append(Staged(made, rows, partition))
            yield connection, made.table
            if self.way == "prepared":
                connection.exec_driver_sql("PREPARE TRANSACTION 'merged'")
                connection.rollback()
            else:
                connection.commit()
        if self.way == "prepared":
            with self.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("COMMIT PREPARED 'merged'")

    @staticmethod
    def _batch(layout, row):
        values = [("{}" if one.source < 0 else row[one.source]) for one in layout.projected]
        found = [
            pa.array([value if value is None or one.arrow != pa.string() else str(value)], one.arrow)
            for one, value in zip(layout.projected, values, strict=True)
        ]
        return pa.RecordBatch.from_arrays(found, schema=layout.arrow_schema)


def expected(before, parts, *, newer=False, nothing=False, updated=("name", "note", "at")):
    """The table after the rows, in a few lines of Python."""
    table = {row[0]: row for row in before}
    rows = [row for part in parts for row in part]
    # Stable: of rows with the same order the last counts.
    for op, at, key, name, note in {row[2]: row for row in sorted(rows, key=lambda row: row[1])}.values():
        present = table.get(key)
        if present is not None and (nothing or (newer and present[3] is not None and at <= present[3])):
            continue
        if op == "d":
            table.pop(key, None)
            continue
        row = {"id": key, "name": name, "note": note, "at": at}
        if present is not None:
            kept = dict(zip(row, present, strict=True))
            row = {column: value if column in updated else kept[column] for column, value in row.items()} | {"id": key}
        table[key] = tuple(row.values())
    return [table[key] for key in sorted(table)]


def history(seed, ops="crud", keys=6, length=60):
    """Changes of a few keys, in disorder and with equal times; a deleted row has its key alone, as Debezium has it."""
    chance = random.Random(seed)
    rows = []
    for number in range(length):
        op, key, at = chance.choice(ops), chance.randrange(keys), chance.randrange(100)
        rows.append((op, at, key, None, None) if op == "d" else (op, at, key, f"name {key}", f"{number} 100% 'q' \\"))
    return rows


def keys(rows):
    return {row[0] for row in rows}


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_the_table_is_what_its_changes_make_of_it(case):
    parts = [history(7), history(8), history(9)] if case.way == "staging" else [history(7)]
    case.write(parts, **CHANGES)
    first = case.rows()
    assert first == expected(OLD, parts)
    case.write([history(11)], **CHANGES, on_conflict="newer")
    second = case.rows()
    assert second == expected(first, [history(11)], newer=True)
    assert all(keys(before) - keys(after) for before, after in ((OLD, first), (first, second))), "none is deleted"


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_a_row_meets_one_of_its_key_as_it_is_told(case):
    for settings, means in (
        ({"on_conflict": "nothing"}, {"nothing": True}),
        ({"on_conflict": "newer"}, {"newer": True}),
        ({"upsert_columns": ["note"]}, {"updated": {"note"}}),
        ({}, {}),
    ):
        rows, before = history(f"{settings}", "c", keys=9, length=20), case.rows()
        case.write([rows], order_column="at", columns=COLUMNS, **settings)
        assert case.rows() == expected(before, [rows], **means), settings


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_without_an_order_a_key_twice_is_refused_by_name(case):
    once = [("c", 1, 1, "new", "a"), ("c", 2, 7, "new", "b"), ("c", 3, 8, "new", "c")]
    twice = [*once, ("c", 4, 7, "new", "d")]
    for settings in ({}, {"on_conflict": "nothing"}):
        with pytest.raises(TransactionAborted, match="cannot take the rows: a key occurs twice in them, '7'") as caught:
            case.write([twice[:2], twice[2:]] if case.way == "staging" else [twice], columns=COLUMNS, **settings)
        assert "order_column" in caught.value.next_step
        assert not caught.value.retryable
        assert case.rows() == OLD
    case.write([once], columns=COLUMNS, on_conflict="nothing")
    assert case.rows() == expected(OLD, [once], nothing=True)
    case.write([once[::-1]], columns=COLUMNS)
    assert case.rows() == expected(OLD, [once])


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_a_row_may_take_the_unique_value_of_one_that_is_deleted_with_it(case):
    case.write([[("c", 1, 9, "old", "old 9"), ("d", 2, 9, None, None), ("u", 3, 8, "old", "old 9")]], **CHANGES)
    case.write([[("c", 5, 7, "old", "old 9"), ("d", 4, 8, None, None)]], **CHANGES)
    assert case.rows()[len(OLD) :] == [(7, "old", "old 9", 5)]


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_rows_that_do_not_fit_are_refused_by_name_and_a_table_without_the_key_before(case):
    for row, says in (
        (
            ("t", 1, 7, "n", "n"),
            r"operation of a row is 't', and op_values knows c, r, u, d \(row 3 of partition 0, key '7'\)",
        ),
        ((None, 1, 7, "n", "n"), r"operation of a row is null, .*\(row 3 of partition 0, key '7'\)"),
        (("d", 1, None, "n", "n"), r"column 'id' of upsert_keys is null \(row 3 of partition 0"),
        (("c", 1, 6, None, "m"), r"(?s)name.*row 3 of partition 0, key '6'"),
    ):
        with pytest.raises((ConfigurationError, TransactionAborted), match=says) as caught:
            case.write([[("d", 1, 1, None, None), ("c", 1, 5, "n", "m"), row]], key="id", **CHANGES)
        assert not getattr(caught.value, "retryable", False)
        assert case.rows() == OLD
    case.execute("DROP TABLE merged")
    case.execute("CREATE TABLE merged (id bigint, name varchar(99), note varchar(99), at bigint)")
    with pytest.raises(ConfigurationError, match="'merged' has no unique key of just the columns id"):
        case.layout(**CHANGES)


@pytest.mark.parametrize("case", [kind for kind in KINDS if "staging" in kind.id], indirect=True)
def test_only_the_rows_of_a_condition_are_replaced_and_only_by_such_rows(case):
    case.execute("INSERT INTO merged VALUES (9, '100%%', 'old', 60)")
    settings = {"upsert_keys": None, "columns": COLUMNS, "key": "id"}
    old, rows = case.rows(), [("c", 55, 7, "new", "a"), ("c", 56, 1, "new", "b")]
    for where, row, says in (
        (
            "at > 40 AND name NOT LIKE '%\\%'",
            ("c", 30, 8, "new", "c"),
            "not true for a row .*row 1 of partition 1, key '8'",
        ),
        ("at > 40", ("c", None, 8, "new", "c"), "not true for a row .*row 1 of partition 1, key '8'"),
        ("at > ", rows[0], "replaceWhere is not a condition"),
        ("moment > 40", rows[0], "replaceWhere is not a condition on the columns that are written.*moment"),
    ):
        with pytest.raises((ConfigurationError, TransactionAborted), match=says):
            case.write([rows, [row]], Emptying(where=where), **settings)
        assert case.rows() == old
    case.write([rows[:1], rows[1:]], Emptying(where="at BETWEEN 50 AND 59 -- a comment"), **settings)
    assert case.rows() == [(1, "new", "b", 56), (3, "old", "old 3", None), (7, "new", "a", 55), old[-1]]
