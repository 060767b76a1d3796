"""Fresh databases for the stores, tests of a sink on both databases, a thread whose result is awaited, and waiting for sessions."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy import URL, Engine, Row, bindparam, create_engine, event, make_url, text
from sqlalchemy.connectors import asyncio as asyncio_connector
from sqlalchemy.dialects.postgresql import asyncpg as asyncpg_dialect
from sqlalchemy.exc import OperationalError
from sqlalchemy.util import concurrency, queue

import dualwrite.migrations
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import StateRow
from dualwrite.stores.sql import asyncpg_driver
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.stores.sql.tables import BATCH_VIEW, OWN_TABLES, VERSION_TABLE, Tables, declare_tables
from harness import patience

BOTH_DATABASES = pytest.mark.parametrize(
    "numbers", ["postgresql", pytest.param("mariadb", marks=pytest.mark.mariadb)], indirect=True
)
"""Runs a test of the fixture `numbers` on each database."""
CLUSTER = "cluster-one"
ODD_SCHEMA = f'My "own" 100% schema:{os.environ.get("PYTEST_XDIST_WORKER", "x")}'
"""A name that must be quoted. MariaDB's schemas are the server's, which all workers share."""


def by_way_on_both_databases(ways: Sequence[str], quick: Collection[str]) -> pytest.MarkDecorator:
    """Parametrizes `numbers` and `way`: each way on PostgreSQL, and on MariaDB where it can do it, named "way-mariadb".

    Those that are not `quick`, by name, are thorough.
    """
    cases = [("postgresql", way, way, []) for way in ways]
    cases += [("mariadb", way, f"{way}-mariadb", [pytest.mark.mariadb]) for way in ways if way != "prepared"]
    params = [
        pytest.param(database, way, id=name, marks=[*marks, *([] if name in quick else [pytest.mark.thorough])])
        for database, way, name, marks in cases
    ]
    return pytest.mark.parametrize(("numbers", "way"), params, indirect=["numbers"])


def prepared(incarnation: int, number: int = 0, **kwargs: Any) -> PreparedTxnState:
    """A state of that incarnation; another number is another transaction of the same producer."""
    return PreparedTxnState(
        42, 0, incarnation, (FirstOffset("orders", 0, number), FirstOffset("payments", 3, 7)), **kwargs
    )


class _StoreOfTasks(SqlStateStore):
    """A store whose own transactions run on one engine, and the tests' blocks on another."""

    def __init__(self, own: Engine, blocks: Engine, **kwargs: Any) -> None:
        super().__init__(own, **kwargs)
        self._blocks = blocks

    @property
    def engine(self) -> Engine:
        return self._blocks


AWAITS_BY_NAME: Final = hasattr(asyncpg_dialect, "await_")
"""Whether SQLAlchemy's adapters await by a function of their module, which can be replaced."""


@contextmanager
def awaited_in_a_thread() -> Generator[None, None, None]:
    """Let plain code use the connections of asyncpg: what they await is awaited in the event loop of another thread.

    The drivers' adapters await only in greenlets. The tests of stores are plain functions, which use threads of their own.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def carried(awaitable: Any) -> Any:
        return await awaitable

    def wait(awaitable: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(carried(awaitable), loop).result()

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (asyncpg_dialect, "await_"), (asyncio_connector, "await_"), (queue, "await_"), (concurrency, "await_"),
            (asyncpg_driver, "await_only"),
        ):  # fmt: skip
            patch.setattr(module, name, wait)
        yield
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@dataclass
class Database:
    """A migrated, empty database, with a table ``orders`` of the user's own."""

    kind: str
    url: str
    schema: str | None = None
    engines: list[Engine] = field(default_factory=list)
    by_asyncpg: bool = False
    """Whether the stores' blocks run on connections of asyncpg, as those of an ``AsyncDualWriter`` do."""

    def engine(self, **kwargs: Any) -> Engine:
        engine = create_engine(self.url, **kwargs)
        if self.kind == "sqlite":
            event.listen(engine, "connect", lambda driver, _: driver.execute("PRAGMA foreign_keys = ON"))
        self.engines.append(engine)
        return engine

    def store(self, engine: Engine | None = None, **kwargs: Any) -> SqlStateStore:
        if not self.by_asyncpg:
            return SqlStateStore(engine or self.engine(), schema=self.schema, **kwargs)
        blocks = create_engine(make_url(self.url).set(drivername="postgresql+asyncpg"))
        self.engines.append(blocks)
        return _StoreOfTasks(self.engine(), blocks, schema=self.schema, **kwargs)

    @property
    def tables(self) -> Tables:
        return declare_tables(self.schema)

    def execute(self, statement: str, **values: Any) -> None:
        with self.engines[0].begin() as connection:
            connection.execute(text(statement), values)

    def query(self, statement: str, **values: Any) -> Sequence[Row[Any]]:
        """The rows that another session sees now."""
        with self.engines[0].connect() as connection:
            return connection.execute(text(statement), values).all()

    @property
    def state_table(self) -> str:
        quote = "`" if self.kind == "mariadb" else '"'
        prefix = "" if self.schema is None else quote + self.schema.replace(quote, quote * 2) + quote + "."
        return f"{prefix}kafka_transaction_state"

    def set_state(self, transactional_id: str, state: str | None) -> None:
        self.execute(
            f"UPDATE {self.state_table} SET prepared_transaction_state = :state WHERE transactional_id = :id",
            state=state,
            id=transactional_id,
        )

    def claim(self, store: SqlStateStore, *ids: str, **kwargs: Any) -> StateRow:
        return store.claim(ids, owner="a test", cluster_id=CLUSTER, **kwargs)[0]

    def dispose(self) -> None:
        for engine in self.engines:
            engine.dispose()


