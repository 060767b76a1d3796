"""The SQL of forgetting: ids that never come back, incidents acknowledged long ago, runs long over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import ColumnElement, and_, delete, exc, func, or_, select, tuple_, union_all

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.values__protocol_naming import owner_prefix, pool_of_sink
from dualwrite.stores.sql.access__stores_sql_access_failures import Meaning, meaning_of
from dualwrite.stores.sql.access__stores_sql_access_grants import grants_to_delete
from dualwrite.stores.sql.short_transactions import ShortTransactions, dialect_of
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.stores.sql.tables__stores_sql_tables_clock import database_now
from dualwrite.stores.sql.tables__stores_sql_tables_rows import in_chunks

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from dualwrite.protocol.values__protocol_rows import StateRow

Result = TypeVar("Result")


class _InUseError(Exception):
    """A row has changed since it was read."""


class Forgetting:
    """Deletes rows that are no longer needed, in short transactions of its own.

    Args:
        engine: The database.
        schema: The schema of the library's tables.

    Raises:
        ConfigurationError: Raised by the methods: a right is missing; the message holds the ``GRANT``.
        Unavailable: Raised by the methods: the database does not answer.
    """

    def __init__(self, engine: Engine, schema: str | None = None) -> None:
        self._engine = engine
        self._dialect = dialect_of(engine)
        self._tables = declare_tables(schema)
        self._own = ShortTransactions(engine, self._dialect, self._tables)

    def now(self) -> datetime:
        """The database's time."""

        def ask(connection: Connection) -> datetime:
            moment: datetime = connection.execute(select(database_now())).scalar_one()
            return moment

        return self._own.read(ask)

    def leased(self) -> set[str]:
        """The ids of slots that a worker holds, or may still continue with, and those of fleets that a member holds."""
        slot, lease = self._tables.slot, self._tables.lease
        statement = union_all(
            select(slot.c.transactional_id).where(self._is_leased()),
            select(lease.c.transactional_id).where(lease.c.lease_until > database_now()),
        )
        return self._own.read(lambda connection: set(connection.scalars(statement)))

    def _is_leased(self) -> ColumnElement[bool]:
        slot, now = self._tables.slot, database_now()
        return or_(slot.c.lease_until > now, slot.c.kept_until > now)

    def forget(self, rows: Sequence[StateRow]) -> bool:
        """Delete the rows with their slots and leases, all or none. Durable on return.

        A writer that is still open is thereby fenced: its next dual write aborts on both sides.

        Returns:
            False if a row was used since it was read, or its slot or lease is held: nothing was deleted.
        """

        def work(connection: Connection) -> bool:
            state, slot, lease = self._tables.state, self._tables.slot, self._tables.lease
            for row in rows:
                unchanged = and_(
                    state.c.transactional_id == row.transactional_id,
                    state.c.namespace == row.namespace,
                    state.c.incarnation == row.incarnation,
                    state.c.updated_at == row.updated_at,
                )
                if connection.execute(delete(state).where(unchanged)).rowcount != 1:
                    raise _InUseError
                of_row = slot.c.transactional_id == row.transactional_id
                connection.execute(delete(slot).where(of_row, ~func.coalesce(self._is_leased(), False)))
                if connection.scalar(select(func.count()).where(of_row)):
                    raise _InUseError
                of_row = lease.c.transactional_id == row.transactional_id
                connection.execute(
                    delete(lease).where(of_row, ~func.coalesce(lease.c.lease_until > database_now(), False))
                )
                if connection.scalar(select(func.count()).where(of_row)):
                    raise _InUseError
            return True

        try:
            return self._permitted(lambda: self._own.run(work))
        except _InUseError:
            return False

    def forget_incidents(
        self, prefix: str, acknowledged_before: datetime, *, dry_run: bool, name: str | None = None
    ) -> int:
        """Delete incidents that were acknowledged before that time. Durable on return.

        Args:
            prefix: Only ids with this prefix.
            acknowledged_before: By the database's clock.
            dry_run: Only count them.
            name: A writer's id, which includes its lanes, instead of the prefix.

        Returns:
            The number of incidents.
        """
        incident = self._tables.incident
        column = incident.c.transactional_id
        chosen = (
            self._dialect.begins_with(column, prefix)
            if name is None
            else or_(column == name, self._dialect.begins_with(column, f"{name}#"))
        )
        old = and_(chosen, incident.c.acknowledged_at < acknowledged_before)
        if dry_run:
            count = select(func.count()).select_from(incident).where(old)
            return self._own.read(lambda connection: connection.scalar(count) or 0)
        return self._permitted(
            lambda: self._own.run(lambda connection: connection.execute(delete(incident).where(old)).rowcount)
        )

    def forget_runs(self, prefix: str, begun_before: datetime, *, dry_run: bool, name: str | None = None) -> int:
        """Delete the rows of runs that began before that time and have no worker. Durable on return.

        A batch that is run again, or a stream that continues, begins its next run; a task of a deleted run is refused.

        Args:
            prefix: Only sinks whose slot pool has this prefix in its name.
            begun_before: By the database's clock.
            dry_run: Only count them.
            name: One pool's name, instead of the prefix.

        Returns:
            The number of runs.
        """
        run, slot = self._tables.run, self._tables.slot
        of_run = tuple_(run.c.sink, run.c.name)
        leased = select(slot.c.pool, slot.c.lease_owner).where(slot.c.lease_until > database_now())

        def find(connection: Connection) -> Sequence[tuple[str, str]]:
            owners: dict[str, list[str]] = defaultdict(list)
            for pool, owner in connection.execute(leased):
                owners[pool].append(owner)
            return [
                (sink, of_batch)
                for sink, of_batch in connection.execute(
                    select(run.c.sink, run.c.name).where(run.c.begun_at < begun_before)
                )
                if (pool_of_sink(sink) == name if name is not None else pool_of_sink(sink).startswith(prefix))
                and not any(owner.startswith(owner_prefix(of_batch)) for owner in owners[pool_of_sink(sink)])
            ]

        def work(connection: Connection) -> int:
            deleted = 0
            for some in in_chunks(find(connection)):
                old = select(run.c.sink, run.c.name).where(of_run.in_(some), run.c.begun_at < begun_before)
                # A transaction that a task handed over, still undecided, locks its run: skip it.
                free = connection.execute(old.with_for_update(skip_locked=True)).all()
                deleted += connection.execute(delete(run).where(of_run.in_(free))).rowcount if free else 0
            return deleted

        if dry_run:
            return len(self._own.read(find))
        return self._permitted(lambda: self._own.run(work))

    def _permitted(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except ConfigurationError as error:
            cause = error.__cause__
            if not isinstance(cause, exc.SQLAlchemyError) or meaning_of(cause) is not Meaning.PRIVILEGE:
                raise
            step = grants_to_delete(self._engine.url, self._tables.schema)
            raise ConfigurationError(error.what, next_step=step) from error


def before(moment: datetime, seconds: float) -> datetime:
    """The time that many seconds before the moment."""
    return moment - timedelta(seconds=seconds)
