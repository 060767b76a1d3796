"""Tables of the version before and after the program's own: a program of either side works while the other's come or go."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from harness.databases import CLUSTER, prepared
from harness.expanding import LATER, expand_further
from sqlalchemy import Connection, Engine, create_engine, inspect, text

import dualwrite.migrations
from dualwrite import migrations
from dualwrite.errors import ConfigurationError
from dualwrite.protocol.batches import Destination, Way
from dualwrite.protocol.values import Decision, Outcome
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.stores.sql.ledger import Ledger, Runs, read_batch, read_batches, unfinished_batches
from dualwrite.stores.sql.short_transactions import SCHEMA_REVISION, check_schema
from dualwrite.stores.sql.tables import SINCE, VERSION_TABLE, declare_tables

REVISIONS = [
    script.revision
    for script in reversed(list(ScriptDirectory(Path(dualwrite.migrations.__file__).parent).walk_revisions()))
]
BEFORE = REVISIONS[-2]


@pytest.fixture(
    params=[
        pytest.param("postgresql", marks=pytest.mark.postgresql),
        pytest.param("mariadb", marks=[pytest.mark.mariadb, pytest.mark.thorough]),
        "sqlite",
    ]
)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    if request.param == "postgresql":
        made = create_engine(request.getfixturevalue("dualwrite_database"))
    elif request.param == "mariadb":
        made = create_engine(request.getfixturevalue("dualwrite_mariadb").create_database())
    else:
        made = create_engine(f"sqlite:///{tmp_path / 'test.db'}")
    yield made
    made.dispose()


def migrate(engine: Engine, revision: str = "head") -> None:
    with engine.connect() as connection:
        migrations.upgrade(connection, revision)


def described(connection: Connection) -> Mapping[str, Mapping[str, Any]]:
    """By table, each column with its type and whether it must be given, and each rule."""
    found = inspect(connection)
    return {
        name: {
            **{column["name"]: (str(column["type"]), column["nullable"]) for column in found.get_columns(name)},
            **{f"default of {column['name']}": column["default"] for column in found.get_columns(name)},
            "rules": sorted(
                map(
                    str,
                    [
                        *found.get_check_constraints(name),
                        *found.get_unique_constraints(name),
                        found.get_pk_constraint(name),
                    ],
                )
            ),
        }
        for name in {*found.get_table_names(), *found.get_view_names()} - {VERSION_TABLE}
    }


def not_only_added(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The changes that a program which knows only the tables before may notice."""
    changed = [
        f"{table}.{name}"
        for table, columns in before.items()
        for name, one in columns.items()
        if after.get(table, {}).get(name) != one
    ]
    required = [
        f"{table}.{name}"
        for table, columns in after.items()
        for name, one in columns.items()
        if table in before and name not in before[table] and isinstance(one, tuple) and not one[1]
        if columns[f"default of {name}"] is None
    ]
    return changed + required


@pytest.mark.parametrize(("former", "revision"), list(itertools.pairwise(REVISIONS)))
def test_a_migration_that_is_not_called_a_contraction_only_adds(engine: Engine, former: str, revision: str) -> None:
    migrate(engine, former)
    with engine.connect() as connection:
        before = described(connection)
    migrate(engine, revision)
    with engine.connect() as connection:
        after = described(connection)
    assert (not_only_added(before, after) != []) == revision.endswith("_contract")


def test_what_a_program_would_notice_is_found() -> None:
    before: Any = {"t": {"a": ("TEXT", True), "default of a": None, "rules": []}}
    gone: Any = {"t": {"rules": []}}
    stricter: Any = {"t": {"a": ("TEXT", False), "default of a": None, "rules": []}}
    ruled: Any = {"t": {**before["t"], "rules": ["CHECK (a > 0)"]}}
    required: Any = {"t": {**before["t"], "b": ("TEXT", False), "default of b": None}}
    assert not_only_added(before, gone) == ["t.a"]
    assert not_only_added(before, {}) == ["t.a", "t.rules"]
    assert not_only_added(before, stricter) == ["t.a"]
    assert not_only_added(before, ruled) == ["t.rules"]
    assert not_only_added(before, required) == ["t.b"]
    may_be_left_out: Any = {
        "t": {**before["t"], "b": ("TEXT", True), "default of b": None, "c": ("TEXT", False), "default of c": "''"},
        "u": {"a": ("TEXT", False), "default of a": None, "rules": []},
    }
    assert not_only_added(before, may_be_left_out) == []


