"""Sends COMMIT or PREPARE TRANSACTION and reports its true outcome; rolls back connections in any state.

Refuses any other COMMIT of a dual write's transaction. A *joined* transaction belongs to other code, which ends it through
SQLAlchemy: it is ended below SQLAlchemy here, so that both agree afterwards.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, exc

from dualwrite.errors import IllegalStateError, TransactionAborted, TransactionInDoubt
from dualwrite.stores.sql.access import Begun, begun_on, leave_to_parent
from dualwrite.stores.sql.access__stores_sql_access_failures import Meaning, driver_words, meaning_of
from dualwrite.stores.sql.dialect import Dialect, Standing
from dualwrite.stores.sql.drivers__stores_sql_drivers_listening import Listeners

if TYPE_CHECKING:
    from sqlalchemy.engine.interfaces import DBAPIConnection

logger = logging.getLogger(__name__)

_RETRYABLE: Final = frozenset({Meaning.CONFLICT, Meaning.BUSY, Meaning.GONE, Meaning.FULL})


def refuse_commits(connection: Connection, begun: Begun) -> None:
    """Refuse every COMMIT of the connection's transaction until :func:`commit` or :func:`rollback`."""
    LISTENERS.require(connection)
    begun.refuses = True


def _refuse(connection: Connection) -> None:
    begun = begun_on(connection)
    if begun is None or not begun.refuses:
        return
    # Roll back at once: later work must not join the refused transaction.
    _roll_back_driver(connection.connection.dbapi_connection)
    raise IllegalStateError(
        "the connection was committed inside the block",
        next_step="the dual write commits when the block ends: remove the commit()",
    )


LISTENERS: Final = Listeners({"commit": _refuse})
"""Notice a COMMIT."""


def _stop_refusing(connection: Connection) -> None:
    begun = begun_on(connection)
    if begun is not None:
        begun.refuses = False


def run_deferred(connection: Connection, dialect: Dialect, transactional_id: str | None = None) -> None:
    """Run deferred constraints and triggers now, so that their time is spent before the decision.

    Raises:
        TransactionAborted: A constraint is violated, or the database failed; roll back.
    """
    driver = driver_of(connection)
    if driver is None or dialect.standing(driver) is not Standing.OPEN:
        return  # COMMIT will report it, with the cause
    try:
        dialect.run_deferred(connection)
    except exc.SQLAlchemyError as error:
        raise deferred_failed(error, transactional_id) from error


def deferred_failed(error: exc.SQLAlchemyError, transactional_id: str | None) -> TransactionAborted:
    """The error for a deferred constraint or trigger that has failed with this one."""
    return TransactionAborted(
        f"a check deferred to COMMIT failed: {driver_words(error)}",
        transactional_id=transactional_id,
        retryable=meaning_of(error) in _RETRYABLE,
    )


