"""All migrations together make the declared tables, go back, and leave an application's own Alembic alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from harness.databases import Thread
from harness.expanding import without_counting
from harness.patience import wait_until
from sqlalchemy import Connection, Engine, create_engine, event, inspect, make_url, text

import dualwrite.migrations
from dualwrite import migrations
from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.short_transactions import SCHEMA_REVISION, FoundTables, check_schema
from dualwrite.stores.sql.tables import OWN_TABLES, VERSION_TABLE, declare_tables

in_each = pytest.mark.parametrize(
    ("engine", "schema"),
    [
        pytest.param("postgresql", None, marks=[pytest.mark.postgresql, pytest.mark.thorough]),
        pytest.param("postgresql", "side", marks=pytest.mark.postgresql),
        # In every run: test_migrations_mariadb.py.
        pytest.param("mariadb", None, marks=[pytest.mark.mariadb, pytest.mark.thorough]),
        pytest.param("mariadb", "side", marks=[pytest.mark.mariadb, pytest.mark.thorough]),
        ("sqlite", None),
        pytest.param("sqlite", "side", marks=pytest.mark.thorough),
    ],
    indirect=["engine"],
)
"""Each database, and with and without a schema: in every run crosswise."""
AT = "2026-01-01 12:00:00+00:00"


def attach(driver: Any, _: object) -> None:
    path = driver.execute("PRAGMA database_list").fetchone()[2]
    driver.execute(f"ATTACH '{path}.side' AS side")


@pytest.fixture(params=[pytest.param("postgresql", marks=pytest.mark.postgresql), "sqlite"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    if request.param == "postgresql":
        made = create_engine(request.getfixturevalue("dualwrite_database"))
    elif request.param == "mariadb":
        server = request.getfixturevalue("dualwrite_mariadb")
        server.drop_database("side")
        made = create_engine(server.create_database())
    else:
        made = create_engine(f"sqlite:///{tmp_path / 'test.db'}")
        event.listen(made, "connect", attach)
    yield made
    made.dispose()


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as made:
        yield made


def tables_of(connection: Connection, schema: str | None) -> set[str]:
    found = inspect(connection)
    return set(found.get_table_names(schema=schema)) if schema in {None, *found.get_schema_names()} else set()


def views_of(connection: Connection, schema: str | None) -> set[str]:
    found = inspect(connection)
    return set(found.get_view_names(schema=schema)) if schema in {None, *found.get_schema_names()} else set()


def reflected(connection: Connection, schema: str | None) -> dict[str, Any]:
    """The database's own description of our tables."""
    found = inspect(connection)
    return {
        name: {
            "columns": [
                {key: str(column[key]) for key in ("name", "type", "nullable", "default")}
                for column in found.get_columns(name, schema=schema)
            ],
            "primary key": found.get_pk_constraint(name, schema=schema),
            "unique": found.get_unique_constraints(name, schema=schema),
            "checks": sorted(found.get_check_constraints(name, schema=schema), key=str),
            "indexes": found.get_indexes(name, schema=schema),
            "foreign keys": found.get_foreign_keys(name, schema=schema),
        }
        for name in sorted(OWN_TABLES - {VERSION_TABLE})
    }


