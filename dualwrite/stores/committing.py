"""COMMIT or PREPARE TRANSACTION with the truth about its outcome, and ROLLBACK of whatever is left of a connection.

Nobody else's COMMIT.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from sqlalchemy import event, exc

from dualwrite.errors import IllegalStateError, TransactionAborted, TransactionInDoubt
from dualwrite.stores.dialect import Dialect, Standing
from dualwrite.stores.failures import Meaning, driver_words, meaning_of

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.engine.interfaces import DBAPIConnection

logger = logging.getLogger(__name__)

_RETRYABLE: Final = frozenset({Meaning.CONFLICT, Meaning.BUSY, Meaning.GONE, Meaning.FULL})


def refuse_commits(connection: Connection) -> None:
    """Refuse every COMMIT of the connection's transaction until :func:`commit` or :func:`rollback`."""
    event.listen(connection, "commit", _refuse)


def _refuse(connection: Connection) -> None:
    _roll_back_driver(connection.connection.dbapi_connection)  # now: work may go on, and must not join what is refused
    raise IllegalStateError(
        "the connection was committed inside the block",
        next_step="the dual write commits when the block ends: remove the commit()",
    )


def _stop_refusing(connection: Connection) -> None:
    if event.contains(connection, "commit", _refuse):
        event.remove(connection, "commit", _refuse)


def run_deferred(connection: Connection, dialect: Dialect, transactional_id: str | None = None) -> None:
    """Make everything that was deferred to COMMIT run now, so that the time it takes comes before the decision.

    Raises:
        TransactionAborted: A constraint is violated, or the database failed; to be rolled back.
    """
    driver = _driver_of(connection)
    if driver is None or dialect.standing(driver) is not Standing.OPEN:
        return  # COMMIT will say so, and why
    try:
        dialect.run_deferred(connection)
    except exc.SQLAlchemyError as error:
        raise TransactionAborted(
            f"what was deferred to COMMIT failed: {driver_words(error)}",
            transactional_id=transactional_id,
            retryable=meaning_of(error) in _RETRYABLE,
        ) from error


def commit(
    connection: Connection,
    dialect: Dialect,
    transactional_id: str | None = None,
    *,
    prepare_as: str | None = None,
    answer_s: float | None = None,
) -> None:
    """Commit the connection's transaction, or prepare it. It is durable on return, and only then.

    Args:
        connection: Inside a transaction.
        dialect: The adapter for the database.
        transactional_id: What the transaction was about, for the errors.
        prepare_as: Prepare it under this name instead: plain ASCII without quotes.
        answer_s: How long to wait for the answer, in seconds; None for ever.

    Raises:
        TransactionAborted: It has certainly been rolled back.
        TransactionInDoubt: It may have been committed, or may yet be: the answer is missing. Also for an interruption of
            any kind (``KeyboardInterrupt``) while the answer was awaited. The connection was thrown away.
    """
    verb = "COMMIT" if prepare_as is None else "PREPARE TRANSACTION"
    _stop_refusing(connection)
    driver = _driver_of(connection)
    standing = Standing.BROKEN if driver is None else dialect.standing(driver)
    if driver is None or standing is Standing.BROKEN:
        rollback(connection)
        raise TransactionAborted(
            f"the database connection was lost before {verb} was sent", transactional_id=transactional_id
        )
    if standing is Standing.FAILED:
        # The server would answer COMMIT with a silent ROLLBACK, and the driver would call that a success.
        rollback(connection)
        raise TransactionAborted(
            f"a statement had failed, so that {verb} would have been a ROLLBACK",
            transactional_id=transactional_id,
            next_step="do not go on after a failed statement, or run it in a savepoint (begin_nested)",
            retryable=False,
        )
    if standing is Standing.ENDED:
        discard(connection)
        raise TransactionInDoubt(
            f"the database transaction was ended by somebody else before {verb} was sent",
            transactional_id=transactional_id,
        )
    try:
        with dialect.bounded(connection, answer_s):
            if prepare_as is None:
                connection.commit()
            else:
                connection.exec_driver_sql(f"PREPARE TRANSACTION '{prepare_as}'")
                connection.rollback()  # of SQLAlchemy's own: there is nothing left to roll back
    except BaseException as error:
        if dialect.certainly_rolled_back(driver, error):
            rollback(connection)
            retryable = isinstance(error, exc.SQLAlchemyError) and meaning_of(error) in _RETRYABLE
            raise TransactionAborted(
                f"{verb} failed: {driver_words(error)}", transactional_id=transactional_id, retryable=retryable
            ) from error
        discard(connection, error)
        raise TransactionInDoubt(
            f"the answer to {verb} is missing: {driver_words(error)}", transactional_id=transactional_id
        ) from error


def rollback(connection: Connection) -> None:
    """Roll back whatever the connection has open. Never raises: a connection that cannot do it is thrown away.

    The server rolls back by itself when it notices that the connection is gone. Does nothing outside a transaction.
    """
    _stop_refusing(connection)
    driver = _driver_of(connection)
    try:
        connection.rollback()
    except Exception as error:  # noqa: BLE001 - the caller has an error of its own to report; this one is logged
        logger.warning("the database connection did not roll back and is thrown away: %s", driver_words(error))
        discard(connection, error)
        return
    _roll_back_driver(driver)


def _driver_of(connection: Connection) -> DBAPIConnection | None:
    if connection.closed or connection.invalidated:
        return None
    return connection.connection.dbapi_connection


def _roll_back_driver(driver: DBAPIConnection | None) -> None:
    """Roll back below SQLAlchemy, which sends nothing once a COMMIT was called, not even where a listener stopped it."""
    try:
        if driver is not None:
            driver.rollback()
    except Exception as error:  # noqa: BLE001 - drivers differ in what they raise; the pool rolls back or closes it too
        logger.warning("the database connection did not roll back: %s", driver_words(error))


def discard(connection: Connection, error: BaseException | None = None) -> None:
    """Close the driver's connection for good, and leave SQLAlchemy's outside a transaction. Never raises."""
    _stop_refusing(connection)
    if connection.closed:
        return
    connection.invalidate(error)
    connection.rollback()
