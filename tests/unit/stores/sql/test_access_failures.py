"""The mapping of database errors."""

from __future__ import annotations

import sqlite3
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_mock_engine, exc, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from dualwrite.errors import ConfigurationError, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.stores.sql.access import (
    Meaning,
    conflict_behind,
    driver_words,
    engine_of,
    map_database_error,
    meaning_of,
    migrate_advice,
    migrate_command,
    shown_url,
)
from dualwrite.stores.sql.postgresql import PostgreSQL
from dualwrite.stores.sql.short_transactions import dialect_of
from dualwrite.stores.sql.tables import declare_tables


def of_postgresql(state: str | None, *, lost: bool = False) -> exc.DBAPIError:
    original = (psycopg.errors.lookup(state) if state else psycopg.OperationalError)(
        "what the driver says\nDETAIL: secret"
    )
    return exc.OperationalError("SELECT 1", {}, original, connection_invalidated=lost)


def of_sqlite(kind: type[sqlite3.Error], text: str) -> exc.DBAPIError:
    return exc.OperationalError("SELECT 1", {}, kind(text))


@pytest.mark.parametrize(
    ("state", "meaning", "kind"),
    [
        ("42P01", Meaning.SCHEMA, ConfigurationError),
        ("42703", Meaning.SCHEMA, ConfigurationError),
        ("3F000", Meaning.SCHEMA, ConfigurationError),
        ("42501", Meaning.PRIVILEGE, ConfigurationError),
        ("42601", Meaning.REJECTED, ConfigurationError),
        ("25006", Meaning.READ_ONLY, ConfigurationError),
        ("28P01", Meaning.LOGIN, ConfigurationError),
        ("3D000", Meaning.LOGIN, ConfigurationError),
        ("22P05", Meaning.REJECTED, ConfigurationError),
        ("23514", Meaning.REJECTED, ConfigurationError),
        ("40001", Meaning.CONFLICT, TransactionAborted),
        ("40P01", Meaning.CONFLICT, TransactionAborted),
        ("25P02", Meaning.FAILED_TRANSACTION, TransactionAborted),
        ("26000", Meaning.UNPREPARED, Unavailable),
        ("42P05", Meaning.UNPREPARED, Unavailable),
        ("55P03", Meaning.BUSY, Unavailable),
        ("57014", Meaning.BUSY, Unavailable),
        ("53300", Meaning.BUSY, Unavailable),
        ("53100", Meaning.FULL, Unavailable),
        ("57P01", Meaning.GONE, Unavailable),
        ("08006", Meaning.GONE, Unavailable),
        ("25P03", Meaning.GONE, Unavailable),
        ("XX000", Meaning.OTHER, Unavailable),
        ("58030", Meaning.OTHER, Unavailable),
        (None, Meaning.GONE, Unavailable),
    ],
)
def test_every_sqlstate_says_what_to_do(state: str | None, meaning: Meaning, kind: type[Exception]) -> None:
    error = of_postgresql(state)
    assert meaning_of(error) is meaning
    mapped = map_database_error(error, transactional_id="orders")
    assert type(mapped) is kind
    assert mapped.transactional_id == "orders"
    assert "what the driver says" in str(mapped)
    assert "secret" not in str(mapped)


@pytest.mark.parametrize(
    ("kind", "text", "meaning"),
    [
        (sqlite3.OperationalError, "no such table: x", Meaning.SCHEMA),
        (sqlite3.OperationalError, "no such column: x", Meaning.SCHEMA),
        (sqlite3.OperationalError, "table x has no column named y", Meaning.SCHEMA),
        (sqlite3.OperationalError, "unknown database side", Meaning.SCHEMA),
        (sqlite3.OperationalError, "database is locked", Meaning.BUSY),
        (sqlite3.OperationalError, "attempt to write a readonly database", Meaning.READ_ONLY),
        (sqlite3.OperationalError, "unable to open database file", Meaning.LOGIN),
        (sqlite3.OperationalError, "database or disk is full", Meaning.FULL),
        (sqlite3.OperationalError, "disk I/O error", Meaning.OTHER),
        (sqlite3.IntegrityError, "CHECK constraint failed", Meaning.REJECTED),
    ],
)
def test_every_message_of_sqlite_says_what_to_do(kind: type[sqlite3.Error], text: str, meaning: Meaning) -> None:
    assert meaning_of(of_sqlite(kind, text)) is meaning


def test_retryable_is_only_what_another_run_may_survive() -> None:
    conflict = map_database_error(of_postgresql("40001"))
    failed = map_database_error(of_postgresql("25P02"))
    assert isinstance(conflict, TransactionAborted)
    assert isinstance(failed, TransactionAborted)
    assert (conflict.retryable, failed.retryable) == (True, False)


def test_other_errors_of_sqlalchemy() -> None:
    pool = map_database_error(exc.TimeoutError("QueuePool limit of size 5 overflow 10 reached"))
    assert isinstance(pool, Unavailable)
    assert "QueuePool limit" in pool.what
    assert "pool_size" in str(pool)
    assert isinstance(map_database_error(exc.ResourceClosedError("closed")), IllegalStateError)