@in_each
class TestEverySchema:
    def test_alembic_sees_no_difference_from_what_is_declared(self, connection: Connection, schema: str | None) -> None:
        def include_name(name: str | None, type_: str, parent_names: Any) -> bool:
            # On MariaDB a schema is a database, and those of other tests have our tables too.
            return name == schema if type_ == "schema" else migrations.include_own_name(name, type_, parent_names)

        migrations.upgrade(connection, schema=schema)
        options = {
            "compare_server_default": True,
            "include_schemas": schema is not None,
            "include_name": include_name,
        }
        context = MigrationContext.configure(connection, opts=options)
        found = compare_metadata(context, declare_tables(schema).metadata)
        assert without_counting(context, found) == []

    def test_reflection_sees_no_difference_from_what_is_declared(
        self, engine: Engine, connection: Connection, schema: str | None
    ) -> None:
        migrations.upgrade(connection, schema=schema)
        migrated = reflected(connection, schema)
        connection.rollback()
        migrations.downgrade(connection, "base", schema=schema)
        with engine.begin() as other:
            declare_tables(schema).metadata.create_all(other)
        assert reflected(connection, schema) == migrated
        assert migrated["kafka_transaction_state"]["checks"]

    def test_the_view_has_the_columns_that_are_declared(self, connection: Connection, schema: str | None) -> None:
        migrations.upgrade(connection, schema=schema)
        declared = declare_tables(schema).batch
        assert views_of(connection, schema) == {declared.name}
        columns = inspect(connection).get_columns(declared.name, schema=schema)
        assert [column["name"] for column in columns] == list(declared.c.keys())
        assert connection.execute(declared.select()).all() == []

    def test_the_ledger_keeps_its_rows_on_the_way_from_the_first_tables_and_back(
        self, connection: Connection, schema: str | None
    ) -> None:
        prefix = "" if schema is None else "side."
        rows = text(f"SELECT sink, batch_id, partition_id, row_count, message_count FROM {prefix}dualwrite_ledger")
        migrations.upgrade(connection, "0001", schema=schema)
        with connection.begin():
            connection.execute(
                text(f"INSERT INTO {prefix}dualwrite_ledger VALUES ('s', 'b', -1, 5, 6, 2, :at)"),
                {"at": AT.removesuffix("+00:00") if connection.dialect.name == "mysql" else AT},
            )
        migrations.upgrade(connection, schema=schema)
        (batch,) = connection.execute(declare_tables(schema).batch.select()).mappings()
        assert (batch["phase"], batch["row_count"], batch["started_at"]) == ("decided", 5, None)
        assert str(batch["decided_at"]) == AT
        connection.rollback()
        migrations.downgrade(connection, "0001", schema=schema)
        assert connection.execute(rows).all() == [("s", "b", -1, 5, 6)]
        assert not views_of(connection, schema)
        connection.rollback()

    def test_it_is_done_once(self, connection: Connection, schema: str | None) -> None:
        for _ in range(2):
            migrations.upgrade(connection, schema=schema)
            assert migrations.current_revision(connection, schema=schema) == SCHEMA_REVISION
            assert tables_of(connection, schema) == OWN_TABLES
            connection.rollback()

    def test_going_back_leaves_nothing(self, connection: Connection, schema: str | None) -> None:
        for _ in range(2):
            migrations.upgrade(connection, schema=schema)
            migrations.downgrade(connection, "base", schema=schema)
            assert tables_of(connection, schema) == {VERSION_TABLE}
            assert migrations.current_revision(connection, schema=schema) is None
            connection.rollback()

    def test_the_callers_transaction_decides(self, connection: Connection, schema: str | None) -> None:
        if connection.dialect.name == "mysql":
            pytest.skip("MariaDB commits each step: test_migrations_mariadb.py")
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN")
        connection.execute(text("CREATE TABLE own (id INTEGER)"))
        migrations.upgrade(connection, schema=schema)
        assert tables_of(connection, schema) >= OWN_TABLES
        connection.rollback()
        assert not tables_of(connection, schema) & {*OWN_TABLES, "own"}

    def test_what_fails_leaves_nothing(self, connection: Connection, engine: Engine, schema: str | None) -> None:
        if connection.dialect.name == "mysql":
            pytest.skip("MariaDB commits each step: test_migrations_mariadb.py")
        if schema is not None and engine.dialect.name == "postgresql":
            connection.execute(text("CREATE SCHEMA side"))
        prefix = "" if schema is None else "side."
        connection.execute(text(f"CREATE TABLE {prefix}dualwrite_ledger (id INTEGER)"))
        connection.commit()
        with pytest.raises(Exception, match="already exists"):
            migrations.upgrade(connection, schema=schema)
        assert tables_of(connection, schema) == {"dualwrite_ledger"}

    def test_the_script_does_the_same(self, engine: Engine, connection: Connection, schema: str | None) -> None:
        url = engine.url
        if connection.dialect.name == "mysql":  # nothing connects: the URL says which of the two it is
            url = url.set(drivername="mariadb+pymysql")
        up = migrations.sql_script(url, schema=schema)
        down = migrations.sql_script(url, "base", start=SCHEMA_REVISION, schema=schema, direction="downgrade")
        migrations.upgrade(connection, schema=schema)
        migrated = reflected(connection, schema)
        connection.rollback()
        migrations.downgrade(connection, "base", schema=schema)
        with engine.begin() as other:
            prefix = "" if schema is None else "side."
            other.execute(text(f"DROP TABLE {prefix}{VERSION_TABLE}"))
        run_script(engine, up)
        assert reflected(connection, schema) == migrated
        assert migrations.current_revision(connection, schema=schema) == SCHEMA_REVISION
        connection.rollback()
        check_schema(engine, schema)
        run_script(engine, down)
        assert tables_of(connection, schema) == {VERSION_TABLE}


