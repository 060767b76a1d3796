"""The ORM session of a dual write, or of one of its units: made at first use, on its connection, and on no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlalchemy import event

from dualwrite.errors import ConfigurationError, DualWriteError, TransactionAborted

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, SessionTransaction


class OwnSession:
    """Makes the session, flushes and closes it.

    Args:
        connection: The connection.
        factory: Makes the session, called with ``bind=connection``.
        transactional_id: The id of the dual write.
        refuse: Called with the error that must abort the work even if it continues.
        savepoint: Whether the session works in a savepoint. SQLAlchemy rolls back what a session has joined if its flush fails.
    """

    def __init__(
        self,
        connection: Connection,
        factory: Callable[..., Session],
        transactional_id: str,
        refuse: Callable[[DualWriteError], None],
        *,
        savepoint: bool = False,
    ) -> None:
        self._connection = connection
        self._factory = factory
        self._id = transactional_id
        self._refuse = refuse
        self._savepoint = savepoint
        self._closing = False
        self._made: Session | None = None

    @property
    def session(self) -> Session:
        """The session."""
        if self._made is None:
            self._made = self._factory(bind=self._connection)
            if self._savepoint:
                self._made.join_transaction_mode = "create_savepoint"
                event.listen(self._made, "after_soft_rollback", self._refuse_rollback)
            event.listen(self._made, "after_begin", self._refuse_other_connection)
        return self._made

    def _refuse_other_connection(self, session: Session, transaction: object, connection: Connection) -> None:
        """Refuse another connection: what a class bound to another engine wrote there would be rolled back in the end."""
        del session, transaction
        if connection is not self._connection:
            error = ConfigurationError(
                "the session began on another connection, not the dual write's",
                transactional_id=self._id,
                next_step="leave binds out of session_factory: a dual write is decided in one database",
            )
            self._refuse(error)
            raise error

    def _refuse_rollback(self, session: Session, transaction: SessionTransaction) -> None:
        """Refuse further work: messages before the session's savepoint would outlive the rows in it."""
        del session
        if transaction.parent is None and not self._closing:
            self._refuse(
                TransactionAborted(
                    "the session of the unit was rolled back",
                    transactional_id=self._id,
                    next_step="use begin_nested() for what may fail",
                    retryable=False,
                )
            )

    def flush(self) -> None:
        """Flush the session, if there is one."""
        if self._made is not None:
            self._made.flush()

    def close(self) -> None:
        """Close the session, if there is one. Its objects stay readable."""
        self._closing = True
        if self._made is not None:
            self._made.close()