def test_a_pooler_that_shares_connections_by_statement_is_named() -> None:
    words = (
        "FATAL:  transaction blocks not allowed in statement pooling mode\nserver closed the connection unexpectedly"
    )
    for state in ("08P01", None):
        original = psycopg.errors.lookup(state)(words) if state else psycopg.OperationalError(words)
        mapped = map_database_error(exc.OperationalError("BEGIN", {}, original, connection_invalidated=True))
        assert isinstance(mapped, ConfigurationError)
        assert "pool_mode=transaction" in str(mapped)


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (of_postgresql("40001"), True),
        (of_postgresql("40P01"), True),
        (psycopg.errors.lookup("40P01")("the driver's own connection"), True),
        (of_sqlite(sqlite3.OperationalError, "database is locked"), True),
        (of_postgresql("55P03"), None),  # NOWAIT is an answer that the user has asked for
        (of_postgresql("57014"), None),
        (of_postgresql("23505"), None),
        (of_sqlite(sqlite3.IntegrityError, "UNIQUE constraint failed"), None),
        (exc.TimeoutError("pool"), None),
        (ValueError("the user's"), None),
        (TransactionAborted("ours"), None),
    ],
)
def test_of_what_leaves_a_block_only_conflicts_become_ours(error: BaseException, retryable: bool | None) -> None:
    found = conflict_behind(error, "orders")
    assert (None if found is None else found.retryable) is retryable


@pytest.mark.parametrize("state", ["40P01", "23505"])
def test_a_conflict_that_django_has_wrapped_is_seen(state: str) -> None:
    of_django = type("OperationalError", (Exception,), {"__module__": "django.db.utils"})()
    of_django.__cause__ = psycopg.errors.lookup(state)("of the driver")
    assert (conflict_behind(of_django, "orders") is not None) is (state == "40P01")


def test_no_address_shows_a_secret() -> None:
    url = make_url("postgresql+psycopg://me:s3cret@host:5433/name?sslpassword=s3cret&password=s3cret")
    assert shown_url(url) == "postgresql+psycopg://me:***@host:5433/name"
    assert "s3cret" not in migrate_command(url, "some schema")
    assert migrate_command(url, "some schema").endswith("--schema 'some schema'")


def test_the_drivers_words_are_one_line() -> None:
    assert driver_words(ValueError("one\ntwo")) == "one"
    assert driver_words(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_an_engine_of_asyncio_is_refused_with_the_way_that_works() -> None:
    given = create_async_engine("postgresql+psycopg://user@nowhere/x")
    with pytest.raises(ConfigurationError, match=r"AsyncEngine cannot be used.*AsyncDualWriter"):
        engine_of(given)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Session is not an engine"):
        engine_of(Session())  # type: ignore[arg-type]


def test_an_unsupported_driver_is_refused() -> None:
    engine = create_mock_engine("sqlite://", lambda *_: None)
    engine.dialect.driver = "aiosqlite"
    with pytest.raises(ConfigurationError, match=r"sqlite\+aiosqlite"):
        dialect_of(engine)  # type: ignore[arg-type]


def test_statements_are_compiled_once_for_all_stores_of_a_schema() -> None:
    assert declare_tables("a") is declare_tables("a")
    assert declare_tables("a") is not declare_tables(None)


@pytest.mark.parametrize(
    ("status", "state", "certain"),
    [
        (0, "40001", True),
        (0, "23503", True),
        (0, "53100", True),
        (0, "57014", True),
        (0, None, False),
        (0, "40003", False),
        (0, "08006", False),
        (0, "57P01", False),
        (0, "58030", False),
        (0, "XX000", False),
        (1, "40001", False),
        (2, None, True),
        (3, None, True),
        (4, "40001", False),
        (4, "57P01", False),
        (4, "25P03", True),
        (4, None, False),
    ],
)
def test_a_failed_commit_is_a_rollback_only_where_postgresql_leaves_no_other_reading(
    status: int, state: str | None, certain: bool
) -> None:
    driver: Any = SimpleNamespace(pgconn=SimpleNamespace(transaction_status=status))
    assert PostgreSQL(None).certainly_rolled_back(driver, of_postgresql(state)) is certain


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        (None, "run: dualwrite migrate"),
        ("sqlite:////var/shop.db", "run: dualwrite migrate --url sqlite:////var/shop.db --schema s"),
        (
            "postgresql+psycopg://app:secret@db/shop?application_name=x",
            (
                "run as the tables' owner, not necessarily 'app': "
                "dualwrite migrate --url 'postgresql+psycopg://OWNER:***@db/shop' --schema s"
            ),
        ),
        (
            "postgresql+psycopg://db/shop",
            (
                "run as the tables' owner, not necessarily the application's role: "
                "dualwrite migrate --url postgresql+psycopg://OWNER@db/shop --schema s"
            ),
        ),
    ],
)
def test_missing_tables_are_made_by_their_owner_and_not_by_the_applications_role(url: str | None, advice: str) -> None:
    assert migrate_advice(url, "s") == advice