def run_script(engine: Engine, script: str) -> None:
    """As the database's own shell would."""
    if engine.dialect.name == "postgresql":
        url = make_url(engine.url).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url, autocommit=True) as driver:
            driver.execute(script.encode())
        return
    if engine.dialect.name == "mysql":
        with engine.connect() as connection:
            for statement in script.split(";\n"):
                if statement.strip():
                    connection.exec_driver_sql(statement.replace("%", "%%"))
        return
    with sqlite3.connect(engine.url.database or "") as driver:
        attach(driver, None)
        driver.executescript(script)
    driver.close()


def test_the_newest_migration_is_what_the_library_asks_for() -> None:
    directory = Path(dualwrite.migrations.__file__).parent
    assert ScriptDirectory(directory).get_current_head() == SCHEMA_REVISION


@in_each
class TestCheckSchema:
    def test_missing_tables(self, engine: Engine, schema: str | None) -> None:
        with pytest.raises(ConfigurationError, match="are not in") as caught:
            check_schema(engine, schema)
        assert_names_command(caught.value, engine, schema)

    def test_tables_taken_away(self, engine: Engine, connection: Connection, schema: str | None) -> None:
        migrations.upgrade(connection, schema=schema)
        migrations.downgrade(connection, "base", schema=schema)
        with pytest.raises(ConfigurationError, match="are not in"):
            check_schema(engine, schema)

    @pytest.mark.parametrize(
        ("revision", "words"),
        [
            ("0006", "older than this library, which needs 0008"),
            ("0010", "this library is older, it knows only 0008"),
            ("0009_contract", "knows only 0008: they lack what it uses"),
        ],
    )
    def test_another_version(
        self, engine: Engine, connection: Connection, schema: str | None, revision: str, words: str
    ) -> None:
        migrations.upgrade(connection, schema=schema)
        prefix = "" if schema is None else "side."
        with engine.begin() as other:
            other.execute(text(f"UPDATE {prefix}{VERSION_TABLE} SET version_num = '{revision}'"))
        with pytest.raises(ConfigurationError, match=words) as caught:
            check_schema(engine, schema)
        assert revision in str(caught.value)
        assert_names_command(caught.value, engine, schema)
        if revision != "0006":
            assert str(caught.value).endswith("--downgrade --revision 0008)")
            with pytest.raises(ConfigurationError, match="newer"):
                migrations.upgrade(connection, schema=schema)

    def test_the_right_version(self, engine: Engine, connection: Connection, schema: str | None) -> None:
        migrations.upgrade(connection, schema=schema)
        default = {"postgresql": "public", "mysql": engine.url.database, "sqlite": None}[engine.dialect.name]
        assert check_schema(engine, schema) == FoundTables(schema or default, SCHEMA_REVISION)


def assert_names_command(error: ConfigurationError, engine: Engine, schema: str | None) -> None:
    assert "dualwrite migrate --url" in str(error)
    assert ("--schema side" in str(error)) == (schema is not None)
    assert engine.url.password is None or engine.url.password not in str(error)


def test_an_unknown_revision_is_refused(connection: Connection) -> None:
    with pytest.raises(ConfigurationError, match="'0815'"):
        migrations.upgrade(connection, "0815")


