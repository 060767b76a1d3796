"""Migrations on MariaDB, which commits each of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from harness.databases import Thread
from harness.expanding import without_counting
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text

from dualwrite import migrations
from dualwrite.stores.sql.short_transactions import SCHEMA_REVISION, check_schema
from dualwrite.stores.sql.tables import OWN_TABLES, VERSION_TABLE, declare_tables
from dualwrite.testing import EmbeddedMariaDB


@pytest.fixture
def engine(dualwrite_mariadb: EmbeddedMariaDB) -> Iterator[Engine]:
    made = create_engine(dualwrite_mariadb.create_database())
    yield made
    made.dispose()
    dualwrite_mariadb.drop_database(made.url.database or "")


def differences(connection: Connection) -> Any:
    options = {"compare_server_default": True, "include_name": migrations.include_own_name}
    context = MigrationContext.configure(connection, opts=options)
    return without_counting(context, compare_metadata(context, declare_tables().metadata))


class _Interrupted(Exception):
    """Stands for a process that is killed."""


def test_an_upgrade_that_is_interrupted_again_and_again_goes_on_where_it_was(engine: Engine) -> None:
    changes = 0

    def interrupt(_: Connection, __: object, statement: str, *___: object) -> None:
        nonlocal changes
        if statement.split(maxsplit=1)[0] in {"CREATE", "ALTER"}:
            changes += 1
            if changes % 4 == 0:
                raise _Interrupted

    event.listen(engine, "before_cursor_execute", interrupt)
    interrupted = 0
    while True:
        with engine.connect() as connection:
            try:
                migrations.upgrade(connection)
                break
            except _Interrupted:
                interrupted += 1
    assert interrupted > 4
    event.remove(engine, "before_cursor_execute", interrupt)
    check_schema(engine)
    with engine.connect() as connection:
        assert set(inspect(connection).get_table_names()) == OWN_TABLES
        assert differences(connection) == []
        made = connection.execute(
            text(
                "SELECT DISTINCT engine FROM information_schema.tables "
                "WHERE table_schema = database() AND table_type = 'BASE TABLE' AND table_name <> :version"
            ),
            {"version": VERSION_TABLE},
        ).scalars()
        assert list(made) == ["InnoDB"]
        connection.rollback()
        migrations.downgrade(connection, "base")
        assert inspect(connection).get_table_names() == [VERSION_TABLE]


@pytest.mark.parametrize("after", [3, 8, 17, 22, 33])
def test_after_an_interrupted_downgrade_an_upgrade_makes_all_tables(engine: Engine, after: int) -> None:
    with engine.connect() as connection:
        migrations.upgrade(connection)
    interrupt_after(engine, after, lambda connection: migrations.downgrade(connection, "base"))
    with engine.connect() as connection:
        migrations.upgrade(connection)
        assert differences(connection) == []
        connection.execute(text("SELECT byte_count FROM dualwrite_batch"))


@pytest.mark.parametrize("after", [3, 10, 18, 29])
def test_after_an_interrupted_upgrade_a_downgrade_leaves_no_table(engine: Engine, after: int) -> None:
    interrupt_after(engine, after, migrations.upgrade)
    with engine.connect() as connection:
        migrations.downgrade(connection, "base")
        assert inspect(connection).get_table_names() == [VERSION_TABLE]
        assert inspect(connection).get_view_names() == []


def interrupt_after(engine: Engine, changes: int, migrate: Callable[[Connection], None]) -> None:
    """Interrupt a migration before the change that follows so many others."""
    left = changes

    def interrupt(_: Connection, __: object, statement: str, *___: object) -> None:
        nonlocal left
        if statement.split(maxsplit=1)[0] in {"CREATE", "ALTER", "DROP", "INSERT", "UPDATE", "DELETE"}:
            left -= 1
            if left < 0:
                raise _Interrupted

    event.listen(engine, "before_cursor_execute", interrupt)
    with engine.connect() as connection, pytest.raises(_Interrupted):
        migrate(connection)
    event.remove(engine, "before_cursor_execute", interrupt)


def test_what_is_printed_takes_the_tables_back(engine: Engine) -> None:
    with engine.connect() as connection:
        migrations.upgrade(connection)
    url = engine.url.set(drivername="mariadb+pymysql")
    script = migrations.sql_script(url, "base", start="head", direction="downgrade")
    for statement in script.split(";\n"):
        if statement.strip():
            with engine.connect() as connection:
                connection.exec_driver_sql(statement.replace("%", "%%"))
                connection.commit()
    with engine.connect() as connection:
        assert inspect(connection).get_table_names() == [VERSION_TABLE]


def test_what_is_printed_makes_the_same_tables(engine: Engine) -> None:
    for statement in migrations.sql_script(engine.url.set(drivername="mariadb+pymysql")).split(";\n"):
        if statement.strip():
            with engine.connect() as connection:
                connection.exec_driver_sql(statement.replace("%", "%%"))
                connection.commit()
    check_schema(engine)
    with engine.connect() as connection:
        assert differences(connection) == []


def test_two_at_once_wait_for_each_other(engine: Engine) -> None:
    def upgrade() -> None:
        with engine.connect() as connection:
            migrations.upgrade(connection)

    for upgrading in [Thread(upgrade) for _ in range(2)]:
        upgrading.result()
    check_schema(engine)
    with engine.connect() as connection:
        assert migrations.current_revision(connection) == SCHEMA_REVISION
