"""The database leg by prepared transactions: tasks load the target and prepare; one decision commits or aborts all of them.

Prepared rows keep their locks, and stay invisible, until the settler of their slot ends the transaction
(:func:`dualwrite.recovery.settle.end_participants`): the driver right after its decision, or the next driver.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import psycopg.errors
from sqlalchemy import Connection, exc, text

from dualwrite.errors import ConfigurationError, TransactionAborted
from dualwrite.stores.sql.access__stores_sql_access_failures import map_database_error

if TYPE_CHECKING:
    from sqlalchemy import Engine

_LONGEST_WAIT: Final = "30s"
_PRESENT: Final = text(
    "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database() AND gid = ANY(:names)"
)
_ROOM: Final = text(
    "SELECT current_setting('max_prepared_transactions')::int, (SELECT count(*) FROM pg_prepared_xacts)"
)
_NO_ROOM: Final = "prepared transactions"
_MORE_PREPARED: Final = (
    "set max_prepared_transactions to at least the number of partitions of all batches that are written at once, and restart "
    "the database; or end those that nobody decides on (dualwrite recover), write fewer partitions, or set databaseLeg to "
    '"staging"'
)
_ALLOWED: Final = text(
    "SELECT has_schema_privilege(:schema, 'CREATE'), current_setting('max_prepared_transactions')::int"
)


def choose_staging(engine: Engine, wanted: str, schema: str, *, moves: bool) -> bool:
    """See :meth:`SinkDatabase.choose_staging`."""
    try:
        with engine.connect() as connection:
            may_create, most_prepared = connection.execute(_ALLOWED, {"schema": schema}).one()
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, engine) from error
    if wanted == "staging" or (wanted == "auto" and may_create):
        return True
    if moves:
        raise ConfigurationError(
            "rows that replace others, and a table that is emptied first, need staging tables",
            next_step=f'set databaseLeg to "staging"; the user needs CREATE on the schema {schema!r}',
        )
    if most_prepared == 0:
        raise ConfigurationError(
            "the database takes no prepared transactions",
            next_step=f"{_MORE_PREPARED} (which needs CREATE on the schema {schema!r})",
        )
    return False


def require_room(connection: Connection) -> None:
    """Make sure, before rows are written, that the database takes one more prepared transaction.

    Raises:
        ConfigurationError: It does not. (Another task may still take the last place before us; see :func:`ran_out`.)
    """
    most, present = connection.execute(_ROOM).one()
    if present >= most:
        raise ConfigurationError(
            f"the database takes {most} prepared transactions, and has {present}", next_step=_MORE_PREPARED
        )


def ran_out(error: BaseException | None) -> TransactionAborted | None:
    """The error for a PREPARE TRANSACTION that exceeded ``max_prepared_transactions``; None if `error` has another cause."""
    while error is not None:
        if isinstance(error, psycopg.errors.OutOfMemory) and _NO_ROOM in str(error):
            return TransactionAborted(
                "the database takes no more prepared transactions", next_step=_MORE_PREPARED, retryable=False
            )
        error = error.__cause__
    return None


def bound_waiting(connection: Connection) -> None:
    """Limit the lock waits of this transaction: another attempt's prepared rows may hold the same keys forever."""
    connection.execute(text(f"SET LOCAL lock_timeout = '{_LONGEST_WAIT}'"))


def waited_in_vain(error: BaseException | None) -> bool:
    """Whether a lock was not free in time."""
    while error is not None:
        if isinstance(error, psycopg.errors.LockNotAvailable):
            return True
        error = error.__cause__
    return False


def require_prepared(connection: Connection, names: Collection[str], name: str) -> None:
    """See :meth:`SinkDatabase.require_prepared`."""
    present: int = connection.execute(_PRESENT, {"names": list(names)}).scalar_one() if names else 0
    if present != len(names):
        raise TransactionAborted(
            f"{name}: of {len(names)} prepared database transactions {present} are there: the others have been ended",
            next_step="run the batch again",
        )
