"""One suite for every database: fresh databases, a store under test, and a second connection as observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.databases import (
    AWAITS_BY_NAME,
    ODD_SCHEMA,
    Database,
    awaited_in_a_thread,
    names_of_templates,
    prepare,
    prepare_mariadb,
    prepare_postgres,
    sqlite_url,
    through_mysqlclient,
)
from sqlalchemy import Connection, make_url

from dualwrite.stores.sql.short_transactions import ShortTransactions
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing import EmbeddedKafka, EmbeddedMariaDB, EmbeddedPostgres
from dualwrite.testing.checker import read_committed
from dualwrite.testing.servers import databases

MARIADB_IN_THOROUGH_RUNS = (
    "test_batches.py",
    "test_records.py",
    "test_ledger.py",
    "test_more_ids",
    "test_the_names_of_one",
)
"""Tests in which MariaDB does as other databases do, and those that take it long."""


WITH_BLOCKS = ("test_store.py", "test_store_savepoints.py", "test_outbox.py", "test_consumed.py")
"""Tests of statements in blocks. All others are the library's own, which never go through asyncpg."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if "through asyncpg" not in item.name or item.path.name in WITH_BLOCKS]
    for item in items:
        chosen = "conformance" in item.nodeid and "[mariadb]" in item.nodeid
        if chosen and any(name in item.nodeid for name in MARIADB_IN_THOROUGH_RUNS):
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(scope="module")
def postgres_url(dualwrite_postgres: EmbeddedPostgres) -> Iterator[str]:
    url = dualwrite_postgres.create_database()
    yield url
    for name in (make_url(url).database or "", *names_of_templates(url)):
        dualwrite_postgres.drop_database(name)


@pytest.fixture(scope="module")
def mariadb_url(dualwrite_mariadb: EmbeddedMariaDB) -> Iterator[str]:
    url = dualwrite_mariadb.create_database()
    yield url
    dualwrite_mariadb.drop_database(make_url(url).database or "")


@pytest.fixture
def mariadb(mariadb_url: str) -> Iterator[Database]:
    made = prepare_mariadb(mariadb_url)
    yield made
    made.dispose()


@pytest.fixture(
    params=[
        # Without a schema: SQLite here, PostgreSQL in the integration tests.
        pytest.param("postgresql", marks=[pytest.mark.postgresql, pytest.mark.thorough]),
        pytest.param("postgresql with schema", marks=pytest.mark.postgresql),
        pytest.param("postgresql through asyncpg", marks=pytest.mark.postgresql),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
        pytest.param("mariadb with schema", marks=[pytest.mark.mariadb, pytest.mark.thorough]),
        pytest.param("mariadb through mysqlclient", marks=[pytest.mark.mariadb, pytest.mark.thorough]),
        "sqlite",
    ]
)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    if request.param == "sqlite":
        made = prepare("sqlite", sqlite_url(tmp_path))
    elif "asyncpg" in request.param:
        pytest.importorskip("asyncpg", reason="the extra 'asyncpg' is not installed")
        if not AWAITS_BY_NAME:
            pytest.skip("the tests' own way to await for asyncpg needs SQLAlchemy 2.1")
        made = prepare_postgres(request.getfixturevalue("postgres_url"))
        made.by_asyncpg = True
        with awaited_in_a_thread():
            yield made
            made.dispose()
        return
    else:
        schema = ODD_SCHEMA if "schema" in request.param else None
        if request.param.startswith("mariadb"):
            url = request.getfixturevalue("mariadb_url")
            made = prepare_mariadb(through_mysqlclient(url) if "mysqlclient" in request.param else url, schema)
        else:
            made = prepare_postgres(request.getfixturevalue("postgres_url"), schema)
    yield made
    made.dispose()


@pytest.fixture(scope="module")
def postgres_16_url() -> Iterator[str]:
    """PostgreSQL 16, which the same wheel holds: the newest without ``transaction_timeout``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(databases, "INSTALLATION", "pginstall")
        with EmbeddedPostgres({"max_prepared_transactions": "100"}) as server:
            yield server.create_database()


@pytest.fixture
def postgres(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A fresh database; on PostgreSQL 16 for tests that are parametrized with ``on_16_too``."""
    made = prepare_postgres(request.getfixturevalue(getattr(request, "param", "postgres_url")))
    yield made
    made.dispose()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Database]:
    made = prepare("sqlite", sqlite_url(tmp_path))
    yield made
    made.dispose()


@pytest.fixture
def store(database: Database) -> SqlStateStore:
    return database.store()


@pytest.fixture
def connection(store: SqlStateStore) -> Iterator[Connection]:
    """A user's connection, for dual writes."""
    with store.engine.connect() as made:
        yield made


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the library's own transactions run again, as if the answer to each first COMMIT had been lost."""
    once = ShortTransactions._once

    def twice(self: ShortTransactions, *arguments: Any) -> object:
        once(self, *arguments)
        return once(self, *arguments)

    monkeypatch.setattr(ShortTransactions, "_once", twice)


@pytest.fixture(params=["librdkafka", "native"])
def producer_engine(request: pytest.FixtureRequest) -> str:
    """Both engines, for every test that makes producers."""
    return str(request.param)


@pytest.fixture
def values(dualwrite_kafka: EmbeddedKafka, dualwrite_topic: str) -> Callable[[], list[bytes | None]]:
    """Reads the committed values of the topic."""
    return lambda: [record.value for record in read_committed(dualwrite_kafka.client_config(), dualwrite_topic)]
