"""The state store for dual writes in transactions that other code begins and ends, such as an ORM session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualwrite.stores.sql import dialect__stores_sql_dialects_committing
from dualwrite.stores.sql.access import keep, let_go
from dualwrite.stores.sql.store import SqlStateStore

if TYPE_CHECKING:
    from sqlalchemy import Connection


class JoinedStore(SqlStateStore):
    """As :class:`SqlStateStore`, but the connection is inside a transaction of SQLAlchemy's when a dual write begins on it.

    :meth:`begin` joins that transaction. :meth:`commit` may be called only by the code that SQLAlchemy calls to send its
    COMMIT; it and :meth:`rollback` end the database's transaction, and leave SQLAlchemy's own state to its owner. Nothing
    refuses the owner's COMMIT here: the owner of the connection must turn it into that of the dual write.
    """

    def check_same_database(self, connection: Connection) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.check_same_database`. The transaction continues."""
        self._same_database.check(connection)

    def begin(self, connection: Connection) -> None:
        """Join the transaction. On SQLite this takes the write lock.

        Raises:
            IllegalStateError: The transaction has gone too far for that.
            ConfigurationError, Unavailable: As :meth:`SqlStateStore.begin`.
        """
        with self._mapped():
            joined_late = self._dialect.join(connection, self._tables)
        keep(connection, joined_late=joined_late)

    def commit(self, connection: Connection, *, answer_s: float | None = None) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.commit`."""
        try:
            dialect__stores_sql_dialects_committing.commit(
                connection, self._dialect, self._decided(connection), answer_s=answer_s, joined=True
            )
        finally:
            let_go(connection)
            self._dialect.restore(connection)

    def rollback(self, connection: Connection) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.rollback`."""
        dialect__stores_sql_dialects_committing.rollback_joined(connection)
        let_go(connection)
        self._dialect.restore(connection)

    def discard(self, connection: Connection) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.discard`."""
        dialect__stores_sql_dialects_committing.discard_joined(connection)
        let_go(connection)