def commit(
    connection: Connection,
    dialect: Dialect,
    transactional_id: str | None = None,
    *,
    prepare_as: str | None = None,
    answer_s: float | None = None,
    joined: bool = False,
) -> None:
    """Commit the connection's transaction, or prepare it. It is durable on return, and only then.

    Args:
        connection: Inside a transaction.
        dialect: The adapter for the database.
        transactional_id: The transaction's Kafka id, for errors.
        prepare_as: Prepare the transaction under this name instead: plain ASCII without quotes.
        answer_s: Seconds to wait for the answer; None waits forever.
        joined: Called by SQLAlchemy while it commits the transaction; leave its own state of the transaction to it.

    Raises:
        TransactionAborted: The transaction has certainly been rolled back.
        TransactionInDoubt: The answer is missing: the transaction may have been committed, or may yet be. Also raised
            for any interruption (``KeyboardInterrupt``) while waiting. The connection was discarded.
    """
    verb = "COMMIT" if prepare_as is None else "PREPARE TRANSACTION"
    roll_back, throw_away = (rollback_joined, discard_joined) if joined else (rollback, discard)
    _stop_refusing(connection)
    leave_to_parent()
    driver = driver_of(connection)
    standing = Standing.BROKEN if driver is None else dialect.standing(driver)
    if driver is None or standing is Standing.BROKEN:
        roll_back(connection)
        raise TransactionAborted(
            f"the database connection was lost before {verb} was sent", transactional_id=transactional_id
        )
    if standing is Standing.FAILED:
        # The server would answer COMMIT with a silent ROLLBACK, and the driver would report success.
        roll_back(connection)
        raise TransactionAborted(
            f"a statement failed before, so {verb} would have been a ROLLBACK",
            transactional_id=transactional_id,
            next_step="stop after a failed statement, or run it in a savepoint (begin_nested)",
            retryable=False,
        )
    if standing is Standing.ENDED:
        throw_away(connection)
        raise _ended_before(verb, transactional_id)
    try:
        with dialect.bounded(connection, answer_s), dialect.commit_finds_none(driver) as found_none:
            if joined:
                _commit_driver(connection, driver)
            elif prepare_as is None:
                connection.commit()
            else:
                connection.exec_driver_sql(f"PREPARE TRANSACTION '{prepare_as}'")
                connection.rollback()  # only SQLAlchemy's state: the database has nothing left to roll back
    except BaseException as error:
        if dialect.certainly_rolled_back(driver, error):
            roll_back(connection)
            retryable = isinstance(error, exc.SQLAlchemyError) and meaning_of(error) in _RETRYABLE
            raise TransactionAborted(
                f"{verb} failed: {driver_words(error)}", transactional_id=transactional_id, retryable=retryable
            ) from error
        throw_away(connection, error)
        raise TransactionInDoubt(
            f"the answer to {verb} is missing: {driver_words(error)}", transactional_id=transactional_id
        ) from error
    if found_none:
        throw_away(connection)
        raise _ended_before(verb, transactional_id)


def _ended_before(verb: str, transactional_id: str | None) -> TransactionInDoubt:
    return TransactionInDoubt(
        f"other code ended the database transaction before {verb} was executed", transactional_id=transactional_id
    )


def rollback(connection: Connection) -> None:
    """Roll back any transaction of the connection. Never raises: discards a connection that cannot roll back.

    The server rolls back by itself when it notices that the connection is gone. Does nothing outside a transaction.
    """
    _stop_refusing(connection)
    leave_to_parent()
    driver = driver_of(connection)
    try:
        connection.rollback()
    except Exception as error:  # noqa: BLE001 - the caller already has an error to raise; log this one
        logger.warning("discarding a database connection that did not roll back: %s", driver_words(error))
        discard(connection, error)
        return
    _roll_back_driver(driver)


def rollback_joined(connection: Connection) -> None:
    """Roll back what the database has of a joined transaction. Never raises. Its own code ends it in SQLAlchemy."""
    leave_to_parent()
    _roll_back_driver(driver_of(connection))


def discard_joined(connection: Connection, error: BaseException | None = None) -> None:
    """Close the driver's connection of a joined transaction for good. Never raises."""
    leave_to_parent()
    if not connection.closed:
        connection.invalidate(error)


def _commit_driver(connection: Connection, driver: DBAPIConnection) -> None:
    """Send COMMIT below SQLAlchemy, and raise its errors."""
    try:
        driver.commit()
    except connection.dialect.loaded_dbapi.Error as error:
        raise exc.DBAPIError.instance(
            None, None, error, connection.dialect.loaded_dbapi.Error, dialect=connection.dialect
        ) from error


def driver_of(connection: Connection) -> DBAPIConnection | None:
    """The driver's connection; None if it is lost. Never connects again."""
    if connection.closed or connection.invalidated:
        return None
    return connection.connection.dbapi_connection


def _roll_back_driver(driver: DBAPIConnection | None) -> None:
    """Roll back below SQLAlchemy, which sends nothing after a COMMIT was called, even if a listener stopped it."""
    try:
        if driver is not None:
            driver.rollback()
    except Exception as error:  # noqa: BLE001 - drivers raise different errors; the pool also rolls back or closes
        logger.warning("the database connection did not roll back: %s", driver_words(error))


def discard(connection: Connection, error: BaseException | None = None) -> None:
    """Close the driver's connection for good, and leave SQLAlchemy's connection outside a transaction. Never raises."""
    _stop_refusing(connection)
    leave_to_parent()
    if connection.closed:
        return
    connection.invalidate(error)
    connection.rollback()