_sqlite: dict[bool, bytes] = {}
"""What a new file of SQLite holds, with tables of a user's own and without: the migrations take 30 ms."""


def prepare(kind: str, url: str, schema: str | None = None, *, own_tables: bool = True) -> Database:
    """A new database, migrated; the URL of SQLite names no file that is there."""
    database = Database(kind, url, schema)
    engine = database.engine()
    if kind != "sqlite" or schema is not None:
        _make_tables(database, own_tables=own_tables)
        return database
    file = Path(make_url(url).database or "")
    if own_tables not in _sqlite:
        _make_tables(database, own_tables=own_tables)
        engine.dispose()
        _sqlite[own_tables] = file.read_bytes()
    else:
        file.write_bytes(_sqlite[own_tables])
    return database


def _make_tables(database: Database, *, own_tables: bool) -> None:
    with database.engines[0].connect() as connection:
        dualwrite.migrations.upgrade(connection, schema=database.schema)
    if not own_tables:
        return
    database.execute("CREATE TABLE customer (id INTEGER PRIMARY KEY)")
    deferred = "" if database.kind == "mariadb" else " DEFERRABLE INITIALLY DEFERRED"
    database.execute(
        f"CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER REFERENCES customer (id){deferred})"
    )


def age(engine: Engine, *, days: float = 40) -> None:
    """Let the rows of the library be that old, as time does."""
    when = "now() - make_interval(secs => 86400 * :days)"
    if engine.dialect.name in {"mysql", "mariadb"}:
        when = "utc_timestamp(6) - INTERVAL :days DAY"
    if engine.dialect.name == "sqlite":
        when = "strftime('%Y-%m-%d %H:%M:%f000', 'now', '-' || :days || ' days')"
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE kafka_transaction_state SET updated_at = {when}"), {"days": days})
        connection.execute(
            text(f"UPDATE dualwrite_incident SET acknowledged_at = {when} WHERE acknowledged_at IS NOT NULL"),
            {"days": days},
        )
        connection.execute(text(f"UPDATE dualwrite_run SET begun_at = {when}"), {"days": days})


def through_mysqlclient(url: str) -> str:
    """The URL for the other driver; skips the test where it is not installed."""
    pytest.importorskip("MySQLdb", reason="mysqlclient is not installed")
    return make_url(url).set(drivername="mysql+mysqldb").render_as_string(hide_password=False)


_columns: dict[tuple[str, str | None], Sequence[Any]] = {}
"""The columns of the databases that tests share."""