def test_a_missing_right_is_a_configuration_error(dualwrite_database: str) -> None:
    owner = create_engine(dualwrite_database)
    role = f"poor_{owner.url.database}"
    with owner.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role}"))
    engine = create_engine(dualwrite_database, connect_args={"options": f"-c role={role}"})
    try:
        with engine.connect() as connection, pytest.raises(ConfigurationError, match="may create tables"):
            migrations.upgrade(connection)
        with engine.connect() as connection, pytest.raises(ConfigurationError, match="may create tables"):
            migrations.upgrade(connection, schema="side")
    finally:
        engine.dispose()
        with owner.begin() as connection:
            connection.execute(text(f"DROP ROLE {role}"))
        owner.dispose()


@pytest.mark.postgresql
def test_a_connection_that_would_commit_each_statement_is_refused(dualwrite_database: str) -> None:
    engine = create_engine(dualwrite_database, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        with pytest.raises(ConfigurationError, match="in autocommit"):
            migrations.upgrade(connection)
        assert inspect(connection).get_table_names() == []
    engine.dispose()


@pytest.mark.postgresql
@pytest.mark.parametrize("isolation_level", ["READ COMMITTED", "SERIALIZABLE"])
def test_two_at_once_wait_for_each_other(dualwrite_database: str, isolation_level: Any) -> None:
    engine = create_engine(dualwrite_database, isolation_level=isolation_level)

    def upgrade() -> None:
        with engine.connect() as other:
            migrations.upgrade(other, schema="side")

    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        migrations.upgrade(connection, schema="side")
        second = Thread(upgrade)
        with engine.connect() as observer:
            waiting = text(
                "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )

            def waits():
                observer.rollback()
                return observer.execute(waiting).all()

            wait_until(waits)
        connection.commit()
    second.result()
    check_schema(engine, "side")
    engine.dispose()


ENV = """
from alembic import context
from sqlalchemy import MetaData, create_engine
import dualwrite.migrations

engine = create_engine(context.config.get_main_option("sqlalchemy.url"))
with engine.connect() as connection:
    context.configure(
        connection=connection, target_metadata=MetaData(), include_name=dualwrite.migrations.include_name,
        transaction_per_migration=True,
    )
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""

REVISION = """
import sqlalchemy as sa
from alembic import op
import dualwrite.migrations

revision = "abc"
down_revision = None

def upgrade():
    op.create_table("own", sa.Column("id", sa.Integer))
    dualwrite.migrations.upgrade(op.get_bind(), schema=None)
    op.create_table("own2", sa.Column("id", sa.Integer))

def downgrade():
    op.drop_table("own2")
    dualwrite.migrations.downgrade(op.get_bind(), "base", schema=None)
    op.drop_table("own")
"""


@pytest.fixture
def own_alembic(engine: Engine, tmp_path: Path) -> Config:
    """An application with an Alembic of its own, whose revision makes our tables too."""
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "script.py.mako").write_text(
        "revision = ${repr(up_revision)}\ndown_revision = ${repr(down_revision)}\n\ndef upgrade():\n    ${upgrades}\n"
    )
    (tmp_path / "versions" / "abc_both.py").write_text(REVISION)
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("sqlalchemy.url", engine.url.render_as_string(hide_password=False).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def test_it_works_inside_a_revision_of_an_applications_own_alembic(engine: Engine, own_alembic: Config) -> None:
    command.upgrade(own_alembic, "head")
    check_schema(engine)
    with engine.connect() as connection:
        assert tables_of(connection, None) == {*OWN_TABLES, "own", "own2", "alembic_version"}
    command.downgrade(own_alembic, "base")
    with engine.connect() as connection:
        assert tables_of(connection, None) == {VERSION_TABLE, "alembic_version"}


def test_an_applications_autogeneration_leaves_our_tables_alone(engine: Engine, own_alembic: Config) -> None:
    command.upgrade(own_alembic, "head")
    script = command.revision(own_alembic, "next", autogenerate=True)
    assert not isinstance(script, list)
    assert script is not None
    generated = Path(script.path).read_text()
    assert "drop_table('own')" in generated
    assert not [name for name in OWN_TABLES if name in generated]
