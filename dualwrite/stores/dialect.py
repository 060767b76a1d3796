"""What differs between databases, behind one small protocol. The adapters are ``postgresql`` and ``sqlite``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Insert, Table
    from sqlalchemy.engine.interfaces import DBAPIConnection

    from dualwrite.protocol.doubt import DatabaseVerdict
    from dualwrite.stores.tables import Tables
    from dualwrite.stores.witness import Witness


class Standing(Enum):
    """How a transaction stands, as the driver knows without asking the server."""

    OPEN = "open"
    FAILED = "failed: the database would answer COMMIT with a ROLLBACK"
    ENDED = "not open"
    BROKEN = "the connection is lost"


@dataclass(frozen=True)
class Identity:
    """What tells one database from another, by values that only the comparison of two of them gives a meaning.

    Attributes:
        database: The server that runs now, and the database in it; or the file.
        table: The library's table of states there; None where there is none.
    """

    database: tuple[object, ...]
    table: object


class Dialect(Protocol):
    """One kind of database through one driver."""

    name: str
    quotes_keep_case: bool
    """Whether names in quotes that differ in case name different savepoints."""

    def begin(self, connection: Connection, tables: Tables) -> None:
        """Begin a transaction that can hold a decision.

        Raises:
            IllegalStateError: The connection is in a transaction.
            ConfigurationError: It is in autocommit, read-only, or what it commits would not survive a crash.
            SQLAlchemyError: The database failed.
        """
        ...

    def begin_own(self, connection: Connection, tables: Tables, *, lock_timeout_s: float) -> None:
        """Begin one of the store's own short transactions: on the primary, at READ COMMITTED, durable, with bounded waits.

        Raises:
            ConfigurationError: It is a standby, read-only, or not durable.
            SQLAlchemyError: The database failed.
        """
        ...

    def begin_reading(self, connection: Connection) -> None:
        """Begin a short transaction that only reads.

        Raises:
            ConfigurationError: It is a standby: what it shows may be old.
        """
        ...

    def start_columns(self) -> Sequence[ColumnElement[object]]:
        """What the first statement of a dual write reads beside the incarnation; may set what holds for the transaction."""
        ...

    def check_start(self, connection: Connection, values: Sequence[object]) -> None:
        """Judge the values of :meth:`start_columns`.

        Raises:
            ConfigurationError: The transaction is read-only.
        """
        ...

    def end_columns(self) -> Sequence[ColumnElement[object]]:
        """What the last statement of a dual write returns; may make the COMMIT durable."""
        ...

    def check_end(self, connection: Connection, values: Sequence[object]) -> str | None:
        """Judge the values of :meth:`end_columns`; returns the database's name of the transaction where it has one.

        Raises:
            IllegalStateError: The transaction is not the one that :meth:`begin` began.
        """
        ...

    def limits(
        self, *, idle_ms: ColumnElement[int | None], within_ms: ColumnElement[int | None]
    ) -> Sequence[ColumnElement[object]]:
        """What the record of a decision returns beside :meth:`end_columns`, and sets for the rest of the transaction.

        Args:
            idle_ms: The server ends the session if nothing is sent for so long; NULL leaves what is in force.
            within_ms: The server ends the transaction, in its COMMIT as well, after so long; NULL leaves what is in force.
        """
        ...

    def run_deferred(self, connection: Connection) -> None:
        """Make everything that was deferred to COMMIT run now: constraints and their triggers.

        Raises:
            SQLAlchemyError: A constraint is violated, or the database failed.
        """
        ...

    def bounded(self, connection: Connection, seconds: float | None) -> AbstractContextManager[object]:
        """Make what waits for the database in the block fail after so long, if at all; the connection may be lost then."""
        ...

    def begins_with(self, name: ColumnElement[str], prefix: str) -> ColumnElement[bool]:
        """Whether a name begins with exactly that prefix: a condition that an index on the names answers."""
        ...

    def identity(self, connection: Connection, tables: Tables) -> Identity:
        """Where a statement about the library's tables goes on this connection, which is outside a transaction or reads only.

        Raises:
            SQLAlchemyError: The database failed.
        """
        ...

    def witness(self, connection: Connection) -> Witness:
        """Begin to notice what runs on the driver's connection past SQLAlchemy."""
        ...

    def insert_if_missing(self, table: Table) -> Insert:
        """An INSERT of one row that does nothing where a row of that key exists."""
        ...

    def standing(self, driver: DBAPIConnection) -> Standing:
        """How the driver's transaction stands, without a round trip."""
        ...

    def certainly_rolled_back(self, driver: DBAPIConnection, error: BaseException) -> bool:
        """Whether a COMMIT that ended with this error has certainly not happened, and cannot happen any more."""
        ...

    def prepared_transactions(self, connection: Connection) -> Sequence[tuple[str, datetime]]:
        """The names of this library's prepared transactions in this database, and since when they wait."""
        ...

    def verdict(self, connection: Connection, transaction: str) -> DatabaseVerdict:
        """The database's word about a transaction that :meth:`check_end` named."""
        ...