def prepare_mariadb(url: str, schema: str | None = None, *, own_tables: bool = True) -> Database:
    """The database as new, without the sessions of former tests: its tables are made again only if a test changed them.

    Without tables of a user's own, those that a test has made go.
    """
    name = make_url(url).database
    engine = create_engine(url.replace(f"/{name}", "/"), isolation_level="AUTOCOMMIT")
    both = {"schemas": [name, schema]}
    found = text(
        "SELECT table_schema, table_name, column_name, is_nullable, "
        "(SELECT engine FROM information_schema.tables AS t WHERE t.table_schema = c.table_schema AND t.table_name = c.table_name) "
        "FROM information_schema.columns AS c "
        "WHERE table_schema IN :schemas ORDER BY 1, 2, ordinal_position"
    ).bindparams(bindparam("schemas", expanding=True))
    with engine.connect() as connection:
        others = text("SELECT id FROM information_schema.processlist WHERE db = :name AND id <> connection_id()")
        for (number,) in connection.execute(others, {"name": name}).all():
            with suppress(OperationalError):  # it has just ended
                connection.execute(text(f"KILL {number}"))
        columns = connection.execute(found, both).all()
        if not own_tables:
            connection.execute(text("SET foreign_key_checks = 0"))
            for holder, table in {(row[0], row[1]) for row in columns if row[1] not in {*OWN_TABLES, BATCH_VIEW}}:
                connection.execute(text(f"DROP TABLE `{holder}`.`{table}`"))
            columns = [row for row in columns if row[1] in {*OWN_TABLES, BATCH_VIEW}]
        if columns and _columns.get((url, schema)) == columns:
            connection.execute(text("SET foreign_key_checks = 0"))
            for holder, table in {(row[0], row[1]) for row in columns if row[1] not in {BATCH_VIEW, VERSION_TABLE}}:
                connection.execute(text(f"DELETE FROM `{holder}`.`{table}`"))
            made = Database("mariadb", url, schema)
            made.engine()
        else:
            for one in (ODD_SCHEMA, name):
                connection.execute(text(f"DROP DATABASE IF EXISTS `{one}`"))
            connection.execute(text(f"CREATE DATABASE `{name}`"))
            made = prepare("mariadb", url, schema, own_tables=own_tables)
            _columns[url, schema] = connection.execute(found, both).all()
    engine.dispose()
    return made


def run_raw(driver: Any, statement: str) -> None:
    """Execute a statement on the driver's connection."""
    if hasattr(driver, "fetchrow"):
        asyncpg_driver.await_only(driver.execute(statement))
        return
    with closing(driver.cursor()) as cursor:
        cursor.execute(statement)


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path / 'test.db'}"


_templates: set[tuple[str, str | None]] = set()
"""Databases of PostgreSQL that have been migrated once, to be copied, by the URL of the database that is made of them."""


def prepare_postgres(url: str, schema: str | None = None) -> Database:
    """The database as new, without the sessions of former tests: copied from one that has been migrated, which takes 45 ms.

    It makes that one in the first place: see :func:`names_of_templates`.
    """
    name = make_url(url).database
    template = names_of_templates(url)[schema is not None]
    if (url, schema) not in _templates:
        administer(url, f"CREATE DATABASE {template}")
        migrated = make_url(url).set(database=template).render_as_string(hide_password=False)
        prepare("postgresql", migrated, schema).dispose()
        _templates.add((url, schema))
    administer(url, f"DROP DATABASE {name} WITH (FORCE)")
    copy_postgres(url, template)
    database = Database("postgresql", url, schema)
    database.engine()
    return database


def names_of_templates(url: str) -> tuple[str, str]:
    """Of the databases that may be copied for this one: without a schema, and with one."""
    name = make_url(url).database
    return f"{name}_plain", f"{name}_schema"


def copy_postgres(url: str, template: str) -> None:
    """Make this database of a copy of another one's files; block by block, which is the default, all of it would be logged."""
    by_files = "STRATEGY FILE_COPY" if administrator(url).info.server_version >= 15_00_00 else ""
    administer(url, f"CREATE DATABASE {make_url(url).database} TEMPLATE {template} {by_files}")


_administrators: dict[URL, psycopg.Connection[Any]] = {}


def administrator(url: str) -> psycopg.Connection[Any]:
    """A connection to the server of this database. It stays open for the next test: a new one takes the server 2 ms."""
    server = make_url(url).set(drivername="postgresql", database="postgres")
    if server not in _administrators:
        dsn = server.render_as_string(hide_password=False)
        _administrators[server] = psycopg.connect(dsn, autocommit=True)
    return _administrators[server]


def administer(url: str, statement: str) -> None:
    """Execute a statement about databases on the server of this one."""
    administrator(url).execute(statement)


def close_administrators() -> None:
    while _administrators:
        _administrators.popitem()[1].close()


class Thread:
    """Runs one call in a thread; ``result`` waits for it and raises what it has raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._future: Future[Any] = Future()
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._future.set_result(self._call())
        except BaseException as error:  # noqa: BLE001 - whatever it is, result() raises it
            self._future.set_exception(error)

    def result(self, timeout: float = 120.0) -> Any:
        return self._future.result(timeout)

    @property
    def done(self) -> bool:
        return self._future.done()


def wait_until(database: Database, condition: str) -> None:
    """Wait until a session of the database fits: a condition on ``pg_stat_activity``."""
    question = f"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND {condition}"
    patience.wait_until(lambda: database.query(question)[0][0], 120, f"no session came to {condition}")


def wait_until_blocked(database: Database) -> None:
    wait_until(database, "wait_event_type = 'Lock'")
