"""Runs: which run of a batch may still write. Beginning the next run, or giving one up, replaces the run's token.

A task checks its run's token in the transactions that matter: when it leases a slot, and in the last statement before
its rows are decided, or stay in the database undecided. It keeps a lock on the run until that transaction ends, or
until it is resolved if it ends prepared. So the token is replaced only once every task that passed the check has ended
its transaction, and the replacing process sees what those left; all later tasks are refused. Otherwise a task slower
than its job's failure would commit behind its back, or leave locks, tables and open transactions behind.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import and_, exc, select, update

from dualwrite.errors import Fenced
from dualwrite.stores.sql.access__stores_sql_access_failures import map_database_error
from dualwrite.stores.sql.short_transactions import ShortTransactions, dialect_of
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.stores.sql.tables__stores_sql_tables_clock import database_now
from dualwrite.stores.sql.tables__stores_sql_tables_rows import check_name

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine


@dataclass(frozen=True)
class Run:
    """One run of a batch, as its tasks know it. Pickles.

    Attributes:
        sink: Name of the sink.
        name: The batch within the sink; or a stream, whose batches follow each other.
        token: Unique to this run.
    """

    sink: str
    name: str
    token: str


class Runs:
    """The runs in one database.

    Args:
        engine: The database.
        schema: The database schema of the library's tables; None for the default one.

    Raises:
        ConfigurationError: The database is not supported.
    """

    def __init__(self, engine: Engine, schema: str | None = None) -> None:
        self._engine = engine
        self._schema = schema
        self._dialect = dialect_of(engine)
        tables = declare_tables(schema)
        self._run = tables.run
        self._own = ShortTransactions(engine, self._dialect, tables)

    def present(self, sink: str, name: str) -> Run:
        """The run that may write; begins one if there is none. Ends no other run.

        Raises:
            ConfigurationError, Unavailable: As :meth:`replace`.
        """
        run = self._run
        statement = select(run.c.token).where(run.c.sink == sink, run.c.name == name)

        def work(connection: Connection) -> str:
            self._add(connection, sink, name)
            token: str = connection.execute(statement).scalar_one()
            return token

        return Run(sink, name, self._own.run(work))

    def replace(self, sink: str, name: str) -> Run | None:
        """Begin the next run, after which :meth:`require` refuses tasks of earlier runs. Does not wait.

        Returns:
            The new run. None if a task that :meth:`require` let through still has a transaction open or prepared:
            nothing has changed. Settle what is prepared, and call again.

        Raises:
            ConfigurationError: The table or a right is missing, a name cannot be a key, the database is read-only.
            Unavailable: The database does not answer.
        """
        run = self._run
        of_batch = (run.c.sink == sink, run.c.name == name)
        free = select(run.c.token).where(*of_batch).with_for_update(skip_locked=True)
        token = secrets.token_hex(16)

        def work(connection: Connection) -> bool:
            self._add(connection, sink, name)
            if connection.execute(free).one_or_none() is None:
                return False
            connection.execute(update(run).where(*of_batch).values(token=token, begun_at=database_now()))
            return True

        return Run(sink, name, token) if self._own.run(work) else None

    def require(self, connection: Connection, run: Run) -> None:
        """Let a task continue if it belongs to this run. Call it inside the task's transaction.

        Until that transaction ends, and beyond if it is prepared, the run cannot be replaced.

        Raises:
            Fenced: Another run has begun, or this one was given up.
            ConfigurationError, Unavailable, TransactionAborted: The transaction has failed.
        """
        table = self._run
        statement = (
            select(table.c.token)
            .where(and_(table.c.sink == run.sink, table.c.name == run.name, table.c.token == run.token))
            .with_for_update(read=True)
        )
        try:
            found = connection.execute(statement).one_or_none()
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self._engine, self._schema) from error
        if found is None:
            raise Fenced(
                f"this run of {run.name!r} of sink {run.sink!r} was given up, or another one has begun",
                next_step="nothing of this task counts; look for the job's own error, or for another job that writes the same",
            )

    def _add(self, connection: Connection, sink: str, name: str) -> None:
        check_name(sink, "the name of a sink")
        check_name(name, "the name of a batch")
        row = {"sink": sink, "name": name, "token": secrets.token_hex(16)}
        connection.execute(self._dialect.insert_if_missing(self._run).values(begun_at=database_now()), row)
