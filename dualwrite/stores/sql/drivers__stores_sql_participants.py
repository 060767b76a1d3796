"""Names prepared transactions, and ends them.

PostgreSQL always flushes PREPARE TRANSACTION and COMMIT PREPARED, whatever the session's ``synchronous_commit``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import exc

from dualwrite.stores.sql.access__stores_sql_access_failures import sqlstate_of
from dualwrite.stores.sql.tables__stores_sql_tables_rows import digest

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.protocol.prepared_state import PreparedTxnState

PREFIX: Final = "dualwrite:"
_UNDEFINED_OBJECT: Final = "42704"
_DIGEST_LENGTH: Final = 32
_PARTS: Final = 3


def name_of(namespace: str, state: PreparedTxnState) -> str:
    """The name of the database transaction prepared together with a Kafka transaction: one decision covers both.

    A row's namespace is unique across all databases.
    """
    return f"{PREFIX}{namespace}:{state.incarnation}:{digest(state)[:_DIGEST_LENGTH]}"


def parse(name: str) -> tuple[str, int] | None:
    """Namespace and incarnation from a name made by :func:`name_of`; None for any other name."""
    parts = name[len(PREFIX) :].rsplit(":", 2)
    if len(parts) < _PARTS or not parts[1].isdecimal():
        return None
    return parts[0], int(parts[1])


def end(engine: Engine, name: str, *, committed: bool) -> None:
    """Commit or roll back a prepared transaction; does nothing if none has that name.

    Raises:
        SQLAlchemyError: The database failed.
    """
    verb = "COMMIT" if committed else "ROLLBACK"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        try:
            connection.exec_driver_sql(f"{verb} PREPARED '{name}'")
        except exc.DBAPIError as error:
            if sqlstate_of(error.orig) != _UNDEFINED_OBJECT:
                raise