def test_what_the_newest_migration_adds_and_nothing_else_is_declared_so(engine: Engine) -> None:
    migrate(engine, BEFORE)
    declared = declare_tables().metadata.tables
    with engine.connect() as connection:
        there = described(connection)
    missing = {name for name in declared if name not in there} | {
        str(column)
        for name, table in declared.items()
        for column in table.c
        if column.name not in there.get(name, table.c)
    }
    marked = {name for name, table in declared.items() if SINCE in table.info} | {
        str(column) for table in declared.values() for column in table.c if SINCE in column.info
    }
    assert missing == marked
    assert {table.info[SINCE] for table in declared.values() if SINCE in table.info} <= {SCHEMA_REVISION}


def works(engine: Engine) -> None:
    """All that writers, settlers and commands do with the tables, except for what the newest migration brings."""
    database = SqlDatabase(engine)
    database.check()
    store = database.store()
    (row,) = store.claim(["orders"], owner="a test", cluster_id=CLUSTER)
    state = prepared(row.incarnation)
    with engine.connect() as connection:
        store.begin(connection)
        assert store.read_incarnation(connection, "orders", known=row) == row.incarnation
        assert store.decide(connection, Decision("orders", row.incarnation, state))[0]
        store.commit(connection)
    (row,) = store.read(["orders"])
    assert row.prepared == state
    store.record_outcomes([(row, Outcome.LOST, "a test")])
    store.mark_settled({"orders": row.incarnation})
    assert [incident.outcome for incident in store.incidents()] == [Outcome.LOST]
    store.note_reported([("orders", state)])
    assert store.acknowledge("orders", state)
    assert [one.transactional_id for one in store.find("ord")] == ["orders"]
    assert database.living(["orders"]) == set()
    assert list(database.lease_list(None, "")) == []


def written_batch(engine: Engine, batch_id: str) -> tuple[int, int | None, str | None]:
    """What the ledger shows of a batch that a sink writes into these tables: rows, bytes, sources."""
    ledger = Ledger(revision=check_schema(engine).revision)
    Runs(engine).present("sink", batch_id)
    with engine.begin() as connection:
        ledger.begin(connection, "sink", batch_id, Destination(Way.PARTITIONS, "t", "t", CLUSTER), sources="[]")
        assert ledger.insert(
            connection, "sink", batch_id, 0, row_count=7, message_count=7, partition_count=1, byte_count=70
        )
    assert batch_id in [one.batch.batch_id for one in unfinished_batches(engine)]
    (found,) = read_batch(engine, batch_id)
    assert found in read_batches(engine)
    return found.row_count, found.byte_count, found.sources


def test_a_program_works_on_the_tables_before_its_own(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    migrate(engine, BEFORE)
    with caplog.at_level(logging.WARNING):
        works(engine)
    assert any(
        f"of version {BEFORE}; this library, of version {SCHEMA_REVISION}, works" in one for one in caplog.messages
    )
    assert written_batch(engine, "before") == (7, None, None)
    migrate(engine)
    SqlDatabase(engine).check()
    assert written_batch(engine, "after") == (7, 70, "[]")


def test_a_program_works_on_the_next_tables_that_only_add_and_its_migration_lets_them_be(engine: Engine) -> None:
    migrate(engine)
    with engine.connect() as connection:
        before = described(connection)
        expand_further(connection)
        assert not_only_added(before, described(connection)) == []
    works(engine)
    migrate(engine)
    assert check_schema(engine).revision == LATER
    database = SqlDatabase(engine)
    assert database.leases("fleet").take("a test", 60) == "fleet-0"
    database.forgetting().forget(database.store().find(""))
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="newer"):
        migrations.upgrade(connection, SCHEMA_REVISION)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '{LATER}_contract'"))
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="newer"):
        migrations.upgrade(connection)
