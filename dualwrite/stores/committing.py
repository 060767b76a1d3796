"""COMMIT with the truth about its outcome, and ROLLBACK of whatever is left of a connection."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from sqlalchemy import exc

from dualwrite.errors import TransactionAborted, TransactionInDoubt
from dualwrite.stores.dialect import Dialect, Standing
from dualwrite.stores.failures import Meaning, driver_words, meaning_of

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.engine.interfaces import DBAPIConnection

logger = logging.getLogger(__name__)

_RETRYABLE: Final = frozenset({Meaning.CONFLICT, Meaning.BUSY, Meaning.GONE, Meaning.FULL})


def commit(connection: Connection, dialect: Dialect, transactional_id: str | None = None) -> None:
    """Commit the connection's transaction. The rows are durable on return, and only then.

    Args:
        connection: Inside a transaction.
        dialect: The adapter for the database.
        transactional_id: What the transaction was about, for the errors.

    Raises:
        TransactionAborted: It has certainly been rolled back.
        TransactionInDoubt: It may have been committed, or may yet be: the answer is missing. Also for an interruption of
            any kind (``KeyboardInterrupt``) while the answer was awaited. The connection was thrown away.
    """
    driver = _driver_of(connection)
    standing = Standing.BROKEN if driver is None else dialect.standing(driver)
    if driver is None or standing is Standing.BROKEN:
        rollback(connection)
        raise TransactionAborted(
            "the database connection was lost before COMMIT was sent", transactional_id=transactional_id
        )
    if standing is Standing.FAILED:
        # The server would answer COMMIT with a silent ROLLBACK, and the driver would call that a success.
        rollback(connection)
        raise TransactionAborted(
            "a statement had failed, so that COMMIT would have been a ROLLBACK",
            transactional_id=transactional_id,
            next_step="do not go on after a failed statement, or run it in a savepoint (begin_nested)",
            retryable=False,
        )
    if standing is Standing.ENDED:
        _discard(connection, None)
        raise TransactionInDoubt(
            "the database transaction was ended by somebody else before COMMIT was sent",
            transactional_id=transactional_id,
        )
    try:
        connection.commit()
    except BaseException as error:
        if dialect.certainly_rolled_back(driver, error):
            _roll_back_driver(driver)
            rollback(connection)
            retryable = isinstance(error, exc.SQLAlchemyError) and meaning_of(error) in _RETRYABLE
            raise TransactionAborted(
                f"COMMIT failed: {driver_words(error)}", transactional_id=transactional_id, retryable=retryable
            ) from error
        _discard(connection, error)
        raise TransactionInDoubt(
            f"the answer to COMMIT is missing: {driver_words(error)}", transactional_id=transactional_id
        ) from error


def rollback(connection: Connection) -> None:
    """Roll back whatever the connection has open. Never raises: a connection that cannot do it is thrown away.

    The server rolls back by itself when it notices that the connection is gone. Does nothing outside a transaction.
    """
    try:
        connection.rollback()
    except Exception as error:  # noqa: BLE001 - the caller has an error of its own to report; this one is logged
        logger.warning("the database connection did not roll back and is thrown away: %s", driver_words(error))
        _discard(connection, error)


def _driver_of(connection: Connection) -> DBAPIConnection | None:
    if connection.closed or connection.invalidated:
        return None
    return connection.connection.dbapi_connection


def _roll_back_driver(driver: DBAPIConnection) -> None:
    """Roll back below SQLAlchemy, which sends nothing after a COMMIT that it has sent."""
    try:
        driver.rollback()
    except Exception as error:  # noqa: BLE001 - drivers differ in what they raise; the pool rolls back or closes it too
        logger.warning("the database connection did not roll back: %s", driver_words(error))


def _discard(connection: Connection, error: BaseException | None) -> None:
    """Close the driver's connection for good, and leave SQLAlchemy's outside a transaction."""
    if connection.closed:
        return
    connection.invalidate(error)
    connection.rollback()
