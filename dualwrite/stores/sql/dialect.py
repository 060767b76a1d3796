"""The protocol that hides the differences between databases. The adapters are ``postgresql``, ``mariadb``, ``sqlite``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Insert, Table, Update
    from sqlalchemy.engine.interfaces import DBAPIConnection

    from dualwrite.protocol.process__protocol_settling_commit_in_doubt import DatabaseVerdict
    from dualwrite.stores.sql.drivers__stores_sql_drivers_compiled import CompiledOnce
    from dualwrite.stores.sql.savepoint_probe import Follower, Witness
    from dualwrite.stores.sql.tables import Tables


class Standing(Enum):
    """The status of a transaction, as the driver knows it without asking the server."""

    OPEN = "open"
    FAILED = "failed: the database would answer COMMIT with a ROLLBACK"
    ENDED = "not open"
    BROKEN = "the connection is lost"


@dataclass(frozen=True)
class Identity:
    """Identifies a database. The values have no meaning by themselves: compare two identities.

    Attributes:
        database: The running server process and the database in it; or the file.
        table: The library's state table there; None if there is none.
    """

    database: tuple[object, ...]
    table: object


class Dialect(Protocol):
    """One kind of database through one driver."""

    name: str
    shows_statements: bool
    """Whether the driver shows all statements that it sends, also those of other code than SQLAlchemy."""
    quotes_keep_case: bool
    """Whether quoted names that differ only in case name different savepoints."""

    def refuse_left_open(self, connection: Connection) -> None:
        """Refuse a connection that other code has left in a transaction, past SQLAlchemy.

        Raises:
            IllegalStateError: It has: :data:`~dualwrite.stores.sql.access.LEFT_OPEN`.
        """
        ...

    def begin(self, connection: Connection, tables: Tables) -> None:
        """Begin a transaction that can hold a decision.

        Raises:
            IllegalStateError: The connection is in a transaction.
            ConfigurationError: The connection is in autocommit or read-only, or its commits would not survive a crash.
            SQLAlchemyError: The database failed.
        """
        ...

    def join(self, connection: Connection, tables: Tables) -> bool:
        """Make a transaction that other code has begun one that can hold a decision.

        Returns:
            Whether statements have been executed in it, for :meth:`check_start` to judge.

        Raises:
            IllegalStateError: It has gone too far for that.
            ConfigurationError, SQLAlchemyError: As :meth:`begin`.
        """
        ...

    def begin_own(self, connection: Connection, tables: Tables, *, lock_timeout_s: float) -> None:
        """Begin one of the store's own transactions: on the primary, at READ COMMITTED, durable, with limited waits.

        Raises:
            ConfigurationError: The database is a standby, read-only, or not durable.
            SQLAlchemyError: The database failed.
        """
        ...

    def begin_reading(self, connection: Connection) -> None:
        """Begin a short transaction that only reads.

        Raises:
            ConfigurationError: The database is a standby, which may show old data.
        """
        ...

    def start_columns(self) -> Sequence[ColumnElement[object]]:
        """Columns that a dual write's first statement reads beside the incarnation; may configure the transaction."""
        ...

    def check_start(self, connection: Connection, values: Sequence[object]) -> None:
        """Check the values of :meth:`start_columns`.

        Raises:
            ConfigurationError: The transaction is read-only.
        """
        ...

    def is_begun(self) -> Sequence[ColumnElement[bool]]:
        """The conditions that a statement is executed in the transaction that was begun, as far as SQL can say it.

        Part of every statement that decides: whatever ends the transaction unseen (a program, a trigger, a forked process, a
        pooler), no statement that stands alone can decide without the rows.
        """
        ...

    def begun(self, connection: Connection) -> Mapping[str, object]:
        """The values of :meth:`is_begun`."""
        ...

    def require_begun(self, connection: Connection) -> None:
        """Check that the connection's transaction is still the one that was begun.

        Raises:
            IllegalStateError: It was ended; see :func:`~dualwrite.stores.sql.access__stores_sql_access_failures.ended_inside`.
            TransactionAborted: The database has rolled it back.
            SQLAlchemyError: The database failed.
        """
        ...

    def end_columns(self) -> Sequence[ColumnElement[object]]:
        """Columns that a dual write's last statement returns; may make the COMMIT durable."""
        ...

    def check_end(self, connection: Connection, values: Sequence[object]) -> str | None:
        """Check the values of :meth:`end_columns`. Returns the database's name of the transaction, if it has one.

        Raises:
            IllegalStateError, TransactionAborted: As :meth:`require_begun`, where :meth:`is_begun` cannot say all of it.
        """
        ...

    def deciding(
        self, update: Update, *, idle_ms: ColumnElement[int | None], within_ms: ColumnElement[int | None]
    ) -> Update:
        """The statement that records a decision, from the UPDATE of its row.

        Args:
            update: The UPDATE.
            idle_ms: The server ends the session after this time without a statement; NULL keeps the current limit.
            within_ms: The server ends the transaction after this time, even during COMMIT; NULL keeps the current
                limit.
        """
        ...

    def read_first(self, connection: Connection, statement: CompiledOnce, bound: Mapping[str, Any]) -> Sequence[object]:
        """Execute the first statement of a dual write, with BEGIN in the same exchange if the driver has sent none.

        Returns:
            Its one row.

        Raises:
            SQLAlchemyError: The database failed.
        """
        ...

    def ask_last(
        self,
        connection: Connection,
        statement: CompiledOnce,
        bound: Mapping[str, Any],
        *,
        decides: bool,
        deferred_of: str | None = None,
    ) -> Sequence[object] | None:
        """Execute the last statement of a dual write.

        Args:
            connection: Inside the transaction.
            statement: That of :meth:`deciding`, or a SELECT of :meth:`end_columns`.
            bound: Its values; ``idle_ms_`` and ``within_ms_`` among them if it decides.
            decides: Whether it is that of :meth:`deciding`.
            deferred_of: The id of a dual write for which :meth:`run_deferred` goes before, in the same exchange if it can.

        Returns:
            The values for :meth:`check_end`; None if no row matched.

        Raises:
            TransactionAborted: A deferred constraint is violated; or the transaction can no longer decide.
            SQLAlchemyError: The database failed.
        """
        ...

    def require_not_rolled_back(self, connection: Connection) -> None:
        """Refuse to continue after an error with which the database has rolled back the whole transaction.

        Raises:
            TransactionAborted: It has: it would execute the next statement in another one.
        """
        ...

    def restore(self, connection: Connection) -> None:
        """Set the session's settings back, once the transaction has ended. Never raises."""
        ...

    def run_deferred(self, connection: Connection) -> None:
        """Run now what is deferred to COMMIT: constraints and their triggers.

        Raises:
            SQLAlchemyError: A constraint is violated, or the database failed.
        """
        ...

    def commit_finds_none(self, driver: DBAPIConnection) -> AbstractContextManager[Sequence[object]]:
        """For a COMMIT in the block: what is given is not empty afterwards if the server had no transaction to commit."""
        ...

    def bounded(self, connection: Connection, seconds: float | None) -> AbstractContextManager[object]:
        """Make waits for the database in the block fail after this time, if any. The connection may then be lost."""
        ...

    def begins_with(self, name: ColumnElement[str], prefix: str) -> ColumnElement[bool]:
        """The condition that a name begins with exactly that prefix. An index on the names serves it."""
        ...

    def identity(self, connection: Connection, tables: Tables) -> Identity:
        """The database and table that statements on this connection reach. It is outside a transaction, or only reads.

        Raises:
            SQLAlchemyError: The database failed.
        """
        ...

    def witness(self, connection: Connection, follower: Follower) -> Witness:
        """Start watching what is sent on the driver's connection. If it :attr:`shows_statements`, the follower hears of it."""
        ...

    def insert_if_missing(self, table: Table) -> Insert:
        """An INSERT of one row that does nothing if a row with that key exists."""
        ...

    def standing(self, driver: DBAPIConnection) -> Standing:
        """The status of the driver's transaction, without a round trip."""
        ...

    def certainly_rolled_back(self, driver: DBAPIConnection, error: BaseException) -> bool:
        """Whether a COMMIT that ended with this error certainly did not happen, and can no longer happen."""
        ...

    def prepared_transactions(self, connection: Connection) -> Sequence[tuple[str, datetime]]:
        """The names of this library's prepared transactions in this database, and when each was prepared."""
        ...

    def verdict(self, connection: Connection, transaction: str) -> DatabaseVerdict:
        """The database's verdict on a transaction that :meth:`check_end` named."""
        ...
